"""Modules for models: `TiledLinear`."""

from chunkmem.modules.tiled import TiledLinear as TiledLinear
