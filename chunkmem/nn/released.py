"""A model that several ranks build: each of them lets go of what others hold as soon as its module is attached.

[Note: Holders] Every rank runs every initialisation, so that all draw the same random numbers. A module that is
attached to its parent is final: each of its parameters gets a *holder*, the rank that was given the fewest bytes so
far, and the others free the memory at once. All ranks decide that alike, without a word: what a rank was given never
gets less, as it is up to Python's garbage collector when a module that was thrown away goes. When the model is packed,
each parameter goes from its holder to the rank that owns its group. So a rank has at any moment, at most,

    what it holds + its share of the chunks + what is not final yet + one parameter that is on its way.

What was released can be neither written nor read until the model is packed: on the holder neither, or one rank would go
on where the others stop. Parameters that share memory with another tensor, hold no floats, or belong to a module that
nobody attaches stay whole on every rank.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.comm.exchange import Shard
from chunkmem.comm.methods import PointToPoint
from chunkmem.errors import StateError
from chunkmem.layout.pack import SLAB_FLOOR_NBYTES
from chunkmem.layout.spec import Layout, digest
from chunkmem.nn.access import ParameterReads
from chunkmem.nn.binding import blank, dense_stride
from chunkmem.nn.built import Built
from chunkmem.nn.collect import Collector
from chunkmem.nn.guard import only_makes_a_view
from chunkmem.nn.sharing import Sharing
from chunkmem.nn.values import storage_id
from chunkmem.runtime.device import give_back_freed_ram, runtime_mode

_NEXT = "initialise a module before it is attached to its parent, or set release_after_init to true"
_SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size", "is_pinned"),
    )
)
"""Operators that use no value of the tensor they are given."""
_ALONE = 2
"""Uses of a storage that one tensor has: the tensor, and who counts."""


@dataclass(eq=False, slots=True)
class _Final:
    """A parameter whose module was attached."""

    param: weakref.ref[nn.Parameter]
    name: str
    """As far as it is known."""
    holder: int | None = None
    """None: every rank has the values."""
    stride: tuple[int, ...] = ()
    place: tuple[object, ...] = ()
    """Where the parameter stood afterwards: in its own memory, or on a placeholder."""


class BuiltOverRanks(Built):
    """What one rank has of a model that all ranks build: [Note: Holders]."""

    def __init__(self, sharing: Sharing, collector: Collector) -> None:
        self._sharing = sharing
        self._collector = collector
        self._exchange = PointToPoint(sharing.ranks)
        self._given_nbytes = [0] * sharing.ranks.size
        self._finals: dict[int, _Final] = {}
        self._by_storage: dict[int, _Final] = {}
        self._decided = hashlib.sha256()
        self._freed_nbytes = 0
        self._num_taken = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        handle = register_module_module_registration_hook(self._on_module)
        try:
            with _ReleasedGuard(self._released_in):
                yield
        finally:
            handle.remove()

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        # Attention writes to the bias of its child when it has attached it; they are final together.
        if child is None or isinstance(parent, nn.MultiheadAttention):
            return
        excluded = self._collector.excluded()
        skipped = {id(param) for module in excluded for param in module.parameters(recurse=False)}
        for path, module in child.named_modules(prefix=name):
            # To look a managed parameter up would be to read it.
            if not isinstance(module._parameters, ParameterReads):
                for key, param in module._parameters.items():
                    if param is not None and id(param) not in skipped:
                        self._finish(param, f"parameter {path}.{key} in {type(parent).__name__}")

    def _finish(self, param: nn.Parameter, name: str) -> None:
        """Give a parameter its holder, once; know it by its longest name."""
        known = self._find(param)
        if known is not None:
            known.name = name
            return
        final = self._finals[id(param)] = _Final(weakref.ref(param), name)
        if _can_go(param):
            holder = final.holder = self._given_nbytes.index(min(self._given_nbytes))
            self._given_nbytes[holder] += param.nbytes
            final.stride = dense_stride(param)
            if holder != self._sharing.ranks.rank:
                self._free(param)
            final.place = _place(param)
            self._by_storage[param.untyped_storage()._cdata] = final
        self._decided.update(f"{name} {final.holder};".encode())

    def _free(self, param: nn.Parameter) -> None:
        with runtime_mode():
            param.data = blank(param.dtype, param.device).expand(param.shape)
        self._freed_nbytes += param.nbytes
        if self._freed_nbytes >= SLAB_FLOOR_NBYTES:
            give_back_freed_ram()
            self._freed_nbytes = 0

    def _find(self, param: torch.Tensor) -> _Final | None:
        known = self._finals.get(id(param))
        # An id is used again once its parameter is gone.
        return known if known is not None and known.param() is param else None

    def _released_in(self, memory: int) -> str | None:
        """Return the name of the released parameter that lives in a storage."""
        final = self._by_storage.get(memory)
        param = None if final is None else final.param()
        return None if final is None or param is None or storage_id(param) != memory else final.name

    def check(self, excluded: Collection[nn.Module]) -> None:
        ordinary = {id(param) for module in excluded for param in module.parameters(recurse=False)}
        for final in self._finals.values():
            param = final.param()
            if final.holder is None or param is None:
                continue
            if _place(param) != final.place:
                raise StateError(f"{final.name} was given other memory after its module had been attached; {_NEXT}")
            if id(param) in ordinary:
                raise StateError(
                    f"{final.name} belongs to a module that is excluded as well, and one rank only has its values; "
                    "build the module that is excluded first, or set release_after_init to true"
                )

    def agree(self, layout: Layout) -> None:
        ranks = self._sharing.ranks
        ranks.agree("the layout of the chunks", digest([layout]))
        ranks.agree("the order in which modules are built", self._decided.hexdigest()[:16])

    def largest(self, value: int) -> int:
        return int(self._sharing.ranks.max_over((float(value),), label="packing: comparing what is free")[0])

    def owns(self, group: int) -> bool:
        return self._sharing.owns(group)

    def is_released(self, param: nn.Parameter) -> bool:
        final = self._find(param)
        return final is not None and final.holder is not None

    def stride(self, param: nn.Parameter) -> tuple[int, ...]:
        final = self._find(param)
        return dense_stride(param) if final is None or final.holder is None else final.stride

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        final, owner, rank = self._find(param), self._sharing.owner(group), self._sharing.ranks.rank
        self._num_taken += 1
        if final is None or final.holder is None or final.holder == owner or rank not in (final.holder, owner):
            return param
        with runtime_mode():
            if rank == final.holder:
                flat = param.detach().reshape(-1).cpu()
            else:
                flat = torch.empty(param.numel(), dtype=param.dtype, device="cpu")
            shard = Shard(self._num_taken, final.holder, flat)
            self._exchange.hand_over(shard, owner, label=f"packing: {name}").wait()
            return flat.view(param.shape)


class _ReleasedGuard(TorchDispatchMode):
    """Raises when an operator writes or reads a released parameter; views and shapes are free."""

    supports_higher_order_operators = True

    def __init__(self, released_in: Callable[[int], str | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._released_in = released_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not only_makes_a_view(func) and func._schema.name not in _SHAPE_ONLY:
            for value in (*args, *(kwargs or {}).values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    memory = storage_id(tensor) if isinstance(tensor, torch.Tensor) else None
                    name = None if memory is None else self._released_in(memory)
                    if name is not None:
                        raise StateError(
                            f"operator {func} uses {name}, {tuple(tensor.shape)}, which one rank only holds since its "
                            f"module was attached; {_NEXT}"
                        )
        return func(*args, **(kwargs or {}))


def _can_go(param: nn.Parameter) -> bool:
    """Tell, alike on all ranks, whether others can do without the values of a parameter until they are exchanged."""
    # An exact type: a lazy one, or one of a tensor subclass, is refused or kept as a whole.
    if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor or storage_id(param) is None:
        return False
    if not param.is_floating_point() or param.numel() == 0 or param.untyped_storage().nbytes() != param.nbytes:
        return False
    if _num_uses(param) > _ALONE:
        gc.collect()  # when garbage goes may differ between ranks
    return _num_uses(param) == _ALONE


def _num_uses(param: nn.Parameter) -> int:
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata))


def _place(param: nn.Parameter) -> tuple[object, ...]:
    return (storage_id(param), param.storage_offset(), param.shape, param.stride())
