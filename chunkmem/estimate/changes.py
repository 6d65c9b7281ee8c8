"""The smallest changes after which a step fits; each is tried before it is named."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from types import MappingProxyType
from typing import Any

from chunkmem.data.errors import LayoutError, StateError
from chunkmem.data.types import TIERS
from chunkmem.estimate.mesh import RankMesh
from chunkmem.estimate.optimizers import is_elementwise
from chunkmem.estimate.question import Question, below_raised, device_need, fits, with_third_tier

_NEAR = 1.1
"""A cap that is short by less than this factor is the first thing to change."""

_IMPOSSIBLE = LayoutError, StateError
"""There are no blocks to recompute, or the head has the weight of an embedding that is to compute on HOST."""
_QUARTERINGS = 3
"""How often tiles are quartered in search of those that fit."""

_NAMES = MappingProxyType(
    {f"{tier.value}_nbytes": tier.value for tier in TIERS}
    | {
        "tile_numel": "tile",
        "is_accumulating": "accumulate",
        "checkpointing": "checkpointing",
        "activations": "activations",
        "cpu_embedding": "cpu embedding",
        "in_backward": "in backward",
        "precision": "precision",
        "batch": "batch",
        "mesh": "world",
    }
)
"""Of what may be changed of a question; options of the command line have the same."""


@dataclass(frozen=True)
class Change:
    """What to change so that it fits."""

    what: str
    """Of `_NAMES`; several are joined by " + "."""
    options: tuple[str, ...]
    """Of the command line, to add or to replace: ``("--batch", "2")``."""
    question: Question
    """The question after the change; the answer to it is that it fits."""


def _change(question: Question, changed: Question) -> Change:
    values = {name: getattr(changed, key) for key, name in _NAMES.items() if vars(changed)[key] != vars(question)[key]}
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, RankMesh):
            name, value = ("mesh", value) if value.tp > 1 else (name, value.world)
        words += [f"--{name.replace(' ', '-')}", *([] if value is True else [str(value)])]
    return Change(" + ".join(values), tuple(words), changed)


def smallest_changes(question: Question) -> list[Change]:
    """Return changes that each suffice, the least intrusive first. Not empty: caps that are large enough always do.

    The answer to the question is no. Each rehearsal takes seconds for a large model.
    """
    caps = raised_caps(question)
    found = [_change(question, changed) for changed in _alone(question)]
    if all(change.what == "world" for change in found):
        found += _together(question)
    return [caps, *found] if _is_near(question, caps.question) else [*found, caps]


def raised_caps(question: Question) -> Change:
    """Return the change of `device_nbytes`, `host_nbytes` and, where there is one, `disk_nbytes` to small ones that
    work."""
    enough = question
    while (need_nbytes := device_need(enough).nbytes) > enough.device_nbytes:  # the chunk size is searched for the cap
        enough = replace(enough, device_nbytes=need_nbytes)
    if enough.host_nbytes is not None and not fits(enough):
        enough = below_raised(enough)
    return _change(question, enough)


def _is_near(question: Question, raised: Question) -> bool:
    host, raised_host = question.host_nbytes or 1, raised.host_nbytes or 1
    return raised.device_nbytes <= _NEAR * question.device_nbytes and raised_host <= _NEAR * host


def _alone(question: Question) -> Iterator[Question]:
    def fitting(**changes: Any) -> Iterator[Question]:
        changed = replace(question, **changes)
        if changed != question and _fits(changed):
            yield changed

    yield from fitting(is_accumulating=True)
    yield from _tiled(question)
    if question.activations is None:  # which is another way to do the same
        yield from fitting(checkpointing=True)
    if not question.checkpointing:
        yield from fitting(activations="auto")
    yield from fitting(cpu_embedding=True)
    yield from _largest_batch(question, below=question.batch)
    yield from with_third_tier(question)  # raising its cap is another change
    if question.mesh.world == 1 and question.precision != "fp16":
        yield from fitting(in_backward=True)
    if question.precision == "fp32":
        yield from fitting(precision="bf16")
    yield from _more_ranks(question)


def _fits(question: Question) -> bool:
    """Tell whether there is a plan; no if the model cannot be trained that way."""
    try:
        return fits(question)
    except _IMPOSSIBLE:
        return False


def _tiled(question: Question) -> Iterator[Question]:
    """Find the largest of quarters, sixteenths and so on of the widest weight as tiles of which it fits."""
    need_nbytes = device_need(question).nbytes
    if need_nbytes <= question.device_nbytes or not is_elementwise(question.optimizer) or question.mesh.tp > 1:
        return  # HOST is what is too small, or whole matrices are updated, or parts are what there is
    widest = max(question.rehearsal.layout.tensors, key=lambda tensor: tensor.numel)
    # Gradients on their way to a chunk are among the activations, and shrink with the tiles.
    least_nbytes = question.rehearsal.activation_nbytes - 2 * widest.nbytes
    if question.hardware.is_accelerator and least_nbytes > question.device_nbytes:
        return
    numel = min(widest.numel, question.tile_numel or widest.numel)
    for _ in range(_QUARTERINGS):
        numel = max(1, numel // 4)
        tiled = replace(question, tile_numel=numel)
        if _fits(tiled):
            yield tiled
            return
        before, need_nbytes = need_nbytes, device_need(tiled).nbytes
        if need_nbytes >= before:  # something else is what needs most
            return


def _together(question: Question) -> Iterator[Change]:
    precision = "bf16" if question.precision == "fp32" else question.precision
    all_of_them = replace(question, checkpointing=question.activations is None, precision=precision)
    accumulates = question.is_accumulating or question.mesh.world > 1
    ways = product(
        dict.fromkeys((question.cpu_embedding, True)), dict.fromkeys((question.is_accumulating, accumulates))
    )
    for cpu_embedding, accumulating in ways:
        asked = replace(all_of_them, cpu_embedding=cpu_embedding, is_accumulating=accumulating)
        for fitting in _largest_batch(asked, below=question.batch + 1):
            change = _change(question, fitting)
            if " + " in change.what:
                yield change
            return


def _largest_batch(question: Question, *, below: int) -> Iterator[Question]:
    """Find the largest batch that fits."""

    def lacks_room(batch: int) -> bool:
        return not _fits(replace(question, batch=batch))

    if below > 1 and not lacks_room(1):
        yield replace(question, batch=bisect_left(range(below), True, lo=2, key=lacks_room) - 1)


def _more_ranks(question: Question) -> Iterator[Question]:
    """Find the fewest ranks, each with the same batch; a batch that is too large for one stays too large.

    They are looked for with the chunks of one rehearsal, and those found are tried with chunks of their own.
    They are spread evenly over as many machines and replicas as before.
    """
    mesh = question.mesh
    parts = lcm(-(-mesh.world // question.peers.ranks_a_machine), mesh.replicate)

    def over(world: int) -> Question:
        return replace(question, mesh=replace(mesh, shard=-(-world // parts) * parts // mesh.replicate))

    def has_room(world: int) -> bool:
        return fits(over(world).rehearsed_as(first))

    high = max(2, mesh.world)
    first = over(high)
    if device_need(first).nbytes > question.device_nbytes:  # a unit does not shrink with more ranks
        return
    # Beyond as many ranks as groups, none keeps less.
    most = max(high, mesh.replicate * len(first.rehearsal.layout.groups))
    while not has_room(high):
        high *= 2
        if high > most:
            return
    high = bisect_left(range(high), True, lo=max(mesh.world, high // 2) + 1, key=has_room)
    while not _fits(over(high)):
        high *= 2
        if high > most:
            return
    yield over(high)
