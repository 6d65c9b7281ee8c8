"""From the old parts of a manager to new ones, over the same tiers and optimizers, between two steps.

[Note: Repacking] All parts of a manager that know of ranks, layouts or modules are made again, and only these stay:
tiers with what is on them, the loss scale, the model, and what has states of parameters in chunks: optimizers with
their options, averages of weights.

    check           what is refused has changed nothing; is there room?
    stop            the old parts: copies are over, writes of users count, nothing is pinned
    undo            what fitting and packing did to modules and Parameters; the content of chunks stays
    pack            again, by the new parts, into chunks without content; optimizers claim their states
    move            content: `chunkmem.assembly.moving`
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from chunkmem.assembly.inventory import Contents, free_copies, require_room, take_inventory
from chunkmem.assembly.make import build_runtime
from chunkmem.assembly.moving import ChunkMover
from chunkmem.assembly.runtime import Origin, Runtime
from chunkmem.data.errors import StateError
from chunkmem.data.layout import EACH, Layout
from chunkmem.data.types import Role
from chunkmem.modules.binding import dense_stride
from chunkmem.ranks.ranks import Ranks


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
        self._call = call
        (self.added,) = before.built.added
        params = dict.fromkeys(param for root in self.added.roots for param in root.parameters())
        self.params = list(params)
        numbers = {id(param): number for number, param in enumerate(params)}
        gc.collect()  # on all ranks, the same optimizers are left
        self.holders = before.holders
        ranks.agree("what has states in the chunks of a manager", ", ".join(type(one).__name__ for one in self.holders))
        specs = {spec.role: spec for holder in self.holders for spec in holder.state_specs}
        store = before.memory.store
        for chunk in [chunk for key, chunk in store.chunks.items() if key.role.kind.stays]:
            if chunk.id.role not in specs:  # nobody has them any more
                store.remove(chunk)
        counts = [{numbers[id(m.param)]: found for m, found in holder.held().items()} for holder in self.holders]
        states = dict[int, tuple[Role, ...]]()
        for each in counts:
            states |= {number: (*states.get(number, ()), *held.roles) for number, held in each.items()}
        inventory = take_inventory(before, numbers, states, rounded)
        self._own_nbytes = sum(inventory.nbytes.values())
        self.contents = Contents(inventory, specs, numbers, ranks=ranks, reader=reader)
        self._counts = [
            dict(sorted(ranks.merged(each, label=f"{reader}: counts of updates").items())) for each in counts
        ]
        """By holder and number of a parameter: see `StateHolder.held`."""

    def require_room(self, layouts: Iterable[tuple[Layout, Sequence[nn.Parameter]]], *, shard: int) -> None:
        """Check that all ranks have room, while nothing has been changed yet.

        Args:
            layouts: that this rank is going to have, each with its parameters; see `ModelPacker.preview`.
            shard: its number among the ranks that are going to share them.

        Raises:
            CapacityError: one has not; on all ranks.
            RankError: a rank is missing.
        """
        before, contents = self.before, self.contents
        found = [(group, params) for layout, params in layouts for group in layout.groups]
        groups = (
            (group, tuple(contents.numbers[id(params[slot.tensor])] for slot in group.slots))
            for group, params in found
            if group.owner in (shard, EACH)
        )
        copies_nbytes = sum(group.nbytes for group, _ in found if group.is_on_host and group.owner != shard)
        packed = (c for c in before.memory.store.chunks.values() if c.id.group >= 0 and not c.id.role.kind.is_of_call)
        freed_nbytes = sum(chunk.nbytes * len(chunk.replicas) for chunk in packed) - self._own_nbytes - copies_nbytes
        require_room(contents, contents.moves_to(groups), before.tiers, freed_nbytes=freed_nbytes)

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

    def undo(self, origin: Origin) -> Runtime:
        """Make modules and Parameters what they were; return parts made from `origin`, with nothing packed yet."""
        before = self.before
        before.modules.unfit(before.hooks)
        before.built.elsewhere.come_back()
        after = self.after = build_runtime(origin, before=before)
        for chunk in [chunk for chunk in before.memory.store.chunks.values() if chunk.id.group < 0]:
            before.memory.store.hand_over(chunk, after.memory.store)
        return after

    def claim(self, after: Runtime) -> None:
        """Have optimizers claim their states, and averages theirs, in the new parts, whose models are packed."""
        for holder, counts in zip(self.holders, self._counts, strict=True):
            holder.move_to(after)
            for param in [one for one in holder.excluded if after.registry.is_of_other_stage(one)]:
                del holder.excluded[param]
            found = ((after.registry.find(self.params[number]), count) for number, count in counts.items())
            holder.take_over({managed: count for managed, count in found if managed is not None})

    def move(self, after: Runtime) -> None:
        """Move what chunks hold."""
        ChunkMover(self.before, after, self.contents).run()

    def fail(self, error: Exception) -> None:
        """Tell the other ranks of an error, and free all memory: some values are on no rank any more."""
        said = f"{self._call} has failed; continue from a checkpoint with another manager"
        for parts in (self.before, self.after):
            if parts is not None:
                parts.ranks.connection.leave(self._call, error)
                parts.stop(said)
                parts.memory.pager.close(said)
                parts.free()


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
    if block := runtime.open_block:
        raise StateError(f"{call} inside {block}: leave the block first")
    gradients.discard_unset()
    params = runtime.registry.parameters
    waiting = next((m for m in params if m.grad is not None or gradients.slots.any_landed((m,))), None)
    excluded = (param for param in runtime.sharding.ordinary.parameters if param.grad is not None)
    if not is_spent and (waiting is not None or next(excluded, None) is not None):
        name = "an excluded module" if waiting is None else f"parameter {waiting}"
        raise StateError(
            f"{call}: {name} has a gradient that waits for its step; call optimizer.step() and "
            "optimizer.zero_grad() before"
        )
    access.reset(step=False)
    runtime.registry.check()
    runtime.modules.overrides.check()
    runtime.modules.overrides.check_copies()
    if holders := access.holders():
        raise StateError(
            f"{call}: somebody keeps the memory of {', '.join(holders)} (a view, .data, or the graph of a "
            f"loss), which {why}; let go of it, or keep a clone()"
        )
