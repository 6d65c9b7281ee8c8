"""What `step()` is given and returns, and when it has nothing to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, features, same

FP16 = {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 4}}


@pytest.mark.parametrize("how", ["argument", "keyword"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_closure_is_called_once_with_gradients_and_its_loss_returned(how: str, micro_batches: int) -> None:
    """As Lightning calls it: zero_grad, forward and backward all happen inside of `step`."""

    def scenario(twin: Twin) -> list[Any]:
        seen: list[Any] = []
        for seed in range(4):

            def closure(seed: int = seed) -> Tensor:
                twin.optimizer.zero_grad()
                for micro in range(micro_batches):
                    loss = twin.loss(features(seed + 10 * micro))
                    twin.backward(loss)
                seen.append(torch.is_grad_enabled())
                return loss

            with torch.no_grad():
                result = twin.optimizer.step(closure) if how == "argument" else twin.optimizer.step(closure=closure)
            if twin.manager is not None:
                audit(twin.manager)
            seen.append((type(result), result.item()))
        assert seen.count(True) == 4
        return seen

    same(Blocks, scenario)


def test_step_returns_none_without_a_closure() -> None:
    def scenario(twin: Twin) -> list[Any]:
        twin.loss(features(0)).backward()
        first = twin.optimizer.step()
        twin.optimizer.zero_grad()
        return [first, twin.optimizer.step(lambda: twin.loss(features(1)).backward())]

    same(Blocks, scenario)


def test_a_closure_that_raises_leaves_everything_as_it_was() -> None:
    """What it had done up to there is done; the step has not begun."""
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]

        def closure() -> None:
            twin.loss(features(5)).backward()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            twin.optimizer.step(closure)
        twin.optimizer.zero_grad()
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


def test_a_closure_that_makes_no_gradient_is_told_so() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        with pytest.raises(chunkmem.StateError, match=r"step\(\) without a gradient"):
            twin.optimizer.step(lambda: 0.0)


def test_a_closure_of_a_closed_manager_is_not_called() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
    calls: list[int] = []
    with pytest.raises(chunkmem.StateError, match="manager is closed"):
        twin.optimizer.step(lambda: calls.append(1))
    assert calls == []


def test_everything_frozen_is_a_step_that_does_nothing() -> None:
    """As in torch: what cannot have a gradient is not updated; and training goes on where it was."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0, 1)
        twin.model.requires_grad_(False)
        for seed in range(3):
            losses.append(twin.loss(features(seed)).item())
            norm = twin.clip(1.0)
            assert norm == 0
            assert twin.optimizer.step() is None
            twin.optimizer.zero_grad()
        losses.append(twin.optimizer.step(lambda: 0.5))
        twin.model.requires_grad_(True)
        return losses + twin.steps(2, 3, 4)

    same(Blocks, scenario)
    same(Blocks, scenario, max_grad_norm=1e9)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **FP16)) as manager:
        twin = Twin(manager, lambda: Blocks().requires_grad_(False))
        scale = manager.loss_scale
        twin.model(features(0))
        assert twin.optimizer.step() is None
        assert (manager.loss_scale, manager.num_skipped_steps, len(twin.optimizer.state_dict()["state"])) == (
            scale,
            0,
            0,
        )


def test_one_trainable_parameter_without_a_gradient_is_a_forgotten_backward() -> None:
    """In plain PyTorch it would be a step that does nothing, and a training that does not learn."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, lambda: Blocks().requires_grad_(False))
        twin.model.head.requires_grad_(True)
        with pytest.raises(chunkmem.StateError, match=r"step\(\) without a gradient"):
            twin.optimizer.step()
        with pytest.raises(chunkmem.StateError, match="no gradient to clip"):
            twin.clip(1.0)


class Beside(Blocks):
    """With a part that no chunk holds."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        if manager is None:
            self.beside = nn.Linear(WIDTH, WIDTH)
        else:
            with manager.exclude():
                self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.beside(x))


def test_only_excluded_parameters_are_trained() -> None:
    """With a gradient they are updated; without one, nothing happens, as in torch."""

    def train(manager: chunkmem.ChunkManager | None) -> Any:
        twin = Twin(manager, lambda: Beside(manager))
        twin.model.requires_grad_(False)
        twin.model.beside.requires_grad_(True)
        twin.optimizer.step()
        before = twin.weights()
        losses = twin.steps(0, 1)
        twin.optimizer.step()
        assert sum(not torch.equal(value, before[key]) for key, value in twin.weights().items()) == 2
        return [losses, twin.left()]

    plain = train(None)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert_equal(train(manager), plain)


# fp16, where gradients have to carry the loss scale exactly once.


def fp16_twins() -> tuple[Twin, Twin]:
    return tuple(Twin(chunkmem.ChunkManager(config(AMPLE_NBYTES, **FP16)), Blocks) for _ in range(2))  # type: ignore[return-value]


def test_a_closure_in_fp16() -> None:
    ordinary, closed = fp16_twins()
    with ordinary.manager, closed.manager:
        for seed in range(3):
            loss = ordinary.loss(features(seed))
            ordinary.backward(loss)
            ordinary.update()

            def closure(seed: int = seed) -> Tensor:
                closed.optimizer.zero_grad()
                loss = closed.loss(features(seed))
                closed.backward(loss)
                return loss

            assert closed.optimizer.step(closure).item() == loss.item()
        assert_equal(closed.left(), ordinary.left())


@pytest.mark.parametrize("how", ["gradient", "scaled gradient", "own backward"])
def test_a_pipeline_stage_in_fp16(how: str) -> None:
    """A rank that has gradients but no loss: what the last stage sends carries the loss scale, or does not."""
    whole, stage = fp16_twins()
    with whole.manager, stage.manager:
        for seed in range(3):
            whole.backward(whole.loss(features(seed)))
            whole.update()
            outputs = stage.model(features(seed))
            scale = stage.manager.loss_scale
            (gradient,) = torch.autograd.grad(outputs.square().mean(), outputs, retain_graph=True)
            (scaled,) = torch.autograd.grad(outputs.square().mean() * scale, outputs, retain_graph=True)
            if how == "gradient":
                stage.manager.backward(outputs, gradient=gradient)
            elif how == "scaled gradient":
                stage.manager.backward(outputs, gradient=scaled, is_scaled=True)
            else:
                stage.manager.mark_scaled()
                torch.autograd.backward([outputs], [scaled])
            stage.update()
        assert_equal(stage.left(), whole.left())


def test_a_mark_is_for_one_step() -> None:
    """What was said of one step's gradients says nothing of the next one's."""
    twin, other = fp16_twins()
    with twin.manager, other.manager:
        twin.manager.mark_scaled()
        twin.loss(features(0)).backward()
        twin.update()
        twin.loss(features(1)).backward()
        with pytest.raises(
            chunkmem.StateError, match=r"need the loss scale: call manager\.backward\(loss\).*is_scaled"
        ):
            twin.optimizer.step()
        other.manager.close()
        with pytest.raises(chunkmem.StateError, match="manager is closed"):
            other.manager.mark_scaled()
