"""Parameters bound to their chunks: a slot view while the chunk is on DEVICE, a placeholder while it is away.

[Note: Open parameters] A Parameter is an ordinary `nn.Parameter` only while somebody is known to use it: a running
module that has looked it up, `manager.gather`, or an operator that is being served. Then it is *open*, and its chunk is
pinned on DEVICE. At all other times its class is a subclass that sends every operator through
`chunkmem.modules.parameter_operators`, which brings the chunk first. Changing the class costs less than 0.1 us and no
operator is slower while it is open. One that stays open, of a model that fits, tells when it gives out memory past
autograd's version counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._prims_common import _is_non_overlapping_and_dense_or_false as is_dense

from chunkmem.data.errors import StateError
from chunkmem.data.layout import Slot
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.storage import ChunkStorage

_PAST_COUNTERS = ("data_ptr", "untyped_storage", "storage", "_typed_storage", "numpy", "__array__", "__dlpack__")
"""Methods that give out memory, past autograd's version counters; `.data` is another such way."""


class Served:
    """What the classes of parameters that serve themselves have in common; see [Note: Open parameters]."""


def serves_itself(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a managed parameter that nobody has open."""
    return issubclass(type(tensor), Served)


def stands_at(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Tell whether two tensors are the same memory, with the same shape and strides."""
    if tensor.is_cpu or tensor.is_cuda:
        return tensor.is_set_to(memory)
    # Other devices leave that operator to the CPU, which is given a copy of each.
    return (
        torch._C._is_alias_of(tensor, memory)  # type: ignore[attr-defined]
        and tensor.storage_offset() == memory.storage_offset()
        and tensor.shape == memory.shape
        and tensor.stride() == memory.stride()
    )


def move_to(param: torch.nn.Parameter, memory: torch.Tensor) -> None:
    """Give a Parameter that no graph knows yet other memory, on any device."""
    if torch._has_compatible_shallow_copy_type(param, memory):
        param.data = memory
        return
    # Devices that torch does not know by name cannot be assigned to `.data`: what both hold is exchanged.
    requires_grad = param.requires_grad
    torch._C._swap_tensor_impl(param, memory.detach())
    param.requires_grad_(requires_grad)


def resident_class(
    open_class: type[nn.Parameter],
    note: Callable[[], object],
    *,
    note_assigned: Callable[[], object],
    note_trained: Callable[[], object],
) -> type[nn.Parameter]:
    """Return a subclass of a Parameter's class that calls `note` before it gives out its memory.

    `note_assigned` is called when `.data` is assigned, `note_trained` when `requires_grad` is. No operator is slower
    for it, and torch's own code does not ask Python for what is noted here.
    """
    data, requires_grad = open_class.data, open_class.requires_grad

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            values = data.__get__(self).clone(memory_format=torch.preserve_format)  # type: ignore[attr-defined]
            memo[id(self)] = open_class(values, self.requires_grad)
        return memo[id(self)]

    def noting(method: Any, note: Callable[[], object] = note) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            note()
            return method(self, *args, **kwargs)

        return noted

    members: dict[str, Any] = {name: noting(getattr(open_class, name)) for name in _PAST_COUNTERS}
    members |= {name: noting(getattr(open_class, name), note_trained) for name in ("requires_grad_", "detach_")}
    members["data"] = property(noting(data.__get__), noting(data.__set__, note_assigned))  # type: ignore[attr-defined]
    members["requires_grad"] = property(requires_grad.__get__, noting(requires_grad.__set__, note_trained))  # type: ignore[attr-defined]
    if open_class.__deepcopy__ is nn.Parameter.__deepcopy__:
        members["__deepcopy__"] = copied
    members["__module__"], members["__doc__"] = open_class.__module__, open_class.__doc__
    made: type[nn.Parameter] = type(open_class)(open_class.__name__, (open_class,), members)  # type: ignore[misc]
    return made


class ManagedParameter:
    """A Parameter the user made, and where its values are. The Parameter object itself is never replaced."""

    def __init__(
        self,
        param: torch.nn.Parameter,
        name: str,
        slot: Slot,
        position: int,
        bound: BoundChunk,
        *,
        stride: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Describe a parameter in `position` of its group, with the strides and the dtype that it has there."""
        self.param = param
        self.name = name
        self.slot = slot
        self.position = position
        """Index among the slots of its group."""
        self.group = slot.group
        self.bound = bound
        self.built_dtype = param.dtype
        """What `state_dict` has it in."""
        self.is_drawn = False
        """It was on the meta device, and was initialised when it was packed."""
        self.shape = param.shape
        self.stride = stride
        self.view: torch.Tensor | None = None
        """The slot on DEVICE in the parameter's shape; made once, valid while the chunk is attached."""
        self._blank = blank(dtype, bound.device)
        self.placeholder = self._blank.expand(param.shape)
        """What the parameter stands on while its chunk is away; nobody gets to see it."""
        self.version = param._version
        self.accumulator: object | None = None
        """The end of its gradients' way in autograd's graphs, kept so that references to the parameter can be counted:
        it holds one, and would come and go with graphs."""
        self.open_class: type[torch.nn.Parameter] = type(param)
        self._closed_class: type[torch.nn.Parameter] | None = None
        self._num_users = 0
        self.num_assigned = 0
        """How often something was assigned to `.data`."""

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.shape)}"

    @property
    def storage_id(self) -> int:
        """Identity of the storage it is in while it is on DEVICE."""
        return self.bound.storage_of(self)

    @property
    def requires_grad(self) -> bool:
        if self._num_users:
            return self.param.requires_grad
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        """What `.grad` of the parameter is."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.param.grad = value

    def like(self, value: torch.Tensor) -> torch.nn.Parameter:
        """Return an ordinary parameter of the same class with these values."""
        param = torch.nn.Parameter(value, self.requires_grad)
        param.__class__ = self.open_class
        return param

    def serve(self, closed_class: type[torch.nn.Parameter]) -> None:
        """Close the parameter, for the first time: from now on it serves itself; see [Note: Open parameters]."""
        self._closed_class = closed_class
        if self._num_users == 0:
            self.param.__class__ = self._closed_class

    def unserve(self) -> None:
        """Undo `serve`. Nobody has the parameter open."""
        assert self._num_users == 0
        self.param.__class__ = self.open_class
        self._closed_class = None

    def open(self) -> None:
        """Somebody uses the parameter, whose chunk is pinned on DEVICE, as an ordinary one. Undo it with `close`."""
        self._num_users += 1
        if self._num_users == 1 and self._closed_class is not None:
            self.param.__class__ = self.open_class

    def close(self) -> None:
        """Undo one `open`.

        Raises:
            StateError: the user has given it memory of another shape or dtype, by assigning `.data`; it has the values
                from before.
        """
        self._num_users -= 1
        if self._num_users > 0 and not self.bound.stays:
            return
        try:
            self.take_assigned()
        finally:
            if self._num_users == 0 and self._closed_class is not None:
                self.param.__class__ = self._closed_class

    def take_assigned(self) -> None:
        """If the user has assigned `.data`, put the values into the slot. The chunk is pinned on DEVICE.

        Raises:
            StateError: they do not fit.
        """
        if self.view is None or not self.bound.is_bound:
            return
        # Neither of these is an operator, which a user's mode would see.
        if torch.Tensor.data_ptr(self.param) != self.view.data_ptr() or self.param.stride() != self.stride:
            with runtime_mode():
                assigned = self.param.data
                self.param.data = self.view
                fits = assigned.shape == self.shape and assigned.dtype == self.view.dtype
                if fits:
                    self.view.copy_(assigned.clone())  # it may be another view of the same memory
                    self.bound.was_assigned = True
                    self.remember(assigned)
                self.version = self.param._version
            if not fits:
                raise StateError(
                    f"parameter {self} of {self.view.dtype} was assigned .data of {tuple(assigned.shape)} and "
                    f"{assigned.dtype}; a managed parameter keeps its shape and dtype: choose them before "
                    "manager.wrap() or inside manager.init()"
                )

    def stands_at(self, values: torch.Tensor) -> bool:
        """Tell whether an ordinary tensor lies where the parameter does, as what `param.data` returned."""
        if self.view is None or not self.bound.is_bound or serves_itself(values):
            return False
        return values.data_ptr() == self.view.data_ptr() and values.stride() == self.stride

    def remember(self, assigned: torch.Tensor) -> None:
        """Note what was assigned to `.data`: in plain PyTorch the parameter would share its memory."""
        self.bound.assigned[self] = weakref.ref(assigned), assigned._version
        self.num_assigned += 1

    def num_references(self) -> int:
        """Return how many references to the parameter itself there are, in addition to its own Python object's.

        A graph holds such references: what it saved, and the views it made.
        """
        if self.accumulator is None and self.requires_grad and self._num_users:
            with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.enable_grad():
                self.accumulator = torch.autograd.graph.get_gradient_edge(self.param).node
        return self.param._use_count() - 1 - (self.accumulator is not None)  # type: ignore[attr-defined, no-any-return]

    def clear(self) -> bool:
        """Make the placeholder NaN again; tell whether it was something else."""
        blank = blank_value(self._blank)
        was_set = bool(self._blank == self._blank) if blank != blank else bool(self._blank != blank)
        self._blank.fill_(blank)
        self.version = self.param._version
        return was_set


def trained(parameters: Iterable[ManagedParameter]) -> set[ManagedParameter]:
    """Return the parameters that require gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        return {managed for managed in parameters if managed.param.requires_grad}


def by_group(parameters: Iterable[ManagedParameter]) -> dict[int, list[ManagedParameter]]:
    """Return parameters by their chunk groups, in their order."""
    found: dict[int, list[ManagedParameter]] = {}
    for managed in parameters:
        found.setdefault(managed.group, []).append(managed)
    return found


class BoundChunk:
    """The DEVICE side of a PARAM chunk: its storage and the parameters that are views into it."""

    def __init__(self, storage: ChunkStorage, *, device: torch.device) -> None:
        self.device = device
        self.stands_at = torch.Tensor.is_set_to if device.type in ("cpu", "cuda") else stands_at
        """`stands_at`, without asking each tensor for its device."""
        self._storage = storage
        self.parameters: list[ManagedParameter] = []
        self.is_bound = False
        self._lost: list[str] = []
        """Parameters that were written to while they were away, past what serves them."""
        self._is_assigned = False
        """While it stays, somebody has assigned `.data` of a parameter."""
        self._trained = b""
        """While it stays, what `trained` returns; empty: that may have changed."""
        self.stays = False
        """On DEVICE, with parameters that are open; see [Note: Resident models] in `chunkmem.modules.hooks`."""
        self.was_assigned = False
        """A parameter's `.data` has been assigned, and the values put into the chunk."""
        self.assigned: dict[ManagedParameter, tuple[weakref.ref[torch.Tensor], int]] = {}
        """What was last assigned to the `.data` of parameters, and its version then."""
        self.on_other_storage: Callable[[int, int], None] = lambda before, now: None
        """Called with the identities of the storage that was the chunk's, and of the one that is, on HOST."""

    @property
    def storage_id(self) -> int:
        """Identity of the chunk's storage: on DEVICE the same for life, on HOST as long as it has memory."""
        return int(self._storage.storage._cdata)

    def storage_of(self, managed: ManagedParameter) -> int:
        """Return the identity of the storage that a parameter is in."""
        return int(self._storage.storage._cdata)

    def add(self, managed: ManagedParameter) -> None:
        """Take a parameter in, in the order of the group's slots: it stands on its placeholder, its memory is freed."""
        self.parameters.append(managed)
        move_to(managed.param, managed.placeholder)
        managed.version = managed.param._version

    def release(self) -> None:
        """Undo all `add`: parameters stand on memory of one element, in the dtypes they were built in.

        The content of the chunk stays as it is.
        """
        for managed in self.parameters:
            move_to(managed.param, blank(managed.built_dtype, torch.device("cpu")).expand(managed.shape))
            torch.autograd.graph.increment_version(managed.param)  # else a backward of an older graph would read it
            managed.view = managed.accumulator = None
        self.parameters, self.is_bound = [], False

    def attach(self, slab: Slab) -> torch.Tensor:
        """Take the slab's memory; see `ChunkHome`."""
        before = self.storage_id
        self._storage.take(slab.bytes)
        self._tell_of_other(before)
        return self._storage.flat

    def _tell_of_other(self, before: int) -> None:
        if self.storage_id != before:
            self.on_other_storage(before, self.storage_id)

    def bind(self) -> None:
        """Point the parameters at their slots."""
        if self.is_bound:
            return
        flat = self._storage.flat
        for managed in self.parameters:
            if managed.param._version != managed.version and managed.clear():
                self._lost.append(str(managed))
            if managed.view is None:
                managed.view = torch.as_strided(flat, managed.shape, managed.stride, managed.slot.offset)
            if self.stands_at(managed.param, managed.placeholder):  # else `take_assigned` takes it up
                managed.param.data = managed.view
                managed.version = managed.param._version
        self.is_bound = True

    def detach(self) -> None:
        """Point the parameters at their placeholders and give the memory back to its slab."""
        self._unbind()
        before = self.storage_id
        self._storage.detach()
        self._tell_of_other(before)

    def abandon(self) -> None:
        """Point the parameters at their placeholders; tensors of others keep the memory."""
        self._unbind()
        for managed in self.parameters:
            managed.view = None
        self._storage.abandon()

    def _unbind(self) -> None:
        for managed in self.parameters if self.is_bound else ():
            assert managed.view is not None
            if self.stands_at(managed.param, managed.view):
                managed.param.data = managed.placeholder
                managed.version = managed.param._version
        self.is_bound = False

    def num_references(self) -> int:
        """Return how many tensors have this chunk's memory, ours included."""
        return torch._C._storage_Use_Count(self._storage.storage._cdata)

    def num_foreign_references(self, *, besides: int) -> int:
        """Return how many references there are to the memory and to the parameters that are not ours.

        Graphs have some, and so does a kept `detach()`, `.numpy()` or view. `besides` is the number of views that
        the caller knows of.
        """
        ours = 2 + besides + sum(managed.view is not None for managed in self.parameters)
        if self.is_bound:
            ours += len(self.parameters)
        return self.num_references() - ours + sum(managed.num_references() for managed in self.parameters)

    def stay(self, note: Callable[[], object]) -> None:
        """The chunk stays on DEVICE, where it is, and anybody may use its parameters as ordinary ones.

        `note` is called before memory is given out that may be written to past autograd's version counters.
        """
        self.stays, self._trained = True, b""
        # One class for all: where attributes are, Python remembers of a few thousand classes.
        classes = {
            open_class: resident_class(
                open_class,
                note,
                note_assigned=partial(setattr, self, "_is_assigned", True),
                note_trained=partial(setattr, self, "_trained", b""),
            )
            for open_class in {managed.open_class for managed in self.parameters}
        }
        for managed in self.parameters:
            managed.open()
            managed.param.__class__ = classes[managed.open_class]

    def may_leave(self) -> None:
        """Undo `stay`. Raises what `ManagedParameter.close` does; all parameters are closed then, too."""
        self.stays = False
        with ExitStack() as stack:
            for managed in self.parameters:
                managed.param.__class__ = managed.open_class
                stack.callback(managed.close)

    def _take_assigned(self) -> None:
        """Take up what users have assigned to the `.data` of parameters that stay."""
        if self._is_assigned:
            for managed in self.parameters:
                managed.take_assigned()
            self._is_assigned = False  # after what put the views back

    def trained(self) -> bytes:
        """Tell which of its parameters require gradients, a byte each: while it stays, without a look at them."""
        if not (self.stays and self._trained):
            with torch._C.DisableTorchFunctionSubclass():
                self._trained = bytes([managed.param.requires_grad for managed in self.parameters])
        return self._trained

    def _look_for_writes(self) -> list[ManagedParameter]:
        """Return the parameters that were written to: autograd's version counter moved."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [managed for managed in self.parameters if managed.param._version != managed.version]
        if self.stays:
            self._is_assigned = self._is_assigned or bool(found)  # `param.set_(...)` counts as a write, too
            self._take_assigned()
        return found

    def look(self) -> tuple[dict[ManagedParameter, torch.Tensor], bool]:
        """Return what is in `.grad` of its parameters, and whether `was_written` finds something: it looks at all."""
        grads, is_written = dict[ManagedParameter, torch.Tensor](), self.was_assigned
        with torch._C.DisableTorchFunctionSubclass():
            for managed in self.parameters:
                param = managed.param
                if (grad := param.grad) is not None:
                    grads[managed] = grad
                if param._version != managed.version:
                    is_written = True
        return grads, is_written

    def take_written(self) -> bool:
        """Tell, once, whether a bound parameter was written to: autograd's version counter moved."""
        if not self.is_bound:
            return False
        written = self._look_for_writes()
        with torch._C.DisableTorchFunctionSubclass():
            for managed in written:
                managed.version = managed.param._version
        was_assigned, self.was_assigned = self.was_assigned, False
        return was_assigned or bool(written)

    def was_written(self) -> bool:
        """Tell what `take_written` is going to; see `ChunkHome`."""
        if not self.is_bound:
            return False
        return bool(self._look_for_writes()) or self.was_assigned

    def check(self) -> None:
        """Raise, once, if a parameter stands neither on its slot nor on its placeholder, or was written to while away.

        It is put back before that, with the values it had. Parameters that serve themselves never do this; code that
        passes by torch's functions can.

        Raises:
            StateError: something gave a parameter other memory, or values that had nowhere to go.
        """
        self._take_assigned()
        self._check_assigned()
        strayed, lost = [], self._lost
        self._lost = []
        for managed in () if self.stays else self.parameters:
            own = managed.view if self.is_bound else managed.placeholder
            assert own is not None
            if not self.stands_at(managed.param, own):
                managed.param.data = own
                managed.version = managed.param._version
                managed.accumulator = None  # torch has made itself another one
                strayed.append(str(managed))
            elif not self.is_bound and managed.param._version != managed.version and managed.clear():
                lost.append(str(managed))
        if strayed:
            raise _not_kept(strayed, "given other memory after it was packed")
        if lost:
            raise _not_kept(lost, "written to past torch's functions while it was not on DEVICE: the values are lost")

    def _check_assigned(self) -> None:
        """Raise, once, if what was assigned to the `.data` of a parameter has been written to since."""
        for managed, (reference, version) in list(self.assigned.items()):
            assigned = reference()
            if assigned is not None and assigned._version == version:
                continue
            del self.assigned[managed]
            if assigned is not None:
                raise StateError(
                    f"a tensor that was assigned to the .data of parameter {managed} has been written to since; the "
                    "parameter keeps a copy of what was assigned: write to the parameter"
                )


def _not_kept(names: list[str], deed: str) -> StateError:
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return StateError(
        f"parameter {names[0]}{others} was {deed}; write to it in place inside manager.gather(), or load values with "
        "manager.load_state_dict()"
    )


def dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a parameter has in its slot.

    Keep the memory order (channels_last, say) of a dense parameter: torch's kernels choose by it."""
    if param.is_contiguous() or not is_dense(param.shape, param.stride()):
        return torch.empty(param.shape, device="meta").stride()
    return param.stride()


def blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one element of a placeholder: NaN, or 0 of what has none."""
    with runtime_mode():
        element = torch.empty((), dtype=dtype, device=device)
        return element.fill_(blank_value(element))


def blank_value(blank: torch.Tensor) -> float:
    """Return what elements without a value are: NaN, or 0 of dtypes that have none."""
    return float("nan") if blank.is_floating_point() or blank.is_complex() else 0
