"""A rule whose states have other dtypes and other sizes than the weights, on its way through chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.layout import Group, MasterCopy, Slot
from chunkmem.data.types import Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.codes import SIGNED
from chunkmem.optim.entries import EntryForm, TensorForm
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.rule import SlotUpdate, StateSpec, UpdateRule
from chunkmem.optim.shaped_state import ShapedState, SlotForm
from chunkmem.plan.model import Lane
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, cpu_only, features

SUM, LAST = Role("norm_sum"), Role("last_grad")
ONE_NUMBER = TensorForm((1,), (1,), torch.float64)
LR = 1e-2


def update(weight: Tensor, grad: Tensor, norm_sum: Tensor, last_grad: Tensor) -> None:
    """Divide the rate by all norms so far, and go on in the direction of the last gradient, which is kept in bf16."""
    norm_sum.add_(grad.double().square().sum().sqrt())
    weight.add_(grad + 0.5 * last_grad.float(), alpha=-LR / (1.0 + float(norm_sum)))
    last_grad.copy_(grad)


class SumRule(UpdateRule[float]):
    name = "Sum"
    options = ("lr",)
    all_states = (StateSpec(LAST, torch.bfloat16),)

    def check(self, group: Mapping[str, Any]) -> None:
        pass

    def hyper(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"])

    def form(self, hyper: float, weights: TensorForm, *, name: str) -> EntryForm:
        last = super().form(hyper, weights, name=name)
        keys = ("step", SUM.value, LAST.value)
        return replace(last, keys=keys, first_keys=keys, tensors={SUM.value: ONE_NUMBER, **last.tensors})

    def specs(self, hyper: float, weights: TensorForm, managed: ManagedParameter) -> tuple[StateSpec, ...]:
        slot = SlotForm(managed.position, ONE_NUMBER.shape, ONE_NUMBER.stride)
        norm_sum = ShapedState(SUM, ONE_NUMBER.dtype, key=SUM.value, forms=(slot,))
        return (norm_sum, *super().specs(hyper, weights, managed))

    def to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state)

    def update_(self, slots: SlotUpdate) -> None:
        for own in zip(slots.weights, slots.scaled_grads(), slots.states[SUM], slots.states[LAST], strict=True):
            update(*own)


class ChunkedSum(RuleOptimizer):
    def __init__(self, params: Any, *, manager: chunkmem.ChunkManager) -> None:
        super().__init__(params, {"lr": LR}, rule=SumRule(), host=manager.runtime, max_grad_norm=None)


class PlainSum(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state[SUM.value] = torch.zeros(1, dtype=torch.float64)
                state[LAST.value] = torch.zeros_like(param, dtype=torch.bfloat16)
            state["step"] += 1
            update(param, param.grad, state[SUM.value], state[LAST.value])


class SumTwin(Twin):
    def make(self, kind: str, params: Any, **options: Any) -> Any:
        return PlainSum(params) if self.manager is None else ChunkedSum(params, manager=self.manager)


@cpu_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device_nbytes", [6 << 10, AMPLE_NBYTES])
def test_it_has_the_bits_of_a_plain_loop(device_nbytes: int, *, overlap: bool) -> None:
    keys = {"client": {"opts": {"overlap_optimizer": overlap}}, "optimizer": {"params": {"use_hybrid_adam": False}}}
    plain = SumTwin(None, Blocks)
    with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
        twin = SumTwin(manager, Blocks)
        for seed in range(8):
            assert twin.step(features(seed)) == plain.step(features(seed))
        timeline = manager.timeline()
        assert timeline is not None
        assert (manager.plan is not None, timeline.plan_misses) == (True, 0)
        assert any(span.lane is Lane.HOST_UPDATE for span in timeline.spans) is overlap
        assert_equal(twin.left(), plain.left())


def test_its_states_are_saved_and_loaded() -> None:
    plain = SumTwin(None, Blocks)
    losses = plain.steps(0, 1)
    weights, state = plain.weights(), copied(plain.optimizer.state_dict())
    losses = plain.steps(2, 3)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = SumTwin(manager, Blocks)
        manager.load_state_dict(weights, twin.model)
        twin.optimizer.load_state_dict(state)
        assert twin.steps(2, 3) == losses
        assert_equal(twin.left(), plain.left())
        wrong = copied(state)
        wrong["state"][0][SUM.value] = torch.zeros(2)
        with pytest.raises(chunkmem.CheckpointError, match=r"norm_sum is \(2,\) instead of \(1,\)"):
            twin.optimizer.load_state_dict(wrong)


def test_room_that_its_states_do_not_have_is_refused_with_their_bytes() -> None:
    """Weights, gradients and a gradient in bf16 fit; those of Adam would not."""
    memory = {"device": 44 << 10, "host": 4 << 10}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 1024})) as manager:
        model = manager.wrap(nn.Sequential(*(nn.Linear(31, 32) for _ in range(4))))
        with pytest.raises(chunkmem.CapacityError, match="optimizer: weights, gradients and states"):
            chunkmem.AdamW(model.parameters(), manager=manager)
        ChunkedSum(model.parameters(), manager=manager)


def test_the_form_of_a_state() -> None:
    """Slots of other sizes begin on lines of their own; master weights decide the dtype of states that say none."""
    slots = (Slot(0, 3, 0, 100), Slot(1, 3, 128, 7))
    weights = Group(3, "bfloat16", 2, 1, 256, slots, MasterCopy.PACKED)
    assert StateSpec(Role("same")).form(weights) == Group(3, "float32", 4, 1, 256, slots, MasterCopy.PACKED)
    scales = ShapedState(Role("scales"), torch.float16, forms=(SlotForm(0, (2,), (1,)), SlotForm(1, (1,), (1,))))
    shaped = scales.form(weights)
    assert (shaped.dtype, shaped.itemsize, shaped.numel) == ("float16", 2, 64)
    assert [(slot.offset, slot.numel) for slot in shaped.slots] == [(0, 2), (32, 1)]
    coded = StateSpec(Role("coded"), torch.uint8, SIGNED).form(weights)
    assert (coded.dtype, coded.itemsize, coded.numel) == ("uint8", 1, 192)
    assert [(slot.offset, slot.numel) for slot in coded.slots] == [(0, 104), (128, 12)]
