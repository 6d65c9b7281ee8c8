"""`chunkmem estimate` with a third tier below HOST."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.estimate.changes import raised_caps
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.models import resolve_model
from chunkmem.estimate.question import Question, device_need, disk_need, find, fits, step_range_s
from chunkmem.plan.model import Lane
from tests.helpers.estimate_command import asked, assert_refused

MLP = "tests.helpers.estimated:mlp"
CHUNK_NUMEL = 4160
CHUNK = 4 * CHUNK_NUMEL
"""A block's weights: six groups of four such chunks."""
SMALL = (MLP, "--device", "96KiB", "--chunk-size", str(CHUNK_NUMEL), "--batch", "4")


def question(*, host_nbytes: int, disk_nbytes: int, is_accelerator: bool = True) -> Question:
    asked = Question(
        model=lambda batch: resolve_model(MLP, batch=batch),
        batch=4,
        hardware=replace(HARDWARE["h100"], is_accelerator=is_accelerator),
        device_nbytes=1 << 20,
        host_nbytes=host_nbytes,
        disk_nbytes=disk_nbytes,
        chunk_numel=CHUNK_NUMEL,
    )
    return replace(asked, device_nbytes=device_need(asked).nbytes)


def test_it_fits_with_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, *SMALL, "--host", str(6 * CHUNK), "--disk", "1GiB", "--disk-speed", "6GB/s,3GB/s")
    assert said["fits"]
    assert said["planned"]
    assert said["host"]["peak_nbytes"] <= 6 * CHUNK
    disk = said["disk"]
    assert 0 < disk["peak_nbytes"] <= disk["cap_nbytes"] == 1 << 30
    assert disk["read_nbytes"] > 0 < disk["written_nbytes"]
    assert (said["assumed"]["disk_read_Bps"], said["assumed"]["disk_write_Bps"]) == (6e9, 3e9)
    fastest_s, slowest_s = said["step_range_s"]
    assert fastest_s < said["step_s"] < slowest_s


def test_a_slow_disk_is_what_a_step_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    slow = asked(capsys, *SMALL, "--host", str(6 * CHUNK), "--disk", "1GiB", "--disk-speed", "1MB/s")
    assert slow["disk"]["binds"]
    assert slow["disk"]["write_s"] >= slow["disk"]["written_nbytes"] / 1e6
    assert slow["step_s"] >= slow["disk"]["write_s"] * 0.99
    ample = asked(capsys, *SMALL, "--host", "1GiB", "--disk", "1GiB", "--disk-speed", "1MB/s")
    assert (ample["disk"]["read_nbytes"], ample["disk"]["written_nbytes"], ample["disk"]["binds"]) == (0, 0, False)


def test_a_disk_is_a_change_that_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--host", str(6 * CHUNK))
    said = asked(capsys, *words, status=1)
    assert (said["limit"], said["disk"]["cap_nbytes"]) == ("host", None)
    (disk,) = (change for change in said["changes"] if change["what"] == "disk")
    assert asked(capsys, *words, *disk["options"])["fits"]


def test_a_disk_that_is_too_small_is_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--host", str(6 * CHUNK), "--disk")
    said = asked(capsys, *words, str(CHUNK), status=1)
    assert (said["limit"], said["cap_nbytes"]) == ("disk", CHUNK)
    option, nbytes = next(change for change in said["changes"] if change["what"] == "disk")["options"]
    assert option == "--disk"
    assert asked(capsys, *words, nbytes)["fits"]


def test_the_smallest_host_is_what_an_update_touches() -> None:
    tight = question(host_nbytes=4 * CHUNK, disk_nbytes=1 << 30)
    assert fits(tight)
    found = find(tight)
    fastest_s, slowest_s = step_range_s(found)
    assert fastest_s < found.step_s < slowest_s
    less = replace(tight, host_nbytes=4 * CHUNK - 1)
    assert not fits(less)
    assert disk_need(less) is None
    change = raised_caps(less)
    assert fits(change.question)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--disk", "1GiB"), r"--disk is below HOST.*give --host"),
        (("--disk-speed", "6GB/s"), r"--disk-speed is about DISK; give --disk"),
        (("--host", "1GiB", "--disk", "1GiB", "--disk-speed", "1GB,2GB,3GB"), r"give one speed, or two"),
        (("--host", "1GiB", "--disk", "1GiB", "--disk-speed", "fast"), r"--disk-speed: 'fast' is not a size"),
        (("--host", "1GiB", "--disk", "0"), r"--disk is 0 bytes"),
    ],
)
def test_wrong_questions(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, *SMALL, *words, message=message)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_chunks", [4, 8])
def test_what_is_predicted_is_what_a_run_moves(num_chunks: int, tmp_path: Path) -> None:
    """The plan of an estimate, followed by a training under the same caps: bytes on DISK's links, and its peak."""
    predicted = question(host_nbytes=num_chunks * CHUNK, disk_nbytes=1 << 30, is_accelerator=False)
    finding = find(predicted)
    # Here DEVICE is RAM, too, which changes times alone.
    plan = replace(finding.plan, machine=replace(finding.plan.machine, one_processor=True))
    memory: dict[str, Any] = {"device": predicted.device_nbytes, "host": predicted.host_nbytes}
    memory["disk"] = {"path": str(tmp_path), "capacity": predicted.disk_nbytes}
    config = chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL})
    model = predicted.model(4)
    with chunkmem.ChunkManager(config) as manager:
        with manager.init():
            module = model.build()
        optimizer = chunkmem.AdamW(module.parameters(), manager=manager)
        for step in range(4):
            manager.backward(model.loss(module))
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                assert manager.trace is not None
                assert manager.trace.digest == finding.trace.digest
                manager.plan = plan
        happened = manager.timeline()
    assert happened is not None
    assert happened.plan_misses == 0
    assert happened.moved_nbytes == finding.timeline.moved_nbytes
    assert happened.peak_nbytes[Tier.DISK] == finding.timeline.peak_nbytes[Tier.DISK]
    assert finding.timeline.moved_nbytes[Lane.DISK_WRITE] > 0
