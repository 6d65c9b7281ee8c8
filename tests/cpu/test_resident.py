"""Models that fit have no hooks after a few steps, and have them again before anything else is done.

That their numbers are plain PyTorch's is tested wherever `tests.helpers.twins.same` is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import chunkmem
from chunkmem.data.types import Tier
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, cpu_only, features, mlp

pytestmark = cpu_only
STEPS = 4


def is_resident(twin: Twin) -> bool:
    assert twin.manager is not None
    return twin.manager.runtime.controller.residence.is_on


def evaluate(twin: Twin) -> None:
    with torch.no_grad():
        twin.model(features(9))


def wrap_another(twin: Twin) -> None:
    if twin.manager is not None:
        twin.manager.wrap(mlp())


def average(twin: Any) -> None:
    if twin.manager is not None:
        twin.ema = chunkmem.EMA(twin.manager, 0.9)


def save_meanwhile(twin: Any) -> None:
    if twin.manager is not None:
        twin.saving = twin.manager.save(twin.folder / "saved", twin.optimizer, asynchronous=True)


def compile_a_block(twin: Twin) -> None:
    if twin.manager is not None:
        twin.manager.compile(twin.model.blocks[0], backend="eager")


def freeze_a_weight(twin: Twin) -> None:
    twin.model.inner.weight.requires_grad_(False)
    twin.step(features(8))


def use_hooks_on_saved_tensors(twin: Twin) -> None:
    with save_on_cpu():
        loss = twin.model(features(8)).square().mean()
    loss.backward()
    twin.update()


LEAVES: dict[str, Callable[[Any], None]] = {
    "evaluation": evaluate,
    "another model": wrap_another,
    "averages": average,
    "saving": save_meanwhile,
    "compiled": compile_a_block,
    "frozen": freeze_a_weight,
}


@pytest.mark.parametrize("deed", LEAVES)
def test_hooks_come_back(deed: str, tmp_path: Path) -> None:
    plain: Any = Twin(None, Blocks)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours: Any = Twin(manager, Blocks)
        for twin in (plain, ours):
            twin.folder = tmp_path
            twin.steps(*range(STEPS))
        assert is_resident(ours)
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.python_s is None  # nobody hears of it
        assert type(ours.model.blocks[0][0].weight).__name__ == "Parameter"
        assert not ours.model.blocks[0][0]._forward_hooks
        for twin in (plain, ours):
            LEAVES[deed](twin)
        assert not is_resident(ours)
        assert ours.model.blocks[0][0]._forward_hooks or deed == "compiled"
        assert plain.steps(5, 6, 7) == ours.steps(5, 6, 7)
        audit(manager)
        assert_equal(ours.left(), plain.left())


def by_method(weight: nn.Parameter, is_trained: bool) -> None:
    weight.requires_grad_(is_trained)


def by_attribute(weight: nn.Parameter, is_trained: bool) -> None:
    weight.requires_grad = is_trained


def detached(weight: nn.Parameter, is_trained: bool) -> None:
    weight.requires_grad_() if is_trained else weight.detach_()


def past_the_parameter(weight: nn.Parameter, is_trained: bool) -> None:
    """Nobody hears of it, and nothing need be done: gradients are where autograd leaves them."""
    torch.Tensor.requires_grad_(weight, is_trained)


@pytest.mark.parametrize("change", [by_method, by_attribute, detached, past_the_parameter])
def test_other_weights_are_trained(change: Callable[[nn.Parameter, bool], None]) -> None:
    plain, is_seen = Twin(None, Blocks), change is not past_the_parameter
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours = Twin(manager, Blocks)
        for twin in (plain, ours):
            twin.steps(*range(STEPS))
        assert is_resident(ours)
        for is_trained in (False, True, False):
            for twin in (plain, ours):
                change(twin.model.inner.weight, is_trained)
            assert ours.model.inner.weight.requires_grad is is_trained
            assert plain.steps(5) == ours.steps(5)
            assert manager.runtime.controller.now.key.trainable.count(0) == (is_seen and not is_trained)
            assert plain.steps(*range(STEPS)) == ours.steps(*range(STEPS))
            assert is_resident(ours) or not is_trained
            audit(manager)
        assert_equal(ours.left(), plain.left())


def test_a_graph_from_before_has_its_weights() -> None:
    """Whatever room is made on DEVICE meanwhile: nobody has heard of the call that made it."""
    plain = Twin(None, Blocks)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours = Twin(manager, Blocks)
        left = []
        for twin in (plain, ours):
            twin.steps(*range(STEPS))
            loss = twin.loss(features(5))
            wrap_another(twin)
            if twin is ours:
                assert not is_resident(ours)
                pager = manager.runtime.memory.pager
                for chunk in manager.runtime.memory.store.chunks.values():
                    pager.shrink(Tier.DEVICE, chunk.nbytes)
            loss.backward()
            del loss
            twin.update()
            left.append(twin.left())
        assert_equal(*left)


def test_they_go_again_once_a_checkpoint_is_written(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin: Any = Twin(manager, Blocks)
        twin.steps(*range(STEPS))
        manager.save(tmp_path / "saved", twin.optimizer, asynchronous=True).wait()
        assert not is_resident(twin)
        twin.steps(5, 6)
        assert is_resident(twin)


def test_hooks_on_saved_tensors_get_no_weights() -> None:
    """They have been seen, and may come inside of the model, where nobody would hear of it."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        for _ in range(STEPS):
            use_hooks_on_saved_tensors(twin)
        assert not is_resident(twin)


def test_where_gradients_have_no_room_twice_there_are_hooks() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(STEPS))
        needed_nbytes = sum(chunk.nbytes for chunk in manager.runtime.memory.store.chunks.values())
        assert is_resident(twin)
    with chunkmem.ChunkManager(config(needed_nbytes + 4)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(STEPS))
        assert not is_resident(twin)


def test_hooks_keep_their_order() -> None:
    """Also with those that a user has registered in between."""
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        block: nn.Module = twin.model.blocks[0]
        block.register_forward_hook(note("first"))
        before = list(block._forward_hooks)
        twin.steps(*range(STEPS))
        assert is_resident(twin)
        assert list(block._forward_hooks) == before[-1:]
        block.register_forward_hook(note("second"))
        evaluate(twin)
        assert list(block._forward_hooks)[: len(before)] == before
        assert order[-2:] == ["first", "second"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_past_version_counters_are_noticed(precision: str) -> None:
    """In bf16 they have to reach the master weights."""

    def trained(*, stays: bool) -> dict[str, Tensor]:
        with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision)) as manager:
            if not stays:
                manager.runtime.memory.pager.events.has_inner_hooks.append(lambda: True)
            twin = Twin(manager, Blocks)
            for step in range(8):
                twin.step(features(step))
                if step > STEPS:
                    assert is_resident(twin) == stays
                    twin.model.head.weight.data.clamp_(-0.05, 0.05)
                    twin.model.inner.weight.data = twin.model.inner.weight.data * 0.9
            return twin.weights()

    assert_equal(trained(stays=True), trained(stays=False))


def test_parameters_of_a_chunk_share_a_class() -> None:
    """Python remembers where attributes of a few thousand classes are, and `.grad` of each parameter is looked up."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(STEPS))
        assert is_resident(twin)
        classes: dict[int, set[type]] = {}
        for managed in manager.runtime.registry.parameters:
            classes.setdefault(managed.group, set()).add(type(managed.param))
        assert {len(found) for found in classes.values()} == {1}


IRREGULAR_STEPS = 20
"""After which hooks are gone although no step is like another."""
ROOMY = {"default_chunk_size": 1 << 13}


class Experts(nn.Module):
    """A step uses two experts, other ones each time; all are in one chunk, of `ROOMY`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(8))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for place in (self.num_calls, 3 * self.num_calls + 1):
            x = x + self.experts[place % len(self.experts)](x)
        return x


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:9]}, {"params": params[9:], "lr": 3e-2}]


def nothing(twin: Twin) -> None:
    """The other experts are enough."""


def move_to_another_group(twin: Twin) -> None:
    """In the order of all parameters, none has another place."""
    first, second = (group["params"] for group in twin.optimizer.param_groups)
    second.insert(0, first.pop())


def leave_one_out(twin: Twin) -> None:
    twin.optimizer.state.pop(twin.optimizer.param_groups[1]["params"].pop(2), None)


def exchange_two(twin: Twin) -> None:
    first, second = (group["params"] for group in twin.optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def write_in_place(twin: Twin) -> None:
    with torch.no_grad():
        for param in twin.model.parameters():
            param.mul_(0.9)


def assign_data(twin: Twin) -> None:
    """And nothing else, so that nobody has got hold of memory."""
    for param in twin.model.parameters():
        param.data = torch.full(param.shape, 0.1, dtype=param.dtype)


def forget_a_state(twin: Twin) -> None:
    """The next update begins with zeros."""
    for param in list(twin.model.parameters())[::3]:
        twin.optimizer.state.pop(param, None)


BETWEEN = (nothing, move_to_another_group, leave_one_out, exchange_two, write_in_place, assign_data, forget_a_state)


@pytest.mark.few(7)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("deed", BETWEEN)
def test_what_is_done_between_steps_is_noticed(deed: Callable[[Twin], None], precision: str) -> None:
    def left(manager: chunkmem.ChunkManager | None, *, stays: bool) -> dict[str, Any]:
        if manager is not None and not stays:
            manager.runtime.memory.pager.events.has_inner_hooks.append(lambda: True)
        twin = Twin(manager, Experts, params=two_groups)
        twin.steps(*range(IRREGULAR_STEPS))
        deed(twin)
        twin.steps(*range(8))
        assert manager is None or is_resident(twin) == stays
        return twin.left()

    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision, **ROOMY)) as manager:
        ours = left(manager, stays=True)
    if precision == "fp32":
        assert_equal(ours, left(None, stays=False))
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision, **ROOMY)) as manager:
        assert_equal(ours, left(manager, stays=False))


def test_what_stands_in_for_a_weight_is_noticed() -> None:
    """Also when another module has been deleted."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **ROOMY)) as manager:
        twin = Twin(manager, Experts)
        twin.steps(*range(IRREGULAR_STEPS))
        own = twin.model.experts[1][0]._parameters
        for _ in range(2):
            weight = dict.__getitem__(own, "weight")
            dict.__setitem__(own, "weight", weight.detach())
            twin.loss(features(1)).backward()
            with pytest.raises(chunkmem.StateError, match=r"parameter experts\.1\.0\.weight was replaced by a tensor"):
                twin.optimizer.step()
            dict.__setitem__(own, "weight", weight)
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            twin.steps(*range(4))
            twin.model.experts[7] = nn.Identity()
        assert is_resident(twin)


def test_what_stands_in_for_a_weight_of_a_compiled_block_is_noticed() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(STEPS))
        compile_a_block(twin)
        own = twin.model.blocks[0][0]._parameters
        own["weight"] = own["weight"].detach()
        twin.loss(features(1)).backward()
        with pytest.raises(chunkmem.StateError, match=r"parameter blocks\.0\.0\.weight was replaced by a tensor"):
            twin.optimizer.step()
