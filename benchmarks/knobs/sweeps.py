"""One knob turned at a time: each position planned, and simulated. Pure: the same traces give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.knobs.record import BASE_NUMEL
from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline

LINK_SHARE = 0.3
"""The link takes this share of computing to carry every weight once in one direction."""
HOST_UPDATE_SHARE = 0.25
"""Updating everything on HOST takes this share of computing."""
DEVICE_UPDATE_SPEEDUP = 10
"""DEVICE updates this many times faster than HOST."""
HOST_NBYTES = 1 << 40
FETCH = (Tier.HOST, Tier.DEVICE)
LATENCY_S = 1e-5

CAP_SHARES = tuple(i / 20 for i in range(21))
"""Of the way from the smallest cap that works to all resident."""
MARGINS = tuple(i / 10 for i in range(11))
MARGIN_CAPS = (0.25, 0.5, 0.75)
"""States that would fit beside everything else at the traced peak, as a share of all."""
LINK_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.4, 1.0, 1.4, 2.0, 4.0, 8.0)
LINK_CAPS = (0.1, 0.5)
STATIC_SHARES = tuple(i / 20 for i in range(2, 21))
"""Of the cap: `warmup_gpu_chunk_mem_ratio`."""
STATIC_CAPS = (0.6, 0.8)
SIZE_CAP = 0.1


@dataclass(frozen=True)
class Setting:
    """A trace, and an accelerator in fixed proportion to it."""

    trace: Trace
    machine: Machine
    numel: int
    """Of the model's parameters."""

    @property
    def compute_s(self) -> float:
        """Forward and backward; updates not included."""
        return _compute_s(self.trace)

    def role_nbytes(self, *roles: Role) -> int:
        """Return the bytes of all chunks of these roles."""
        return sum(nbytes for chunk, nbytes in self.trace.chunk_nbytes.items() if chunk.role in roles)

    @property
    def peak_nbytes(self) -> int:
        """Peak bytes of non-model data: activations, above all."""
        return max(moment.non_model_peak_nbytes for moment in self.trace.moments)

    @property
    def resident_nbytes(self) -> int:
        """A cap under which nothing ever moves."""
        return self.peak_nbytes + sum(self.trace.chunk_nbytes.values())

    @property
    def least_nbytes(self) -> int:
        """The smallest cap that works."""
        try:
            make_plan(self.trace, replace(self.machine, device_nbytes=1))
        except CapacityError as error:
            return error.needed_nbytes
        return 1

    def cap(self, share: float) -> int:
        """Return the cap that lies so far between the smallest that works and all resident."""
        return round(self.least_nbytes + share * (self.resident_nbytes - self.least_nbytes))


def setting_of(traces: Mapping[int, Trace], chunk_numel: int, *, numel: int) -> Setting:
    """Return a setting; all of them have the base trace's computing time, and the same machine but for its cap."""
    base = traces[BASE_NUMEL]
    compute_s, param_nbytes = _compute_s(base), 4 * numel
    trace = traces[chunk_numel]
    scale = compute_s / _compute_s(trace)
    moments = tuple(replace(moment, duration_s=scale * moment.duration_s) for moment in trace.moments)
    link_Bps = param_nbytes / (LINK_SHARE * compute_s)
    host_Bps = 4 * param_nbytes / (HOST_UPDATE_SHARE * compute_s)  # PARAM, GRAD and two states
    return Setting(
        trace=replace(trace, moments=moments),
        machine=Machine(
            device_nbytes=0,
            host_nbytes=HOST_NBYTES,
            links=host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps, latency_s=LATENCY_S),
            device_update_Bps=DEVICE_UPDATE_SPEEDUP * host_Bps,
            host_update_Bps=host_Bps,
            charges_non_model=True,
            one_processor=False,
        ),
        numel=numel,
    )


def turn_all(traces: Mapping[int, Trace], *, numel: int, auto_numel: Callable[[int], int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each position of each knob.

    Args:
        traces: by the elements of their chunks.
        numel: of the model's parameters.
        auto_numel: returns the elements that `default_chunk_size: "auto"` chooses under a cap in bytes.
    """
    base = setting_of(traces, BASE_NUMEL, numel=numel)
    for turn in (turn_cap, turn_margin, turn_link, turn_static):
        yield from turn(base)
    yield from turn_size(traces, numel=numel, auto_numel=auto_numel)


def turn_cap(base: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each cap."""
    for share in CAP_SHARES:
        yield {"knob": "cap", "position": share, **planned(base, base.cap(share))}


def turn_margin(base: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each `margin_use_ratio`, under several caps."""
    model_nbytes = base.role_nbytes(Role.PARAM, Role.GRAD)
    states_nbytes = base.role_nbytes(Role("exp_avg"), Role("exp_avg_sq"))
    for share in MARGIN_CAPS:
        cap_nbytes = round(base.peak_nbytes + model_nbytes + share * states_nbytes)
        for margin in MARGINS:
            row = planned(base, cap_nbytes, PlanOptions(margin_use_ratio=margin))
            yield {"knob": "margin", "at": share, "position": margin, **row}


def turn_link(base: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each speed of the link, under several caps."""
    for share in LINK_CAPS:
        for factor in LINK_FACTORS:
            link_Bps = factor * base.machine.links[FETCH].Bps
            other = replace(
                base,
                machine=replace(
                    base.machine, links=host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps, latency_s=LATENCY_S)
                ),
            )
            yield {"knob": "link", "at": share, "position": factor, **planned(other, base.cap(share))}


def turn_static(base: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each static share, under several caps, each after a row without one."""
    for share in STATIC_CAPS:
        cap_nbytes = base.cap(share)
        yield {"knob": "static", "at": share, "position": None, **planned(base, cap_nbytes)}
        for static in STATIC_SHARES:
            row = planned(base, cap_nbytes, PlanOptions(static_nbytes=int(static * cap_nbytes)))
            yield {"knob": "static", "at": share, "position": static, **row}


def turn_size(traces: Mapping[int, Trace], *, numel: int, auto_numel: Callable[[int], int]) -> Iterator[dict[str, Any]]:
    """Yield a row for each chunk size, all under the same cap, with what `auto` chooses there."""
    cap_nbytes = setting_of(traces, BASE_NUMEL, numel=numel).cap(SIZE_CAP)
    for chunk_numel in traces:
        other = setting_of(traces, chunk_numel, numel=numel)
        chunks = {
            "least_cap_nbytes": other.least_nbytes,
            "padding_share": 1 - 4 * numel / other.role_nbytes(Role.PARAM),
            "num_groups": len({chunk.group for chunk in other.trace.chunk_nbytes}),
            "auto_numel": auto_numel(cap_nbytes),
        }
        yield {"knob": "size", "position": chunk_numel, **chunks, **planned(other, cap_nbytes)}


def planned(setting: Setting, cap_nbytes: int, options: PlanOptions | None = None) -> dict[str, Any]:
    """Plan and simulate for a cap; return times in seconds, bytes, and what was chosen; `fits` false if it cannot."""
    machine = replace(setting.machine, device_nbytes=cap_nbytes)
    row: dict[str, Any] = {"cap_nbytes": cap_nbytes, "link_Bps": machine.links[FETCH].Bps}
    try:
        plan = make_plan(setting.trace, machine, options=options)
    except CapacityError as error:
        return {**row, "fits": False, "needed_nbytes": error.needed_nbytes}
    timeline = simulate(plan, setting.trace)
    moments = zip(timeline.device_nbytes, setting.trace.moments, strict=True)
    return {
        **row,
        "fits": True,
        "step_s": timeline.step_s,
        "stall_s": timeline.stall_s,
        "in_a_row_s": in_a_row_s(timeline, machine),
        "h2d_nbytes": timeline.moved_nbytes.get(Lane.H2D, 0),
        "d2h_nbytes": timeline.moved_nbytes.get(Lane.D2H, 0),
        "chunk_peak_nbytes": timeline.peak_nbytes[Tier.DEVICE],
        "peak_nbytes": max(nbytes + moment.non_model_peak_nbytes for nbytes, moment in moments),
        "groups_updated_on_device": sum(tier is Tier.DEVICE for tier in plan.update_tiers.values()),
        "groups_updated": len(plan.update_tiers),
        "plan": plan.name,
    }


def in_a_row_s(timeline: Timeline, machine: Machine) -> float:
    """Return the step if each copy were waited for before anything else went on: `with_async_move: false`."""
    spans = [span for span in timeline.spans if not span.is_stall]
    working_s = sum(span.end_s - span.start_s for span in spans if span.lane not in (Lane.H2D, Lane.D2H))
    copies = [span.nbytes for span in spans if span.nbytes]
    return working_s + sum(map(machine.links[FETCH].copy_s, copies))


def _compute_s(trace: Trace) -> float:
    return sum(moment.duration_s for moment in trace.moments if moment.kind is not Kind.UPDATE)
