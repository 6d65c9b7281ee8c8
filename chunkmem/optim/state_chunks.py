"""Which optimizer updates which parameters, and the chunks of states that chunk groups have for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from chunkmem.data.errors import ConfigError, StateError
from chunkmem.data.types import ChunkId, Role
from chunkmem.modules.binding import ManagedParameter, by_group
from chunkmem.optim.in_backward import Owner
from chunkmem.optim.room import require_room
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.shaped_state import merged
from chunkmem.optim.speculative import Intent
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.store import ChunkStore

Wanted = Mapping[ManagedParameter, Sequence[StateSpec]]
"""By parameter: the states that its optimizer keeps."""


class StateChunks:
    """A parameter belongs to the optimizer that was made last for it; a group has the states of all its parameters."""

    def __init__(self, store: ChunkStore) -> None:
        """Begin with no optimizer."""
        self._store = store
        self._owner: dict[ManagedParameter, weakref.ref[Owner]] = {}
        self._has_newer = False
        """An optimizer has taken a parameter that another one had."""
        self._states: dict[int, dict[ManagedParameter, Sequence[StateSpec]]] = {}
        """By group: what each of its parameters that has an owner needs."""
        self._specs: dict[int, tuple[StateSpec, ...]] = {}
        """By group: the states that it has, in the order of their names."""
        self._chunks: dict[int, list[Chunk]] = {}
        self.incomplete: set[int] = set()
        """Groups with states that may have no content yet."""

    def __contains__(self, group: int) -> bool:
        """Tell whether a group has an optimizer."""
        return group in self._chunks

    def chunks(self, group: int) -> list[Chunk]:
        """Return what an update of a group touches: PARAM, GRAD, MASTER if there is one, then the states."""
        return self._chunks[group]

    def by_parameter(self, group: int) -> Mapping[ManagedParameter, Sequence[StateSpec]]:
        """Return the states that were claimed for each parameter of a group."""
        return self._states.get(group, {})

    def states_of(self, managed: ManagedParameter) -> Sequence[StateSpec]:
        """Return the states that were claimed for a parameter."""
        return self._states[managed.group][managed]

    def owner(self, managed: ManagedParameter) -> Owner | None:
        """Return the optimizer of a parameter; None if it has none."""
        found = self._owner.get(managed)
        return None if found is None else found()

    def intent(self, landed: Iterable[ManagedParameter], group: int) -> Intent | None:
        """Return what the optimizer of a group would do with it; None if those that have `landed` have not just one."""
        owners = {self.owner(managed) for managed in landed} - {None}
        owner = owners.pop() if len(owners) == 1 else None
        return None if owner is None else owner.intent(group)

    def check(self, params: Iterable[ManagedParameter], owner: Owner) -> None:
        """Raise if a newer optimizer has taken one of `params`.

        Raises:
            StateError: two optimizers would share the states of a parameter.
        """
        for managed in params if self._has_newer else ():
            if self._owner[managed]() is not owner:
                raise StateError(
                    f"parameter {managed.name} was given to a newer optimizer; step that one, or make one optimizer "
                    "with several parameter groups"
                )

    def claim(
        self,
        wanted: Wanted,
        owner: Owner,
        *,
        before_change: Callable[[], None],
        replaced: Callable[[Chunk, Chunk], None],
    ) -> None:
        """Make `owner` the one optimizer of some parameters from now on, and let their groups have chunks of states.

        States that no optimizer keeps any more are dropped, and their memory given back.

        Args:
            wanted: over ranks, the same on all of them; only the owner of a group has chunks of states for it.
            owner: the optimizer.
            before_change: called if the states of a group that had an optimizer become others.
            replaced: called with a chunk of states that is about to be dropped, and the one in another form that takes
                its place: it may move content.

        Raises:
            ConfigError: two parameters of a chunk have states of the same name and of different dtypes.
        """
        after = self._after(wanted)
        for group, new in after.items():
            self._require_names(group, new)
        if any(group in self._specs and self._specs[group] != specs for group, specs in after.items()):
            before_change()
        reference = weakref.ref(owner)
        for managed, specs in wanted.items():
            self._has_newer = self._has_newer or self._owner.get(managed, reference) is not reference
            self._owner[managed] = reference
            self._states.setdefault(managed.group, {})[managed] = specs
        for group, specs in after.items():
            self._set_states(group, specs, replaced)

    def _require_names(self, group: int, specs: Iterable[StateSpec]) -> None:
        """Raise if averages have the name of a state."""
        for spec in specs:
            chunk = self._store.chunks.get(ChunkId(spec.role, group))
            if chunk is not None and chunk.id.role.kind.stays:
                raise ConfigError(
                    f"an optimizer has a state named {spec.role}, as a chunkmem.EMA names its averages: make the "
                    "optimizer before the EMA, which then takes another name"
                )

    def _after(self, wanted: Wanted) -> dict[int, tuple[StateSpec, ...]]:
        """Return by group the states it would have if these were claimed, too."""
        found = {}
        for group, members in by_group(wanted).items():
            others = {other: specs for other, specs in self._states.get(group, {}).items() if other not in wanted}
            by_role: dict[Role, list[tuple[ManagedParameter, StateSpec]]] = {}
            for managed, specs in {**others, **{managed: wanted[managed] for managed in members}}.items():
                for spec in specs:
                    by_role.setdefault(spec.role, []).append((managed, spec))
            found[group] = tuple(merged(by_role[role]) for role in sorted(by_role))
        return found

    def _set_states(self, group: int, specs: tuple[StateSpec, ...], replaced: Callable[[Chunk, Chunk], None]) -> None:
        store = self._store
        param = store.weights(group)
        new = {spec.role: spec for spec in specs}
        for spec in set(self._specs.get(group, ())).difference(specs):
            if (chunk := store.chunks.get(ChunkId(spec.role, group))) is None:
                continue
            if spec.role in new:
                replaced(chunk, new[spec.role].chunk(param))
                self.incomplete.add(group)
            else:
                store.remove(chunk)
        for spec in specs:
            if not (param.is_remote or param.is_copy) and ChunkId(spec.role, group) not in store.chunks:
                store.add(spec.chunk(param))
                self.incomplete.add(group)
        self._specs[group] = specs
        roles = (Role.PARAM, Role.GRAD, Role.MASTER, *(spec.role for spec in specs))
        self._chunks[group] = [store.chunks[key] for role in roles if (key := ChunkId(role, group)) in store.chunks]

    def require_room(self, wanted: Wanted, owner: Owner | None = None, *, name: str = "optimizer") -> None:
        """Check that weights, and gradients and states of what is trained, fit the tiers together.

        Args:
            wanted: what is about to be claimed.
            owner: by which optimizer; None: by those that have it.
            name: begins the message of the error.

        Raises:
            CapacityError: they cannot, whatever is moved.
        """
        owners = {managed: self.owner(managed) for managed in (*wanted, *self._owner)}
        if owner is not None:
            owners |= dict.fromkeys(wanted, owner)
        trained = {managed.group for managed in owners if managed.requires_grad}
        waiting = {managed.group for managed, own in owners.items() if own is None or not own.in_backward}
        specs = self._specs | self._after(wanted)
        params = {group: self._store.weights(group) for group in specs}
        states_nbytes = {
            group: [spec.form(param.group).nbytes for spec in specs[group]]
            for group, param in params.items()
            if not (param.is_remote or param.is_copy)
        }
        groups = trained & states_nbytes.keys()
        require_room(groups, states_nbytes, self._store, name=name, in_backward=groups - waiting)
