"""Make a pipeline of what a user names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.errors import ConfigError, LayoutError
from chunkmem.pipeline.by_layer import ByLayerPipeline, Item, LossItem
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.repartition import repartition
from chunkmem.pipeline.staged import StagedPipeline, staged_pipeline
from chunkmem.sizes import shown


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

    pipeline = _made(runtime, options, staged)
    pipeline.epochs = options.epochs
    pipeline.divide = partial(repartition, runtime, options, make=make)
    return pipeline


def _made(runtime: Runtime, options: PipelineOptions, staged: type[StagedPipeline]) -> ByLayerPipeline | StagedPipeline:
    if runtime.ranks.stages is not None:
        return staged_pipeline(runtime, options, make=staged)
    is_asked = options.schedule not in ("auto", "by-layer") or options.stages_per_rank is not None
    if is_asked and options.width is None:  # else it is for when there are stages
        raise ConfigError(
            f"schedule {shown(options.schedule)} is for stages over ranks: make the manager with a mesh that has a "
            'dimension "stage", or leave out schedule and stages_per_rank'
        )
    chain = [module for module in (options.first, *options.blocks) if module is not None]
    named = [module for module in (*chain, options.last) if module is not None]
    names = _names(runtime, named)
    items = [Item(names[id(module)], module) for module in chain]
    name = "loss" if options.last is None else names[id(options.last)]
    items.append(Item(name, LossItem(options.last, options.loss_fn, casts=runtime.is_lowered)))
    statistics = DeferredStatistics(named if options.deferred_batch_norm else ())
    return ByLayerPipeline(
        runtime,
        items,
        micro_batches=options.micro_batches,
        checkpoint=options.checkpoint,
        statistics=statistics,
        cache=options.cache,
    )


def _names(runtime: Runtime, modules: list[nn.Module]) -> dict[int, str]:
    """Return what the model calls each module.

    Raises:
        LayoutError: one has parameters that the manager does not have.
    """
    known: dict[int, str] = {}
    parameters: set[int] = set()
    for model in runtime.registry.models:
        parameters.update(map(id, model.root.parameters()))
        for name, module in model.root.named_modules():
            known.setdefault(id(module), name or type(module).__name__)
    for module in modules:
        # What is not part of a model may be a wrapper of something that is.
        inner = next((known[id(each)] for each in module.modules() if id(each) in known), type(module).__name__)
        if not parameters.issuperset(map(id, module.parameters())):
            raise LayoutError(
                f"manager.pipeline(): a {type(module).__name__} has parameters of no model of this manager; build it "
                "inside manager.init(), or give its model to manager.wrap()"
            )
        known.setdefault(id(module), inner)
    return known
