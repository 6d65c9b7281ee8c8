"""Is what came of a script what it declares? Reports are plain data, as they come from `worker`."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from tests.hostile.harness import Axis, Equal, Expected, Raises, Refused


def differences(actual: Any, expected: Any, where: str = "", *, tolerance: float = 0.0) -> list[str]:
    """Where two trees differ: tensors by bits, shape and dtype; NaN counts as a difference on either side.

    `tolerance` is how far apart finite floating-point values may be; 0: they have to have the same bits.
    """
    if type(actual) is not type(expected):
        return [f"{where}: {type(actual).__name__} {actual!r:.80}, and {type(expected).__name__} in plain PyTorch"]
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return [f"{where}: keys {list(actual)} are not {list(expected)}"]
        pairs = ((f"{where}.{key}", actual[key], expected[key]) for key in expected)
        return [d for at, a, e in pairs for d in differences(a, e, at, tolerance=tolerance)]
    if isinstance(expected, list):
        if len(actual) != len(expected):
            return [f"{where}: {len(actual)} values, and {len(expected)} in plain PyTorch"]
        pairs = ((f"{where}[{index}]", a, e) for index, (a, e) in enumerate(zip(actual, expected, strict=True)))
        return [d for at, a, e in pairs for d in differences(a, e, at, tolerance=tolerance)]
    if isinstance(expected, Tensor):
        return _tensor_differences(actual, expected, where, tolerance=tolerance)
    if isinstance(expected, float) and not math.isfinite(expected):
        return [f"{where}: {expected} in the reference; let the script record something that can be compared"]
    if isinstance(expected, float) and abs(actual - expected) <= tolerance:
        return []
    return [] if actual == expected else [f"{where}: {actual!r:.80} is not {expected!r:.80}"]


def _tensor_differences(actual: Tensor, expected: Tensor, where: str, *, tolerance: float) -> list[str]:
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return [f"{where}: {actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"]
    if expected.is_floating_point() and expected.isnan().any():
        return [f"{where}: NaN in the reference; let the script record something that can be compared"]
    if torch.equal(actual, expected):
        return []
    if expected.is_floating_point() and torch.allclose(actual, expected, rtol=0, atol=tolerance):
        return []
    if actual.is_floating_point() and actual.isnan().any():
        return [f"{where}: {int(actual.isnan().sum())} of {actual.numel()} are NaN"]
    return [f"{where}: off by up to {(actual.double() - expected.double()).abs().max().item():.3g}"]


def verdict(expect: Expected, plain: dict[str, Any], report: dict[str, Any], mode: str) -> str | None:
    """What is wrong with a report of one mode, in one line; None if it is what the script declares."""
    if "died" in report:
        return f"ended the process by {report['died']}"
    if isinstance(expect, Raises):
        if plain.get("error") != expect.error:
            return f"plain PyTorch: {_said(plain)}, where the script declares {expect.error}"
        return None if "error" in report else f"nothing raised, where plain PyTorch raises {expect.error}"
    if "error" in plain:
        return f"the reference itself: {_said(plain)}"
    if isinstance(expect, Refused):
        is_that = report.get("error") == expect.error and re.search(expect.phrase, report["message"])
        return None if is_that else f"{_said(report)}, where {expect.error} with {expect.phrase!r} is declared"
    assert isinstance(expect, Equal)
    if expect.or_too_small and mode != "ample" and report.get("error") == "CapacityError":
        return None
    return _said(report) if report.get("error") or report["differences"] else None


def verdict_of_axis(expect: Expected, plain: dict[str, Any], report: dict[str, Any], axis: Axis) -> str | None:
    """As `verdict`, of a script that was run with a feature, which may refuse more than the script declares."""
    if "error" in report and report["is_ours"]:
        if re.search(axis.refusals, report["message"]):
            return None
        if report["error"] == "CapacityError" and report["room"] == "small":
            return None  # the smallest cap is that of a script with ample room
    if axis.excludes and report.get("error") == "NotRefusedError":
        return None  # of a parameter that is in no chunk
    if isinstance(expect, Refused) and not report.get("differences", True):
        return None  # what is refused elsewhere is served here, and right
    return verdict(expect, plain, report, "ample" if report.get("room") == "ample" else "small")


def _said(report: dict[str, Any]) -> str:
    if "error" in report:
        return f"{report['error']}: {report['message']} (at {report['where']})"
    found = report.get("differences") or ["nothing raised"]
    return found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more)"
