"""The trace of a step in which fewer parameters are trained, made from one in which more were. Pure.

[Note: Frozen parameters] Nothing of forward changes. In backward no gradient of a frozen parameter lands, and after the
last one that does, nothing is left to do: modules further to the front are not entered. Groups of which all parameters
are frozen are not updated, and have neither gradients, nor master weights, nor states.

    before   hold 3, land 3, release   hold 2, land 2, release   hold 1, land 1, release   update 1, 2, 3
    after    hold 3, land 3, release                                                       update 3

A region that backward does not come to any more saves nothing. Over ranks, what was gathered for modules that are not
entered is not, see `chunkmem.trace.frozen_exchanges`.

Modules of which all is frozen and that come before that, as those between trained ones, are entered as before: their
weights are read for the gradients of their inputs. Backward is done with them when these are there, and with what a
region has saved when it leaves the region: [Note: Backward is not nested by module] in `chunkmem.nn.backward`.

What a step leaves out of its plan does no harm, so what cannot be told for certain stays: with several micro-batches,
the backwards of all but the last one. Over ranks, or with managed activations, a step has to be recorded (`is_certain`)
that has such backwards, or modules of which the trace does not say when backward is done with them if they are frozen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from chunkmem.trace.frozen_exchanges import Exchanges, Step, is_landing, with_exchanges
from chunkmem.trace.model import Kind, Moment, Moments, Region, Trace
from chunkmem.types import ChunkId, Role


@dataclass(frozen=True)
class Fewer:
    """A step in which fewer parameters are trained."""

    trace: Trace
    exchanges: Exchanges | None
    """Over ranks; None: they cannot be told."""
    is_certain: bool
    """It is all in the trace."""


def without_training(
    trace: Trace,
    *,
    params: Collection[str],
    groups: Collection[int],
    emptied: Collection[ChunkId],
    exchanges: Exchanges | None = None,
    unpredictable: Collection[str] = (),
) -> Fewer:
    """Return the same step if some parameters were frozen; see [Note: Frozen parameters].

    Args:
        trace: of the step.
        params: names of the parameters that are frozen.
        groups: those of which all parameters are.
        emptied: chunks of master weights and optimizer states that have been given back.
        exchanges: of the step, over ranks.
        unpredictable: names of parameters of which nobody knows when backward is done with them if they are frozen.
    """
    labels = {f"{name} gradient" for name in params}
    gone = {ChunkId(Role.GRAD, group) for group in groups}

    def is_left(moment: Moment) -> bool:
        if moment.kind is Kind.UPDATE:
            return moment.chunk.group not in groups
        return moment.chunk not in gone and not (is_landing(moment) and moment.label in labels)

    step = Step(
        [(at, moment) for at, moment in enumerate(trace.moments) if is_left(moment)],
        cut=1 + max((at for at, m in enumerate(trace.moments) if is_landing(m) and is_left(m)), default=-1),
    )
    after = exchanges
    if step.cut:
        regions = _regions_without_backward(trace, step)
        step.moments = _without_tail(step)
        if exchanges is not None:
            step.moments, after = with_exchanges(trace, step, exchanges, gone=groups)
        step.moments = [(at, moment) for at, moment in step.moments if at not in regions]
    used = {moment.chunk for _, moment in step.moments}
    lost = gone | set(emptied) | {key for key in trace.chunk_nbytes if key.role is Role.ACTIVATION and key not in used}
    sizes = {key: nbytes for key, nbytes in trace.chunk_nbytes.items() if key not in lost}
    early, late = ({m.label for m in part if is_landing(m)} & labels for part in _divided(trace.moments, step.cut))
    unknown = early & (late | {f"{name} gradient" for name in unpredictable})
    counts = exchanges is not None or any(moment.chunk.role is Role.ACTIVATION for _, moment in step.moments)
    return Fewer(
        _renumbered(trace, step, sizes=sizes),
        None if early & late else after,
        is_certain=not (counts and unknown),
    )


def _divided(moments: Sequence[Moment], cut: int) -> tuple[Sequence[Moment], Sequence[Moment]]:
    return moments[:cut], moments[cut:]


def _without_tail(step: Step) -> list[tuple[int, Moment]]:
    """Leave out the modules that are entered after the last gradient has landed, until the first update."""
    kept, entered = [], set[ChunkId]()
    stop = next((at for at, m in step.moments if at >= step.cut and m.kind is Kind.UPDATE), None)
    for at, moment in step.moments:
        is_module = at >= step.cut and moment.kind is not Kind.UPDATE and moment.chunk.role is not Role.GRAD
        if is_module and moment.chunk in entered:  # also past an update inside backward
            if moment.kind is Kind.RELEASE:
                entered.remove(moment.chunk)
        elif is_module and moment.kind is Kind.HOLD and (stop is None or at < stop):
            entered.add(moment.chunk)
        else:
            kept.append((at, moment))
    return kept


def _regions_without_backward(trace: Trace, step: Step) -> set[int]:
    """Return the moments of chunks that hold what regions save which backward does not come to any more."""
    trained = [moment.label for _, moment in step.moments if is_landing(moment)]
    found, lives = set[int](), dict[ChunkId, list[int]]()
    for at, moment in enumerate(trace.moments):
        if moment.chunk.role is not Role.ACTIVATION:
            continue
        if moment.kind is Kind.CREATE:
            lives[moment.chunk] = []
        life = lives.setdefault(moment.chunk, [])
        life.append(at)
        region = trace.moments[life[0]].label.removesuffix(" forward").removesuffix(" backward")
        is_trained = any(label.startswith(f"{region}.") for label in trained)
        if moment.kind is Kind.CONSUME and at >= step.cut and not is_trained:
            found.update(life)
    return found


def _renumbered(trace: Trace, step: Step, *, sizes: Mapping[ChunkId, int]) -> Trace:
    """Return a trace of the moments that are left, its regions where these are now."""
    befores = sorted(at for at, _ in step.moments)

    def span(moments: Moments) -> Moments:
        return bisect_left(befores, moments[0]), bisect_left(befores, moments[1])

    moments = tuple(_begun(moment for _, moment in step.moments))
    left = {moment.chunk for moment in moments}
    regions = tuple(
        replace(
            region,
            forward=span(region.forward),
            backward=span(region.backward),
            recomputed=None if region.recomputed is None else span(region.recomputed),
        )
        for region in trace.regions
        if not _is_unread(region, step, left)
    )
    return replace(trace, moments=moments, chunk_nbytes=sizes, regions=regions)


def _is_unread(region: Region, step: Step, left: AbstractSet[ChunkId]) -> bool:
    """Tell whether backward does not come to a region any more."""
    return region.backward[0] >= step.cut and left.isdisjoint({region.chunk, region.inputs})


def _begun(moments: Iterable[Moment]) -> Iterator[Moment]:
    """Have the first landing that is left in a chunk begin its content."""
    begun = set[ChunkId]()
    for moment in moments:
        if moment.kind is Kind.CONSUME:
            begun.discard(moment.chunk)
        elif moment.kind is Kind.CREATE:
            begun.add(moment.chunk)
        elif moment.kind is Kind.WRITE and moment.chunk.role is Role.GRAD and moment.chunk not in begun:
            moment = replace(moment, kind=Kind.CREATE)
            begun.add(moment.chunk)
        yield moment
