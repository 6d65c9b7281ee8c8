"""A recorded step as it repeats: gradients have content at its start if they have it at its end. Pure."""

from __future__ import annotations

from dataclasses import replace

from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import ChunkId, Role


def as_loop(trace: Trace) -> Trace:
    """Return the step as it is from the second time on.

    A gradient that no optimizer consumes has content when the step ends. The first such step begins it (CREATE), all
    others add to it (WRITE). A step that consumes what an earlier one left behind adds to it, and the next begins a new
    one.

    Raises:
        TraceError: a gradient is read or updated with that nothing in the step begins, and the step uses it up, or it
            is given up twice: the step cannot be repeated.
    """
    first: dict[ChunkId, int] = {}
    is_left: dict[ChunkId, bool] = {}
    """By chunk: whether it has content after the moments so far."""
    for at, moment in enumerate(trace.moments):
        chunk = ChunkId(Role.GRAD, moment.chunk.group) if moment.kind is Kind.UPDATE else moment.chunk
        if chunk.role is not Role.GRAD or moment.kind is Kind.RELEASE:
            continue
        first.setdefault(chunk, at)
        if moment.kind in (Kind.CONSUME, Kind.UPDATE) and not is_left.get(chunk, True):
            raise TraceError(
                f"moment {at} ({moment}) uses {chunk}, which the step has given up before, as with a zero_grad() "
                "between backward and step: the next step will be another one, so record that"
            )
        is_left[chunk] = moment.kind is not Kind.CONSUME
    moments = list(trace.moments)
    for chunk, at in first.items():
        moments[at] = _repeated(moments[at], at, chunk=chunk, has_content=is_left[chunk])
    return trace if tuple(moments) == trace.moments else replace(trace, moments=tuple(moments))


def _repeated(moment: Moment, at: int, *, chunk: ChunkId, has_content: bool) -> Moment:
    """Return what the first moment of a gradient is where the gradient has content before it, or has none."""
    if moment.kind in (Kind.CREATE, Kind.WRITE):
        return replace(moment, kind=Kind.WRITE if has_content else Kind.CREATE)
    if has_content or moment.kind is Kind.CONSUME:
        return moment
    raise TraceError(
        f"moment {at} ({moment}) reads {chunk}, which nothing in the step begins, and which has no content when the "
        "step ends: the next step will be another one, so record that"
    )
