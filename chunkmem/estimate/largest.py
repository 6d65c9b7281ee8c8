"""The largest model of a family that fits, and what binds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from chunkmem.errors import CapacityError
from chunkmem.estimate.families import Family
from chunkmem.estimate.question import Finding, Question, device_need, find, find_chosen
from chunkmem.estimate.rehearse import Rehearsal

MOST_LAYERS = 1000
"""Where the search ends."""
_BYTES_A_PARAM = 16
"""For a first guess at the width."""


@dataclass(frozen=True)
class Tried:
    """A model that was planned, and how that went."""

    width: int
    layers: int
    question: Question
    rehearsal: Rehearsal
    finding: Finding | None
    """None: it does not fit."""
    shortage: CapacityError | None
    """Why not."""

    @property
    def nbytes(self) -> int:
        """Bytes of chunks and activations on the tiers of all ranks."""
        activations_nbytes = self.question.world * self.rehearsal.activation_nbytes
        return sum(self.rehearsal.role_nbytes.values()) + activations_nbytes


@dataclass(frozen=True)
class Largest:
    """The largest model that fits, if one does, and the one beyond it, which does not."""

    fitting: Tried | None
    beyond: Tried | None
    """None: the search ended at `MOST_LAYERS`."""
    num_tried: int


def largest(family: Family, question: Question, *, note: Callable[[Tried], None]) -> Largest:
    """Search by layers, at the widest sensible width of which one layer fits. More layers never need less.

    Args:
        family: whose models to try.
        question: how to train, and on what; HOST has a cap. Its own model does not matter.
        note: called after each try.
    """
    assert question.host_nbytes is not None
    total_nbytes = question.world * (question.device_nbytes + question.host_nbytes + question.disk_nbytes)
    num_tried = 0

    def tried(width: int, layers: int) -> Tried:
        nonlocal num_tried
        num_tried += 1
        found = _try(replace(question, model=family.sized(width, layers)), width, layers)
        note(found)
        return found

    for width in family.widths(total_nbytes // _BYTES_A_PARAM):
        fitting = tried(width, 1)
        if fitting.finding is not None:
            break
    else:
        return Largest(None, fitting, num_tried)
    second = tried(width, 2)
    if second.finding is None:
        return Largest(_as_trained(fitting), second, num_tried)
    layer_nbytes = max(1, second.nbytes - fitting.nbytes)
    on_device_nbytes = max(1, _on_device(second) - _on_device(fitting))
    fitting, beyond = second, None
    guess = 2 + min(
        (total_nbytes - second.nbytes) // layer_nbytes,
        (question.device_nbytes - _on_device(second)) // on_device_nbytes,
    )
    stride = max(1, guess // 8)
    while fitting.layers < MOST_LAYERS and (beyond is None or beyond.layers > fitting.layers + 1):
        most = MOST_LAYERS if beyond is None else beyond.layers - 1
        found = tried(width, max(fitting.layers + 1, min(most, guess)))
        if found.finding is not None:
            fitting, guess, stride = found, found.layers + stride, 2 * stride
        else:
            beyond, stride = found, 1
            each_nbytes = on_device_nbytes if binds_on_device(found) else layer_nbytes // question.world
            guess = found.layers - _layers_too_many(found, each_nbytes)
            if guess <= fitting.layers:
                guess = (fitting.layers + found.layers) // 2
    return Largest(_as_trained(fitting), beyond, num_tried)


def _as_trained(tried: Tried) -> Tried:
    """Return a model that fits as it is trained: when it was tried, all regions were recomputed."""
    assert tried.finding is not None
    rehearsal, finding = find_chosen(tried.question, tried.rehearsal, tried.finding)
    return replace(tried, rehearsal=rehearsal, finding=finding)


def _try(question: Question, width: int, layers: int) -> Tried:
    rehearsal = question.rehearse()
    try:
        return Tried(width, layers, question, rehearsal, find(question, rehearsal), None)
    except CapacityError as error:
        return Tried(width, layers, question, rehearsal, None, error)


def _layers_too_many(tried: Tried, layer_nbytes: int) -> int:
    """Return how many layers the shortage is, if each takes so many bytes of the tier that binds."""
    shortage = tried.shortage
    assert shortage is not None
    short_nbytes = (shortage.needed_nbytes or 0) - (shortage.cap_nbytes or 0)
    return max(1, -(-short_nbytes // max(1, layer_nbytes)))


def binds_on_device(tried: Tried) -> bool:
    """Tell whether it is DEVICE that is too small for a model which does not fit."""
    return _on_device(tried) > tried.question.device_nbytes


def _on_device(tried: Tried) -> int:
    return device_need(tried.question, tried.rehearsal).nbytes
