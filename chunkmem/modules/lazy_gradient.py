"""A gradient in its chunk as a tensor: what `.grad` of a managed parameter is once it has landed.

Run operators on lazy gradients: on the slots, where they are.

What an operator does to its arguments is in its schema: it makes a view, it writes in place, or it returns something
new. Replicas of a chunk stay alike: an in-place operator runs on one, and the others are copies of what it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from chunkmem.activations.saved_tensors import in_backward
from chunkmem.data.errors import StateError
from chunkmem.modules.guard import makes_one_like, only_makes_a_view, tensors_of, written_by
from chunkmem.modules.slot_tensor import SlotTensor
from chunkmem.modules.tensor_functions import listed, one_by_one
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import storage_id

_aten = torch.ops.aten
_SCALINGS = frozenset({"aten::mul_", "aten::div_", "aten::_foreach_mul_", "aten::_foreach_div_"})
"""By 1 they change nothing, as when a norm is below what it is clipped to."""
_NORMS = frozenset({"aten::norm", "aten::linalg_vector_norm", "aten::_foreach_norm"})
"""Their results are small: a gradient on HOST is not copied for them."""
_ZEROING = frozenset({"aten::zero_", "aten::_foreach_zero_"})
_OVERWRITING = frozenset({"aten::copy_", "aten::_foreach_copy_", "aten::fill_"})
"""They do not read what they write to."""


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of which some arguments, by themselves or in lists, are lazy gradients.

    Raises:
        StateError: a gradient that it needs has no values, or it would change what a lazy gradient is a view of.
    """
    if torch.is_inference_mode_enabled():  # below autograd, nobody has taken composite operators apart
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func in (_aten.detach_.default, _aten.requires_grad_.default):
        return args[0]
    if torch.Tag.inplace_view in func.tags:
        _refuse(func, args)
    if makes_one_like(func):
        return _make_like(func, args, kwargs)
    if only_makes_a_view(func):
        return _make_view(func, args, kwargs)
    call = _Call(func, args, kwargs)
    return call.write() if call.written else call.read()


class _Call:
    """One call of an operator that needs values."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.name: str = func._schema.name
        self.args = args
        self.kwargs = kwargs
        self.lazies = _lazies_in(args, kwargs)
        self.written = list(written_by(func, args, kwargs))
        self.listed: Sequence[torch.Tensor] = listed(self.name, args)
        """What it is called for in each place of its lists."""

    def read(self) -> Any:
        """Run it; nothing is written to."""
        device = self.lazies[0].device
        if self.name in _NORMS:
            self._require_all_gradients()
            if len(self.args) + len(self.kwargs) <= 2 and self._is_over_ranks():
                return self._norm_over_ranks()
        with ExitStack() as staying:
            found = self._locate(staying)
            if found is None:
                return self._one_by_one()
            slots = {key: slot for key, (slot, *_) in found.items()}
            with runtime_mode():
                if self.name in _NORMS:
                    norms = self._run(slots, slots[id(self.lazies[0])].device)
                    return tree_map_only(torch.Tensor, lambda norm: norm.to(device), norms)
                return _without_memory_of(slots.values(), self._run(slots, device))

    def write(self) -> Any:
        """Run it and let its changes reach every replica."""
        into = [tensor for tensor in self.written if isinstance(tensor, SlotTensor)]
        if into and self.name in _ZEROING:
            return self._zero()
        if into and self.name in _SCALINGS and not self.kwargs and (factor := _number(self.args[1])) is not None:
            if self._is_over_ranks():
                return self._scale_over_ranks(factor)
            if factor == 1:
                for lazy in into:
                    lazy.slots(writing=False)
                return self._result()
        for tensor in self.written:  # of a parameter's own memory, as an optimizer of torch writes to
            self.lazies[0].source.owner.require_present(tensor)
        with ExitStack() as staying:
            found = self._locate(staying, into)
            if found is None:
                self._one_by_one()
                return self._result()
            first = self.lazies[0]
            slots = {key: slot for key, (slot, *_) in found.items()}
            with runtime_mode():
                self._run(slots, slots[id(first)].device if into else first.device)
                for slot, *others in found.values():
                    for other in others:
                        other.copy_(slot)
        return self._result()

    def _locate(self, staying: ExitStack, into: Sequence[SlotTensor] = ()) -> dict[int, list[torch.Tensor]] | None:
        """Return where gradients are, by identity; of those that are written `into`, all replicas, the newest first.

        They stay there until `staying` is closed. None: of lists, each place is to be served on its own, as bringing
        one from DISK may move others there, or they are on several devices.
        """
        if len(self.listed) > 1 and any(lazy.source.owner.may_page_out for lazy in self.lazies):
            return None
        found: dict[int, list[torch.Tensor]] = {}
        written = set(map(id, into))
        for lazy in (*into, *self.lazies):
            if id(lazy) not in found:
                is_written = id(lazy) in written
                overwriting = is_written and self.name in _OVERWRITING
                found[id(lazy)] = lazy.slots(writing=is_written, overwriting=overwriting)
                staying.enter_context(lazy.source.owner.staying(lazy.source))
        devices = {found[id(each)][0].device if id(each) in found else each.device for each in self.listed}
        return found if len(devices) <= 1 else None

    def _one_by_one(self) -> list[Any]:
        """Make the call for what its lists have in each place on its own."""

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run_operator(self.func, args, kwargs) if _lazies_in(args, kwargs) else self.func(*args, **kwargs)

        return one_by_one(run, len(self.listed), self.args, self.kwargs)

    def _require_all_gradients(self) -> None:
        """Raise a `StateError` for a norm of gradients, which is to be part of a total, where other ranks have others.

        The total would lack those of other pipeline stages, or other parts of the same, and each rank have its own.
        """
        source = self.lazies[0].source
        names = (argument.name for argument in self.func._schema.arguments)
        is_by_dim = (dict(zip(names, self.args, strict=False)) | self.kwargs).get("dim")
        if source.owner.own_share and not is_by_dim:
            raise StateError(
                f"a norm of the gradient of {source.name}: this rank has those of {source.owner.own_share} alone, "
                "which torch.nn.utils.clip_grad_norm_ would clip by their own norm; call "
                "optimizer.clip_grad_norm_(max_norm) on all ranks, or set gradient_clipping. That of one gradient is "
                "p.grad.clone().norm()"
            )

    def _is_over_ranks(self) -> bool:
        """Tell whether all lazy gradients of the call are whole, and stand for means over ranks."""
        return all(lazy.source.owner.shows_means and lazy.is_all_of(lazy.source) for lazy in self.lazies)

    def _norm_over_ranks(self) -> Any:
        """Return norms of means; see `SharedGradients`."""
        order = float(self.args[1] if len(self.args) > 1 else self.kwargs.get("ord", 2))
        # First those that all ranks form: they make means of the gradients of ordinary parameters, too.
        known = {id(lazy): lazy.source.owner.norm_over_ranks(lazy.source, order) for lazy in self.lazies}

        def norm(one: torch.Tensor) -> Any:
            if id(one) not in known:
                return torch.linalg.vector_norm(one, order)
            return torch.full((), known[id(one)], dtype=one.dtype, device=one.device)

        with runtime_mode():
            return tree_map_only(torch.Tensor, norm, self.args[0])

    def _scale_over_ranks(self, factor: float) -> Any:
        """Multiply or divide means where they are; by 1 nothing changes."""
        if factor != 1.0:
            owner = self.lazies[0].source.owner
            found = owner.slots_over_ranks([lazy.source for lazy in self.lazies], factor)
            slots = {id(lazy): each for lazy, each in zip(self.lazies, found, strict=True)}
            with runtime_mode():
                for one in self.written:
                    for slot in slots.get(id(one), [one]):
                        by = self.args[1].to(slot.device) if isinstance(self.args[1], torch.Tensor) else self.args[1]
                        self.func([slot] if self.listed else slot, by)
        return self._result()

    def _zero(self) -> Any:
        for tensor in self.written:
            if not isinstance(tensor, SlotTensor):
                slots = [tensor]
            elif tensor.is_all_of(tensor.source):
                tensor.source.owner.zero(tensor.source)
                continue
            else:
                slots = tensor.slots(writing=True)
            with runtime_mode():
                for slot in slots:
                    slot.zero_()
        return self._result()

    def _run(self, slots: dict[int, torch.Tensor], device: torch.device) -> Any:
        """Call the operator with all gradients on `device`; what else it writes to gets its changes."""
        is_elsewhere = device != self.lazies[0].device
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []

        def take(tensor: torch.Tensor) -> torch.Tensor:
            slot = slots.get(id(tensor))
            if slot is not None:
                return slot.to(device)
            if is_elsewhere and tensor.device != device:
                there = tensor.to(device)
                moved.append((tensor, there))
                return there
            return tensor

        args, kwargs = tree_map_only(torch.Tensor, take, (self.args, self.kwargs))
        result = self.func(*args, **kwargs)
        for tensor, there in moved:
            if any(tensor is value for value in self.written):
                tensor.copy_(there)
        return result

    def _result(self) -> Any:
        """Return what an operator that writes returns: what it has written to, or nothing."""
        num_returned = len(self.func._schema.returns)
        if num_returned == 0:
            return None
        return self.written[0] if num_returned == 1 else tuple(self.written[:num_returned])


def _lazies_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[SlotTensor]:
    return [tensor for tensor in tensors_of((*args, *kwargs.values())) if isinstance(tensor, SlotTensor)]


def _make_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make lazy gradients of the views that an operator makes of one."""
    lazy = args[0]
    if not isinstance(lazy, SlotTensor):
        _refuse(func, args)
    with runtime_mode():
        whole = torch.empty_strided(lazy.source.shape, lazy.source.stride, dtype=lazy.dtype, device="meta")
        form = torch.as_strided(whole, lazy.shape, lazy.stride(), lazy.storage_offset())
        made = func(form, *args[1:], **kwargs)

    def view(of: torch.Tensor) -> SlotTensor:
        if of.dtype is not lazy.dtype or of.is_conj() or of.is_neg():
            _refuse(func, args)
        return type(lazy)(lazy.source, lazy.life, form=(of.shape, of.stride(), int(of.storage_offset())))

    return tree_map_only(torch.Tensor, view, made)


def _make_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lazy = args[0]
    with runtime_mode():
        form = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
        wanted = lazy.device if kwargs.get("device") is None else kwargs["device"]
        return func(form, *args[1:], **{**kwargs, "device": wanted})


def _without_memory_of(slots: Any, result: Any) -> Any:
    """Return a result that has no memory of slots, whatever the operator's schema says."""
    own = {storage_id(slot) for slot in slots}
    return tree_map_only(torch.Tensor, lambda made: made.clone() if storage_id(made) in own else made, result)


def _number(factor: Any) -> float | None:
    """Return what gradients are multiplied or divided by; None if that is no single number."""
    if isinstance(factor, torch.Tensor):
        return float(factor) if factor.dim() == 0 and not factor.is_complex() and type(factor) is torch.Tensor else None
    return float(factor) if isinstance(factor, (int, float)) else None


def _refuse(func: Any, args: Sequence[Any]) -> NoReturn:
    names = [lazy.source.name for lazy in _lazies_in(args, {})]
    raise StateError(
        f"operator {func} would change what the gradient of {', '.join(dict.fromkeys(names))} is a view of, and that "
        "is in a chunk; use a copy, p.grad.clone(), or the real one inside manager.gather(p, grads=True)"
    )


class NoMemoryError(StateError, NotImplementedError):
    """The memory of a lazy gradient was asked for. Torch's own tensors without memory raise the latter."""


class LazyGradient(SlotTensor):
    """A view of one gradient, by default of all of it: shape, strides, a dtype and a device, and no memory (ADR 15).

    Operators that get one are run on its slot, wherever that is, and in-place ones change the slot; views of it are
    lazy too. What they return otherwise is an ordinary tensor. So `torch.nn.utils.clip_grad_norm_` works, and a
    gradient on HOST stays there.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.add_.Tensor and _is_accumulation(args, kwargs):
            lazy = args[0]
            lazy.source.require_current(lazy.life)
            lazy.source.owner.accumulate(lazy.source, args[1])
            return lazy
        return run_operator(func, args, kwargs or {})

    # Methods of torch's that look at memory without an operator.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self.whole())
        except StateError as error:
            return f"LazyGradient({tuple(self.shape)}, dtype={self.dtype}: {error})"

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.whole())  # type: ignore[no-any-return]

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), *args, **kwargs)

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return a copy that cannot be written to: the gradient would not change with it."""
        copied = self.whole().numpy(force=force)
        copied.setflags(write=False)
        return copied

    def is_shared(self) -> bool:
        """Tell that no other process has its memory."""
        return False

    def tolist(self) -> Any:
        """Return the values."""
        return self.whole().tolist()

    @property
    def data(self) -> torch.Tensor:
        """The same gradient; what is assigned to it is copied."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype is not self.dtype:
            raise StateError(
                f"the gradient of {self.source.name} is {tuple(self.shape)} in {self.dtype} and cannot become "
                f"{tuple(value.shape)} in {value.dtype}; assign to .grad of the parameter what it can be"
            )
        if not (isinstance(value, LazyGradient) and value.life == self.life and value.is_all_of(self.source)):
            with torch.no_grad():
                self.copy_(value)

    def _no_memory(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NoMemoryError(
            f"the gradient of {self.source.name} is in a chunk that moves and has no address; use a copy, "
            "p.grad.clone(), or the real one inside manager.gather(p, grads=True)"
        )

    data_ptr = const_data_ptr = untyped_storage = storage = _typed_storage = _no_memory
    share_memory_ = __dlpack__ = apply_ = map_ = map2_ = as_subclass = _no_memory


def _is_accumulation(args: Any, kwargs: Any) -> bool:
    """Tell whether autograd adds a gradient to the one that is there: that has to land like the first one."""
    return (
        not kwargs
        and in_backward()
        and not torch.is_grad_enabled()
        and isinstance(args[0], LazyGradient)
        and isinstance(args[1], torch.Tensor)
        and args[1].shape == args[0].shape
        and args[0].is_all_of(args[0].source)
    )
