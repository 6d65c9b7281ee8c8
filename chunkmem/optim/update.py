"""Update groups on the tier where their optimizer states are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from chunkmem.data.errors import StateError
from chunkmem.data.layout import MasterCopy
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.modules.begun import StepLedger
from chunkmem.modules.binding import ManagedParameter, by_group
from chunkmem.modules.gradients import GradientBook
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.modules.lazy_tensor import copy_values
from chunkmem.optim.entries import TensorForm
from chunkmem.optim.in_backward import BackwardUpdates, Owner
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.rule import fill
from chunkmem.optim.speculative import Intent, SpeculativeUpdater
from chunkmem.optim.state_chunks import StateChunks, Wanted
from chunkmem.optim.state_placement import StatePlacement
from chunkmem.ranks.units import Backwards
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.failed import lost_error
from chunkmem.runtime.host_memory import HostMemory
from chunkmem.runtime.pager import Pager


@dataclass(frozen=True)
class UpdateParts:
    """What updates are made of that is there before the first gradient."""

    native: NativeUpdate
    state_chunks: StateChunks
    landed: dict[int, set[ManagedParameter]]
    """Parameters with a gradient, by group: see `GradientSlots.landed`."""
    ahead: SpeculativeUpdater
    ledger: StepLedger


class GroupUpdater:
    """States and updates of managed parameters, for one optimizer or several over disjoint parameters."""

    def __init__(
        self,
        pager: Pager,
        gradients: GradientBook,
        *,
        state_placement: StatePlacement,
        parts: UpdateParts,
        backwards: Backwards | None,
    ) -> None:
        self.pager = pager
        self._store = pager.store
        self._state_placement = state_placement
        self.gradients = gradients
        self.native, self.state_chunks, self.ahead, self.ledger = (
            parts.native,
            parts.state_chunks,
            parts.ahead,
            parts.ledger,
        )
        self.in_backward = BackwardUpdates(
            pager, gradients, self.ledger, owner_of=self.state_chunks.owner, backwards=backwards
        )
        self.at_once: WeakSet[HostMemory] = WeakSet()
        """Of optimizers that have all parameters at once."""
        self._blank: set[ManagedParameter] = set()
        """Not updated yet, with states of zero all the same."""
        self.kept: set[ManagedParameter] = set()
        """Frozen, with states and master weights that stay: training is taken up where it was."""
        self.rounded: set[ManagedParameter] = set()
        """Frozen, with master weights that hold no more than what is computed with."""

    def claim(self, wanted: Wanted, owner: Owner, *, forget_plans: Callable[[], None]) -> None:
        """Make `owner` the one optimizer of some parameters; see `Claims.claim`.

        `forget_plans` is called if that changes the states of groups that had an optimizer.

        Raises:
            StateError: in addition, if another one has updated some of them inside backward, and not stepped since.
        """
        self.in_backward.take_over(wanted, owner)

        def before_change() -> None:
            self.ahead.forget()
            forget_plans()

        self.state_chunks.claim(wanted, owner, before_change=before_change, replaced=self._replace_state)

    def _replace_state(self, old: Chunk, new: Chunk) -> None:
        """Let a chunk of states take the place of one with slots for other parameters; what both hold stays.

        Raises:
            CapacityError: it fits neither tier; `old` is lost.
        """
        slots: dict[int, torch.Tensor] = {}
        if old.version != NO_CONTENT:
            self.wait_for_updates()
            alike = (at for at, form in enumerate(new.forms) if form == old.forms[at] and new.group.slots[at].numel)
            slots = {at: self._store.read_slot(old, at) for at in alike}
        self._store.remove(old)
        self._store.add(new)
        if slots:
            replica = self._begin_state(new)
            with runtime_mode():
                views = slot_views(new, replica.flat)
                for position, values in slots.items():
                    views[position].copy_(values)

    def in_order(self, groups: Collection[int]) -> Sequence[int]:
        """Return groups in the order of their updates: first those that no plan knows of, as none is overlapped yet."""
        on_host = [group for group in groups if self.is_on_host(group)]
        others = [group for group in groups if group not in on_host]
        planned = self.pager.policy.update_order(others)
        return [*on_host, *(planned or in_order_of_update(others, landing=list(self.gradients.slots.landed)))]

    def is_on_host(self, group: int) -> bool:
        """Tell whether modules compute with a group on HOST, for good."""
        return self._store.weights(group).compute_tier is Tier.HOST

    def place(self, params: Iterable[ManagedParameter]) -> None:
        """Decide where the groups of `params` are updated, once; a decided group keeps its place."""
        groups = self._state_placement.undecided({managed.group for managed in params})
        self._state_placement.decide({group: self.state_chunks.chunks(group) for group in groups})

    def has_no_place(self, params: Iterable[ManagedParameter]) -> bool:
        """Tell whether the place of some group of `params` is not decided yet."""
        return bool(self._state_placement.undecided({managed.group for managed in params}))

    def make_states(self, params: Iterable[ManagedParameter], roles: Collection[Role]) -> None:
        """Give `params`, which have none yet, states of zero in `roles`, and a master copy if that comes with them.

        Raises:
            CapacityError: the states fit neither tier; weights and gradients are untouched.
        """
        for group, members in by_group(params).items():
            self.make_master(group)
            for chunk in [chunk for chunk in self.state_chunks.chunks(group)[2:] if chunk.id.role in roles]:
                if chunk.version == NO_CONTENT:
                    self._begin_state(chunk)
                elif others := [managed for managed in members if managed not in self._blank]:
                    with self._writing(chunk) as views:
                        torch._foreach_zero_([views[managed.position] for managed in others])
            self._blank.difference_update(members)

    def complete_states(self, params: Iterable[ManagedParameter]) -> None:
        """Begin the states that another optimizer will need in the groups of `params`: an update touches all there are.

        Raises:
            CapacityError: they fit neither tier.
        """
        incomplete = self.state_chunks.incomplete
        for group in incomplete & {managed.group for managed in params} if incomplete else ():
            for chunk in self.state_chunks.chunks(group)[2:]:
                if chunk.id.role.is_state and chunk.version == NO_CONTENT:
                    self._begin_state(chunk)
            incomplete.discard(group)

    def _begin_state(self, chunk: Chunk) -> Replica:
        tier = self._state_placement.tier_for(chunk)
        return self.pager.create(chunk, tier, reader="optimizer states", zero=True, elastic=True, is_of_step=False)

    def make_master(self, group: int) -> None:
        """Let a group that was frozen when it was packed have its master copy; see `packing/precision.py`."""
        param = self._store.weights(group)
        master = param.master
        if master is None or master.version != NO_CONTENT:
            return
        self.pager.notice_writes(param)
        tier = self._state_placement.tier_for(master)
        source = self.pager.in_memory(param, reader="master weights")
        assert source is not None
        param.replicas[source].pins += 1  # room is made for the other
        try:
            self.pager.create(master, tier, reader="master weights", zero=False, elastic=True, is_of_step=False)
        finally:
            param.replicas[source].pins -= 1
            self._store.on_sooner(param, source)
        with runtime_mode():
            master.replicas[tier].flat.copy_(param.replicas[source].flat)

    def give_up(self, group: int) -> int:
        """Give back what training a group takes, until it is trained again: gradients, states, and the master copy.

        The weights are what is computed with from then on: see `round_master`. A master copy stays if there is no room
        for weights that were only in it.

        Returns:
            The bytes given back, on all tiers.
        """
        self.ahead.forget()
        self.wait_for_updates()
        param, *others = self.state_chunks.chunks(group)
        freed_nbytes = sum(self._empty(chunk) for chunk in others if chunk.id.role is not Role.MASTER)
        self.state_chunks.incomplete.add(group)
        master = param.master
        if master is not None and master.version != NO_CONTENT:
            self.pager.notice_writes(param)
            freed_nbytes += self._empty(master) if self.pager.restore(param) else 0
        return freed_nbytes

    def round_master(self, managed: ManagedParameter) -> None:
        """Let the master weights of a parameter, if there are any, be what is computed with."""
        master = self._store.weights(managed.group).master
        if master is not None and master.version != NO_CONTENT and not master.is_remote:
            rounded = self.read_weight(managed).to(managed.placeholder.dtype)
            self.write(master, managed, rounded)

    def begin_again(self, params: Iterable[ManagedParameter]) -> None:
        """Have what `give_up` has given back: states of zero, and master copies of the weights.

        Raises:
            CapacityError: there is no room on either tier.
        """
        for managed in params:
            group = managed.group
            is_known = group in self.state_chunks and not self._state_placement.undecided({group})
            if not is_known or self._store.weights(group).is_remote:
                continue
            roles = {chunk.id.role for chunk in self.state_chunks.chunks(group)[2:] if chunk.id.role.is_state}
            self.make_states([managed], roles)
            self._blank.add(managed)

    def _empty(self, chunk: Chunk) -> int:
        nbytes = chunk.nbytes * len(chunk.replicas)
        self._store.empty(chunk)
        return nbytes

    def update(self, group: int, intent: Intent) -> None:
        """Update one group's parameters."""
        chunks = self.state_chunks.chunks(group)
        home = Tier.HOST if self._state_placement.updates_on_host(group) else Tier.DEVICE
        with self.pager.updating(chunks, reader="optimizer step", stateless_tier=home) as tier, runtime_mode():
            if not self.ahead.take_over(group, tier, intent):
                work, policy = self._work(chunks, tier, intent), self.pager.policy
                if tier is not Tier.HOST or not policy.defer(work, chunks):
                    policy.await_update()
                    with self.ledger.updating(chunks[0].label):
                        work()
        for chunk in chunks:
            if not chunk.id.role.kind.is_of_step:
                self._store.mark_written(chunk, tier)

    def _work(self, chunks: Sequence[Chunk], tier: Tier, intent: Intent) -> Callable[[], None]:
        """Return what updates a group in place; all tensors are looked up now, and numbers read."""
        param, master = chunks[0], chunks[0].master
        views = {chunk.id.role: self._store.views(chunk, tier) for chunk in chunks}
        items = [replace(item, steps=_copies(item.steps)) for item in intent.items]
        # Parameters that are not updated have to be there: a plan that is followed again has only now dropped them.
        low = param.replicas[tier].flat
        high = None if param.ready(tier) or master is None else master.replicas[tier].flat

        def work() -> None:
            for item in items:
                intent.rule.update_item_(views, item, multiplier=intent.multiplier)
            if high is not None:
                updated = [position for item in items for position in item.positions]
                fill(low, high, param.group, besides=updated)

        return work

    def mark_written(self, params: Collection[ManagedParameter]) -> None:
        """Count the write in autograd's version counters: a backward of an older graph has to notice it."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([managed.param for managed in params])
            for managed in params:
                managed.version = managed.param._version

    def wait_for_updates(self) -> None:
        """Wait for updates that were left to HOST_UPDATE."""
        self.pager.policy.drain()

    def weight_form(self, managed: ManagedParameter) -> TensorForm:
        """Return what an update sees of a parameter: float32 where there are master weights, or going to be."""
        group = self._store.weights(managed.group).group
        dtype = group.dtype if group.master is MasterCopy.NONE else "float32"
        return TensorForm(tuple(managed.shape), tuple(managed.stride), getattr(torch, dtype))

    def read(self, chunk: Chunk, managed: ManagedParameter) -> torch.Tensor:
        """Return a CPU copy of a parameter's slot in `chunk`, in the parameter's shape."""
        if self.pager.closed is not None:
            raise StateError(f"this manager cannot be used: {self.pager.closed}")
        self.ledger.require_over(f"reading {chunk.label}", (managed,))
        self.wait_for_updates()
        self.pager.notice_writes(chunk)
        if chunk.newest_tier() is None:
            raise lost_error("reading", chunk)
        return self._store.read_slot(chunk, managed.position)

    def write(self, chunk: Chunk, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Set a parameter's slot in `chunk`, where the newest version is."""
        self.ledger.require_over(f"writing {chunk.label}", (managed,))
        self._set(chunk, managed, value)

    def _set(self, chunk: Chunk, managed: ManagedParameter, value: torch.Tensor) -> None:
        self._blank.discard(managed)
        with self._writing(chunk) as views:
            if views:
                copy_values(views[managed.position], value)

    @contextmanager
    def _writing(self, chunk: Chunk) -> Iterator[Sequence[torch.Tensor]]:
        """Surround what writes to slots of `chunk`, where the newest version is; there are none if it will be rounded.

        Raises:
            StateError: the content is lost.
        """
        self.pager.policy.before_demand()
        self.pager.notice_writes(chunk)
        tier = self.pager.in_memory(chunk, reader="loading") if chunk.newest_tier() is not None else None
        if tier is None and chunk.can_be_rounded:  # from what is written to its master copy
            yield ()
            return
        if tier is None:
            raise lost_error("loading", chunk)
        self._store.before_change(chunk)
        with runtime_mode():
            yield self._store.views(chunk, tier)
        self._store.mark_written(chunk, tier)

    def weight(self, managed: ManagedParameter) -> torch.Tensor:
        """Return what `read_weight` does, where it is, to be read only; of DISK a copy."""
        self.ledger.require_over(f"reading parameter {managed.name}", (managed,))
        self.wait_for_updates()
        chunk = self.weight_chunk(managed)
        tier = Tier.HOST if chunk.ready(Tier.HOST) else chunk.newest_tier()
        if tier is None:
            raise lost_error("reading", chunk)
        return self._store.slot(chunk, tier, managed.position)

    def read_weight(self, managed: ManagedParameter) -> torch.Tensor:
        """Return a CPU copy of a parameter's values, of the float32 master copy if there is one."""
        return self.read(self.weight_chunk(managed), managed)

    def weight_chunk(self, managed: ManagedParameter) -> Chunk:
        """Return the chunk that `read_weight` reads, on the rank that owns the parameter."""
        self.pager.notice_writes(self._store.weights(managed.group))
        return self._weights(managed.group)[-1]

    def write_weight(self, managed: ManagedParameter, value: torch.Tensor) -> None:
        """Set a parameter's values, and those of its master copy if there is one, which holds no more while frozen."""
        if managed in self.rounded:
            value = value.to(managed.placeholder.dtype)
        for chunk in self._weights(managed.group):
            self.write(chunk, managed, value)

    def sync_masters(self, groups: Iterable[int]) -> None:
        """Let master copies follow what a user wrote to their parameters; elements that were not keep all bits."""
        for group in groups:
            self.wait_for_updates()
            chunk = self._store.weights(group)
            tier = self.pager.in_memory(chunk, reader="master weights")
            if tier is not None:
                self._store.follow(chunk, tier)

    def _weights(self, group: int) -> list[Chunk]:
        """Return the PARAM chunk and, if there is one with content on this rank, its MASTER."""
        param = self._store.weights(group)
        master = param.master
        return [param] if master is None or master.version == NO_CONTENT or master.is_remote else [param, master]

    def state(self, role: Role, managed: ManagedParameter) -> Chunk:
        """Return the chunk of `role` that holds the parameter's gradient or state."""
        return self._store.chunks[ChunkId(role, managed.group)]

    def gradient(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the slot of a gradient that has landed, where it is now, to be read; of DISK a copy of it."""
        self.wait_for_updates()
        chunk = self.state(Role.GRAD, managed)
        tier = chunk.newest_tier()
        assert tier is not None
        return self._store.slot(chunk, tier, managed.position)

    def gradient_replicas(self, managed: ManagedParameter) -> list[torch.Tensor]:
        """Return the slot of a gradient that has landed on every tier that has it; not copies.

        A change is made in all of them: they stay what a plan takes them for.
        """
        self.wait_for_updates()
        self.ahead.forget()
        chunk = self.state(Role.GRAD, managed)
        tiers = self.pager.to_write(chunk, reader="the gradient")
        slots = [self._store.views(chunk, tier)[managed.position] for tier in tiers]
        grad = managed.param.grad
        # A tensor that a user has assigned, and still uses, is one more replica.
        return slots if grad is None or isinstance(grad, LazyGradient) else [*slots, grad]


def _copies(numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy numbers; if they all are one tensor, that once."""
    others = [number for number in numbers if number is not numbers[0]]
    return [number.clone() for number in numbers] if others else [numbers[0].clone()] * len(numbers)
