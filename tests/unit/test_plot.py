"""The picture of memory: what is stacked, where phases begin, and that everything it promises is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chunkmem.memory import MemoryHistory, MemorySample
from chunkmem.plot import _phases, _roles, save_memory_picture
from chunkmem.types import Tier

MIB = 2**20
CAPS = {Tier.DEVICE: 4 * MIB, Tier.HOST: 10 * MIB}
COLORS = {
    "param": (0x00, 0x72, 0xB2),
    "exp_avg": (0x56, 0xB4, 0xE9),
    "grad": (0xE6, 0x9F, 0x00),
    "cache": (0xBB, 0xBB, 0xBB),
    "cap": (0xD5, 0x5E, 0x00),
}


def history_of(*columns: tuple[str, dict[str, int], dict[str, int]], caps: dict[Tier, int] = CAPS) -> MemoryHistory:
    samples = [
        MemorySample(float(index), label, {Tier.DEVICE: device, Tier.HOST: host})
        for index, (label, device, host) in enumerate(columns)
    ]
    return MemoryHistory(dict(caps), samples)


STEP = history_of(
    ("", {"cache": MIB}, {"exp_avg": 4 * MIB}),
    ("forward", {"cache": 0, "param": 2 * MIB}, {"exp_avg": 4 * MIB}),
    ("", {"param": 3 * MIB}, {"exp_avg": 4 * MIB}),
    ("backward", {"param": 2 * MIB, "grad": 2 * MIB}, {"exp_avg": 4 * MIB}),
    ("step", {"param": MIB}, {"exp_avg": 4 * MIB, "grad": 2 * MIB}),
    ("", {}, {"exp_avg": 4 * MIB}),
)


def colors_in(path: Path) -> dict[tuple[int, int, int], int]:
    """How many pixels there are of each colour."""
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("matplotlib.image").imread(path)
    pixels = (image[..., :3] * 255).round().astype(int).reshape(-1, 3)
    colors, counts = numpy.unique(pixels, axis=0, return_counts=True)
    return {tuple(color): count for color, count in zip(colors.tolist(), counts.tolist(), strict=True)}


def test_changes_outside_of_phases_belong_to_the_phase_before() -> None:
    assert _phases(STEP) == [("forward", 0, 3), ("backward", 3, 4), ("optimizer step", 4, 6)]


def test_a_history_without_phases_is_one_nameless_phase() -> None:
    assert _phases(history_of(("", {}, {}), ("", {}, {}))) == [("", 0, 2)]


def test_roles_without_bytes_are_left_out_and_unknown_ones_come_last() -> None:
    history = history_of(("", {"grad": 1, "zeta": 1, "exp_avg": 0, "param": 1}, {"activation": 1, "cache": 1}))
    assert _roles(history, [Tier.DEVICE]) == ["param", "grad", "zeta"]
    assert _roles(history, [Tier.DEVICE, Tier.HOST]) == ["param", "grad", "cache", "activation", "zeta"]


def test_every_role_and_the_cap_are_in_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_memory_picture(STEP, tmp_path / "memory.png")
    found = colors_in(tmp_path / "memory.png")
    for name, color in COLORS.items():
        assert found.get(color, 0) > 1000, name


def test_a_cap_far_above_is_only_written_and_an_empty_host_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    columns = [(sample.label, sample.nbytes[Tier.DEVICE], {}) for sample in STEP.samples]
    save_memory_picture(history_of(*columns, caps={Tier.DEVICE: 100 * MIB, Tier.HOST: 0}), tmp_path / "memory.png")
    found = colors_in(tmp_path / "memory.png")
    assert 0 < found[COLORS["cap"]] < 1000
    assert COLORS["exp_avg"] not in found
    assert found[COLORS["param"]] > 1000


def test_an_empty_history_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no samples"):
        save_memory_picture(MemoryHistory(dict(CAPS)), tmp_path / "memory.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[plot\]" brings it'):
        save_memory_picture(STEP, tmp_path / "memory.png")
    assert not (tmp_path / "memory.png").exists()
