"""Models that differ in width and layers only, for which `chunkmem estimate --largest` looks for the largest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.gpt import usual_width
from chunkmem.estimate.model import Model
from chunkmem.estimate.models import resolve_model

FAMILIES = "gpt, a config.json of transformers, or module:function with a parameter `layers`"
_NARROWER = 0.75
_NARROWEST = 128


@dataclass(frozen=True)
class Family:
    """Models by width and layers.

    Raises:
        ConfigError: `text` names none, or a model of a size.
    """

    text: str
    seq: int | None
    """Positions a sample; None: as `resolve_model` has it."""

    def __post_init__(self) -> None:
        if self.text.startswith("gpt:"):
            raise ConfigError(
                f"MODEL {self.text!r} has a size, and --largest looks for one: chunkmem estimate gpt --largest"
            )
        if self.text != "gpt" and not self.text.endswith(".json") and ":" not in self.text:
            raise ConfigError(f"MODEL {self.text!r} is not a family of models; --largest takes {FAMILIES}")

    def widths(self, num_params: int, *, tp: int) -> list[int]:
        """Return the widths to try, the widest first, where so many parameters may fit; 0 is a width that is given."""
        if self.text != "gpt":
            return [0]
        step = tp * _NARROWEST  # a head is 128 wide, and `tp` divides heads
        widths = [max(step, usual_width(num_params) // step * step)]
        while widths[-1] > step:
            widths.append(max(step, int(_NARROWER * widths[-1]) // step * step))
        return widths

    def sized(self, width: int, layers: int) -> Callable[[int], Model]:
        """Return the model of a width and a number of layers, by batch."""
        name, given = (f"gpt:{width}x{layers}", None) if self.text == "gpt" else (self.text, layers)
        return lambda batch: resolve_model(name, batch=batch, seq=self.seq, layers=given)
