"""Ids and enums that every layer shares."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Tier(enum.Enum):
    """A place bytes can live; each has a cap over all roles on it."""

    DEVICE = "device"
    """The accelerator, or the capped part of RAM that plays it."""
    HOST = "host"
    """RAM; pinned where there is an accelerator."""
    DISK = "disk"

    # Members are singletons: hashing by identity is right, and several times faster than Enum's own hash of the name.
    __hash__ = object.__hash__


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
