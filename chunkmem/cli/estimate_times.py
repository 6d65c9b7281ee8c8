"""What `chunkmem estimate` says about time: of a step, as a range; its lower bounds; before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import counted
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.estimate.hardware import BUILD_Bps, PIN_Bps
from chunkmem.plan.model import LANES

_DISK_SHARE = 0.5
"""Of a step that the disk reads or writes: from there on it is what the step waits for."""

if TYPE_CHECKING:
    from chunkmem.estimate.question import Finding, Question


def time_data(finding: Finding) -> dict[str, Any]:
    """Return what ``--json`` prints about time."""
    from chunkmem.estimate.question import step_range_s

    step_s, bounds, rehearsal = finding.step_s, finding.lower_bounds, finding.question.rehearsal
    tokens = rehearsal.tokens / finding.question.mesh.tp
    return {
        "step_s": step_s,
        "step_range_s": list(step_range_s(finding)),
        "tokens_per_s": tokens / step_s if tokens and step_s else None,
        "stall_s": finding.timeline.stall_s,
        "start_up": {"build_s": 4 * rehearsal.num_params / BUILD_Bps, "pin_s": _pinned_nbytes(finding) / PIN_Bps},
        "lower_bounds": asdict(bounds) | {"binding": bounds.binding},
    }


def time_lines(finding: Finding, said: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is printed otherwise; `said`: the data of the answer."""
    question, bounds, (fastest_s, slowest_s) = finding.question, finding.lower_bounds, said["step_range_s"]
    tokens = said["tokens"] / question.mesh.tp
    speed = ""
    if tokens and fastest_s:
        speed = (
            f": {_rounded(said['tokens_per_s'])} tokens/s a rank "
            f"({_rounded(tokens / slowest_s)} to {_rounded(tokens / fastest_s)})"
        )
    yield f"a step takes about {said['step_s']:.2g} s ({fastest_s:.2g} to {slowest_s:.2g} s){speed}"
    if said["stall_s"] > 0.01 * said["step_s"]:
        yield f"of that, computing waits {said['stall_s']:.2g} s for copies"
    is_there = {"network": question.mesh.num_ranks > 1, "disk": question.disk_nbytes > 0}
    shown = (f"{name} {seconds:.3g} s" for name, seconds in bounds.seconds.items() if is_there.get(name, True))
    yield f"lower bounds at the speeds above: {', '.join(shown)}; {bounds.binding} binds"
    build_s, pin_s = said["start_up"].values()
    if build_s + pin_s > 1:
        yield (
            f"before the first step: about {_time(build_s)} to draw initial weights in fp32, and {_time(pin_s)} to "
            f"touch and pin {format_nbytes(_pinned_nbytes(finding))} of HOST"
        )


def below_data(finding: Finding, tier: Tier) -> dict[str, Any] | None:
    """Return what ``--json`` prints about a tier below HOST; None if there is none."""
    if tier not in finding.question.below_nbytes:
        return None
    timeline, (read, write) = finding.timeline, LANES[tier]
    read_s, write_s = map(timeline.busy_s, (read, write))
    return {
        "peak_nbytes": timeline.peak_nbytes[tier],
        "cap_nbytes": finding.question.below_nbytes[tier],
        "read_nbytes": timeline.moved_nbytes[read],
        "written_nbytes": timeline.moved_nbytes[write],
        "read_s": read_s,
        "write_s": write_s,
        # Reading or writing takes most of a step, and no less than any lower bound.
        "binds": max(read_s, write_s) >= max(_DISK_SHARE * timeline.step_s, finding.lower_bounds.step_s),
    }


def below_lines(tier: Tier, data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is printed about a tier below HOST, of which this is the data."""
    read_nbytes, written_nbytes = data["read_nbytes"], data["written_nbytes"]
    if not read_nbytes and not written_nbytes:
        yield f"{tier.name} is not used: HOST has room for all"
        return
    yield (
        f"each step reads {format_nbytes(read_nbytes)} from {tier.name} in {_time(data['read_s'])}, and writes "
        f"{format_nbytes(written_nbytes)} in {_time(data['write_s'])}"
        + (f"; the {tier.value} is what a step waits for" if data["binds"] else "")
    )
    if written_nbytes and tier is Tier.DISK:
        yield f"disks wear: one rated for 1 PB written lasts {_rounded(1e15 / written_nbytes)} steps"


def assumption_lines(question: Question) -> Iterator[str]:
    """Yield what the times rest on."""
    from chunkmem.estimate.optimizers import is_elementwise

    hardware, peers, mesh = question.hardware, question.peers, question.mesh
    assumed = (
        f"assumed: matrix products of {hardware.flop_rate(question.dtype) / 1e12:.0f} TFLOP/s, of which eager training "
        f"reaches {100 * hardware.eager_share:.0f} %; link {hardware.link_Bps / 1e9:.0f} GB/s each way and "
        f"{hardware.duplex_Bps / 1e9:.0f} both ways; host memory {hardware.host_memory_Bps / 1e9:.0f} GB/s"
    )
    for tier in question.below_nbytes:
        speed = hardware.below[tier]
        assumed += f"; {tier.value} {speed['read_Bps'] / 1e9:.2g} GB/s reading, {speed['write_Bps'] / 1e9:.2g} writing"
    if mesh.world > 1:
        assumed += f"; network {peers.exchange_Bps(mesh.shard) / 1e9:.3g} GB/s a rank"
    if mesh.replicate > 1:
        assumed += f" of a replica, {peers.across_Bps(mesh.world) / 1e9:.3g} GB/s to other replicas"
    if mesh.tp > 1:
        assumed += f"; {hardware.exchange_Bps(mesh.tp) / 1e9:.3g} GB/s among tensor-parallel ranks"
    if mesh.num_ranks > hardware.ranks_a_machine:
        assumed += (
            f", over {-(-mesh.num_ranks // hardware.ranks_a_machine)} machines of "
            f"{counted(hardware.ranks_a_machine, 'rank')} and {counted(int(hardware.nics), 'NIC')} of "
            f"{hardware.nic_Bps / 1.25e8:.3g} Gb/s (--nnodes, --nics, --nic-speed)"
        )
    yield assumed
    if not is_elementwise(question.optimizer):
        yield f"an update takes as long as its bytes: the arithmetic of {question.optimizer} is not counted"
    yield "not measured here: docs/estimates.md says what speeds are fitted to, and how far off they may be"


def _pinned_nbytes(finding: Finding) -> int:
    return max(finding.timeline.peak_nbytes.get(Tier.HOST, 0), finding.first_host_nbytes)


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 99 else f"{seconds / 60:.0f} min"


def _rounded(value: float) -> str:
    """Return a number of two digits that count."""
    return f"{float(f'{value:.2g}'):,.0f}"
