"""A pipeline divided into another number of stages, over the same ranks, between two steps.

[Note: Repartition] All parts of a manager that know of ranks, layouts or modules are made again, and only these stay:
tiers with what is on them, the loss scale, the model, the optimizers with their options, and averages of weights.

    refuse          gradients that wait, memory that somebody keeps, a number that does not divide the ranks; no room
    stop            the old parts: copies are over, writes of users count, nothing is pinned
    undo            what fitting and packing did to modules and Parameters; the content of chunks stays
    pack            the stages again, by the new parts, into chunks without content; optimizers claim their states
    move            content: `chunkmem.pipeline.moving`
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from chunkmem.assembly import Runtime
from chunkmem.comm.mesh import Mesh, ranks_by_stage, with_stages
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import ChunkmemError, ConfigError, StateError
from chunkmem.nn.binding import dense_stride, move_to
from chunkmem.nn.built import PutOff
from chunkmem.optim.saved import HeldStates
from chunkmem.pipeline.carried_averages import CarriedAverages, is_swapped
from chunkmem.pipeline.inventory import Contents, agreed_moves, free_copies, require_room, take_inventory
from chunkmem.pipeline.modules import divide
from chunkmem.pipeline.moving import ChunkMover
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.schedules import check_schedule
from chunkmem.pipeline.staged import with_schedule
from chunkmem.pipeline.width import Pipeline
from chunkmem.runtime.device import runtime_mode
from chunkmem.shard.ownership import RoundRobin
from chunkmem.types import Role

T = TypeVar("T")
_FAILED = "pipe.repartition() has failed; continue from a checkpoint with another manager"
MakePipeline = Callable[[Runtime, PipelineOptions], Pipeline]


def repartition(
    runtime: Runtime,
    options: PipelineOptions,
    num_stages: int,
    *,
    changed: PipelineOptions | None = None,
    make: MakePipeline,
) -> tuple[Pipeline, str]:
    """Do what `OfWidth.repartition` says: [Note: Repartition].

    Args:
        runtime: the parts of the manager so far.
        options: what the user has asked of the pipeline.
        num_stages: ranks of a pipeline from now on.
        changed: what is asked for from now on; None: the same, about as many blocks in each stage.
        make: has a manager take other parts over, and returns a pipeline over them.

    Returns:
        The pipeline, and what has happened in words.
    """
    before, options = options, replace(options, cut=None) if changed is None else changed
    _refuse(runtime, options, num_stages, is_same=options.cut == before.cut)
    options = _options_for(options, num_stages)
    table = ranks_by_stage(runtime.origin.mesh, num_stages)
    stage, replica, shard = (table == runtime.ranks.name(runtime.ranks.rank)).nonzero()[0].tolist()
    members = tuple(sorted(table[:, replica].flatten().tolist()))
    said = f"its {_width(runtime.ranks)} ranks (stages x shards) are {num_stages} x {table.shape[2]} now"
    said += f", with {', '.join(map(str, options.cut))} blocks" if options.cut else ""
    ranks = Ranks(mesh=Mesh((members,)), timeout_s=runtime.config.distributed.timeout_s)
    try:
        change = _Change(runtime, ranks)
        change.check(options, stage, shard, num_stages=num_stages, num_shards=table.shape[2])
        try:
            after = change.undo(with_stages(runtime.origin.mesh, num_stages), reason=said)
            pipeline = change.pack(after, options, make)
            change.move(after)
        except Exception as error:
            change.fail(error)
            raise
    except Exception as error:
        ranks.leave("pipe.repartition()", error)
        raise
    finally:
        ranks.close()
    return pipeline, said


def _width(ranks: Ranks) -> str:
    return f"{1 if ranks.stages is None else ranks.stages.size} x {ranks.shard.size}"


def _options_for(options: PipelineOptions, num_stages: int) -> PipelineOptions:
    if num_stages == 1 and options.width is not None:
        return options  # the schedule is for when there are stages again
    if num_stages == 1:
        return replace(options, schedule="auto", stages_per_rank=None)
    return replace(options, schedule="auto") if options.schedule == "by-layer" else options


# What is refused: nothing has been changed.


def _refuse(runtime: Runtime, options: PipelineOptions, num_stages: int, *, is_same: bool) -> None:
    """Raise if it cannot be done, on all ranks alike."""
    found: ChunkmemError | None = None
    runtime.require_open()
    for ranks in (runtime.ranks.stages, runtime.ranks):
        if ranks is not None:
            ranks.agree("the number of stages that a pipeline is divided into", repr(num_stages))
            ranks.agree("the blocks of the stages that a pipeline is divided into", repr(options.cut))
    try:
        _require_stages(runtime, options, num_stages, is_same=is_same)
        _require_between_steps(runtime)
    except ChunkmemError as error:
        found = error
    said = "" if found is None else f"{type(found).__name__}: {found}"
    others = runtime.ranks.any_text(said, label="pipe.repartition()")
    if found is not None:
        raise found
    if others:
        raise StateError(f"pipe.repartition(): another rank refuses: {others}")


def _require_stages(runtime: Runtime, options: PipelineOptions, num_stages: int, *, is_same: bool) -> None:
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ConfigError(f"pipe.repartition(): stages is {num_stages!r}; give a number of at least 1")
    if runtime.config.memory.disk is not None:
        raise ConfigError("pipe.repartition() with memory.disk is not available in this version")
    now = 1 if runtime.ranks.stages is None else runtime.ranks.stages.size
    if num_stages == now and is_same:
        raise StateError(
            f"pipe.repartition({num_stages}): there are {_width(runtime.ranks)} ranks (stages x shards) already"
        )
    ranks_by_stage(runtime.origin.mesh, num_stages)
    if len(runtime.built.added) != 1:
        raise StateError(f"pipe.repartition(): this manager has {len(runtime.built.added)} models; it is for one")
    (added,) = runtime.built.added
    if added.kept:
        raise StateError(
            "pipe.repartition(): modules were built in manager.exclude(reduce=False): each rank has parameters of its "
            "own there, and other ranks cannot choose between them"
        )
    if num_stages > 1:
        _, per_rank = check_schedule(_options_for(options, num_stages).schedule, options.stages_per_rank)
        num = per_rank * num_stages
        added.check(divide(options.blocks, first=options.first, last=options.last, num=num, cut=options.cut))


def _require_between_steps(runtime: Runtime) -> None:
    gradients, access = runtime.gradients, runtime.modules.access
    if runtime.entry_points.gathers_open:
        raise StateError("pipe.repartition() inside manager.gather(): leave the block first")
    if is_swapped(runtime):
        raise StateError("pipe.repartition() inside ema.swapped(): leave the block first")
    gradients.discard_unset()
    params = list(runtime.registry.parameters)
    waiting = next((m for m in params if m.grad is not None or gradients.any_landed((m,))), None)
    excluded = (param for param in runtime.entry_points.averaged if param.grad is not None)
    if waiting is not None or next(excluded, None) is not None:
        name = "an excluded module" if waiting is None else f"parameter {waiting}"
        raise StateError(
            f"pipe.repartition(): {name} has a gradient that waits for its step; call optimizer.step() and "
            "optimizer.zero_grad() before"
        )
    access.reset(step=False)
    runtime.registry.check()
    runtime.modules.surface.check()
    runtime.modules.surface.check_copies()
    if holders := access.holders():
        raise StateError(
            f"pipe.repartition(): somebody keeps the memory of {', '.join(holders)} (a view, .data, or the graph of a "
            "loss), which goes to other ranks; let go of it, or keep a clone()"
        )


# What is done.


@dataclass(frozen=True)
class _Ordinary:
    """What a stage has outside of chunks: buffers, and parameters of excluded modules with states and averages."""

    tensors: Mapping[tuple[str, str], torch.Tensor]
    """By the name of the module, and its own."""
    states: Sequence[Mapping[int, Mapping[str, Any]]]
    """By optimizer and number of a parameter."""
    averages: Sequence[Mapping[int, torch.Tensor]]
    """By `chunkmem.EMA` and number of a parameter."""


class _Change:
    """From the old parts of a manager to new ones."""

    def __init__(self, before: Runtime, ranks: Ranks) -> None:
        """Begin; `ranks` are those that have one replica."""
        self._before = before
        self._after: Runtime | None = None
        self._ranks = ranks
        (self._added,) = before.built.added
        params = dict.fromkeys(param for root in self._added.roots for param in root.parameters())
        self._params = list(params)
        self._numbers = {id(param): number for number, param in enumerate(params)}
        gc.collect()  # on all ranks, the same optimizers are left
        self._optimizers = before.optimizers
        ranks.agree("the optimizers of a manager", ", ".join(type(one).__name__ for one in self._optimizers))
        self._specs = {spec.role: spec for optimizer in self._optimizers for spec in optimizer.state_specs}
        counts = [optimizer.counts() for optimizer in self._optimizers]
        states = {managed: held.roles for each in counts for managed, held in each.items()}
        self._averages = CarriedAverages(before, ranks, numbers=self._numbers, of_all=self._of_all)
        self._averages.enter(states)
        self._specs |= self._averages.specs
        inventory = take_inventory(before, self._numbers, states)
        self._own_nbytes = sum(inventory.nbytes.values())
        self._contents = Contents(self._of_all(inventory, "what ranks have"), averages=self._averages.specs)
        self._counts: list[dict[int, HeldStates]] = []
        """By optimizer and number of a parameter: see `StatefulOptimizer.counts`."""
        for each in counts:
            own = {self._numbers[id(managed.param)]: found for managed, found in each.items()}
            together = {
                number: found for one in self._of_all(own, "counts of updates") for number, found in one.items()
            }
            self._counts.append(dict(sorted(together.items())))

    def check(self, options: PipelineOptions, stage: int, shard: int, *, num_stages: int, num_shards: int) -> None:
        """Check that all ranks have room, while nothing has been changed yet.

        Args:
            options: of the new pipeline.
            stage: that this rank is going to have.
            shard: of it.
            num_stages: ranks of a pipeline.
            num_shards: ranks that share a stage.

        Raises:
            CapacityError: one has not; on all ranks.
        """
        before, added = self._before, self._added
        roots: list[nn.Module] = list(added.roots)
        excluded = list(added.excluded)
        if num_stages > 1:
            _, per_rank, _ = with_schedule(before, options, num_ranks=num_stages, num_shards=num_shards)
            num, cut = per_rank * num_stages, options.cut
            stages = divide(options.blocks, first=options.first, last=options.last, num=num, cut=cut)
            roots = [module for number, module in enumerate(stages) if number % num_stages == stage]
            inside = {module for root in roots for module in root.modules()}
            excluded = [module for module in excluded if module in inside]
        owner = RoundRobin(num_shards).owner
        groups = [
            (group, tuple(self._numbers[id(params[slot.tensor])] for slot in group.slots))
            for layout, params in before.registry.preview(roots, excluded, num_ranks=num_shards)
            for group in layout.groups
            if owner(group.id) == shard
        ]
        own = self._contents.wanted(groups, self._specs, rank=self._ranks.rank)
        moves = agreed_moves(self._contents, own, ranks=self._ranks)
        chunks = [chunk for key, chunk in before.memory.store.chunks.items() if key.role is not Role.ACTIVATION]
        chunks = [chunk for chunk in chunks if chunk.id.group >= 0]  # others stay
        freed_nbytes = sum(chunk.nbytes * len(chunk.replicas) for chunk in chunks) - self._own_nbytes
        require_room(self._contents, moves, before.tiers, ranks=self._ranks, freed_nbytes=freed_nbytes)

    def undo(self, mesh: object, *, reason: str) -> Runtime:
        """Stop the old parts, and make modules and Parameters what they were; return new parts."""
        before = self._before
        before.modules.regions.give_up()
        for chunk in before.modules.access.chunks.values():
            before.memory.pager.notice_writes(chunk)
        before.updater.ahead.forget()
        before.stop(f"{reason}; use what pipe.repartition() has returned")
        free_copies(before)
        strides = {id(param): dense_stride(param) for param in before.built.elsewhere.params}
        strides |= {id(managed.param): managed.stride for managed in before.registry.parameters}
        ordinary = [] if before.ranks.stages is None else self._of_all(self._ordinary_tensors(), "buffers")
        away = set(before.built.elsewhere.modules)
        before.modules.unfit(before.hooks)
        before.built.elsewhere.come_back()
        for found in ordinary:
            self._take(found, away)
        after = self._after = before.for_ranks(mesh)
        after.built.values = PutOff(strides)
        for chunk in [chunk for chunk in before.memory.store.chunks.values() if chunk.id.group < 0]:
            before.memory.store.hand_over(chunk, after.memory.store)
        return after

    def pack(self, after: Runtime, options: PipelineOptions, make: MakePipeline) -> Pipeline:
        """Pack the model into chunks without content, and have optimizers claim their states; return the pipeline."""
        added = self._added
        after.built.add(added.roots, added.excluded, built=after.built.values)
        pipeline = make(after, options)
        for optimizer, counts in zip(self._optimizers, self._counts, strict=True):
            optimizer.move_to(after)
            found = ((after.registry.find(self._params[number]), count) for number, count in counts.items())
            optimizer.take_over({managed: count for managed, count in found if managed is not None})
            for param in [one for one in optimizer.state.excluded if after.registry.is_elsewhere(one)]:
                del optimizer.state.excluded[param]
        self._averages.move_to(after, self._params)
        return pipeline

    def move(self, after: Runtime) -> None:
        """Move what chunks hold."""
        ChunkMover(self._before, after, self._contents, self._specs, ranks=self._ranks, numbers=self._numbers).run()
        self._averages.come_home()

    def fail(self, error: Exception) -> None:
        """Tell the ranks of the new stages of an error, and free all memory: some values are on no rank any more."""
        for parts in (self._before, self._after):
            if parts is not None:
                parts.ranks.leave("pipe.repartition()", error)
                parts.stop(_FAILED)
                parts.memory.pager.close(_FAILED)
                parts.memory.store.close()

    def _of_all(self, own: T, label: str) -> list[T]:
        """Return what each rank passes."""
        label = f"repartition: {label}"
        return [self._ranks.broadcast_object(own, label=label, source=rank) for rank in range(self._ranks.size)]

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for number, root in enumerate(self._added.roots):
            yield from ((f"{number}.{name}", module) for name, module in root.named_modules())

    def _ordinary_tensors(self) -> _Ordinary:
        """Return those of this stage, on its first rank: others have the same."""
        before = self._before
        if before.ranks.shard.rank > 0:
            return _Ordinary({}, [], [])
        away, excluded = set(before.built.elsewhere.modules), set(self._added.excluded)
        sent: dict[int, torch.Tensor] = {}  # what two modules share, they share where it arrives
        tensors = {}
        for name, module in self._modules():
            own = {} if module in away else {**module._buffers, **(module._parameters if module in excluded else {})}
            for key, tensor in own.items():
                if tensor is not None:
                    tensors[name, key] = sent.setdefault(id(tensor), tensor.detach().cpu())
        states = [
            {self._numbers[id(p)]: entry for p, entry in each.state.excluded.items() if id(p) in self._numbers}
            for each in self._optimizers
        ]
        return _Ordinary(tensors, states, self._averages.ordinary())

    def _take(self, found: _Ordinary, away: AbstractSet[nn.Module]) -> None:
        """Have in modules that were away what another stage had."""
        device, modules = self._before.device, dict(self._modules())
        for (name, key), tensor in found.tensors.items():
            module = modules[name]
            if module in away and key in module._buffers:
                module._buffers[key] = tensor.to(device)
            elif module in away and (param := module._parameters[key]) is not None:
                with runtime_mode():
                    move_to(param, tensor)
        for optimizer, states in zip(self._optimizers, found.states, strict=False):
            for number, entry in states.items():
                here = {
                    key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in entry.items()
                }
                optimizer.state.excluded.setdefault(self._params[number], here)
        self._averages.take(found.averages, self._params)
