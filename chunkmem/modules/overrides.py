"""What a managed module answers when asked for its state, or to be moved or converted."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.lazy_tensor import LazyTensor
from chunkmem.modules.parameter_reads import check_own
from chunkmem.modules.uninitialized import UninitializedValues
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.step_events import StepEvents


class _Given:
    """A copy that was given out, of which nothing is kept but the counter of writes to it."""

    def __init__(self, key: str, copy: torch.Tensor) -> None:
        self.key = key
        self.copy = weakref.ref(copy)
        with runtime_mode():
            self.counter = copy.detach()  # has the same counter
            self.counter.data = torch.empty(0, dtype=copy.dtype, device=copy.device)  # and no memory
        self.version = self.counter._version


class ModuleOverrides:
    """Serves `state_dict` and `load_state_dict` of managed modules, and refuses `.to()` and its kin."""

    def __init__(
        self,
        events: StepEvents,
        *,
        read: Callable[[ManagedParameter], torch.Tensor],
        lazy: Callable[[ManagedParameter], LazyTensor],
        write: Callable[[ManagedParameter, torch.Tensor], None],
        saving: Callable[[Iterable[ManagedParameter]], AbstractContextManager[None]],
    ) -> None:
        """Make the overrides.

        Args:
            events: tell when modules are compiled.
            read: returns a CPU copy of a parameter's newest values.
            lazy: returns them as what is read when it is used.
            write: replaces them.
            saving: surrounds what a module does to put its parameters into a `state_dict`.
        """
        events.compiled.append(self.look_again)
        self._saving = saving
        self.read = read
        self._lazy = lazy
        self.write = write
        self._loaded: dict[nn.Module, list[str]] = {}
        """Keys of a state that have been loaded, of modules whose loading is not over."""
        self._value: Callable[[ManagedParameter], torch.Tensor] | None = None
        """Returns what a `state_dict` that is being made here has of a parameter; None: it is a user who makes one."""
        self._given: list[_Given] = []
        """Copies that `model.state_dict()` gave out."""
        self.fitted = FittedModules()
        """What was fitted so far."""
        self._owned: WeakKeyDictionary[nn.Module, Mapping[str, ManagedParameter]] = WeakKeyDictionary()
        """The managed parameters of modules that have some."""
        self._places: tuple[list[dict[str, Any]], list[str], list[nn.Parameter]] | None = None
        """The same, a parameter each: what its module has it in, its name there, and itself; None: look them up."""
        self.uninitialized = UninitializedValues()
        """What was packed without values."""

    def check_copies(self) -> None:
        """Raise, once, if somebody has written to a value of `model.state_dict()`: in plain PyTorch it is a view.

        Raises:
            StateError: the write is lost.
        """
        for given in self._given:
            if given.counter._version != given.version:
                self._given.remove(given)
                raise StateError(
                    f"{given.key} of model.state_dict() was written to; it is a copy, and the parameter does not see "
                    "that. Write to the parameter in place, or load the values with load_state_dict()"
                )
        self._given = [given for given in self._given if given.copy() is not None]

    def look_again(self) -> None:
        """Modules are about to have their parameters in other mappings."""
        self._places = None

    def check(self) -> None:
        """Raise if something still stands in for a managed parameter; see `check_own`."""
        if self._places is None:
            holders, names, params = self._places = [], [], []
            for module, own in self._owned.items():
                holders += [module._parameters] * len(own)
                names += own
                params += [managed.param for managed in own.values()]
        holders, names, params = self._places
        # In C, and without the modules themselves: most of a step's looks at all parameters is waiting for memory.
        if not all(map(is_, map(dict.get, holders, names), params)):
            for module, own in self._owned.items():
                check_own(module._parameters, own)

    def state_dict(self, root: nn.Module, *, lazily: bool = False) -> dict[str, Any]:
        """Return `root.state_dict()` with every tensor copied to the CPU; tied names share one copy.

        Args:
            root: of the model.
            lazily: managed parameters are `LazyTensor`s.
        """
        # Weak: of tiles that are joined to a layer, only the whole remains.
        copies = weakref.WeakValueDictionary[ManagedParameter, torch.Tensor]()
        state = self._state_of(root, _once(self._lazy if lazily else self.read, copies))
        made = {id(tensor) for tensor in copies.values()}
        for key, value in state.items():
            # What is on no device is in another pipeline stage.
            is_copied = isinstance(value, LazyTensor) or id(getattr(value, "_local_tensor", value)) in made
            if isinstance(value, torch.Tensor) and not is_copied and not value.is_meta:
                state[key] = value.detach().to("cpu", copy=True)
        return state

    def expected_state(self, root: nn.Module) -> dict[str, Any]:
        """Return a `root.state_dict()` of which only the keys and shapes are right."""
        return self._state_of(root, lambda m: torch.empty(m.shape, dtype=m.built_dtype, device="meta"))

    def _state_of(self, root: nn.Module, value: Callable[[ManagedParameter], torch.Tensor]) -> dict[str, Any]:
        self._value = value
        try:
            return root.state_dict()
        finally:
            self._value = None

    def fit(self, root: nn.Module, owned: Mapping[nn.Module, Mapping[str, ManagedParameter]]) -> None:
        """Fit every module under `root`; `owned` holds the managed parameters of those that have some."""
        self._owned.update(owned)
        self.look_again()
        for module, own in owned.items():
            self.fitted.add(
                module,
                module._register_state_dict_hook(partial(self._on_state_dict, own)),
                module.register_load_state_dict_pre_hook(partial(self._before_load, own)),
                module.register_load_state_dict_post_hook(self._after_load),
            )
            # Before the hooks of the user, which may rename what they find.
            _put_last_first(module._state_dict_hooks)
            _put_last_first(module._load_state_dict_post_hooks)
            self.fitted.set(module, "_save_to_state_dict", partial(_save, module, own, self._saving))
            self.fitted.set(module, "extra_repr", partial(_extra_repr, module))
            if isinstance(module, nn.RNNBase):
                # It would re-point the weights at a buffer of cuDNN's own.
                self.fitted.set(module, "flatten_parameters", lambda: None)
            self.fitted.set(module, "__prepare_scriptable__", partial(_refuse_script, next(iter(own.values()), None)))
        for module in root.modules():
            if "_apply" not in vars(module):  # a module of two models is fitted once
                self.fitted.set(module, "_apply", partial(_apply_to_buffers, module, dict(owned.get(module, {}))))

    def _on_state_dict(
        self, own: Mapping[str, ManagedParameter], _module: nn.Module, state: dict[str, Any], prefix: str, _meta: Any
    ) -> None:
        value = self._value or _once(self.read, {})
        for name, managed in own.items():
            if prefix + name in state:
                made = state[prefix + name] = value(managed)
                if self._value is None:
                    self._given.append(_Given(prefix + name, made))

    def _before_load(
        self, own: Mapping[str, ManagedParameter], module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any
    ) -> None:
        """Load what fits, where it is, and take it out of `state`: the module itself would need it on DEVICE."""
        loaded = self._loaded[module] = []
        for name, managed in own.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == managed.shape:
                self.write(managed, value)
                self.uninitialized.came(managed)
                self._given = [given for given in self._given if given.copy() is not value]
                loaded.append(prefix + name)
                del state[prefix + name]

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for key in self._loaded.pop(module, ()):
            if key in incompatible.missing_keys:
                incompatible.missing_keys.remove(key)


def _once(
    make: Callable[[ManagedParameter], torch.Tensor], made: MutableMapping[ManagedParameter, torch.Tensor]
) -> Callable[[ManagedParameter], torch.Tensor]:
    """Make one value for all names of a parameter: what is among those `made` is found there."""

    def value(managed: ManagedParameter) -> torch.Tensor:
        found = made.get(managed)
        if found is None:
            found = made[managed] = make(managed)
        return found

    return value


def _apply_to_buffers(
    module: nn.Module,
    own: Mapping[str, ManagedParameter],
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    """Stand in for `nn.Module._apply`, which `.to()`, `.half()`, `.cuda()` and `.share_memory()` go through.

    Raises:
        StateError: `fn` would move or convert a managed parameter; nothing has been changed.
    """
    inside = {id(m.param): m for child in module.modules() for m in _own(child).values()}
    for managed in inside.values():
        probe = _probe(managed)
        shared = probe.is_shared()  # on CUDA, always
        result = fn(probe)
        if managed.is_drawn and result is not probe:
            raise StateError(
                f"parameter {managed.name} was on the meta device, and was initialised when the model was packed; to "
                "empty it and initialise it again would take other random numbers than plain PyTorch does. Give the "
                "initialiser to manager.wrap(model, param_init_fn=...) in the place of to_empty()"
            )
        kept = result.dtype == probe.dtype and result.device == probe.device and result.stride() == probe.stride()
        if not kept or result.is_shared() != shared:
            raise StateError(
                f"parameter {managed.name} is {probe.dtype} on {probe.device} and chunkmem decides where and how it "
                f"lives; moving or converting it is refused (asked for: {result.dtype} on {result.device}). Choose "
                "dtype and memory format before manager.wrap() or inside manager.init()"
            )

    def keep_managed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in inside else fn(tensor)

    with _looked_at(module):  # an RNN looks all its weights up
        return type(module)._apply(module, keep_managed, recurse)  # type: ignore[no-any-return]


def _refuse_script(managed: ManagedParameter | None) -> NoReturn:
    """Stand in for what `torch.jit.script` asks a module for before it reads its code."""
    raise StateError(
        f"parameter {managed} is managed: torch.jit.script would keep it itself, and its memory comes and goes; script "
        "copy.deepcopy(model), an ordinary model"
    )


def _save(
    module: nn.Module,
    own: Mapping[str, ManagedParameter],
    saving: Callable[[Iterable[ManagedParameter]], AbstractContextManager[None]],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stand in for `nn.Module._save_to_state_dict`, which takes the values as they are; ours are filled in after."""
    check_own(module._parameters, own)
    with saving(own.values()):
        type(module)._save_to_state_dict(module, *args, **kwargs)


def _extra_repr(module: nn.Module) -> str:
    """Stand in for `nn.Module.extra_repr`, which asks whether there is a bias: `print(model)` uses no values."""
    with _looked_at(module):
        return str(type(module).extra_repr(module))


@contextmanager
def _looked_at(module: nn.Module) -> Iterator[None]:
    """Take lookups of the module's parameters for what they are: nobody is going to use the values."""
    reads = module._parameters
    vars(module)["_parameters"] = dict(reads)
    try:
        yield
    finally:
        vars(module)["_parameters"] = reads


def _put_last_first(hooks: dict[int, Callable[..., Any]]) -> None:
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(next(reversed(hooks)), last=False)


def _own(module: nn.Module) -> Mapping[str, ManagedParameter]:
    stand_in = module.__dict__.get("_apply")
    return stand_in.args[1] if isinstance(stand_in, partial) else {}


def _probe(managed: ManagedParameter) -> torch.Tensor:
    """Return a small tensor that answers a conversion as the parameter would, memory format included."""
    order = sorted(range(len(managed.stride)), key=lambda dim: -managed.stride[dim])
    sizes = [min(extent, 2) for extent in managed.shape]
    return torch.empty_permuted(sizes, order, dtype=managed.placeholder.dtype, device=managed.bound.device)
