"""The sampling thread: sees what lives within one operator, and is gone on every way out."""

from __future__ import annotations

import contextlib
import gc
import inspect
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from chunkmem import AdamW, ChunkManager, Config
from chunkmem.runtime.device import ComputeDevice
from chunkmem.steps.probe import LiveStorageProbe
from chunkmem.steps.watch import ResidentMemory, SamplingThread, _Samples, reader_for
from tests.helpers.probe_mode import watching

MIB = 2**20
NAME = "chunkmem memory sampler"


@contextlib.contextmanager
def sampling(read: Callable[[], int], period_s: float = 0.001) -> Iterator[SamplingThread]:
    sampler = SamplingThread(read, period_s)
    try:
        yield sampler
    finally:
        sampler.stop()


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert samplers() == []


def wait_until(condition: Callable[[], bool]) -> None:
    """For what another thread will do soon; a busy machine may take its time."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.001)


# What it sees.


def temporary_within_one_operator(nbytes: int) -> Callable[[], None]:
    """An operator of >= 20 ms, in torch and without the GIL, that makes and drops a temporary."""
    x = torch.zeros(8, 1)
    rows = nbytes // 4

    @torch.library.custom_op("chunkmem_test::temporary", mutates_args=())
    def temporary(x: torch.Tensor) -> torch.Tensor:
        big = torch.ones(rows, 1)
        for _ in range(10):
            big.sin_()
        return x + big[0]

    return lambda: temporary(x)


def test_sees_a_temporary_within_one_operator() -> None:
    nbytes = 200 * MIB
    work = temporary_within_one_operator(nbytes)
    read = reader_for(ComputeDevice(torch.device("cpu")))
    with sampling(read) as sampler:
        before = sampler.take_peak_nbytes()
        begin = time.perf_counter()
        work()
        assert time.perf_counter() - begin >= 0.02
        peak, after = sampler.take_peak_nbytes(), sampler.take_peak_nbytes()
    assert peak - before >= 0.95 * nbytes
    assert after - before <= 0.5 * nbytes, "the temporary is gone: without the thread nobody would have seen it"


def hold_until(nbytes: int, enough: Callable[[], bool]) -> Callable[[], None]:
    """An operator with a temporary that lives until `enough` says so, which is first asked when it was written."""
    x = torch.zeros(1)

    @torch.library.custom_op("chunkmem_test::held_temporary", mutates_args=())
    def held(x: torch.Tensor) -> torch.Tensor:
        big = torch.ones(nbytes // 4)
        part = big[: 2**18]
        deadline_s = time.monotonic() + 60
        while not enough():
            assert time.monotonic() < deadline_s, "no sample for a minute"
            part.sin_()
        return x + part[0]

    return lambda: held(x)


def test_sees_what_lives_for_two_samples_within_one_operator_and_the_boundary_probe_does_not() -> None:
    nbytes = 64 * MIB
    resident = reader_for(ComputeDevice(torch.device("cpu")))
    ended, wanted = 0, 0

    def read() -> int:
        nonlocal ended
        found = resident()
        ended += threading.current_thread().name == NAME
        return found

    def two_more() -> bool:  # of which the first may have begun before
        nonlocal wanted
        wanted = wanted or ended + 2
        return ended >= wanted

    hold = hold_until(nbytes, two_more)
    probe = LiveStorageProbe(lambda key: False)
    with watching(probe), sampling(read) as sampler:
        before = sampler.take_peak_nbytes()
        hold()
        share = (sampler.take_peak_nbytes() - before) / nbytes
        assert probe.take_peak_nbytes() < MIB, "made and dropped within the operator"
    assert share >= 0.95


def test_a_sample_is_taken_every_few_milliseconds() -> None:
    assert inspect.signature(SamplingThread).parameters["period_s"].default <= 0.005


def test_the_longest_interval_is_from_the_begin_of_a_sample_to_the_end_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    #  0     5  7     9 10     11     21
    # [-]    [--]     [-]      [-------]    samples; when the first one ended does not matter
    #  |------ 7
    #        |---------- 5
    #                 |-------------- 12
    clock = iter([0.0, 5.0, 7.0, 9.0, 10.0, 11.0, 21.0])
    monkeypatch.setattr("chunkmem.steps.watch.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    samples = _Samples(lambda: 1)
    found = []
    for _ in range(4):
        samples.take_peak_nbytes()
        found.append(samples.longest_interval_s)
    assert found == [0, 7, 7, 12]


def test_the_longest_interval_counts_the_threads_samples() -> None:
    with sampling(lambda: 1, period_s=1e-4) as sampler:
        wait_until(lambda: sampler.longest_interval_s >= 1e-4)


def test_the_longest_interval_stays_after_the_end() -> None:
    with sampling(lambda: 1, period_s=3600) as sampler:
        sampler.take_peak_nbytes()
    assert sampler.longest_interval_s > 0


@pytest.mark.parametrize("sampled", [True, False])
def test_a_recorded_trace_tells_the_interval(sampled: bool) -> None:
    values = {"client": {"mem_tracer": {"use_async_mem_monitor": sampled}}, "memory": {"device": MIB, "host": MIB}}
    batch = torch.ones(2, 8, device="cuda" if torch.cuda.is_available() else "cpu")
    with ChunkManager(Config.from_dict(values)) as manager:
        model = manager.wrap(torch.nn.Linear(8, 8))
        optimizer = AdamW(model.parameters(), manager=manager)
        began_s = time.perf_counter()
        model(batch).sum().backward()
        optimizer.step()
        took_s = time.perf_counter() - began_s
        with torch.no_grad():
            model(batch)  # only now is the step over for good
        assert manager.trace is not None
        if sampled:
            assert 0 < manager.trace.sampling_interval_s <= took_s
        else:
            assert manager.trace.sampling_interval_s == 0


def test_the_highest_of_each_interval() -> None:
    # level     1  9  2        3
    #              ^sampled    ^taken by the caller
    level, calls = 1, 0

    def read() -> int:
        nonlocal calls
        calls += 1
        return level

    with sampling(read) as sampler:
        level, at = 9, calls
        wait_until(lambda: calls > at + 1)
        level = 2
        assert sampler.take_peak_nbytes() == 9
        assert sampler.take_peak_nbytes() == 2
        at = calls
        wait_until(lambda: calls > at + 1)
        level = 3
        assert sampler.take_peak_nbytes() == 3
        level = 1
        assert sampler.take_peak_nbytes() == 3, "the interval began with it"
        assert sampler.take_peak_nbytes() == 1


def test_the_callers_own_sample_needs_no_thread() -> None:
    values = iter([5, 7, 6, 4])
    with sampling(lambda: next(values), period_s=3600) as sampler:  # reads 5
        assert sampler.take_peak_nbytes() == 7
    assert sampler.take_peak_nbytes() == 7  # reads 6; the interval began with 7
    assert sampler.take_peak_nbytes() == 6  # reads 4


def test_many_threads_may_take() -> None:
    # Each value is read once, counting up, so whatever is taken is the newest: no thread may see them go down.
    count = 0

    def read() -> int:
        nonlocal count
        now = count + 1
        time.sleep(0)  # invites another thread in between: without the lock, values would repeat
        count = now
        return now

    taken: dict[int, list[int]] = {index: [] for index in range(4)}
    with sampling(read, period_s=1e-5) as sampler:
        threads = [
            threading.Thread(target=lambda own=own: own.extend(sampler.take_peak_nbytes() for _ in range(200)))
            for own in taken.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    together = [value for own in taken.values() for value in own]
    assert len(set(together)) == len(together) == 800
    assert all(own == sorted(own) for own in taken.values())


# The ways out.


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_joined_after_an_exception(error: type[BaseException]) -> None:
    with pytest.raises(error), sampling(lambda: 1):
        assert len(samplers()) == 1
        assert samplers()[0].daemon
        raise error
    assert samplers() == []


def test_stop_is_prompt_and_may_be_repeated() -> None:
    sampler = SamplingThread(lambda: 1, period_s=3600)
    sampler.stop()
    sampler.stop()
    assert samplers() == []


def failing_after(samples: int) -> Callable[[], int]:
    """Fails in the thread only: the caller's own samples are fine."""

    def read() -> int:
        if threading.current_thread().name == NAME:
            calls.append(1)
            if len(calls) > samples:
                raise OSError("cannot read")
        return 1

    calls: list[int] = []
    return read


@pytest.mark.parametrize("by", ["take_peak_nbytes", "stop"])
def test_an_error_of_the_reader_is_raised_once(by: str) -> None:
    sampler = SamplingThread(failing_after(3))
    wait_until(lambda: samplers() == [])
    with pytest.raises(OSError, match="cannot read"):
        getattr(sampler, by)()
    assert sampler.take_peak_nbytes() == 1
    sampler.stop()


def test_an_error_of_the_reader_comes_out_of_the_block() -> None:
    with pytest.raises(OSError, match="cannot read"), sampling(failing_after(0)):
        wait_until(lambda: samplers() == [])


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            SamplingThread(lambda: 1)
    with sampling(lambda: 1):
        assert len(samplers()) == 1


def test_a_dropped_sampler_ends_its_thread() -> None:
    sampler = SamplingThread(lambda: 1)
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    assert gone() is None
    wait_until(lambda: samplers() == [])


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a forked child that runs `work`: 0 in order, 1 after an error, 2 if it took too long."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_neither_waits_nor_hangs() -> None:
    # The parent's thread is in the middle of a sample, holding the lock, when the child is made; the child has no
    # such thread that could ever release it.
    inside, go_on = threading.Event(), threading.Event()

    def read() -> int:
        if threading.current_thread().name == NAME:
            inside.set()
            go_on.wait(60)
        return 3

    def child() -> None:
        assert sampler.take_peak_nbytes() == 3
        sampler.stop()
        sampler.stop()
        with sampling(lambda: 1) as fresh:
            assert len(samplers()) == 1
            assert fresh.take_peak_nbytes() == 1
        assert samplers() == []

    with sampling(read) as sampler:
        assert inside.wait(60)
        code = in_child(child)
        go_on.set()
    assert code == 0


# The readers.


def test_resident_memory_follows_what_is_touched() -> None:
    read = ResidentMemory()
    before = read()
    region = mmap.mmap(-1, 64 * MIB)
    for page in range(0, len(region), mmap.PAGESIZE):
        region[page] = 1
    full = read()
    region.close()
    # The kernel sums its counters per processor now and then, so a few pages may be missing.
    assert full - before == pytest.approx(64 * MIB, abs=4 * MIB)
    assert read() - before <= 4 * MIB
    assert full == pytest.approx(psutil.Process().memory_info().rss + 64 * MIB, abs=8 * MIB)


def test_resident_memory_without_proc(tmp_path: Path) -> None:
    read = ResidentMemory(str(tmp_path / "statm"))
    assert read() == pytest.approx(psutil.Process().memory_info().rss, abs=8 * MIB)
    read.close()


@pytest.mark.parametrize("way", ["close", "drop"])
def test_resident_memory_gives_its_file_back(way: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read = ResidentMemory()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    if way == "close":
        read.close()
        read.close()
        assert read() > 0
    else:
        del read
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_reader_of_each_device() -> None:
    assert isinstance(reader_for(ComputeDevice(torch.device("cpu"))), ResidentMemory)
    accelerator: Any = SimpleNamespace(is_accelerator=True, used_nbytes=lambda: 42)
    assert reader_for(accelerator)() == 42
