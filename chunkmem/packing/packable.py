"""Which parameters of a model are packed, and why some cannot be."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Set

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from chunkmem.data.errors import LayoutError, StateError
from chunkmem.modules.binding import serves_itself
from chunkmem.modules.parameter_reads import is_managed, own_parameters
from chunkmem.packing.built import Built
from chunkmem.runtime.values import storage_id

_LAZY = (
    "is lazy, its shape is not known yet; build the model outside manager.init(), run one batch through it first, then "
    "call manager.wrap(model)"
)
_OF_PYTHON = 1
"""References to a storage that has been looked at: torch keeps its Python object."""


def named_parameters_of(
    root: nn.Module, *, excluded: Iterable[nn.Module], built: Built, known: Collection[int]
) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of the distinct parameters under `root` that are to be packed, checked.

    Args:
        root: a model.
        excluded: modules whose parameters stay ordinary.
        built: where values are.
        known: identities of parameters that have a slot already, or get one as another model's.

    Raises:
        LayoutError: a parameter cannot be packed (lazy, meta, not a plain tensor, in a chunk of another manager), or a
            module is scripted by torch.jit, or lazy.
        StateError: a module under `root` is managed already.
    """
    skipped = own_parameters(excluded).union(known)
    for name, module in root.named_modules():
        if is_managed(module):
            raise StateError(
                f"module {name or type(root).__name__} is managed already; a module can be built in one "
                "manager.init() or given to one manager.wrap() only"
            )
        if isinstance(module, RecursiveScriptModule):
            raise LayoutError(
                f"module {name or type(root).__name__} is scripted by torch.jit, so nothing can be called around it: "
                "train the module that it was made of, which torch.compile makes as fast, and script it afterwards"
            )
    for name, buffer in root.named_buffers():
        if is_lazy(buffer):
            raise LayoutError(f"buffer {name} {_LAZY}")
    found = [(name, param) for name, param in root.named_parameters() if id(param) not in skipped]
    for name, param in found:
        if serves_itself(param) or not built.is_released(param):
            _check(name, param, built)
    return found


def _check(name: str, param: nn.Parameter, built: Built) -> None:
    if serves_itself(param):
        raise LayoutError(
            f"parameter {name} {tuple(param.shape)} is in a chunk of another manager; tie parameters within one "
            "manager only"
        )
    if is_lazy(param):
        raise LayoutError(f"parameter {name} {_LAZY}")
    if param.is_meta and not built.comes_later(param):
        raise LayoutError(
            f"parameter {name} {tuple(param.shape)} is on the meta device and has no values; materialise it first "
            "(module.to_empty(device='cpu'), then initialise it)"
        )
    plain = type(param) is nn.Parameter or type(param.data) is torch.Tensor
    if not plain or param.layout is not torch.strided or param.is_quantized:
        raise LayoutError(
            f"parameter {name} is a {type(param).__name__} of {param.layout}; only plain dense tensors can be packed. "
            "Build its module inside manager.exclude(); a quantised model: load it in bf16, or in bitsandbytes' 4 bits"
        )


def check_separate(roots: Iterable[nn.Module], *, packed: Set[int]) -> None:
    """Check that no parameter to be packed shares memory with another tensor of the models: chunks cannot keep that up.

    `packed` holds the identities of the parameters to be packed.

    Raises:
        LayoutError: two of them do.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for root in roots:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if storage_id(tensor) and tensor.numel() and not serves_itself(tensor):
                found.setdefault(id(tensor), (name, tensor))
    remade = list(_made_by_hooks(roots))
    farthest: tuple[str, torch.Tensor] | None = None
    for name, tensor in sorted(found.values(), key=lambda pair: (str(pair[1].device), pair[1].data_ptr())):
        if farthest is not None and farthest[1].device == tensor.device and tensor.data_ptr() < _end(farthest[1]):
            other_name, other = farthest
            if not packed.isdisjoint((id(other), id(tensor))) and _overlap(other, tensor):
                raise LayoutError(
                    f"{other_name} and {name} share memory, which chunks cannot keep up; register one nn.Parameter "
                    "under both names to tie them, or clone one of them"
                )
            if _end(tensor) <= _end(other):
                continue
        farthest = name, tensor
    _check_unshared([*found.values(), *remade], packed=packed)


def _made_by_hooks(roots: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield attributes that a hook makes before each forward, as torch.nn.utils.spectral_norm and pruning do."""
    for root in roots:
        for path, module in root.named_modules():
            for hook in module._forward_pre_hooks.values():
                name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
                tensor = vars(module).get(name) if isinstance(name, str) else None
                if isinstance(tensor, torch.Tensor):
                    yield f"{path}.{name}", tensor


def _check_unshared(found: Iterable[tuple[str, torch.Tensor]], *, packed: Set[int]) -> None:
    """Check that no tensor but those `found` has the memory of a parameter to be packed: it would keep the old values.

    Raises:
        LayoutError: one has.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in found:
        by_storage.setdefault(storage_id(tensor), []).append((name, tensor))
    for memory, sharers in by_storage.items():
        mine = [name for name, tensor in sharers if id(tensor) in packed]
        if mine and _is_used_by_more(memory, than=len(sharers)):
            kind = next(type(tensor) for name, tensor in sharers if name == mine[0])
            if kind is not nn.Parameter:
                raise LayoutError(
                    f"parameter {mine[0]} is a {kind.__name__} of {kind.__module__.partition('.')[0]}, which keeps its "
                    "memory under a second name, so it cannot move; load the model in bf16, or, with bitsandbytes, in "
                    "4 bits in place of 8"
                )
            raise LayoutError(
                f"the memory of parameter {mine[0]} is in use by another tensor (a view, .data, or a state_dict() that "
                "is alive), which would keep the values from before packing; delete it, or make it a clone(), before "
                "manager.wrap() or the end of manager.init()"
            )


def _is_used_by_more(memory: int, *, than: int) -> bool:
    """Tell whether more tensors have a storage; those in reference cycles that nobody has any more do not count."""
    if torch._C._storage_Use_Count(memory) <= than + _OF_PYTHON:
        return False
    gc.collect()
    return torch._C._storage_Use_Count(memory) > than + _OF_PYTHON


def _end(tensor: torch.Tensor) -> int:
    """Return the address after a tensor's last element."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors whose extents meet share an element; columns of one matrix do not."""
    if first.dtype != second.dtype:
        return True
    start = min(first.data_ptr(), second.data_ptr())
    itemsize = first.element_size()
    mark = torch.zeros((max(_end(first), _end(second)) - start) // itemsize, dtype=torch.bool, device="cpu")
    places = [mark.as_strided(t.shape, t.stride(), (t.data_ptr() - start) // itemsize) for t in (first, second)]
    places[0].fill_(True)
    return bool(places[1].any())
