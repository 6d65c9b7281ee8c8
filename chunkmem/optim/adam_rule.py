"""The rule of Adam and AdamW in fp32: torch's bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkmem.errors import ConfigError
from chunkmem.optim.checks import check_available, check_number
from chunkmem.optim.device_order import DevicePowers
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.ops import number_on
from chunkmem.optim.rule import ChunkMemory, SlotTensors, StateSpec, UpdateItem, UpdateRule, fill, slot_tensors
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

    def update_item_(
        self, views: Mapping[Role, Sequence[torch.Tensor]], item: UpdateItem, *, multiplier: float | None
    ) -> None:
        """Update the parameters of an item in place; on HOST with the bits of the device that they compute on."""
        if (powers := self._powers(item, views)) is None:
            super().update_item_(views, item, multiplier=multiplier)
            return
        slots, numbers = slot_tensors(views, item), _numbers(item, powers)
        lists = (slots.weights, slots.grads, slots.states[EXP_AVG], slots.states[EXP_AVG_SQ])
        self._native.kernels.adamw_(Segments(*map(flat_views, lists)), numbers, self._pass(item.hyper, multiplier))

    def _powers(self, item: UpdateItem, views: Mapping[Role, Sequence[torch.Tensor]]) -> DevicePowers | None:
        """Return what an update on HOST needs for the bits of the device that computes; None: it is another one."""
        if Role.MASTER in views or self.all_states[0].codes is not None:
            return None
        weights = views[Role.PARAM][item.positions[0]]
        is_known = weights.dtype is torch.float32 and (item.hyper.decoupled or item.hyper.weight_decay == 0)
        return self._native.powers_for(item.params[0].placeholder.device) if is_known and weights.is_cpu else None

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
        weights = Role.MASTER if Role.MASTER in old else Role.PARAM
        written = (weights, EXP_AVG, EXP_AVG_SQ)
        for item in items:

            def slots(chunks: Mapping[Role, ChunkMemory], role: Role, item: UpdateItem = item) -> list[torch.Tensor]:
                return flat_views([chunks[role].views[at] for at in item.positions])

            rounded = slots(new, Role.PARAM) if weights is Role.MASTER else []
            segments = Segments(
                slots(old, weights), slots(old, Role.GRAD), slots(old, EXP_AVG), slots(old, EXP_AVG_SQ), rounded
            )
            outputs = Outputs(*(slots(new, role) for role in written))
            numbers = _numbers(item, self._powers(item, {role: memory.views for role, memory in old.items()}))
            self._write(segments, outputs, item, numbers, multiplier, num_threads=num_threads)
        positions = [at for item in items for at in item.positions]
        for role, memory in new.items():
            source = old[weights if role is Role.PARAM else role].flat
            fill(memory.flat, source, memory.layout, besides=positions if role in (Role.PARAM, *written) else ())

    def _write(
        self,
        segments: Segments,
        outputs: Outputs,
        item: UpdateItem,
        numbers: HyperParameters,
        multiplier: float | None,
        *,
        num_threads: int,
    ) -> None:
        """Write what an update of an item makes of its slots to other memory."""
        how = self._pass(item.hyper, multiplier)
        self._native.kernels.adamw_into(segments, outputs, numbers, how, num_threads=num_threads)

    def _pass(self, hyper: AdamHyper, multiplier: float | None) -> SegmentPass:
        tail_width = self._native.tail_width or 0
        unscale = 1.0 if multiplier is None else multiplier
        return SegmentPass(unscale=unscale, decoupled=hyper.decoupled, tail_width=tail_width)


def _numbers(item: UpdateItem, powers: DevicePowers | None) -> HyperParameters:
    """Return the numbers of an update as kernels take them."""
    numbers = numbers_of([(item.hyper, int(step)) for step in item.steps])
    if powers is None:
        return numbers
    made = [
        [powers.of(beta, step) for beta, step in zip(betas, numbers.step, strict=True)]
        for betas in (numbers.beta1, numbers.beta2)
    ]
    return replace(numbers, beta1_power=made[0], beta2_power=made[1])


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
