"""Blocks are heard of as a whole where a plan is followed and there is room, and module by module everywhere else.

That their numbers are plain PyTorch's is tested wherever `tests.helpers.twins.same` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import chunkmem
from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Mode, Trace
from chunkmem.data.types import Role
from chunkmem.runtime.pager import Pager
from chunkmem.steps.cached_plan import CachedPlan
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.twins import WIDTH, Twin, assert_equal, config, cpu_only, features, resident_at_once

pytestmark = cpu_only
NUMEL = 4 * WIDTH * (WIDTH + 1) + 2 * WIDTH
"""Of a block; a chunk has one."""
SLAB = 4 * NUMEL
NUM_BLOCKS = 14


class Block(nn.Module):
    """Five small modules with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.skips = False
        """Only two of them are used."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.skips:
            return x + self.out(y)
        return x + self.out(torch.tanh(self.q(y)) * torch.sigmoid(self.k(y)) + self.v(y))


class Net(nn.Module):
    """Blocks, and a weight of its own."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.directly = False
        """Another module calls what is in the blocks."""
        self.num_used = num_blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.num_used]:
            x = x + block.out(F.gelu(block.q(block.norm(x)))) if self.directly else block(x)
        return x


def cap(num_chunks: float) -> chunkmem.Config:
    return config(int(num_chunks * SLAB), default_chunk_size=NUMEL)


def is_by_block(twin: Twin) -> bool:
    assert twin.manager is not None
    return twin.manager.runtime.controller._blocks.is_on


def num_hooks(module: nn.Module) -> int:
    return sum(len(below._forward_hooks) for below in module.modules())


@contextmanager
def both(num_chunks: float = 20, *, steps: int = 4, build: Callable[[], nn.Module] = Net) -> Iterator[tuple[Any, Any]]:
    """The same in plain PyTorch and by block, after a few steps; then what is left is compared."""
    plain: Any = Twin(None, build)
    with chunkmem.ChunkManager(cap(num_chunks)) as manager:
        ours: Any = Twin(manager, build)
        for twin in (plain, ours):
            twin.steps(*range(steps))
        yield plain, ours
        assert_equal(ours.left(), plain.left())


def test_blocks_are_heard_of_as_a_whole_where_there_is_room() -> None:
    with both() as (plain, ours):
        assert is_by_block(ours)
        block = ours.model.blocks[0]
        assert num_hooks(block) == len(block._forward_hooks) == 1
        assert ours.manager.trace.by_block
        held = [moment.label for moment in ours.manager.trace.moments if moment.kind.value == "hold"]
        assert held == [
            *(f"blocks.{at} forward" for at in range(NUM_BLOCKS)),
            *(f"blocks.{at} backward" for at in reversed(range(NUM_BLOCKS))),
        ]
        assert_as_predicted(ours.manager)
        for twin in (plain, ours):
            twin.steps(4, 5)
        assert_as_predicted(ours.manager)


@pytest.mark.parametrize(
    ("num_chunks", "num_blocks", "why"),
    [(3, NUM_BLOCKS, "memory is short"), (20, 6, "there are few modules"), (100, NUM_BLOCKS, "all of it stays")],
)
def test_others_are_heard_of_module_by_module(num_chunks: int, num_blocks: int, why: str) -> None:
    with both(num_chunks, build=lambda: Net(num_blocks)) as (_, ours):
        assert not is_by_block(ours), why
        assert ours.manager.plan is not None


def test_the_smallest_cap_is_that_of_modules() -> None:
    with chunkmem.ChunkManager(cap(100)) as manager:
        twin = Twin(manager, Net)
        twin.steps(0, 1)
        required_nbytes = manager.memory().device.required_nbytes
    with chunkmem.ChunkManager(config(required_nbytes, default_chunk_size=NUMEL)) as manager:
        twin = Twin(manager, Net)
        twin.steps(*range(5))
        assert_as_predicted(manager)


def test_the_smallest_cap_that_is_told_is_that_of_modules() -> None:
    """Here the weights of a block are in two chunks, and those of a module in one."""
    with chunkmem.ChunkManager(config(13 * NUM_BLOCKS * NUMEL, default_chunk_size=NUMEL + 2 * WIDTH)) as manager:
        twin = Twin(manager, Net)
        twin.steps(*range(5))
        assert is_by_block(twin)
        device = manager.memory().device
        assert device.required_nbytes == 2 * 4 * (NUMEL + 2 * WIDTH)


def noting(access: Callable[..., Any], groups: list[int]) -> Callable[..., Any]:
    def noted(pager: Pager, chunk: Any, *args: Any, **kwargs: Any) -> Any:
        if chunk.id.role is Role.GRAD:
            groups.append(chunk.id.group)
        return access(pager, chunk, *args, **kwargs)

    return noted


def test_gradients_of_a_block_land_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with both() as (plain, ours):
        landed: list[int] = []
        for name in ("use", "create"):
            monkeypatch.setattr(Pager, name, noting(getattr(Pager, name), landed))
        losses = [twin.loss(features(7)) for twin in (plain, ours)]
        losses[1].backward()
        assert landed == list(reversed(range(NUM_BLOCKS)))
        losses[0].backward()
        for twin in (plain, ours):
            twin.update()


def test_modules_that_others_call_are_heard_of_again() -> None:
    """At first they serve themselves, which is slower; from the next step on they have hooks."""
    with both() as (plain, ours):
        for twin in (plain, ours):
            twin.model.directly = True
            twin.steps(4, 5, 6, 7, 8)
        assert not is_by_block(ours)
        assert num_hooks(ours.model.blocks[0]) == 6
        assert_as_predicted(ours.manager)


def test_evaluations_that_call_modules_of_blocks_are_another_kind() -> None:
    """They are heard of module by module, and training goes on by block."""
    with both() as (plain, ours):

        def evaluate_both(*, directly: bool) -> None:
            for twin in (plain, ours):
                twin.model.directly = directly
                with torch.no_grad():
                    twin.model(features(3))
                twin.model.directly = False
                twin.steps(4)

        for directly in (False, False, False, True, True):
            evaluate_both(directly=directly)
        by_block = {
            mode: set(kinds.by_block.values()) for mode, kinds in ours.manager.runtime.controller.known.kinds.items()
        }
        assert by_block == {Mode.TRAIN: {True}, Mode.EVAL: {False}}


def test_a_plan_by_block_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the step after the recorded one is recorded again, module by module."""
    make = CachedPlan._make_planner

    def short(self: CachedPlan, trace: Trace) -> Any:
        if trace.by_block:
            raise CapacityError("by block", needed_nbytes=2, cap_nbytes=1)
        return make(self, trace)

    monkeypatch.setattr(CachedPlan, "_make_planner", short)
    with both(steps=5) as (_, ours):
        assert not is_by_block(ours)
        assert_as_predicted(ours.manager)


def test_modules_that_others_have_called_are_in_no_block() -> None:
    with both(steps=0) as (plain, ours):
        for twin in (plain, ours):
            twin.model.directly = True
            twin.steps(0, 1)
            assert not is_by_block(ours)
            twin.steps(2, 3)
        assert not is_by_block(ours)
        assert not ours.manager.runtime.controller.known.kinds[ours.manager.trace.mode].by_block


def test_gradients_of_one_block_wait_at_a_time() -> None:
    """Also where some weights of each block get none, so that the rest waits in vain."""
    with both() as (plain, ours):
        waiting = []

        def look(*_: object) -> None:
            grads = {name: weight.grad for name, weight in ours.model.named_parameters()}
            waiting.append({name.split(".")[1] for name, grad in grads.items() if type(grad) is Tensor})

        for twin in (plain, ours):
            for block in twin.model.blocks:
                block.skips = True
        for block in ours.model.blocks:
            block.norm.register_full_backward_hook(look)
        for twin in (plain, ours):
            twin.steps(4, 5, 6)
        assert is_by_block(ours)
        assert {len(blocks) for blocks in waiting} == {1}


@pytest.mark.parametrize("takes_step", [True, False])
def test_gradients_do_not_wait_for_those_of_another_backward(takes_step: bool) -> None:
    """What had been left waiting counted for the next backward of the block: its chunk could leave DEVICE too early."""
    with both() as (plain, ours):
        for skips in (True, False):
            for twin in (plain, ours):
                twin.model.num_used, twin.model.blocks[0].skips = 1, skips
                twin.loss(features(4)).backward()
                if takes_step:
                    twin.update()
                    twin.loss(features(5)).backward()
        assert is_by_block(ours)
        block = ours.model.blocks[0]
        assert {type(weight.grad) for weight in block.parameters()} == {type(block.norm.weight.grad)} != {Tensor}
        for twin in (plain, ours):
            twin.update()


def test_a_step_whose_access_failed_is_repeated_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    with both() as (plain, ours):
        hold = Pager._hold

        def short(self: Pager, chunk: Any, *args: Any) -> Any:
            if chunk.id.group == 5:
                raise CapacityError("too little room", needed_nbytes=1, cap_nbytes=0)
            return hold(self, chunk, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Pager, "_hold", short)
            with pytest.raises(CapacityError, match="too little room"):
                ours.step(features(4))
        ours.optimizer.zero_grad()
        for twin in (plain, ours):
            twin.steps(4, 5, 6)
        assert not is_by_block(ours)
        assert_as_predicted(ours.manager)


class _Stop(Exception):
    pass


@pytest.mark.few(1)
@pytest.mark.parametrize("module", ["norm", "k"])
def test_backward_that_stops_inside_of_a_block(module: str) -> None:
    """What has come waits in `.grad`; the step can be repeated, or taken with what there is, as in plain PyTorch."""

    def stop(*_: object) -> None:
        raise _Stop

    with both() as (plain, ours):
        for twin in (plain, ours):
            handle = getattr(twin.model.blocks[6], module).register_full_backward_pre_hook(stop)
            with pytest.raises(_Stop):
                twin.loss(features(5)).backward()
            handle.remove()
            twin.update()  # with the gradients of half of the blocks
            with pytest.raises(_Stop):
                handle = getattr(twin.model.blocks[3], module).register_full_backward_pre_hook(stop)
                twin.loss(features(6)).backward()
            handle.remove()
            twin.optimizer.zero_grad()
            twin.steps(7, 8)
        audit(ours.manager)


def freeze_a_weight(twin: Any) -> None:
    twin.model.blocks[2].k.weight.requires_grad_(False)


def add_a_module(twin: Any) -> None:
    """It is not managed; and other blocks are to be found, as other weights are trained."""
    twin.model.blocks[3].extra = nn.Identity()
    twin.model.blocks[2].k.bias.requires_grad_(False)
    twin.steps(15, 16, 17)
    twin.model.blocks[2].k.bias.requires_grad_(True)


def compile_a_block(twin: Any) -> None:
    if twin.manager is not None:
        twin.manager.compile(twin.model.blocks[0], backend="eager")


def wrap_another(twin: Any) -> None:
    if twin.manager is not None:
        twin.manager.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


def evaluate(twin: Any) -> None:
    with torch.no_grad():
        twin.model(features(9))
        twin.model.blocks[3].q(features(9))


def penalise(twin: Any) -> None:
    """With a loss of the weights themselves, outside of modules."""
    loss = twin.loss(features(8)) + sum(weight.square().sum() for weight in twin.model.parameters())
    loss.backward()
    twin.update()


def accumulate(twin: Any) -> None:
    for seed in (10, 11, 12):
        twin.loss(features(seed)).backward()
    twin.clip(0.1)
    twin.update()


def keep_a_graph(twin: Any) -> None:
    loss = twin.loss(features(8))
    loss.backward(retain_graph=True)
    loss.backward()
    twin.update()


def read_in_hooks(twin: Any) -> None:
    """A user's hook inside of a block reads weights of the block, and of another one."""
    weights = twin.model.blocks[4].k.weight, twin.model.blocks[5].k.weight
    handle = twin.model.blocks[4].q.register_forward_hook(lambda _m, _a, out: out + sum(w.sum() for w in weights))
    twin.steps(13, 14)
    handle.remove()


def write_to_gradients(twin: Any) -> None:
    """Kept by a user's hook, and written to before the step."""
    kept: list[Tensor] = []
    weights = twin.model.blocks[2].q.weight, twin.model.blocks[6].out.bias
    handles = [weight.register_post_accumulate_grad_hook(lambda w: kept.append(w.grad)) for weight in weights]
    twin.loss(features(8)).backward()
    for grad in kept:
        grad.mul_(3)
    kept.clear()
    twin.update()
    for handle in handles:
        handle.remove()


def tie(twin: Any) -> None:
    """Nothing but a user's own function calls a module of a block twice."""
    block = twin.model.blocks[4]
    out = block.q(block(features(3)) + block(features(2)))
    out.square().mean().backward()
    twin.update()


def take_gradients_by_example(twin: Any) -> None:
    """torch.func has the weights that are computed with; the block has to read none of its own."""
    weights = {name: weight.detach() for name, weight in twin.model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(twin.model, weights, (x.unsqueeze(0),)).square().mean()

    grads = vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, features(3))
    twin.seen = [each.norm().item() for each in grads.values()]
    assert len(set(twin.seen)) > NUM_BLOCKS


DEEDS = (
    accumulate, add_a_module, compile_a_block, evaluate, freeze_a_weight, keep_a_graph, penalise, read_in_hooks,
    take_gradients_by_example, tie, wrap_another, write_to_gradients,
)  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_what_users_do_beside(deed: Callable[[Any], None]) -> None:
    with both() as (plain, ours):
        assert is_by_block(ours)
        for twin in (plain, ours):
            deed(twin)
            twin.steps(4, 5)
            deed(twin)
            twin.steps(6, 7, 8)


def test_blocks_are_of_what_is_trained() -> None:
    with both() as (plain, ours):
        for twin in (plain, ours):
            freeze_a_weight(twin)
            twin.steps(4, 5, 6)
        assert [num_hooks(block) for block in ours.model.blocks] == [1, 1, 6, *[1] * (NUM_BLOCKS - 3)]
        for twin in (plain, ours):
            twin.model.requires_grad_(True)
            twin.steps(7, 8, 9)
        assert [num_hooks(block) for block in ours.model.blocks] == [1] * NUM_BLOCKS


def test_freezing_blocks() -> None:
    """Which parameters are trained decides which blocks are heard of as a whole; unfreezing comes back to all."""
    plain: Any = Twin(None, Net)
    with chunkmem.ChunkManager(cap(20)) as manager:
        ours: Any = Twin(manager, Net)
        for twin in (plain, ours):
            twin.steps(*range(4))
            blocks = twin.model.blocks[:4]
            blocks.requires_grad_(False) if twin is plain else manager.freeze(blocks)
            twin.steps(*range(4))
            assert_equal(twin.weights(), plain.weights())
        assert_as_predicted(manager)


def test_from_blocks_to_residence_and_back() -> None:
    """Nothing is heard of steps that fit, and then blocks are heard of again."""
    with resident_at_once(), both() as (plain, ours):
        controller = ours.manager.runtime.controller
        controller.residence.enter(controller.known.training)
        controller.residence.leave()
        assert is_by_block(ours)
        assert num_hooks(ours.model.blocks[0]) == 1
        for twin in (plain, ours):
            twin.steps(4, 5)
        assert_as_predicted(ours.manager)


def test_a_saved_trace_is_followed_by_block(tmp_path: Path) -> None:
    with both() as (_, ours):
        ours.manager.trace.save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    assert trace.by_block
    plain = Twin(None, Net)
    with chunkmem.ChunkManager(cap(20)) as manager:
        again = Twin(manager, Net)
        manager.trace = trace
        for twin in (plain, again):
            twin.steps(0, 1, 2)
        assert is_by_block(again)
        assert_as_predicted(manager)
        assert_equal(again.left(), plain.left())


def test_the_trace_is_there_while_another_step_is_recorded() -> None:
    with chunkmem.ChunkManager(cap(20)) as manager:
        twin = Twin(manager, Net)
        twin.steps(0, 1)
        assert manager.trace is not None
        assert not manager.trace.by_block
        twin.steps(2)
        assert manager.trace.by_block
