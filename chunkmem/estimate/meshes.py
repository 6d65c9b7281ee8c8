"""What a step takes on a mesh of ranks, and which mesh of a cluster is fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.estimate.mesh import RankMesh, meshes
from chunkmem.estimate.model_blocks import model_blocks
from chunkmem.estimate.question import Question, find, find_chosen
from chunkmem.estimate.staged import MICRO_BATCHES_A_STAGE, StagedStep, staged_step

_NUM_FITTING, _NUM_TOO_SMALL = 6, 6
"""Meshes that are planned before the search ends."""
_MOST_STAGES = 64


@dataclass(frozen=True)
class MeshStep:
    """A step on a mesh, for the rank that has most."""

    mesh: RankMesh
    step_s: float
    tokens_per_s: float | None
    """Of each card; None: the model has no tokens."""
    mfu: float | None
    """Model FLOPs utilization: 6 operations a parameter and token, of the dense peak."""
    device_nbytes: int
    host_nbytes: int
    binding: str
    """What takes most of the step."""


@dataclass(frozen=True)
class TooSmall:
    """A mesh on which the model does not fit."""

    mesh: RankMesh
    shortage: CapacityError


@dataclass(frozen=True)
class MeshChoice:
    """Meshes of the same ranks."""

    fitting: tuple[MeshStep, ...]
    """The fastest first."""
    too_small: tuple[TooSmall, ...]
    """That seemed fast."""
    refused: tuple[str, ...]
    """Why some numbers of tensor-parallel ranks were left out."""


def of_stages(question: Question, step: StagedStep, *, batch: int) -> MeshStep:
    """Return what a pipeline takes of a mesh; `batch`: samples of a step."""
    scale, schedule = batch / question.batch, step.choice.best.step
    stalled_s = scale * question.rehearsal.exchange_s / question.mesh.stage
    parts = {
        "compute": (1 - schedule.bubble) * schedule.step_s - stalled_s,
        "bubble": schedule.bubble * schedule.step_s,
        "network": step.exchange_s + stalled_s,
        "updates": step.update_s,
    }
    binding = max(parts, key=parts.__getitem__)
    return _row(question, step.step_s, scale, step.device_nbytes, step.host_nbytes, binding)


def _row(
    question: Question, step_s: float, scale: float, device_nbytes: int, host_nbytes: int, binding: str
) -> MeshStep:
    rehearsal, mesh = question.rehearsal, question.mesh
    rate = scale * rehearsal.tokens / step_s / mesh.tp / mesh.stage or None
    mfu = rate and 6 * rehearsal.num_params * rate / question.hardware.peak_flop_per_s(question.dtype)
    return MeshStep(mesh, step_s, rate, mfu, device_nbytes, host_nbytes, binding)


class _Cluster:
    """Predicts steps of the same samples on meshes of the same ranks."""

    def __init__(self, question: Question) -> None:
        self._question, self._num_ranks = question, question.mesh.num_ranks
        self.rehearsed = functools.cache(self._rehearsed)
        self.blocks = functools.cache(lambda tp: model_blocks(self.rehearsed(tp)))

    def _rehearsed(self, tp: int) -> Question:
        """Return a step of about the samples that `tp` ranks have, as one of several such groups."""
        batch = max(1, self._question.batch * tp // self._num_ranks)
        mesh = RankMesh(shard=2 if self._num_ranks > tp else 1, tp=tp)
        return replace(self._question, batch=batch, mesh=mesh)

    def local_batch(self, mesh: RankMesh) -> int | None:
        """Return the samples of each of the ranks that have a batch; None: they would differ."""
        batch, rest = divmod(self._question.batch, mesh.world)
        return None if rest else batch

    def expected_s(self, mesh: RankMesh) -> float:
        """Return about what a step takes, by the rehearsal of one rank of the whole model; infinity: it cannot fit."""
        question = self.rehearsed(1)
        rehearsal, hardware = question.rehearsal, question.hardware
        num_parts, batch = mesh.tp * mesh.stage, self.local_batch(mesh) or 0
        scale = batch / question.batch
        blocks, moments = self.blocks(1), rehearsal.trace.moments
        # Gathered and scattered twice in each block, forward and backward; where recomputing, once more.
        num_exchanges = 8 + 4 * (question.checkpointing or bool(question.activations))
        whole_s = sum(moment.duration_s for moment in moments) + rehearsal.trace.before_s
        boundary_nbytes = sum(block.output_nbytes for block in blocks)
        stalled_s = num_exchanges * boundary_nbytes * (mesh.tp - 1) / hardware.exchange_Bps(mesh.tp)
        compute_s = scale * (whole_s + stalled_s) / num_parts
        num_micro_batches = min(batch, MICRO_BATCHES_A_STAGE * mesh.stage)
        compute_s *= 1 + (mesh.stage - 1) / max(1, num_micro_batches)
        weight_nbytes = sum(block.weight_nbytes for block in blocks) / num_parts
        all_nbytes = sum(block.nbytes + sum(block.shared.values()) for block in blocks) / num_parts
        is_held = mesh.stage > 1 and mesh.shard > 1
        own_nbytes = all_nbytes / mesh.shard
        passing_nbytes = scale * rehearsal.activation_nbytes / mesh.tp / (num_micro_batches if mesh.stage > 1 else 1)
        used_nbytes = own_nbytes + passing_nbytes + is_held * 2 * weight_nbytes
        room_nbytes = inf if question.host_nbytes is None else question.device_nbytes + question.host_nbytes
        if used_nbytes > room_nbytes or passing_nbytes > question.device_nbytes:
            return inf
        machine = hardware.divided(mesh.tp).machine(question.device_nbytes, 0, mesh=mesh)
        exchange_s = weight_nbytes * ((1 if is_held else 2) / machine.exchange_Bps + 1 / machine.reduce_Bps)
        on_host_nbytes = min(own_nbytes, max(0, used_nbytes - question.device_nbytes))
        update_s = on_host_nbytes / machine.host_update_Bps
        update_s += (own_nbytes - on_host_nbytes) / machine.device_update_Bps
        return max(compute_s, exchange_s) + update_s

    def planned(self, mesh: RankMesh) -> MeshStep:
        """Return what a step takes.

        Raises:
            CapacityError: it does not fit.
        """
        question, batch = self.rehearsed(mesh.tp), self.local_batch(mesh) or 1
        question = replace(question, mesh=mesh).rehearsed_as(question)
        if mesh.stage == 1:
            found = find_chosen(find(question))
            nbytes = found.device_peak_nbytes, found.host_peak_nbytes
            return _row(found.question, found.step_s, 1.0, *nbytes, found.lower_bounds.binding)
        step = staged_step(question, self.blocks(mesh.tp), batch=batch)
        return of_stages(question, step, batch=batch)


def fastest_meshes(question: Question, *, note: Callable[[RankMesh], None]) -> MeshChoice:
    """Return the meshes of the question's ranks on which steps are fastest.

    Each trains on `question.batch` samples over all ranks. Tensor-parallel ranks are in one machine. What steps take is
    guessed for all meshes, and planned for the few of which it is least.

    Raises:
        ConfigError: no mesh has so many ranks and samples.
    """
    cluster, num_ranks = _Cluster(question), question.mesh.num_ranks
    most_stages = min(len(cluster.blocks(1)), _MOST_STAGES)
    expected_s = {
        mesh: cluster.expected_s(mesh)
        for mesh in meshes(num_ranks, most_tp=question.hardware.ranks_a_machine, most_stages=most_stages)
        if cluster.local_batch(mesh)
    }
    if not expected_s:
        raise ConfigError(
            f"--mesh auto: {question.batch} samples (--batch) cannot be divided over {num_ranks} ranks, of which up to "
            f"{question.hardware.ranks_a_machine} can be tensor-parallel and {most_stages} stages; give {num_ranks}"
        )
    fitting: list[MeshStep] = []
    too_small: list[TooSmall] = []
    refused: dict[int, str] = {}
    for mesh in sorted(expected_s, key=lambda mesh: (expected_s[mesh], -mesh.shard)):
        if len(fitting) == _NUM_FITTING or len(too_small) == _NUM_TOO_SMALL or (fitting and expected_s[mesh] == inf):
            break
        if mesh.tp not in refused:
            note(mesh)
            try:
                fitting.append(cluster.planned(mesh))
            except CapacityError as error:
                too_small.append(TooSmall(mesh, error))
            except ConfigError as error:  # heads, say, do not divide by it
                refused[mesh.tp] = str(error)
    if not fitting and not too_small:
        raise ConfigError("; ".join(refused.values()))
    fitting.sort(key=lambda step: step.step_s)
    return MeshChoice(tuple(fitting), tuple(too_small), tuple(refused.values()))
