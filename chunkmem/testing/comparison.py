"""What `check` answers: for each way of training, equal bits, the first difference, or the error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from chunkmem.testing.difference import Difference

FIRST = "plain PyTorch"
AGAIN = "plain PyTorch again"
SMALLEST = "the smallest cap"
"""The names of trainings. Those with late copies begin with the last one."""


@dataclass(frozen=True)
class Comparison:
    """One training compared with plain PyTorch's."""

    name: str
    """``plain PyTorch again``, ``the smallest cap``, ..."""
    device_nbytes: int | None = None
    """The cap on DEVICE; None: there is none, or it is the accelerator's own."""
    moved_nbytes: int = 0
    """Copied between the tiers, both ways."""
    difference: Difference | None = None
    error: str = ""
    """Type and message of what was raised."""
    reason: str = ""
    """Why it differs, as far as can be told from outside."""
    warnings: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether it was trained to the end, to the same bits."""
        return self.difference is None and not self.error

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        data = asdict(self) | {"equal": self.is_equal, "error": self.error or None, "reason": self.reason or None}
        if self.difference is not None:
            del data["difference"]["is_nan"]
        return data


@dataclass(frozen=True)
class CheckReport:
    """The comparisons of one check, up to the first that is not equal. `str()` is what it comes to, in a few lines."""

    steps: int
    precision: str
    seed: int
    num_params: int | None = None
    """Elements of distinct parameters; None if the process that trained died."""
    num_tensors: int | None = None
    """Weights, buffers and optimizer states that were compared after the last step, besides the losses."""
    chunk_numel: int | None = None
    """Elements a chunk; None if no chunks were made."""
    comparisons: tuple[Comparison, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether every training left the same bits."""
        return all(comparison.is_equal for comparison in self.comparisons)

    @property
    def smallest_nbytes(self) -> int | None:
        """The smallest cap on DEVICE that was trained under; None if it was not come to."""
        return next((made.device_nbytes for made in self.comparisons if made.name.startswith(SMALLEST)), None)

    def to_dict(self) -> Mapping[str, Any]:
        """Return it as plain data for JSON."""
        comparisons = [comparison.to_dict() for comparison in self.comparisons]
        own = {"equal": self.is_equal, "smallest_nbytes": self.smallest_nbytes, "comparisons": comparisons}
        return asdict(self) | own

    def __str__(self) -> str:
        if self.is_equal:
            return (
                f"equal: {self.steps} losses and {self.num_tensors} weights, buffers and optimizer states, "
                "to the last bit"
            )
        comparison = self.comparisons[-1]
        first = (
            f"differs: {comparison.name}, {comparison.difference}"
            if comparison.difference is not None
            else f"refused: {comparison.name}: {comparison.error}"
        )
        return first + (f"\nlikely reason: {comparison.reason}" if comparison.reason else "")
