"""The smallest changes after which a step fits; each is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from chunkmem.errors import LayoutError, StateError
from chunkmem.estimate.optimizers import is_elementwise
from chunkmem.estimate.question import UNLIMITED_NBYTES, Change, Question, device_need, disk_need, fits, host_need
from chunkmem.estimate.rehearse import Rehearsal
from chunkmem.layout.pack import SLAB_FLOOR_NBYTES, SLABS_PER_CAP

_NEAR = 1.1
"""A cap that is short by less than this factor is the first thing to change."""

_IMPOSSIBLE = LayoutError, StateError
"""There are no blocks to recompute, or the head has the weight of an embedding that is to compute on HOST."""
_QUARTERINGS = 3
"""How often tiles are quartered in search of those that fit."""

Rehearse = Callable[[Question], Rehearsal]


def smallest_changes(question: Question, rehearsal: Rehearsal, *, rehearse: Rehearse) -> list[Change]:
    """Return changes that each suffice, the least intrusive first. Not empty: caps that are large enough always do.

    Args:
        question: one to which the answer is no.
        rehearsal: of `question`.
        rehearse: returns the rehearsal of another question; takes seconds for a large model.
    """
    caps = raised_caps(question, rehearsal, rehearse)
    found = [*_alone(question, rehearsal, rehearse)]
    if not any(change.what != "world" for change in found):
        found += _together(question, rehearse)
    return [caps, *found] if _is_near(question, caps.question) else [*found, caps]


def raised_caps(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Change:
    """Return the change of `device_nbytes`, `host_nbytes` and, where there is one, `disk_nbytes` to small ones that
    work."""
    raised = question
    while True:
        enough = replace(raised, device_nbytes=max(raised.device_nbytes, device_need(raised, rehearsal).nbytes))
        if _slab_floor(enough) == _slab_floor(raised):
            break
        raised, rehearsal = enough, rehearse(enough)  # the chunk size is searched for the cap
    raised = enough
    if raised.host_nbytes is not None and not fits(raised, rehearsal):
        raised = _below_raised(raised, rehearsal)
    parts: dict[str, tuple[str, ...]] = {}
    if raised.device_nbytes > question.device_nbytes:
        parts["device"] = ("--device", str(raised.device_nbytes))
    if raised.host_nbytes is not None and raised.host_nbytes != question.host_nbytes:
        parts["host"] = ("--host", str(raised.host_nbytes))
    if raised.disk_nbytes != question.disk_nbytes:
        parts["disk"] = ("--disk", str(raised.disk_nbytes))
    return _joined(parts, raised)


def _below_raised(question: Question, rehearsal: Rehearsal) -> Question:
    if not question.disk_nbytes:
        return replace(question, host_nbytes=host_need(question, rehearsal))
    if (disk_nbytes := disk_need(question, rehearsal)) is not None:
        return replace(question, disk_nbytes=disk_nbytes)
    host_nbytes = host_need(replace(question, disk_nbytes=UNLIMITED_NBYTES), rehearsal)
    return _below_raised(replace(question, host_nbytes=host_nbytes), rehearsal)


def _with_disk(question: Question, rehearsal: Rehearsal) -> Iterator[Change]:
    if question.disk_nbytes or not question.host_nbytes:  # raising it is another change
        return
    if (disk_nbytes := disk_need(question, rehearsal)) is not None:
        yield Change("disk", ("--disk", str(disk_nbytes)), replace(question, disk_nbytes=disk_nbytes))


def _joined(parts: Mapping[str, tuple[str, ...]], question: Question) -> Change:
    return Change(" + ".join(parts), tuple(word for words in parts.values() for word in words), question)


def _slab_floor(question: Question) -> int:
    if question.chunk_numel is not None:
        return 0
    return min(SLAB_FLOOR_NBYTES, question.device_nbytes // SLABS_PER_CAP)


def _is_near(question: Question, raised: Question) -> bool:
    host, raised_host = question.host_nbytes or 1, raised.host_nbytes or 1
    return raised.device_nbytes <= _NEAR * question.device_nbytes and raised_host <= _NEAR * host


def _alone(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Change]:
    accumulating = replace(question, is_accumulating=True)
    if question.world > 1 and not question.is_accumulating and fits(accumulating, rehearsal):
        yield Change("accumulate", ("--accumulate",), accumulating)
    yield from _tiled(question, rehearsal, rehearse)
    if not question.checkpointing:
        yield from _tried(replace(question, checkpointing=True), "checkpointing", ("--checkpointing",), rehearse)
        if question.activations is None:
            options = ("--activations", "auto")
            yield from _tried(replace(question, activations="auto"), "activations", options, rehearse)
    if not question.cpu_embedding:
        yield from _tried(replace(question, cpu_embedding=True), "cpu embedding", ("--cpu-embedding",), rehearse)
    yield from _smaller_batch(question, rehearse)
    yield from _with_disk(question, rehearsal)
    if question.world == 1 and not question.in_backward:
        yield from _tried(replace(question, in_backward=True), "in backward", ("--in-backward",), rehearse)
    if question.dtype is torch.float32:
        yield from _tried(replace(question, dtype=torch.bfloat16), "precision", ("--precision", "bf16"), rehearse)
    yield from _more_ranks(question, rehearsal, rehearse)


def _tiled(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Change]:
    """Find the largest of quarters, sixteenths and so on of the widest weight as tiles of which it fits."""
    need_nbytes = device_need(question, rehearsal).nbytes
    if need_nbytes <= question.device_nbytes or not is_elementwise(question.optimizer):
        return  # HOST is what is too small, or whole matrices are updated
    widest = max(rehearsal.layout.tensors, key=lambda tensor: tensor.numel)
    # Gradients on their way to a chunk are among the activations, and shrink with the tiles.
    least_nbytes = rehearsal.activation_nbytes - 2 * widest.nbytes
    if question.hardware.is_accelerator and least_nbytes > question.device_nbytes:
        return
    numel = min(widest.numel, question.tile_numel or widest.numel)
    for _ in range(_QUARTERINGS):
        numel = max(1, numel // 4)
        tiled = replace(question, tile_numel=numel)
        rehearsal = rehearse(tiled)
        if fits(tiled, rehearsal):
            yield Change("tile", ("--tile", str(numel)), tiled)
            return
        before, need_nbytes = need_nbytes, device_need(tiled, rehearsal).nbytes
        if need_nbytes >= before:  # something else is what needs most
            return


def _together(question: Question, rehearse: Rehearse) -> Iterator[Change]:
    for cpu_embedding in dict.fromkeys((question.cpu_embedding, True)):
        all_of_them = replace(question, checkpointing=True, dtype=torch.bfloat16, cpu_embedding=cpu_embedding)
        for change in _smaller_batch(all_of_them, rehearse, and_same=True):
            parts = {
                "checkpointing": () if question.checkpointing else ("--checkpointing",),
                "cpu embedding": () if question.cpu_embedding is cpu_embedding else ("--cpu-embedding",),
                "precision": ("--precision", "bf16") if question.dtype is torch.float32 else (),
                "batch": change.options if change.question.batch != question.batch else (),
            }
            used = {what: options for what, options in parts.items() if options}
            if len(used) > 1:
                yield _joined(used, change.question)
            return


def _tried(changed: Question, what: str, options: tuple[str, ...], rehearse: Rehearse) -> Iterator[Change]:
    try:
        rehearsal = rehearse(changed)
    except _IMPOSSIBLE:
        return
    if fits(changed, rehearsal):
        yield Change(what, options, changed)


def _smaller_batch(question: Question, rehearse: Rehearse, *, and_same: bool = False) -> Iterator[Change]:
    """Find the largest batch that fits; `and_same` tries the question's own, too."""
    high = question.batch + 1 if and_same else question.batch

    def need(batch: int) -> int:
        asked = replace(question, batch=batch)
        return device_need(asked, rehearse(asked)).nbytes

    def enough(batch: int) -> bool:
        asked = replace(question, batch=batch)
        return fits(asked, rehearse(asked))

    low = 1
    try:
        if high <= low or not enough(low):
            return
    except _IMPOSSIBLE:
        return
    # Each sample adds about the same bytes, so a straight line soon finds the place.
    low_need, high_need = need(low), need(high - 1 if and_same else high)
    while high - low > 1:
        share = (question.device_nbytes - low_need) / max(1, high_need - low_need)
        guess = max(low + 1, min(high - 1, low + int((high - low) * share)))
        if enough(guess):
            low, low_need = guess, need(guess)
        else:
            high, high_need = guess, need(guess)
    yield Change("batch", ("--batch", str(low)), replace(question, batch=low))


def _more_ranks(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Change]:
    """Find the fewest ranks, each with the same batch; a batch that is too large for one stays too large.

    They are looked for with the chunks of one rehearsal, and those found are tried with chunks of their own.
    """

    def over(world: int) -> Question:
        return replace(question, world=world)

    high = max(2, question.world)
    if question.world == 1:
        rehearsal = rehearse(over(high))
    if device_need(over(high), rehearsal).nbytes > question.device_nbytes:  # a unit does not shrink with more ranks
        return
    most = max(high, len(rehearsal.layout.groups))  # beyond as many ranks as groups, none keeps less
    while not fits(over(high), rehearsal):
        high *= 2
        if high > most:
            return
    low = max(question.world, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(over(middle), rehearsal) else (middle, high)
    while not fits(over(high), rehearse(over(high))):
        high *= 2
        if high > most:
            return
    yield Change("world", ("--world", str(high)), over(high))
