"""`chunkmem plan`: plan a recorded step for another machine, simulate it, and say how good it is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, does_not_fit, table
from chunkmem.cli.machine import add_count, add_machine_arguments, caps_below, machine_of
from chunkmem.cli.stages import blocks_named, cut_answer, refuse_with
from chunkmem.data.errors import ConfigError, PlanError
from chunkmem.data.sizes import format_nbytes, shown
from chunkmem.data.trace import Trace
from chunkmem.data.types import BELOW, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.disk_bound import DiskBound, disk_bound
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import DIRECTIONS, LANE_LINKS, Lane, Plan
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.report.regions import region_policies
from chunkmem.report.text import REGION_COLUMNS, region_rows

if TYPE_CHECKING:
    from chunkmem.report.bound import TrafficBound

NAME = "plan"
SUMMARY = "plan a recorded step for another machine"
DESCRIPTION = """\
Plan a recorded step for other caps and speeds, without a model and without a GPU: how long it would take, what it would
wait for, and what it would move, next to the least that any plan could.

  chunkmem plan runs/demo --device 8GiB
  chunkmem plan trace.json --device 24GiB --host 128GiB --h2d 25GB --d2h 22GB --out plan.json
  chunkmem plan trace.json --device 8GiB --host 16GiB --disk 1TiB --disk-read 6GB/s --disk-write 4GB/s
  chunkmem plan trace.json --device 16GiB --machine plan.json
  chunkmem plan runs/demo --stages 4
  chunkmem plan gpt:7b --stages 8

TRACE is a file that manager.trace.save(path) wrote, or a run directory of manager.record(directory). The plan that
--out writes is for manager.plan, in a manager with the same caps. Times are those of the machine that recorded the
step; only copies, and updates on an accelerator, take the speeds given here. The lower bound holds for every plan with
this cap on DEVICE that updates each group where this plan does.

With --stages N, its blocks are cut into N stages of a pipeline: least time of the slowest stage, then least bytes of
the largest one. TRACE may be a model then, as `chunkmem estimate` takes it (which asks about other batches and
hardware, and about schedules). A stage may have as many bytes as --device and --host together, if both are given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("trace", metavar="TRACE", help="a recorded step: trace.json, or a run directory")
    add_machine_arguments(parser)
    parser.add_argument(
        "--margin-use-ratio",
        metavar="SHARE",
        type=_share,
        default=PlanOptions().margin_use_ratio,
        help="share of the space left on DEVICE that optimizer states may take, 0 to 1 (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan here, as a whole or not at all")
    add_count(parser, "--stages", "N", action=_Stages, help="cut the model into N stages instead")
    parser.add_argument("--mesh", type=_refuse_mesh, help="is asked of `chunkmem estimate`: TRACE has one rank's part")
    parser.add_argument("--keep-ties", action="store_true", help="blocks that share a parameter stay in one stage")


class _Stages(argparse.Action):
    """Stages are cut for any machine, so none has to be given."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *values: Any) -> None:
        setattr(namespace, self.dest, values[0])
        for action in parser._actions:
            action.required &= action.dest != "device"


def run(options: argparse.Namespace) -> CommandResult:
    """Plan the trace, and answer how it would run or why it does not fit."""
    from chunkmem.report.bound import traffic_bound

    if options.stages is not None:
        return _cut(options)
    if options.keep_ties:
        raise ConfigError("--keep-ties is about stages; give --stages, too")
    path: str = os.path.join(options.trace, "trace.json") if os.path.isdir(options.trace) else options.trace
    trace = Trace.load(path)
    if not trace.moments:
        raise ConfigError(f"{path}: the trace has no moments; record a step of a model that has parameters")
    machine = machine_of(options, host_nbytes=sum(trace.chunk_nbytes.values()))
    try:
        plan = make_plan(trace, machine, options=PlanOptions(margin_use_ratio=options.margin_use_ratio))
    except PlanError as error:
        return does_not_fit(_question(path, trace, machine), error)
    bound = traffic_bound(trace, machine, plan.update_tiers)
    if options.out is not None:
        plan.save(options.out)
    result = Result(path, trace, plan, simulate(plan, trace), bound, disk_bound(trace, machine), options.out)
    return CommandResult(result.data(), "\n".join(result.lines()))


def _cut(options: argparse.Namespace) -> CommandResult:
    given = {f"--{name}": getattr(options, name) for name in ("machine", "h2d", "d2h", "out")}
    refuse_with("--stages", caps_below(options) | given)
    device_nbytes, host_nbytes = options.device, options.host
    if host_nbytes is not None and device_nbytes is None:
        raise ConfigError("--host bounds the bytes of a stage together with --device; give that, too")
    cap_nbytes = None if host_nbytes is None else device_nbytes + host_nbytes
    blocks = blocks_named(options.trace)
    return cut_answer(options.trace, blocks, options.stages, cap_nbytes=cap_nbytes, keeps_ties=options.keep_ties)


def _refuse_mesh(text: str) -> None:
    raise ConfigError(
        f"--mesh {shown(text)}: TRACE is of one rank, and has its chunks and local parts alone: ask `chunkmem estimate "
        "MODEL --mesh ...`, or record a step over those ranks and plan that"
    )


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:  # NaN is not either
        raise ConfigError(f"--margin-use-ratio is {shown(text)}, but must be a number from 0 to 1")
    return share


def _question(path: str, trace: Trace, machine: Machine) -> dict[str, Any]:
    return {
        "trace": path,
        "mode": trace.mode.value,
        "num_moments": len(trace.moments),
        "num_chunks": len(trace.chunk_nbytes),
        "machine": machine.to_dict(),
    }


@dataclass(frozen=True)
class Result:
    """A plan, what the simulator says of it, and what could not be moved less."""

    path: str
    trace: Trace
    plan: Plan
    timeline: Timeline
    bound: TrafficBound
    disk_bound: DiskBound
    out: str | None

    @property
    def moved_nbytes(self) -> int:
        """Bytes of a step, over both links."""
        return sum(nbytes for lane, nbytes in self.timeline.moved_nbytes.items() if Tier.DEVICE in LANE_LINKS[lane])

    @property
    def ratio(self) -> float | None:
        """How many times the lower bound is moved; None if the bound is 0 and something is moved."""
        if self.bound.nbytes == 0:
            return None if self.moved_nbytes else 1.0
        return self.moved_nbytes / self.bound.nbytes

    @property
    def compute_s(self) -> float:
        """Time that DEVICE computes: its moments, and the updates there."""
        return self.timeline.busy_s(Lane.COMPUTE)

    @property
    def host_update_s(self) -> float:
        """Time of the step in which only HOST works, on updates that nothing hides."""
        return max(0.0, self.timeline.step_s - self.compute_s - self.timeline.stall_s)

    @property
    def num_updated_on_device(self) -> int:
        """Groups whose optimizer states live on DEVICE."""
        return sum(tier is Tier.DEVICE for tier in self.plan.update_tiers.values())

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        timeline = self.timeline
        return {
            "fits": True,
            **_question(self.path, self.trace, self.plan.machine),
            "plan": self.plan.name,
            "step_s": timeline.step_s,
            "compute_s": self.compute_s,
            "stall_s": timeline.stall_s,
            "host_update_s": self.host_update_s,
            **{f"{lane.value.replace('-', '_')}_nbytes": nbytes for lane, nbytes in timeline.moved_nbytes.items()},
            "moved_nbytes": self.moved_nbytes,
            "exchanged_nbytes": timeline.exchanged_nbytes,
            "bound_nbytes": self.bound.nbytes,
            "bound_ratio": self.ratio,
            "certain_nbytes": self.bound.certain_nbytes,
            "disk_bound_read_nbytes": self.disk_bound.read_nbytes,
            "disk_bound_write_nbytes": self.disk_bound.write_nbytes,
            "fetched": timeline.fetched,
            "prefetched": timeline.prefetched,
            "peak_nbytes": {tier.value: nbytes for tier, nbytes in timeline.peak_nbytes.items()},
            "cap_nbytes": {tier.value: nbytes for tier, nbytes in timeline.cap_nbytes.items()},
            "num_updates": len(self.plan.update_tiers),
            "num_updates_on_device": self.num_updated_on_device,
            "out": self.out,
        }

    def lines(self) -> Iterator[str]:
        """Yield what is printed otherwise."""
        timeline, updates = self.timeline, len(self.plan.update_tiers)
        both = "to and from DEVICE" if self.plan.machine.tiers[-1] in BELOW else "both"
        sizes = self.trace.chunk_nbytes.values()
        chunks = f"{len(sizes)} chunks, {format_nbytes(sum(sizes))} in all"
        yield f"{self.path}: {self.trace.mode.value}, {len(self.trace.moments)} moments of {chunks}"
        yield f"plan: {self.plan.name}"
        if updates:
            yield f"updates: {self.num_updated_on_device} of {updates} groups on DEVICE, the others on HOST"
        yield ""
        yield table(("time", "of a step", ""), [
            ("computing", *self._time(self.compute_s)),
            ("waiting for copies", *self._time(timeline.stall_s)),
            ("updating on HOST only", *self._time(self.host_update_s)),
            ("step, as predicted", *self._time(timeline.step_s)),
        ])  # fmt: skip
        yield ""
        yield table(("traffic", "of a step"), [
            *((DIRECTIONS[lane], format_nbytes(nbytes)) for lane, nbytes in timeline.moved_nbytes.items()),
            (both, format_nbytes(self.moved_nbytes)),
            ("lower bound", format_nbytes(self.bound.nbytes)),
            (f"{both} / lower bound", "-" if self.ratio is None else f"{self.ratio:.3f}"),
            *self._disk_rows(),
            *([("exchanged with other ranks", format_nbytes(timeline.exchanged_nbytes))]
              if self.trace.remote_groups else ()),
            ("fetched before they were needed", f"{timeline.prefetched} of {timeline.fetched}"),
        ])  # fmt: skip
        yield ""
        if regions := region_policies(self.plan, self.trace):
            yield table(REGION_COLUMNS, region_rows(regions))
            yield ""
        yield table(("chunks on", "peak", "cap"), [
            (tier.name, format_nbytes(timeline.peak_nbytes[tier]), format_nbytes(timeline.cap_nbytes[tier]))
            for tier in timeline.peak_nbytes
        ])  # fmt: skip
        if self.plan.machine.charges_non_model:
            non_model = self.trace.non_model_peak_nbytes
            yield f"the cap on DEVICE also covers up to {format_nbytes(non_model)} of non-model data"
        if self.out is not None:
            yield f"\nwritten to {self.out}"

    def _disk_rows(self) -> Iterator[tuple[str, str]]:
        moved = self.timeline.moved_nbytes
        least = {Lane.DISK_READ: self.disk_bound.read_nbytes, Lane.DISK_WRITE: self.disk_bound.write_nbytes}
        for lane, nbytes in least.items() if self.plan.machine.disk_nbytes else ():
            yield f"{DIRECTIONS[lane]}, lower bound", format_nbytes(nbytes)
            yield f"{DIRECTIONS[lane]} / lower bound", f"{moved[lane] / nbytes:.3f}" if nbytes else "-"

    def _time(self, duration_s: float) -> tuple[str, str]:
        step_s = self.timeline.step_s
        return f"{1e3 * duration_s:.3f} ms", f"{100 * duration_s / step_s:.0f} %" if step_s else ""
