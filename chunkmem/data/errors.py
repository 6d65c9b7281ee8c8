"""One exception tree; its words are where each is raised: the object, both numbers with units, and what to do next."""

from __future__ import annotations

from chunkmem.data.types import Tier


class ChunkmemError(Exception):
    """Base of everything chunkmem raises on purpose."""


class ConfigError(ChunkmemError):
    """A configuration key is unknown, of the wrong type, out of range, or not available in this version."""


class LayoutError(ChunkmemError):
    """A model cannot be packed into chunks."""


class TraceError(ChunkmemError):
    """A trace cannot be read, or belongs to another model."""


class PlanError(ChunkmemError):
    """A plan cannot be made or followed."""


class CapacityError(PlanError):
    """Something does not fit its tier.

    Attributes:
        needed_nbytes: the smallest cap known to be needed on the tier, in bytes.
        enough_nbytes: a cap that is certain to be enough for the chunks of every step of the models packed so far, in
            bytes; mostly far less will do. None: not known. On an accelerator it has room for the activations so far.
        cap_nbytes: the cap that was in force, in bytes.
        tier: whose cap these are. If a plan lacks room below DEVICE, accesses can still be served on demand.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_nbytes: int,
        cap_nbytes: int,
        enough_nbytes: int | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_nbytes = needed_nbytes
        self.enough_nbytes = enough_nbytes
        self.cap_nbytes = cap_nbytes

    @property
    def on_host(self) -> bool:
        """It is a tier below DEVICE that lacks room."""
        return self.tier is not Tier.DEVICE

    @property
    def on_disk(self) -> bool:
        """It is DISK that lacks room."""
        return self.tier is Tier.DISK


class StateError(ChunkmemError):
    """A call came in an order, or touched an object in a state, that cannot be served."""


class CheckpointError(ChunkmemError):
    """Saved weights or states do not match the model or cannot be read."""


class TierIOError(ChunkmemError, OSError):
    """Reading from or writing to a tier failed; names the chunk, both tiers and the cause."""


class RankError(ChunkmemError):
    """A rank of the job died, left or hangs, or the ranks are in different places of the program.

    Attributes:
        ranks: those that are suspected, by their numbers in the job; none if all of them answered.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def said(error: BaseException) -> str:
    """Return what kind of error it is and what it says, in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
