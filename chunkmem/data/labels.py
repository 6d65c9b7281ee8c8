"""Which modules, and layers of a model, the labels of moments name."""

from __future__ import annotations

import re

_PASSES = ("forward", "backward", "recomputation")
_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def module_named(label: str) -> str:
    """Return the path of the module whose pass, or whose parameter's gradient, a label names; empty for none."""
    name, _, rest = label.partition(" ")
    what = rest.split(" ")[0]
    if what == "gradient":
        return name.rpartition(".")[0]
    return name if what in _PASSES else ""


def in_layer(path: str) -> tuple[str, str]:
    """Return the layer that a module belongs to, whose name ends with its number in a list, and the rest of its path.

    What is in no list is a layer itself.
    """
    if match := _LAYER.match(path):
        return match[0], path[match.end() + 1 :]
    return path, ""


def layer_of(path: str) -> str:
    """Return the layer that a module belongs to: itself, if it is in no list."""
    return in_layer(path)[0]
