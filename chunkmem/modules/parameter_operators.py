"""Parameters that serve themselves: what is done with one anywhere is done where its chunk is brought to (ADR 14).

A managed parameter that nobody has open (see [Note: Open parameters] in `chunkmem.modules.binding`) has a class whose
`__torch_function__` is ours. So every operator of torch that gets one, wherever that is called, comes here first:

    metadata (shape, dtype, requires_grad, hooks, .grad)   answered without the values
    inside of a running module                             a read of that module, as if it had looked the parameter up
    elsewhere                                              a call of its own: the chunk is brought, the operator runs,
                                                           writes are noticed, a graph is watched for its backward

What is left of the memory afterwards, a view or an array, has the chunk held until it is gone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import isdatadescriptor
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from chunkmem.activations.saved_tensors import ChunkHooks, in_backward
from chunkmem.data.errors import StateError
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward import BackwardTracker
from chunkmem.modules.binding import ManagedParameter, Served
from chunkmem.modules.frames import Frame
from chunkmem.modules.tensor_functions import METADATA, listed, one_by_one
from chunkmem.modules.wrappers import sharding_caller, wrapped
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.values import tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_TENSOR = torch.Tensor
_FREE_FIELDS = (
    "grad", "grad_fn", "_grad", "_grad_fn", "names", "name", "_version", "output_nr", "retains_grad",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_base",
)  # fmt: skip
_FREE_METHODS = (
    "ndimension", "nelement", "is_signed", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "retain_grad", "has_names", "is_pinned", "is_shared", "is_inference", "is_conj", "is_neg", "_is_view",
    "is_same_size",
)  # fmt: skip
_LAID_OUT = frozenset({_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.storage_offset})
_REFUSED = {
    _TENSOR.share_memory_: "share_memory_", _TENSOR.resize_: "resize_",
    _TENSOR.resize_as_: "resize_as_", _TENSOR.pin_memory: "pin_memory",
}  # fmt: skip


def _free_functions() -> frozenset[Any]:
    """Return what asks for nothing but metadata, as `__torch_function__` is told of it."""
    found: list[Any] = [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size]
    found.append(torch._has_compatible_shallow_copy_type)  # `nn.Module.to()` compares a parameter with what it became
    names = (*_FREE_FIELDS, *(name for name in dir(_TENSOR) if name.startswith("is_")))
    found += [getattr(_TENSOR, name).__get__ for name in names if isdatadescriptor(getattr(_TENSOR, name, None))]
    fields: Any = _TENSOR
    found += [fields.grad.__set__, fields.grad.__delete__, fields.requires_grad.__set__, fields._backward_hooks.__set__]
    found += [getattr(_TENSOR, name) for name in _FREE_METHODS if hasattr(_TENSOR, name)]
    found += [getattr(_TENSOR, name) for name in dir(_TENSOR) if name.startswith("new_")]
    return METADATA.union(found)


FREE = _free_functions()
_MAKE_PARAMETER = nn.Parameter.__new__.__code__
_DATA: Any = _TENSOR.data
_GET_DATA, _SET_DATA = _DATA.__get__, _DATA.__set__
_WITH_STORAGE = frozenset({_GET_DATA, _TENSOR.untyped_storage, _TENSOR.storage, _TENSOR._typed_storage})
"""What shows how large the storage is: it has to be the parameter's alone, and not its chunk's."""
_NOT_DIFFERENTIATED = _WITH_STORAGE | {_TENSOR.detach, _TENSOR.data_ptr, _TENSOR.__repr__, torch.autograd.grad}


class ParameterOperators:
    """Serves operators on parameters that nobody has open."""

    def __init__(
        self,
        pager: Pager,
        access: AccessTracker,
        backward: BackwardTracker,
        step_lock: StepLock,
        managed: Mapping[int, ManagedParameter],
        saved: ChunkHooks,
        *,
        is_shared: bool,
    ) -> None:
        """Serve nothing yet.

        Args:
            pager: of chunks.
            access: reads of parameters.
            backward: what comes after operators.
            turn: of this thread.
            managed: all that were packed, by the identity of the Parameter.
            saved: keeps chunk memory from a user's saved-tensor hooks.
            is_shared: several ranks have the values, each those of its own chunks.
        """
        self._is_shared = is_shared
        self._saved = saved
        self._pager = pager
        self._step_lock = step_lock
        self._access = access
        self._backward = backward
        self._managed = managed
        self._classes: dict[type[nn.Parameter], type[nn.Parameter]] = {}
        self._taken = WeakTensorKeyDictionary()
        """Tensors that were taken out of parameters, each with how often others had been assigned to `.data` then."""
        self._being_saved: set[int] = set()
        """Identities of Parameters whose module is putting together its `state_dict`, which is then filled in."""

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Have parameters that were packed serve themselves."""
        for managed in parameters:
            plain = managed.open_class
            if plain not in self._classes:
                self._classes[plain] = _make_class(plain, weakref.ref(self))
            managed.serve(self._classes[plain])

    def remove(self, parameters: Iterable[ManagedParameter]) -> None:
        """Undo `add`: they are ordinary Parameters again."""
        for managed in parameters:
            managed.unserve()

    @contextmanager
    def saving(self, parameters: Iterable[ManagedParameter]) -> Iterator[None]:
        """Let `detach()` of these parameters bring nothing: what it returns is not looked at."""
        before, self._being_saved = self._being_saved, {id(managed.param) for managed in parameters}
        try:
            yield
        finally:
            self._being_saved = before

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that got parameters which nobody has open.

        Raises:
            CapacityError: they do not fit DEVICE together with what is held.
            StateError: the manager is closed, another rank has the values, their memory would be taken away, or a
                wrapper is made around them that exchanges parameters itself.
        """
        is_saved = func is _TENSOR.detach and id(args[0]) in self._being_saved
        asks_for_type = func is _TENSOR.type and len(args) == 1 and not kwargs
        if func in FREE or is_saved or asks_for_type or self._is_of_backward(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        parameters = list(dict.fromkeys(self._parameters_in((args, kwargs))))
        if parameters and not self._access.stack and (wrapper := sharding_caller()):
            raise wrapped(wrapper, parameters[0])
        named = next(iter(parameters), "of this manager")
        if func in _REFUSED:
            raise StateError(
                f"parameter {named}.{_REFUSED[func]}() would change where or how it lives, which chunkmem "
                "decides; clone it, or do that before manager.wrap()"
            )
        if func is torch.autograd.grad:
            return self._differentiate(parameters, args, kwargs)
        if func in _LAID_OUT or getattr(func, "__name__", "").endswith("_like"):
            plain = self._without_values(func, parameters, args, kwargs)
            if plain is not None:
                return plain[0]
        if func == _SET_DATA:
            return self._assign(args)
        if func is _TENSOR.detach and sys._getframe(2).f_code is _MAKE_PARAMETER:
            raise StateError(
                f"nn.Parameter({named}) would be a second parameter in the memory of a managed one; make it of "
                ".detach().clone()"
            )
        if self._is_shared and not self._access.stack and not self._is_in_backward(parameters):
            raise StateError(
                f"{parameters[0]} is used by {getattr(func, '__name__', func)} outside of its unit's forward, "
                "where only its owner has the values; use it inside manager.gather(), which all ranks enter"
            )
        num = len(listed(getattr(func, "__name__", ""), args))
        if num > 1:
            # What is done to all of them needs no more room than what is done to one.
            return one_by_one(partial(self.call, func), num, args, kwargs) or None
        with self._step_lock.taken():
            if self._access.stack:
                if not self._access.together.keys().isdisjoint(parameters):
                    for note in self._pager.events.read_in_part:
                        note()
                for managed in parameters:
                    self._access.read(self._access.stack[-1], managed)
                self._saved.replace()
                return func(*args, **kwargs)
            return self._run(parameters, func, args, kwargs)

    def _run(self, parameters: Sequence[ManagedParameter], func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run an operator outside of modules as a call of its own."""
        access = self._access
        if torch.is_grad_enabled() and func not in _NOT_DIFFERENTIATED:
            trainable = next((managed for managed in parameters if managed.requires_grad), None)
            if trainable is not None and not in_backward():
                for tell in self._pager.events.used:
                    tell(id(trainable))
        access.relieve()
        frame = Frame(f"{getattr(func, '__name__', func)} outside of modules")
        held: set[int] = set()
        try:
            for managed in parameters:
                access.read(frame, managed)
                self._pager.store.before_change(access.chunks[managed.group])
            self._saved.replace()
            result = _alone(args[0], func) if func in _WITH_STORAGE else func(*args, **kwargs)
            own = {id(managed.param) for managed in parameters}
            held = self._backward.watch(frame, None if id(result) in own else result)
            if isinstance(result, torch.Tensor) and (func == _GET_DATA or func is _TENSOR.detach):
                self._taken[result] = parameters[0].num_assigned
            if func is _TENSOR.data_ptr:  # what looks at addresses takes equal ones for the same memory
                access.keep_address(access.chunks[group] for group in frame.groups)
        finally:
            for group in list(frame.groups):
                self._pager.notice_writes(access.chunks[group], is_outside=True)
            access.release(frame, held=held)
        return result

    def _assign(self, args: Args) -> None:
        """Serve `param.data = values`: they are copied, since a parameter stays where it is."""
        param, values = args
        if values is param:
            return  # as `nn.Module.to()` does where nothing has to change
        managed = self._managed[id(param)]
        if (
            not isinstance(values, torch.Tensor)
            or values.shape != managed.shape
            or (values.dtype != managed.placeholder.dtype)
        ):
            said = (
                f"{tuple(values.shape)} and {values.dtype}"
                if isinstance(values, torch.Tensor)
                else type(values).__name__
            )
            raise StateError(
                f"parameter {managed} of {managed.placeholder.dtype} was assigned .data of {said}; a managed parameter "
                "keeps its shape and dtype: choose them before manager.wrap() or inside manager.init()"
            )
        is_own = managed.stands_at(values)
        if is_own and self._taken.get(values, managed.num_assigned) != managed.num_assigned:
            raise StateError(
                f"parameter {managed} was given other memory since this tensor was taken out of its .data, and the "
                "tensor has changed with it; keep a copy to put back: backup = param.data.clone()"
            )
        with torch.no_grad():
            param.copy_(values.clone())  # they may be a view of what they replace
        if not is_own:  # as with `param.data += 1`: what is written there reaches the parameter
            managed.remember(values)

    def _differentiate(self, parameters: Sequence[ManagedParameter], args: Args, kwargs: Kwargs) -> Any:
        """Serve `torch.autograd.grad`, which asks for parameters as the ends of a graph and not for their values."""

        def edge(tensor: torch.Tensor) -> Any:
            return torch.autograd.graph.get_gradient_edge(tensor) if id(tensor) in self._managed else tensor

        bound = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
        outputs = bound.pop("outputs")
        with torch._C.DisableTorchFunctionSubclass():
            edges = tree_map_only(torch.Tensor, edge, bound.pop("inputs"))
        if bound.get("materialize_grads") or any(self._parameters_in(outputs)):
            with self._step_lock.taken():
                return self._run(parameters, torch.autograd.grad, args, kwargs)
        return torch.autograd.grad(outputs, edges, *args[2:], **bound)

    def _without_values(
        self, func: Callable[..., Any], parameters: Sequence[ManagedParameter], args: Args, kwargs: Kwargs
    ) -> tuple[Any] | None:
        """Answer what depends on how a parameter would lie in memory; None if that takes the parameter itself."""
        managed = parameters[0]
        stands_in = torch.empty_strided(managed.shape, managed.stride, dtype=managed.placeholder.dtype, device="meta")
        if func in _LAID_OUT:
            return (func(stands_in, *args[1:], **kwargs),)
        if not args or args[0] is not managed.param or not stands_in.is_contiguous():
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return (func(*args, **kwargs),)  # the placeholder has the shape, and memory of its own comes out contiguous

    def _is_of_backward(self, func: Callable[..., Any], args: Args) -> bool:
        """Tell whether autograd itself runs an operator: one of a compiled backward, which has weights as they were
        saved, or one that somebody's dispatch mode shows to us a second time."""
        node = torch._C._current_autograd_node()
        is_inner = isinstance(func, torch._ops.OpOverload) or type(node).__name__ == "CompiledFunctionBackward"
        return is_inner and self._is_in_backward(self._parameters_in(args))

    def _is_in_backward(self, parameters: Iterable[ManagedParameter]) -> bool:
        """Tell whether a backward runs that has the values on DEVICE."""
        if not in_backward():
            return False
        chunks = [self._access.chunks[managed.group] for managed in parameters]
        replicas = (chunk.replicas.get(chunk.compute_tier) for chunk in chunks)
        return all(replica is not None and replica.pins > 0 for replica in replicas)

    def _parameters_in(self, value: object) -> Iterator[ManagedParameter]:
        for tensor in tensors_in(value, object_depth=0):
            managed = self._managed.get(id(tensor))
            if managed is not None and managed.param is tensor:
                yield managed


def _alone(param: torch.Tensor, func: Callable[..., Any]) -> Any:
    """Return `param.data`, or its storage, without the rest of the chunk. It keeps the chunk's memory alive."""
    alone = torch.from_dlpack(param.detach())  # type: ignore[attr-defined]
    return alone if func == _GET_DATA else func(alone)


def _make_class(plain: type[nn.Parameter], server: weakref.ref[ParameterOperators]) -> type[nn.Parameter]:
    """Return the class of parameters that serve themselves and were of class `plain`.

    It refers to the server weakly: torch keeps parameters in ways that Python's collector of cycles cannot see.
    """

    class ServedParameter(Served, plain):  # type: ignore[misc, valid-type]
        __doc__ = plain.__doc__

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
        ) -> Any:
            alive = server()
            if alive is None:
                if func in FREE:
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **(kwargs or {}))
                raise StateError(
                    "the manager of this parameter is gone, and the values with it; take manager.state_dict() before"
                )
            return alive.call(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                memo[id(self)] = plain(self.detach().clone(), self.requires_grad)
            return memo[id(self)]  # type: ignore[no-any-return]

        def __copy__(self) -> nn.Parameter:
            return plain(self.data, self.requires_grad)  # in the same memory

        def __reduce_ex__(self, protocol: Any) -> Any:
            return plain(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)

    ServedParameter.__name__ = ServedParameter.__qualname__ = plain.__name__
    return ServedParameter
