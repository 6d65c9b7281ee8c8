"""The rule of Adam and AdamW in fp32: torch's bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.data.errors import ConfigError
from chunkmem.data.types import Role
from chunkmem.optim.checks import check_available, check_number, number
from chunkmem.optim.device_order import DevicePowers
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.ops import number_on
from chunkmem.optim.rule import ChunkMemory, SlotUpdate, StateSpec, UpdateItem, UpdateRule, Views, fill, slots_of
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments

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
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, group[name])
        for at, beta in enumerate(_betas(group)):
            check_number(f"betas[{at}]", beta, below=1)
        check_available(group, _REFUSED)

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        check_available(group, _REFUSED)
        lr, eps, weight_decay = (number(name, group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = (number(f"betas[{at}]", beta) for at, beta in enumerate(_betas(group)))
        return AdamHyper(lr, beta1, beta2, eps, weight_decay, bool(group["decoupled_weight_decay"]))

    def adopt(self, group: dict[str, Any]) -> None:
        """Let what was saved decide, except in AdamW: so does torch."""
        group["decoupled_weight_decay"] = self._decoupled or group.get("decoupled_weight_decay", False)

    def update_(self, slots: SlotUpdate) -> None:
        numbers = dict(vars(slots.hyper))
        kernel: Any = torch._fused_adamw_ if numbers.pop("decoupled") else torch._fused_adam_
        lists = (slots.weights, slots.scaled_grads(), slots.states[EXP_AVG], slots.states[EXP_AVG_SQ])
        steps = _steps_on(slots.weights[0].device, slots.steps)
        kernel(*lists, [], steps, **numbers, amsgrad=False, maximize=False)

    def apply_(self, slots: SlotUpdate) -> None:
        if slots.rounded and self._native.runs_on(slots.weights[0].device):
            self._run(slots)
        else:
            super().apply_(slots)

    def update_item_(self, views: Views, item: UpdateItem, *, multiplier: float | None) -> None:
        """Update the parameters of an item in place; on HOST with the bits of the device that they compute on."""
        slots, powers = slots_of(views, item, multiplier), self._powers(item, views)
        if powers is None:
            self.apply_(slots)
        else:
            self._run(slots, powers)

    def _powers(self, item: UpdateItem, views: Views) -> DevicePowers | None:
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
        views = {role: memory.views for role, memory in {Role.PARAM: new[Role.PARAM], **old}.items()}
        for item in items:
            outputs = Outputs(*(flat_views([new[role].views[at] for at in item.positions]) for role in written))
            slots, powers = slots_of(views, item, multiplier), self._powers(item, views)
            self._run(slots, powers, outputs=outputs, num_threads=num_threads)
        positions = [at for item in items for at in item.positions]
        for role, memory in new.items():
            source = old[weights if role is Role.PARAM else role].flat
            fill(memory.flat, source, memory.layout, besides=positions if role in (Role.PARAM, *written) else ())

    def _run(
        self,
        slots: SlotUpdate,
        powers: DevicePowers | None = None,
        *,
        outputs: Outputs | None = None,
        num_threads: int = 0,
    ) -> None:
        """Update slots by chunkmem's kernels, in place or to `outputs`; with `powers` in the order of their device."""
        lists = (slots.weights, slots.grads, slots.states[EXP_AVG], slots.states[EXP_AVG_SQ], slots.rounded)
        hyper, counts = slots.hyper, [int(step) for step in slots.steps]
        numbers = HyperParameters(
            *([hyper.lr], [hyper.beta1], [hyper.beta2], [hyper.eps], [hyper.weight_decay], counts),
            beta1_power=[] if powers is None else [powers.of(hyper.beta1, count) for count in counts],
            beta2_power=[] if powers is None else [powers.of(hyper.beta2, count) for count in counts],
        )
        unscale = 1.0 if slots.multiplier is None else slots.multiplier
        self._native.kernels.adamw_(
            Segments(*map(flat_views, lists)),
            numbers,
            SegmentPass(unscale=unscale, decoupled=hyper.decoupled, tail_width=self._tail_width()),
            outputs=outputs,
            keys=self._keys(slots.numbers, counts),
            num_threads=num_threads,
        )

    def _tail_width(self) -> int:
        return self._native.tail_width or 0

    def _keys(self, numbers: Sequence[int], counts: Sequence[int]) -> list[int] | None:
        """Return the keys of random bits for parameters with these numbers, at these updates; None: there are none."""
        return None


def _betas(group: Mapping[str, Any]) -> Sequence[Any]:
    """Return both. Raises a `ConfigError` if they are not two."""
    betas = group["betas"]
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas = {betas} has to be two numbers from 0 to below 1, such as (0.9, 0.999)")
    return betas


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
