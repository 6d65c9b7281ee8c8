"""Modules that compute on HOST: the numbers of those on DEVICE, which never holds what they are made of."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.data.errors import CapacityError, LayoutError, StateError, TraceError
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Plan
from chunkmem.runtime.step_lock import StepLock
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import adversarial
from tests.helpers.programs import run_python
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Task, serial, train
from tests.helpers.twins import WIDTH, Twin, assert_equal, config, copied, cpu_only, features, mlp, same

WORDS = 1000
TABLE_NBYTES = WORDS * WIDTH * 4
ON_HOST = {"use_cpu_embedding": True}
STEPS = tuple(range(10))


def ids_of(x: Tensor) -> Tensor:
    """A batch of ids of the shape of `x`, a function of its values alone."""
    return (x.abs() * 300).long() % WORDS


class Worded(nn.Module):
    """An embedding of far more words than are looked up in a step, and a few small layers."""

    def __init__(self, embedding: Callable[[], nn.Module] = lambda: nn.Embedding(WORDS, WIDTH)) -> None:
        super().__init__()
        self.words = embedding()
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(ids_of(x))
        h = h.mean(1) if h.dim() == 3 else h
        for block in self.blocks:
            h = h + block(h)
        out: Tensor = self.head(h)
        return out


class Tied(Worded):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight


def padded() -> nn.Module:
    return nn.Embedding(WORDS, WIDTH, padding_idx=3)


def renormed() -> nn.Module:
    return nn.Embedding(WORDS, WIDTH, max_norm=1.0)


def bag() -> nn.Module:
    return nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=3)


class Adapted(nn.Module):
    """A module of a user's own, with a frozen table, a buffer, and a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)
        self.table.requires_grad_(False)
        self.up = nn.Linear(4, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.up(self.table(ids)) * self.scale
        return result


def marked(manager: chunkmem.ChunkManager | None, build: Callable[[], Worded]) -> Worded:
    model = build()
    if manager is not None:
        manager.on_host(model.words)
    return model


class Marked(Twin):
    """Marks the words with `on_host`, in place of the key of the configuration."""

    def __init__(self, manager: chunkmem.ChunkManager | None, build: Callable[[], Any], **options: Any) -> None:
        super().__init__(manager, lambda: marked(manager, build), **options)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The numbers of plain PyTorch.


@pytest.mark.few(1)
@pytest.mark.parametrize("embedding", [lambda: nn.Embedding(WORDS, WIDTH), padded, renormed, bag, Adapted])
def test_ten_steps_are_those_of_plain_pytorch_down_to_the_smallest_cap(embedding: Callable[[], nn.Module]) -> None:
    required_nbytes = same(lambda: Worded(embedding), lambda twin: twin.steps(*STEPS), twin=Marked)
    assert required_nbytes < TABLE_NBYTES // 10


def test_the_key_of_the_configuration_means_every_embedding() -> None:
    assert same(Worded, lambda twin: twin.steps(*STEPS), keys=ON_HOST) < TABLE_NBYTES // 10


def test_what_comes_between_steps_is_as_with_plain_pytorch() -> None:
    """Micro-batches, clipping, an evaluation, freezing, and values that are written to, loaded and gathered."""

    def scenario(twin: Twin) -> Any:
        found: list[Any] = twin.steps(0, 1, 2)
        for seed in (3, 4):
            for micro in range(3):
                twin.backward(twin.loss(features(10 * seed + micro)))
            found.append(twin.clip(1e-3))
            twin.update()
        with torch.no_grad():
            found.append(twin.model(features(5)))
        twin.model.words.weight.requires_grad_(False)
        found += twin.steps(6, 7)
        twin.model.words.weight.requires_grad_(True)
        with torch.no_grad():
            twin.model.words.weight[5:9] *= 2.0
        found += twin.steps(8, 9)
        weights = {key: value * 0.5 for key, value in twin.weights().items()}
        (twin.model if twin.manager is None else twin.manager).load_state_dict(weights)
        found += twin.steps(10, 11)
        found.append(twin.model.words.weight.norm())
        twin.backward(twin.loss(features(12)))
        found.append(twin.model.words.weight.grad.clone())
        twin.update()
        return copied(found)

    same(Worded, scenario, keys=ON_HOST)


@pytest.mark.parametrize("seed", range(3))
def test_lanes_as_late_as_they_may_be_and_updates_ahead_change_nothing(seed: int) -> None:
    keys = {**ON_HOST, "client": {"opts": {"overlap_optimizer": True}}}
    with chunkmem.ChunkManager(config(6 << 10, **keys), make_lanes=adversarial(seed)) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        ours, plain = Twin(manager, Worded), Twin(None, Worded)
        for step in STEPS:
            losses = [twin.loss(features(step)) for twin in (ours, plain)]
            for twin, loss in zip((ours, plain), losses, strict=True):
                twin.backward(loss)
                if step == 7:
                    twin.clip(1e-3)
                twin.update()
            assert losses[0].item() == losses[1].item()
        assert_as_predicted(manager)
        assert_equal(ours.left(), plain.left())


@pytest.mark.few(2)
@pytest.mark.parametrize("embedding", [lambda: nn.Embedding(WORDS, WIDTH), renormed, bag])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_has_the_bits_of_an_embedding_on_device(
    precision: str, embedding: Callable[[], nn.Module]
) -> None:
    left = []
    for twin in (Twin, Marked):
        keys = {"precision": precision, "fp16": {"enabled": precision == "fp16", "initial_scale_power": 4}}
        with chunkmem.ChunkManager(config(8 << 20 if twin is Twin else 8 << 10, **keys)) as manager:
            ours = twin(manager, lambda: Worded(embedding))
            losses = []
            for step in STEPS:
                loss = ours.loss(features(step))
                ours.backward(loss)
                ours.update()
                losses.append(loss.item())
            left.append((losses, ours.left()))
            tiers = [chunk.compute_tier for chunk in manager.runtime.memory.store.chunks.values()]
            assert tiers.count(Tier.HOST) == (0 if twin is Twin else 5)
    assert_equal(*left)


# What it costs.


@cpu_only
def test_device_never_holds_what_computes_on_host() -> None:
    """At a fifth of the table on DEVICE the plan is followed to the byte, and nothing of the table is moved."""
    with chunkmem.ChunkManager(config(TABLE_NBYTES // 5, **ON_HOST)) as manager:
        twin = Twin(manager, Worded)
        twin.steps(*range(4))
        before = manager.memory()
        twin.step(features(4))
        assert_as_predicted(manager)
        after = manager.memory()
        assert before.device.peak_nbytes < TABLE_NBYTES // 5
        moved = [getattr(after.moved, name) - getattr(before.moved, name) for name in ("h2d_nbytes", "d2h_nbytes")]
        model_nbytes = sum(p.numel() * 4 for p in twin.model.parameters()) - TABLE_NBYTES
        assert max(moved) <= 8 * model_nbytes < TABLE_NBYTES
        assert manager.trace is not None
        on_host = {c.id for c in manager.runtime.memory.store.chunks.values() if c.compute_tier is Tier.HOST}
        assert len(on_host) == 4
        assert on_host.isdisjoint(manager.trace.chunk_nbytes)
        table = next(chunk for chunk in on_host if chunk.role is Role.PARAM)
        assert manager.runtime.memory.store.chunks[table].nbytes >= TABLE_NBYTES


@cpu_only
def test_host_has_to_hold_all_of_it() -> None:
    """What an error asks for is more, and in the end enough; what it is certain of does at once."""

    def training(host_nbytes: int) -> CapacityError | None:
        keys = {"memory": {"device": 1 << 20, "host": host_nbytes}, "default_chunk_size": 256, **ON_HOST}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(keys)) as manager:
            try:
                Twin(manager, Worded).steps(0, 1, 2)
            except CapacityError as error:
                return error
        return None

    host_nbytes, errors = TABLE_NBYTES // 2, []
    while (error := training(host_nbytes)) is not None:
        assert error.needed_nbytes > host_nbytes
        host_nbytes = error.needed_nbytes
        errors.append(error)
    assert host_nbytes == 4 * 63 * 1024  # the table, in chunks of 1 KiB, in four roles
    assert str(errors[0]).startswith(
        "packing: modules that compute on HOST have 63.00 KiB of weights, and HOST may hold 31.25 KiB; raise "
        "memory.host to at least 63.00 KiB (64512 bytes), or leave them on DEVICE"
    )
    assert training(errors[0].enough_nbytes) is None


@cpu_only
@pytest.mark.parametrize(("device_slabs", "host_slabs"), [(4, 28), (8, 24), (12, 22), (20, 14)])
def test_plans_leave_host_what_is_computed_with_there(device_slabs: int, host_slabs: int) -> None:
    """HOST has so many chunks more than the table takes; of those that pass through DEVICE, some stay on DEVICE."""
    keys = {"memory": {"device": device_slabs << 10, "host": (4 * 63 + host_slabs) << 10}, "default_chunk_size": 256}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({**keys, **ON_HOST})) as manager:
        ours, plain = Twin(manager, Worded), Twin(None, Worded)
        assert ours.steps(*range(5)) == plain.steps(*range(5))
        assert_as_predicted(manager)
        assert manager.plan is not None
        num_on_device = sum(tier is Tier.DEVICE for tier in manager.plan.update_tiers.values())
        assert num_on_device == max(0, device_slabs // 4 - 1)


@cpu_only
def test_no_want_of_room_makes_it_leave_host() -> None:
    with chunkmem.ChunkManager(config(1 << 20, **ON_HOST)) as manager:
        ours, plain = Twin(manager, Worded), Twin(None, Worded)
        assert ours.steps(0, 1) == plain.steps(0, 1)
        pager = manager.runtime.memory.pager
        pager.policy.before_demand()
        there = pager.store.resident[Tier.HOST].values()
        for wanted_nbytes in (1, sum(chunk.nbytes for chunk in there) - 3 * TABLE_NBYTES):
            pager.shrink(Tier.HOST, wanted_nbytes)
            audit(manager)
        assert ours.steps(2, 3, 4) == plain.steps(2, 3, 4)


def test_where_both_tiers_are_one_nothing_changes() -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"host": 32 << 20}, **ON_HOST})) as manager:
        if manager.runtime.tiers.caps.shared:
            ours, plain = Twin(manager, Worded), Twin(None, Worded)
            assert ours.steps(0, 1, 2) == plain.steps(0, 1, 2)
            assert_equal(ours.left(), plain.left())


_ACROSS = """
import os
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")  # a device that torch can name, without memory: tensors are fake
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.frames import Frame
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.modules.host_modules import HostModules
from chunkmem.data.types import Tier

BATCH, LENGTH, WORDS, WIDTH = 4, 8, 1000, 16

class Crossings(TorchDispatchMode):
    nbytes = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            if made.device != args[0].device:
                self.nbytes += made.numel() * made.element_size()
        return made

class Stack:
    def __init__(self):
        self.stack = []

for dtype in (torch.float32, torch.bfloat16):
    calls = Stack()
    host = HostModules(calls, torch.device("toy"), ModulePolicies())
    with FakeTensorMode(), Crossings() as crossings:
        words = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        host.fit([words])
        def enter(module, args):
            calls.stack.append(Frame("words", module))
            calls.stack[-1].tier = Tier.HOST
        words.register_forward_pre_hook(enter)
        words.register_forward_hook(lambda *_: [calls.stack.pop(), None][1])
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="toy")
        crossings.nbytes = 0
        rows = words(ids)
        assert rows.device.type == "toy" and rows.requires_grad
        rows.sum().backward()
        assert words.weight.grad.device.type == "cpu"
    assert crossings.nbytes == 2 * BATCH * LENGTH * WIDTH * dtype.itemsize + BATCH * LENGTH * 8, crossings.nbytes
print("ok", flush=True)
os._exit(0)  # torch's threads of the device would not end in order
"""


def test_ids_and_rows_are_all_that_crosses_to_another_device() -> None:
    """A step moves 2 B S D elements and the ids, and never V D; torch keeps one made-up device a process."""
    done = run_python("-c", _ACROSS)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# Over ranks.


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "task",
    [
        Task("plain", config=ON_HOST),
        Task("plain", config={**ON_HOST, "release_after_init": True}, micro_batches=3),
        Task("plain", config=ON_HOST, adversarial=5, device_nbytes=26 << 10, steps=8),
        Task("plain", config=ON_HOST, empty=((2, 1),), short=((3, 0, 1),), micro_batches=2),
        Task("plain", config={**ON_HOST, "client": {"opts": {"with_mem_saving_comm": True}}}),
    ],
    ids=["plain", "released late", "adversarial", "uneven", "memory-saving"],
)
def test_two_ranks_have_the_bits_of_one_process(pair: Team, task: Task) -> None:
    _, weights, states = serial(task, 2)
    for outcome in pair.run(train, task):
        assert_equal(outcome.weights, weights)
        assert_equal(outcome.states, states)


def test_two_ranks_in_mixed_precision_have_the_bits_of_an_embedding_on_device(pair: Team) -> None:
    keys = {"precision": "bf16"}
    on_host = pair.run(train, Task("plain", config={**ON_HOST, **keys}))
    on_device = pair.run(train, Task("plain", config=keys))
    for one, other in zip(on_host, on_device, strict=True):
        assert_equal([one.losses, one.weights, one.states], [other.losses, other.weights, other.states])


def test_two_ranks_clip_by_the_norm_of_all_gradients(pair: Team) -> None:
    """Which rank adds up which squares depends on who owns what, and so do the last bits of the norm."""
    task = Task("plain", config={**ON_HOST, "gradient_clipping": 0.01})
    _, weights, _ = serial(task, 2)
    outcomes = pair.run(train, task)
    assert_equal(outcomes[0].weights, outcomes[1].weights)
    torch.testing.assert_close(outcomes[0].weights, weights, rtol=1e-5, atol=1e-6)


def look(rank: int) -> list[Any]:
    """Write, load and gather; return what the words are on this rank each time, looked up by its own module."""
    torch.set_num_threads(1)
    found: list[Any] = []
    with chunkmem.ChunkManager(config(8 << 10, **ON_HOST)) as manager:
        torch.manual_seed(rank)
        with manager.init():
            model = Worded()
        everything = torch.arange(WORDS)

        def seen() -> Tensor:
            with torch.no_grad():
                result: Tensor = model.words(everything)
            return result.clone()

        found.append(seen())
        with manager.gather(model.words), torch.no_grad():
            model.words.weight.mul_(2.0)
        found.append(seen())
        manager.load_state_dict({key: value + 1.0 for key, value in manager.state_dict().items()})
        found.append(seen())
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2, max_grad_norm=0.01)
        for step in range(4):
            manager.backward(model(features(step + 7 * rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen())
        with manager.gather(model.words):
            found.append(model.words.weight.detach().clone())
        found.append(manager.state_dict()["words.weight"])
    return found


def test_every_rank_sees_what_owners_have(pair: Team) -> None:
    first, second = pair.run(look)
    assert_equal(first, second)
    built, doubled, loaded, trained, gathered, saved = first
    assert_equal(doubled, built * 2.0)
    assert_equal(loaded, doubled + 1.0)
    assert not torch.equal(trained, loaded)
    assert_equal(gathered, trained)
    assert_equal(saved, trained)


# What is refused, and what users may try.


def test_a_tied_head_is_refused_with_the_reason() -> None:
    with (
        chunkmem.ChunkManager(config(8 << 20, **ON_HOST)) as manager,
        pytest.raises(LayoutError) as error,
        manager.init(),
    ):
        model = Tied()
    assert model.head.weight is model.words.weight
    assert str(error.value) == (
        "parameter weight of module head, which computes on DEVICE, is tied to module words, which is to compute on "
        "HOST: DEVICE would need all of it in each step, and nothing would be gained; untie them, or leave that "
        "module on DEVICE (without manager.on_host() and use_cpu_embedding)"
    )


def test_modules_that_share_a_weight_can_both_compute_on_host() -> None:
    class Twice(Worded):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.Embedding(WORDS, WIDTH)
            self.others.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.words(ids_of(x)).mean(1) - self.others(ids_of(x) // 2).mean(1))
            return result

    same(Twice, lambda twin: twin.steps(*range(5)), keys=ON_HOST)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda manager, model: manager.on_host(nn.ReLU()), r"^manager\.on_host\(ReLU\): it has no parameters"),
        (lambda manager, model: manager.on_host("words"), r"takes a torch\.nn\.Module, not a str"),
        (lambda manager, model: manager.on_host(model.words), r"^manager\.on_host\(Embedding\): it was packed already"),
        (lambda manager, model: manager.on_host(model), r"^manager\.on_host\(Worded\): it was packed already"),
    ],
)
def test_what_cannot_be_on_host_is_named(misuse: Callable[..., object], message: str) -> None:
    with chunkmem.ChunkManager(config(8 << 20)) as manager:
        with manager.init():
            model = Worded()
        with pytest.raises((LayoutError, StateError), match=message):
            misuse(manager, model)


def test_an_excluded_module_stays_ordinary() -> None:
    def build(manager: chunkmem.ChunkManager) -> None:
        with manager.init():
            with manager.exclude():
                words = nn.Embedding(WORDS, WIDTH)
            manager.on_host(words)
            nn.Sequential(words, nn.Linear(WIDTH, 4))

    with chunkmem.ChunkManager(config(8 << 20)) as manager, pytest.raises(LayoutError, match="stays ordinary PyTorch"):
        build(manager)


@pytest.mark.parametrize("marks", [1, 2])
def test_a_mark_before_wrap_counts_once(marks: int) -> None:
    with chunkmem.ChunkManager(config(4 << 10)) as manager:
        torch.manual_seed(11)
        model, plain = Worded(), Twin(None, Worded)
        for _ in range(marks):
            assert manager.on_host(model.words) is model.words
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for step in range(3):
            model(features(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        plain.steps(0, 1, 2)
        assert_equal(copied(dict(manager.state_dict())), plain.weights())


class Functional(Worded):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.words.weight[:, :4])


def test_a_weight_on_host_that_is_read_on_device_is_named() -> None:
    with chunkmem.ChunkManager(config(8 << 20, **ON_HOST)) as manager:
        model = Twin(manager, Functional).model
        with pytest.raises(
            StateError,
            match=r"^Functional forward reads parameter words\.weight \(1000, 16\), which is "
            r"on HOST for good, and computes on DEVICE; call the module that owns it",
        ):
            model(features(0))
        assert manager.memory().device.peak_nbytes < TABLE_NBYTES
        with torch.no_grad():
            assert model.words(torch.arange(3, device=features(0).device)).shape == (3, WIDTH)


def test_users_call_it_as_any_other_module() -> None:
    """Twice in a step, in a checkpoint, from outside of the model, with no ids at all, and with ids out of range."""

    class Scenes(Worded):
        def forward(self, x: Tensor) -> Tensor:
            ids = ids_of(x)
            first = checkpoint(self.words, ids, use_reentrant=False).mean(1)
            second = checkpoint(lambda i: self.blocks[0](self.words(i).sum(1)), ids // 2, use_reentrant=False)
            result: Tensor = self.head(first + second)
            return result

    def scenario(twin: Twin) -> Any:
        found: list[Any] = twin.steps(0, 1, 2)
        words = twin.model.words
        with pytest.raises(IndexError):
            words(torch.tensor([WORDS], device=features(0).device))
        found += twin.steps(3)
        loss = words(ids_of(features(4))).square().sum() + twin.loss(features(5))
        loss.backward()
        twin.update()
        empty = words(torch.empty(0, 4, dtype=torch.long, device=features(0).device))
        assert empty.shape == (0, 4, WIDTH)
        empty.sum().backward()
        twin.update()
        found.append(torch.autograd.grad(words(ids_of(features(6))).sum(), words.weight)[0])
        found += twin.steps(7, 8, 9)
        return copied(found)

    same(Scenes, scenario, keys=ON_HOST)


@cpu_only
@pytest.mark.filterwarnings("error")
def test_a_step_of_nothing_else_is_no_miss_of_the_plan() -> None:
    with chunkmem.ChunkManager(config(8 << 10, **ON_HOST)) as manager:
        ours, plain = Twin(manager, Worded), Twin(None, Worded)
        for twin in (ours, plain):
            twin.steps(0, 1, 2, 3)
            for step in (4, 5):
                twin.model.words(ids_of(features(step))).square().mean().backward()
                twin.update()
                with torch.no_grad():
                    for evaluated in range(3):
                        twin.model.words(ids_of(features(evaluated)))
        assert ours.steps(6, 7) == plain.steps(6, 7)
        assert_as_predicted(manager)


class Recurrent(nn.Module):
    """A module with a flat list of its weights, and more than one output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.words(x.unsqueeze(0))
        result: Tensor = self.head(out[0] + hidden[0])
        return result


class Attending(nn.Module):
    """A module that reads the weights of one inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        result: Tensor = self.head(self.words(x, x, x)[0][0])
        return result


class Positions(nn.Module):
    """Returns a part of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = Positions()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x + self.words(len(x)))
        return result


class Whole(nn.Module):
    """All that computes, but for a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Worded()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.words(x))
        return result


@pytest.mark.parametrize("build", [Recurrent, Attending, Placed, Whole])
def test_any_module_can_compute_on_host(build: Callable[[], nn.Module]) -> None:
    same(build, lambda twin: twin.steps(*range(6)), twin=Marked)


def test_a_step_that_is_torn_down_leaves_nothing_behind() -> None:
    def scenario(twin: Twin) -> Any:
        found: list[Any] = twin.steps(*range(4))
        for part in (twin.model.words, twin.model.blocks[0]):

            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            hook = part.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                twin.model(features(4))
            hook.remove()
        return found + twin.steps(4, 5, 6)

    same(Worded, scenario, keys=ON_HOST)


def test_gradients_of_gradients_pass_through_it() -> None:
    def scenario(twin: Twin) -> Any:
        found: list[Any] = twin.steps(0, 1, 2)
        for step in (3, 4):
            (slope,) = torch.autograd.grad(twin.loss(features(step)), [twin.model.words.weight], create_graph=True)
            (slope.square().sum() + twin.loss(features(step))).backward()
            twin.update()
        return found + twin.steps(5)

    same(Worded, scenario, keys=ON_HOST)


def test_a_recorded_run_is_followed_again(tmp_path: Path) -> None:
    losses = []
    for is_first in (True, False):
        with chunkmem.ChunkManager(config(8 << 10, **ON_HOST)) as manager:
            twin = Twin(manager, Worded)
            if not is_first:
                manager.trace, manager.plan = Trace.load(tmp_path / "trace.json"), Plan.load(tmp_path / "plan.json")
            losses.append(twin.steps(*range(5)))
            if is_first:
                manager.record(tmp_path)
            assert_as_predicted(manager)
    assert losses[0] == losses[1]
    with chunkmem.ChunkManager(config(8 << 10)) as manager, pytest.raises(TraceError, match="layout"):
        Twin(manager, Worded)
        manager.trace = Trace.load(tmp_path / "trace.json")


def test_hooks_of_two_threads_take_turns_where_autograd_has_several() -> None:
    """On an accelerator one thread runs a model, which waits, and both it and another run the hooks of its backward."""
    step_lock = StepLock(timeout_s=10.0, with_hooks=False)
    inside: list[str] = []
    began = threading.Event()

    def hook_of_another() -> None:
        began.set()
        assert step_lock.take_in_hook()
        inside.append("other")
        step_lock.give_back()

    with step_lock.taken():
        assert step_lock.take_in_hook()
        other = threading.Thread(target=hook_of_another)
        other.start()
        began.wait()
        assert step_lock.take_in_hook()  # a hook in a hook, as when a call is recomputed
        step_lock.give_back()
        time.sleep(0.05)  # long enough for the other thread to come and wait; no event tells that it does
        assert inside == []
        step_lock.give_back()
        other.join()  # though this thread has the turn: the other one acts for it
        assert inside == ["other"]


def test_a_hook_that_was_torn_down_keeps_nobody_out() -> None:
    step_lock = StepLock(timeout_s=0.01, with_hooks=False)
    assert step_lock.take_in_hook()

    def late() -> None:
        with pytest.raises(StateError, match="has waited"):
            step_lock.take_in_hook()

    def in_time() -> None:
        assert step_lock.take_in_hook()
        step_lock.give_back()

    for hook in (late, in_time):
        with ThreadPoolExecutor(1) as other:
            other.submit(hook).result()
        step_lock.end_hooks()
    in_time()


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    with chunkmem.ChunkManager(config(8 << 20, **ON_HOST)) as manager:
        twin = Twin(manager, Worded)
        twin.steps(0)
        ordinary = copy.deepcopy(twin.model)
        assert_equal(dict(ordinary.state_dict()), manager.state_dict())
        assert torch.equal(ordinary(features(1).cpu()), twin.model(features(1)).cpu())
        assert type(copy.deepcopy(twin.model.words).weight) is nn.Parameter


def test_what_a_user_keeps_of_it_stays_as_it_is_in_plain_pytorch() -> None:
    """A view of the weight shows what updates write."""

    def scenario(twin: Twin) -> Any:
        twin.steps(0, 1)
        kept = twin.model.words.weight.detach()
        for seed in (2, 3):
            twin.loss(features(seed)).backward()
            twin.optimizer.step()
            twin.optimizer.zero_grad()
        return kept.clone()

    same(Worded, scenario, keys=ON_HOST)


def test_after_close_its_module_says_so() -> None:
    with chunkmem.ChunkManager(config(8 << 20, **ON_HOST)) as manager:
        model = Twin(manager, Worded).model
        model(features(0))
    with pytest.raises(StateError, match=r"closed"):
        model(features(0))
    with pytest.raises(StateError, match=r"closed"):
        manager.on_host(nn.Embedding(2, 2))


@cpu_only
def test_a_model_may_begin_with_a_region_that_computes_on_host_alone() -> None:
    """No moment is recorded in its forward, nor before."""

    class Begins(Twin):
        def __init__(self, manager: chunkmem.ChunkManager | None, build: Callable[[], Any], **options: Any) -> None:
            def built() -> nn.Module:
                model = build()
                for layer in [model[0][0], model[0][2]] if manager is not None else ():
                    manager.on_host(layer)
                return model  # type: ignore[no-any-return]

            super().__init__(manager, built, **options)

    keys = {"activations": {"policy": "auto"}}
    same(lambda: nn.Sequential(mlp(), mlp()), lambda twin: twin.steps(*STEPS), keys=keys, twin=Begins)
