"""Modules for models, of which `TiledLinear` is public; what fits models to chunks is not."""

from chunkmem.nn.tiled import TiledLinear

__all__ = ["TiledLinear"]
