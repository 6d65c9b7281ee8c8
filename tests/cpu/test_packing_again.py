"""Chunks of which less than half is trained are packed again: memory is given back, and no bit changes."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.assembly import inventory
from tests.cpu.test_freezing import content_nbytes
from tests.helpers.audit import audit
from tests.helpers.half_frozen import CHUNK_NUMEL, SCENES, HalfFrozen, peak_of
from tests.helpers.low_precision import LowPlain
from tests.helpers.spread import spread
from tests.helpers.training import Chunked, Plain, Side
from tests.helpers.twins import AMPLE_NBYTES, SEED, Blocks, assert_equal, config, copied, features

OTHERS = (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.SGD, torch.optim.Adagrad)


@spread(scene=SCENES, precision=("fp32", "bf16"), cap=("ample", "smallest"))
@pytest.mark.few(1)
def test_it_has_the_numbers_of_plain_pytorch(scene: str, precision: str, cap: str) -> None:
    plain: Side = Plain() if precision == "fp32" else LowPlain(torch.bfloat16)
    reference = HalfFrozen(plain)
    expected = list(SCENES[scene](reference)), reference.left()
    cap_nbytes = AMPLE_NBYTES
    for _ in range(2 if cap == "smallest" else 1):
        chosen = config(cap_nbytes, precision=precision, default_chunk_size=CHUNK_NUMEL)
        with chunkmem.ChunkManager(chosen) as manager:
            for pool in manager.runtime.memory.store.pools.values():
                pool.poison = True
            ours = HalfFrozen(Chunked(manager))
            assert_equal((list(SCENES[scene](ours)), ours.left()), expected)
            assert ours.packed_nbytes > 0 or cap_nbytes < AMPLE_NBYTES
            cap_nbytes = manager.memory().device.required_nbytes


def half_frozen(manager: chunkmem.ChunkManager) -> tuple[HalfFrozen, chunkmem.FreezeReport]:
    training = HalfFrozen(Chunked(manager))
    training.steps(4)
    return training, manager.freeze(training.model.blocks[::2])


@spread(precision=["fp32", "bf16"], device_nbytes=[AMPLE_NBYTES, 24 << 10])
@pytest.mark.few(1)
def test_what_is_given_back_and_the_peak_meanwhile(precision: str, device_nbytes: int) -> None:
    """8 bytes a frozen parameter, and 4 of its master weight, less a chunk a role; never a chunk a role more."""
    chosen = config(device_nbytes, precision=precision, default_chunk_size=CHUNK_NUMEL)
    with chunkmem.ChunkManager(chosen) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(4)
        before_nbytes = content_nbytes(manager)
        total_nbytes = sum(ledger.total_nbytes for ledger in manager.runtime.tiers.ledgers)
        nbytes = {str(chunk.id.role): chunk.nbytes for chunk in manager.runtime.memory.store.chunks.values()}
        weights = manager.runtime.registry.models[0].layout.chunk_nbytes
        with peak_of(manager) as peaks:
            report = manager.freeze(training.model.blocks[::2])
        assert peaks[0] <= total_nbytes + sum(nbytes.values())
        num_roles = 2 if precision == "fp32" else 3
        assert report.freed_nbytes >= 4 * num_roles * (report.num_params - CHUNK_NUMEL)
        assert before_nbytes - content_nbytes(manager) == report.freed_nbytes
        assert 0 < report.packed_nbytes <= report.freed_nbytes
        assert report.left_nbytes == 0
        assert "of it by packing chunks again" in str(report)
        assert manager.runtime.registry.models[0].layout.chunk_nbytes <= weights + nbytes["param"]


def operations_of(manager: chunkmem.ChunkManager) -> list[tuple[object, ...]]:
    """Return what the last step did: without times, which copies that are under way for the next step still lack."""
    timeline = manager.timeline()
    assert timeline is not None
    spans = [span for span in timeline.spans if not span.is_stall]
    return sorted((span.lane.value, span.label, span.moment, span.nbytes) for span in spans)


def test_what_a_user_holds_stays() -> None:
    with chunkmem.ChunkManager(config(24 << 10, default_chunk_size=CHUNK_NUMEL)) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(4)
        params = dict(training.model.named_parameters())
        state, operations, moved = training.optimizer.state, operations_of(manager), manager.memory().device
        assert manager.freeze(training.model.blocks[::2]).packed_nbytes > 0
        assert all(param is params[name] for name, param in training.model.named_parameters())
        assert training.optimizer.state is state
        assert len(state) == sum(param.requires_grad for param in params.values())
        assert operations_of(manager) == operations
        assert manager.memory().device.required_nbytes >= moved.required_nbytes
        training.steps(2)
        assert manager.trace is not None
        training.steps(2)
        assert manager.plan is not None
        assert manager.timeline().plan_misses == 0  # type: ignore[union-attr]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "direction",
    [
        "packed to plain",
        "others to packed",
        pytest.param("packed to packed", marks=pytest.mark.full),
        pytest.param("packed to others", marks=pytest.mark.full),
        pytest.param("plain to packed", marks=pytest.mark.full),
    ],
)
def test_checkpoints(direction: str, tmp_path: Path) -> None:
    """What was saved before packing loads afterwards, and the other way round, also in plain PyTorch."""
    source, target = direction.split(" to ")

    def begin(side: Side, kind: str, *, first: int = 0) -> Any:
        training = HalfFrozen(side)
        training.num_steps = first
        training.steps(3)
        training.freeze(training.model.blocks[::2])
        training.steps(2)
        assert not isinstance(side, Chunked) or (training.packed_nbytes > 0) is (kind == "packed")
        return training

    def manager_of(kind: str) -> chunkmem.ChunkManager:
        size = CHUNK_NUMEL if kind == "packed" else 256
        return chunkmem.ChunkManager(config(24 << 10, default_chunk_size=size))

    reference = begin(Plain(), "plain")
    weights, states = copied(reference.model.state_dict()), copied(reference.optimizer.state_dict())
    if source != "plain":
        with manager_of(source) as manager:
            training = begin(Chunked(manager), source)
            weights, states = copied(manager.state_dict()), copied(training.optimizer.state_dict())
            manager.save(tmp_path / "saved", training.optimizer)
    expected = reference.steps(3), reference.left()
    if target == "plain":
        ours = begin(Plain(), "plain", first=20)
        ours.model.load_state_dict(weights)
        ours.optimizer.load_state_dict(states)
        ours.num_steps = 5
        assert_equal((ours.steps(3), ours.left()), expected)
        return
    with manager_of(target) as manager:
        ours = begin(Chunked(manager), target, first=20)
        if source == "plain":
            manager.load_state_dict(weights)
            ours.optimizer.load_state_dict(states)
        else:
            manager.load(tmp_path / "saved", ours.optimizer)
        ours.num_steps = 5
        assert_equal((ours.steps(3), ours.left()), expected)


def averaged(manager: chunkmem.ChunkManager) -> tuple[Any, int]:
    training = HalfFrozen(Chunked(manager))
    ema = chunkmem.EMA(manager, 0.9)
    for _ in range(3):
        training.steps(2)
        ema.update()
    training.freeze(training.model.blocks[::2])
    before = copied(ema.state_dict())
    training.steps(2)
    ema.update()
    with ema.swapped():
        # A frozen weight has no more bits than are computed with, once its chunk has given its master weights back.
        swapped = {name: value.bfloat16() for name, value in manager.state_dict().items()}
    training.steps(2)
    return (before, copied(ema.state_dict()), swapped, training.left()), training.packed_nbytes


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_averages_stay(precision: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision, default_chunk_size=256)) as manager:
        expected, packed_nbytes = averaged(manager)
        assert packed_nbytes == 0
    chosen = config(32 << 10, precision=precision, default_chunk_size=CHUNK_NUMEL)
    with chunkmem.ChunkManager(chosen) as manager:
        found, packed_nbytes = averaged(manager)
        assert packed_nbytes > 0
    assert_equal(found, expected)


def in_a_pipeline(training: HalfFrozen) -> Any:
    model = training.model
    return training.side.manager.pipeline(
        model.blocks, first=model.inner, last=model.head, loss_fn=nn.functional.mse_loss, micro_batches=2
    )


def next_to_another_model(training: HalfFrozen) -> Any:
    return training.side.manager.wrap(nn.Linear(4, 4))


def next_to_kept_states(training: HalfFrozen) -> Any:
    return training.side.manager.freeze(training.model.head, keep_states=True)


def next_to_what_was_added(training: HalfFrozen) -> Any:
    training.model.blocks[1].added = nn.Linear(16, 16)
    return None


def next_to_an_alias(training: HalfFrozen) -> Any:
    return training.model.blocks[1][0].weight.detach()


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        (in_a_pipeline, r"a manager.pipeline\(\)"),
        (next_to_another_model, "chunks of 2 models"),
        (next_to_kept_states, "parameter head.weight is frozen with its states"),
        (next_to_what_was_added, "added to the model after it was packed"),
        (next_to_an_alias, "somebody keeps the memory of"),
    ],
)
@pytest.mark.few(2)
def test_what_stands_against_it_is_told_and_freezing_does_not_fail(hold: Any, reason: str) -> None:
    with chunkmem.ChunkManager(config(32 << 10, default_chunk_size=CHUNK_NUMEL)) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(2)
        held = hold(training)
        report = manager.freeze(training.model.blocks[::2])
        assert re.search(reason, report.not_packed)
        assert report.left_nbytes > 0 == report.packed_nbytes
        assert not training.model.blocks[0][0].weight.requires_grad
        assert reason.replace("\\", "") in str(report)
        if hold is next_to_an_alias:
            del held
        training.steps(2)
        audit(manager)


def test_a_module_that_would_not_fit_any_more_stays_as_it_is() -> None:
    """The weight of a layer and its bias would be in two chunks; before, one and its gradients were needed."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=CHUNK_NUMEL)) as manager:
        HalfFrozen(Chunked(manager)).steps(3)
        required_nbytes = manager.memory().device.required_nbytes
    with chunkmem.ChunkManager(config(required_nbytes, default_chunk_size=CHUNK_NUMEL)) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(3)
        report = manager.freeze([param for param in training.model.parameters() if param.dim() > 1])
        assert "a module would have 4.00 KiB more on DEVICE at a time" in report.not_packed
        training.steps(3)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, *(pytest.param(k, marks=pytest.mark.full) for k in OTHERS)])
def test_with_any_optimizer_and_zero_grad_at_the_beginning(kind: type[torch.optim.Optimizer]) -> None:
    """Gradients that the last step has used are still shown when layers are frozen."""

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(SEED)
        with contextlib.nullcontext() if manager is None else manager.init():
            model = Blocks(num_blocks=8)
        params, options = model.parameters(), {"lr": 1e-2}
        optimizer: Any = (
            kind(params, **options) if manager is None else chunkmem.Optimizer(kind, params, manager=manager, **options)
        )
        losses = []
        for step in range(9):
            optimizer.zero_grad()
            loss = model(features(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 3 and manager is None:
                for param in model.blocks[::2].parameters():
                    param.requires_grad_(False)
                    param.grad = None
                    optimizer.state.pop(param, None)
            elif step == 3:
                assert manager.freeze(model.blocks[::2]).packed_nbytes > 0
            if step == 6:
                model.requires_grad_(True) if manager is None else manager.unfreeze(model)
        return losses, copied(model.state_dict() if manager is None else manager.state_dict())

    with chunkmem.ChunkManager(config(32 << 10, default_chunk_size=CHUNK_NUMEL)) as manager:
        assert_equal(run(manager), run(None))


def test_a_lack_of_room_meanwhile_is_told() -> None:
    with chunkmem.ChunkManager(config(32 << 10, default_chunk_size=CHUNK_NUMEL)) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(3)
        with patch.object(inventory, "extra_nbytes", return_value=1 << 40):
            report = manager.freeze(training.model.blocks[::2])
        assert "packing again: while chunks move, this rank has up to 1.00 TiB more" in report.not_packed
        assert report.left_nbytes > 0 == report.packed_nbytes
        training.steps(2)
        audit(manager)


class Words(nn.Module):
    """Has a tied weight, and an embedding that may be on HOST."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.inner = Blocks(num_blocks=8)
        self.inner.blocks[5][0].weight = self.inner.blocks[1][0].weight

    def forward(self, x: Any) -> Any:
        return self.inner(self.words(x))


def trained_words(kind: str, chunk_numel: int) -> tuple[Any, int]:
    keys: dict[str, Any] = {"on host": {"use_cpu_embedding": True}, "fp16": {"precision": "fp16"}}.get(kind, {})
    torch.manual_seed(SEED)
    packed_nbytes, losses = 0, []
    with chunkmem.ChunkManager(config(64 << 10, default_chunk_size=chunk_numel, **keys)) as manager:
        with manager.init():
            model = Words()
            if kind == "excluded":
                with manager.exclude():
                    model.inner.head = nn.Linear(16, 4)
        if kind == "compiled":
            manager.compile(model.inner)
        params = list(model.parameters())
        parts = [params[::2], params[1::2]] if kind == "two optimizers" else [params]
        options: dict[str, Any] = {"lr": 1e-2, "manager": manager} | ({"states": "8bit"} if kind == "8 bits" else {})
        optimizers = [chunkmem.AdamW(part, **options) for part in parts]
        for step in range(8):
            loss = model(torch.arange(step, step + 8, device=manager.runtime.device)).square().mean()
            manager.backward(loss)
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step == 3:
                packed_nbytes = manager.freeze(model.inner.blocks[::2]).packed_nbytes
            if step == 5:
                manager.unfreeze(model)
            audit(manager)
        return (losses, copied(manager.state_dict())), packed_nbytes


KINDS = ("tied", "two optimizers", "on host", "8 bits", "fp16", "excluded", "compiled")


@pytest.mark.few(1)
@spread(kind=KINDS)
def test_other_parts_of_a_run(kind: str) -> None:
    """As with chunks that are too small to be packed again."""
    found, packed_nbytes = trained_words(kind, CHUNK_NUMEL)
    expected, nothing = trained_words(kind, 256)
    assert_equal(found, expected)
    assert packed_nbytes > 0 == nothing


def test_old_parts_are_gone() -> None:
    with chunkmem.ChunkManager(config(32 << 10, default_chunk_size=CHUNK_NUMEL)) as manager:
        training = HalfFrozen(Chunked(manager))
        training.steps(3)
        before, num_threads = weakref.ref(manager.runtime), threading.active_count()
        lazy = manager.state_dict(lazy=True)
        assert manager.freeze(training.model.blocks[::2]).packed_nbytes > 0
        with pytest.raises(chunkmem.StateError, match=r"packed its chunks again since; take state_dict\(\)"):
            lazy["head.weight"].sum()
        del lazy
        training.steps(3)
        gc.collect()
        assert before() is None
        assert threading.active_count() <= num_threads


@pytest.mark.full
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute", "auto"])
def test_with_managed_activations(policy: str) -> None:
    reference = HalfFrozen(Plain())
    expected = list(SCENES["every_second"](reference)), reference.left()
    chosen = config(40 << 10, default_chunk_size=CHUNK_NUMEL, activations={"policy": policy})
    with chunkmem.ChunkManager(chosen) as manager:
        ours = HalfFrozen(Chunked(manager))
        assert_equal((list(SCENES["every_second"](ours)), ours.left()), expected)
        assert ours.packed_nbytes > 0
