"""The calls between two steps in all the orders that programs use, and gradients that do not come from backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, features, same


def test_zero_grad_between_forward_and_backward() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed in range(4):
            loss = twin.loss(features(seed))
            twin.optimizer.zero_grad()
            loss.backward()
            twin.optimizer.step()
            losses.append(loss.item())
        return losses

    same(Blocks, scenario)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_a_micro_batch(set_to_none: bool) -> None:
    """Gradients set to zero, not to None, make the next step update what has no other gradient."""

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        for seed in (1, 2):
            twin.loss(features(seed)).backward()
            twin.model.blocks[0].requires_grad_(False)
            twin.optimizer.zero_grad(set_to_none=set_to_none)
            twin.loss(features(seed + 5)).backward()
            twin.update()
            twin.model.blocks[0].requires_grad_(True)
        return losses + twin.steps(9)

    same(Blocks, scenario)


def test_gradients_assigned_by_hand() -> None:
    """From `autograd.grad`, and in the place of one that has landed: what is in `.grad` counts."""

    def scenario(twin: Twin) -> list[float]:
        losses = []
        parameters = list(twin.model.parameters())
        for seed in range(3):
            loss = twin.loss(features(seed))
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad.clone()
            twin.update()
            twin.loss(features(seed)).backward()
            for parameter in parameters[1::3]:
                parameter.grad = torch.full_like(parameter, 0.125)
            twin.update()
            losses.append(loss.item())
        return losses

    same(Blocks, scenario)


def test_gradients_read_and_written_where_torch_has_them() -> None:
    """`gather(grads=True)`: read, scaled in place, replaced, set to None, set where there was none; blocks nest."""

    def scenario(twin: Twin) -> list[Any]:
        seen = []
        inner, (first, second), head = twin.model.inner, twin.model.blocks, twin.model.head
        for seed in range(3):
            second.requires_grad_(False)
            twin.loss(features(seed)).backward()
            second.requires_grad_(True)
            with nullcontext() if twin.manager is None else twin.manager.gather(grads=True):
                with nullcontext() if twin.manager is None else twin.manager.gather(first, grads=True):
                    seen += [p.grad.clone() for p in first.parameters()]
                seen += [p.grad.clone() for p in first.parameters()]
                assert all(p.grad is None for p in second.parameters())
                inner.weight.grad.mul_(0.5)
                inner.bias.grad = inner.bias.grad.square()
                head.weight.grad = None
                second[0].weight.grad = torch.ones_like(second[0].weight)
            seen.append(twin.clip(0.1))
            twin.update()
        return seen

    same_with_room_for_all(scenario)


def same_with_room_for_all(scenario: Any) -> None:
    """Under a cap that holds the weights and gradients of everything at once, and not more."""
    plain = Twin(None, lambda: Blocks(num_blocks=2))
    expected = scenario(plain), plain.left()
    with chunkmem.ChunkManager(config(2 * 9 * 1024)) as manager:
        twin = Twin(manager, lambda: Blocks(num_blocks=2))
        assert_equal((scenario(twin), twin.left()), expected)
        audit(manager)


def test_backward_while_gradients_are_gathered() -> None:
    def scenario(twin: Twin) -> list[Tensor]:
        twin.loss(features(0)).backward()
        with nullcontext() if twin.manager is None else twin.manager.gather(grads=True):
            twin.loss(features(1)).backward()
            seen = [p.grad.clone() for p in twin.model.parameters()]
        twin.loss(features(2)).backward()
        twin.update()
        with nullcontext() if twin.manager is None else twin.manager.gather(grads=True):
            twin.loss(features(3)).backward()
        twin.update()
        return seen

    same_with_room_for_all(scenario)


def test_zero_grad_while_gradients_are_gathered() -> None:
    def scenario(twin: Twin) -> list[float]:
        twin.loss(features(0)).backward()
        with nullcontext() if twin.manager is None else twin.manager.gather(grads=True):
            twin.optimizer.zero_grad()
            assert all(p.grad is None for p in twin.model.parameters())
        return twin.steps(1)

    same_with_room_for_all(scenario)


def test_an_error_inside_gather_keeps_what_was_done_before_it() -> None:
    def scenario(twin: Twin) -> list[float]:
        twin.loss(features(0)).backward()
        with (
            pytest.raises(ZeroDivisionError),
            nullcontext() if twin.manager is None else twin.manager.gather(grads=True),
        ):
            with torch.no_grad():
                twin.model.inner.weight.mul_(2)
            twin.model.inner.weight.grad.mul_(3)
            raise ZeroDivisionError
        twin.update()
        return twin.steps(1)

    same_with_room_for_all(scenario)


def test_gradients_are_kept_when_gather_finds_no_room() -> None:
    plain = Twin(None, Blocks)
    loss = plain.loss(features(0))
    loss.backward()
    plain.update()
    with chunkmem.ChunkManager(config(4 * 1024)) as manager:
        twin = Twin(manager, Blocks)
        twin.loss(features(0)).backward()
        with pytest.raises(chunkmem.CapacityError, match="gather"), manager.gather(grads=True):
            pass
        twin.update()
        assert_equal(twin.left(), plain.left())


@pytest.mark.parametrize("grads", [False, True])
def test_a_step_inside_gather_is_refused(grads: bool) -> None:
    """The copies that the block holds, and their gradients, would be out of date."""
    plain = Twin(None, Blocks)
    expected = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        loss = twin.loss(features(0))
        loss.backward()
        with manager.gather(grads=grads), pytest.raises(chunkmem.StateError, match=r"inside manager\.gather\(\)"):
            twin.optimizer.step()
        twin.update()
        assert [loss.item(), *twin.steps(1)] == expected


def test_tensor_hooks_see_and_change_gradients() -> None:
    """`p.register_hook`, made before or after packing, changes what lands."""

    def build() -> Any:
        model = Blocks()
        model.inner.weight.register_hook(lambda grad: grad * 2)
        return model

    def scenario(twin: Twin) -> list[Any]:
        seen: list[Tensor] = []
        twin.model.head.weight.register_hook(lambda grad: seen.append(grad.clone()))
        twin.model.head.bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return [twin.steps(0, 1, 2), seen]

    same(build, scenario)


def test_model_zero_grad_discards_gradients() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.loss(features(0)).backward()
        twin.model.zero_grad()
        with pytest.raises(chunkmem.StateError, match="no gradient to clip"):
            twin.clip(1e9)
        with pytest.raises(chunkmem.StateError, match="without a gradient"):
            twin.optimizer.step()
