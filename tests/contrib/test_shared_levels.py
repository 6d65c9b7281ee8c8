"""Values that processes have: as those in ordinary memory, never read by half, and gone with the last of them."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import chunkmem
from chunkmem.contrib.frozen_cache import joining
from chunkmem.contrib.frozen_cache.joining import Wanted, open_values
from chunkmem.contrib.frozen_cache.kept import AskedSamples, Found, Kept
from chunkmem.contrib.frozen_cache.shared_index import HEADER_NBYTES, SharedIndex
from chunkmem.contrib.frozen_cache.shared_levels import SharedDisk, SharedLevels
from chunkmem.contrib.frozen_cache.shared_memory import ProcessLock, SharedFile
from chunkmem.runtime.disk_file import SYSTEM_CALLS, DiskFile
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.twins import AMPLE_NBYTES, config

NUMEL = 1024
VALUE_NBYTES = 4 * NUMEL
"""A multiple of what files are aligned to: both kinds of levels then have room for the same number."""
TAGS = (b"first module....", b"second module...")


def asked(keys: list[Any], *, num_modules: int = 1) -> AskedSamples:
    return AskedSamples(keys, [hash(key) & 0xFF for key in keys], TAGS[:num_modules])


def rows(keys: list[int], *, depth: int = 1, numel: int = NUMEL) -> torch.Tensor:
    """All elements of a value are the same: one that is read by half shows."""
    return torch.tensor([[float(1000 * depth + key)] for key in keys]).repeat(1, numel)


def alone(manager: chunkmem.ChunkManager, host: int, folder: Path | None, disk: int, num: int = 1) -> SharedLevels:
    """The levels of several processes, of which there is one."""
    files = [SharedFile() for _ in range(3)]
    files[0].resize(host)
    files[1].resize(HEADER_NBYTES)
    file = None if folder is None else DiskFile(folder, nbytes=disk, calls=SYSTEM_CALLS)
    pager = manager.runtime.memory.pager
    shared = None if file is None else SharedDisk(file, disk)
    return SharedLevels(pager, files, shared, rank=0, num_ranks=num, host_nbytes=host, timeout_s=5)


@pytest.fixture
def manager() -> Iterator[chunkmem.ChunkManager]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as found:
        yield found


class PlainLevels:
    """The same in ordinary memory, by the rules alone: what was used least recently on each level gives way."""

    def __init__(self, host_room: int, disk_room: int) -> None:
        self._rooms = host_room, disk_room
        self._levels = OrderedDict[Any, Any](), OrderedDict[Any, Any]()

    def find(self, asked: AskedSamples) -> Found:
        levels = [next((level for level in self._levels if key in level), {}) for key in asked.keys]
        entries = [level.get(key) for level, key in zip(levels, asked.keys, strict=True)]
        depths = {asked.depth_of(at, None if entry is None else entry[0]) for at, entry in enumerate(entries)}
        if len(depths) > 1 or depths == {0}:
            return Found(asked)
        for level, key in zip(levels, asked.keys, strict=True):
            level.move_to_end(key)  # type: ignore[attr-defined]
        return Found(asked, depths.pop(), torch.stack([entry[1] for entry in entries]))

    def keep(self, asked: AskedSamples, rows: torch.Tensor) -> None:
        (host, disk), (host_room, disk_room) = self._levels, self._rooms
        for key, crc, row in zip(asked.keys, asked.crcs, rows, strict=True):
            was_there = host.pop(key, None) is not None
            disk.pop(key, None)
            below = [(key, (Kept(len(asked.tags), crc, asked.tags[-1]), row))]
            if was_there or len(host) < host_room or host:
                below = [host.popitem(last=False)] if not was_there and len(host) == host_room else []
                host[key] = Kept(len(asked.tags), crc, asked.tags[-1]), row
            for old, entry in below if disk_room else ():
                if len(disk) == disk_room:
                    disk.popitem(last=False)
                disk[old] = entry

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    @property
    def num_on_disk(self) -> int:
        return len(self._levels[1])


def looked_up(values: SharedLevels | PlainLevels, keys: list[int]) -> tuple[int, Any]:
    """How far samples have come, and the elements of their values."""
    found = values.find(asked(keys, num_modules=2))
    return found.depth, None if found.values is None else found.values.tolist()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "find", "keep more"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True),
    ),
    max_size=30,
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("host", "disk"), [(4, None), (3, 4), (0, 5), pytest.param(1, 1, marks=pytest.mark.full), (12, 0)]
)
@settings(max_examples=30, phases=[Phase.generate], deadline=None)
@given(operations=OPERATIONS)
def test_they_are_as_those_in_ordinary_memory(
    host: int, disk: int | None, operations: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = None if disk is None else tmp_path_factory.mktemp("disk")
    sizes = max(64, host * VALUE_NBYTES), folder, (disk or 0) * VALUE_NBYTES
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        both = [PlainLevels(host, disk or 0), shared := alone(manager, *sizes)]
        for kind, keys in operations:
            for values in both if kind != "find" else ():
                depth = 1 + (kind == "keep more")
                values.keep(asked(keys, num_modules=depth), rows(keys, depth=depth))
            assert looked_up(both[0], keys) == looked_up(both[1], keys)
            assert len(both[0]) == len(both[1])
            assert both[0].num_on_disk == both[1].num_on_disk
            for key in range(12):
                assert looked_up(both[0], [key]) == looked_up(both[1], [key])
        shared.close()


def test_values_of_another_form_take_the_place_of_all(manager: chunkmem.ChunkManager, tmp_path: Path) -> None:
    values = alone(manager, 4 * VALUE_NBYTES, tmp_path, 8 * VALUE_NBYTES)
    values.keep(asked([*range(12)]), rows([*range(12)]))
    assert (len(values), values.num_on_disk) == (12, 8)
    values.keep(asked([*range(40)]), rows([*range(40)], numel=NUMEL // 4))
    assert (len(values), values.num_on_disk) == (4 * 4 + 8, 8), "files have places of whole blocks"
    found = values.find(asked([38, 39])).values
    assert found is not None
    assert torch.equal(found, rows([38, 39], numel=NUMEL // 4))
    values.keep(asked([1]), torch.zeros(1, 0))
    assert values.find(asked([1])).depth == len(values) == 0


def test_what_is_forgotten_is_given_back(manager: chunkmem.ChunkManager, tmp_path: Path) -> None:
    gc.collect()  # what other tests have left
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    values = alone(manager, 4 * VALUE_NBYTES, tmp_path, 4 * VALUE_NBYTES)
    values.keep(asked([*range(6)]), rows([*range(6)]))
    chunk = values._memory.chunk
    del values
    manager.runtime.memory.store.remove(chunk)
    del chunk
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


@pytest.mark.parametrize("where", ["put", "_cut", "clear", "remove"])
def test_a_change_that_was_not_completed_is_forgotten(
    where: str, manager: chunkmem.ChunkManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = alone(manager, 4 * VALUE_NBYTES, None, 0)
    if where != "clear":
        values.keep(asked([1, 2, 3, 4]), rows([1, 2, 3, 4]))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedIndex, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            values.keep(asked([5]), rows([5]))
    assert len(values) == values.find(asked([1])).depth == 0
    values.keep(asked([6, 7]), rows([6, 7]))
    found = values.find(asked([7, 6])).values
    assert found is not None
    assert torch.equal(found, rows([7, 6]))
    assert len(values) == 2


def test_ids_are_the_same_in_all_processes(manager: chunkmem.ChunkManager) -> None:
    import numpy

    values = alone(manager, 8 * VALUE_NBYTES, None, 0, num=2)
    keys: list[Any] = [3, "3", b"3", (3, "a"), (3, ("a",))]
    values.keep(asked(keys), rows([*range(5)]))
    assert [bool(values.find(asked([key])).depth) for key in keys] == [True] * 5
    assert len(values) == 5
    assert values.find(AskedSamples([numpy.int64(3)], [hash(3) & 0xFF], TAGS[:1])).depth == 1
    with pytest.raises(chunkmem.ConfigError, match="a float; over ranks, ids are whole numbers"):
        values.find(asked([0.5]))


def test_one_process_has_ids_of_any_kind(manager: chunkmem.ChunkManager) -> None:
    values = alone(manager, 8 * VALUE_NBYTES, None, 0)
    keys: list[Any] = [0.5, frozenset("ab"), 7, ("a", 0.5), 1.5]
    values.keep(asked(keys), rows([*range(5)]))
    for at, key in enumerate([0.5, frozenset("ba"), 7.0, ("a", 0.5), 1.5]):
        found = values.find(AskedSamples([key], [hash(keys[at]) & 0xFF], TAGS[:1])).values
        assert found is None if at == 2 else torch.equal(found, rows([at]))  # type: ignore[arg-type]


def test_a_lock_that_is_not_given_back(tmp_path: Path) -> None:
    file = SharedFile()
    ready, over = os.pipe(), os.pipe()
    if not (child := os.fork()):
        other = ProcessLock(SharedFile(f"/proc/{os.getppid()}/fd/{file.descriptor}"), timeout_s=5)
        with other.held(alone=True):
            os.write(ready[1], b".")
            os.read(over[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    lock = ProcessLock(file, timeout_s=0.05)
    for is_alone in (True, False):
        with pytest.raises(chunkmem.RankError, match="has used the cache for 0 s"), lock.held(alone=is_alone):
            pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock.held(alone=True):  # the system has taken it from the child
        pass
    file.close()


# Several processes.


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    found = Team(request.param)
    yield found
    found.close()


def hammer(rank: int, folder: Path, num_rounds: int, killed: str) -> list[int]:
    """Keep and look for values at random; one rank is killed half way."""
    draw = random.Random(rank)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        wanted = Wanted(6 * VALUE_NBYTES, folder, 6 * VALUE_NBYTES)
        values = open_values(manager.runtime, wanted)
        maps = Path("/proc/self/maps").read_text().replace("/dev/shm/sem.", "")  # those of multiprocessing
        assert "/dev/shm/" not in maps, "what is shared has no name there"
        num_found = num_of_others = 0
        for number in range(num_rounds):
            keys = draw.sample(range(16), 3)
            found = values.find(asked(keys))
            if found.depth:
                assert found.values is not None
                assert torch.equal(found.values, rows(keys)), "a value is of another sample, or read by half"
                num_found, num_of_others = num_found + 3, num_of_others + found.num_of_others
            if killed and rank == 1 and number == num_rounds // 2:
                die_in(killed)
            values.keep(asked(keys), rows(keys))
            time.sleep(1e-3 * draw.random())  # else one rank might be through before the others have begun
            assert len(values) <= 12
            assert values.num_on_disk <= 6
        if not killed:
            manager.runtime.ranks.barrier(label="all are done")
        return [num_found, num_of_others]


def die_in(where: str) -> None:
    """Have this process killed the next time it comes there."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "between calls":
        die()
    setattr(SharedIndex if hasattr(SharedIndex, where) else SharedDisk, where, die)


@pytest.mark.few(1)
@pytest.mark.parametrize("killed", ["", "put", "between calls", pytest.param("write", marks=pytest.mark.full)])
def test_many_ranks_at_once(killed: str, team: Team, tmp_path: Path) -> None:
    lost = {1} if killed else set()
    found = team.run(hammer, tmp_path, 200, killed, lost=lost)
    for rank, counts in enumerate(found):
        if rank not in lost:
            num_found, num_of_others = counts
            assert 0 < num_of_others < num_found
    assert list(tmp_path.iterdir()) == []


def different(rank: int, folder: Path, case: str) -> Any:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        pool = manager.runtime.tiers.host_pool
        others = [pool.alloc("test", AMPLE_NBYTES - 128)] if case == "room" and rank == 1 else []
        host = 4 * VALUE_NBYTES + 64 * rank * (case == "sizes")
        if case == "folder":
            folder = folder / "file"
            folder.touch()
        try:
            chunkmem.FrozenCache(manager, host=host, disk=folder, disk_capacity=1 << 16)
        except chunkmem.ChunkmemError as error:
            said = f"{type(error).__name__}: {error}"
        for slab in others:
            pool.free("test", slab)
        cache = chunkmem.FrozenCache(manager, host=4 * VALUE_NBYTES)
        counted = manager.memory().host.by_role["frozen_cache"][0]
        cache.close()
        return said, counted


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("sizes", r"ConfigError.*ask for host=16384, .* and for host=16448", r"ConfigError.*ask for host=16384"),
        ("folder", r"ConfigError.*FrozenCache: disk", r"StateError.*another rank refuses: ConfigError"),
        ("room", r"StateError.*another rank refuses: CapacityError", r"CapacityError|another rank refuses"),
    ],
)
def test_what_one_rank_refuses_all_raise(case: str, first: str, second: str, team: Team, tmp_path: Path) -> None:
    found = team.run(different, tmp_path, case)
    for rank, (said, counted) in enumerate(found):
        assert re.search(second if rank else first, said)
        assert counted == 4 * VALUE_NBYTES // team.size


def apart(rank: int, folder: Path) -> Any:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager, pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # as in a container of its own, which sees other processes
            usual = joining.identity_at
            patch.setattr(joining, "identity_at", lambda path: usual("/proc/self"))
        cache = chunkmem.FrozenCache(manager, host=4 * VALUE_NBYTES, disk=folder, disk_capacity=1 << 16)
        cache._values.keep(asked([rank]), rows([rank]))
        assert cache._values.find(asked([1 - rank])).depth == 0
        assert cache.report.num_ranks == 1
        counted = manager.memory().host.by_role["frozen_cache"][0]
        cache.close()
        audit(manager)
        return counted


def test_ranks_that_do_not_see_each_other_have_a_share_each(team: Team, tmp_path: Path) -> None:
    assert team.run(apart, tmp_path) == [4 * VALUE_NBYTES // team.size] * team.size


def on_machines(rank: int, folder: Path) -> Any:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "one" if rank == 0 else "two")
        cache = chunkmem.FrozenCache(manager, host=4 * VALUE_NBYTES, disk=folder, disk_capacity=1 << 16)
        counted = manager.memory().host.by_role["frozen_cache"][0]
        cache.close()
        return cache.report.num_ranks, counted


def test_each_machine_has_a_copy(team: Team, tmp_path: Path) -> None:
    (num, counted), *others = team.run(on_machines, tmp_path)
    assert (num, counted) == (1, 4 * VALUE_NBYTES)
    assert [each[0] for each in others] == [team.size - 1] * (team.size - 1)
    assert sum(each[1] for each in others) <= 4 * VALUE_NBYTES < sum(each[1] for each in others) + 64
