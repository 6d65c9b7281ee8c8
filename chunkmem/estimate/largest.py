"""The largest model of a family that fits, and what binds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from chunkmem.data.errors import CapacityError
from chunkmem.data.types import Tier
from chunkmem.estimate.families import Family
from chunkmem.estimate.needs import DeviceNeed
from chunkmem.estimate.question import Finding, Question, device_need, find, find_chosen, made_once, rehearsed

MOST_LAYERS = 1000
"""Where the search ends."""
_BYTES_A_PARAM = 16
"""For a first guess at the width."""


@dataclass(frozen=True)
class Tried:
    """A model that was planned."""

    width: int
    layers: int
    question: Question

    @property
    def nbytes(self) -> int:
        """Bytes of chunks and activations on the tiers of all ranks."""
        rehearsal = self.question.rehearsal
        return sum(rehearsal.role_nbytes.values()) + self.question.mesh.shard * rehearsal.activation_nbytes

    @property
    def device_need(self) -> DeviceNeed:
        """The smallest cap on DEVICE."""
        return device_need(self.question)


@dataclass(frozen=True)
class Fitting(Tried):
    """A model that fits."""

    finding: Finding


@dataclass(frozen=True)
class TooLarge(Tried):
    """A model that does not fit."""

    shortage: CapacityError


@dataclass(frozen=True)
class Largest:
    """The largest model that fits, if one does, and the one beyond it, which does not."""

    fitting: Fitting | None
    beyond: TooLarge | None
    """None: the search ended at `MOST_LAYERS`."""
    num_tried: int


def largest(family: Family, question: Question, *, note: Callable[[Fitting | TooLarge], None]) -> Largest:
    """Search by layers, at the widest sensible width of which one layer fits. More layers never need less.

    Args:
        family: whose models to try.
        question: how to train, and on what; HOST has a cap. Its own model does not matter.
        note: called after each try.
    """
    mesh = question.mesh
    total_nbytes = mesh.shard * question.total_nbytes
    num_tried = 0

    def tried(width: int, layers: int) -> Fitting | TooLarge:
        nonlocal num_tried
        num_tried += 1
        asked = replace(question, model=family.sized(width, layers), rehearse=made_once(rehearsed))
        try:
            found: Fitting | TooLarge = Fitting(width, layers, asked, find(asked))
        except CapacityError as error:
            found = TooLarge(width, layers, asked, error)
        note(found)
        return found

    for width in family.widths(mesh.tp * total_nbytes // _BYTES_A_PARAM, tp=mesh.tp):
        first = tried(width, 1)
        if isinstance(first, Fitting):
            break
    if isinstance(first, TooLarge):
        return Largest(None, first, num_tried)
    second = tried(width, 2)
    if isinstance(second, TooLarge):
        return Largest(_as_trained(first), second, num_tried)
    layer_nbytes = max(1, second.nbytes - first.nbytes)
    on_device_nbytes = max(1, second.device_need.nbytes - first.device_need.nbytes)
    fitting, beyond = second, None
    guess = 2 + min(
        (total_nbytes - second.nbytes) // layer_nbytes,
        (question.device_nbytes - second.device_need.nbytes) // on_device_nbytes,
    )
    stride = max(1, guess // 8)
    while fitting.layers < MOST_LAYERS and (beyond is None or beyond.layers > fitting.layers + 1):
        most = MOST_LAYERS if beyond is None else beyond.layers - 1
        found = tried(width, max(fitting.layers + 1, min(most, guess)))
        if isinstance(found, Fitting):
            fitting, guess, stride = found, found.layers + stride, 2 * stride
        else:
            beyond, stride = found, 1
            each_nbytes = on_device_nbytes if found.shortage.tier is Tier.DEVICE else layer_nbytes // mesh.shard
            # How many layers the shortage is, if each takes so many bytes of the tier that binds.
            short_nbytes = found.shortage.needed_nbytes - found.shortage.cap_nbytes
            guess = found.layers - max(1, -(-short_nbytes // max(1, each_nbytes)))
            if guess <= fitting.layers:
                guess = (fitting.layers + found.layers) // 2
    return Largest(_as_trained(fitting), beyond, num_tried)


def _as_trained(fitting: Fitting) -> Fitting:
    """Return a model that fits as it is trained: when it was tried, all regions were recomputed."""
    finding = find_chosen(fitting.finding)
    return replace(fitting, question=finding.question, finding=finding)
