"""Make a pipeline of what a user names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chunkmem.assembly.runtime import Runtime
from chunkmem.pipeline.by_layer import ByLayerPipeline
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.repartition import repartition
from chunkmem.pipeline.staged import StagedPipeline


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
