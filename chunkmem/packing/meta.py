"""Models on the meta device: packed by the shapes of their parameters, then initialised module by module.

For that, parameters of chunks are lent to a module's initialiser as ordinary tensors, one call at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import LayoutError
from chunkmem.data.layout import Layout
from chunkmem.modules.binding import ManagedParameter, blank, blank_value, move_to
from chunkmem.modules.overrides import ModuleOverrides
from chunkmem.modules.parameter_reads import is_managed, own_parameters
from chunkmem.modules.uninitialized import UninitializedValues
from chunkmem.packing.built import Built, FreedRam
from chunkmem.packing.initialisers import Initialisation, Initialisers, initialisations, tie_again, without_initialiser
from chunkmem.packing.other_stages import hook_again
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import runtime_mode


@dataclass(eq=False, slots=True)
class _Materialized:
    """What stands in for a parameter while an initialiser runs."""

    managed: ManagedParameter | None
    """None: another pipeline stage has it."""
    tensor: nn.Parameter
    version: int
    """The tensor's, before anybody has written to it."""
    is_kept: bool
    """What it is given becomes the parameter's value."""


class MaterializedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters`, which lends what is looked up."""

    __slots__ = ("_materializer", "_module")

    def __init__(self, module: nn.Module, materializer: ParameterMaterializer) -> None:
        super().__init__(module._parameters)
        self._module, self._materializer = module, materializer

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = dict.__getitem__(self, name)
        materialized = self._materializer.lend(self._module, param)
        return param if materialized is None else materialized.tensor

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if dict.__contains__(self, name) else default

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        return ((name, self[name]) for name in list(self))

    def values(self) -> Iterator[nn.Parameter | None]:  # type: ignore[override]
        return (self[name] for name in list(self))

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        """Take the values of what is assigned in the place of a parameter that is lent."""
        param = dict.get(self, name)
        materialized = self._materializer.lend(self._module, param)
        if param is None or materialized is None:
            dict.__setitem__(self, name, value)
        elif value is None or value.shape != param.shape or value.is_meta:
            form = "None" if value is None else f"one of {tuple(value.shape)} on {value.device}"
            raise LayoutError(
                f"parameter {materialized.managed or tuple(param.shape)} of a model on the meta device was replaced "
                f"by {form} while it was initialised; write to it in place"
            )
        else:
            materialized.tensor, materialized.version = value, -1


class ParameterMaterializer:
    """Has initialisers write to parameters that are in chunks.

    While one runs, a parameter that it looks up, in whatever module, is in memory as a whole; then its slot has the
    values, over ranks that of its owner. So what one call looks up is in memory at a time.
    """

    def __init__(
        self,
        root: nn.Module,
        managed: Mapping[int, ManagedParameter],
        without_values: Collection[int],
        overrides: ModuleOverrides,
        *,
        keeps: bool,
    ) -> None:
        """Lend nothing yet.

        Args:
            root: the model.
            managed: its parameters that are in chunks, by the identity of each.
            without_values: those that get values; others have theirs, and keep them.
            overrides: reads a parameter's values as it was built, which all ranks do, and writes those of this rank.
            keeps: false: what initialisers write to parameters is thrown away.
        """
        self._root = root
        self._managed = managed
        self._overrides = overrides
        self._taking = frozenset(without_values if keeps else ())
        self._blank = set(without_values)
        """Those whose slots have no values yet."""
        self.incomplete = set(self._taking)
        """Those of which elements have got none yet."""
        self._first: dict[int, nn.Module] = {}
        """By parameter, the module that is visited first."""
        self._materialized: dict[object, _Materialized] = {}
        self._is_tied = False
        self._freed = FreedRam()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Have modules lend their parameters to those who look them up."""
        found = {module: module._parameters for module in self._root.modules()}
        for module in found:
            vars(module)["_parameters"] = MaterializedParameters(module, self)
        try:
            yield
        finally:
            for module, params in found.items():
                params.update(dict.items(module._parameters))  # what was registered meanwhile; lends nothing
                vars(module)["_parameters"] = params

    def run(self, call: Initialisation) -> None:
        """Run an initialiser, and keep what it has written.

        Raises:
            LayoutError: it has given a parameter another shape.
        """
        self._is_tied = call.is_tied
        try:
            call.run()
            for materialized in self._materialized.values():
                if materialized.managed is not None and materialized.is_kept:
                    self._keep(materialized.managed, materialized)
        finally:
            nbytes = sum(materialized.tensor.nbytes for materialized in self._materialized.values())
            self._materialized.clear()
            self._freed.add(nbytes)

    def lend(self, module: nn.Module, param: nn.Parameter | None) -> _Materialized | None:
        """Return what stands in for a parameter of a module until the call is over; None if it has memory itself."""
        managed = self._managed.get(id(param))
        if param is None or (managed is None and not param.is_meta):
            return None
        # Who is not visited first of those that share a parameter writes to one that is thrown away.
        is_first = self._first.setdefault(id(param), module) is module or self._is_tied
        key = id(param) if is_first else (id(param), id(module))
        if key not in self._materialized:
            if managed is None or id(param) in self._blank:
                values = blank_like(param, managed)
            else:
                values = self._overrides.read(managed)
            tensor = nn.Parameter(values, requires_grad=param.requires_grad)
            vars(tensor).update(vars(param))
            self._materialized[key] = _Materialized(
                managed, tensor, tensor._version, is_first and id(param) in self._taking
            )
        return self._materialized[key]

    def _keep(self, managed: ManagedParameter, materialized: _Materialized) -> None:
        key, values = id(managed.param), materialized.tensor.detach()
        vars(managed.param).update(vars(materialized.tensor))
        self._blank.discard(key)
        if not has_gaps(values, has_moved=materialized.tensor._version != materialized.version):
            self.incomplete.discard(key)
        self._overrides.write(managed, values)


def blank_like(param: torch.Tensor, managed: ManagedParameter | None = None) -> torch.Tensor:
    """Return a CPU tensor of the same shape and dtype without values: NaN, or 0 of what has none."""
    dtype = param.dtype if managed is None else managed.built_dtype
    values = torch.empty(param.shape, dtype=dtype, device="cpu")
    return values.fill_(blank_value(values))


def has_gaps(values: torch.Tensor, *, has_moved: bool) -> bool:
    """Tell whether elements of what was `blank_like` have no values yet; `has_moved` is its version."""
    if blank_value(values) == 0:
        return not has_moved and values.numel() > 0
    # Its sum is NaN then; adding is cheaper, in memory, too, than asking each.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())


_NEXT_STEP = (
    "give the model to manager.wrap(model, param_init_fn=...), which is called for each module, children first, or "
    "build it on the CPU inside manager.init()"
)


def has_meta_tensors(roots: Iterable[nn.Module]) -> bool:
    """Tell whether a parameter or a buffer of a model that is not managed yet is on the meta device."""
    return any(next(_meta_tensors(root), None) is not None for root in roots)


def is_saved(module: nn.Module, key: str) -> bool:
    """Tell whether a module's state has a parameter or buffer."""
    return key not in module._non_persistent_buffers_set


def _meta_tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (name in the model, module, name in it, tensor)."""
    for path, module in root.named_modules():
        # To look a managed parameter up would be to read it.
        managed = is_managed(module)
        for key, tensor in [*(() if managed else module._parameters.items()), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                yield f"{path}.{key}".removeprefix("."), module, key, tensor


class BuiltOnMeta(Built):
    """Values of models, some of whose tensors have none.

    The layout of all chunks needs shapes and dtypes only. So chunks are made first, without values, and parameters move
    into them as if they had some. Then initialisers run, one call at a time, on ordinary tensors in RAM of the
    parameters that they look up, in the dtype that was built; their values go to the slots that this rank owns, and the
    tensors are freed. All ranks run all of it, and so draw the same random numbers.

    Tensors that no chunk holds, buffers and parameters of excluded modules, get memory at once, on every rank. Whatever
    has no value at the end, or half of one, is an error: until it has been written to, it is NaN.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        built: Built,
        shards: ShardStore | None,
        overrides: ModuleOverrides,
        initialisers: Initialisers,
    ) -> None:
        """Look for tensors without values.

        Args:
            roots: the models.
            built: where the values of the others are.
            shards: which rank owns what; None with one rank.
            overrides: reads a parameter's values as it was built, which all ranks do, and writes them, if this rank is
                to have them.
            initialisers: what the user wants.
        """
        for root in roots:
            tie_again(root)
        super().__init__(shards)
        self._roots = roots
        self._built = built
        self._overrides = overrides
        self._initialisers = initialisers
        found = [each for root in roots for each in _meta_tensors(root)]
        self._params = {id(tensor): tensor for _, _, _, tensor in found if isinstance(tensor, nn.Parameter)}
        self._buffers = [(module, key, buffer) for _, module, key, buffer in found if id(buffer) not in self._params]
        self._holders = {module for _, module, _, _ in found}
        self._with_unsaved = {module for _, module, key, _ in found if not is_saved(module, key)}
        self._uninitialized: list[tuple[str, nn.Module, str]] = []
        """Buffers and parameters of excluded modules that are going to be loaded."""
        self._ordinary: list[nn.Parameter] = []
        """Parameters of excluded modules."""

    def check(self, excluded: Collection[nn.Module]) -> None:
        """Raise a `LayoutError`, too, if nothing can give a tensor values, or only wrong ones."""
        self._built.check(excluded)
        self.strides = self._built.strides
        for root in self._roots if self._initialisers == Initialisers() else ():
            _check_adapters(root)
        left = {
            m for root in self._roots if self._initialisers.param_init_fn is None for m in without_initialiser(root)
        }
        for root in self._roots:
            for name, module, key, tensor in _meta_tensors(root):
                if module in left and not (self._initialisers.skip_init and is_saved(module, key)):
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise LayoutError(
                        f"{kind} {name} {tuple(tensor.shape)} is on the meta device and has no values, and its module, "
                        f"a {type(module).__name__}, has no reset_parameters() that gives it some; {_NEXT_STEP}"
                    )
        ordinary = own_parameters(excluded)
        self._ordinary = [param for key, param in self._params.items() if key in ordinary]

    def agree(self, layout: Layout) -> None:
        self._built.agree(layout)
        super().agree(layout)

    def comes_later(self, param: nn.Parameter) -> bool:
        return id(param) in self._params

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        if self.comes_later(param):
            return blank(param.dtype, torch.device("cpu"))
        return self._built.take(param, group, name=name)

    def give_back(self, managed: ManagedParameter) -> bool:
        if not self.comes_later(managed.param):
            return False
        with runtime_mode():
            _to_meta(managed.param)
        return True

    def complete(self, parameters: Sequence[ManagedParameter]) -> None:
        try:
            self._initialise({id(managed.param): managed for managed in parameters})
        except BaseException:
            for param in self._ordinary:
                _to_meta(param)
            for module, key, buffer in self._buffers:
                module._buffers[key] = buffer
            raise

    def tell(self, uninitialized: UninitializedValues, parameters: Sequence[ManagedParameter]) -> None:
        """Say what is going to be loaded of what was packed, and what was initialised, all being where it stays."""
        for managed in parameters:
            managed.is_drawn = self.comes_later(managed.param) and not self._initialisers.skip_init
        if self._initialisers.skip_init:
            params = [managed for managed in parameters if self.comes_later(managed.param)]
            uninitialized.expect(params, [(name, getattr(module, key)) for name, module, key in self._uninitialized])

    def _initialise(self, managed: dict[int, ManagedParameter]) -> None:
        for key in self._params.keys() & managed.keys():
            hook_again(managed[key].param)
        # Whatever device the user has around it: initialisers make tensors, too.
        with torch.no_grad(), torch.device("cpu"):
            made = self._make_ordinary()
            for root in self._roots:
                materializer = ParameterMaterializer(
                    root,
                    managed,
                    self._params.keys() & managed.keys(),
                    self._overrides,
                    keeps=not self._initialisers.skip_init,
                )
                with materializer.lending():
                    for call in initialisations(root, self._initialisers.param_init_fn, holders=self._holders):
                        if not self._initialisers.skip_init or call.module in self._with_unsaved:
                            materializer.run(call)
                self._check_all(root, materializer.incomplete, made)

    def _make_ordinary(self) -> set[int]:
        """Give memory to what no chunk holds; return the identities of the tensors that have it."""
        for param in self._ordinary:
            move_to(param, blank_like(param))
            hook_again(param)
        made = {id(buffer): blank_like(buffer) for _, _, buffer in self._buffers}
        for module, key, buffer in self._buffers:
            module._buffers[key] = made[id(buffer)]
        return {id(tensor) for tensor in (*self._ordinary, *made.values())}

    def _check_all(self, root: nn.Module, incomplete: Collection[int], made: Collection[int]) -> None:
        """Raise a `LayoutError` if something has no values yet, or not all; `made` has got memory meanwhile."""
        for path, module in root.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                is_left = id(tensor) in incomplete
                if id(tensor) in made:
                    is_left = has_gaps(tensor.detach(), has_moved=tensor._version > 1)
                if is_left and self._initialisers.skip_init and is_saved(module, key):
                    self._uninitialized.append((f"{path}.{key}".removeprefix("."), module, key))
                    continue
                if is_left or (tensor.is_meta and id(tensor) not in self._params):  # else another stage's
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise LayoutError(
                        f"{kind} {path}.{key} {tuple(tensor.shape)} of a model on the meta device has no values, or "
                        f"not all, when its {type(module).__name__} has been initialised; {_NEXT_STEP}"
                    )
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise LayoutError(
                        f"attribute {path}.{key} is a tensor on the meta device, and no parameter and no buffer: it "
                        "can get no values; make it a buffer, or build the model on the CPU inside manager.init()"
                    )


def _check_adapters(root: nn.Module) -> None:
    """Raise a `LayoutError` for layers of peft: their modules would initialise themselves otherwise than peft does."""
    for path, module in root.named_modules():
        if type(module).__module__.startswith("peft.") and callable(getattr(module, "reset_lora_parameters", None)):
            for name, _, _, tensor in _meta_tensors(module):
                if "lora_" in name:
                    raise LayoutError(
                        f"parameter {path}.{name} {tuple(tensor.shape)} of an adapter is on the meta device, and peft "
                        f"itself gives it its values when it makes it: make it on the CPU, or {_NEXT_STEP}"
                    )


def _to_meta(param: nn.Parameter) -> None:
    move_to(param, torch.empty_like(param, device="meta"))
    hook_again(param)
