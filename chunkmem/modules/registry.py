"""The models of a manager: which parameters are managed or excluded, and their values read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import CheckpointError, StateError
from chunkmem.data.layout import Layout
from chunkmem.modules.binding import BoundChunk, ManagedParameter
from chunkmem.ranks.local_parts import LocalPart
from chunkmem.runtime.device import runtime_mode


@dataclass(frozen=True)
class PackedModel:
    """One root module and what its parameters became."""

    root: nn.Module
    layout: Layout
    parameters: tuple[ManagedParameter, ...]


class ModelRegistry:
    """Everything packed so far."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.managed: dict[int, ManagedParameter] = {}
        """Parameters, by the identity of what the user has."""
        self.excluded: dict[int, torch.Tensor] = {}
        """Parameters that are known and not managed, by identity."""
        self._of_other_stages: dict[int, torch.Tensor] = {}
        """Parameters that only other pipeline stages have."""
        self._bounds: dict[BoundChunk, None] = {}
        """Whose parameters these are."""
        self._place_of: dict[int, int] = {}
        """By the identity of a parameter, managed or excluded: the place in `model.parameters()`, model after model."""
        self.counted_elsewhere: set[ManagedParameter] = set()
        """Parameters that another rank has, too, and counts in norms: of another stage, or with the same local part."""
        self.local_parts: dict[int, LocalPart] = {}
        """Of what were DTensors, by the identity of the Parameter that is managed in their place."""
        self.each_ranks: set[int] = set()
        """Those of them that are parts over the ranks which share chunks, as experts are: each rank has its own."""
        self.models: list[PackedModel] = []
        self.parameters: list[ManagedParameter] = []
        """All managed parameters."""

    @property
    def padding_nbytes(self) -> int:
        """Bytes of PARAM chunks that hold no parameter."""
        return sum(model.layout.padding_nbytes for model in self.models)

    def add(self, packed: Sequence[PackedModel], roots: Iterable[nn.Module], excluded: Iterable[nn.Module]) -> None:
        """Take in models that were packed: `packed` are those of `roots`, and `excluded` modules stayed ordinary."""
        self.models += packed
        for model in packed:
            self.parameters += model.parameters
            self.managed.update((id(managed.param), managed) for managed in model.parameters)
            self._bounds.update((managed.bound, None) for managed in model.parameters)
        for module in excluded:
            self.excluded.update((id(param), param) for param in module.parameters(recurse=False))
        self.place(param for module in (*roots, *excluded) for param in module.parameters())

    def place(self, params: Iterable[nn.Parameter]) -> None:
        """Give those parameters that have none yet a place after all others."""
        for param in params:
            self._place_of.setdefault(id(param), len(self._place_of))

    def adopt(self, params: Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """Take in what was added to packed models since, as ordinary parameters; return what was not known before.

        Adapters made by `get_peft_model(manager.wrap(model))` are such. What is in no model stays unknown.
        """
        unknown = {id(param) for param in params}.difference(self.managed, self.excluded)
        if not unknown:
            return []
        models = [param for model in self.models for param in model.root.parameters()]
        added = {id(param): param for param in models if id(param) in unknown}
        self.excluded.update(added)
        before, self._place_of = self._place_of, {}
        self.place(models)
        for key in before.keys() - self._place_of.keys():
            self._place_of[key] = len(self._place_of) + before[key]
        return list(added.values())

    def add_of_other_stages(self, params: Iterable[nn.Parameter]) -> None:
        """Take in parameters of other pipeline stages, which never have a gradient here."""
        self._of_other_stages.update((id(param), param) for param in params)
        self.excluded.update(self._of_other_stages)

    def is_of_other_stage(self, param: torch.Tensor) -> bool:
        """Tell whether only another pipeline stage has a parameter."""
        return id(param) in self._of_other_stages

    def managed_under(self, root: nn.Module) -> dict[int, ManagedParameter]:
        """Return the managed parameters of a model by the identity of their Parameter."""
        return {id(p): self.managed[id(p)] for p in root.parameters() if id(p) in self.managed}

    def has_parameter_in(self, module: nn.Module) -> bool:
        """Tell whether a managed parameter is in a module, or in one below it."""
        return any(id(param) in self.managed for param in module.parameters())

    def find(self, param: object) -> ManagedParameter | None:
        """Return what is known of a managed parameter; None for anything else."""
        return self.managed.get(id(param))

    def is_known(self, param: torch.Tensor) -> bool:
        """Tell whether a parameter is managed, or an ordinary one of these models."""
        return id(param) in self.managed or id(param) in self.excluded

    def lookup(self, param: torch.Tensor) -> ManagedParameter | None:
        """Return what is known of a parameter; None for an ordinary one: of an excluded module, or adopted.

        Raises:
            StateError: it is not known.
        """
        managed = self.managed.get(id(param))
        if managed is None and id(param) not in self.excluded:
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
            if not any(map(self.is_known, model.parameters())):
                raise StateError(
                    f"this {type(model).__name__} has no parameter of this manager; build it inside manager.init() or "
                    "pass it to manager.wrap() first"
                )
            return model
        if len(self.models) != 1:
            raise StateError(f"this manager has {len(self.models)} models; say which one is meant: model=...")
        return self.models[0].root

    def trained(self) -> bytes:
        """Tell which parameters require gradients: a byte for each, chunk by chunk."""
        return b"".join([bound.trained() for bound in self._bounds])

    def check(self) -> None:
        """Look all parameters over, then raise if one no longer stands where it was packed; see `BoundChunk.check`."""
        errors = []
        with runtime_mode():
            for bound in self._bounds:
                try:
                    bound.check()
                except StateError as error:
                    errors.append(error)
        if errors:
            raise errors[0]


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
