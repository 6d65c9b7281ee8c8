"""Computing in less than float32: which modules do, and what their parameters are kept in.

Each module's own forward computes in one dtype. That is the low one, bf16 or fp16, but float32 if the module owns

- a floating buffer of another dtype (batch statistics, a table of positions, a mask), or anything complex or float64:
  whatever meets it is promoted to float32 at least. If all its buffers are of the other low dtype, it computes in that;
- a parameter that such a module owns as well (an embedding that scales by a buffer, tied to the head): a parameter has
  one dtype, so all its owners compute in it.

The parameters it owns are kept in float32. Its children follow the same rule by themselves: tensors that go from a
module to another are cast to the dtype of the callee, and what comes back to that of the caller.
See `chunkmem.modules.dtype_casts`.
A module that holds no floats at all (an activation, a dropout) computes in what it is given. One that has excluded
modules in it, and no others with parameters, computes as they do. The caller of a model is in float32.

Updates of bf16 and fp16 weights go to a float32 copy that they are rounded from, or small ones would be lost. It is
made while packing, with the exact values of what was built, in whatever dtype that was. What is frozen then needs none
if it was built in the dtype it computes in; it gets one, just as exact, before its first update. What was built in
another dtype has one all the same: nothing else has its values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from chunkmem.data.errors import LayoutError
from chunkmem.data.layout import MasterCopy
from chunkmem.modules.parameter_reads import own_parameters

_LOW = (torch.bfloat16, torch.float16)
_CONVERTIBLE = (torch.float32, *_LOW)
"""A parameter built in one of them can compute in another."""


@dataclass(frozen=True)
class Precision:
    """What modules compute in, and the dtypes of their parameters in chunks."""

    modules: Mapping[nn.Module, torch.dtype] = field(default_factory=dict)
    """Without those that hold no floats."""
    params: Mapping[int, torch.dtype] = field(default_factory=dict)
    """By identity; a parameter that is not here computes in the dtype it was built in."""
    masters: Mapping[int, MasterCopy] = field(default_factory=dict)
    """By identity of a parameter, those that there are or may be."""

    def of(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter computes in."""
        return self.params.get(id(param), param.dtype)


AS_BUILT = Precision()
"""Every parameter computes in the dtype it was built in, and so do modules."""


def precision_of(
    roots: Sequence[nn.Module],
    dtype: torch.dtype,
    *,
    master_weights: bool = True,
    excluded: Collection[nn.Module] = (),
    packed: Collection[int] = (),
) -> Precision:
    """Return what the modules of models compute in where `dtype` is the low one.

    Args:
        roots: the models.
        dtype: torch.bfloat16 or torch.float16; torch.float32 leaves all as it was built.
        master_weights: parameters in the low dtype have float32 master copies.
        excluded: modules whose parameters stay as built: they compute in float32, or in a low dtype that all of their
            own have.
        packed: identities of parameters that are in chunks already, and keep the dtype they have there.

    Raises:
        LayoutError: a module computes in another dtype than a parameter that is in a chunk already, or excluded.
    """
    if dtype is torch.float32:
        return AS_BUILT
    skipped = set(excluded)
    names = {module: name or type(module).__name__ for root in roots for name, module in root.named_modules()}
    homes = _homes_of(names, dtype, skipped, packed)
    ordinary = own_parameters(skipped)
    fixed = ordinary.union(packed)
    params: dict[int, torch.dtype] = {}
    masters: dict[int, MasterCopy] = {}
    for module, name in names.items():
        for key, param in module._parameters.items():
            if param is None or module in skipped or param.dtype not in _CONVERTIBLE:
                continue
            if id(param) in fixed and param.dtype is not homes[module]:
                raise LayoutError(
                    f"parameter {key} of module {name} stays in {param.dtype}, as it is in a chunk already or "
                    f"excluded, and {type(module).__name__} computes in {homes[module]}; convert the parameter, or "
                    "build all models that hold it inside one manager.init()"
                )
            params[id(param)] = homes[module]
            if master_weights and homes[module] in _LOW:
                masters[id(param)] = _master_of(param, homes[module])
    return Precision(
        {
            module: home
            for module, home in homes.items()
            if any(map(_is_float, chain(module.parameters(), module.buffers())))
        },
        {key: home for key, home in params.items() if key not in ordinary},
        masters,
    )


def _master_of(param: nn.Parameter, dtype: torch.dtype) -> MasterCopy:
    is_exact = param.dtype is dtype
    return MasterCopy.WHEN_TRAINED if is_exact and not param.requires_grad else MasterCopy.PACKED


def _homes_of(
    modules: Iterable[nn.Module], dtype: torch.dtype, skipped: Collection[nn.Module], packed: Collection[int]
) -> dict[nn.Module, torch.dtype]:
    """Return what each module computes in: what it would by itself, unless owners of one parameter differ."""
    homes = {
        module: _as_built(module, skipped) if _is_as_built(module, skipped) else _by_itself(module, dtype, packed)
        for module in modules
    }
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in homes:
        for param in _own_parameters(module):
            owners[id(param)].append(module)
    waiting = [each for shared in owners.values() if len({homes[one] for one in shared}) > 1 for each in shared]
    kept: set[nn.Module] = set()
    while waiting:
        module = waiting.pop()
        kept.add(module)
        waiting += [owner for param in _own_parameters(module) for owner in owners[id(param)] if owner not in kept]
    return homes | dict.fromkeys(kept, torch.float32)


def _by_itself(module: nn.Module, dtype: torch.dtype, packed: Collection[int]) -> torch.dtype:
    own = [param for param in _own_parameters(module) if _is_float(param)]
    if any(p.dtype not in _CONVERTIBLE or (id(p) in packed and p.dtype is torch.float32) for p in own):
        return torch.float32
    return _common_low_dtype(module.buffers(recurse=False), default=dtype)


def _is_as_built(module: nn.Module, skipped: Collection[nn.Module]) -> bool:
    """Tell whether a module stays in the dtype that it was built in: it is excluded, or is around nothing else.

    One that has no tensors of its own may read those of modules in it (`F.linear(x, self.layer.weight)`).
    """
    if module in skipped:
        return True
    if next(module.buffers(recurse=False), None) is not None:
        return False
    owners = [below for below in module.modules() if any(True for _ in below.parameters(recurse=False))]
    return bool(owners) and all(below in skipped for below in owners)


def _as_built(module: nn.Module, skipped: Collection[nn.Module]) -> torch.dtype:
    is_whole = module not in skipped
    own = [*module.parameters(recurse=is_whole), *module.buffers(recurse=is_whole)]
    return _common_low_dtype(own, default=torch.float32)


def _common_low_dtype(tensors: Iterable[torch.Tensor], *, default: torch.dtype) -> torch.dtype:
    """Return the low dtype that all floats among tensors have, float32 if they have another, `default` without any."""
    dtypes = {tensor.dtype for tensor in tensors if _is_float(tensor)}
    if not dtypes:
        return default
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_LOW) else torch.float32


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    if isinstance(module, nn.MultiheadAttention):  # never calls its projection, only reads the weights
        yield from module.out_proj.parameters(recurse=False)


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
