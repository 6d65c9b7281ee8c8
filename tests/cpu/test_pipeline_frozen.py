"""Frozen blocks of a pipeline, by layer: they run once, without what backward needs, or not at all with a cache."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.activations.regions import RegionActivations
from chunkmem.data.activations import Content, activation_contents
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role
from chunkmem.plan.model import Lane
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, assert_equal, config, copied, cpu_only, mlp

pytestmark = cpu_only

NUM_BLOCKS, BATCH, NUM_SAMPLES = 6, 8, 24
HOST_NBYTES = NUM_SAMPLES * WIDTH * 4


def sample(number: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def order(epoch: int) -> list[list[int]]:
    shuffled = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [shuffled[at : at + BATCH] for at in range(0, NUM_SAMPLES, BATCH)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Counted(nn.Module):
    """Counts the calls of a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        result: Tensor = self.inner(x)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Counted(nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Counted(mlp()) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def take_counts(self) -> list[int]:
        """Of the first module and the blocks, since the last time."""
        counted: list[Any] = [self.first, *self.blocks]
        counts = [each.num_calls for each in counted]
        for each in counted:
            each.num_calls = 0
        return counts


class Run:
    """A pipeline over a model whose blocks are frozen, epoch by epoch."""

    def __init__(
        self, manager: chunkmem.ChunkManager, *, host: int = 0, adaptive: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(SEED)
        self.manager = manager
        with manager.init():
            self.model = Net()
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, lr=1e-2)
        self.cache = chunkmem.FrozenCache(manager, host=host) if host else None
        self.schedule = chunkmem.FreezeSchedule(self.model.blocks, first=self.model.first, adaptive=adaptive)
        self.pipe: Any = manager.pipeline(
            self.model.blocks,
            first=self.model.first,
            last=self.model.head,
            loss_fn=loss_of,
            micro_batches=4,
            freeze=self.schedule,
            cache=self.cache,
            **options,
        )

    def step(self, ids: list[int]) -> float:
        x = torch.stack([sample(each) for each in ids])
        y = torch.stack([sample(1000 + each)[:4] for each in ids])
        loss: float = self.pipe.step(x, y, ids=ids).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        return loss

    def epoch(self, number: int) -> list[float]:
        return [self.step(ids) for ids in order(number)]


def weights_copied(manager: chunkmem.ChunkManager) -> Counter[int]:
    """How often the weights of each group were copied to DEVICE in the last step."""
    timeline = manager.timeline()
    assert timeline is not None
    spans = [span for span in timeline.spans if span.lane is Lane.H2D and span.nbytes and not span.is_stall]
    return Counter(span.chunk.group for span in spans if span.chunk is not None and span.chunk.role is Role.PARAM)


def groups_of(manager: chunkmem.ChunkManager, *modules: nn.Module) -> set[int]:
    found = (manager.runtime.registry.find(param) for module in modules for param in module.parameters())
    return {managed.group for managed in found if managed is not None}


@pytest.mark.full
@spread(checkpoint=("auto", "always"), device_nbytes=(20 << 10, AMPLE_NBYTES), host=(HOST_NBYTES, 10 * WIDTH * 4))
@pytest.mark.few(1)
def test_losses_are_those_without_a_cache(checkpoint: str, device_nbytes: int, host: int) -> None:
    """The larger cache has room for all samples, the smaller one for less than half of them."""
    found, host_nbytes = [], host
    for host in (0, host_nbytes):
        with chunkmem.ChunkManager(config(device_nbytes)) as manager:
            run, losses, reports = Run(manager, host=host, checkpoint=checkpoint), [], []
            for number in range(5):
                losses += run.epoch(number)
                if number in (0, 2):
                    reports.append(run.pipe.end_epoch().num_params)
            assert reports[0] > reports[1] > 0
            found.append((losses, reports, copied(manager.state_dict())))
            if host == HOST_NBYTES:
                assert run.cache is not None
                report = run.cache.report
                assert (report.num_found, report.num_computed) == (2 * NUM_SAMPLES, 2 * NUM_SAMPLES)
    assert_equal(found[1], found[0])


def test_with_a_cache_a_block_runs_once_for_each_sample() -> None:
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        run = Run(manager, host=HOST_NBYTES)
        run.epoch(0)
        run.pipe.end_epoch()
        run.model.take_counts()
        run.epoch(1)
        assert run.model.take_counts() == [12] * (NUM_BLOCKS + 1)
        run.epoch(2)
        assert run.model.take_counts() == [0] * 3 + [12] * 4
        run.pipe.end_epoch()
        run.epoch(3)  # begins where fewer blocks had ended
        assert run.model.take_counts() == [0] * 3 + [12] * 4
        run.epoch(4)
        assert run.model.take_counts() == [0] * 5 + [12] * 2


def steady(*, host: int, checkpoint: str = "auto", num_epochs: int = 4) -> tuple[Counter[int], set[int], Trace]:
    """Train with two frozen blocks; return copies of weights in the last step, frozen groups, and its trace."""
    with chunkmem.ChunkManager(config(10 << 10)) as manager:
        run = Run(manager, host=host, checkpoint=checkpoint)
        run.epoch(0)
        run.pipe.end_epoch()
        for number in range(1, 1 + num_epochs):
            run.epoch(number)
        trained = groups_of(manager, *run.model.blocks[run.schedule.prefix :])
        timeline, trace = manager.timeline(), manager.trace
        assert timeline is not None
        assert timeline.plan_misses == 0
        assert trace is not None
        assert manager.plan is not None
        return weights_copied(manager), groups_of(manager, *run.schedule.frozen) - trained, trace


@pytest.mark.parametrize(
    "checkpoint", ["auto", *(pytest.param(name, marks=pytest.mark.full) for name in ("always", "never"))]
)
def test_weights_of_frozen_blocks_come_once_and_nothing_is_saved_there(checkpoint: str) -> None:
    copies, frozen, trace = steady(host=0, checkpoint=checkpoint)
    assert all(copies[group] <= 1 for group in frozen)
    assert any(copies[group] for group in frozen)
    frozen_names, contents = {"first", "blocks.0", "blocks.1"}, activation_contents(trace).values()
    assert frozen_names.isdisjoint(region.name for region in trace.regions)
    assert {each.content for each in contents if each.region in frozen_names} == {Content.OUTPUTS}
    assert any(each.content is not Content.OUTPUTS for each in contents)


def test_calls_of_frozen_blocks_are_no_regions() -> None:
    """Nothing is noted for a second call, such as states of random generators."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        run = Run(manager, checkpoint="always")
        run.epoch(0)
        run.pipe.end_epoch()
        with mock.patch.object(RegionActivations, "enter", autospec=True, side_effect=RegionActivations.enter) as enter:
            run.epoch(1)
        names = {call.args[1] for call in enter.call_args_list}
        assert names == {f"blocks.{number}" for number in range(2, NUM_BLOCKS)} | {"head"}


def test_with_a_cache_weights_of_frozen_blocks_never_come() -> None:
    copies, frozen, _ = steady(host=HOST_NBYTES)
    assert copies.total()
    assert not any(copies[group] for group in frozen)


def test_a_parameter_that_a_frozen_block_uses_and_does_not_have_is_trained() -> None:
    """Its gradient comes through blocks that have none to train."""

    class Uses(nn.Module):
        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__()
            self.inner, self.weights = mlp(), weights

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) * self.weights[0]
            return result

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x

    def train(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(SEED)
        with nullcontext() if manager is None else manager.init():
            head, scale = nn.Linear(WIDTH, WIDTH), Scale()
            model: Any = nn.Sequential(mlp(), Uses([scale.weight]), mlp(), head, scale)
        model[:3].requires_grad_(False)
        trained = [*head.parameters(), scale.weight]
        if manager is None:
            optimizer: Any = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        else:
            optimizer = chunkmem.AdamW(trained, manager=manager, lr=1e-2)
            pipe: Any = manager.pipeline(model[:3], last=head, loss_fn=loss_of, micro_batches=2)
        x, losses = torch.stack([sample(number) for number in range(BATCH)]), []
        for _ in range(6):
            if manager is None:
                parts = [loss_of(model(part), torch.zeros(())) / 2 for part in x.chunk(2)]
                for part in reversed(parts):
                    part.backward()
                losses.append(sum(part.detach() for part in parts))
            else:
                losses.append(pipe.step(x, torch.zeros(())))
            optimizer.step()
            optimizer.zero_grad()
        return [float(loss) for loss in losses], copied(model.state_dict() if manager is None else manager.state_dict())

    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        assert_equal(train(manager), train(None))


def test_an_adaptive_schedule_looks_at_gradients_in_some_steps() -> None:
    """Of five, in the first, the second and the fourth; and it freezes nothing behind the smallest gradients."""
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        run = Run(manager, adaptive=True)
        observed, squares = [], run.schedule.state_dict()["squares"]
        for step, ids in enumerate([*order(0), *order(1)[:2]]):
            run.step(ids)
            now = run.schedule.state_dict()["squares"]
            if now != squares:
                observed.append(step)
            squares = now
        assert observed == [0, 1, 3]
        smallest = min(range(NUM_BLOCKS), key=squares.__getitem__)
        run.pipe.end_epoch()
        assert run.schedule.prefix == min(2, smallest)
        run.epoch(2)


def refused(said: str, error: type[chunkmem.ChunkmemError], change: Any, call: Any) -> None:
    """Refuse a batch, and train on without what was wrong."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        run = Run(manager, host=HOST_NBYTES)
        change(run)
        run.epoch(0)
        run.pipe.end_epoch()
        with pytest.raises(error, match=said):
            call(run)
        audit(manager)


X, Y = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, 4)
IDS = list(range(BATCH))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (None, "give ids=, one for each of the 8 samples"),
        (IDS[:3], "there are 3 ids for 8 samples"),
        (torch.arange(9), "there are 9 ids for 8 samples"),
    ],
    ids=["none", "fewer", "more"],
)
def test_ids_are_one_for_each_sample(ids: Any, said: str) -> None:
    refused(said, chunkmem.ConfigError, lambda run: None, lambda run: run.pipe.step(X, Y, ids=ids))


def test_a_sample_that_is_another_one_is_refused() -> None:
    def call(run: Run) -> None:
        run.pipe.step(X, Y, ids=IDS)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.pipe.step(X + 1, Y, ids=IDS)

    refused("sample 0 is not what it was the last time: with augmentation", chunkmem.StateError, lambda run: None, call)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Dropout(0.1), "drops values at random"),
        (nn.BatchNorm1d(WIDTH, affine=False), "collects statistics"),
        (Noise(), "draw random numbers"),
    ],
    ids=["dropout", "batch norm", "noise"],
)
def test_what_cannot_be_kept_is_refused(module: nn.Module, said: str) -> None:
    def change(run: Run) -> None:
        run.model.blocks[0].inner.append(module)  # type: ignore[union-attr, operator]

    refused(said, chunkmem.StateError, change, lambda run: run.pipe.step(X, Y, ids=IDS))


def test_without_a_schedule_no_epoch_ends() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        run = Run(manager)
        pipe = manager.pipeline(run.model.blocks, last=run.model.head, loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.StateError, match="freezes what a schedule says"):
            pipe.end_epoch()
        with pytest.raises(chunkmem.ConfigError, match="freeze is a list; give a"):
            manager.pipeline(run.model.blocks, loss_fn=loss_of, micro_batches=2, freeze=[])  # type: ignore[arg-type]
        with pytest.raises(chunkmem.ConfigError, match=r"cache is a int; give a chunkmem\.FrozenCache"):
            manager.pipeline(run.model.blocks, loss_fn=loss_of, micro_batches=2, cache=5)  # type: ignore[arg-type]


def test_a_closed_cache_says_so() -> None:
    def close(run: Run) -> None:
        run.cache.close()  # type: ignore[union-attr]

    refused(
        "FrozenCache: it is closed; make another one",
        chunkmem.StateError,
        close,
        lambda run: run.pipe.step(X, Y, ids=IDS),
    )


def test_a_cache_is_refused_where_batches_overlap() -> None:
    """Also one that is empty."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        run = Run(manager, host=HOST_NBYTES)
        with pytest.raises(chunkmem.ConfigError, match="cache with schedule='async-1f1b': batches overlap"):
            manager.pipeline(
                run.model.blocks,
                loss_fn=loss_of,
                micro_batches=2,
                schedule="async-1f1b",
                versions="stash",
                cache=run.cache,
            )


@pytest.mark.full
def test_other_weights_of_frozen_blocks_are_noticed() -> None:
    """What the cache has is of the old ones."""
    found = []
    for host in (0, HOST_NBYTES):
        with chunkmem.ChunkManager(config(20 << 10)) as manager:
            run = Run(manager, host=host)
            run.epoch(0)
            run.pipe.end_epoch()
            losses = run.epoch(1)
            manager.load_state_dict({key: value * 1.01 for key, value in manager.state_dict().items()})
            losses += run.epoch(2)
            manager.unfreeze(run.model.first)
            losses += run.epoch(3)
            found.append((losses, copied(manager.state_dict())))
    assert_equal(*found)


def with_other_hits(rank: int, has_new_samples: bool) -> tuple[list[float], list[int]]:
    """Train by layer over ranks; the samples of the second rank may be new ones in each step."""
    torch.set_num_threads(1)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        run = Run(manager, host=HOST_NBYTES)
        run.step(list(range(BATCH)))
        run.pipe.end_epoch()
        run.model.take_counts()
        losses = []
        for step in range(3):
            first = 100 * rank + (BATCH * step if has_new_samples and rank == 1 else 0)
            losses.append(run.step(list(range(first, first + BATCH))))
        return losses, run.model.take_counts()


@pytest.mark.full
def test_ranks_leave_frozen_blocks_out_together() -> None:
    """Where one rank has to run them, the other one gathers them, too, and runs nothing."""
    with Team(2) as team:
        (_, counts), (_, same) = team.run(with_other_hits, False)
        assert counts == same == [4] * 3 + [12] * 4
        (_, first), (_, second) = team.run(with_other_hits, True)
        assert first == [4] * 3 + [12] * 4
        assert second == [12] * 7
