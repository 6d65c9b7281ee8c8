"""Modules for models: `TiledLinear`."""

from __future__ import annotations

from chunkmem.modules.tiled import TiledLinear

__all__ = ["TiledLinear"]
