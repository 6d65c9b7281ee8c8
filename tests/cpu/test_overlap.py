"""Updates overlapped with backward: the bits of those that wait for the step, whatever happens in between."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.optim import pending
from chunkmem.optim.device_order import DevicePowers
from chunkmem.optim.kernels import Kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.ops import global_norm
from chunkmem.plan.ahead import SHADOW
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import MakeLanes, lanes_by_name_fixture  # noqa: F401
from tests.helpers.overlapped import Run, assert_alike
from tests.helpers.training import compute_device
from tests.helpers.twins import without_accelerator

PRECISIONS = ("fp32", "bf16", "fp16")
LEARNED = 4
"""Steps until plans are followed and states exist."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: what runs beside it takes turns with it on few cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(**keys: Any) -> tuple[Run, Run]:
    waiting = {key: value for key, value in keys.items() if key not in ("threads", "make_lanes", "undo_log_ratio")}
    return Run(overlap=True, **keys), Run(overlap=False, **waiting)


def train(runs: tuple[Run, Run], steps: range, factor: Callable[[int], float] = lambda seed: 1.0) -> tuple[int, int]:
    """Return how many updates went ahead, and how many steps were clipped or skipped."""
    ahead = 0
    wrong = runs[0].num_wrong
    for seed in steps:
        losses = [run.step(seed, factor=factor(seed)) for run in runs]
        assert losses[0] == losses[1] or all(map(math.isnan, losses))
        ahead += runs[0].num_ahead
        assert runs[1].num_ahead == 0
    assert_alike(*runs)
    return ahead, runs[0].num_wrong - wrong


def spiky(seed: int) -> float:
    """A loss whose gradients are clipped in every fourth step, and overflow in some."""
    draw = random.Random(seed).random()
    return 1e30 if draw < 0.03 else 30.0 if draw < 0.28 else 0.1


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_is_that_of_a_run_which_waits(precision: str) -> None:
    runs = pair(precision=precision)
    ahead, wrong = train(runs, range(8))
    assert wrong == 0
    assert ahead >= 5 * (8 - LEARNED), "most groups are updated overlapped with backward"
    audit(runs[0].manager)
    assert_as_predicted(runs[0].manager)
    assert_as_predicted(runs[1].manager)


@pytest.mark.parametrize(
    "precision", ["fp16", *(pytest.param(name, marks=pytest.mark.full) for name in ("fp32", "bf16"))]
)
def test_clipped_steps_and_overflows_are_redone_to_the_bit(precision: str) -> None:
    factor = spiky if precision == "fp16" else (lambda seed: min(spiky(seed), 30.0))
    runs = pair(precision=precision, max_norm=2.0)
    ahead, wrong = train(runs, range(60), factor)
    assert wrong >= 12, "a fifth of the steps is clipped"
    assert ahead >= 200
    if precision == "fp16":
        assert runs[0].manager.num_skipped_steps == runs[1].manager.num_skipped_steps >= 1
    audit(runs[0].manager)


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("device_nbytes", "chunk_numel"), [(72 << 10, 5000), (200 << 10, 5000), (72 << 10, 8000)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_thousand_steps(precision: str, device_nbytes: int, chunk_numel: int, threads: int) -> None:
    """At least a fifth of the steps is clipped, one in a hundred overflows."""
    factor = spiky if precision == "fp16" else (lambda seed: min(spiky(seed), 30.0))
    runs = pair(
        precision=precision, max_norm=2.0, device_nbytes=device_nbytes, chunk_numel=chunk_numel, threads=threads
    )
    ahead, wrong = train(runs, range(1000), factor)
    assert wrong >= 200
    assert ahead >= 3000
    if precision == "fp16":
        assert runs[0].manager.num_skipped_steps >= 10


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 3 else [pytest.mark.full]) for s in range(50)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_order_of_copies_and_updates_shows(
    precision: str, seed: int, lanes_by_name: Callable[..., MakeLanes]
) -> None:
    runs = pair(precision=precision, max_norm=2.0, make_lanes=lanes_by_name("adversarial", seed))
    for tier in (Tier.DEVICE, Tier.HOST):
        runs[0].manager.runtime.memory.store.pools[tier].poison = True
    factor = spiky if precision == "fp16" else (lambda s: min(spiky(s), 30.0))
    ahead, _ = train(runs, range(16), factor)
    assert ahead > 20
    audit(runs[0].manager)


@pytest.mark.few(1)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_show(threads: int) -> None:
    train(pair(max_norm=2.0, threads=threads), range(10), lambda seed: 30.0 if seed % 4 == 3 else 0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameter_groups_that_decay_in_different_ways(precision: str) -> None:
    """Of those in one chunk, all were updated with the way of the first."""
    runs = pair(precision=precision)
    for run in runs:
        run.optimizer.param_groups[1].update(decoupled_weight_decay=False, weight_decay=0.1)
    ahead, wrong = train(runs, range(7))
    assert (ahead > 0, wrong) == (True, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_torch_has_other_bits_master_weights_are_updated_by_our_kernels_all_the_same(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch was compiled without vector instructions. Of fp32 weights, torch's bits are promised."""
    ordinary = Run(overlap=False, precision=precision)
    for seed in range(5):
        ordinary.step(seed)
    monkeypatch.setattr(Kernels, "torch_tail_width", lambda self: None)
    run = Run(overlap=True, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(5):
            run.step(seed)
    said = [str(warning.message) for warning in caught if "other bits than chunkmem's" in str(warning.message)]
    assert len(said) == 1
    assert (run.num_ahead > 0) is (precision == "bf16")
    assert_alike(run, ordinary)


@pytest.mark.few(1)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates_on_host_are_in_the_order_of_the_device(
    precision: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card; see ADR 66 for what of fp32 has the order of a CPU there, as master weights have."""
    waits = Run(overlap=False, precision=precision)
    monkeypatch.setattr(NativeUpdate, "powers_for", lambda self, device: DevicePowers(device))
    runs = pair(precision=precision)
    for run in (waits, *runs):
        run.optimizer.param_groups[0].update(decoupled_weight_decay=decoupled)
        run.optimizer.param_groups[1].update(decoupled_weight_decay=decoupled, weight_decay=0.2)
    ahead, wrong = train(runs, range(8))
    assert (ahead > 0, wrong) == (True, 0)
    monkeypatch.undo()
    for seed in range(8):
        waits.step(seed)
    if precision == "fp32" and decoupled:
        with pytest.raises(AssertionError):
            assert_alike(runs[0], waits)
    else:
        assert_alike(runs[0], waits)


def test_a_small_log_leaves_the_rest_to_the_step() -> None:
    group_nbytes = 3 * 5000 * 4
    runs = pair(max_norm=2.0, undo_log_ratio=2.5 * group_nbytes / (4 << 20))
    train(runs, range(8), lambda seed: 0.1)
    assert runs[0].num_ahead == 2
    report = runs[0].manager.memory().host
    assert 0 < report.by_role[SHADOW][0] <= 2.5 * group_nbytes
    assert_as_predicted(runs[0].manager)


def no_change(run: Run) -> None:
    """What an undisturbed step is."""


def change_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 1e-2


def change_betas(run: Run) -> None:
    run.optimizer.param_groups[1]["betas"] = (0.8, 0.95)


def change_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.0


def change_eps(run: Run) -> None:
    run.optimizer.param_groups[1]["eps"] = 1e-3


def change_max_norm(run: Run) -> None:
    run.optimizer.max_grad_norm = 1e-3


def clip(run: Run) -> None:
    run.optimizer.clip_grad_norm_(1e-3)


def clip_to_more(run: Run) -> None:
    run.optimizer.clip_grad_norm_(1e6)


def zero(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def discard(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(77)


def second_backward(run: Run) -> None:
    run.backward(78)


def read_weights(run: Run) -> None:
    run.manager.state_dict()


def evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.ones(2, 32, device=compute_device()))


def write_weights(run: Run) -> None:
    with run.manager.gather(run.model[3]), torch.no_grad():
        run.model[3].up.weight[1] = 0.25


def write_gradients(run: Run) -> None:
    with run.manager.gather(run.model[3].up.weight, grads=True):
        assert run.model[3].up.weight.grad is not None
        run.model[3].up.weight.grad.mul_(2)


def assign_gradient(run: Run) -> None:
    weight = run.model[2].down.weight
    weight.grad = torch.ones_like(weight)


def load_weights(run: Run) -> None:
    run.manager.load_state_dict({key: value + 0.125 for key, value in run.manager.state_dict().items()})


def load_states(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].mul_(2)
    run.optimizer.load_state_dict(state)


BETWEEN = (
    no_change, change_lr, change_betas, change_decay, change_eps, change_max_norm, clip, clip_to_more, zero, discard,
    second_backward, read_weights, evaluate, write_weights, write_gradients, assign_gradient, load_weights, load_states,
)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_what_happens_between_backward_and_step_counts(precision: str, between: Callable[[Run], None]) -> None:
    runs = pair(precision=precision)
    train(runs, range(LEARNED))
    for run in runs:
        run.backward(50)
        between(run)
        run.optimizer.step()
    assert_alike(*runs)
    for run in runs:
        run.optimizer.zero_grad()
    train(runs, range(51, 56))
    audit(runs[0].manager)


def test_until_the_step_everyone_sees_the_old_values() -> None:
    run = Run(overlap=True)
    for seed in range(LEARNED):
        run.step(seed)
    before = run.everything()
    run.backward(9)
    after = run.everything()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    for index, block in enumerate(run.model):
        with run.manager.gather(block):
            now = {f"{index}.{key}": value.detach().to("cpu", copy=True) for key, value in block.named_parameters()}
        assert all(torch.equal(value, before[key]) for key, value in now.items())
    run.optimizer.step()
    changed = run.everything()
    assert not any(torch.equal(value, before[key]) for key, value in changed.items())


def test_three_wrong_guesses_in_ten_steps_end_it_until_they_are_past() -> None:
    run = Run(overlap=True, max_norm=2.0, never_off=False)
    for seed in range(LEARNED):
        run.step(seed, factor=0.1)
    assert run.num_ahead > 0
    for seed in range(3):
        expected = pytest.warns(UserWarning, match=r"updates wait for step\(\) again: 3 of the last 10")
        with expected if seed == 2 else contextlib.nullcontext():
            run.step(10 + seed, factor=30.0)
    run.step(20, factor=0.1)
    assert run.num_ahead == 0
    for seed in range(8):
        run.step(21 + seed, factor=0.1)
    assert run.num_ahead > 0


def test_a_model_that_is_unfrozen_goes_on() -> None:
    runs = pair()
    for run in runs:
        run.model[1].requires_grad_(False)
    train(runs, range(6))
    assert runs[0].num_ahead > 0
    for run in runs:
        run.model[1].requires_grad_(True)
    train(runs, range(6, 14))
    assert runs[0].num_ahead > 0


def test_accumulated_gradients_are_updated_after_the_last() -> None:
    runs = pair(max_norm=2.0)
    for seed in range(8):
        for run in runs:
            run.backward(100 + seed, factor=0.1)
            run.step(seed, factor=0.1)
    assert runs[0].num_ahead >= 4
    assert_alike(*runs)
    assert_as_predicted(runs[0].manager)


@without_accelerator
def test_one_tier_has_nothing_to_overlap() -> None:
    opts = {"overlap_optimizer": True}
    with pytest.warns(UserWarning, match=r"client\.opts\.overlap_optimizer: with memory\.device null"):
        chunkmem.ChunkManager(chunkmem.Config.from_dict({"client": {"opts": opts}, "memory": {"host": "64MiB"}}))


def test_what_fails_beside_backward_is_said_and_made_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pair(max_norm=2.0)
    train(runs, range(LEARNED))

    def broken(*args: object, **keys: object) -> None:
        raise MemoryError("no threads left")

    with monkeypatch.context() as patch:
        patch.setattr(runs[0].optimizer.updates.rule, "update_into", broken)
        with pytest.warns(
            UserWarning, match=r"overlapped with backward failed and is made now: MemoryError\('no threads left'"
        ):
            runs[0].step(9)
    runs[1].step(9)
    assert_alike(*runs)
    ahead, _ = train(runs, range(10, 16))
    assert ahead > 0
    audit(runs[0].manager)


def test_a_norm_is_made_of_what_updates_ahead_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are not read a second time."""
    run = Run(overlap=True, precision="bf16", max_norm=2.0)
    for seed in range(LEARNED):
        run.step(seed)
    native = run.manager.runtime.updater.native
    squares, num_read = native.squares, 0

    def counted(grads: Sequence[torch.Tensor], **how: int) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return squares(grads, **how)

    monkeypatch.setattr(native, "squares", counted)
    run.step(9)
    num_groups = sum(chunk.id.role is Role.GRAD for chunk in run.manager.runtime.memory.store.chunks.values())
    assert run.num_ahead > 2
    assert num_read == num_groups


def test_a_norm_in_float32_is_made_of_what_updates_ahead_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(overlap=True, max_norm=2.0)
    for seed in range(LEARNED):
        run.step(seed)
    num_known = []

    def noted(params: Any, gradient: Any, *, known: Any) -> torch.Tensor:
        num_known.append(len(known))
        return global_norm(params, gradient, known=known)

    monkeypatch.setattr(pending, "global_norm", noted)
    run.step(9)
    assert run.num_ahead > 2
    assert num_known[0] > len(list(run.model.parameters())) // 2


def test_a_closed_manager_leaves_no_thread() -> None:
    run = Run(overlap=True)
    for seed in range(LEARNED):
        run.step(seed)
    run.backward(9)
    run.manager.close()
    with pytest.raises(chunkmem.StateError):
        run.step(10)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_to_the_step_waits_for_its_copies(seed: int, lanes_by_name: Callable[..., MakeLanes]) -> None:
    """No update goes ahead while guesses are wrong, though the plan has them all: the step has to wait instead."""
    runs = pair(make_lanes=lanes_by_name("adversarial", seed), never_off=False)
    for tier in (Tier.DEVICE, Tier.HOST):
        runs[0].manager.runtime.memory.store.pools[tier].poison = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that guesses are wrong is said
        for step in range(20):
            for run in runs:
                run.backward(step)
                run.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step % 7)
                run.optimizer.step()
                run.optimizer.zero_grad()
    assert_alike(*runs)


def test_numbers_that_change_in_place_and_back_do_not_show(lanes_by_name: Callable[..., MakeLanes]) -> None:
    """A learning rate may be a tensor: what a speculative update takes is its value when that begins."""
    runs = pair(make_lanes=lanes_by_name("adversarial", 3))
    for run in runs:
        for group in run.optimizer.param_groups:
            group["lr"] = torch.tensor(3e-3)
    train(runs, range(LEARNED))
    for step in range(LEARNED, LEARNED + 6):
        for run in runs:
            run.backward(step)
            for group in run.optimizer.param_groups:
                group["lr"].fill_(0.5)
            run.manager.runtime.memory.pager.policy.drain()
            for group in run.optimizer.param_groups:
                group["lr"].fill_(3e-3)
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert_alike(*runs)


@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_weights_in_a_group_that_is_updated_are_rounded_too(*, overlap: bool) -> None:
    """A gather before the step has the plan gone on with in the update: it drops weights that were there until then."""
    run = Run(overlap=overlap, precision="bf16", device_nbytes=36 << 10)
    for tier in (Tier.DEVICE, Tier.HOST):
        run.manager.runtime.memory.store.pools[tier].poison = True
    for name, param in run.model.named_parameters():
        param.requires_grad_("up.weight" not in name)
    for step in range(8):
        run.backward(step)
        if step >= LEARNED:
            with run.manager.gather(run.model[2]):
                pass
        run.optimizer.step()
        run.manager.runtime.memory.pager.policy.drain()
        for chunk in run.manager.runtime.memory.store.chunks.values():
            if chunk.master is not None and (tier := chunk.newest_tier()) is not None:
                source = chunk.master.newest_tier()
                assert source is not None
                expected = chunk.master.replicas[source].flat.bfloat16()
                assert torch.equal(chunk.replicas[tier].flat.cpu(), expected.cpu()), (step, chunk.label)
        run.optimizer.zero_grad()
