"""The weights of a model, one tensor in memory after the other, over ranks and pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import StateError
from chunkmem.data.types import Role
from chunkmem.modules.lazy_tensor import LazyTensor

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def weight_stream(runtime: Runtime, root: nn.Module, call: str) -> tuple[Mapping[str, torch.Tensor], NamedTensors]:
    """Return the weights and persistent buffers of a model, in the order of its `state_dict`, tied ones once.

    Args:
        runtime: of the manager.
        root: the model.
        call: of the user, for messages; all ranks make it, and iterate together.

    Returns:
        Their forms, on the meta device, and an iterator of copies on the CPU, which raises a `StateError` when a step
        or a load has changed weights since the call.
    """
    with runtime.together(call):
        runtime.entry_points.ordinary.follow()
        state = runtime.modules.overrides.state_dict(root, lazily=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    here = {name: value for name, value in untied(tensors, root).items() if not value.is_meta}
    stages = runtime.ranks.stages
    own = {
        name: (torch.empty(value.shape, dtype=value.dtype, device="meta"), stages and stages.rank)
        for name, value in here.items()
    }
    found = runtime.ranks.over_stages(own, label="the names of a stage's weights")
    forms = {name: found[name][0] for name in state if name in found}
    weights = [chunk for chunk in runtime.memory.store.chunks.values() if chunk.id.role in (Role.PARAM, Role.MASTER)]
    before = [chunk.version for chunk in weights]

    def values() -> NamedTensors:
        for name in forms:
            with runtime.ranks.telling():
                if before != [chunk.version for chunk in weights]:
                    raise StateError(f"{call}: weights have changed since it was called, before {name}; call it again")
                value = here.get(name)
                if isinstance(value, LazyTensor):
                    value = value.read()
                if stages is not None:
                    value = stages.broadcast_object(value, label=f"sending {name}", source=found[name][1] or 0)
            assert value is not None
            yield name, value

    return forms, values()


def untied(state: Mapping[str, torch.Tensor], root: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Return one name of each tensor: safetensors has no ties. It is one that transformers does not derive.

    Where a state has lazy tensors, the parameters of `root` tell what is tied.
    """
    patterns = tuple(getattr(root, "_tied_weights_keys", None) or ())
    params = {} if root is None else dict(root.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(params.get(name, value)), []).append(name)
    kept = {min(same, key=lambda name: any(re.search(each, name) for each in patterns)) for same in names.values()}
    return {name: value for name, value in state.items() if name in kept}
