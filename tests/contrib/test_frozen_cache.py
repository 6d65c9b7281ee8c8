"""What frozen layers make of a sample is found again, to the bit, or it is refused with the reason."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.runtime.disk_file import SystemCalls
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, Blocks, assert_equal, config, copied

NUM_SAMPLES, BATCH = 24, 4
VALUE_NBYTES = WIDTH * 4


def sample(number: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def order(epoch: int) -> list[list[int]]:
    shuffled = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [shuffled[at : at + BATCH] for at in range(0, NUM_SAMPLES, BATCH)]


class Run:
    """Training with some blocks frozen."""

    def __init__(self, manager: chunkmem.ChunkManager, **options: Any) -> None:
        torch.manual_seed(SEED)
        self.manager = manager
        with manager.init():
            self.model: Any = Blocks(num_blocks=6)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, lr=1e-2)
        self.cache = chunkmem.FrozenCache(manager, **options) if options else None
        self.num_frozen = 0

    def freeze(self, num: int) -> None:
        self.num_frozen = num
        self.manager.freeze(self.frozen)

    @property
    def frozen(self) -> list[nn.Module]:
        return [self.model.inner, *self.model.blocks[: self.num_frozen]]

    def epoch(self, number: int) -> list[float]:
        losses = []
        for ids in order(number):
            x = torch.stack([sample(each) for each in ids])
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


SIZES: dict[str, dict[str, Any]] = {
    "all on HOST": {"host": NUM_SAMPLES * VALUE_NBYTES},
    "some on HOST": {"host": 10 * VALUE_NBYTES},
    "HOST and DISK": {"host": 10 * VALUE_NBYTES, "disk": True},
    "a few on DISK": {"host": 6 * VALUE_NBYTES, "disk": True, "disk_capacity": 8 * 4096},
}


def run(tmp_path: Path, device_nbytes: int, options: dict[str, Any]) -> tuple[Any, Any]:
    options = {**options, "disk": tmp_path} if options.get("disk") else options
    with chunkmem.ChunkManager(config(device_nbytes)) as manager:
        training = Run(manager, **options)
        training.freeze(2)
        losses = [*training.epoch(0), *training.epoch(1)]
        training.freeze(4)
        losses += [*training.epoch(2), *training.epoch(3)]
        report = None if training.cache is None else (training.cache.report, len(training.cache))
        found = losses, copied(manager.state_dict())
        if training.cache is not None:
            assert manager.memory().host.by_role["frozen_cache"][0] == options["host"]
            training.cache.close()
            audit(manager)
    return found, report


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("device_nbytes", [AMPLE_NBYTES, pytest.param(20 << 10, marks=pytest.mark.full)])
def test_losses_are_those_without_it(name: str, device_nbytes: int, tmp_path: Path) -> None:
    expected, _ = run(tmp_path, device_nbytes, {})
    found, report = run(tmp_path, device_nbytes, SIZES[name])
    assert_equal(found, expected)
    assert report is not None
    assert report[1] <= NUM_SAMPLES
    if name in ("all on HOST", "HOST and DISK"):
        assert (report[0].num_found, report[0].num_computed) == (2 * NUM_SAMPLES, 2 * NUM_SAMPLES)
        assert report[1] == NUM_SAMPLES


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        result: Tensor = self.inner(x)
        return result


def frozen_chain(manager: chunkmem.ChunkManager, *modules: nn.Module) -> list[Counting]:
    with manager.init():
        chain = [Counting(module) for module in modules or [nn.Linear(WIDTH, WIDTH) for _ in range(3)]]
        root = nn.Sequential(*chain)
    manager.freeze(root)
    return list(root)  # type: ignore[arg-type]


X = torch.stack([sample(number) for number in range(BATCH)])
IDS = list(range(BATCH))


def test_more_modules_begin_where_fewer_had_ended() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        assert (len(cache), bool(cache)) == (0, True)  # `if cache:` asks whether there is one
        first = cache(chain[:1], X, IDS)
        assert torch.equal(cache(chain[:1], X, IDS), first)
        whole = cache(chain, X, torch.tensor(IDS))
        assert [module.num_calls for module in chain] == [1, 1, 1]
        assert torch.equal(cache(chain, X, IDS), whole)
        assert [module.num_calls for module in chain] == [1, 1, 1]
        assert torch.equal(whole, chain[2](chain[1](first)))
        assert torch.equal(cache(nn.ModuleList(chain), X, IDS), whole)
        assert not whole.requires_grad
        assert str(cache.report) == "12 samples from the cache, 8 computed"


def test_samples_that_have_come_to_different_modules() -> None:
    """One was met again before the others: what there is of it is not what fewer modules have made."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        cache(chain[:1], X, IDS)
        cache(chain, X[:1], IDS[:1])
        expected = chain[2](chain[1](chain[0](X)))
        for _ in range(2):
            assert torch.equal(cache(chain, X, IDS), expected)
        assert [module.num_calls for module in chain] == [3, 3, 3]


def test_fewer_modules_begin_again() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        cache(chain, X, IDS)
        assert torch.equal(cache(chain[:1], X, IDS), chain[0](X))


@pytest.mark.parametrize("how", ["load_state_dict", "gather", "training"])
def test_other_weights_are_noticed(how: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        before = cache(chain, X, IDS)
        if how == "load_state_dict":
            manager.load_state_dict({k: v + 1 for k, v in manager.state_dict().items()})
        elif how == "gather":
            with manager.gather(chain[1]):
                chain[1].inner.weight.data.mul_(2)  # type: ignore[union-attr, operator]
        else:
            manager.unfreeze(chain[0])
            optimizer = chunkmem.AdamW(chain[0].parameters(), manager=manager, lr=0.1)
            chain[0](X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.freeze(chain[0])
        after = cache(chain, X, IDS)
        assert not torch.equal(before, after)
        assert torch.equal(after, chain[2](chain[1](chain[0](X))))


def test_another_sample_of_the_same_name_is_refused() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        cache(chain, X, IDS)
        with pytest.raises(chunkmem.StateError, match="sample 2 is not what it was the last time: with augmentation"):
            cache(chain, X + torch.tensor([0, 0, 1e-3, 0])[:, None], IDS)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)), "drops values at random"),
        (nn.BatchNorm1d(WIDTH), "collects statistics"),
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), Noise()), "draw random numbers"),
    ],
    ids=["dropout", "batch norm", "noise"],
)
def test_what_is_no_function_of_the_sample_is_refused(module: nn.Module, said: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager, module)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        with pytest.raises(chunkmem.StateError, match=said):
            cache(chain, X, IDS)
        if said != "draw random numbers":
            chain[0].eval()
            assert torch.equal(cache(chain, X, IDS), cache(chain, X, IDS))


def test_what_is_trained_is_refused() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        manager.unfreeze(chain[1])
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        with pytest.raises(chunkmem.StateError, match=r"inner.weight of module 1 \(Counting\) is trained"):
            cache(chain, X, IDS)


def test_ids_are_one_a_sample() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        with pytest.raises(chunkmem.ConfigError, match="3 ids for 4 samples"):
            cache(chain, X, IDS[:3])


def test_a_batch_without_samples() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        chain = frozen_chain(manager)
        cache = chunkmem.FrozenCache(manager, host=NUM_SAMPLES * VALUE_NBYTES)
        assert cache(chain, X[:0], []).shape == (0, WIDTH)
        assert len(cache) == 0


def test_host_has_to_have_room(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        frozen_chain(manager)
        with pytest.raises(chunkmem.CapacityError):
            chunkmem.FrozenCache(manager, host=2 * AMPLE_NBYTES)
        with pytest.raises(chunkmem.ConfigError):
            chunkmem.FrozenCache(manager, host="many")
        with pytest.raises(chunkmem.ConfigError, match="host is 0 bytes; give at least 64"):
            chunkmem.FrozenCache(manager, host=0)
        with pytest.raises(chunkmem.ConfigError, match="FrozenCache: disk_capacity"):
            chunkmem.FrozenCache(manager, host=1024, disk=tmp_path / "folder", disk_capacity="1EiB")
        (tmp_path / "file").touch()
        with pytest.raises(chunkmem.ConfigError, match="FrozenCache"):
            chunkmem.FrozenCache(manager, host=1024, disk=tmp_path / "file")
        audit(manager)
        chunkmem.FrozenCache(manager, host=1024).close()
        audit(manager)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_written", [0, 3])
def test_a_full_disk_is_said_once_and_the_rest_is_computed(
    num_written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run(tmp_path, AMPLE_NBYTES, {})
    real, count = SystemCalls.fallocate, itertools.count()

    def fallocate(self: SystemCalls, descriptor: int, offset: int, nbytes: int) -> None:
        if next(count) >= num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, descriptor, offset, nbytes)

    monkeypatch.setattr(SystemCalls, "fallocate", fallocate)
    with pytest.warns(UserWarning, match=r"FrozenCache: the disk is full; .*lower disk_capacity") as caught:
        found, (report, num_kept) = run(tmp_path, AMPLE_NBYTES, SIZES["HOST and DISK"])
    assert_equal(found, expected)
    assert len([each for each in caught if "FrozenCache" in str(each.message)]) == 1
    assert report.num_computed > NUM_SAMPLES
    assert 10 <= num_kept <= 10 + num_written


def test_a_disk_that_fails_is_no_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        training = Run(manager, host=10 * VALUE_NBYTES, disk=tmp_path, disk_capacity="1MiB")
        training.freeze(2)
        monkeypatch.setattr(SystemCalls, "pwritev", pwritev)
        with pytest.raises(chunkmem.TierIOError, match="EIO"):
            training.epoch(0)
