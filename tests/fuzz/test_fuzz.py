"""Random trainings of one process: plain PyTorch's bits. Nothing that is drawn is refused.

A failing case is shrunk and printed, and can be given to `check` as it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.cases import LAYERS, ONE_BY_ONE, SEVERAL, Case, Layer, Op, Setting, cases
from tests.fuzz.check import check
from tests.fuzz.loop import Loop, Rooms
from tests.helpers.counted_time import count_time
from tests.helpers.happens_before import SLOW
from tests.helpers.hearing import WAYS
from tests.helpers.twins import cpu_only

pytestmark = cpu_only
SEED = 20240607


def fuzz(num_cases: int, seed: int, *, in_turn: bool = False, each: Callable[[Case], None] = check) -> list[Case]:
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
    @given(cases(in_turn=in_turn))
    def run(case: Case) -> None:
        each(case)
        seen.append(case)

    run()
    assert len(seen) == num_cases
    return seen


@pytest.mark.parametrize("in_turn", [False, True])
def test_ten_trainings(in_turn: bool) -> None:
    fuzz(10, SEED, in_turn=in_turn)


def test_hooks_come_and_go(tmp_path: Path) -> None:
    """A step is recorded, and then each way is taken after each other one."""
    pairs = [pair for way in WAYS for other in WAYS if way != other for pair in ([way] * 2, [other] * 2)]
    ways = ("by module", *(way for pair in pairs for way in pair))
    layers = (Layer("residual", (Layer("linear"), Layer("norm"))), Layer("sequential", (Layer("mlp"),)))
    setting = Setting(ways=ways)
    case = Case(layers, (Op("step"),) * (len(ways) - 1), (setting, setting))
    check(case)
    rooms = Rooms(case, tmp_path, ample=True)
    Loop(case, rooms).run()
    assert rooms.taken == [list(ways)]


@pytest.mark.full
@pytest.mark.parametrize("in_turn", [False, True])
def test_two_hundred_trainings(in_turn: bool) -> None:
    """Others each time, and of everything that there is."""
    seed = random.SystemRandom().randrange(2**32)
    try:
        seen = fuzz(200, seed, in_turn=in_turn)
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
IN_TURN = {
    "put hooks back": "chunkmem.modules.fitted.FittedModules.resume",
    "bind weights again": "chunkmem.modules.binding.BoundChunk.may_leave",
}
"""Found where hooks come and go."""


@pytest.mark.full
@pytest.mark.parametrize("name", [*MUTANTS, *IN_TURN])
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
    monkeypatch.setattr({**MUTANTS, **IN_TURN}[name], nothing)
    with pytest.raises(AssertionError):
        fuzz(200, SEED, in_turn=name in IN_TURN, each=noting)
    shrunk = failed[-1]
    assert len(flat(shrunk.layers)) <= 2, shrunk
    assert len(shrunk.ops) == 1 + (name in IN_TURN), shrunk  # there is a last step; one is recorded, in one they go
