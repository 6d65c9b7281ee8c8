"""What a plan is made for: the caps and the speeds of one machine. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import Annotated, Any

from chunkmem.data.codec import Mark, Seconds, Speed
from chunkmem.data.errors import PlanError
from chunkmem.data.json_files import Saved
from chunkmem.data.types import BELOW, MEMORY, TIERS, Link, Tier, UpdateForm, links_of


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast copies over a link are."""

    Bps: Speed
    """Bytes a second."""
    latency_s: Seconds = 0.0
    """Seconds that each copy takes in addition to the time of its bytes."""

    def copy_s(self, nbytes: int) -> float:
        """Return the seconds that a copy of so many bytes takes."""
        return self.latency_s + nbytes / self.Bps


def host_links(*, h2d_Bps: float, d2h_Bps: float, latency_s: float = 0.0) -> dict[Link, LinkSpeed]:
    """Return the links between DEVICE and HOST, in both directions, with one latency."""
    return links_below(Tier.DEVICE, Tier.HOST, read_Bps=h2d_Bps, write_Bps=d2h_Bps, latency_s=latency_s)


def links_below(
    upper: Tier, lower: Tier, *, read_Bps: float, write_Bps: float, latency_s: float = 0.0
) -> dict[Link, LinkSpeed]:
    """Return the links between a tier and the next one, in both directions, with one latency."""
    return {(lower, upper): LinkSpeed(read_Bps, latency_s), (upper, lower): LinkSpeed(write_Bps, latency_s)}


def cap_key(tier: Tier) -> str:
    """Return the key of the configuration that has a tier's cap."""
    return f"memory.{tier.value}" if tier in MEMORY else f"memory.{tier.value}.capacity"


_CAPS = {tier: f"{tier.value}_nbytes" for tier in TIERS}
"""The field that has the cap of a tier."""
_SPEEDS = ("device_update_Bps", "host_update_Bps", "exchange_Bps", "reduce_Bps", "host_memory_Bps", "duplex_Bps")


@dataclass(frozen=True)
class Machine(
    Saved,
    name="chunkmem machine",
    error=PlanError,
    again="save it again with this one",
    optional=("host_memory_Bps", "duplex_Bps", "disk_nbytes", "host_form_Bps", "reduce_Bps"),
):
    """Caps and speeds. Every field may be given by hand; `runtime.measure` measures them."""

    device_nbytes: int
    """Cap on DEVICE."""
    host_nbytes: int
    """Cap on HOST; 0 if both tiers are one piece of RAM and everything stays on DEVICE."""
    links: Annotated[Mapping[Link, LinkSpeed], Mark.SORTED]
    """Speeds by source and target tier of a copy, for each link that the machine has."""
    device_update_Bps: Speed = inf
    """Bytes of PARAM, GRAD and states that an update on DEVICE passes over in a second; inf: take the trace's times."""
    host_update_Bps: Speed = inf
    charges_non_model: bool = False
    """The cap on DEVICE also covers the non-model data of the trace: true on an accelerator."""
    one_processor: bool = True
    """DEVICE and HOST compute on the same cores, so updates on them take turns."""
    shadow_nbytes: int = 0
    """Most bytes of HOST for the shadow buffers of speculative updates, of what a plan leaves; 0: there are none."""
    exchange_Bps: Speed = inf
    """Bytes of chunks that all ranks together exchange in a second, whichever rank owns them."""
    host_memory_Bps: Speed = inf
    """Bytes a second that copies and updates on HOST read and write there, together."""
    duplex_Bps: Speed = inf
    """Bytes a second of copies between DEVICE and HOST in both directions at once, together."""
    disk_nbytes: int = 0
    """Cap on DISK; 0: there is none."""
    host_form_Bps: tuple[tuple[UpdateForm, Speed], ...] = ()
    """`host_update_Bps` of other forms than fp32, whose arithmetic may take longer; the same for those not here."""
    reduce_Bps: Speed = inf
    """Bytes of gradients that ranks reduce in a second, if that is slower than `exchange_Bps`: summed in a wider dtype,
    or over replicas, too."""

    def __post_init__(self) -> None:
        speeds = {name: getattr(self, name) for name in _SPEEDS}
        for source, target in dict.fromkeys((*links_of(self.tiers), *self.links)):
            name = f"the link from {source.name} to {target.name}"
            if (source, target) not in self.links:
                raise PlanError(f"machine: {name} has no speed; give one of each link between tiers that it has")
            link = self.links[source, target]
            speeds[name] = link.Bps
            if link.latency_s < 0 or not isfinite(link.latency_s):
                raise PlanError(
                    f"machine: the latency of {name} is {link.latency_s} s; give a finite number, 0 or more"
                )
        for form, Bps in self.host_form_Bps:
            speeds[f"host_form_Bps of {form.value}"] = Bps
        for name, Bps in speeds.items():
            if not Bps > 0:
                raise PlanError(
                    f"machine: {name} is {Bps} bytes/s, and nothing could ever arrive; measure again, or give a "
                    "speed above 0"
                )
        for name in (*_CAPS.values(), "shadow_nbytes"):
            value = getattr(self, name)
            if value < 0 or not isfinite(value):
                raise PlanError(f"machine: {name} is {value}; give a finite number, 0 or more")

    @property
    def defers_updates(self) -> bool:
        """`step()` leaves updates on HOST to their lane, and what needs their results waits for it."""
        return self.shadow_nbytes > 0

    def host_update_s(self, nbytes: int, form: UpdateForm) -> float | None:
        """Return how long HOST takes to update chunks of so many bytes; None: as long as the trace says."""
        Bps = self._host_update_Bps[form]
        return nbytes / Bps if isfinite(Bps) else None

    @cached_property
    def _host_update_Bps(self) -> Mapping[UpdateForm, float]:
        return dict.fromkeys(UpdateForm, self.host_update_Bps) | dict(self.host_form_Bps)

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that there are: of the chain, memory and what has a cap below it."""
        return (*MEMORY, *(tier for tier in BELOW if getattr(self, _CAPS[tier])))

    @cached_property
    def cap_nbytes(self) -> Mapping[Tier, int]:
        """The cap of each tier, 0 of one that is not there."""
        return {tier: getattr(self, name) for tier, name in _CAPS.items()}

    def with_caps(self, nbytes: Mapping[Tier, int]) -> Machine:
        """Return a machine as fast with other caps; tiers that are not among them are not there."""
        caps: dict[str, Any] = {name: nbytes.get(tier, 0) for tier, name in _CAPS.items()}
        return replace(self, **caps)
