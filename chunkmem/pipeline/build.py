"""Make a pipeline of what a user names, and divide it into another number of stages between two steps.

As [Note: Repacking] in `chunkmem.assembly.change`: the model is packed as other stages, over the same ranks, or as
none. Buffers and excluded modules go to the ranks that have not had them. Refused are gradients that wait, memory that
somebody keeps, and a number that does not divide the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from chunkmem.assembly.change import Repacking, require_let_go
from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import ChunkmemError, ConfigError, StateError
from chunkmem.modules.binding import move_to
from chunkmem.modules.parameter_reads import own_parameters
from chunkmem.packing.built import PutOff
from chunkmem.pipeline.by_layer import ByLayerPipeline
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.staged import StagedPipeline, stages_of
from chunkmem.pipeline.width import Pipeline
from chunkmem.ranks.mesh import Mesh, groups_of, ranks_by_stage, with_stages
from chunkmem.ranks.ranks import Ranks, open_ranks
from chunkmem.runtime.device import runtime_mode

_CALL = "pipe.repartition()"
MakePipeline = Callable[[Runtime, PipelineOptions], Pipeline]


def repartition(
    runtime: Runtime,
    options: PipelineOptions,
    num_stages: int,
    *,
    changed: PipelineOptions | None = None,
    make: MakePipeline,
) -> Pipeline:
    """Do what `Pipeline.repartition` says, and return the pipeline.

    Args:
        runtime: the parts of the manager so far.
        options: what the user has asked of the pipeline.
        num_stages: ranks of a pipeline from now on.
        changed: what is asked for from now on; None: the same, about as many blocks in each stage.
        make: has a manager take other parts over, and returns a pipeline over them.
    """
    before, options = options, replace(options, cut=None) if changed is None else changed
    is_same = options.cut == before.cut
    options = _options_for(options, num_stages)
    roots = _refuse(runtime, options, num_stages, is_same=is_same)
    table = ranks_by_stage(runtime.origin.mesh, num_stages)
    stage, replica, shard = (table == runtime.ranks.name(runtime.ranks.rank)).nonzero()[0].tolist()
    members = tuple(sorted(table[:, replica].flatten().tolist()))
    said = f"its {_width(runtime.ranks)} ranks (stages x shards) are {num_stages} x {table.shape[2]} now"
    said += f", with {', '.join(map(str, options.cut))} blocks" if options.cut else ""
    ranks = open_ranks(mesh=Mesh((members,)), timeout_s=runtime.config.distributed.timeout_s)
    try:
        change = _Change(runtime, ranks, call=_CALL, reader="repartition")
        change.check(roots[stage::num_stages], shard, num_shards=table.shape[2])
        try:
            after = change.divided(with_stages(runtime.origin.mesh, num_stages), reason=said)
            pipeline = make(after, options)  # its chunks have no content yet
            change.claim(after)
            change.move(after)
        except Exception as error:
            change.fail(error)
            raise
    except Exception as error:
        ranks.connection.leave("pipe.repartition()", error)
        raise
    finally:
        ranks.close()
    return pipeline


def _width(ranks: Ranks) -> str:
    return f"{1 if ranks.stages is None else ranks.stages.size} x {ranks.shard.size}"


def _options_for(options: PipelineOptions, num_stages: int) -> PipelineOptions:
    if num_stages == 1 and options.width is not None:
        return options  # the schedule is for when there are stages again
    if num_stages == 1:
        return replace(options, schedule="auto", stages_per_rank=None)
    return replace(options, schedule="auto") if options.schedule == "by-layer" else options


# What is refused: nothing has been changed.


def _refuse(runtime: Runtime, options: PipelineOptions, num_stages: int, *, is_same: bool) -> Sequence[nn.Module]:
    """Raise if it cannot be done, on all ranks alike; return all stages, or the roots of the model."""
    found: ChunkmemError | None = None
    roots: Sequence[nn.Module] = ()
    runtime.require_open()
    for ranks in (runtime.ranks.stages, runtime.ranks):
        if ranks is not None:
            ranks.agree("the number of stages that a pipeline is divided into", repr(num_stages))
            ranks.agree("the blocks of the stages that a pipeline is divided into", repr(options.cut))
    try:
        runtime.updater.ledger.require_over("pipe.repartition()")
        roots = _require_stages(runtime, options, num_stages, is_same=is_same)
        require_let_go(runtime, call=_CALL, why="goes to other ranks")
    except ChunkmemError as error:
        found = error
    said = "" if found is None else f"{type(found).__name__}: {found}"
    others = runtime.ranks.any_text(said, label="pipe.repartition()")
    if found is not None:
        raise found
    if others:
        raise StateError(f"pipe.repartition(): another rank refuses: {others}")
    return roots


def _require_stages(
    runtime: Runtime, options: PipelineOptions, num_stages: int, *, is_same: bool
) -> Sequence[nn.Module]:
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ConfigError(f"pipe.repartition(): stages is {num_stages!r}; give a number of at least 1")
    if below := runtime.config.memory.below:
        raise ConfigError(f"pipe.repartition() with {below} is not available in this version")
    now = 1 if runtime.ranks.stages is None else runtime.ranks.stages.size
    if num_stages == now and is_same:
        raise StateError(
            f"pipe.repartition({num_stages}): there are {_width(runtime.ranks)} ranks (stages x shards) already"
        )
    num_shards = ranks_by_stage(runtime.origin.mesh, num_stages).shape[2]
    if len(runtime.built.added) != 1:
        raise StateError(f"pipe.repartition(): this manager has {len(runtime.built.added)} models; it is for one")
    (added,) = runtime.built.added
    if added.kept or runtime.registry.each_ranks:
        raise StateError(
            "pipe.repartition(): modules were built in manager.exclude(reduce=False), or have experts over the ranks "
            "of a stage: each rank has parameters of its own there, and other ranks cannot choose between them"
        )
    ordinary = own_parameters(added.excluded)
    for root in added.roots:
        for name, param in root.named_parameters():
            is_packed = runtime.registry.find(param) is not None or runtime.registry.is_of_other_stage(param)
            if not is_packed and id(param) not in ordinary:
                raise StateError(
                    f"pipe.repartition(): parameter {name} was added after the model was packed, and is in no chunk; "
                    "make adapters (get_peft_model) before the model is packed"
                )
    if num_stages == 1:
        return added.roots
    _, stages, _ = stages_of(runtime, options, num_ranks=num_stages, num_shards=num_shards)
    added.check(stages)
    return stages


# What is done.


@dataclass(frozen=True)
class _Ordinary:
    """What a stage has outside of chunks: buffers, and parameters of excluded modules with their states."""

    tensors: Mapping[tuple[str, str], torch.Tensor]
    """Tensors by (module's name, tensor's own name)."""
    states: Sequence[Mapping[int, Mapping[str, Any]]]
    """By optimizer or averages, then by number of a parameter: its states."""


class _Change(Repacking):
    """To another number of stages."""

    def check(self, roots: Sequence[nn.Module], shard: int, *, num_shards: int) -> None:
        """Check that all ranks have room, while nothing has been changed yet.

        Args:
            roots: what this rank is going to have.
            shard: of it.
            num_shards: ranks that share it.

        Raises:
            CapacityError: one has not; on all ranks.
        """
        inside = {module for root in roots for module in root.modules()}
        excluded = [module for module in self.added.excluded if module in inside]
        layouts = self.before.modules.packer.preview(roots, excluded, num_ranks=num_shards)
        self.require_room(layouts, shard=shard)

    def divided(self, mesh: object, *, reason: str) -> Runtime:
        """Stop the old parts, make modules and Parameters what they were, and give the model to new parts."""
        before = self.before
        origin = replace(before.origin, process_group=None, mesh=mesh, groups=[*groups_of(mesh)])
        strides = self.stop(f"{reason}; use what pipe.repartition() has returned")
        ordinary = [] if before.ranks.stages is None else self.contents.of_all(self._ordinary_tensors(), "buffers")
        away = set(before.built.elsewhere.modules)
        after = self.undo(origin)
        before.end_groups()
        for found in ordinary:
            self._take(found, away)
        after.built.add(self.added.roots, self.added.excluded, built=PutOff(strides))
        return after

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for number, root in enumerate(self.added.roots):
            yield from ((f"{number}.{name}", module) for name, module in root.named_modules())

    def _ordinary_tensors(self) -> _Ordinary:
        """Return those of this stage, on its first rank: others have the same."""
        before = self.before
        if before.ranks.shard.rank > 0:
            return _Ordinary({}, [])
        away, excluded, numbers = set(before.built.elsewhere.modules), set(self.added.excluded), self.contents.numbers
        sent: dict[int, torch.Tensor] = {}  # what two modules share, they share where it arrives
        tensors = {}
        for name, module in self._modules():
            own = {} if module in away else {**module._buffers, **(module._parameters if module in excluded else {})}
            for key, tensor in own.items():
                if tensor is not None:
                    tensors[name, key] = sent.setdefault(id(tensor), tensor.detach().cpu())
        states = [
            {numbers[id(p)]: dict(entry) for p, entry in holder.excluded.items() if id(p) in numbers}
            for holder in self.holders
        ]
        return _Ordinary(tensors, tree_map_only(torch.Tensor, lambda value: value.cpu(), states))

    def _take(self, found: _Ordinary, away: AbstractSet[nn.Module]) -> None:
        """Have in modules that were away what another stage had."""
        device, modules = self.before.device, dict(self._modules())
        for (name, key), tensor in found.tensors.items():
            module = modules[name]
            if module in away and key in module._buffers:
                module._buffers[key] = tensor.to(device)
            elif module in away and (param := module._parameters[key]) is not None:
                with runtime_mode():
                    move_to(param, tensor)
        for holder, states in zip(self.holders, found.states, strict=False):
            for number, entry in states.items():
                here = tree_map_only(torch.Tensor, lambda value: value.to(device), entry)
                holder.excluded.setdefault(self.params[number], here)


def make_pipeline(
    runtime: Runtime,
    options: PipelineOptions,
    *,
    adopt: Callable[[Runtime], None],
    staged: type[StagedPipeline] = StagedPipeline,
) -> ByLayerPipeline | StagedPipeline:
    """Return what `ChunkManager.pipeline` does, and raise what it does.

    Args:
        runtime: of the manager.
        options: what the user asks for.
        adopt: has the manager take other parts over, when the pipeline is divided into another number of stages.
        staged: what is made over ranks with stages.
    """

    def make(after: Runtime, options: PipelineOptions) -> ByLayerPipeline | StagedPipeline:
        adopt(after)
        return make_pipeline(after, options, adopt=adopt, staged=staged)

    kind = ByLayerPipeline if runtime.ranks.stages is None else staged
    pipeline = kind(runtime, options)
    pipeline.divide = partial(repartition, runtime, options, make=make)
    return pipeline
