"""Update groups on the tier where their optimizer states are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.lazy_gradient import LazyGradient
from chunkmem.optim.checks import STATE_ROLES
from chunkmem.optim.native import NativeUpdate, fill
from chunkmem.optim.ops import AdamTensors, fused_adam_
from chunkmem.optim.places import StatePlaces
from chunkmem.optim.room import require_room
from chunkmem.optim.speculation import Items
from chunkmem.optim.speculative import Intent, SpeculativeUpdater
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.types import ChunkId, Role, Tier


class Owner(Protocol):
    """An optimizer."""

    def intent(self, group: int) -> Intent | None:
        """Return what it would do with a group if it stepped now; None if it cannot tell."""
        ...


class GroupUpdater:
    """States and updates of managed parameters, for one optimizer or several over disjoint parameters."""

    def __init__(
        self,
        pager: Pager,
        gradients: GradientBook,
        *,
        places: StatePlaces,
        native: NativeUpdate,
        make_ahead: Callable[[Callable[[int], Intent | None]], SpeculativeUpdater],
    ) -> None:
        self._pager = pager
        self._store = pager.store
        self._places = places
        self.gradients = gradients
        self.native = native
        self.ahead = make_ahead(self._intent_of)
        self._owner: dict[ManagedParameter, weakref.ref[Owner]] = {}

    def claim(self, params: Iterable[ManagedParameter], owner: Owner) -> None:
        """Make `owner` the one optimizer of `params` from now on."""
        for managed in params:
            self._owner[managed] = weakref.ref(owner)

    def check_owner(self, params: Iterable[ManagedParameter], owner: Owner) -> None:
        """Raise if a newer optimizer has taken one of `params`.

        Raises:
            StateError: two optimizers would share the states of a parameter.
        """
        for managed in params:
            if self._owner[managed]() is not owner:
                raise StateError(
                    f"parameter {managed.name} was given to a newer optimizer; step that one, or make one optimizer "
                    "with several parameter groups"
                )

    def _intent_of(self, group: int) -> Intent | None:
        owners = {self._owner[managed]() for managed in self.gradients.landed.get(group, ()) if managed in self._owner}
        owner = owners.pop() if len(owners) == 1 else None
        return None if owner is None else owner.intent(group)

    def planned_order(self, groups: Iterable[int]) -> Sequence[int]:
        """Return groups in the order in which a plan has them updated; none: there is no such plan."""
        return self._pager.policy.update_order(list(groups))

    def require_room(self, params: Iterable[ManagedParameter]) -> None:
        """Check that weights, and gradients and states of what is trained, fit the tiers together.

        Raises:
            CapacityError: they cannot, whatever is moved.
        """
        everything = (*params, *self._owner)  # of other optimizers too
        groups = {managed.group for managed in everything if managed.param.requires_grad}
        require_room(groups, self._store)

    def place(self, params: Iterable[ManagedParameter]) -> None:
        """Decide where the groups of `params` are updated, once; a decided group keeps its place."""
        self._places.decide({managed.group for managed in params})

    def make_states(self, params: Iterable[ManagedParameter]) -> None:
        """Give `params`, which have none yet, states of zero, and a master copy if it comes with the first update.

        Raises:
            CapacityError: the states fit neither tier; weights and gradients are untouched.
        """
        for managed in params:
            self._make_master(managed.group)
            for role in STATE_ROLES:
                chunk = self._chunk(role, managed.group)
                if chunk.version == NO_CONTENT:
                    tier = self._places.tier_for(chunk)
                    self._pager.create(chunk, tier, reader="optimizer states", zero=True, elastic=True)
                else:
                    self.write(chunk, managed, torch.zeros((), dtype=managed.placeholder.dtype, device="cpu"))

    def _make_master(self, group: int) -> None:
        """Let a group that was frozen when it was packed have its master copy; see [Note: Master copies]."""
        param = self._chunk(Role.PARAM, group)
        master = param.master
        if master is None or master.version != NO_CONTENT:
            return
        self._pager.notice_writes(param)
        tier = self._places.tier_for(master)
        self._pager.create(master, tier, reader="master weights", zero=False, elastic=True)
        source = next(each for each in (Tier.DEVICE, Tier.HOST) if param.ready(each))
        with runtime_mode():
            master.replicas[tier].flat.copy_(param.replicas[source].flat)

    def update(
        self,
        group: int,
        items: Items,
        *,
        multiplier: float | None = None,
    ) -> None:
        """Update one group's parameters.

        Args:
            group: the group.
            items: by any key, (options of a parameter group, its (parameter, step) pairs in this chunk group).
            multiplier: of the gradients, in float32; None: they are taken as they are.
        """
        master = self._store.chunks.get(ChunkId(Role.MASTER, group))
        states = [self._chunk(role, group) for role in STATE_ROLES]
        chunks = [self._chunk(Role.PARAM, group), self._chunk(Role.GRAD, group)]
        chunks += states if master is None else [master, *states]
        with self._pager.updating(chunks, reader="optimizer step") as tier, runtime_mode():
            is_to_be_filled = not chunks[0].ready(tier)  # a plan that is gone on with has dropped it only now
            if self.ahead.take_over(group, tier, items, multiplier):
                pass
            elif master is None:
                for options, pairs in items.values():
                    self._update_in_full(chunks, tier, pairs, options, multiplier=multiplier)
            else:
                for options, pairs in items.values():
                    at, steps = [managed.position for managed, _ in pairs], [step for _, step in pairs]
                    slots = {chunk.id.role: self._slots(chunk, tier, at) for chunk in chunks}
                    self.native.update_lowered(
                        slots, steps, options, multiplier=1.0 if multiplier is None else multiplier
                    )
                if is_to_be_filled:  # parameters that were not updated have to be there, too
                    updated = [managed.position for _, pairs in items.values() for managed, _ in pairs]
                    low, high = chunks[0].replicas[tier].flat, master.replicas[tier].flat
                    fill(low, high, master.group, besides=updated)
        for chunk in chunks:
            if chunk.id.role is not Role.GRAD:
                self._store.mark_written(chunk, tier)

    def _update_in_full(
        self,
        chunks: Sequence[Chunk],
        tier: Tier,
        pairs: Sequence[tuple[ManagedParameter, torch.Tensor]],
        options: dict[str, Any],
        *,
        multiplier: float | None,
    ) -> None:
        """Update parameters that are their own master copy; see [Note: Slot views]."""
        at, steps = [managed.position for managed, _ in pairs], [step for _, step in pairs]
        param, grad, exp_avg, exp_avg_sq = ([self._store.views(chunk, tier)[i] for i in at] for chunk in chunks)
        if multiplier is not None:
            grad = [g.mul(multiplier) for g in grad]
        on_device = [step.to(param[0].device) for step in steps]
        fused_adam_(AdamTensors(param, grad, exp_avg, exp_avg_sq, on_device), options)

    def _slots(self, chunk: Chunk, tier: Tier, at: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of these slots as 1-D elements."""
        flat, slots = chunk.replicas[tier].flat, chunk.group.slots
        return [flat[slots[i].offset : slots[i].end] for i in at]

    def mark_updated(self, params: Iterable[ManagedParameter]) -> None:
        """Count the update in autograd's version counters: a backward of an older graph has to notice it."""
        with torch._C.DisableTorchFunctionSubclass():
            for managed in params:
                torch.autograd.graph.increment_version(managed.param)
                managed.version = managed.param._version

    def read(self, chunk: Chunk, managed: ManagedParameter) -> torch.Tensor:
        """Return a CPU copy of a parameter's slot in `chunk`, in the parameter's shape."""
        self._pager.policy.drain()
        self._pager.notice_writes(chunk)
        tier = chunk.newest_tier()
        assert tier is not None, f"{chunk.label} has no content"
        with runtime_mode():
            return self._store.views(chunk, tier)[managed.position].to("cpu", copy=True)

    def write(self, chunk: Chunk, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Set a parameter's slot in `chunk`, where the newest version is."""
        self._pager.policy.before_demand()
        self._pager.notice_writes(chunk)
        tier = chunk.newest_tier()
        if tier is None and chunk.can_be_rounded:
            return  # it will be rounded from what is written to its master copy
        assert tier is not None, f"{chunk.label} has no content"
        with runtime_mode():
            self._store.views(chunk, tier)[managed.position].copy_(value)
        self._store.mark_written(chunk, tier)

    def read_weight(self, managed: ManagedParameter) -> torch.Tensor:
        """Return a CPU copy of a parameter's values, of the float32 master copy if there is one."""
        self._pager.notice_writes(self._chunk(Role.PARAM, managed.group))
        return self.read(self._weights(managed.group)[-1], managed)

    def write_weight(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Set a parameter's values, and those of its master copy if there is one."""
        for chunk in self._weights(managed.group):
            self.write(chunk, managed, value)

    def sync_masters(self, groups: Iterable[int]) -> None:
        """Let master copies follow what a user wrote to their parameters; elements that were not keep all bits."""
        for group in groups:
            chunk = self._chunk(Role.PARAM, group)
            tier = chunk.newest_tier()
            if tier is not None:
                self._store.follow(chunk, tier)

    def _weights(self, group: int) -> list[Chunk]:
        """Return the PARAM chunk and, if there is one with content, its MASTER."""
        param = self._chunk(Role.PARAM, group)
        return [param] if param.master is None or param.master.version == NO_CONTENT else [param, param.master]

    def state(self, role: Role, managed: ManagedParameter) -> Chunk:
        """Return the chunk of `role` that holds the parameter's state."""
        return self._chunk(role, managed.group)

    def gradient(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the slot of a gradient that has landed, where it is now; not a copy."""
        self._pager.policy.drain()
        chunk = self._chunk(Role.GRAD, managed.group)
        tier = chunk.newest_tier()
        assert tier is not None
        return self._store.views(chunk, tier)[managed.position]

    def gradient_replicas(self, managed: ManagedParameter) -> list[torch.Tensor]:
        """Return the slot of a gradient that has landed on every tier that has it; not copies.

        A change is made in all of them: they stay what a plan takes them for.
        """
        self._pager.policy.drain()
        self.ahead.forget()
        chunk = self._chunk(Role.GRAD, managed.group)
        slots = [self._store.views(chunk, tier)[managed.position] for tier in chunk.replicas if chunk.ready(tier)]
        grad = managed.param.grad
        # A tensor that a user has assigned, and still uses, is one more replica.
        return slots if grad is None or isinstance(grad, LazyGradient) else [*slots, grad]

    def _chunk(self, role: Role, group: int) -> Chunk:
        return self._store.chunks[ChunkId(role, group)]
