"""The ranks of a machine have one copy of what frozen layers make; nothing of it is left, however they end."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.contrib.frozen_cache import tags
from chunkmem.contrib.frozen_cache.kept import AskedSamples
from chunkmem.contrib.frozen_cache.shared_index import SharedIndex
from chunkmem.runtime.disk_file import SystemCalls
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, Training
from tests.helpers.shared_training import WIDTH as WORDS_WIDTH
from tests.helpers.shared_training import WORDS
from tests.helpers.spread import spread
from tests.helpers.staged_training import StagedTask
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, Blocks, config, copied

NUM_SAMPLES, BATCH = 16, 2
VALUE_NBYTES = WIDTH * 4


def sample(number: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def together(ids: list[int]) -> Tensor:
    return torch.stack([sample(each) for each in ids])


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    found = Team(request.param)
    yield found
    found.close()


SIZES: dict[str, dict[str, Any]] = {
    "all on HOST": {"host": NUM_SAMPLES * VALUE_NBYTES},
    "some on HOST": {"host": 10 * VALUE_NBYTES},
    "HOST and DISK": {"host": 10 * VALUE_NBYTES, "disk": True},
    "a few on DISK": {"host": 6 * VALUE_NBYTES, "disk": True, "disk_capacity": 8 * 4096},
}


def memory_files() -> list[str]:
    """The files in RAM that this process has open."""
    folder = Path("/proc/self/fd")
    paths = [os.readlink(each) for each in folder.iterdir() if each.is_symlink()]
    return [path for path in paths if "memfd:chunkmem" in path]


class Run:
    """Training over ranks that share chunks, with some blocks frozen."""

    def __init__(self, rank: int, size: int, manager: chunkmem.ChunkManager, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.manager = manager
        with manager.init():
            self.model: Any = Blocks(num_blocks=4)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, lr=1e-2)
        self.cache = chunkmem.FrozenCache(manager, **options) if options else None
        self.sampler = chunkmem.SplitSampler(
            NUM_SAMPLES, batch_size=BATCH * size, width=size, rank=rank, drop_last=True
        )
        self.num_frozen = 0

    @property
    def frozen(self) -> list[nn.Module]:
        return [self.model.inner, *self.model.blocks[: self.num_frozen]]

    def epoch(self, number: int) -> list[float]:
        losses = []
        self.sampler.set_epoch(number)
        for ids in self.sampler:
            x = together(ids)
            if self.cache is None:
                for module in self.frozen:
                    x = module(x)
            else:
                x = self.cache(self.frozen, x, ids)
            for block in self.model.blocks[self.num_frozen :]:
                x = block(x)
            loss = self.model.head(x).square().mean()
            self.manager.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            audit(self.manager)
            losses.append(loss.item())
        return losses


def train(rank: int, size: int, options: dict[str, Any], device_nbytes: int) -> Any:
    with chunkmem.ChunkManager(config(device_nbytes)) as manager:
        run = Run(rank, size, manager, options)
        losses = []
        for num, epochs in ((1, (0, 1)), (3, (2, 3))):
            run.num_frozen = num
            manager.freeze(run.frozen)
            for epoch in epochs:
                losses += run.epoch(epoch)
        report, counted = None, 0
        if run.cache is not None:
            manager.runtime.ranks.barrier(label="all have kept theirs")
            report = run.cache.report, len(run.cache), run.cache.num_on_disk
            counted = manager.memory().host.by_role["frozen_cache"][0]
            run.cache.close()
            audit(manager)
            assert memory_files() == []
        return copied([losses, manager.state_dict()]), report, counted


@pytest.fixture(scope="module")
def without_cache() -> Callable[[Team, int], list[Any]]:
    """What ranks end with that have no cache, by the number of ranks and the cap."""
    known: dict[tuple[int, int], list[Any]] = {}

    def run(team: Team, device_nbytes: int) -> list[Any]:
        key = team.size, device_nbytes
        if key not in known:
            known[key] = team.run(train, team.size, {}, device_nbytes)
        return known[key]

    return run


@spread(name=list(SIZES), device_nbytes=[AMPLE_NBYTES, 20 << 10])
@pytest.mark.few(1)
def test_ranks_have_one_copy(
    name: str, device_nbytes: int, team: Team, tmp_path: Path, without_cache: Callable[[Team, int], list[Any]]
) -> None:
    options = SIZES[name] | ({"disk": tmp_path} if "disk" in SIZES[name] else {})
    expected = without_cache(team, device_nbytes)
    found = team.run(train, team.size, options, device_nbytes)
    for (one, report, _), (other, *_) in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(value, one[1][key]) for key, value in other[1].items())
        assert report[1:] == found[0][1][1:]
    assert sum(counted for *_, counted in found) == options["host"], "the shares of all ranks are what there is"
    num, on_disk = found[0][1][1:]
    assert num - on_disk <= options["host"] // VALUE_NBYTES
    reports = [report[0] for _, report, _ in found]
    if name in ("all on HOST", "HOST and DISK"):
        assert num == NUM_SAMPLES
        assert sum(each.num_found for each in reports) == 2 * NUM_SAMPLES
        assert sum(each.num_of_others for each in reports) > 0, "samples went to other ranks in the second epoch"
        assert all(f"by other ranks of {team.size})" in str(each) for each in reports)
    if name == "a few on DISK":
        assert (num, on_disk) == (14, 8)
    assert list(tmp_path.iterdir()) == []


def train_on_a_full_disk(rank: int, *how: Any) -> Any:
    def fallocate(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank:  # the first one has room
            patch.setattr(SystemCalls, "fallocate", fallocate)
        found, *_ = train(rank, *how)
    return found, sum("the disk is full" in str(each.message) for each in caught)


def test_a_rank_whose_disk_is_full_computes(
    team: Team, tmp_path: Path, without_cache: Callable[[Team, int], list[Any]]
) -> None:
    options = SIZES["HOST and DISK"] | {"disk": tmp_path}
    expected = without_cache(team, AMPLE_NBYTES)
    found = team.run(train_on_a_full_disk, team.size, options, AMPLE_NBYTES)
    for (one, _), (other, *_) in zip(found, expected, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(value, one[1][key]) for key, value in other[1].items())
    assert [num for _, num in found] == [0] + [1] * (team.size - 1)


def train_and_die(rank: int, size: int, folder: Path, where: str) -> str:
    keys = config(AMPLE_NBYTES, distributed={"timeout_s": 30.0})
    with chunkmem.ChunkManager(keys) as manager, pytest.MonkeyPatch.context() as patch:
        run = Run(rank, size, manager, {"host": 3 * VALUE_NBYTES, "disk": folder, "disk_capacity": 1 << 16})
        run.num_frozen = 1
        manager.freeze(run.frozen)
        maps = Path("/proc/self/maps").read_text().replace("/dev/shm/sem.", "")  # those of multiprocessing
        assert "/dev/shm/" not in maps, "what is shared has no name there"
        assert memory_files() != []
        if rank == 1:
            num_calls = itertools.count()
            owner, name = {"keeping": (SharedIndex, "put"), "computing": (nn.Tanh, "forward")}[where]
            usual = getattr(owner, name)

            def die(*args: Any) -> Any:
                if next(num_calls) == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
                return usual(*args)

            patch.setattr(owner, name, die)
        with pytest.raises(chunkmem.RankError) as caught:
            run.epoch(0)
        return str(caught.value)


@pytest.mark.parametrize("where", ["keeping", pytest.param("computing", marks=pytest.mark.full)])
def test_nothing_is_left_of_ranks_that_are_killed(where: str, pair: Team, tmp_path: Path) -> None:
    said, _ = pair.run(train_and_die, 2, tmp_path, where, lost=[1], timeout_s=120)
    assert "rank 1" in said
    assert list(tmp_path.iterdir()) == []


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("a sample that this module does not like")
        result: Tensor = self.inner(x)
        return result


def raise_on_one(rank: int, where: str) -> tuple[str, str]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = nn.Sequential(Picky(), nn.Linear(WIDTH, WIDTH))
        manager.freeze(model)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        first = cache(model, together([rank]), [rank])
        model[0].raises = where == "module" and rank == 1  # type: ignore[union-attr, assignment]
        x = together([rank]) + (where == "sample" and rank == 1)
        try:
            for ids in ([rank], [rank + 2], [rank + 4]):
                cache(model, x if ids == [rank] else together(ids), ids)
        except Exception as error:
            values: Any = cache._values
            assert not values._lock._threads.locked()
            found = values.find(AskedSamples([rank], [zlib.crc32(sample(rank).numpy())], cache._asked_tags))
            assert torch.equal(found.values, first), "what was there is there still"
            return type(error).__name__, str(error)
        return "", ""


@pytest.mark.parametrize("where", ["module", "sample"])
def test_what_one_rank_raises_the_others_hear_of(where: str, pair: Team) -> None:
    others, own = pair.run(raise_on_one, where)
    said = {"module": "does not like", "sample": "sample 1 is not what it was the last time"}[where]
    assert own[0] == {"module": "ValueError", "sample": "StateError"}[where]
    assert said in own[1]
    assert others[0] == "RankError"
    assert "rank 1" in others[1]


def looks_at_weights(rank: int) -> list[int]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager, pytest.MonkeyPatch.context() as patch:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))  # a chunk each
        optimizer = chunkmem.AdamW(model[6:].parameters(), manager=manager, lr=1e-2)
        manager.freeze(model[:6])
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        counts = []
        usual, looked = tags._checksum, [0]

        def checksum(*args: Any) -> int:
            looked[0] += 1
            return usual(*args)

        patch.setattr(tags, "_checksum", checksum)
        for step in range(4):
            if step == 3:
                state = manager.state_dict()  # one weight, which one rank owns
                manager.load_state_dict(state | {"2.weight": state["2.weight"] + 1})
            ids = [2 * rank, 2 * rank + 1]
            h = cache(model[:6], together(ids), ids)
            expected = together(ids)
            with torch.no_grad():
                for module in model[:6]:
                    expected = module(expected)
            assert torch.equal(h, expected)
            manager.backward(model[6:](h).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(looked[0])
        return [*counts, cache.report.num_found, cache.report.num_computed]


def test_weights_are_looked_at_when_they_have_changed(pair: Team) -> None:
    for first, second, third, fourth, *report in pair.run(looks_at_weights):
        assert first == second == third < fourth
        assert report == [4, 4]


def over_other_stages(rank: int, folder: Path) -> Any:
    """Cache what the first stage of two makes, divide again, and look for it on both ranks."""
    change = Change(StagedTask(sizes=(2, 1)), stages=1)
    training = Training(change, (2, 1))
    manager, model = training.manager, training.model
    frozen = [model.words, model.blocks[0]]
    words = torch.arange(64).reshape(16, 4) % WORDS
    with manager:
        training.steps(change.batches(rank, (2, 1))[:1])
        manager.freeze(frozen)
        cache = chunkmem.FrozenCache(manager, host=6 * 16 * WORDS_WIDTH, disk=folder, disk_capacity="1MiB")
        made = [cache(frozen, words[at : at + 4], range(at, at + 4)) for at in (0, 4, 8, 12)] if rank == 0 else []
        training.steps(change.batches(rank, (2, 1))[1:3])
        manager.runtime.ranks.stages.barrier(label="all are kept")
        num_on_disk = cache.num_on_disk
        training.pipe = training.pipe.repartition(stages=1)
        audit(manager)
        found = [cache(frozen, words[at : at + 4], range(at, at + 4)) for at in (8 * rank, 8 * rank + 4)]
        training.steps(change.batches(rank, (1, 2))[3:4])
        report = cache.report
        audit(manager)
        counted = manager.memory().host.by_role["frozen_cache"][0]
        cache.close()
        audit(manager)
        assert manager.memory().host.by_role.get("frozen_cache", (0,))[0] == 0
        return made, found, (report.num_found, report.num_computed, report.num_of_others), counted, num_on_disk


def test_it_is_there_after_a_pipeline_is_divided_again(pair: Team, tmp_path: Path) -> None:
    first, second = pair.run(over_other_stages, tmp_path, timeout_s=120)
    for one, other in zip(first[0], [*first[1], *second[1]], strict=True):
        assert torch.equal(one, other)
    assert first[2] == (8, 16, 0)
    assert second[2] == (8, 0, 8), "what stage 0 has computed"
    assert first[3] + second[3] == 6 * 16 * WORDS_WIDTH
    assert first[4] == second[4] == 10
