"""The models of a manager: which parameters are managed or excluded, and their values read and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from chunkmem.errors import CheckpointError, StateError
from chunkmem.layout.pack import choose_slab_nbytes, pack
from chunkmem.layout.spec import ALIGN_NBYTES, Layout, MasterCopy
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.built import HERE, Built
from chunkmem.nn.packable import check_separate, check_unmanaged, named_parameters_of
from chunkmem.nn.packing import PackedModel, Packer, tensor_specs
from chunkmem.nn.precision import AS_BUILT, Precision, precision_of
from chunkmem.runtime.device import runtime_mode


class ModelRegistry:
    """Everything packed so far."""

    def __init__(
        self,
        packer: Packer,
        *,
        choose_on_host: Callable[[Sequence[nn.Module], Collection[nn.Module]], frozenset[nn.Module]],
        chunk_numel: int | None,
        device_cap_nbytes: int,
        dtype: torch.dtype = torch.float32,
        master_weights: bool = True,
        num_ranks: int = 1,
    ) -> None:
        """Make an empty registry; `chunk_numel` None searches the slab size on the first model.

        `dtype` is what modules compute in, and `master_weights` whether updates are in float32; see `precision_of`.
        `num_ranks` share the chunks: slabs are small enough that each rank gets about as many bytes. `choose_on_host`
        returns the modules under roots, of which some are excluded, that compute on HOST.
        """
        self._choose_on_host = choose_on_host
        self._num_ranks = num_ranks
        self._dtype = dtype
        self._master_weights = master_weights
        self._packer = packer
        self._chunk_numel = chunk_numel
        self._device_cap_nbytes = device_cap_nbytes
        self._slab_nbytes: int | None = None
        self._managed: dict[int, ManagedParameter] = {}
        self._excluded: dict[int, torch.Tensor] = {}
        self._elsewhere: dict[int, torch.Tensor] = {}
        """Parameters that only other pipeline stages have."""
        self._place_of: dict[int, int] = {}
        """By the identity of a parameter, managed or excluded: the place in `model.parameters()`, model after model."""
        self.counted_elsewhere: set[ManagedParameter] = set()
        """Parameters that another pipeline stage has, too, and counts in norms."""
        self.models: list[PackedModel] = []
        self.precision = AS_BUILT
        """Of what was added last."""
        self.on_host: frozenset[nn.Module] = frozenset()
        """Modules that compute on HOST, of what was added last."""

    @property
    def parameters(self) -> Iterator[ManagedParameter]:
        """All managed parameters."""
        return (managed for model in self.models for managed in model.parameters)

    @property
    def slab_nbytes(self) -> int | None:
        """Of the model that was added last; None before the first."""
        return self._slab_nbytes

    @property
    def padding_nbytes(self) -> int:
        """Bytes of PARAM chunks that hold no parameter."""
        return sum(model.layout.padding_nbytes for model in self.models)

    def add(self, roots: Sequence[nn.Module], excluded: Sequence[nn.Module], built: Built = HERE) -> list[PackedModel]:
        """Pack the parameters under `roots`; `precision` is theirs then. All are checked before the first is touched.

        Raises:
            LayoutError, StateError, CapacityError: see `named_parameters_of` and `Packer.pack`.
        """
        on_host = self._choose_on_host(roots, excluded)
        built.check(excluded)
        known = set(self._managed)
        named: list[list[tuple[str, nn.Parameter]]] = []
        for root in roots:
            # What another model holds too, packed before or above, has its slot already.
            own = named_parameters_of(root, excluded=excluded, built=built)
            found = [(n, p) for n, p in own if id(p) not in known]
            check_unmanaged(found)
            known.update(id(param) for _, param in found)
            named.append(found)
        if built.has_memory:
            check_separate(roots, packed=known)
        precision = precision_of(
            roots, self._dtype, master_weights=self._master_weights, excluded=excluded, packed=self._managed
        )
        precision = _with_masters(precision, built.masters)
        slab_nbytes = self._slab_nbytes if built.slab_nbytes is None else built.slab_nbytes
        if any(named) and (slab_nbytes is None or (self._chunk_numel is not None and built.slab_nbytes is None)):
            slab_nbytes = self._choose_slab_nbytes(named, precision, on_host, num_ranks=self._num_ranks)
        packable = {
            root: pairs
            for root, pairs in zip(roots, named, strict=True)
            if any(id(p) in known for p in root.parameters())
        }
        added = self._pack(packable, slab_nbytes or ALIGN_NBYTES, precision, built, on_host=_parameters_of(on_host))
        self._slab_nbytes = slab_nbytes
        self.models += added
        self.precision, self.on_host = precision, on_host
        for packed in added:
            self._managed.update((id(managed.param), managed) for managed in packed.parameters)
        for module in excluded:
            self._excluded.update((id(param), param) for param in module.parameters(recurse=False))
        self.place(param for module in (*roots, *excluded) for param in module.parameters())
        return added

    def preview(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        num_ranks: int,
        slab_nbytes: int | None = None,
        masters: Mapping[int, MasterCopy] = MappingProxyType({}),
    ) -> list[tuple[Layout, list[nn.Parameter]]]:
        """Return the layouts that models which are packed would have if they were packed again; nothing is changed.

        Args:
            roots: parts of them.
            excluded: modules under `roots` that stay ordinary.
            num_ranks: that share the chunks then.
            slab_nbytes, masters: see `Built`.

        Returns:
            The layout of each root, and its parameters.
        """
        on_host = self._choose_on_host(roots, excluded)
        known = {id(param) for module in excluded for param in module.parameters(recurse=False)}
        named: list[list[tuple[str, nn.Parameter]]] = []
        for root in roots:
            named.append([(name, param) for name, param in root.named_parameters() if id(param) not in known])
            known.update(id(param) for _, param in named[-1])
        found = precision_of(roots, self._dtype, master_weights=self._master_weights, excluded=excluded)
        # What is frozen was built in another dtype, maybe, than it has in its chunk.
        frozen = (m for m in self.parameters if not m.requires_grad and m.built_dtype is not m.placeholder.dtype)
        packed = {id(m.param): MasterCopy.PACKED for m in frozen}
        precision = _with_masters(found, {**packed, **masters})
        if slab_nbytes is None and any(named):
            slab_nbytes = self._choose_slab_nbytes(named, precision, on_host, num_ranks=num_ranks)
        layouts: list[tuple[Layout, list[nn.Parameter]]] = []
        for pairs in named:
            specs = tensor_specs(pairs, precision, on_host=_parameters_of(on_host))
            first = sum(len(layout.groups) for layout, _ in layouts)
            layout = pack(specs, slab_nbytes=slab_nbytes or ALIGN_NBYTES, first_group=first)
            layouts.append((layout, [param for _, param in pairs]))
        return layouts

    def place(self, params: Iterable[nn.Parameter]) -> None:
        """Give those parameters that have none yet a place after all others."""
        for param in params:
            self._place_of.setdefault(id(param), len(self._place_of))

    def adopt(self, params: Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """Take in what was added to packed models since, as ordinary parameters; return what was not known before.

        Adapters made by `get_peft_model(manager.wrap(model))` are such. What is in no model stays unknown.
        """
        unknown = {id(param) for param in params}.difference(self._managed, self._excluded)
        if not unknown:
            return []
        models = [param for model in self.models for param in model.root.parameters()]
        added = {id(param): param for param in models if id(param) in unknown}
        self._excluded.update(added)
        before, self._place_of = self._place_of, {}
        self.place(models)
        for key in before.keys() - self._place_of.keys():
            self._place_of[key] = len(self._place_of) + before[key]
        return list(added.values())

    def add_elsewhere(self, params: Iterable[nn.Parameter]) -> None:
        """Take in parameters of other pipeline stages, which never have a gradient here."""
        self._elsewhere.update((id(param), param) for param in params)
        self._excluded.update(self._elsewhere)

    def is_elsewhere(self, param: torch.Tensor) -> bool:
        """Tell whether only another pipeline stage has a parameter."""
        return id(param) in self._elsewhere

    def _pack(
        self,
        named: Mapping[nn.Module, Sequence[tuple[str, nn.Parameter]]],
        slab_nbytes: int,
        precision: Precision,
        built: Built,
        *,
        on_host: Collection[int],
    ) -> list[PackedModel]:
        """Pack all roots or, if one cannot be, none."""
        added: list[PackedModel] = []
        first = sum(len(model.layout.groups) for model in self.models)
        try:
            for root, pairs in named.items():
                packed = self._packer.pack(
                    root,
                    pairs,
                    slab_nbytes=slab_nbytes,
                    first_group=first,
                    precision=precision,
                    on_host=on_host,
                    built=built,
                )
                first += len(packed.layout.groups)
                added.append(packed)
            built.complete([managed for packed in added for managed in packed.parameters])
        except BaseException:
            for packed in added:
                self._packer.unpack(packed.layout, built)
            raise
        return added

    def managed_under(self, root: nn.Module) -> dict[int, ManagedParameter]:
        """Return the managed parameters of a model by the identity of their Parameter."""
        return {id(p): self._managed[id(p)] for p in root.parameters() if id(p) in self._managed}

    def has_parameter_in(self, module: nn.Module) -> bool:
        """Tell whether a managed parameter is in a module, or in one below it."""
        return any(id(param) in self._managed for param in module.parameters())

    def find(self, param: object) -> ManagedParameter | None:
        """Return what is known of a managed parameter; None for anything else."""
        return self._managed.get(id(param))

    def is_known(self, param: torch.Tensor) -> bool:
        """Tell whether a parameter is managed, or an ordinary one of these models."""
        return id(param) in self._managed or id(param) in self._excluded

    def lookup(self, param: torch.Tensor) -> ManagedParameter | None:
        """Return what is known of a parameter; None for an ordinary one: of an excluded module, or adopted.

        Raises:
            StateError: it is not known.
        """
        managed = self._managed.get(id(param))
        if managed is None and id(param) not in self._excluded:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} is neither managed nor excluded by this manager; build its "
                "model inside manager.init() or pass it to manager.wrap() first"
            )
        return managed

    def in_order(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters of these models as `model.parameters()` has them, models in the order of packing."""
        return sorted(params, key=lambda param: self._place_of[id(param)])

    def only_root(self, model: nn.Module | None) -> nn.Module:
        """Return `model`, or the manager's only model if it is None.

        Raises:
            StateError: `model` is not of this manager, or none was named and there is none or there are several.
        """
        if model is not None:
            if not any(id(param) in self._managed or id(param) in self._excluded for param in model.parameters()):
                raise StateError(
                    f"this {type(model).__name__} has no parameter of this manager; build it inside manager.init() or "
                    "pass it to manager.wrap() first"
                )
            return model
        if len(self.models) != 1:
            raise StateError(f"this manager has {len(self.models)} models; say which one is meant: model=...")
        return self.models[0].root

    def check(self) -> None:
        """Look all parameters over, then raise if one no longer stands where it was packed; see `BoundChunk.check`."""
        errors = []
        with runtime_mode():
            for bound in dict.fromkeys(managed.bound for managed in self.parameters):
                try:
                    bound.check()
                except StateError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _choose_slab_nbytes(
        self,
        named: Iterable[Sequence[tuple[str, nn.Parameter]]],
        precision: Precision,
        on_host: Iterable[nn.Module],
        *,
        num_ranks: int,
    ) -> int:
        away = _parameters_of(on_host)
        pairs = [pair for pairs in named for pair in pairs]
        on_device = [(name, param) for name, param in pairs if id(param) not in away]
        return choose_slab_nbytes(
            tensor_specs(on_device or pairs, precision),
            chunk_numel=self._chunk_numel,
            device_cap_nbytes=self._device_cap_nbytes,
            num_ranks=num_ranks,
        )


def _with_masters(precision: Precision, masters: Mapping[int, MasterCopy]) -> Precision:
    """Return a precision in which these parameters, if they are in a low dtype, have such master weights."""
    known = {key: master for key, master in masters.items() if key in precision.masters}
    return replace(precision, masters={**precision.masters, **known})


def _parameters_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the modules' own parameters."""
    return {id(param) for module in modules for param in module._parameters.values() if param is not None}


def check_fits(state: Mapping[str, Any], expected: Mapping[str, Any], *, strict: bool) -> None:
    """Compare a state_dict to be loaded with a model's own.

    Raises:
        CheckpointError: it is not a mapping, keys are missing or unexpected (`strict`), or shapes differ. All are
            named.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state_dict is a mapping of names to tensors, this is a {type(state).__name__}")
    problems = []
    if strict:
        missing = [key for key in expected if key not in state]
        unexpected = [key for key in state if key not in expected]
        problems += [f"missing {', '.join(missing)}"] if missing else []
        problems += [f"unexpected {', '.join(map(str, unexpected))}"] if unexpected else []
    for key, own in expected.items():
        value = state.get(key)
        if key in state and isinstance(own, torch.Tensor):
            if not isinstance(value, torch.Tensor):
                problems.append(f"{key} is a {type(value).__name__}, not a tensor")
            elif value.shape != own.shape:
                problems.append(f"{key} is {tuple(value.shape)} instead of {tuple(own.shape)}")
    if problems:
        raise CheckpointError(f"the weights do not fit the model: {'; '.join(problems)}; nothing was loaded")
