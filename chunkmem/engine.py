"""PatrickStar's entry point: a model and its optimizer behind one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from chunkmem.config import Config
from chunkmem.data.errors import ConfigError, StateError
from chunkmem.manager import ChunkManager
from chunkmem.optim.adam import Adam, AdamW
from chunkmem.runtime.device import ComputeDevice


class Engine(nn.Module):
    """A module that calls the model it holds, with a backward that scales the loss in fp16."""

    def __init__(self, manager: ChunkManager, module: nn.Module) -> None:
        super().__init__()
        self.manager = manager
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model does."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See `ChunkManager.backward`."""
        self.manager.backward(loss, **kwargs)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """See `ChunkManager.state_dict`; names are those of the model."""
        return self.manager.state_dict(self.module)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """See `ChunkManager.load_state_dict`.

        Raises:
            StateError: `assign`: parameters stay those of chunks.
        """
        if assign:
            raise StateError("engine.load_state_dict(assign=True): parameters stay in their chunks; leave assign out")
        self.manager.load_state_dict(state_dict, self.module, strict)


def initialize_engine(
    model_func: Callable[[], nn.Module], local_rank: int, config: Config | Mapping[str, Any] | str | os.PathLike[str]
) -> tuple[Engine, Adam]:
    """Build a model in the chunk context and the optimizer its configuration names.

    Args:
        model_func: makes the model; an `nn.Module` that exists is wrapped instead.
        local_rank: index of this process's accelerator; without one, of this process on its machine.
        config: a `Config`, a dict, or the path of a JSON file.

    Raises:
        ConfigError: the configuration is not valid, or there is no such accelerator.
    """
    if not isinstance(config, Config):
        config = Config.from_dict(config) if isinstance(config, Mapping) else Config.from_json(config)
    if not isinstance(local_rank, int) or local_rank < 0:
        raise ConfigError(f"local_rank is {local_rank!r}; it has to be the index of an accelerator, from 0")
    if not callable(model_func):
        raise ConfigError(f"model_func is a {type(model_func).__name__}; it has to be a function that makes the model")
    has_accelerator = ComputeDevice.default().is_accelerator
    manager = ChunkManager(config, device_index=local_rank if has_accelerator else None)
    if not has_accelerator and local_rank >= (num_local := manager.runtime.ranks.num_local):
        manager.close()
        raise ConfigError(f"local_rank is {local_rank}, and {num_local} ranks train on this machine; count from 0")
    if isinstance(model_func, nn.Module):
        module = manager.wrap(model_func)
    else:
        with manager.init():
            module = model_func()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model_func returned a {type(module).__name__}; it has to make a torch.nn.Module")
    kind = AdamW if config.optimizer.type == "AdamW" else Adam
    return Engine(manager, module), kind(module.parameters(), manager=manager)
