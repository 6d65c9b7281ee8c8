"""The rule of Adam and AdamW in fp32: torch's bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.errors import ConfigError
from chunkmem.optim.checks import check_available, check_number
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.ops import number_on
from chunkmem.optim.rule import ChunkMemory, SlotTensors, StateSpec, UpdateItem, UpdateRule, fill
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments
from chunkmem.types import Role

EXP_AVG, EXP_AVG_SQ = Role("exp_avg"), Role("exp_avg_sq")
_REFUSED = ("amsgrad", "maximize")


@dataclass(frozen=True)
class AdamHyper:
    """A parameter group's numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool


class AdamRule(UpdateRule[AdamHyper]):
    """torch's fused kernels; the native ones where they have the same bits, for master weights and out of place."""

    name = "Adam"
    options = ("lr", "betas", "eps", "weight_decay")
    all_states = (StateSpec(EXP_AVG), StateSpec(EXP_AVG_SQ))

    def __init__(self, native: NativeUpdate, *, decoupled: bool) -> None:
        """Make the rule of AdamW if weight decay is `decoupled` from the gradient, else that of Adam."""
        self._native = native
        self._decoupled = decoupled

    def check(self, group: Mapping[str, Any]) -> None:
        betas = group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ConfigError(f"betas = {betas} has to be two numbers from 0 to below 1")
        for name, value, below in (
            ("lr", group["lr"], None),
            ("eps", group["eps"], None),
            ("betas[0]", betas[0], 1),
            ("betas[1]", betas[1], 1),
            ("weight_decay", group["weight_decay"], None),
        ):
            check_number(name, value, below=below)
        check_available(group, _REFUSED)

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        check_available(group, _REFUSED)
        lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return AdamHyper(lr, beta1, beta2, eps, weight_decay, bool(group["decoupled_weight_decay"]))

    def adopt(self, group: dict[str, Any]) -> None:
        """Let what was saved decide, except in AdamW: so does torch."""
        group["decoupled_weight_decay"] = self._decoupled or group.get("decoupled_weight_decay", False)

    def update_(
        self,
        weights: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: Mapping[Role, list[torch.Tensor]],
        steps: Sequence[torch.Tensor],
        hyper: AdamHyper,
    ) -> None:
        kernel = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        kernel(
            weights,
            grads,
            states[EXP_AVG],
            states[EXP_AVG_SQ],
            [],
            _steps_on(weights[0].device, steps),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    def apply_(
        self, slots: SlotTensors, steps: Sequence[torch.Tensor], hyper: AdamHyper, *, multiplier: float | None
    ) -> None:
        if not slots.rounded or not self._native.runs_on(slots.weights[0].device):
            super().apply_(slots, steps, hyper, multiplier=multiplier)
            return
        exp_avgs, exp_avg_sqs = flat_views(slots.states[EXP_AVG]), flat_views(slots.states[EXP_AVG_SQ])
        segments = Segments(
            flat_views(slots.weights), flat_views(slots.grads), exp_avgs, exp_avg_sqs, flat_views(slots.rounded)
        )
        numbers = numbers_of([(hyper, int(step)) for step in steps])
        self._native.kernels.adamw_(segments, numbers, self._pass(hyper, multiplier))

    def can_update_into(self, dtype: torch.dtype, *, is_master: bool) -> bool:
        """Tell whether a native kernel has the bits that are promised; those update float32 weights only."""
        native = self._native
        return dtype is torch.float32 and (native.runs_on_host if is_master else native.has_torch_bits)

    def update_into(
        self,
        old: Mapping[Role, ChunkMemory],
        new: Mapping[Role, ChunkMemory],
        items: Sequence[UpdateItem],
        *,
        multiplier: float | None,
        num_threads: int,
    ) -> None:
        rows = [(p, step, item.hyper) for item in items for p, step in zip(item.params, item.steps, strict=True)]
        rows.sort(key=lambda row: row[0].position)
        positions = [managed.position for managed, _, _ in rows]
        weights = Role.MASTER if Role.MASTER in old else Role.PARAM

        def slots(chunks: Mapping[Role, ChunkMemory], role: Role) -> list[torch.Tensor]:
            return flat_views([chunks[role].views[at] for at in positions])

        written = (weights, EXP_AVG, EXP_AVG_SQ)
        rounded = slots(new, Role.PARAM) if weights is Role.MASTER else []
        segments = Segments(
            slots(old, weights), slots(old, Role.GRAD), slots(old, EXP_AVG), slots(old, EXP_AVG_SQ), rounded
        )
        outputs = Outputs(*(slots(new, role) for role in written))
        numbers = numbers_of([(hyper, int(step)) for _, step, hyper in rows])
        how = self._pass(rows[0][2], multiplier)
        self._native.kernels.adamw_into(segments, outputs, numbers, how, num_threads=num_threads)
        fill_others(old, new, positions)

    def _pass(self, hyper: AdamHyper, multiplier: float | None) -> SegmentPass:
        tail_width = self._native.tail_width or 0
        unscale = 1.0 if multiplier is None else multiplier
        return SegmentPass(unscale=unscale, decoupled=hyper.decoupled, tail_width=tail_width)


def fill_others(old: Mapping[Role, ChunkMemory], new: Mapping[Role, ChunkMemory], updated: Collection[int]) -> None:
    """Copy what an update of the slots at positions `updated` has not written from `old` chunks of a group to `new`."""
    for role, memory in new.items():
        is_written = role in (Role.PARAM, Role.MASTER, EXP_AVG, EXP_AVG_SQ)
        source = old[role if role in old else Role.MASTER].flat
        fill(memory.flat, source, memory.layout, besides=updated if is_written else ())


def _steps_on(device: torch.device, steps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the numbers of updates on a device, one tensor for all alike."""
    if device.type == "cpu":
        return list(steps)
    alike = {float(step): step for step in steps}
    filled = {number: number_on(device, step) for number, step in alike.items()}
    return [filled[float(step)] for step in steps]


def flat_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same elements in the order of memory, as kernels take them."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def numbers_of(rows: Sequence[tuple[AdamHyper, int]]) -> HyperParameters:
    """Return the numbers of updates as kernels take them, of which these are (options, number of the update)."""
    return HyperParameters(
        lr=[hyper.lr for hyper, _ in rows],
        beta1=[hyper.beta1 for hyper, _ in rows],
        beta2=[hyper.beta2 for hyper, _ in rows],
        eps=[hyper.eps for hyper, _ in rows],
        weight_decay=[hyper.weight_decay for hyper, _ in rows],
        step=[step for _, step in rows],
    )
