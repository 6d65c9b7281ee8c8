"""The way out: models of a manager become ordinary PyTorch again, in place."""

from __future__ import annotations

import torch
from torch import nn

from chunkmem.assembly.change import require_let_go
from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import StateError
from chunkmem.modules.binding import move_to
from chunkmem.runtime.device import give_back_freed_ram, runtime_mode

_CALL = "manager.unwrap()"
_HOST = torch.device("cpu")


def unwrap(runtime: Runtime) -> None:
    """Make all models of a manager ordinary; see `ChunkManager.unwrap`, which says what is raised, too."""
    if runtime.ranks.stages is not None:
        raise StateError(
            f"{_CALL} of a model over pipeline stages, of which each rank has a part; build the model again, and load "
            "manager.state_dict()"
        )
    runtime.entry_points.require_drained(_CALL)
    runtime.modules.require_values()
    roots = [root for added in runtime.built.added for root in added.roots]
    with runtime.together(_CALL):
        require_let_go(runtime, call=_CALL, why="goes")
        runtime.modules.regions.give_up()
        values = {managed: runtime.modules.copies.ordinary(managed) for managed in runtime.registry.parameters}
    runtime.stop(f"{_CALL} has made its models ordinary PyTorch; train them with an optimizer of torch's")
    runtime.modules.unfit(runtime.hooks)
    with runtime_mode():
        for managed, value in values.items():
            move_to(managed.param, value)
        for root in roots:
            _move_to_host(root)
    runtime.built.tensor_parallel.put_together(roots)
    runtime.free()
    give_back_freed_ram()


def _move_to_host(root: nn.Module) -> None:
    """Move what chunks never had: buffers, and excluded and added parameters."""
    for param in root.parameters():
        if param.device != _HOST:
            move_to(param, param.detach().to(_HOST))
    for module in root.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != _HOST:
                module._buffers[key] = buffer.to(_HOST)
