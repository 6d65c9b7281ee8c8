"""Models that differ in width and layers only, for which `chunkmem estimate --largest` looks for the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkmem.errors import ConfigError
from chunkmem.estimate.gpt import usual_width
from chunkmem.estimate.model import Model
from chunkmem.estimate.models import resolve_model

FAMILIES = "gpt, a config.json of transformers, or module:function with a parameter `layers`"
_NARROWER = 0.75
_NARROWEST = 128


@dataclass(frozen=True)
class Family:
    """Models by width and layers."""

    widths: Callable[[int], Sequence[int]]
    """Returns the widths to try, the widest first, where so many parameters may fit; 0 is a width that is given."""
    sized: Callable[[int, int], Callable[[int], Model]]
    """Returns the model of a width and a number of layers, by batch."""


def family_of(text: str, *, seq: int | None) -> Family:
    """Return the family that `text` names.

    Raises:
        ConfigError: it names none, or a model of a size.
    """
    if text == "gpt":
        return Family(_gpt_widths, lambda width, layers: _resolving(f"gpt:{width}x{layers}", seq=seq))
    if text.startswith("gpt:"):
        raise ConfigError(f"MODEL {text!r} has a size, and --largest looks for one: chunkmem estimate gpt --largest")
    if not text.endswith(".json") and ":" not in text:
        raise ConfigError(f"MODEL {text!r} is not a family of models; --largest takes {FAMILIES}")
    return Family(lambda num_params: (0,), lambda width, layers: _resolving(text, seq=seq, layers=layers))


def _resolving(text: str, *, seq: int | None, layers: int | None = None) -> Callable[[int], Model]:
    return lambda batch: resolve_model(text, batch=batch, seq=seq, layers=layers)


def _gpt_widths(num_params: int) -> list[int]:
    widths = [max(_NARROWEST, usual_width(num_params))]
    while widths[-1] > _NARROWEST:
        widths.append(max(_NARROWEST, int(_NARROWER * widths[-1]) // _NARROWEST * _NARROWEST))
    return widths
