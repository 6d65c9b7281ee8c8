"""What a plan is made for: the caps and the speeds of one machine. Plain data."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from chunkmem.errors import PlanError
from chunkmem.schema import BOOL, NULL, Check, either
from chunkmem.trace.reader import COUNT, FINITE, SECONDS, Format


@dataclass(frozen=True)
class Machine:
    """Caps and speeds. Every field may be given by hand; `runtime.measure` measures them."""

    device_nbytes: int
    """Cap on DEVICE."""
    host_nbytes: int
    """Cap on HOST; 0 if both tiers are one piece of RAM and everything stays on DEVICE."""
    h2d_Bps: float
    """Bytes a second from HOST to DEVICE."""
    d2h_Bps: float
    latency_s: float = 0.0
    """Of each copy, in addition to its bytes."""
    device_update_Bps: float = inf
    """Bytes of PARAM, GRAD and states that an update on DEVICE passes over in a second; inf: take the trace's times."""
    host_update_Bps: float = inf
    charges_non_model: bool = False
    """The cap on DEVICE also covers the non-model data of the trace: true on an accelerator."""
    one_processor: bool = True
    """DEVICE and HOST compute on the same cores, so updates on them take turns."""
    shadow_nbytes: int = 0
    """Bytes of HOST for the shadow buffers for speculative updates; 0: there are none."""
    exchange_Bps: float = inf
    """Bytes of chunks that all ranks together exchange in a second, whichever rank owns them."""

    def __post_init__(self) -> None:
        for name in ("h2d_Bps", "d2h_Bps", "device_update_Bps", "host_update_Bps", "exchange_Bps"):
            speed = getattr(self, name)
            if not speed > 0:
                raise PlanError(
                    f"machine: {name} is {speed} bytes/s, and nothing could ever arrive; measure again, or give a "
                    "speed above 0"
                )
        for name in ("device_nbytes", "host_nbytes", "latency_s", "shadow_nbytes"):
            value = getattr(self, name)
            if value < 0 or not isfinite(value):
                raise PlanError(f"machine: {name} is {value}; give a finite number, 0 or more")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file. A file that is there is replaced as a whole; no directory is created.

        Raises:
            PlanError: the file cannot be written, or it has a value, such as NaN, that none should have.
        """
        _FORMAT.save(self.to_dict(), path, self.from_dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Return what `save` wrote.

        Raises:
            PlanError: it cannot be read, or is something else, of a newer version, or damaged; names the file.
        """
        return _FORMAT.load(path, cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serialisable data; an infinite speed is None."""
        values = (getattr(self, key) for key in (*_FORMAT.keys, *_FORMAT.added))
        return _FORMAT.document(*(None if value == inf else value for value in values))

    @classmethod
    def from_dict(cls, values: object, *, at: str = "") -> Machine:
        """Make one from what `to_dict` gave; `at` is where it stands in a file, for messages.

        Raises:
            PlanError: a key is missing or unknown, or a value is not allowed; says which.
        """
        fields = _FORMAT.fields(values, at=at)

        def speed(key: str) -> float:
            value = fields.one(key, _SPEED)
            return inf if value is None else float(value)

        return cls(
            device_nbytes=fields.one("device_nbytes", COUNT),
            host_nbytes=fields.one("host_nbytes", COUNT),
            h2d_Bps=speed("h2d_Bps"),
            d2h_Bps=speed("d2h_Bps"),
            latency_s=fields.one("latency_s", SECONDS),
            device_update_Bps=speed("device_update_Bps"),
            host_update_Bps=speed("host_update_Bps"),
            charges_non_model=fields.one("charges_non_model", BOOL),
            one_processor=fields.one("one_processor", BOOL),
            shadow_nbytes=fields.one("shadow_nbytes", COUNT),
            exchange_Bps=speed("exchange_Bps"),
        )


_ADDED = {"shadow_nbytes": 0, "exchange_Bps": None}
"""Came later: plans of before have no speculative updates, and are of one rank."""
_FORMAT = Format(
    name="chunkmem machine",
    version=1,
    keys=tuple(field.name for field in dataclasses.fields(Machine) if field.name not in _ADDED),
    error=PlanError,
    added=_ADDED,
)
_SPEED = either(NULL, Check(f"{FINITE.allowed} of bytes a second", FINITE.parse))
"""Null: infinite."""
