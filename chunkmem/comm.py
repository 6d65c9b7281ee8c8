"""Exchange of chunks over a process group. One process so far."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from chunkmem.errors import ConfigError


def require_one_process(process_group: Any) -> None:
    """Refuse to run in a group of several processes.

    Raises:
        ConfigError: the group, or the default one, has more than one rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialised")
        return
    world = dist.get_world_size(process_group)
    if world > 1:
        raise ConfigError(f"a process group of {world} ranks: training over ranks is not available in this version")
