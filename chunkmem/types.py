"""Ids and enums that every layer shares."""

from __future__ import annotations

import enum
import itertools
from typing import NamedTuple


class Tier(enum.Enum):
    """A place bytes can live; each has a cap over all roles on it."""

    DEVICE = "device"
    """The accelerator, or the capped part of RAM that plays it."""
    HOST = "host"
    """RAM; pinned where there is an accelerator."""

    # Members are singletons: hashing by identity is right, and several times faster than Enum's own hash of the name.
    __hash__ = object.__hash__


TIERS = tuple(Tier)
"""A chain, from the tier that computes to the one furthest from it. Bytes pass between neighbors only: HOST is the
gateway of whatever comes below it."""
PLACE = {tier: place for place, tier in enumerate(TIERS)}
"""Of each tier in the chain."""

Link = tuple[Tier, Tier]
"""Source and target of a copy."""
LINKS: tuple[Link, ...] = tuple(
    link for upper, lower in itertools.pairwise(TIERS) for link in ((lower, upper), (upper, lower))
)
"""Both directions between each tier and the one below it."""


def neighbor(tier: Tier) -> Tier:
    """Return where what leaves a tier goes: to the one below it or, from the last of the chain, to the one above."""
    place = PLACE[tier]
    return TIERS[place + 1] if place + 1 < len(TIERS) else TIERS[place - 1]


class Role(enum.Enum):
    """What a chunk holds. The chunks of one group hold the same parameters at the same offsets in every role."""

    PARAM = "param"
    """Weights in the compute dtype; in fp32 training they are the master weights too."""
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"

    __hash__ = object.__hash__


class ChunkId(NamedTuple):
    """One chunk: a group of parameters in one role."""

    role: Role
    group: int

    def __str__(self) -> str:
        return f"{self.role.value} chunk {self.group}"
