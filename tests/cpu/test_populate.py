"""RAM that is about to be pinned is there beforehand, made by several threads."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import tqdm

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.runtime import device as device_module
from chunkmem.runtime import populate as populate_module
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.populate import num_cores, populate

NBYTES = (16 << 20) + mmap.PAGESIZE
PAGEMAP = Path("/proc/self/pagemap")

pytestmark = pytest.mark.skipif(not PAGEMAP.exists(), reason="only Linux tells which pages are there")


def num_present(address: int, nbytes: int) -> int:
    """How many pages of a range are in memory."""
    first, count = address // mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE)
    with PAGEMAP.open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * count)
    return sum(entries[8 * at + 7] >> 7 for at in range(count))


@pytest.fixture
def region() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


class Libc:
    """A C library whose `madvise` fails."""

    def __init__(self, error: int) -> None:
        self._error = error

    def madvise(self, *_: object) -> int:
        ctypes.set_errno(self._error)
        return -1


def test_every_page_is_there_afterwards(region: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate_module, "_SPAN_NBYTES", 2 << 20)
    monkeypatch.setattr(populate_module, "num_cores", lambda: 4)
    together, numbers = threading.Barrier(4, timeout=60), itertools.count()
    toucher = populate_module._toucher

    def meeting() -> object:
        """The first four spans are begun before any of them is done, or the barrier breaks."""
        touch = toucher()
        return lambda *span: (next(numbers) < 4 and together.wait(), touch(*span))

    monkeypatch.setattr(populate_module, "_toucher", meeting)
    assert num_present(region.data_ptr(), NBYTES) == 0
    populate(region.data_ptr(), NBYTES)
    assert num_present(region.data_ptr(), NBYTES) == NBYTES // mmap.PAGESIZE
    assert next(numbers) == 9
    assert not region.any()


@pytest.mark.parametrize("libc", [Libc(errno.EINVAL), object()], ids=["unknown advice", "no madvise"])
def test_an_older_system_is_made_to_by_writing(
    region: torch.Tensor, monkeypatch: pytest.MonkeyPatch, libc: object
) -> None:
    """Linux before 5.14 does not know the advice."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: libc)
    populate(region.data_ptr(), NBYTES)
    assert num_present(region.data_ptr(), NBYTES) == NBYTES // mmap.PAGESIZE
    assert not region.any()


def test_pages_are_advised_of_before_they_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """MADV_POPULATE_WRITE of Linux's mman-common.h, and not the advice to read."""
    advised: list[tuple[int, int, int]] = []

    class Noting:
        def madvise(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, advice: int) -> int:
            advised.append((address.value or 0, nbytes.value, advice))
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Noting())
    monkeypatch.setattr(populate_module, "_SPAN_NBYTES", 4096)
    populate(1 << 20, 10_000)
    assert sorted(advised) == [(1 << 20, 4096, 23), ((1 << 20) + 4096, 4096, 23), ((1 << 20) + 8192, 1808, 23)]


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_cores() == os.cpu_count()


def test_what_the_system_refuses_is_not_forced(region: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing where there is no memory left ends the process."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc(errno.ENOMEM))
    populate(region.data_ptr(), NBYTES)
    assert num_present(region.data_ptr(), NBYTES) == 0


class Pinning(ComputeDevice):
    """An accelerator in RAM, whose driver finds pinned memory there or not."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_accelerator = self.is_cuda = True
        self.present: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> int:
        self.present.append((num_present(address, nbytes), -(-nbytes // mmap.PAGESIZE)))
        return 0

    def unpin(self, address: int) -> None:
        return


def new_arena(compute: ComputeDevice, cap_nbytes: int) -> HostArena:
    return HostArena(Ledger(Tier.HOST, cap_nbytes, cap_nbytes), compute)


def test_the_driver_pins_pages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Pinning()
    monkeypatch.setattr(device_module, "_cuda_register", compute.register)
    arena = new_arena(compute, 1 << 30)
    arena.expect(24 << 20)
    arena.alloc("param", 8 << 20)
    assert compute.present == [(6144, 6144)]
    arena.close()


class Registered(Pinning):
    """Its driver knows what is registered, and refuses to register it twice, as CUDA does."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: set[int] = set()

    def register(self, address: int, nbytes: int) -> int:
        self.registered.add(address)
        return 0

    def unpin(self, address: int) -> None:
        self.registered.remove(address)


@pytest.mark.parametrize("is_closed", [True, False])
def test_pinned_memory_is_unpinned_before_it_goes(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a manager that nobody closes: the next mapping at its addresses could not be pinned."""
    compute = Registered()
    monkeypatch.setattr(device_module, "_cuda_register", compute.register)
    arena = new_arena(compute, 1 << 30)
    slabs = [arena.alloc("param", 5000 * step) for step in (1, 2)]
    address = slabs[0].bytes.data_ptr()
    assert address in compute.registered
    if is_closed:
        arena.close()
        assert not compute.registered
    del arena
    gc.collect()
    assert (address in compute.registered) is not is_closed, "somebody still has the slab"
    del slabs
    gc.collect()
    assert not compute.registered


class Refusing(Pinning):
    """Its driver refuses one piece, and keeps the error until somebody asks for it, as CUDA does."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused, self.last_error = refused, 0

    def register(self, address: int, nbytes: int) -> int:
        super().register(address, nbytes)
        self.last_error = 2 if len(self.present) == self.refused else self.last_error
        return self.last_error

    def launch(self, device: torch.device) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("refused", [1, 2, 3, None])
def test_memory_that_the_driver_refuses_to_pin_is_said_and_no_launch_fails_for_it(
    refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Refusing(refused or 0)
    monkeypatch.setattr(device_module, "_cuda_register", compute.register)
    monkeypatch.setattr(device_module, "_cuda_launch", compute.launch)
    arena = new_arena(compute, 1 << 30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slabs = [arena.alloc("param", (8 + index) << 20) for index in range(3)]
    compute.launch(compute.device)  # of the model's
    assert len(caught) == (refused is not None)
    for index, slab in enumerate(slabs, start=1):
        slab.bytes.fill_(index)
    assert [int(slab.bytes.max()) for slab in slabs] == [1, 2, 3]
    assert arena.page_locked_nbytes == sum((8 + i) << 20 for i in range(3) if i + 1 != refused)
    arena.close()


@pytest.mark.parametrize(
    ("is_pinned", "cap_gib", "piece_mib"), [(False, 128, 256), (True, 4, 256), (True, 64, 2048), (True, 512, 4096)]
)
def test_pieces_are_larger_where_they_are_pinned(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool, cap_gib: int, piece_mib: int
) -> None:
    """A piece is mapped as a whole while the model is packed: a small share of the cap."""
    compute = Pinning()
    compute.is_cuda = is_pinned
    reserved: list[int] = []

    def reserve(self: HostArena, nbytes: int, *, slab_nbytes: int) -> None:
        reserved.append(nbytes)
        raise InterruptedError

    monkeypatch.setattr(HostArena, "_reserve", reserve)
    for expected_nbytes in (1 << 40, 100 << 20):
        arena = new_arena(compute, cap_gib << 30)
        arena.expect(expected_nbytes)
        with pytest.raises(InterruptedError):
            arena.alloc("param", 4 << 20)
    assert reserved == [piece_mib << 20, 100 << 20]


class Bar:
    """A progress bar that remembers."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.now, self.is_open = options, 0, True
        Bar.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def update(self, nbytes: int) -> None:
        self.now += nbytes


@pytest.mark.parametrize("is_first", [True, False])
def test_packing_shows_how_far_it_is_on_the_first_rank(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    config = chunkmem.Config.from_dict({"memory": {"device": 1 << 20, "host": 1 << 20}, "default_chunk_size": 200})
    with chunkmem.ChunkManager(config) as manager:
        monkeypatch.setattr(manager.runtime.modules.packer.packer, "shows_progress", is_first)
        with manager.init():
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        del model
    (bar,) = Bar.made
    assert bar.options["disable"] is (None if is_first else True)  # None: only on a terminal
    assert bar.options["delay"] > 1, "what takes no time is not worth a line"
    assert (bar.now, bar.is_open) == (bar.options["total"], False)


def test_packing_leaves_no_lock_of_processes_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm's own lock is a semaphore, and Python warns of one that was leaked when a process is killed."""
    monkeypatch.delattr(tqdm.std.tqdm, "_lock", raising=False)
    monkeypatch.delattr(tqdm.std.TqdmDefaultWriteLock, "mp_lock", raising=False)
    with chunkmem.ChunkManager() as manager:
        before = threading.enumerate()
        with manager.init():
            model = torch.nn.Linear(8, 8)
        del model
        assert threading.enumerate() == before
    assert not hasattr(tqdm.std.TqdmDefaultWriteLock, "mp_lock")


def test_packing_is_silent_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with chunkmem.ChunkManager() as manager:
        with manager.init():
            model = torch.nn.Linear(8, 8)
        del model
    assert "".join(capfd.readouterr()) == ""
