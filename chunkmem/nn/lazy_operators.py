"""Run operators on lazy gradients: on the slots, where they are.

What an operator does to its arguments is in its schema: it makes a view, it writes in place, or it returns something
new. Replicas of a chunk stay alike: an in-place operator runs on one, and the others are copies of what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from chunkmem.errors import StateError
from chunkmem.nn.slot_tensor import SlotTensor
from chunkmem.nn.values import storage_id
from chunkmem.runtime.device import runtime_mode

_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    (
        _aten.linalg_vector_norm.default,
        _aten._foreach_norm.Scalar,
        _aten.norm.Scalar,
        _aten.norm.ScalarOpt_dim,
        _aten.sum.default,
        _aten.amax.default,
        _aten.amin.default,
        _aten.max.default,
        _aten.min.default,
    )
)
"""Their results are small: a gradient on HOST is not copied for them."""
_FACTORIES = frozenset(
    packet.default
    for packet in (
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
        *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
    )
)
"""They ask for a shape, a dtype and a device alone."""
_SCALINGS = frozenset(
    (
        *(_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar),
        *(_aten._foreach_mul_.Tensor, _aten._foreach_mul_.Scalar, _aten._foreach_div_.Scalar),
        *(_aten._foreach_div_.Tensor,),
    )
)
"""By 1 they change nothing, as when a norm is below what it is clipped to."""
_NORMS = frozenset((_aten._foreach_norm.Scalar, _aten.linalg_vector_norm.default))
_ALL_NORMS = _NORMS | {_aten.norm.Scalar, _aten.norm.ScalarOpt_dim}
_OVERWRITING = frozenset((_aten.copy_.default, _aten._foreach_copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor))
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
    if func in _FACTORIES:
        return _make_like(func, args, kwargs)
    call = _Call(func, args, kwargs)
    if not call.written and _makes_views(func):
        return _make_view(func, args, kwargs)
    if call.written:
        return call.write()
    return call.read()


class _Call:
    """One call of an operator that needs values."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.lazies = list(_lazies_in((args, kwargs)))
        self.written = [
            value
            for argument, value in _named(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]

    def read(self) -> Any:
        """Run it; nothing is written to."""
        device = self.lazies[0].device
        if self.func in _ALL_NORMS:
            self._require_all_stages()
        if self.func in _NORMS and len(self.args) + len(self.kwargs) <= 2 and self._is_over_ranks():
            return self._norm_over_ranks()
        if places := self._one_by_one():
            return [self._part([place])[0] for place in places]
        with ExitStack() as staying:
            slots = {id(lazy): _located(lazy, staying)[0] for lazy in self.lazies}
            if self.func in _REDUCTIONS and any(slot.device != device for slot in slots.values()):
                return self._reduce(slots, device)
            with runtime_mode():
                result = self._run(slots, device)
                return _without_memory_of(slots.values(), result)

    def _reduce(self, slots: dict[int, torch.Tensor], device: torch.device) -> Any:
        """Reduce each gradient where it is."""
        with runtime_mode():
            if not isinstance(self.args[0], (list, tuple)):
                return self._run(slots, slots[id(self.lazies[0])].device).to(device)
            each = [slots[id(value)] if isinstance(value, SlotTensor) else value for value in self.args[0]]
            return [self.func([one], *self.args[1:], **self.kwargs)[0].to(device) for one in each]

    def write(self) -> Any:
        """Run it and let its changes reach every replica."""
        into = [lazy for value in self.written for lazy in _lazies_in(value)]
        if not into:
            return self._write_elsewhere()
        if self.func is _aten.zero_.default or self.func is _aten._foreach_zero_.default:
            return self._zero(into)
        if self.func in _SCALINGS and self._is_over_ranks() and (factor := _number(self.args[1])) is not None:
            return self._scale_over_ranks(factor)
        if self.func in _SCALINGS and _is_one(self.args[1]):
            for lazy in into:
                lazy.slots(writing=False)
            return self._result()
        if places := self._one_by_one():
            for place in places:
                self._part([place])
            return self._result()
        overwriting = self.func in _OVERWRITING
        with ExitStack() as staying:
            replicas = {id(lazy): _located(lazy, staying, writing=True, overwriting=overwriting) for lazy in into}
            slots = {id(lazy): _located(lazy, staying)[0] for lazy in self.lazies}
            slots.update((key, found[0]) for key, found in replicas.items())
            with runtime_mode():
                self._run_by_device(slots, into)
                for first, *others in replicas.values():
                    for other in others:
                        other.copy_(first)
        return self._result()

    def _one_by_one(self) -> Sequence[int]:
        """Return the places in the lists of a call that is made for each on its own; empty: for all at once.

        So it is where bringing one gradient from DISK may move others there: not all may fit memory at a time.
        """
        if "_foreach_" not in self.func._schema.name or not any(lazy.source.owner.may_page_out for lazy in self.lazies):
            return ()
        num = len(self._lists()[0])
        return range(num) if num > 1 else ()

    def _lists(self) -> list[Sequence[Any]]:
        return [value for _, value in _named(self.func, self.args, self.kwargs) if isinstance(value, (list, tuple))]

    def _part(self, places: Collection[int]) -> Any:
        """Run the operator on what its lists have in some places."""
        args, kwargs = self._in_places(places)
        is_lazy = any(True for _ in _lazies_in((args, kwargs)))
        return run_operator(self.func, args, kwargs) if is_lazy else self.func(*args, **kwargs)

    def _in_places(self, places: Collection[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        num = len(self._lists()[0])

        def chosen(value: Any) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == num
            return [value[place] for place in places] if is_list else value

        return tuple(chosen(value) for value in self.args), {key: chosen(value) for key, value in self.kwargs.items()}

    def _require_all_stages(self) -> None:
        """Raise a `StateError` for a norm of whole gradients, which is to be part of a total, on a pipeline stage.

        The total would lack the other stages, whose parameters have no `.grad` here, and each stage have its own.
        """
        source = self.lazies[0].source
        is_by_dim = any(
            value for argument, value in _named(self.func, self.args, self.kwargs) if argument.name == "dim"
        )
        if source.owner.is_of_stage and not is_by_dim:
            raise StateError(
                f"a norm of the gradient of {source.name}: this rank has those of its pipeline stage alone, which "
                "torch.nn.utils.clip_grad_norm_ would clip by their own norm; call optimizer.clip_grad_norm_(max_norm) "
                "on all ranks, or set gradient_clipping. The norm of one gradient is p.grad.clone().norm()"
            )

    def _is_over_ranks(self) -> bool:
        """Tell whether all lazy gradients of the call are whole, and stand for means over ranks."""
        return all(lazy.source.owner.shows_means and lazy.is_all_of(lazy.source) for lazy in self.lazies)

    def _norm_over_ranks(self) -> Any:
        """Return norms of means; see [Note: Clipping over ranks] in `chunkmem.nn.gradient_values`."""
        order = float(self.args[1] if len(self.args) > 1 else self.kwargs.get("ord", 2))
        each = self.args[0] if isinstance(self.args[0], (list, tuple)) else [self.args[0]]
        # First those that all ranks form: they make means of the gradients of ordinary parameters, too.
        known = {
            id(one): one.source.owner.norm_over_ranks(one.source, order) for one in each if isinstance(one, SlotTensor)
        }
        with runtime_mode():
            norms = [
                torch.full((), known[id(one)], dtype=one.dtype, device=one.device)
                if id(one) in known
                else torch.linalg.vector_norm(one, order)
                for one in each
            ]
        return norms if isinstance(self.args[0], (list, tuple)) else norms[0]

    def _scale_over_ranks(self, factor: float) -> Any:
        """Multiply or divide means where they are; by 1 nothing changes."""
        if factor != 1.0:
            owner = self.lazies[0].source.owner
            found = owner.slots_over_ranks([lazy.source for lazy in self.lazies], factor)
            slots = {id(lazy): each for lazy, each in zip(self.lazies, found, strict=True)}
            is_list = isinstance(self.args[0], (list, tuple))
            with runtime_mode():
                for one in self.args[0] if is_list else [self.args[0]]:
                    for slot in slots.get(id(one), [one]):
                        by = self.args[1].to(slot.device) if isinstance(self.args[1], torch.Tensor) else self.args[1]
                        self.func([slot] if is_list else slot, by)
        return self._result()

    def _zero(self, into: list[SlotTensor]) -> Any:
        for lazy in into:
            lazy.source.require_current(lazy.life)
            if lazy.is_all_of(lazy.source):
                lazy.source.owner.zero(lazy.source)
            else:
                with runtime_mode():
                    for slot in lazy.slots(writing=True):
                        slot.zero_()
        with runtime_mode():
            for value in self.written:
                for other in value if isinstance(value, (list, tuple)) else ():
                    if not isinstance(other, SlotTensor):
                        other.zero_()
        return self._result()

    def _write_elsewhere(self) -> Any:
        """Something ordinary is written to, as by `tensor.copy_(p.grad)` or an optimizer of torch."""
        owner = self.lazies[0].source.owner
        for value in self.written:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if tensor is not None:
                    owner.require_present(tensor)
        if places := self._one_by_one():
            for place in places:
                self._part([place])
            return self._result()
        with ExitStack() as staying:
            slots = {id(lazy): _located(lazy, staying)[0] for lazy in self.lazies}
            with runtime_mode():
                self._run(slots, self.lazies[0].device)
        return self._result()

    def _run_by_device(self, slots: dict[int, torch.Tensor], into: list[SlotTensor]) -> None:
        """Run a call over lists in parts, whose gradients are on one device each; at once if all are."""
        lists = self._lists()
        if len({slots[id(lazy)].device for lazy in into}) == 1 or not lists:
            self._run(slots, slots[id(self.lazies[0])].device)
            return
        devices = [slots[id(value)].device if isinstance(value, SlotTensor) else value.device for value in lists[0]]
        for device in dict.fromkeys(devices):
            args, kwargs = self._in_places([place for place, where in enumerate(devices) if where == device])
            if any(True for _ in _lazies_in((args, kwargs))):
                part = _Call(self.func, args, kwargs)
                part._run(slots, slots[id(part.lazies[0])].device)
            else:
                self.func(*args, **kwargs)

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

        args = [_mapped(value, take) for value in self.args]
        kwargs = {key: _mapped(value, take) for key, value in self.kwargs.items()}
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


def _located(lazy: SlotTensor, staying: ExitStack, **how: bool) -> list[torch.Tensor]:
    """Return where a gradient is, which stays there until `staying` is closed: locating others may move it."""
    found = lazy.slots(**{"writing": False, **how})
    staying.enter_context(lazy.source.owner.staying(lazy.source))
    return found


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operator with what its schema says of each."""
    for at, argument in enumerate(func._schema.arguments):
        if at < len(args):
            yield argument, args[at]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _lazies_in(value: Any) -> Iterator[SlotTensor]:
    if isinstance(value, SlotTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _lazies_in(item)
    elif isinstance(value, dict):
        yield from _lazies_in(tuple(value.values()))


def _makes_views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _make_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make lazy gradients of the views that an operator makes of one."""
    lazy = args[0]
    if not isinstance(lazy, SlotTensor):
        _refuse(func, args)
    if func in (_aten.detach.default, _aten.alias.default):
        return _view_of(lazy, (lazy.shape, lazy.stride(), int(lazy.storage_offset())))
    with runtime_mode():
        whole = torch.empty_strided(lazy.source.shape, lazy.source.stride, dtype=lazy.dtype, device="meta")
        form = torch.as_strided(whole, lazy.shape, lazy.stride(), lazy.storage_offset())
        made = func(form, *args[1:], **kwargs)

    def view(of: torch.Tensor) -> SlotTensor:
        if of.dtype is not lazy.dtype or of.is_conj() or of.is_neg():
            _refuse(func, args)
        return _view_of(lazy, (of.shape, of.stride(), int(of.storage_offset())))

    return _mapped(made, view)


def _view_of(lazy: SlotTensor, form: tuple[torch.Size, tuple[int, ...], int]) -> SlotTensor:
    return type(lazy)(lazy.source, lazy.life, form=form)


def _make_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lazy = args[0]
    with runtime_mode():
        form = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
        wanted = lazy.device if kwargs.get("device") is None else kwargs["device"]
        return func(form, *args[1:], **{**kwargs, "device": wanted})


def _without_memory_of(slots: Any, result: Any) -> Any:
    """Return a result that has no memory of slots, whatever the operator's schema says."""
    own = {storage_id(slot) for slot in slots}
    return _mapped(result, lambda made: made.clone() if storage_id(made) in own else made)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return an argument or a result of an operator, a tensor or a list of them, with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(one, change) for one in value])
    return value


def _number(factor: Any) -> float | None:
    """Return what gradients are multiplied or divided by; None if that is no single number."""
    if isinstance(factor, torch.Tensor):
        return float(factor) if factor.dim() == 0 and not factor.is_complex() and type(factor) is torch.Tensor else None
    return float(factor) if isinstance(factor, (int, float)) else None


def _is_one(factor: Any) -> bool:
    if isinstance(factor, torch.Tensor):
        return (
            factor.dim() == 0 and not isinstance(factor, SlotTensor) and not factor.is_complex() and bool(factor == 1)
        )
    return not isinstance(factor, (list, tuple, complex)) and bool(factor == 1)


def _refuse(func: Any, args: Sequence[Any]) -> Any:
    names = [lazy.source.name for lazy in _lazies_in(tuple(args))]
    raise StateError(
        f"operator {func} would change what the gradient of {', '.join(dict.fromkeys(names))} is a view of, and that "
        "is in a chunk; use a copy, p.grad.clone(), or the real one inside manager.gather(p, grads=True)"
    )
