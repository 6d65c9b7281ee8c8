"""The optimizer states of managed parameters: tensors in chunks, numbers in records."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkmem.data.errors import ConfigError, StateError
from chunkmem.data.types import Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.entries import NO_UPDATES, Entry, EntryForm, Record, copied_to_cpu
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.in_backward import Owner
from chunkmem.optim.members import GroupMembers
from chunkmem.optim.rule import StateSpec, UpdateRule
from chunkmem.optim.slot_source import lazy_state

Specs = tuple[StateSpec, ...]


@dataclass(frozen=True)
class HeldStates:
    """What a rank has of a parameter, as it is told to others."""

    count: torch.Tensor
    """The number of its updates: 0-dim float32."""
    entry: Mapping[str, Any] | None
    """See `Record`."""
    specs: Specs
    """The states that were claimed for it."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the chunks that have some of it."""
        return tuple(role for role in (self.entry or {}).values() if isinstance(role, Role))


class StateHolder(Protocol):
    """Has states of parameters in chunks, and takes them along where these are packed again: [Note: Repacking]."""

    open_block: str
    """The `with` block that has to be left before that; empty: none."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]: ...
    @property
    def excluded(self) -> MutableMapping[Any, Any]:
        """States of parameters that no chunk holds, by parameter and name."""
        ...

    def held(self) -> Mapping[ManagedParameter, HeldStates]: ...
    def move_to(self, host: OptimizerHost) -> None: ...
    def take_over(self, held: Mapping[ManagedParameter, HeldStates]) -> None: ...


class ChunkStates:
    """Made when a parameter is first updated; over ranks, the owner of a parameter has its state."""

    def __init__(self, host: OptimizerHost, optimizer: Owner, rule: UpdateRule[Any], members: GroupMembers) -> None:
        """Begin without any, for the parameters of `optimizer`."""
        self._rule = rule
        self._host = host
        self._updater = host.updater
        self._optimizer = optimizer
        self._members = members
        self.records: dict[ManagedParameter, Record] = {}
        """Of the parameters whose states this rank has. An update that is under way may change them."""
        self._anywhere: dict[ManagedParameter, None] = {}
        """Parameters that have a state on the rank that owns them; the same on all ranks."""
        self._hypers: dict[int, Hashable] = {}
        """By the identity of a parameter: the options of its group when states were last looked at."""
        self._needs: list[Hashable] = []
        """What the states of each parameter group depended on at the last step."""

    def find(self, param: object) -> ManagedParameter | None:
        """Return what is known of a managed parameter; None for anything else."""
        return self._host.registry.find(param)

    def __contains__(self, managed: ManagedParameter) -> bool:
        return managed in self._anywhere

    def __len__(self) -> int:
        return len(self._anywhere)

    # What there is to be.

    def form(self, managed: ManagedParameter) -> EntryForm:
        """Return what the state of a parameter may have."""
        return self._rule.form(self._hyper(managed), self._updater.weight_form(managed), name=managed.name)

    def _hyper(self, managed: ManagedParameter) -> Hashable:
        if id(managed.param) not in self._hypers:
            for group in self._members.groups():
                self._hypers.update(dict.fromkeys(map(id, group["params"]), self._rule.hyper(group)))
        return self._hypers[id(managed.param)]

    def forget_options(self) -> None:
        """Options of parameter groups were replaced."""
        self._hypers.clear()

    def wanted(self, groups: Iterable[Mapping[str, Any]]) -> dict[ManagedParameter, Specs]:
        """Return the states that managed parameters of some parameter groups need, over ranks all of them."""
        found = {}
        for group in groups:
            hyper = self._rule.hyper(group)
            for managed in map(self._host.registry.lookup, group["params"]):
                if managed is not None:
                    found[managed] = self._rule.specs(hyper, self._updater.weight_form(managed), managed)
        return found

    def claim_more(self, wanted: Mapping[ManagedParameter, Sequence[StateSpec]]) -> None:
        """Claim states that were not when a parameter was added, in addition to those of this optimizer."""
        state_chunks, lacking = self._updater.state_chunks, dict[ManagedParameter, Specs]()
        for managed, specs in wanted.items():
            own = self.specs_of(managed) if state_chunks.owner(managed) is self._optimizer else {}
            together = {**own, **{spec.key: spec for spec in specs}}
            if not set(together.values()) <= set(state_chunks.states_of(managed)):
                lacking[managed] = tuple(together.values())
        if lacking:
            state_chunks.require_room(lacking, self._optimizer)
            self._updater.claim(lacking, self._optimizer, forget_plans=self._host.forget_plans)

    def specs_of(self, managed: ManagedParameter) -> dict[str, StateSpec]:
        """Return by key the states that were claimed for a parameter."""
        return {spec.key: spec for spec in self._updater.state_chunks.states_of(managed)}

    # Before an update.

    def make(
        self,
        pending: list[ManagedParameter],
        hypers: Sequence[Hashable],
        *,
        anywhere: list[ManagedParameter],
    ) -> None:
        """Make the states that are missing, also those that options call for only now.

        Args:
            pending: what is about to be updated.
            hypers: by parameter group, its options.
            anywhere: the parameters of which a rank has a gradient.
        """
        needs = [self._rule.needs(hyper) for hyper in hypers]
        if needs != self._needs:  # else a look at each parameter would find nothing
            self.forget_options()
            self.claim_more(self.wanted(self._members.groups()))
            self._needs = needs
        stateless = set[ManagedParameter]()
        if any(self._rule.is_stateless(hyper) for hyper in hypers):
            stateless = {m for m in (*pending, *anywhere) if self._rule.is_stateless(self._hyper(m))}
        for group in {managed.group for managed in pending if managed in stateless}:
            self._updater.make_master(group)
        self.prepare([managed for managed in pending if managed not in stateless], others=pending)
        self.note([managed for managed in anywhere if managed not in stateless])
        self._updater.complete_states(pending)

    def note(self, params: Iterable[ManagedParameter]) -> None:
        """Some of `params` have a state from now on, on this rank or on the one that owns them."""
        self._anywhere.update(dict.fromkeys(m for m in params if m not in self._anywhere and self._has_entry(m)))

    def _has_entry(self, managed: ManagedParameter) -> bool:
        record = self.records.get(managed)
        return (record is not None and record.entry is not None) or self.form(managed).is_there

    def prepare(self, params: Iterable[ManagedParameter], *, others: Iterable[ManagedParameter] = ()) -> None:
        """Make states of zero where there are none, so that a lack of room is known before anything is updated.

        `others` get no states, but have their places decided, too.

        Raises:
            CapacityError: they fit neither tier; nothing has been made.
        """
        params = list(params)
        new = [managed for managed in params if managed not in self.records]
        for managed in new:
            if not managed.placeholder.is_floating_point():
                raise ConfigError(
                    f"parameter {managed.name} is {managed.placeholder.dtype}; {self._rule.name} takes reals"
                )
        if self._updater.has_no_place([*params, *others]):
            self._updater.place(self._members.owned(self._members.known()))
        specs = {managed: self.specs_of(managed) for managed in new}
        self._updater.make_states(new, {spec.role for own in specs.values() for spec in own.values()})
        # A count of their own from now on: what a step leaves behind is what later ones find.
        count = NO_UPDATES.clone()
        for managed, own in specs.items():
            entry = {key: spec.role for key, spec in own.items()} if self._rule.begins_at_zero else None
            self.records[managed] = Record(count, entry, is_new=entry is None)

    def make_blank(self, params: Iterable[ManagedParameter]) -> None:
        """Have states of zero that can be loaded into; an update of `params` finds those that it begins with."""
        params = list(params)
        self.prepare([managed for managed in params if self._host.owns(managed)])
        self.note(params)
        for managed in params:
            record, form = self.records.get(managed), self.form(managed)
            if record is not None and record.entry is None and form.is_there:
                roles = {key: spec.role for key, spec in self.specs_of(managed).items()}
                record.entry = form.zeros(roles, device="cpu")

    def even_out(self) -> None:
        """Where some ranks have a state of their own part of a parameter, have the others one of zeros: to be saved."""
        each_ranks = self._host.registry.each_ranks
        own = [managed for managed in self._members.known() if id(managed.param) in each_ranks]
        found = self._host.ranks.any_over([managed in self for managed in own], label="states of each rank's own parts")
        self.make_blank([managed for managed, is_there in zip(own, found, strict=True) if is_there])

    # What there is.

    def _entry(self, managed: ManagedParameter) -> Entry:
        """Return the entry of a parameter once no update is under way."""
        self._updater.wait_for_updates()
        record = self.records.get(managed)
        if record is None or record.entry is None:
            return {}
        return {**({"step": record.count} if self._rule.counts_steps else {}), **record.entry}

    def _copied_entry(self, managed: ManagedParameter) -> Entry:
        return {key: copied_to_cpu(value) for key, value in self._entry(managed).items()}

    def keys_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        """Return what the state of a parameter has."""
        if managed not in self:
            return ()
        return tuple(self._entry(managed)) if self._host.owns(managed) else self.form(managed).keys

    def read(self, managed: ManagedParameter, keys: Collection[str] | None = None) -> dict[str, Any]:
        """Return CPU copies of a parameter's state, or some of it; empty if it has none; over ranks, all call it."""
        self._check(managed)
        return self._host.from_owner(managed, lambda: self._read(managed, keys))

    def _read(self, managed: ManagedParameter, keys: Collection[str] | None) -> dict[str, Any]:
        found = self._copied_entry(managed)
        for key, value in found.items():
            if isinstance(value, Role) and (keys is None or key in keys):
                stored = self._updater.read(self._updater.state(value, managed), managed)
                found[key] = self.specs_of(managed)[key].shown(stored, managed)
        return found if keys is None else {key: value for key, value in found.items() if key in keys}

    def lazy(self, params: Sequence[ManagedParameter]) -> dict[ManagedParameter, dict[str, Any]]:
        """Return the states of parameters, with tensors that are read when they are used; see `read`."""
        own: dict[int, Entry] = {}
        for number, managed in enumerate(params):
            self._check(managed)
            if managed in self and self._host.owns(managed):
                own[number] = self._copied_entry(managed)
        entries = self._host.ranks.merged(own, label="the optimizer states that each rank has") | own
        states: dict[ManagedParameter, dict[str, Any]] = {}
        for number, managed in enumerate(params):
            states[managed] = {
                key: lazy_state(self._host, self.specs_of(managed)[key], managed) if isinstance(value, Role) else value
                for key, value in entries.get(number, {}).items()
            }
        return states

    def _check(self, managed: ManagedParameter) -> None:
        self._host.require_open()
        if self._host.owns(managed):
            self._updater.state_chunks.check([managed], self._optimizer)

    def write(self, managed: ManagedParameter, values: Mapping[str, Any], *, is_whole: bool = False) -> None:
        """Set some of a parameter's state; the rest stays as it is, unless this is the whole.

        Raises:
            StateError: a value does not fit; nothing has been changed.
        """
        self._check(managed)
        form = self.form(managed)
        if problems := form.problems(values, is_whole=is_whole):
            raise StateError(f"optimizer.state of parameter {managed.name}: {'; '.join(problems)}")
        if self._host.owns(managed):
            self.prepare([managed])
            self._updater.ahead.forget()  # an update overlapped with backward has read what is replaced here
            self._updater.wait_for_updates()
            record, specs = self.records[managed], self.specs_of(managed)
            entry = {} if is_whole else dict(record.entry or {})
            for key, value in values.items():
                if key in form.tensors:
                    chunk = self._updater.state(specs[key].role, managed)
                    self._updater.write(chunk, managed, specs[key].stored(value, managed))
                    entry[key] = specs[key].role
                elif key == "step" and self._rule.counts_steps:
                    record.count = torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(()).clone()
                else:
                    entry[key] = form.number(key, value)
            if not self._rule.counts_steps:  # a state that was written is taken for that of an earlier update
                record.count = record.count.clamp(min=1)
            record.entry, record.is_new = entry, False
        self.note([managed])

    def replace(self, managed: ManagedParameter, state: Mapping[str, Any]) -> None:
        """Set the whole of a parameter's state; an empty one removes it.

        Raises:
            StateError: a key is missing or unknown, or a value does not fit; nothing has been changed.
        """
        if state:
            form = self.form(managed)
            if self._rule.to_load(state).keys() != state.keys() or not state.keys() >= set(form.first_keys):
                raise StateError(
                    f"optimizer.state of parameter {managed.name} has the keys {', '.join(form.keys)}; this one has "
                    f"{', '.join(map(str, state))}"
                )
            self.write(managed, state, is_whole=True)
            return
        self._check(managed)
        self._updater.ahead.forget()
        self._updater.wait_for_updates()
        self.records.pop(managed, None)
        self._anywhere.pop(managed, None)

    # On their way to other ranks.

    def held(self) -> dict[ManagedParameter, HeldStates]:
        """Return the parameters whose states this rank has, and what these are."""
        self._updater.wait_for_updates()
        found = {}
        for managed, record in self.records.items():
            entry = None
            if record.entry is not None and not record.is_new:
                entry = {key: copied_to_cpu(value) for key, value in record.entry.items()}
            found[managed] = HeldStates(record.count, entry, tuple(self.specs_of(managed).values()))
        return found

    def take_over(self, held: Mapping[ManagedParameter, HeldStates]) -> None:
        """Have the states of parameters that `held` has returned on other ranks; what is in them comes later.

        Args:
            held: of all ranks, in the same order on all.

        Raises:
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        self.claim_more({m: [spec.at(m.position) for spec in one.specs] for m, one in held.items()})
        for managed, one in held.items():
            if self._host.owns(managed):
                entry = None if one.entry is None else dict(one.entry)
                self.records[managed] = Record(one.count.clone(), entry, is_new=entry is None)
        self.note(managed for managed, one in held.items() if one.entry is not None)
