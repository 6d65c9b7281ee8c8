"""What a step has left out of its plan: counted without releases, and never too much."""

from __future__ import annotations

import pytest

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role
from chunkmem.runtime.off_plan import LeftOut

PARAMS = [ChunkId(Role.PARAM, group) for group in range(4)]


def trace(*, remote: bool = False) -> Trace:
    """H R H R H R H R: each chunk is held and released."""
    moments = [moment for chunk in PARAMS for moment in (Moment(Kind.HOLD, chunk, "f"), Moment(Kind.RELEASE, chunk))]
    groups = frozenset({3} if remote else ())
    return Trace(Mode.EVAL, "made by arithmetic", dict.fromkeys(PARAMS, 100), tuple(moments), 0.0, groups)


def test_releases_do_not_count() -> None:
    left = LeftOut(trace())
    left.go(1, 2)
    assert left.spans == []
    left.go(1, 4)
    assert (left.spans, left.num_moments) == ([(1, 4)], 1)
    assert left.number(4, 7) == 3
    assert list(left.come(6)) == [0, 4]


@pytest.mark.parametrize(("stop", "may"), [(6, True), (7, False), (8, False)])
def test_three_quarters_may_be_left_out(stop: int, may: bool) -> None:
    assert LeftOut(trace()).may_go(0, stop) is may


def test_over_ranks_nothing_is_left_out() -> None:
    assert not LeftOut(trace(remote=True)).may_go(0, 2)
