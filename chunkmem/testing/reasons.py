"""Why a training in chunks differs, as far as can be told from outside."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import ChunkmemError
from chunkmem.data.layout import TensorSpec
from chunkmem.packing.packer import tensor_specs
from chunkmem.packing.precision import precision_of
from chunkmem.testing.difference import Difference
from chunkmem.testing.training import Workload

SECTIONS = MappingProxyType(
    {
        "repeats": "What stays the same, and where torch itself does not",
        "gradients": "Gradients",
        "precision": "Mixed precision",
        "parameters": "Reading and writing parameters",
    }
)
"""Of docs/differences.md."""


@dataclass
class Observed:
    """What a training in plain PyTorch shows of a model."""

    specs: list[TensorSpec] = field(default_factory=list)
    """Of its parameters, in the dtype they compute in."""
    has_gradient_hooks: bool = False
    """Hooks look at `.grad`."""
    calls_in_autocast: bool = False
    """The model is called inside of `torch.autocast`, with its cache."""

    @property
    def num_params(self) -> int:
        """Elements of distinct parameters."""
        return sum(spec.numel for spec in self.specs)


def observing(workload: Workload, seen: Observed, *, dtype: torch.dtype) -> Workload:
    """Return the same workload, which tells `seen` about the model."""

    def build() -> nn.Module:
        model = workload.build()
        named = list(model.named_parameters())
        seen.specs = tensor_specs(named, precision_of([model], dtype))
        model.register_forward_pre_hook(look)
        return model

    def look(model: nn.Module, _args: Any) -> None:
        kind = workload.device.type
        seen.calls_in_autocast |= torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()
        seen.has_gradient_hooks |= any(p._post_accumulate_grad_hooks for p in model.parameters())

    return replace(workload, build=build)


def reason_not_repeated() -> str:
    """Say why plain PyTorch differs from itself."""
    return (
        "plain PyTorch does not repeat itself, so there is nothing to compare with: the model keeps state outside of "
        "itself, draws numbers that no seed reaches, or uses operators that are not deterministic (on CUDA: "
        f"torch.use_deterministic_algorithms(True)); {_section('repeats')}"
    )


def reason_of_error(error: Exception) -> str:
    """Say why a training in chunks raised what plain PyTorch did not; chunkmem's own errors say it themselves."""
    if isinstance(error, ChunkmemError):
        return ""
    return (
        "the model's own code raised it, in chunks only: it looks at something that differs there, such as where a "
        f"parameter is; {_section('parameters')}"
    )


def reason_of_difference(
    difference: Difference, seen: Observed, *, was_equal_with_room: bool, is_late: bool, precision: str
) -> str:
    """Say why a training in chunks differs.

    Args:
        difference: what differs first.
        seen: of the model in plain PyTorch.
        was_equal_with_room: with more room, where less moves, it was equal.
        is_late: without late copies, under the same cap, it was equal.
        precision: what was asked for.
    """
    if is_late:
        return (
            "it is equal when copies are not late, so one of them is not waited for: a defect of chunkmem; please "
            "report it with the model and the seed"
        )
    if was_equal_with_room or difference.is_nan:
        return (
            "a read that escaped: the memory of a parameter is used after its chunk has moved, for instance through a "
            f"tensor that was taken out of it in an earlier step; {_section('parameters')}"
        )
    if seen.has_gradient_hooks:
        return f"a hook that looks at `.grad` (register_post_accumulate_grad_hook); {_section('gradients')}"
    if seen.calls_in_autocast:
        return f"the model is called inside of torch.autocast, whose cache is off in chunks; {_section('precision')}"
    if precision != "fp32":
        return (
            f"{precision} is compared with a plain loop that casts at the model's borders and has fp32 master weights; "
            f"what uses parameters elsewhere gets them in {precision}; {_section('precision')}"
        )
    return (
        "no operator has used a weight that it should not, so rather a tensor that was taken out of a parameter while "
        "the model was built (detach(), .data), which keeps its first values, or another difference of "
        f"{_section('parameters')}"
    )


def reason_of_death() -> str:
    """Say why a process that trains in chunks ends, where one that trains in plain PyTorch does not."""
    return (
        "a read that escaped: memory taken out of a parameter (detach(), .numpy()) is used after its chunk has moved; "
        f"{_section('parameters')}"
    )


def _section(key: str) -> str:
    return f'docs/differences.md, "{SECTIONS[key]}"'
