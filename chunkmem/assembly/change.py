"""From the old parts of a manager to new ones, over the same tiers and optimizers, between two steps.

[Note: Repacking] All parts of a manager that know of ranks, layouts or modules are made again, and only these stay:
tiers with what is on them, the loss scale, the model, the optimizers with their options, and averages of weights.

    check           what is refused has changed nothing; is there room?
    stop            the old parts: copies are over, writes of users count, nothing is pinned
    undo            what fitting and packing did to modules and Parameters; the content of chunks stays
    pack            again, by the new parts, into chunks without content; optimizers claim their states
    move            content: `chunkmem.assembly.moving`
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from chunkmem.assembly.inventory import Contents, agreed_moves, free_copies, require_room, take_inventory
from chunkmem.assembly.moving import ChunkMover
from chunkmem.assembly.runtime import Runtime
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import StateError
from chunkmem.layout.spec import Layout
from chunkmem.nn.binding import ManagedParameter, dense_stride
from chunkmem.optim.chunk_states import HeldStates
from chunkmem.optim.rule import StateSpec
from chunkmem.types import Role


class CarriedAverages:
    """Each `chunkmem.EMA` of a manager; what is in chunks moves as optimizer states do."""

    def __init__(
        self, before: Runtime, ranks: Ranks, *, numbers: Mapping[int, int], of_all: Callable[[Any, str], list[Any]]
    ) -> None:
        """Find out what all ranks average; give back chunks of averages that nobody has any more.

        Args:
            before: the parts that have them so far.
            ranks: those that have one replica.
            numbers: by the identity of a Parameter, its number on all ranks.
            of_all: returns what each rank passes.
        """
        self._numbers = numbers
        self._averages = before.averages
        roles = [ema.role for ema in self._averages]
        ranks.agree("the averages of a manager", ", ".join(roles))
        store = before.memory.store
        for chunk in [chunk for chunk in store.chunks.values() if chunk.is_kept and chunk.id.role not in roles]:
            store.remove(chunk)
        self.specs = {role: StateSpec(role) for role in roles}
        self._ordinary = [dict(ema.ordinary) for ema in self._averages]
        """By parameter that no chunk holds: its average, as far as this rank has it."""
        self._everywhere: list[set[int]] = []
        """Numbers of the parameters that any rank averages."""
        for ema, ordinary in zip(self._averages, self._ordinary, strict=True):
            own = [numbers[id(param)] for param in (*(managed.param for managed in ema.own), *ordinary)]
            self._everywhere.append({number for found in of_all(own, "what is averaged") for number in found})

    def enter(self, states: dict[ManagedParameter, tuple[Role, ...]]) -> None:
        """Add the roles of averages to the states that parameters of this rank have."""
        for ema in self._averages:
            states.update({managed: (*states.get(managed, ()), ema.role) for managed in ema.own})

    def ordinary(self) -> list[dict[int, torch.Tensor]]:
        """Return averages of parameters that no chunk holds, by number, on the CPU."""
        return [{self._numbers[id(param)]: value.cpu() for param, value in own.items()} for own in self._ordinary]

    def take(self, found: Sequence[Mapping[int, torch.Tensor]], params: Sequence[torch.Tensor]) -> None:
        """Take in what `ordinary` has returned on another rank; `params` are those of the model by number."""
        for own, values in zip(self._ordinary, found, strict=False):
            for number, value in values.items():
                own.setdefault(params[number], value)

    def move_to(self, after: Runtime, params: Sequence[torch.Tensor]) -> None:
        """Have chunks in other parts, without content so far."""
        for ema, numbers, ordinary in zip(self._averages, self._everywhere, self._ordinary, strict=True):
            ema.move_to(after, [params[number] for number in sorted(numbers)], ordinary)

    def come_home(self) -> None:
        """All content has arrived."""
        for ema in self._averages:
            ema.come_home()


def is_swapped(runtime: Runtime) -> bool:
    """Tell whether averages are the weights now."""
    return any(ema.is_swapped for ema in runtime.averages)


T = TypeVar("T")


class Repacking:
    """What has to be known of the old parts, and brings it into new ones: [Note: Repacking]."""

    def __init__(
        self, before: Runtime, ranks: Ranks, *, call: str, reader: str, rounded: Collection[nn.Parameter] = ()
    ) -> None:
        """Look at what there is.

        Args:
            before: the old parts; they have one model.
            ranks: those that have one replica.
            call: of the user, for messages.
            reader: the same in a word, for what ranks say to each other.
            rounded: parameters whose master weights hold no more than their weights, and are given up.
        """
        self.before = before
        self.after: Runtime | None = None
        self.ranks = ranks
        self._call, self._reader = call, reader
        (self.added,) = before.built.added
        params = dict.fromkeys(param for root in self.added.roots for param in root.parameters())
        self.params = list(params)
        self.numbers = {id(param): number for number, param in enumerate(params)}
        gc.collect()  # on all ranks, the same optimizers are left
        self.optimizers = before.optimizers
        ranks.agree("the optimizers of a manager", ", ".join(type(one).__name__ for one in self.optimizers))
        self._specs = {spec.role: spec for optimizer in self.optimizers for spec in optimizer.updates.rule.all_states}
        counts = [optimizer.updates.states.held() for optimizer in self.optimizers]
        states = {managed: held.roles for each in counts for managed, held in each.items()}
        self.averages = CarriedAverages(before, ranks, numbers=self.numbers, of_all=self.of_all)
        self.averages.enter(states)
        self._specs |= self.averages.specs
        inventory = take_inventory(before, self.numbers, states, rounded=[self.numbers[id(p)] for p in rounded])
        self._own_nbytes = sum(inventory.nbytes.values())
        self._contents = Contents(self.of_all(inventory, "what ranks have"), averages=self.averages.specs)
        self._counts: list[dict[int, HeldStates]] = []
        """By optimizer and number of a parameter: see `ChunkStates.held`."""
        for each in counts:
            own = {self.numbers[id(managed.param)]: found for managed, found in each.items()}
            together = {number: found for one in self.of_all(own, "counts of updates") for number, found in one.items()}
            self._counts.append(dict(sorted(together.items())))

    def require_room(
        self, layouts: Iterable[tuple[Layout, Sequence[nn.Parameter]]], *, owns: Callable[[int], bool]
    ) -> None:
        """Check that all ranks have room, while nothing has been changed yet.

        Args:
            layouts: that this rank is going to have, each with its parameters; see `ModelPacker.preview`.
            owns: tells whether it is going to own a group.

        Raises:
            CapacityError: one has not; on all ranks.
            RankError: a rank is missing.
        """
        before = self.before
        found = [(group, params) for layout, params in layouts for group in layout.groups]
        groups = [
            (group, tuple(self.numbers[id(params[slot.tensor])] for slot in group.slots))
            for group, params in found
            if owns(group.id)
        ]
        copies_nbytes = sum(group.nbytes for group, _ in found if group.is_on_host and not owns(group.id))
        own = self._contents.wanted(groups, self._specs, rank=self.ranks.rank)
        moves = agreed_moves(self._contents, own, ranks=self.ranks, reader=self._reader)
        chunks = [chunk for key, chunk in before.memory.store.chunks.items() if key.role is not Role.ACTIVATION]
        chunks = [chunk for chunk in chunks if chunk.id.group >= 0]  # others stay
        freed_nbytes = sum(chunk.nbytes * len(chunk.replicas) for chunk in chunks) - self._own_nbytes - copies_nbytes
        ranks, reader = self.ranks, self._reader
        require_room(self._contents, moves, before.tiers, ranks=ranks, reader=reader, freed_nbytes=freed_nbytes)

    def stop(self, reason: str) -> dict[int, tuple[int, ...]]:
        """Stop the old parts; return the strides that parameters have in their slots, by the identity of each.

        `reason` is what those are told who use them.
        """
        before = self.before
        before.modules.regions.give_up()
        for chunk in before.modules.access.chunks.values():
            before.memory.pager.notice_writes(chunk)
        before.updater.ahead.forget()
        before.stop(reason)
        free_copies(before)
        strides = {id(param): dense_stride(param) for param in before.built.elsewhere.params}
        return strides | {id(managed.param): managed.stride for managed in before.registry.parameters}

    def undo(self, make: Callable[[], Runtime]) -> Runtime:
        """Make modules and Parameters what they were; return the new parts, which `make` makes."""
        before = self.before
        before.modules.unfit(before.hooks)
        before.built.elsewhere.come_back()
        after = self.after = make()
        for chunk in [chunk for chunk in before.memory.store.chunks.values() if chunk.id.group < 0]:
            before.memory.store.hand_over(chunk, after.memory.store)
        return after

    def claim(self, after: Runtime) -> None:
        """Have optimizers claim their states, and averages theirs, in the new parts, whose models are packed."""
        for optimizer, counts in zip(self.optimizers, self._counts, strict=True):
            optimizer.move_to(after)
            found = ((after.registry.find(self.params[number]), count) for number, count in counts.items())
            optimizer.updates.states.take_over({managed: count for managed, count in found if managed is not None})
            for param in [one for one in optimizer.state.excluded if after.registry.is_elsewhere(one)]:
                del optimizer.state.excluded[param]
        self.averages.move_to(after, self.params)

    def move(self, after: Runtime) -> None:
        """Move what chunks hold."""
        ChunkMover(
            self.before,
            after,
            self._contents,
            self._specs,
            ranks=self.ranks,
            numbers=self.numbers,
            reader=self._reader,
        ).run()
        self.averages.come_home()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks of an error, and free all memory: some values are on no rank any more."""
        said = f"{self._call} has failed; continue from a checkpoint with another manager"
        for parts in (self.before, self.after):
            if parts is not None:
                parts.ranks.leave(self._call, error)
                parts.stop(said)
                parts.memory.pager.close(said)
                parts.free()

    def of_all(self, own: T, label: str) -> list[T]:
        """Return what each rank passes."""
        label = f"{self._reader}: {label}"
        return [self.ranks.broadcast_object(own, label=label, source=rank) for rank in range(self.ranks.size)]


def require_let_go(runtime: Runtime, *, call: str, why: str, is_spent: bool = False) -> None:
    """Raise if gradients wait for their step, or somebody keeps memory of parameters.

    Args:
        runtime: the parts of a manager.
        call: of the user, for messages.
        why: what becomes of that memory.
        is_spent: the last step has used the gradients that are left.

    Raises:
        StateError: see above; nothing has been changed.
    """
    gradients, access = runtime.gradients, runtime.modules.access
    if runtime.entry_points.gathers_open:
        raise StateError(f"{call} inside manager.gather(): leave the block first")
    if is_swapped(runtime):
        raise StateError(f"{call} inside ema.swapped(): leave the block first")
    gradients.discard_unset()
    params = list(runtime.registry.parameters)
    waiting = next((m for m in params if m.grad is not None or gradients.any_landed((m,))), None)
    excluded = (param for param in runtime.sharding.ordinary.parameters if param.grad is not None)
    if not is_spent and (waiting is not None or next(excluded, None) is not None):
        name = "an excluded module" if waiting is None else f"parameter {waiting}"
        raise StateError(
            f"{call}: {name} has a gradient that waits for its step; call optimizer.step() and "
            "optimizer.zero_grad() before"
        )
    access.reset(step=False)
    runtime.registry.check()
    runtime.modules.surface.check()
    runtime.modules.surface.check_copies()
    if holders := access.holders():
        raise StateError(
            f"{call}: somebody keeps the memory of {', '.join(holders)} (a view, .data, or the graph of a "
            f"loss), which {why}; let go of it, or keep a clone()"
        )
