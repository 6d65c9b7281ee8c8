"""What an asynchronous pipeline cannot train, and what cannot update it: said before anything is packed, or changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.async_pipeline.gap_aware import require_momentum
from chunkmem.contrib.async_pipeline.prediction import learning_rates, require_predictable
from chunkmem.contrib.async_pipeline.versions import GAP_AWARE, STASH, VERSIONS
from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import shown
from chunkmem.data.types import Tier
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.pipeline.modules import StageModule
from chunkmem.pipeline.options import ASYNCHRONOUS, PipelineOptions
from chunkmem.pipeline.ties import holders_of

_SYNCHRONOUS = 'use schedule="1f1b"'


def require_options(options: PipelineOptions) -> None:
    """Raise a `ConfigError` for options that do not go with the schedule, or without it."""
    if options.width is not None and options.schedule == ASYNCHRONOUS:
        raise ConfigError(
            f'width="auto" with schedule={ASYNCHRONOUS!r} is not available: batches are under way between its '
            "steps, where stages would be divided again; take another schedule, or leave out width"
        )
    if options.versions is not None and options.versions not in VERSIONS:
        raise ConfigError(f"versions is {shown(options.versions)}; give one of {', '.join(VERSIONS)}")
    if options.schedule != ASYNCHRONOUS:
        if options.versions is not None:
            raise ConfigError(
                f"versions={shown(options.versions)} is for schedule={ASYNCHRONOUS!r}; {shown(options.schedule)} "
                "updates no weights that a backward needs"
            )
        return
    if options.versions is None:
        raise ConfigError(
            f"schedule={ASYNCHRONOUS!r} updates weights between forward and backward of a batch: say by versions= "
            f"which of them backward runs on, one of {', '.join(VERSIONS)}"
        )
    if options.checkpoint not in ("auto", "never"):
        raise ConfigError(
            f"checkpoint={options.checkpoint!r} with schedule={ASYNCHRONOUS!r}: what stages save is kept over "
            'updates; give "auto" or "never"'
        )
    norm = options.deferred_batch_norm or None
    for name, value in (("deferred_batch_norm", norm), ("freeze", options.epochs), ("cache", options.cache)):
        if value is not None:
            raise ConfigError(
                f'{name} with schedule={ASYNCHRONOUS!r}: batches overlap; leave it out, or use schedule="1f1b"'
            )


def require_trainable(runtime: Runtime, modules: Sequence[StageModule]) -> None:
    """Check that stages, which are not packed yet, can be trained so; what is raised is the same on all ranks.

    Raises:
        ConfigError: something of the model, of the configuration or of the mesh is not for it. Another schedule can
            be taken with the same manager.
    """
    for problem, next_step in _problems(runtime, modules):
        raise ConfigError(f"schedule={ASYNCHRONOUS!r} {problem}; {next_step}")


def _problems(runtime: Runtime, modules: Sequence[StageModule]) -> Iterator[tuple[str, str]]:
    """Yield what an asynchronous pipeline cannot train, and what to do."""
    num_sharing = runtime.ranks.size
    if num_sharing > 1:
        yield (
            f"has one rank a stage, and here are {num_sharing}",
            f"leave out the other dimensions, or {_SYNCHRONOUS}",
        )
    if runtime.device.type != "cpu":
        yield f"sends over gloo, in RAM, and the model is on {runtime.device}", _SYNCHRONOUS
    if Tier.DISK in runtime.memory.store.pools:
        yield "keeps versions of weights on HOST, and there is memory.disk", f"leave that out, or {_SYNCHRONOUS}"
    if any(len(holders) > 1 for holders in holders_of(modules, len(modules)).values()):
        yield (
            "has stages that share a parameter, whose copies would see other gradients",
            f"untie them, or {_SYNCHRONOUS}",
        )
    if (policy := runtime.config.activations.policy) is not None:
        yield (
            f'keeps activations over updates, and activations.policy is "{policy}"',
            f"leave that out, or {_SYNCHRONOUS}",
        )
    excluded = () if runtime.built.unpacked is None else runtime.built.unpacked.excluded
    if runtime.modules.host.among(modules, excluded):
        yield "has a module that computes on HOST", f"leave out manager.on_host(), or {_SYNCHRONOUS}"
    outside = {param for module in excluded for param in module.parameters(recurse=False)}
    for number, module in enumerate(modules):
        for name, param in module.named_parameters():
            if param in outside and param.requires_grad:
                yield (
                    f"has a parameter outside of chunks, {name} of stage {number}",
                    f"leave out manager.exclude(), or {_SYNCHRONOUS}",
                )


def require_updating(optimizer: Any, scheduler: Any, *, versions: str) -> None:
    """Check what `pipe.step` is to update the weights with, as all stages do.

    Args:
        optimizer: as the user gave it.
        scheduler: of learning rates; None: there is none.
        versions: of `VERSIONS`.

    Raises:
        ConfigError: it is no optimizer over chunks, or none of which these versions can tell where it goes; or its
            learning rates depend on more than the number of updates.
    """
    if not isinstance(optimizer, RuleOptimizer):
        raise ConfigError(
            f"pipe.step(): optimizer is a {type(optimizer).__name__}, which does not know of chunks; give one of "
            "chunkmem, such as chunkmem.AdamW(model.parameters(), manager=manager) or manager.optimizer(...)"
        )
    if isinstance(scheduler, LRScheduler) and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"pipe.step(): scheduler is a {type(scheduler).__name__} of another optimizer than the one given; make "
            "it of that one"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "pipe.step(): scheduler is a ReduceLROnPlateau, whose step() needs a metric; step it between two calls of "
            "pipe.step(), or take another one"
        )
    if versions == STASH:
        return
    require_predictable(optimizer, versions=versions)
    if versions == GAP_AWARE:
        require_momentum(optimizer)
    learning_rates(optimizer, scheduler, 1)
