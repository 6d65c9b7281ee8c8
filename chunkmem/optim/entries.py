"""The states of parameters that are updated by a class of torch's: tensors in chunks, numbers in records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.chunk_states import ChunkStates
from chunkmem.optim.claims import Owner
from chunkmem.optim.class_calls import Entry
from chunkmem.optim.class_rule import ClassRule, Place, Record, to_number
from chunkmem.optim.class_trials import EntryForm, can_be_kept
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.shaped_state import ShapedState
from chunkmem.optim.slot_source import lazy_state
from chunkmem.runtime.device import runtime_mode
from chunkmem.types import Role


class EntryStates(ChunkStates):
    """What `state[param]` of each parameter has, with the keys that its class gives it."""

    def __init__(
        self,
        host: OptimizerHost,
        optimizer: Owner,
        rule: ClassRule,
        *,
        owned: Callable[[], list[ManagedParameter]],
        form_of: Callable[[ManagedParameter], EntryForm],
    ) -> None:
        """Begin without any; `form_of` returns what the state of a parameter has after an update."""
        super().__init__(host, optimizer, rule, owned=owned)
        self._form_of = form_of
        self.records: dict[ManagedParameter, Record] = {}
        """Of the parameters whose states this rank has. An update that is under way changes them."""

    def keys_for(self, managed: ManagedParameter) -> tuple[str, ...]:
        return self._form_of(managed).keys

    def keys_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        if managed not in self:
            return ()
        if not self._host.owns(managed):
            return self._form_of(managed).keys
        return tuple(self._entry(managed))

    def specs_of(self, managed: ManagedParameter) -> dict[str, ShapedState]:
        """Return by key the states that were claimed for a parameter."""
        claimed = self._updater.claims.states_of(managed)
        return {spec.key: spec for spec in claimed if isinstance(spec, ShapedState)}

    def record(self, managed: ManagedParameter) -> Record:
        """Return the record of a parameter; an empty one is made."""
        return self.records.setdefault(managed, Record())

    def next_step(self, managed: ManagedParameter, *, has_state: bool) -> torch.Tensor | None:
        return super().next_step(managed, has_state=True)

    def _roles_of(self, params: Iterable[ManagedParameter]) -> set[Role]:
        return {spec.role for managed in params for spec in self._updater.claims.states_of(managed)}

    def entry(self, managed: ManagedParameter) -> Entry | None:
        """Return a copy of what its class keeps of a parameter, with `Place.CHUNK` for tensors that have elements."""
        record = self.records.get(managed)
        self._updater.settle()
        if record is None or record.entry is None or record.is_blank:
            return None
        return {key: _copy(value) for key, value in record.entry.items()}

    def _entry(self, managed: ManagedParameter) -> Entry:
        """Return the entry of a parameter once no update is under way."""
        self._updater.settle()
        found = self.records.get(managed)
        return {} if found is None or found.entry is None else found.entry

    def read(self, managed: ManagedParameter, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        self._check(managed)
        return self._host.from_owner(managed, lambda: self._read(managed, keys))

    def _read(self, managed: ManagedParameter, keys: Collection[str] | None) -> dict[str, torch.Tensor]:
        specs, found = self.specs_of(managed), {}
        for key, value in self._entry(managed).items():
            if keys is not None and key not in keys:
                continue
            if value is Place.CHUNK:
                found[key] = self._updater.read(self._updater.state(specs[key].role, managed), managed)
            else:
                found[key] = _copy(value)
        return found

    def lazy(self, managed: ManagedParameter) -> dict[str, torch.Tensor]:
        if managed not in self:
            return {}
        self._check(managed)
        specs, state = self.specs_of(managed), {}
        entry = self._host.from_owner(managed, lambda: {k: _copy(v) for k, v in self._entry(managed).items()})
        for key, value in entry.items():
            if value is not Place.CHUNK:
                state[key] = value
                continue
            spec = specs[key]
            state[key] = lazy_state(self._host, spec, managed, spec.forms[0].shape)
        return state

    def write(self, managed: ManagedParameter, values: Mapping[str, Any]) -> None:
        """Set some of a parameter's state; the rest stays as it is.

        Raises:
            StateError: a value does not fit; nothing has been changed.
        """
        self._check(managed)
        form = self._form_of(managed)
        if problems := entry_problems(values, form):
            raise StateError(f"optimizer.state of parameter {managed.name}: {'; '.join(problems)}")
        if self._host.owns(managed):
            if managed not in self.steps:
                self.prepare([managed])
            self._updater.ahead.forget()  # an update overlapped with backward has read what is replaced here
            specs, entry = self.specs_of(managed), dict(self._entry(managed))
            for key, value in values.items():
                if key in form.tensors:
                    self._updater.write(self._updater.state(specs[key].role, managed), managed, value)
                    entry[key] = Place.CHUNK
                else:
                    entry[key] = to_number(value, form.numbers.get(key))
            record = self.record(managed)
            record.entry, record.is_blank = entry, False
        self.note([managed])

    def make_blank(self, params: Iterable[ManagedParameter]) -> None:
        """Have states of zero that can be loaded into; an update of `params` finds none."""
        params = list(params)
        self.prepare([managed for managed in params if self._host.owns(managed)])
        for managed in params:
            form = self._form_of(managed)
            if form.is_there:
                self.note([managed])
                if self._host.owns(managed):
                    self.records[managed] = Record(blank_entry(form), is_blank=True)

    def replace(self, managed: ManagedParameter, state: Mapping[str, Any]) -> None:
        """Set the whole of a parameter's state; an empty one removes it.

        Raises:
            StateError: a key is missing or unknown, or a value does not fit; nothing has been changed.
        """
        self._check(managed)
        form = self._form_of(managed)
        if state and (problems := entry_problems(state, form, is_whole=True)):
            raise StateError(f"optimizer.state of parameter {managed.name}: {'; '.join(problems)}")
        self._updater.ahead.forget()
        self._updater.settle()
        self.records.pop(managed, None)
        self._anywhere.pop(managed, None)
        if state:
            self.write(managed, state)
        else:
            self.steps.pop(managed, None)


def _copy(value: Any) -> Any:
    """Return a copy of a number on the CPU; what is no tensor is returned as it is."""
    with runtime_mode():
        return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def blank_entry(form: EntryForm) -> Entry:
    """Return an entry of a class full of zeros, with `Place.CHUNK` for tensors that have elements."""
    entry: Entry = {}
    for key in form.keys:
        dtype = form.numbers[key].dtype if key in form.numbers else None
        if key in form.tensors:
            entry[key] = Place.CHUNK
        else:
            entry[key] = 0 if dtype is None else torch.zeros((), dtype=dtype, device="cpu")
    return entry


def entry_problems(state: Mapping[str, Any], form: EntryForm, *, is_whole: bool = False) -> list[str]:
    """Return what is wrong with the values of a parameter's state, in words that follow its name.

    Args:
        state: some of it, or all if it `is_whole`.
        form: what its class makes.
        is_whole: keys may be missing, too.
    """
    found = [f"{key} is missing" for key in form.first_keys if is_whole and key not in state]
    for key, value in state.items():
        expected = form.tensors.get(key)
        if expected is None and isinstance(value, torch.Tensor) and value.dim() > 0:
            kept = ", ".join(form.keys) or "none"
            found.append(f"{key} {tuple(value.shape)} is no state of its class, which keeps {kept}")
        elif expected is not None and not isinstance(value, torch.Tensor):
            found.append(f"{key} is a {type(value).__name__}, not a tensor")
        elif not isinstance(value, torch.Tensor) and not can_be_kept(value):
            found.append(f"{key} is a {type(value).__name__}, which no state of its class is")
        elif expected is not None and tuple(value.shape) != expected.shape:
            found.append(f"{key} is {tuple(value.shape)} instead of {expected.shape}")
    return found
