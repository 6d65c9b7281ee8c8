"""The optimizer states of managed parameters: how often each was updated, and its moments in chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

import torch

from chunkmem.errors import ConfigError, StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.checks import state_problems
from chunkmem.optim.claims import Owner
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.rule import UpdateRule
from chunkmem.optim.slot_source import lazy_state
from chunkmem.runtime.device import runtime_mode
from chunkmem.types import Role

FIRST_STEP: Final = torch.ones((), dtype=torch.float32, device="cpu")


class ChunkStates:
    """Made when a parameter is first updated; over ranks, the owner of a parameter has its state."""

    def __init__(
        self,
        host: OptimizerHost,
        optimizer: Owner,
        rule: UpdateRule[Any],
        *,
        owned: Callable[[], list[ManagedParameter]],
    ) -> None:
        """Begin without any; `owned` returns the parameters of `optimizer` whose states this rank is to have."""
        self.keys = rule.keys
        """What the state of a parameter has."""
        self._rule = rule
        self._host = host
        self._updater = host.updater
        self._optimizer = optimizer
        self._owned = owned
        self.steps: dict[ManagedParameter, torch.Tensor] = {}
        """0-dim float32 counts of updates, of the parameters whose states this rank has."""
        self._anywhere: dict[ManagedParameter, None] = {}
        """Parameters that have a state on the rank that owns them; the same on all ranks."""

    def find(self, param: object) -> ManagedParameter | None:
        """Return what is known of a managed parameter; None for anything else."""
        return self._host.registry.find(param) if isinstance(param, torch.Tensor) else None

    def __contains__(self, managed: ManagedParameter) -> bool:
        return managed in self._anywhere

    def __len__(self) -> int:
        return len(self._anywhere)

    def keys_for(self, managed: ManagedParameter) -> tuple[str, ...]:
        """Return what the state of a parameter may have."""
        return self.keys

    def keys_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        """Return what it has."""
        return self.keys if managed in self else ()

    def note(self, params: Iterable[ManagedParameter]) -> None:
        """Some of `params` have a state from now on, on this rank or on the one that owns them."""
        self._anywhere.update(dict.fromkeys(params))

    def next_step(self, managed: ManagedParameter, *, has_state: bool) -> torch.Tensor | None:
        """Return the number of a parameter's next update, 1 if there is no state to count it; None before the first."""
        if not has_state:
            return FIRST_STEP
        return None if managed not in self.steps else self.steps[managed] + 1

    def prepare(self, params: Iterable[ManagedParameter], *, others: Iterable[ManagedParameter] = ()) -> None:
        """Make states of zero where there are none, so that a lack of room is known before anything is updated.

        `others` get no states, but have their places decided, too.

        Raises:
            CapacityError: they fit neither tier; nothing has been made.
        """
        params = list(params)
        new = [managed for managed in params if managed not in self.steps]
        for managed in new:
            if not managed.placeholder.is_floating_point():
                raise ConfigError(
                    f"parameter {managed.name} is {managed.placeholder.dtype}; {self._rule.name} takes reals"
                )
        if self._updater.has_no_place([*params, *others]):
            self._updater.place(self._owned())
        self._updater.make_states(new, self._roles_of(new))
        for managed in new:
            self.steps[managed] = torch.zeros((), dtype=torch.float32, device="cpu")

    def _roles_of(self, params: Iterable[ManagedParameter]) -> set[Role]:
        """Return the states that parameters may have."""
        return {spec.role for spec in self._rule.all_states}

    def read(self, managed: ManagedParameter, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return CPU copies of a parameter's state, or some of it; empty if it has none; over ranks, all call it."""
        self._check(managed)
        return self._host.from_owner(managed, lambda: self._read(managed, self.keys if keys is None else keys))

    def lazy(self, managed: ManagedParameter) -> dict[str, torch.Tensor]:
        """Return a parameter's state with moments that are read when they are used; see `read`."""
        if managed not in self:
            return {}
        state = self.read(managed, ("step",)) if "step" in self.keys else {}
        for spec in self._updater.claims.states_of(managed):
            shape, shown = spec.shape_for(managed.param), partial(spec.shown, managed=managed)
            state[spec.role.value] = lazy_state(self._host, spec, managed, shape, shown=shown)
        return state

    def _check(self, managed: ManagedParameter) -> None:
        self._host.require_open()
        if self._host.owns(managed):
            self._updater.claims.check([managed], self._optimizer)

    def _read(self, managed: ManagedParameter, keys: Collection[str]) -> dict[str, torch.Tensor]:
        if managed not in self.steps:
            return {}
        specs = [spec for spec in self._updater.claims.states_of(managed) if spec.role in keys]
        chunks = {spec: self._updater.state(spec.role, managed) for spec in specs}
        values = {
            spec.role.value: spec.shown(self._updater.read(chunk, managed), managed) for spec, chunk in chunks.items()
        }
        with runtime_mode():
            return {"step": self.steps[managed].clone(), **values} if "step" in keys else values

    def write(self, managed: ManagedParameter, values: Mapping[str, Any]) -> None:
        """Set some of a parameter's state, the rest of which is zeros if it has none yet.

        Raises:
            StateError: a value does not fit; nothing has been changed.
        """
        self._check(managed)
        if problems := state_problems(values, managed.param, self._rule, keys=values):
            raise StateError(f"optimizer.state of parameter {managed.name}: {'; '.join(problems)}")
        if self._host.owns(managed):
            if managed not in self.steps:
                self.prepare([managed])
            self._updater.ahead.forget()  # an update overlapped with backward has read what is replaced here
            for spec in self._rule.states_in(values):
                chunk = self._updater.state(spec.role, managed)
                self._updater.write(chunk, managed, spec.stored(values[spec.role], managed))
            # A rule that counts no updates takes a state that was written for that of an earlier update.
            step = torch.as_tensor(values.get("step", 1.0), dtype=torch.float32, device="cpu")
            if "step" in values or not self._rule.counts_steps:
                self.steps[managed] = step.reshape(()).clone()
        self.note([managed])

    def replace(self, managed: ManagedParameter, state: Mapping[str, Any]) -> None:
        """Set the whole of a parameter's state; an empty one removes it.

        Raises:
            StateError: a key is missing or unknown, or a value does not fit; nothing has been changed.
        """
        if not state:
            self._check(managed)
            self._updater.ahead.forget()
            self.steps.pop(managed, None)
            self._anywhere.pop(managed, None)
            return
        if set(state) != set(self.keys):
            raise StateError(
                f"optimizer.state of parameter {managed.name} has the keys {', '.join(self.keys)}; this one has "
                f"{', '.join(map(str, state))}"
            )
        self.write(managed, dict(state))
