"""Random trainings of one process: plain PyTorch's bits. Nothing that is drawn is refused.

A failing case is shrunk and printed, and can be given to `check` as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.cases import LAYERS, ONE_BY_ONE, SEVERAL, Case, Layer, cases
from tests.fuzz.check import check
from tests.helpers.counted_time import count_time
from tests.helpers.happens_before import SLOW
from tests.helpers.twins import cpu_only

pytestmark = cpu_only
SEED = 20240607


def fuzz(num_cases: int, seed: int, *, each: Callable[[Case], None] = check) -> list[Case]:
    """Check so many cases, and return them; one that fails is shrunk, and named in a note of the error."""
    seen: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=num_cases,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def run(case: Case) -> None:
        each(case)
        seen.append(case)

    run()
    assert len(seen) == num_cases
    return seen


def test_twenty_trainings() -> None:
    fuzz(20, SEED)


@pytest.mark.full
def test_two_hundred_trainings() -> None:
    """Others each time, and of everything that there is."""
    seed = random.SystemRandom().randrange(2**32)
    try:
        seen = fuzz(200, seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    assert {op.kind for case in seen for op in case.ops} == {*ONE_BY_ONE, *SEVERAL}
    assert {layer.kind for case in seen for layer in flat(case.layers)} >= set(LAYERS)


def flat(layers: tuple[Layer, ...]) -> list[Layer]:
    """Layers and what is in them."""
    return [each for layer in layers for each in (layer, *flat(layer.kids))]


def nothing(*args: Any, **kwargs: Any) -> None:
    """What the runtime does not do."""


MUTANTS = {
    "wait for what has been prefetched": "chunkmem.runtime.copy_order.CopyOrder._compute_waits",
    "notice what was written to weights": "chunkmem.runtime.pager.notice_writes",
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_runtime_leaves_out_is_found_and_shrunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Case] = []

    def noting(case: Case) -> None:
        try:
            check(case)
        except AssertionError:
            failed.append(case)
            raise

    # Which plan is made, and so whether a case fails, would depend on how fast the machine is and on what else it does.
    count_time(monkeypatch)
    monkeypatch.setattr("chunkmem.assembly.speeds.cached_machine", lambda compute, caps, by_form: SLOW)
    monkeypatch.setattr(MUTANTS[name], nothing)
    with pytest.raises(AssertionError):
        fuzz(200, SEED, each=noting)
    shrunk = failed[-1]
    assert len(flat(shrunk.layers)) <= 2, shrunk
    assert len(shrunk.ops) == 1, shrunk
