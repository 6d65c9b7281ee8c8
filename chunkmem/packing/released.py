"""A model that several ranks build: each of them frees what others hold as soon as its module is attached.

[Note: Holders] Every rank runs every initialisation, so that all draw the same random numbers. When a module is
attached to its parent, each of its parameters gets a *holder*, the rank that was given the fewest bytes so far, and its
storage is emptied on the others. All ranks decide that alike, without a word: what a rank was given never gets less, as
it is up to Python's garbage collector when a module that was thrown away goes. When the model is packed, each parameter
goes from its holder to the rank that owns its group.

What is done with such a parameter meanwhile gives the numbers of one process. All ranks run all operators, in the same
order, so each can tell what the others have:

    writes all of it: normal_(), copy_()  all ranks write it; it is *whole*: they all have the content
    changes it in place: w[0].zero_()     its holder does; others change zeros, to draw as many random numbers. If it
                                          is whole, all do
    anything else: clone(), norm()        its holder sends it to all; it is whole

All ranks have memory for it then: it is *open*, until an operator needs another one, or a module is attached. So
rejection sampling, as in `trunc_normal_`, reads what it has just drawn and costs no exchange. A rank has at any moment,
at most,

    what it holds + its share of the chunks + what is not attached yet
                  + what one operator is given, or one parameter that is on its way.

Memory that a pointer is asked for, as by `numpy()`, could go while it is used; that is refused. Parameters that share
memory with another tensor, hold no floats, or belong to a module that nobody attaches stay whole on every rank.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._prims_common import _is_non_overlapping_and_dense_or_false as is_dense
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.data.errors import StateError
from chunkmem.data.layout import Layout
from chunkmem.modules.binding import dense_stride
from chunkmem.modules.guard import makes_one_like, only_makes_a_view, tensors_of, written_by
from chunkmem.modules.parameter_reads import is_managed, own_parameters
from chunkmem.packing.built import Built
from chunkmem.packing.collect import Collector
from chunkmem.packing.released_memory import Released, ReleasedMemory, Weight, can_go, content_of, is_alone
from chunkmem.ranks.exchange import Shard, hand_over
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import runtime_mode

_OF_SHAPE = ("aten::is_same_size", "aten::is_pinned")
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
)
"""Operators that write every element of their first argument, and read none of it."""
_HAND_OUT_MEMORY = frozenset(
    (
        *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.data_ptr),
        *(torch.Tensor.untyped_storage, torch.Tensor._typed_storage, torch.Tensor.storage),
        torch.Tensor.share_memory_,
    )
)
"""Functions after which memory is used by what is no operator."""
_READ_PAST_OPERATORS = frozenset((torch.Tensor.tolist, torch.Tensor.__deepcopy__))


class ReleasedGuard(TorchDispatchMode):
    """Sees to it that operators get the content that they need of released memory."""

    supports_higher_order_operators = True

    def __init__(self, memory: ReleasedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, as all ranks do, with the content that it needs of what it is given."""
        kwargs = kwargs or {}
        given = self._in((*args, *kwargs.values()))
        if all(each.is_whole for each in given) or makes_one_like(func) or func._schema.name in _OF_SHAPE:
            return func(*args, **kwargs)
        overwritten = self._overwritten(func, args, kwargs)
        # A view touches nothing, but has to stay within its storage.
        is_inside = only_makes_a_view(func) or (len(given) == 1 and self._stays_inside(func, args, kwargs))
        self._memory.open(given, needed=() if is_inside else [each for each in given if each is not overwritten])
        result = func(*args, **kwargs)
        if overwritten is not None:
            overwritten.is_whole = True
        return result

    def _in(self, values: Sequence[Any]) -> list[Released]:
        """Return what arguments of an operator are in, each once."""
        found = {id(each): each for tensor in tensors_of(values) if (each := self._memory.find(tensor)) is not None}
        return list(found.values())

    def _stays_inside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether all that an operator makes is written to released memory."""
        returns = func._schema.returns
        if not func._schema.is_mutable or any(r.alias_info is None or not r.alias_info.is_write for r in returns):
            return False
        return all(self._memory.find(tensor) is not None for tensor in written_by(func, args, kwargs))

    def _overwritten(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Released | None:
        """Return what an operator writes all of without reading any of it."""
        if func._schema.name not in _OVERWRITES or not isinstance(args[0], torch.Tensor):
            return None
        written = args[0]
        target = self._memory.find(written)
        if target is None or written.nbytes != target.nbytes or not is_dense(written.shape, written.stride()):
            return None
        return None if target in self._in((*args[1:], *kwargs.values())) else target


class EscapeGuard(TorchFunctionMode):
    """Sees to functions that use released memory without an operator."""

    def __init__(self, memory: ReleasedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HAND_OUT_MEMORY or func in _READ_PAST_OPERATORS:
            released = self._memory.find(args[0])
            if released is not None and func in _HAND_OUT_MEMORY:
                raise StateError(
                    f"{func.__name__} of {released.weight.name}, {tuple(args[0].shape)}, hands out memory that one "
                    "rank only holds since its module was attached; use a clone(), or set release_after_init to true"
                )
            if released is not None:
                self._memory.open([released], needed=[released])
        return func(*args, **(kwargs or {}))


class BuiltOverRanks(Built):
    """What one rank has of a model that all ranks build: [Note: Holders]."""

    _shards: ShardStore

    def __init__(self, shards: ShardStore, collector: Collector) -> None:
        super().__init__(shards)
        self._collector = collector
        self._memory = ReleasedMemory(shards.ranks.shard.rank, self._fetch)
        self._given_nbytes = [0] * shards.ranks.shard.size
        self._weights: dict[int, Weight] = {}
        self._holders: dict[int, int] = {}
        """Of parameters to be packed that one rank has the values of, by the identity of each."""
        self._decided = hashlib.sha256()
        self._num_exchanged = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        handle = register_module_module_registration_hook(self._on_module)
        try:
            with EscapeGuard(self._memory), ReleasedGuard(self._memory):
                yield
        except BaseException:
            self._memory.end()
            raise
        finally:
            handle.remove()

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        self._memory.close()
        skipped = own_parameters(self._collector.excluded())
        for path, module in child.named_modules(prefix=name):
            # To look a managed parameter up would be to read it.
            if not is_managed(module):
                for key, param in module._parameters.items():
                    if param is not None and id(param) not in skipped:
                        with runtime_mode():
                            self._release(param, f"parameter {path}.{key} in {type(parent).__name__}")

    def _release(self, param: nn.Parameter, name: str) -> None:
        """Give a parameter its holder, once; know it by its longest name."""
        weight = self._weights.get(id(param))
        # An id is used again once its parameter is gone.
        if weight is not None and weight.param() is param:
            weight.name = name
            self._memory.look_again(weight)
            return
        weight = self._weights[id(param)] = Weight(weakref.ref(param), name)
        released = self._memory.find(param)
        if released is not None:  # of a parameter that this one was made of
            weight.holder = released.weight.holder
            if released.parameter() is None:
                released.weight = weight
        elif can_go(param):
            holder = weight.holder = self._given_nbytes.index(min(self._given_nbytes))
            self._given_nbytes[holder] += param.nbytes
            self._memory.release(weight)
        self._decided.update(f"{name} {weight.holder};".encode())

    def _fetch(self, released: Released, storage: torch.UntypedStorage) -> None:
        """Copy the content of a storage from its holder to all ranks.

        Raises:
            ConfigError: another rank does something else; on every rank.
            RankError: a rank did not come.
        """
        ranks, name = self._shards.ranks, released.weight.name
        self._num_exchanged += 1
        ranks.agree("what is computed from weights while the model is built", f"{name}, {self._num_exchanged}")
        with runtime_mode():
            flat = content_of(released, storage)
            sent = flat.cpu()
            shard = Shard(self._num_exchanged, released.weight.holder, sent)
            self._shards.exchange.gather([shard], label=f"building: fetching {name}").wait()
            if sent is not flat:
                flat.copy_(sent)

    def check(self, excluded: Collection[nn.Module]) -> None:
        try:
            self._finish(own_parameters(excluded))
        finally:
            self._memory.end()

    def _finish(self, ordinary: Collection[int]) -> None:
        """Leave no memory released but that of parameters to be packed, which are nobody else's."""
        self._memory.close()
        gc.collect()  # as in `can_go`
        found = [(released, released.parameter()) for released in self._memory.alive()]
        kept = [each for each, param in found if param is None or id(param) in ordinary or not is_alone(param)]
        names = ", ".join(released.weight.name for released in kept)
        self._shards.ranks.agree("what else has the memory of weights when the model is built", names or "nothing")
        for released in kept:
            self._memory.keep(released)
        strides = {}
        for released in self._memory.alive():
            param = released.parameter()
            assert param is not None
            weight = released.weight
            self._holders[id(param)], strides[id(param)] = weight.holder, dense_stride(param)
            self._decided.update(f"{weight.name} of {weight.holder};".encode())
        self.strides = strides

    def agree(self, layout: Layout) -> None:
        super().agree(layout)
        self._shards.ranks.agree("the order in which modules are built", self._decided.hexdigest()[:16])

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        owner, rank = self._shards.owner(group), self._shards.ranks.shard.rank
        holder = self._holders.get(id(param), owner)
        self._num_exchanged += 1
        if holder == owner or rank not in (holder, owner):
            return param
        with runtime_mode():
            if rank == holder:
                flat = param.detach().reshape(-1).cpu()
            else:
                flat = torch.empty(param.numel(), dtype=param.dtype, device="cpu")
            shard = Shard(self._num_exchanged, holder, flat)
            hand_over(self._shards.ranks.shard, shard, owner, label=f"packing: {name}").wait()
            return flat.view(param.shape)
