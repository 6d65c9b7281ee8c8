"""Cores that are across from the accelerator are told of, with the command; nothing is said where nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkmem.runtime.numa import numa_advice

ADDRESS = "0000:3b:00.0"
BOTH = frozenset(range(64))


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two sockets of 16 cores with two threads each; the accelerator is at the second."""
    for node, cpus in enumerate(("0-15,32-47", "16-31,48-63")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    device = tmp_path / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    return tmp_path


def test_the_command_names_the_node(system: Path) -> None:
    said = numa_advice(ADDRESS, BOTH, system=system)
    assert said is not None
    assert said.startswith("32 of the 64 cores of this process are not on NUMA node 1,")
    assert "torchrun --numa-binding=node" in said
    assert "numactl --cpunodebind=1 --preferred=1" in said


@pytest.mark.parametrize("cpus", [range(16, 32), [20, 50]])
def test_a_process_beside_its_accelerator_is_left_alone(system: Path, cpus: list[int]) -> None:
    assert numa_advice(ADDRESS, frozenset(cpus), system=system) is None


@pytest.mark.parametrize("node", ["-1", "7", "", "first"])
def test_nothing_is_said_where_the_system_does_not_know(system: Path, node: str) -> None:
    (system / "bus/pci/devices" / ADDRESS / "numa_node").write_text(node)
    assert numa_advice(ADDRESS, BOTH, system=system) is None


@pytest.mark.parametrize("address", [None, "0000:00:00.0"])
def test_nor_where_the_accelerator_is_not_known(system: Path, address: str | None) -> None:
    assert numa_advice(address, BOTH, system=system) is None
