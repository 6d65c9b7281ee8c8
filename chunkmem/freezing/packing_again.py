"""Chunks of which less than half is trained are packed again, so that what is frozen gives back what training takes.

A chunk goes as a whole, so a group keeps gradients, states and master weights for all of its parameters while one of
them is trained:

    before    [F t] [F t] [F t] [F t]       four groups with gradients and states
    after     [F F] [F F] [t t] [t t]       two

The model is packed as if it were new, which keeps what is frozen apart, into chunks of the same size (ADR 53), as
[Note: Repacking] in `chunkmem.assembly.change` says. The next step is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from chunkmem.assembly.change import Repacking, require_let_go
from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.layout import Group, Layout, MasterCopy
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Role, Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.modules.parameter_reads import own_parameters
from chunkmem.optim.block_adam import adam_states
from chunkmem.optim.rule import StateSpec
from chunkmem.packing.built import PutOff
from chunkmem.packing.packer import groups_by_role
from chunkmem.ranks.mesh import Mesh
from chunkmem.ranks.ranks import open_ranks

_CALL = "manager.freeze()"
_PACKED = "manager.freeze() has packed its chunks again since; take state_dict() or optimizer.state[param] again"
Packed = list[tuple[Layout, list[nn.Parameter]]]
"""Layouts, each with its parameters."""


@dataclass(frozen=True)
class Needs:
    """What a layout takes."""

    training_nbytes: int
    """Gradients, states and master weights of groups with a trained parameter."""
    weights_nbytes: int
    device_nbytes: int
    """The most that a module holds on DEVICE at a time: its weights, and their gradients if they are trained."""


class PackingAgain:
    """Whether and how the model of a manager is packed again."""

    def __init__(self, runtime: Runtime) -> None:
        """Look at what is frozen, whose states and master weights have been forgotten."""
        self._runtime = runtime
        store = runtime.memory.store
        self._rounded: list[nn.Parameter] = []
        """Frozen, with master weights that hold no more than the weights."""
        self._masters: dict[int, MasterCopy] = {}
        """By the identity of a parameter."""
        for managed in runtime.registry.parameters:
            master = store.weights(managed.group).group.master
            if managed.requires_grad:
                master = MasterCopy.PACKED
            elif managed in runtime.updater.rounded:
                self._rounded.append(managed.param)
                master = MasterCopy.WHEN_TRAINED
            self._masters[id(managed.param)] = master

    def is_worth_it(self) -> bool:
        """Tell whether a group is trained by less than half, and packing again gives back more than it takes.

        All ranks call it, and are told the same.
        """
        own = float(self._seems_worth_it())
        (most,) = self._runtime.ranks.max_over([own], label="manager.freeze(): is packing again worth it?")
        return most > 0

    def _seems_worth_it(self) -> bool:
        groups = self._groups().values()
        if not any(map(_is_half_frozen, groups)):
            return False
        mixed = (params for params in groups if any(param.requires_grad for param in params))
        frozen_numel = sum(param.numel() for params in mixed for param in params if not param.requires_grad)
        if frozen_numel <= self._chunk_numel() * self._runtime.ranks.shard.size:
            return False  # what a prefix leaves at its border
        if len(self._runtime.built.added) != 1:
            return True
        before, after = self._needs(self._now()), self._needs(self._preview())
        return before.training_nbytes - after.training_nbytes > max(0, after.weights_nbytes - before.weights_nbytes)

    def reason_against(self) -> str:
        """Return why it cannot be done; "" if it can. All ranks call it, and are told the same."""
        found = self._own_reason()
        others = self._runtime.ranks.any_text(found, label="manager.freeze(): packing again")
        return found or others

    def run(self) -> Runtime:
        """Do it; return the new parts. All ranks call it.

        Raises:
            CapacityError: there is no room for what a rank has meanwhile; on all ranks, and nothing has been changed.
            RankError: a rank is missing. Training is over: continue from a checkpoint.
        """
        before = self._runtime
        num_shards = before.ranks.shard.size
        row = before.ranks.rank // num_shards * num_shards
        members = tuple(before.ranks.name(row + column) for column in range(num_shards))
        ranks = open_ranks(mesh=Mesh((members,)), timeout_s=before.config.distributed.timeout_s)
        try:
            change = Repacking(before, ranks, call=_CALL, reader="packing again", rounded=self._rounded)
            self._require_room(change)
            try:
                after = self._repack(change)
            except Exception as error:
                change.fail(error)
                raise
        except Exception as error:
            if not isinstance(error, CapacityError):
                ranks.connection.leave(_CALL, error)
            raise
        finally:
            ranks.close()
        return after

    def _repack(self, change: Repacking) -> Runtime:
        before = self._runtime
        slab_nbytes = before.modules.packer.slab_nbytes
        for managed in before.registry.parameters:
            if isinstance(managed.grad, LazyGradient):  # the last step has used it
                managed.grad = None
        strides = change.stop(_PACKED)
        after = change.undo(before.origin)
        after.memory.store.moved.update(before.memory.store.moved)
        after.memory.pager.required_nbytes.update(before.memory.pager.required_nbytes)
        after.controller.timelines.take_over(before.controller.timelines)
        built = PutOff(strides, slab_nbytes=slab_nbytes, masters=self._masters)
        after.built.add(change.added.roots, change.added.excluded, kept=change.added.kept, built=built)
        change.claim(after)
        rounded = (after.registry.find(param) for param in self._rounded)
        after.updater.rounded.update(managed for managed in rounded if managed is not None)
        change.move(after)
        return after

    def _require_room(self, change: Repacking) -> None:
        found: CapacityError | None = None
        try:
            change.require_room(self._preview(), shard=self._runtime.ranks.shard.rank)
        except CapacityError as error:
            found = error
        others = self._runtime.ranks.any_text(str(found or ""), label="packing again: room")
        if found is not None:
            raise found
        if others:
            raise CapacityError(others, needed_nbytes=0, cap_nbytes=0)

    def _groups(self) -> dict[int, list[nn.Parameter]]:
        found: dict[int, list[nn.Parameter]] = {}
        for managed in self._runtime.registry.parameters:
            found.setdefault(managed.group, []).append(managed.param)
        return found

    def _chunk_numel(self) -> int:
        return max(group.numel for layout, _ in self._now() for group in layout.groups if group.num_slabs == 1)

    def _now(self) -> Packed:
        models = self._runtime.registry.models
        return [(model.layout, [managed.param for managed in model.parameters]) for model in models]

    def _preview(self) -> Packed:
        (added,) = self._runtime.built.added
        return self._runtime.modules.packer.preview(
            added.roots,
            added.excluded,
            num_ranks=self._runtime.ranks.shard.size,
            slab_nbytes=self._runtime.modules.packer.slab_nbytes,
            masters=self._masters,
        )

    def _own_reason(self) -> str:
        runtime = self._runtime
        if len(runtime.built.added) != 1:
            return f"chunks of {len(runtime.built.added)} models are not packed again, only those of one"
        (added,) = runtime.built.added
        excluded = own_parameters(added.excluded)
        params = [param for root in added.roots for param in root.parameters()]
        if below := runtime.config.memory.below:
            return f"chunks with {below} are not packed again"
        if runtime.ranks.wider or runtime.registry.local_parts:
            return "chunks of pipeline stages, and of models with DTensors, are not packed again"
        if kept := next(filter(self._is_frozen_with_states, runtime.registry.parameters), None):
            return f"parameter {kept.name} is frozen with its states, and such chunks are not packed again"
        if runtime.gradients.values.shows_means:
            return "the model is in a DistributedDataParallel, and its chunks are not packed again"
        if any(runtime.registry.find(param) is None and id(param) not in excluded for param in params):
            return "parameters were added to the model after it was packed"
        before, after = self._needs(self._now()), self._needs(self._preview())
        more_nbytes = after.device_nbytes - before.device_nbytes
        ledger = runtime.memory.store.pools[Tier.DEVICE].ledger
        required_nbytes = runtime.memory.pager.required_nbytes[Tier.DEVICE] or before.device_nbytes
        if more_nbytes > 0 and required_nbytes + more_nbytes > ledger.cap_nbytes:
            return (
                f"a module would have {format_nbytes(more_nbytes)} more on DEVICE at a time, where "
                f"{format_nbytes(max(0, ledger.cap_nbytes - required_nbytes))} of {format_nbytes(ledger.cap_nbytes)} "
                "are left"
            )
        try:
            require_let_go(runtime, call=_CALL, why="would be packed again", is_spent=True)
        except StateError as error:
            return str(error)
        return ""

    def _is_frozen_with_states(self, managed: ManagedParameter) -> bool:
        """Tell whether a parameter has states, or a master weight, that training is to be taken up with."""
        runtime = self._runtime
        is_kept = managed in runtime.updater.kept or has_states(runtime, managed)
        return is_kept and not managed.requires_grad

    def _needs(self, packed: Packed) -> Needs:
        groups = {
            group.id: (group, [params[slot.tensor] for slot in group.slots])
            for layout, params in packed
            for group in layout.groups
        }
        trained = [group for group, params in groups.values() if any(param.requires_grad for param in params)]
        of = {id(param): group for group, params in groups.values() for param in params}
        device_nbytes = 0
        for params in self._held_together():
            held = {of[id(param)].id: of[id(param)] for param in params if id(param) in of}
            some = {of[id(param)].id for param in params if id(param) in of and param.requires_grad}
            device_nbytes = max(device_nbytes, sum(g.nbytes * (1 + (key in some)) for key, g in held.items()))
        specs = self._states()
        return Needs(
            sum(_training_nbytes(group, specs) for group in trained),
            sum(group.nbytes for group, _ in groups.values()),
            device_nbytes,
        )

    def _states(self) -> Sequence[StateSpec]:
        """Return what optimizers keep, all together; without any, what the configuration means."""
        rules = (optimizer.updates.rule for optimizer in self._runtime.optimizers)
        found = {spec.role: spec for rule in rules for spec in rule.all_states}
        return tuple(found.values()) or adam_states(self._runtime.config.optimizer.params)

    def _held_together(self) -> Iterable[list[nn.Parameter]]:
        """Yield the parameters that DEVICE has at a time: of a module and those around it, over ranks of a unit."""
        (added,) = self._runtime.built.added
        for root in added.roots:
            yield from _held(root, [], is_whole=self._runtime.is_shared)


def has_states(runtime: Runtime, managed: ManagedParameter) -> bool:
    """Tell whether an optimizer has states of a parameter."""
    return any(managed.param in optimizer.state for optimizer in runtime.optimizers)


def _held(module: nn.Module, around: list[nn.Parameter], *, is_whole: bool) -> Iterable[list[nn.Parameter]]:
    own = [*around, *module.parameters(recurse=False)]
    yield own
    for child in module.children():
        is_unit = is_whole and isinstance(module, nn.ModuleList | nn.Sequential)
        if is_unit:
            yield [*own, *child.parameters()]
        yield from _held(child, own, is_whole=is_whole)


def _is_half_frozen(params: Collection[nn.Parameter]) -> bool:
    """Tell whether something of a group is trained, and less than half of it."""
    numel = sum(param.numel() for param in params)
    trained_numel = sum(param.numel() for param in params if param.requires_grad)
    return 0 < 2 * trained_numel < numel


def _training_nbytes(group: Group, specs: Iterable[StateSpec]) -> int:
    forms = (*groups_by_role(group).values(), *(spec.form(group) for spec in specs))
    return sum(form.nbytes for form in forms) - group.nbytes


def training_nbytes(runtime: Runtime) -> int:
    """Return the bytes of gradients, states and master weights that this rank has, on all tiers."""
    chunks = runtime.memory.store.chunks.values()
    of_training = (chunk for chunk in chunks if chunk.id.role is Role.GRAD or chunk.id.role.kind.is_of_update)
    return sum(chunk.nbytes * len(chunk.replicas) for chunk in of_training)
