"""While a step has updated some groups and not all, only going on with it is right: what is refused, and the ways out.

The update of the n-th group of a step fails before it has begun, as if what it needs could not be brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkmem
from chunkmem.data.errors import StateError, TierIOError
from chunkmem.data.trace import Kind
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.plan_executor import PlanExecutor
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, cpu_only, features, never_resident


@contextmanager
def failing_update(manager: chunkmem.ChunkManager, number: int) -> Iterator[None]:
    """Have one raise an error, as if what it needs could not be brought."""
    pager, num_calls = manager.runtime.memory.pager, 0
    hold_all = pager._hold_all

    def hold(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise TierIOError("on purpose")
        hold_all(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pager, "_hold_all", hold)
        yield


def half_step(twin: Any, seed: int = 2) -> None:
    twin.loss(features(seed)).backward()
    with failing_update(twin.manager, 3), pytest.raises(TierIOError, match="on purpose"):
        twin.optimizer.step()


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Any]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin: Any = Twin(manager, Blocks)
        twin.steps(0, 1)
        twin.path = tmp_path / "saved"
        manager.save(twin.path, twin.optimizer)
        yield twin


REFUSED: dict[str, Callable[[Any], object]] = {
    "forward": lambda ours: ours.model(features(3)),
    "evaluation": lambda ours: torch.no_grad()(ours.model)(features(3)),
    "forward after model.zero_grad()": lambda ours: (ours.model.zero_grad(), ours.model(features(3))),
    "reading a weight": lambda ours: ours.model.inner.weight.sum().item(),
    "gather": lambda ours: ours.manager.gather(ours.model.inner.weight).__enter__(),
    "state_dict": lambda ours: ours.manager.state_dict(),
    "model's state_dict": lambda ours: ours.model.state_dict(),
    "optimizer's state_dict": lambda ours: ours.optimizer.state_dict(),
    "a state": lambda ours: ours.optimizer.state[ours.model.inner.weight]["exp_avg"].sum(),
    "load_state_dict": lambda ours: ours.manager.load_state_dict({}),
    "save": lambda ours: ours.manager.save(ours.path, ours.optimizer),
    "save_pretrained": lambda ours: ours.manager.save_pretrained(ours.path),
    "load without the optimizer": lambda ours: ours.manager.load(ours.path),
    "freeze": lambda ours: ours.manager.freeze(ours.model.inner),
    "averages": lambda ours: chunkmem.EMA(ours.manager, 0.9),
    "another optimizer": lambda ours: ours.make("SGD", ours.model.parameters(), lr=0.1),
    "zero_grad": lambda ours: ours.optimizer.zero_grad(),
    "clip_grad_norm_": lambda ours: ours.optimizer.clip_grad_norm_(1.0),
}


def plain_after(*seeds: int) -> Any:
    plain = Twin(None, Blocks)
    plain.steps(*seeds)
    return plain


@pytest.mark.few(2)
@pytest.mark.parametrize("what", REFUSED)
def test_what_would_see_a_half_updated_model_is_refused(what: str, ours: Any) -> None:
    half_step(ours)
    for _ in range(2):
        with pytest.raises(
            chunkmem.ChunkmemError, match=r"after an error in optimizer\.step\(\).*call optimizer\.step"
        ):
            REFUSED[what](ours)
    ours.update()
    ours.steps(3)
    assert_equal(ours.left(), plain_after(0, 1, 2, 3).left())


def test_a_backward_of_an_older_graph(ours: Any) -> None:
    loss = ours.loss(features(2))
    loss.backward(retain_graph=True)
    with failing_update(ours.manager, 3), pytest.raises(TierIOError, match="on purpose"):
        ours.optimizer.step()
    with pytest.raises((StateError, RuntimeError), match=r"after an error in optimizer\.step\(\)|inplace operation"):
        loss.backward()
    del loss  # as long as somebody keeps a graph, what it uses is kept on DEVICE
    ours.update()
    assert_equal(ours.left(), plain_after(0, 1, 2).left())


def test_a_checkpoint_takes_the_place_of_a_half_step(ours: Any) -> None:
    half_step(ours, 7)
    ours.manager.load(ours.path, ours.optimizer)
    ours.optimizer.zero_grad()
    ours.steps(2, 3)
    assert_equal(ours.left(), plain_after(0, 1, 2, 3).left())


def test_nothing_was_updated(ours: Any) -> None:
    """So nothing is held against `zero_grad()`, and the batch again."""
    ours.loss(features(2)).backward()
    with failing_update(ours.manager, 1), pytest.raises(TierIOError, match="on purpose"):
        ours.optimizer.step()
    ours.optimizer.zero_grad()
    ours.steps(2, 3)
    assert_equal(ours.left(), plain_after(0, 1, 2, 3).left())


@pytest.mark.parametrize("number", [1, 3])
def test_a_closure_is_called_once(number: int, ours: Any) -> None:
    """It does not discard gradients: called again, it would add to those of its first call."""
    num_calls = 0

    def closure() -> float:
        nonlocal num_calls
        num_calls += 1
        loss = ours.loss(features(2))
        loss.backward()
        return float(loss.detach())

    with failing_update(ours.manager, number), pytest.raises(TierIOError, match="on purpose"):
        ours.optimizer.step(closure)
    with pytest.raises(StateError, match="another closure, which would not be called"):
        ours.optimizer.step(lambda: closure())
    assert ours.optimizer.step(closure) > 0
    assert num_calls == 1
    ours.optimizer.zero_grad()
    ours.steps(3)
    assert_equal(ours.left(), plain_after(0, 1, 2, 3).left())


def test_a_closure_of_a_step_that_was_given_up(ours: Any) -> None:
    """Nothing was updated, and its gradients are discarded: the next closure is called."""
    with failing_update(ours.manager, 1), pytest.raises(TierIOError, match="on purpose"):
        ours.optimizer.step(lambda: ours.loss(features(7)).backward())
    ours.optimizer.zero_grad()
    ours.optimizer.step(lambda: ours.loss(features(2)).backward())
    ours.optimizer.zero_grad()
    ours.steps(3)
    assert_equal(ours.left(), plain_after(0, 1, 2, 3).left())


def test_a_backward_that_had_updated_some_groups(tmp_path: Path) -> None:
    """The batch cannot be repeated: `zero_grad()` says so, and a checkpoint is the way back."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks, in_backward=True)
        twin.steps(0, 1)
        manager.save(tmp_path / "saved", twin.optimizer)
        loss = twin.loss(features(2))
        with failing_update(manager, 3), pytest.raises(TierIOError, match="on purpose"):
            loss.backward()
        with pytest.raises(StateError, match="load what was saved last if that backward has failed"):
            twin.optimizer.zero_grad()
        manager.load(tmp_path / "saved", twin.optimizer)
        twin.optimizer.zero_grad()
        twin.steps(2, 3)
        assert_equal(twin.left(), plain_after(0, 1, 2, 3).left())


@contextmanager
def failing_consumption(number: int) -> Iterator[None]:
    """Have the n-th gradient that is used up move something that cannot be moved, as a plan may at any moment."""
    num_calls, event = 0, PlanExecutor.event

    def failing(self: PlanExecutor, kind: Kind, chunk: Chunk, reader: object) -> None:
        nonlocal num_calls
        num_calls += kind is Kind.CONSUME
        if kind is Kind.CONSUME and num_calls == number:
            raise TierIOError("on purpose")
        event(self, kind, chunk, reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanExecutor, "event", failing)
        yield
    assert num_calls >= number


@pytest.mark.few(2)
@spread(number=[1, 2, 4], call=["zero_grad() again", "the batch again", "step() again"])
def test_gradients_that_are_used_up_all_the_same(number: int, call: str, ours: Any) -> None:
    """Each later backward added to gradients that nobody knew of: a KeyError."""
    with never_resident():
        ours.steps(2, 3)
        ours.loss(features(4)).backward()
    with failing_consumption(number), pytest.raises(TierIOError, match="on purpose"):
        if call == "step() again":
            ours.optimizer.step()
        else:
            ours.optimizer.zero_grad()
    if call == "step() again":
        ours.update()
    else:
        if call == "zero_grad() again":
            ours.optimizer.zero_grad()
        ours.steps(4)
    ours.steps(5, 6)
    assert_equal(ours.left(), plain_after(*range(7)).left())


class FailsInside(torch.optim.SGD):
    """Changes a weight, and then raises something."""

    is_on = False

    def step(self, closure: Any = None) -> Any:
        if FailsInside.is_on:
            self.param_groups[0]["params"][0].data.add_(1)
            raise ValueError("of the class")
        return super().step(closure)


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_update_that_fails_in_its_middle(in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it has done: only a checkpoint helps."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks()
        optimizer = chunkmem.Optimizer(
            FailsInside, model.parameters(), manager=manager, lr=0.1, in_backward=in_backward
        )

        def forward_backward() -> None:
            optimizer.zero_grad()
            model(features(0)).square().mean().backward()

        manager.save(tmp_path / "saved", optimizer)
        before = {name: value.clone() for name, value in manager.state_dict().items()}
        monkeypatch.setattr(FailsInside, "is_on", True)
        with pytest.raises(ValueError, match="of the class"):
            forward_backward()
            optimizer.step()
        monkeypatch.setattr(FailsInside, "is_on", False)
        for call in (optimizer.step, optimizer.zero_grad, manager.state_dict, lambda: model(features(0))):
            with pytest.raises(StateError, match=r"param chunk \d+ .*has failed in its middle.*manager\.load\(path"):
                call()
        manager.load(tmp_path / "saved", optimizer)
        assert_equal(dict(manager.state_dict()), before)
        forward_backward()
        optimizer.step()


def test_clipping_that_fails(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues by the same call, and nothing else; or all gradients are discarded."""
    updater, num_calls = ours.manager.runtime.updater, 0
    replicas = updater.gradient_replicas

    def gradient_replicas(managed: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise TierIOError("on purpose")
        return replicas(managed)

    monkeypatch.setattr(updater, "gradient_replicas", gradient_replicas)
    for again in (True, False):
        num_calls = 0
        ours.loss(features(2)).backward()
        with pytest.raises(TierIOError, match="on purpose"):
            ours.optimizer.clip_grad_norm_(1e-3)
        for call in (ours.optimizer.step, lambda: ours.optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(StateError, match=r"after an error in optimizer\.clip_grad_norm_\(0\.001\).*zero_grad"):
                call()
        with pytest.raises(StateError, match=r"got a gradient after an error in optimizer\.clip_grad_norm_\(\)"):
            ours.loss(features(3)).backward()
        if again:
            ours.optimizer.clip_grad_norm_(1e-3)
            ours.update()
        ours.optimizer.zero_grad()
    plain = plain_after(0, 1)
    plain.loss(features(2)).backward()
    plain.clip(1e-3)
    plain.update()
    assert_equal((ours.steps(4), ours.left()), (plain.steps(4), plain.left()))


def trained_on_rank(rank: int, fails_on: int | None) -> dict[str, Tensor]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks, max_grad_norm=0.1)
        for step in range(6):
            twin.backward(twin.loss(features(2 * step + rank)))
            if rank == fails_on and step in (1, 5):
                with failing_update(manager, 2), pytest.raises(TierIOError, match="on purpose"):
                    twin.optimizer.step()
                with pytest.raises(StateError, match=r"call optimizer\.step\(\) again"):
                    twin.optimizer.zero_grad()
            twin.update()
        return twin.weights()


@pytest.mark.full
@cpu_only
def test_one_of_two_ranks_fails(pair: Team) -> None:
    """The other one has updated its groups, and comes to the next forward."""
    expected = pair.run(trained_on_rank, None)
    for fails_on in (0, 1):
        for found, wanted in zip(pair.run(trained_on_rank, fails_on), expected, strict=True):
            assert_equal(found, wanted)
