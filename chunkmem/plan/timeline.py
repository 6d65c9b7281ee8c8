"""What happened in a step, or what a plan says will: one type, so that both can be laid side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from chunkmem.errors import PlanError
from chunkmem.plan.model import Lane
from chunkmem.schema import BOOL, NULL, either, integer
from chunkmem.sizes import format_nbytes
from chunkmem.trace.reader import COUNT, FINITE, SECONDS, TEXT, Fields, Format, item_of, member_of
from chunkmem.types import ChunkId, Role, Tier


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on a lane, or a stall: COMPUTE waiting for another lane."""

    lane: Lane
    label: str
    start_s: float
    """Since the step began."""
    end_s: float
    moment: int
    """The moment it was issued in."""
    chunk: ChunkId | None = None
    nbytes: int = 0
    """Moved by it."""
    is_stall: bool = False


@dataclass(frozen=True)
class Timeline:
    """One step."""

    spans: tuple[Span, ...]
    step_s: float
    peak_nbytes: Mapping[Tier, int]
    """Highest sum over chunks; slabs kept for reuse do not count."""
    role_peak_nbytes: Mapping[tuple[Tier, str], int]
    """Each role's own highest sum, by tier and role name."""
    cap_nbytes: Mapping[Tier, int]
    device_nbytes: tuple[int, ...] = ()
    """Chunk bytes on DEVICE in each moment."""
    plan_misses: int = 0
    """Accesses that the plan did not foresee."""
    prefetched: int = 0
    """Copies to DEVICE that had arrived before they were needed."""
    fetched: int = 0
    """Copies to DEVICE that a moment needed."""

    @cached_property
    def moved_nbytes(self) -> Mapping[Lane, int]:
        """Bytes copied on each link."""
        moved = dict.fromkeys((Lane.H2D, Lane.D2H), 0)
        for span in self.spans:
            if span.nbytes and not span.is_stall and span.lane is not Lane.COLLECTIVE:
                moved[span.lane] = moved.get(span.lane, 0) + span.nbytes
        return moved

    @cached_property
    def exchanged_nbytes(self) -> int:
        """Bytes of chunks that were exchanged with other ranks."""
        return sum(span.nbytes for span in self.spans if span.lane is Lane.COLLECTIVE)

    @cached_property
    def stall_s(self) -> float:
        """Time that computing waited for copies."""
        return sum(span.end_s - span.start_s for span in self.spans if span.is_stall)

    def __str__(self) -> str:
        exchanged = self.exchanged_nbytes
        return (
            f"moved {format_nbytes(sum(self.moved_nbytes.values()))}, "
            + (f"exchanged {format_nbytes(exchanged)}, " if exchanged else "")
            + f"stalled {1e3 * self.stall_s:.0f} ms, "
            f"prefetched {self.prefetched}/{self.fetched}, plan misses {self.plan_misses}, "
            f"peak {format_nbytes(self.peak_nbytes[Tier.DEVICE])} of {format_nbytes(self.cap_nbytes[Tier.DEVICE])}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file. A file that is there is replaced as a whole; no directory is created.

        Raises:
            PlanError: the file cannot be written, or it has a value, such as NaN, that none should have.
        """
        _FORMAT.save(self.to_dict(), path, self.from_dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Return what `save` wrote.

        Raises:
            PlanError: it cannot be read, or is something else, of a newer version, or damaged; names the file.
        """
        return _FORMAT.load(path, cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serialisable data.

        Spans are ``[lane, index of the label, start_s, end_s, moment, index of the chunk or None, nbytes, is_stall]``.
        """
        chunks: dict[ChunkId, int] = {}
        labels: dict[str, int] = {}
        spans = [
            [
                span.lane.value,
                labels.setdefault(span.label, len(labels)),
                span.start_s,
                span.end_s,
                span.moment,
                None if span.chunk is None else chunks.setdefault(span.chunk, len(chunks)),
                span.nbytes,
                span.is_stall,
            ]
            for span in self.spans
        ]
        return _FORMAT.document(
            self.step_s,
            self.plan_misses,
            self.prefetched,
            self.fetched,
            [[tier.value, nbytes] for tier, nbytes in self.peak_nbytes.items()],
            [[tier.value, role, nbytes] for (tier, role), nbytes in self.role_peak_nbytes.items()],
            [[tier.value, nbytes] for tier, nbytes in self.cap_nbytes.items()],
            list(self.device_nbytes),
            [[chunk.role.value, chunk.group] for chunk in chunks],
            list(labels),
            spans,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """Make one from what `to_dict` gave.

        Raises:
            PlanError: a key is missing or unknown, or a value is not allowed; says where it is.
        """
        fields = _FORMAT.fields(values)
        chunk = item_of("chunks", [ChunkId(*row) for row in fields.rows("chunks", _ROLE, COUNT)])
        label = item_of("labels", fields.column("labels", TEXT))
        # A prefetch begins before the step that it is for.
        rows = fields.rows("spans", _LANE, label, FINITE, FINITE, _INTEGER, either(NULL, chunk), COUNT, BOOL)
        spans = tuple(Span(*row) for row in rows)
        for index, span in enumerate(spans):
            if span.end_s < span.start_s:
                raise PlanError(f"spans[{index}] ends at {span.end_s} s, before it starts at {span.start_s} s")
        return cls(
            spans=spans,
            step_s=fields.one("step_s", SECONDS),
            peak_nbytes=_by_tier(fields, "peak_nbytes"),
            role_peak_nbytes=fields.table("role_peak_nbytes", _TIER, TEXT, COUNT),
            cap_nbytes=_by_tier(fields, "cap_nbytes"),
            device_nbytes=tuple(fields.column("device_nbytes", COUNT)),
            plan_misses=fields.one("plan_misses", COUNT),
            prefetched=fields.one("prefetched", COUNT),
            fetched=fields.one("fetched", COUNT),
        )


_FORMAT = Format(
    name="chunkmem timeline",
    version=1,
    keys=(
        *("step_s", "plan_misses", "prefetched", "fetched", "peak_nbytes", "role_peak_nbytes", "cap_nbytes"),
        *("device_nbytes", "chunks", "labels", "spans"),
    ),
    error=PlanError,
)
_ROLE = member_of(Role)
_TIER = member_of(Tier)
_LANE = member_of(Lane)
_INTEGER = integer(-(2**63))


def _by_tier(fields: Fields, key: str) -> dict[Tier, int]:
    found = {tier: nbytes for (tier,), nbytes in fields.table(key, _TIER, COUNT).items()}
    if Tier.DEVICE not in found:
        raise PlanError(f'{key} has no row for "{Tier.DEVICE.value}", which every timeline has')
    return found


def differences(predicted: Timeline, happened: Timeline) -> list[str]:
    """Return where a step without plan misses is not what was predicted: bytes on each link, chunk peak on each
    tier."""
    found = []
    for lane in sorted({*predicted.moved_nbytes, *happened.moved_nbytes}, key=lambda lane: lane.value):
        one, other = predicted.moved_nbytes.get(lane, 0), happened.moved_nbytes.get(lane, 0)
        if one != other:
            found.append(f"{lane.value}: {one} bytes predicted, {other} moved")
    for tier in sorted({*predicted.peak_nbytes, *happened.peak_nbytes}, key=lambda tier: tier.value):
        one, other = predicted.peak_nbytes.get(tier, 0), happened.peak_nbytes.get(tier, 0)
        if one != other:
            found.append(f"{tier.name}: a peak of {one} bytes predicted, {other} seen")
    return found
