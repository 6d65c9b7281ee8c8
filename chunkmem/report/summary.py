"""The figures of a run: as JSON-serialisable data, from which the tables are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from chunkmem.data.trace import Moment, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Timeline, differences
from chunkmem.report.regions import region_data, region_policies
from chunkmem.report.run import Run


@dataclass(frozen=True, slots=True)
class PlainPyTorch:
    """What the same step holds on DEVICE in plain PyTorch, where everything is resident."""

    model_nbytes: int
    """Weights, gradients and optimizer states: all chunks of the trace. Of several ranks each holds all of them, so
    for the groups of other ranks optimizer states are added, in proportion to those that this rank has."""
    non_model_nbytes: int
    """The highest of the trace's moments."""
    activation_nbytes: int = 0
    """What chunks have of activations."""

    @property
    def nbytes(self) -> int:
        return self.model_nbytes + self.activation_nbytes + self.non_model_nbytes

    @classmethod
    def of(cls, trace: Trace) -> PlainPyTorch:
        sizes = trace.chunk_nbytes
        activation_nbytes = sum(n for chunk, n in sizes.items() if chunk.role.kind.is_of_call)
        total = sum(sizes.values()) - activation_nbytes
        trained = [chunk for chunk in sizes if chunk.role.kind.is_weights and ChunkId(Role.GRAD, chunk.group) in sizes]
        remote_nbytes = sum(sizes[chunk] for chunk in trained if trace.is_remote(chunk))
        owned_nbytes = sum(sizes[chunk] for chunk in trained) - remote_nbytes
        if remote_nbytes and owned_nbytes:
            states_nbytes = sum(n for chunk, n in sizes.items() if chunk.role.kind.is_of_update)
            total += states_nbytes * remote_nbytes // owned_nbytes
        return cls(total, trace.non_model_peak_nbytes, activation_nbytes)


def summarize(run: Run) -> dict[str, Any]:
    """Return everything that is told of a run; bytes and seconds are plain numbers."""
    return {
        "run": str(run.path),
        "mode": run.trace.mode.value,
        "plan": run.plan.name,
        "num_moments": len(run.trace.moments),
        "num_chunks": len(run.trace.chunk_nbytes),
        "compute_s": run.trace.compute_s,
        "cap_nbytes": {tier.value: nbytes for tier, nbytes in run.happened.cap_nbytes.items()},
        "predicted": _figures(run.predicted),
        "happened": _figures(run.happened),
        "differences": differences(run.predicted, run.happened),
        "non_model": _non_model(run),
        "plain_pytorch_nbytes": PlainPyTorch.of(run.trace).nbytes,
        "regions": [region_data(region) for region in region_policies(run.plan, run.trace)],
    }


def _figures(timeline: Timeline) -> dict[str, Any]:
    roles: dict[str, dict[str, int]] = {}
    for tier, role in sorted(timeline.role_peak_nbytes, key=_by_tier_and_role):
        roles.setdefault(tier.value, {})[role] = timeline.role_peak_nbytes[tier, role]
    return {
        **asdict(timeline.figures),
        "python_s": timeline.python_s,
        "python_by_layer": timeline.python_by_layer,
        "num_stalls": sum(span.is_stall for span in timeline.spans),
        "moved_nbytes": {lane.value: timeline.moved_nbytes[lane] for lane in Lane if lane in timeline.moved_nbytes},
        "peak_nbytes": {tier.value: nbytes for tier, nbytes in timeline.peak_nbytes.items()},
        "role_peak_nbytes": roles,
    }


def _by_tier_and_role(key: tuple[Tier, str]) -> tuple[int, bool, int, str]:
    tier, role = key
    # The log is no chunk's role, and comes last.
    return list(Tier).index(tier), role == SHADOW, *Role(role).order


def _non_model(run: Run) -> dict[str, Any]:
    """Return the bytes of non-model data on DEVICE, by both ways of measuring."""
    moments = run.trace.moments
    was_sampled = any(moment.sampled_peak_nbytes for moment in moments)
    return {
        "is_charged": run.plan.machine.charges_non_model,
        "cap_nbytes": run.plan.machine.device_nbytes,
        "chunk_peak_nbytes": run.happened.peak_nbytes[Tier.DEVICE],
        "probe": _highest(run, lambda moment: moment.non_model_peak_nbytes),
        "sampled": _highest(run, lambda moment: moment.sampled_peak_nbytes) if was_sampled else None,
        # Traces of earlier versions, and steps without the thread, have 0: unknown, and not "nothing is missed".
        "sampling_interval_s": run.trace.sampling_interval_s or None,
        "differ_most": _highest(run, lambda m: abs(m.sampled_peak_nbytes - m.non_model_peak_nbytes))
        if was_sampled
        else None,
    }


def _highest(run: Run, nbytes_of: Callable[[Moment], int]) -> Mapping[str, Any]:
    """Return the moment with the most of some bytes, the first of several."""
    nbytes, index = max((nbytes_of(moment), -index) for index, moment in enumerate(run.trace.moments))
    moment = run.trace.moments[-index]
    return {
        "nbytes": nbytes,
        "moment": -index,
        "label": str(moment),
        "probe_nbytes": moment.non_model_peak_nbytes,
        "sampled_nbytes": moment.sampled_peak_nbytes,
    }
