"""The smallest changes after which a step fits; each is tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from chunkmem.errors import LayoutError, StateError
from chunkmem.estimate.optimizers import is_elementwise
from chunkmem.estimate.question import UNLIMITED_NBYTES, Question, device_need, disk_need, fits, host_need
from chunkmem.estimate.rehearse import Rehearsal
from chunkmem.layout.pack import SLAB_FLOOR_NBYTES, SLABS_PER_CAP

_NEAR = 1.1
"""A cap that is short by less than this factor is the first thing to change."""

_IMPOSSIBLE = LayoutError, StateError
"""There are no blocks to recompute, or the head has the weight of an embedding that is to compute on HOST."""
_QUARTERINGS = 3
"""How often tiles are quartered in search of those that fit."""

_OPTIONS = MappingProxyType(
    {
        "device_nbytes": ("device", "--device"),
        "host_nbytes": ("host", "--host"),
        "disk_nbytes": ("disk", "--disk"),
        "tile_numel": ("tile", "--tile"),
        "is_accumulating": ("accumulate", "--accumulate"),
        "checkpointing": ("checkpointing", "--checkpointing"),
        "activations": ("activations", "--activations"),
        "cpu_embedding": ("cpu embedding", "--cpu-embedding"),
        "in_backward": ("in backward", "--in-backward"),
        "precision": ("precision", "--precision"),
        "batch": ("batch", "--batch"),
        "world": ("world", "--world"),
    }
)
"""By what of a question may be changed: its name, and the option of the command line."""

Rehearse = Callable[[Question], Rehearsal]


@dataclass(frozen=True)
class Change:
    """What to change so that it fits."""

    what: str
    """Names of `_OPTIONS`; several are joined by " + "."""
    options: tuple[str, ...]
    """Of the command line, to add or to replace: ``("--batch", "2")``."""
    question: Question
    """The question after the change; the answer to it is that it fits."""


def _change(question: Question, changed: Question) -> Change:
    names, words = [], []
    for field, (name, option) in _OPTIONS.items():
        value = getattr(changed, field)
        if value != getattr(question, field):
            names.append(name)
            words += [option] if value is True else [option, str(value)]
    return Change(" + ".join(names), tuple(words), changed)


def smallest_changes(question: Question, rehearsal: Rehearsal, *, rehearse: Rehearse) -> list[Change]:
    """Return changes that each suffice, the least intrusive first. Not empty: caps that are large enough always do.

    Args:
        question: one to which the answer is no.
        rehearsal: of `question`.
        rehearse: returns the rehearsal of another question; takes seconds for a large model.
    """
    caps = raised_caps(question, rehearsal, rehearse)
    found = [_change(question, changed) for changed in _alone(question, rehearsal, rehearse)]
    if all(change.what == "world" for change in found):
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
    return _change(question, raised)


def _below_raised(question: Question, rehearsal: Rehearsal) -> Question:
    if not question.disk_nbytes:
        return replace(question, host_nbytes=host_need(question, rehearsal))
    if (disk_nbytes := disk_need(question, rehearsal)) is not None:
        return replace(question, disk_nbytes=disk_nbytes)
    host_nbytes = host_need(replace(question, disk_nbytes=UNLIMITED_NBYTES), rehearsal)
    return _below_raised(replace(question, host_nbytes=host_nbytes), rehearsal)


def _with_disk(question: Question, rehearsal: Rehearsal) -> Iterator[Question]:
    if question.disk_nbytes or not question.host_nbytes:  # raising it is another change
        return
    if (disk_nbytes := disk_need(question, rehearsal)) is not None:
        yield replace(question, disk_nbytes=disk_nbytes)


def _slab_floor(question: Question) -> int:
    if question.chunk_numel is not None:
        return 0
    return min(SLAB_FLOOR_NBYTES, question.device_nbytes // SLABS_PER_CAP)


def _is_near(question: Question, raised: Question) -> bool:
    host, raised_host = question.host_nbytes or 1, raised.host_nbytes or 1
    return raised.device_nbytes <= _NEAR * question.device_nbytes and raised_host <= _NEAR * host


def _alone(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Question]:
    accumulating = replace(question, is_accumulating=True)
    if question.world > 1 and not question.is_accumulating and fits(accumulating, rehearsal):
        yield accumulating
    yield from _tiled(question, rehearsal, rehearse)
    if not question.checkpointing:
        yield from _if_it_fits(replace(question, checkpointing=True), rehearse)
        if question.activations is None:
            yield from _if_it_fits(replace(question, activations="auto"), rehearse)
    if not question.cpu_embedding:
        yield from _if_it_fits(replace(question, cpu_embedding=True), rehearse)
    yield from _largest_batch(question, rehearse, below=question.batch)
    yield from _with_disk(question, rehearsal)
    if question.world == 1 and not question.in_backward:
        yield from _if_it_fits(replace(question, in_backward=True), rehearse)
    if question.precision == "fp32":
        yield from _if_it_fits(replace(question, precision="bf16"), rehearse)
    yield from _more_ranks(question, rehearsal, rehearse)


def _tiled(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Question]:
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
            yield tiled
            return
        before, need_nbytes = need_nbytes, device_need(tiled, rehearsal).nbytes
        if need_nbytes >= before:  # something else is what needs most
            return


def _together(question: Question, rehearse: Rehearse) -> Iterator[Change]:
    precision = "bf16" if question.precision == "fp32" else question.precision
    for cpu_embedding in dict.fromkeys((question.cpu_embedding, True)):
        all_of_them = replace(question, checkpointing=True, precision=precision, cpu_embedding=cpu_embedding)
        for fitting in _largest_batch(all_of_them, rehearse, below=question.batch + 1):
            change = _change(question, fitting)
            if " + " in change.what:
                yield change
            return


def _if_it_fits(changed: Question, rehearse: Rehearse) -> Iterator[Question]:
    try:
        rehearsal = rehearse(changed)
    except _IMPOSSIBLE:
        return
    if fits(changed, rehearsal):
        yield changed


def _largest_batch(question: Question, rehearse: Rehearse, *, below: int) -> Iterator[Question]:
    """Find the largest batch that fits."""

    def lacks_room(batch: int) -> bool:
        return not any(_if_it_fits(replace(question, batch=batch), rehearse))

    if below > 1 and not lacks_room(1):
        yield replace(question, batch=_first(1, below, lacks_room) - 1)


def _more_ranks(question: Question, rehearsal: Rehearsal, rehearse: Rehearse) -> Iterator[Question]:
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
    high = _first(max(question.world, high // 2), high, lambda world: fits(over(world), rehearsal))
    while not fits(over(high), rehearse(over(high))):
        high *= 2
        if high > most:
            return
    yield over(high)


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number for which something holds: `high`, or one between it and `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
