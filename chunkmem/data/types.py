"""Ids and enums that every layer shares."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple


class Tier(enum.Enum):
    """A place bytes can live; each has a cap over all roles on it."""

    DEVICE = "device"
    """The accelerator, or the capped part of RAM that plays it."""
    HOST = "host"
    """RAM; pinned where there is an accelerator."""
    DISK = "disk"
    """A file, where `memory.disk` names a folder for it; else there is none."""

    # Members are singletons: hashing by identity is right, and several times faster than Enum's own hash of the name.
    __hash__ = object.__hash__


TIERS = tuple(Tier)
"""A chain, from the tier that computes to the one furthest from it. Bytes pass between neighbors only: HOST is the
gateway of whatever comes below it."""
MEMORY = TIERS[:2]
"""Those that are memory, where tensors are computed with; they are always there."""
BELOW = TIERS[2:]
"""Those that are read and written. Each may be there or not."""
PLACE = {tier: place for place, tier in enumerate(TIERS)}
"""Of each tier in the chain."""

Link = tuple[Tier, Tier]
"""Source and target of a copy."""


def links_of(tiers: Sequence[Tier]) -> Iterator[Link]:
    """Yield both directions between each of some tiers and the next one."""
    for upper, lower in itertools.pairwise(tiers):
        yield from ((lower, upper), (upper, lower))


LINKS: tuple[Link, ...] = (
    *links_of(MEMORY),
    *itertools.chain.from_iterable(map(links_of, itertools.combinations(TIERS[1:], 2))),
)
"""Both directions between each tier and the one below it, whichever is that: those between them may not be there."""
DEVICE_LINKS = LINKS[:2]
"""Those of DEVICE, which there always are."""


def neighbor(tier: Tier, tiers: Collection[Tier] = TIERS, *, end: Tier = TIERS[-1]) -> Tier:
    """Return the next of `tiers` on the way to `end`. By default, that is where what leaves a tier goes: to the one
    below it or, from the last of `tiers`, to the one above."""
    place = PLACE[tier]
    above, below = TIERS[:place][::-1], TIERS[place + 1 :]
    return next(each for each in ((*below, *above) if PLACE[end] > place else above) if each in tiers)


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """What the chunks of a role have in common: all that others than their maker ask of a role."""

    label: str = ""
    """What users call them; empty: the name of the role."""
    is_weights: bool = False
    """Modules compute with them, and hold them meanwhile. Over ranks an exchange brings their content from its owner to
    all; that of others goes to the owner."""
    is_of_call: bool = False
    """Autograd saved them in one call of a region: the group is that call's own, the memory on DEVICE autograd's."""
    is_of_step: bool = False
    """Their content is made and used up within a step; that of others stays from step to step."""
    is_of_update: bool = False
    """Updates alone use them, modules do not compute with them."""
    is_state: bool = False
    """An optimizer or averages have them next to the weights, and take them along where these are packed again."""
    stays: bool = False
    """They stay on the tier where they were made. No step touches them, they are in no trace, and plans leave them
    their room."""


STATE: Final = ChunkKind(is_of_update=True, is_state=True)
"""An optimizer's states, each named by its update rule."""
AVERAGES: Final = ChunkKind("averages", is_state=True, stays=True)
"""Of weights; they never move, see `chunkmem.optim.ema`."""


class Role(str):
    """What a chunk holds: weights, gradients, master weights, activations, or a state that a rule names.

    A string, since sets and tables of chunks hash and compare roles all the time. Those that every model has exist
    once, so that `is` finds them.
    """

    __slots__ = ("kind",)
    kind: ChunkKind
    PARAM: ClassVar[Role]
    """Weights in the compute dtype; in fp32 training they are the master weights too."""
    GRAD: ClassVar[Role]
    MASTER: ClassVar[Role]
    """Weights in fp32, which those of PARAM are rounded from."""
    ACTIVATION: ClassVar[Role]
    """What autograd saved in one call of a region."""

    def __new__(cls, name: str, kind: ChunkKind = STATE) -> Role:
        """Return the role of a name: ``Role("exp_avg")`` is an optimizer state."""
        return _OF_MODELS.get(name) or _made(name, kind)

    def __reduce__(self) -> tuple[type[Role], tuple[str, ChunkKind]]:
        return Role, (str(self), self.kind)

    @property
    def value(self) -> str:
        """The name, as files have it."""
        return str(self)

    @property
    def label(self) -> str:
        """What users call it."""
        return self.kind.label or str(self)

    @property
    def is_state(self) -> bool:
        """An optimizer, or averages, have it next to the weights."""
        return self.kind.is_state

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: PARAM, GRAD, MASTER, ACTIVATION, then others by name."""
        return [*_OF_MODELS].index(self) if self in _OF_MODELS else len(_OF_MODELS), self


class UpdateForm(enum.Enum):
    """What a group's update reads and writes: what its time depends on, besides the bytes."""

    FP32 = "fp32"
    """Weights and states in one dtype."""
    MASTER = "master"
    """Weights in bf16 or fp16 that are rounded from master weights in fp32."""
    CODES = "8bit"
    """Adam's states in 8 bits; weights, or their master weights, in fp32."""
    CODES_ALONE = "8bit without master"
    """Adam's states in 8 bits; weights in bf16, rounded stochastically."""

    __hash__ = object.__hash__


def _made(name: str, kind: ChunkKind) -> Role:
    role = str.__new__(Role, name)
    role.kind = kind
    return role


_OF_MODELS: Final = MappingProxyType(
    {
        name: _made(name, kind)
        for name, kind in {
            "param": ChunkKind("weights", is_weights=True),
            "grad": ChunkKind("gradients", is_of_step=True),
            "master": ChunkKind("master weights", is_of_update=True),
            "activation": ChunkKind("activations", is_of_call=True, is_of_step=True),
        }.items()
    }
)
Role.PARAM, Role.GRAD, Role.MASTER, Role.ACTIVATION = _OF_MODELS.values()


class ChunkId(NamedTuple):
    """One chunk: a group of parameters in one role, or the activations of one region."""

    role: Role
    group: int

    def __str__(self) -> str:
        return f"{self.role.value} chunk {self.group}"


@dataclass(frozen=True)
class ActivationPolicy:
    """What becomes of what calls of a region save between forward and backward."""

    saves: bool = True
    """Activations of some calls are kept for backward."""
    recomputes: bool = False
    """Some calls run again in backward, and only their inputs are kept."""
    stays: bool = False
    """What is kept stays on DEVICE; else it may be offloaded to HOST."""

    @property
    def is_auto(self) -> bool:
        """Whether a call is recomputed is decided for each kind of step."""
        return self.saves and self.recomputes

    def recomputes_call(self, number: int, kept: Collection[int]) -> bool:
        """Tell whether a call is recomputed; `kept` are the numbers of those for which that was decided against."""
        return number not in kept if self.is_auto else self.recomputes


ACTIVATION_POLICIES: Final = MappingProxyType(
    {
        "auto": ActivationPolicy(recomputes=True),
        "keep": ActivationPolicy(stays=True),
        "offload": ActivationPolicy(),
        "recompute": ActivationPolicy(saves=False, recomputes=True),
    }
)
"""By the name that the configuration, `manager.region` and the command line have for it."""
