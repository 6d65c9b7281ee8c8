"""Traces made by arithmetic: the regular sweep of a deep model, and random ones that keep every rule of a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import ChunkId, Role

LAYOUT = "made by arithmetic"
STATES = (Role("exp_avg"), Role("exp_avg_sq"))


def param(group: int) -> ChunkId:
    return ChunkId(Role.PARAM, group)


def grad(group: int) -> ChunkId:
    return ChunkId(Role.GRAD, group)


def updated_chunks(group: int) -> tuple[ChunkId, ...]:
    """The four chunks of a group in fp32 training with Adam."""
    return (param(group), grad(group), *(ChunkId(role, group) for role in STATES))


def with_masters(trace: Trace) -> Trace:
    """Return the same step in half precision: each updated group has float32 master weights and states."""
    sizes = dict(trace.chunk_nbytes)
    for chunk, nbytes in trace.chunk_nbytes.items():
        if chunk.role in STATES:
            sizes[chunk] = sizes[ChunkId(Role.MASTER, chunk.group)] = 2 * nbytes
    return replace(trace, chunk_nbytes=sizes)


def training_trace(
    num_groups: int,
    nbytes: int,
    *,
    modules_per_group: int = 1,
    duration_s: float = 1e-3,
    activation_nbytes: int = 0,
    mode: Mode = Mode.TRAIN,
) -> Trace:
    """Return the step of a model of `num_groups * modules_per_group` blocks in a row.

    Forward runs them first to last, backward last to first, then each group is updated and its gradients consumed.

    Args:
        nbytes: of every chunk.
        duration_s: of a block's forward; its backward takes twice, a group's update as long.
        activation_nbytes: non-model bytes that every block's forward leaves behind for its backward.
        mode: an EVAL trace ends with the forward sweep.
    """
    num_blocks = num_groups * modules_per_group
    moments: list[Moment] = []

    def add(kind: Kind, chunk: ChunkId, label: str, *, factor: float = 0.0, num_live: int = 0) -> None:
        peak = num_live * activation_nbytes
        moments.append(Moment(kind, chunk, f"{label} {kind.value}", factor * duration_s, peak))

    for block in range(num_blocks):
        group, label = block // modules_per_group, f"blocks.{block} forward"
        live = block + 1 if mode is Mode.TRAIN else 1
        add(Kind.HOLD, param(group), label, factor=1, num_live=live)
        add(Kind.RELEASE, param(group), label, num_live=live)
    if mode is Mode.EVAL:
        return Trace(mode, LAYOUT, {param(g): nbytes for g in range(num_groups)}, tuple(moments))
    for block in reversed(range(num_blocks)):
        group, label = block // modules_per_group, f"blocks.{block} backward"
        is_first = block % modules_per_group == modules_per_group - 1
        add(Kind.HOLD, param(group), label, factor=2, num_live=block + 1)
        add(Kind.CREATE if is_first else Kind.WRITE, grad(group), label, num_live=block + 1)
        add(Kind.RELEASE, param(group), label, num_live=block)
    for group in range(num_groups):
        add(Kind.UPDATE, param(group), f"group {group}", factor=1)
        add(Kind.CONSUME, grad(group), f"group {group}")
    sizes = {chunk: nbytes for g in range(num_groups) for chunk in updated_chunks(g)}
    return Trace(mode, LAYOUT, sizes, tuple(moments))


def by_layer_trace(num_blocks: int, nbytes: int, *, micro_batches: int, groups_per_block: int = 8) -> Trace:
    """Return the step of a model that runs block by block over all micro-batches: backward adds to the gradients of a
    block's groups for each of them.

    Args:
        nbytes: of every chunk.
    """
    events: list[tuple[Kind, ChunkId]] = []
    num_groups = num_blocks * groups_per_block
    blocks = [range(first, first + groups_per_block) for first in range(0, num_groups, groups_per_block)]
    for block in blocks:
        for group in [*block] * micro_batches:
            events += [(Kind.HOLD, param(group)), (Kind.RELEASE, param(group))]
    for block in reversed(blocks):
        for batch in range(micro_batches):
            for group in reversed(block):
                lands = Kind.WRITE if batch else Kind.CREATE
                events += [(Kind.HOLD, param(group)), (lands, grad(group)), (Kind.RELEASE, param(group))]
    for group in range(num_groups):
        events += [(Kind.UPDATE, param(group)), (Kind.CONSUME, grad(group))]
    sizes = {chunk: nbytes for group in range(num_groups) for chunk in updated_chunks(group)}
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(Moment(kind, chunk, duration_s=1e-4) for kind, chunk in events))


def random_trace(
    rng: random.Random,
    *,
    num_groups: int,
    uniform: bool,
    num_uses: int | None = None,
    max_held: int = 3,
    micro_batches: int = 1,
    frozen_share: float = 0.25,
    max_non_model_nbytes: int = 0,
) -> Trace:
    """Return a trace in which everything that the rules leave open is drawn.

    Args:
        num_groups: groups the model has; those that no moment uses are not in the trace.
        uniform: all chunks are of one size; else each group draws one, as slabs differ in number.
        num_uses: HOLDs of a forward sweep, repeated ones included; None: about half as many again as groups.
        max_held: most PARAM chunks held at the same time.
        micro_batches: forward and backward sweeps before the updates.
        frozen_share: chance of a group to get no gradients and no update; at least one group of the trace has both.
        max_non_model_nbytes: upper end of each moment's non-model peak.
    """
    num_uses = num_groups + num_groups // 2 if num_uses is None else num_uses
    uses = [rng.randrange(num_groups) for _ in range(num_uses)]
    if rng.random() < 0.5:  # Mostly in order, as models are.
        uses.sort()
        for _ in range(rng.randrange(3)):
            uses.insert(rng.randrange(len(uses) + 1), rng.choice(uses))
    trained = {group for group in sorted(set(uses)) if rng.random() >= frozen_share} or {rng.choice(uses)}
    events: list[tuple[Kind, ChunkId]] = []
    begun: set[int] = set()
    for _ in range(micro_batches):
        events += _forward(rng, uses, max_held)
        events += _backward(rng, _shuffled_a_little(rng, uses[::-1]), max_held, trained=trained, begun=begun)
    events += _updates(rng, begun)
    slab_nbytes = 64 * rng.randint(1, 8)
    sizes: dict[ChunkId, int] = {}
    for group in sorted(set(uses)):
        nbytes = slab_nbytes if uniform else 64 * rng.randint(1, 24)
        sizes |= dict.fromkeys(updated_chunks(group) if group in begun else (param(group),), nbytes)
    moments = tuple(
        Moment(
            kind,
            chunk,
            f"{index}: {kind.value} {chunk}",
            duration_s=rng.choice((0.0, 1e-3 * rng.random())),
            non_model_peak_nbytes=rng.randint(0, max_non_model_nbytes),
        )
        for index, (kind, chunk) in enumerate(events)
    )
    return Trace(Mode.TRAIN, LAYOUT, sizes, moments)


def _forward(rng: random.Random, uses: Iterable[int], max_held: int) -> list[tuple[Kind, ChunkId]]:
    events: list[tuple[Kind, ChunkId]] = []
    held: list[int] = []
    for group in uses:
        if group in held:
            continue
        while len(held) >= max_held or (held and rng.random() < 0.7):
            events.append((Kind.RELEASE, param(held.pop(rng.randrange(len(held))))))
        events.append((Kind.HOLD, param(group)))
        held.append(group)
    rng.shuffle(held)
    return events + [(Kind.RELEASE, param(group)) for group in held]


def _backward(
    rng: random.Random, uses: Sequence[int], max_held: int, *, trained: set[int], begun: set[int]
) -> list[tuple[Kind, ChunkId]]:
    """A sweep as forward's, where gradients of a held group land now and then and at the latest before its RELEASE."""
    events: list[tuple[Kind, ChunkId]] = []
    held: list[int] = []
    owing: set[int] = set()

    def land(group: int) -> None:
        events.append((Kind.WRITE if group in begun else Kind.CREATE, grad(group)))
        begun.add(group)
        owing.discard(group)

    for kind, chunk in _forward(rng, uses, max_held):
        if kind is Kind.HOLD:
            held.append(chunk.group)
            if chunk.group in trained:
                owing.add(chunk.group)
        elif chunk.group in owing:
            land(chunk.group)
        events.append((kind, chunk))
        if kind is Kind.RELEASE:
            held.remove(chunk.group)
        landing = [group for group in held if group in trained]
        if landing and rng.random() < 0.4:
            land(rng.choice(landing))
    return events


def _updates(rng: random.Random, groups: Iterable[int]) -> list[tuple[Kind, ChunkId]]:
    """Updates in any order; the gradients are consumed at once, or all at the end."""
    order = sorted(groups)
    if rng.random() < 0.5:
        rng.shuffle(order)
    updates = [(Kind.UPDATE, param(group)) for group in order]
    consumes = [(Kind.CONSUME, grad(group)) for group in order]
    if rng.random() < 0.5:
        return updates + consumes
    return [event for pair in zip(updates, consumes, strict=True) for event in pair]


def _shuffled_a_little(rng: random.Random, uses: list[int]) -> list[int]:
    """Exchange some neighbours: backward is not forward's exact mirror."""
    mixed = list(uses)
    for index, _ in enumerate(pairwise(uses)):
        if rng.random() < 0.2:
            mixed[index], mixed[index + 1] = mixed[index + 1], mixed[index]
    return mixed
