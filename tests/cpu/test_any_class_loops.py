"""`chunkmem.Optimizer` in loops that clip and accumulate, with compiled blocks, in one process and over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn.utils import clip_grad_norm_

from tests.cpu.test_compile import Compiled, blocks
from tests.helpers.any_class import ClassTwin
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Outcome, Task, serial, train
from tests.helpers.spread import spread
from tests.helpers.twins import assert_equal, cpu_only, features, same

pytestmark = cpu_only
KINDS = ("NAdam", "Lion", "Adafactor", "stacked", "schedule-free")
CLIPS = ("by torch's function", "by the optimizer's method")
MAX_NORM = 0.05


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CompiledClass(Compiled, ClassTwin):
    """Compiled blocks, updated by a class of torch's."""


class OrdinaryClass(ClassTwin):
    """The same blocks as they are."""


@spread(kind=KINDS, clip=CLIPS, is_compiled=[True, False], num_micro=[2, 1])
@pytest.mark.few(1)
def test_clipped_and_accumulated(kind: str, clip: str, is_compiled: bool, num_micro: int) -> None:
    def scenario(twin: Any) -> Any:
        found = []
        for step in range(5):
            for micro in range(num_micro):
                loss = twin.loss(features(num_micro * step + micro))
                twin.backward(loss)
                found.append(loss.item())
            if clip == CLIPS[0]:
                found.append(clip_grad_norm_(twin.model.parameters(), MAX_NORM))
            else:
                found.append(twin.clip(MAX_NORM))
            twin.update()
        return found

    same(blocks, scenario, twin=CompiledClass if is_compiled else OrdinaryClass, kind=kind)


def train_from_scratch(rank: int, task: Task) -> Outcome:
    torch._dynamo.reset()  # processes are kept
    return train(rank, task)


@pytest.mark.full
@spread(
    optimizer=["NAdam", "Adafactor", "Muon and AdamW"],
    clip=["torch", "method", ""],
    compiler=[{"backend": "aot_eager"}, None],
    micro_batches=[2, 1],
)
@pytest.mark.few(1)
def test_over_two_ranks(
    pair: Team, optimizer: str, clip: str, compiler: dict[str, Any] | None, micro_batches: int
) -> None:
    """The bits of one process that adds up the gradients of both; but for the method's norm, a sum over ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = Task(optimizer=optimizer, clip=clip, compiler=compiler, micro_batches=micro_batches, steps=5)
    losses, weights, states = serial(task, 2)
    torch.set_num_threads(threads)
    for rank, outcome in enumerate(pair.run(train_from_scratch, task)):
        if clip == "method":
            assert outcome.losses == pytest.approx(losses[rank], abs=1e-5)
            assert all(torch.allclose(outcome.weights[key], value, atol=1e-5) for key, value in weights.items())
            continue
        assert outcome.losses == losses[rank]
        assert_equal(outcome.weights, weights)
        assert_equal(dict(sorted(outcome.states.items())), dict(sorted(states.items())))


def test_clipping_makes_a_difference(pair: Team) -> None:
    """Else the tests above would prove nothing of it."""
    make = partial(Task, optimizer="Adafactor", steps=3)
    weights = [serial(make(clip=clip), 2)[1] for clip in ("torch", "")]
    assert any(not torch.equal(value, weights[1][key]) for key, value in weights[0].items())
