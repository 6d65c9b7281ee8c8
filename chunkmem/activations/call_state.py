"""What a call may change besides what it returns, so that the call can be repeated as if for the first time.

[Note: A call is repeated] A forward that is recomputed would count twice: BatchNorm's running statistics, the `u` of
spectral norm, a list that it appends to, `self.num_calls += 1`. It would also read other weights than before, where
`functional_call` had tensors stand in for them, and other weights would need a gradient, where some were frozen since.
So before a call everything that it can reach by Python's references is written down, shallowly: attributes, buffers and
parameters of modules, lists, dicts, sets and plain objects (caches) that it is given or that its modules and closures
hold, cells of closures. The second call begins with these contents, and with copies of buffers as they were, and
everything gets back afterwards what it had before.

torch counts most writes to a tensor, but not those of BatchNorm's kernels. So a small buffer is always taken for a
written one, a large one if its version says so; and so are small tensors without gradient in attributes, containers and
cells. Others (an input, what is in a cache) are not copied: a write to one is an error.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from chunkmem.activations.contents import Slots, Weights, content_of, fill, is_same, replaced, slots_of
from chunkmem.activations.random_sources import Generator
from chunkmem.data.errors import StateError
from chunkmem.runtime.values import MODULE_FIELDS, over, storage_id

_SMALL_NBYTES = 64 * 1024
"""Buffers up to this size are kept as they were, whatever their version says."""
_MAX_ITEMS = 1024
"""Longer containers are copied, too, but not looked into: a vocabulary is not a cache."""
_OBJECT_DEPTH = 3
"""Objects of other people's classes are looked into so deep."""
_OPAQUE = (type, ModuleType, str, bytes, int, float, complex, torch.dtype, torch.device)
_OPAQUE_PACKAGES = frozenset({"torch", "chunkmem"})
_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most attributes are of these types, and lead nowhere."""
_NOT_CALLED = frozenset({
    "_apply", "compile", "_save_to_state_dict", "extra_repr", "__prepare_scriptable__", "__deepcopy__", "__reduce_ex__",
})  # fmt: skip
"""Methods that no forward calls; managed modules have their own as attributes."""


@dataclass(frozen=True)
class _Known:
    """A tensor, its version, and what to call it."""

    tensor: torch.Tensor
    version: int
    name: str


class CallState:
    """What a call can reach and change, as it is when this is made."""

    def __init__(
        self, function: Callable[..., Any] | None, args: Iterable[tuple[str, object]], *, copies_large: bool = True
    ) -> None:
        """Write down what `function` and its named arguments reach; of large buffers, without `copies_large`, not the
        values."""
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, Any]] = []
        """Something mutable each, and what was in it; see `content_of`."""
        self._tensors: dict[int, _Known] = {}
        """Those that must not be written to."""
        self.generators: dict[int, Generator] = {}
        """Generators of random numbers that the call reaches, by identity."""
        self._inputs: dict[int, _Known] = {}
        """The same; whoever recomputes has them, and compares their versions from now on."""
        self._buffers: dict[int, _Known] = {}
        for name, value in args:
            self._add_input(value, name)
        self._visit(function, "", depth=_OBJECT_DEPTH)
        kept = {key: known.tensor for key, known in self._buffers.items() if copies_large or is_small(known.tensor)}
        self._copies = copies_of(kept)

    def forget_unwritten(self, name: str, *, has_copy: Callable[[torch.Tensor], bool]) -> None:
        """The call called `name` is over: forget copies of what it has not written to.

        Args:
            name: of the call.
            has_copy: tells whether there is a copy of an input as it was, to recompute from.

        Raises:
            StateError: it wrote to a tensor that cannot be brought back.
        """
        inputs, self._inputs = self._inputs, {}
        own = (known for known in inputs.values() if not has_copy(known.tensor))
        for known in (*own, *self._tensors.values()):
            if _version(known.tensor) != known.version:
                raise StateError(
                    f"{name} is to be recomputed in backward, but wrote to {known.name} in place "
                    f"({_shape(known.tensor)}), so that it would begin with another value. Give it a copy "
                    "(.clone()), use the operator that is not in place, or do not recompute this module"
                )
        for key, known in list(self._buffers.items()):
            if not is_small(known.tensor) and _version(known.tensor) == known.version:
                del self._copies[key]

    @contextlib.contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Within, everything has what it had before the call, and afterwards what it has now.

        Raises:
            StateError: a tensor in a container was written to since the call.
        """
        for known in self._tensors.values():
            if _version(known.tensor) != known.version:
                raise StateError(
                    f"{name} cannot be recomputed: {known.name} ({_shape(known.tensor)}) was written to in place after "
                    "the forward that read it; give it a copy"
                )
        now, scratch = self._now(), copies_of(self._copies)
        try:
            self._fill(now, (replaced(content, scratch) for _, content in self._containers))
            yield
        finally:
            self._fill(self._now(), now)

    def _now(self) -> list[Any]:
        return [content_of(container) for container, _ in self._containers]

    def _fill(self, now: Iterable[Any], contents: Iterable[Any]) -> None:
        """Have the containers contain that, where it is something else now."""
        for (container, _), found, content in zip(self._containers, now, contents, strict=True):
            if not is_same(found, content):
                fill(container, content)

    def put_back(self) -> list[str]:
        """Have everything be as it was before the call, for good; return the names of what cannot be."""
        self._fill(self._now(), (content for _, content in self._containers))
        for key, copy in self._copies.items():
            with torch.no_grad():
                self._buffers[key].tensor.copy_(copy)
        lost = [known for key, known in self._buffers.items() if key not in self._copies]
        lost += [*self._inputs.values(), *self._tensors.values()]
        return [known.name for known in lost if _version(known.tensor) != known.version]

    def _add_input(self, value: object, name: str) -> None:
        """Visit an argument. Tensors in tuples are inputs, as those on their own."""
        if isinstance(value, torch.Tensor):
            self._inputs[id(value)] = _Known(value, _version(value), name)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                self._add_input(item, f"{name}[{index}]")
        else:
            self._visit(value, name, depth=_OBJECT_DEPTH)

    def _keep(self, container: Any) -> Any:
        """Note what is in something mutable, and return it."""
        content = content_of(container)
        self._containers.append((container, content))
        return content

    def _visit(self, value: Any, name: str, *, depth: int) -> None:
        if value is None or isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self._tensors[id(value)] = _Known(value, _version(value), name)
        elif isinstance(value, Generator):
            self.generators[id(value)] = value
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _SMALL_NBYTES and not value.dtype.hasobject:
                self._keep(value)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._visit_callable(value, name, depth=depth)
        elif isinstance(value, (list, tuple, set, frozenset, deque, dict)):
            self._visit_items(value, name, depth=depth)
            if depth and isinstance(value, dict) and hasattr(value, "__dict__"):
                self._visit_items(vars(value), name, depth=depth - 1, are_attributes=True)
        elif depth and _package(type(value)) not in _OPAQUE_PACKAGES:
            if hasattr(value, "__dict__"):
                self._visit_items(vars(value), name, depth=depth - 1, are_attributes=True)
            if slots := slots_of(type(value)):
                self._visit_items(Slots(value, slots), name, depth=depth - 1, are_attributes=True)

    def _visit_items(self, value: Any, name: str, *, depth: int, are_attributes: bool = False) -> None:
        if isinstance(value, (tuple, frozenset)):
            for index, item in enumerate(value):
                if type(item) not in _PLAIN:
                    self._visit(item, f"{name}[{index}]", depth=depth)
            return
        content = self._keep(value)
        if len(content) > _MAX_ITEMS:
            return
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, item in items:
            if type(item) not in _PLAIN:
                self._visit_item(item, f"{name}.{key}" if are_attributes else f"{name}[{key!r}]", depth=depth)

    def _visit_item(self, value: object, name: str, *, depth: int) -> None:
        """Visit what is in something whose content can be replaced."""
        if is_state(value):
            self._add_buffer(value, name)
        else:
            self._visit(value, name, depth=depth)

    def _visit_module(self, root: nn.Module, name: str) -> None:
        root_name = name or type(root).__name__
        for path, module in root.named_modules():
            if module is not root and id(module) in self._seen:
                continue
            self._seen.add(id(module))
            prefix = f"{root_name}.{path}" if path else root_name
            attributes = vars(module)
            self._keep(attributes)
            if module._parameters:
                self._keep(Weights(module._parameters))
            if module._buffers and not isinstance(module._buffers, dict):
                raise StateError(f"{prefix} has buffers and is scripted by torch.jit, which cannot be run twice alike")
            if module._buffers:
                self._keep(module._buffers)
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        self._add_buffer(buffer, f"{prefix}.{key}")
            for key, value in attributes.items():
                if type(value) not in _PLAIN and key not in MODULE_FIELDS and key not in _NOT_CALLED:
                    self._visit_item(value, f"{prefix}.{key}", depth=_OBJECT_DEPTH)

    def _add_buffer(self, buffer: torch.Tensor, name: str) -> None:
        if is_lazy(buffer):
            raise StateError(f"{name} has no values yet (a lazy module): call the module once before it is recomputed")
        if id(buffer) not in self._buffers:
            self._buffers[id(buffer)] = _Known(buffer, _version(buffer), name)

    def _visit_callable(self, value: Any, name: str, *, depth: int) -> None:
        if isinstance(value, partial):
            self._visit(value.func, name, depth=depth)
            self._visit(value.args, f"{name} arguments", depth=depth)
            self._visit(value.keywords, f"{name} arguments", depth=depth)
        elif isinstance(value, MethodType):
            self._visit(value.__self__, name, depth=depth)
            self._visit(value.__func__, name, depth=depth)
        elif value.__module__ is None or value.__module__.partition(".")[0] not in _OPAQUE_PACKAGES:
            for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._visit_item(self._keep(cell)[0], free, depth=depth)
            self._visit(value.__defaults__, "default", depth=depth)
            self._visit(value.__kwdefaults__, "default", depth=depth)
            for key in _global_names(value.__code__):
                found = value.__globals__.get(key)
                if isinstance(found, (nn.Module, list, tuple, dict)) or (depth and isinstance(found, FunctionType)):
                    self._visit(found, key, depth=depth - isinstance(found, FunctionType))


def is_small(tensor: torch.Tensor) -> bool:
    """Tell whether a copy of a tensor costs next to nothing."""
    return tensor.layout is torch.strided and tensor.nbytes <= _SMALL_NBYTES


def is_state(value: object) -> TypeGuard[torch.Tensor]:
    """Tell whether something is a small tensor without gradient, which may be written to where torch does not count."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or not value.is_leaf:
        return False
    return not value.requires_grad and not value.is_inference() and is_small(value)


def copies_of(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copy tensors; those that share memory share that of their copies."""
    if not tensors:
        return {}
    by_memory: dict[int, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        by_memory.setdefault(storage_id(tensor) or -key, {})[key] = tensor
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for alike in by_memory.values():
            if len(alike) == 1:
                found |= {key: tensor.detach().clone() for key, tensor in alike.items()}
                continue
            memory_copy = next(iter(alike.values())).untyped_storage().clone()
            for key, tensor in alike.items():
                found[key] = over(memory_copy, tensor)
    return {key: copy.requires_grad_(tensors[key].requires_grad) for key, copy in found.items()}


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _version(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
