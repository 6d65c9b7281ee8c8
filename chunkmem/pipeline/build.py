"""Make a pipeline of what a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from chunkmem.assembly import Runtime
from chunkmem.errors import ConfigError, LayoutError
from chunkmem.pipeline.by_layer import ByLayerPipeline, Item, LossItem
from chunkmem.pipeline.checkpoints import CHECKPOINTS
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.staged import StagedPipeline, staged_pipeline
from chunkmem.sizes import shown


def make_pipeline(
    runtime: Runtime,
    blocks: Iterable[nn.Module],
    *,
    first: nn.Module | None,
    last: nn.Module | None,
    loss_fn: Callable[..., torch.Tensor],
    micro_batches: int,
    checkpoint: str,
    schedule: str,
    stages_per_rank: int | None,
    deferred_batch_norm: bool,
) -> ByLayerPipeline | StagedPipeline:
    """Return what `ChunkManager.pipeline` does, and raise what it does."""
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise LayoutError(f"manager.pipeline() takes a list of blocks, not a {type(blocks).__name__}")
    modules = list(blocks)
    for at, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise LayoutError(f"manager.pipeline(): block {at} is a {type(module).__name__}, not a torch.nn.Module")
    for name, end in (("first", first), ("last", last)):
        if end is not None and not isinstance(end, nn.Module):
            raise LayoutError(f"manager.pipeline(): {name} is a {type(end).__name__}, not a torch.nn.Module")
    if not modules and first is None:
        raise LayoutError("manager.pipeline() was given no block")
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn is a {type(loss_fn).__name__}; it has to be a function of output and target")
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise ConfigError(f"micro_batches is {shown(micro_batches)}; give a number of at least 1")
    if checkpoint not in CHECKPOINTS:
        raise ConfigError(f"checkpoint is {shown(checkpoint)}; give one of {', '.join(CHECKPOINTS)}")
    if runtime.ranks.stages is not None:
        return staged_pipeline(
            runtime,
            modules,
            first=first,
            last=last,
            loss_fn=loss_fn,
            micro_batches=micro_batches,
            checkpoint=checkpoint,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            deferred_batch_norm=deferred_batch_norm,
        )
    if schedule not in ("auto", "by-layer") or stages_per_rank is not None:
        raise ConfigError(
            f"schedule {shown(schedule)} is for stages over ranks: make the manager with a mesh that has a dimension "
            '"stage", or leave out schedule and stages_per_rank'
        )
    chain = [*([] if first is None else [first]), *modules]
    named = [*chain, *([] if last is None else [last])]
    names = _names(runtime, named)
    items = [Item(names[id(module)], module) for module in chain]
    name = "loss" if last is None else names[id(last)]
    items.append(Item(name, LossItem(last, loss_fn, casts=runtime.is_lowered)))
    statistics = DeferredStatistics(named if deferred_batch_norm else ())
    return ByLayerPipeline(runtime, items, micro_batches=micro_batches, checkpoint=checkpoint, statistics=statistics)


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
