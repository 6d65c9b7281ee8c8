"""Train models that do not fit: parameters, gradients and optimizer states in chunks that move between tiers.

Names are loaded on first use, so that ``import chunkmem`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from chunkmem.version import __version__

if TYPE_CHECKING:
    from chunkmem.activations.recompute import checkpoint, checkpoint_sequential
    from chunkmem.config import Config
    from chunkmem.contrib.elastic.splits import SplitSampler
    from chunkmem.contrib.frozen_cache.cache import FrozenCache
    from chunkmem.data.errors import (
        CapacityError,
        CheckpointError,
        ChunkmemError,
        ConfigError,
        LayoutError,
        PlanError,
        RankError,
        StateError,
        TierIOError,
        TraceError,
    )
    from chunkmem.data.memory import MemoryReport
    from chunkmem.engine import initialize_engine
    from chunkmem.freezing.schedule import FreezeSchedule
    from chunkmem.manager import ChunkManager
    from chunkmem.modules.tiled import TiledLinear
    from chunkmem.optim.adam import Adam, AdamW
    from chunkmem.optim.any_class import Optimizer
    from chunkmem.optim.ema import EMA
    from chunkmem.optim.sgd import SGD
    from chunkmem.optim.tiles import tile_optimizer_state, untile_optimizer_state
    from chunkmem.ranks.methods import ExchangeMethod

__all__ = [
    "EMA",
    "SGD",
    "Adam",
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "ChunkManager",
    "ChunkmemError",
    "Config",
    "ConfigError",
    "ExchangeMethod",
    "FreezeSchedule",
    "FrozenCache",
    "LayoutError",
    "MemoryReport",
    "Optimizer",
    "PlanError",
    "RankError",
    "SplitSampler",
    "StateError",
    "TierIOError",
    "TiledLinear",
    "TraceError",
    "__version__",
    "checkpoint",
    "checkpoint_sequential",
    "initialize_engine",
    "tile_optimizer_state",
    "untile_optimizer_state",
]

_HOMES = MappingProxyType(
    {
        "Adam": "chunkmem.optim.adam",
        "AdamW": "chunkmem.optim.adam",
        "ChunkManager": "chunkmem.manager",
        "Config": "chunkmem.config",
        "EMA": "chunkmem.optim.ema",
        "ExchangeMethod": "chunkmem.ranks.methods",
        "FreezeSchedule": "chunkmem.freezing.schedule",
        "FrozenCache": "chunkmem.contrib.frozen_cache.cache",
        "MemoryReport": "chunkmem.data.memory",
        "Optimizer": "chunkmem.optim.any_class",
        "SGD": "chunkmem.optim.sgd",
        "SplitSampler": "chunkmem.contrib.elastic.splits",
        "checkpoint": "chunkmem.activations.recompute",
        "checkpoint_sequential": "chunkmem.activations.recompute",
        "TiledLinear": "chunkmem.modules.tiled",
        "initialize_engine": "chunkmem.engine",
        "tile_optimizer_state": "chunkmem.optim.tiles",
        "untile_optimizer_state": "chunkmem.optim.tiles",
    }
)
"""Where each name lives; what is not listed is in `chunkmem.data.errors`."""


def __getattr__(name: str) -> object:
    if name == "nn":  # not in `__all__`: `import *` would replace torch's
        return import_module("chunkmem.nn")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "chunkmem.data.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
