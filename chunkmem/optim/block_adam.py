"""The rule of Adam and AdamW with states in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from chunkmem.config import OptimizerParams
from chunkmem.optim.adam_rule import EXP_AVG, EXP_AVG_SQ, AdamRule, flat_views
from chunkmem.optim.codes import SIGNED, UNSIGNED, update_key
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.rule import SlotUpdate, StateSpec

_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


class BlockAdamRule(AdamRule):
    """Adam's arithmetic in fp32, block by block; what it makes is rounded stochastically to the codes of 8-bit states.

    Weights in bfloat16 that have no master weights are rounded so, too. The random bits depend on the seed, the
    parameter's place in the optimizer, the number of its update and the element: not on ranks, threads or tiers.
    Parameters outside of chunks have states in fp32.
    """

    all_states = (StateSpec(EXP_AVG, torch.uint8, SIGNED), StateSpec(EXP_AVG_SQ, torch.uint8, UNSIGNED))

    def __init__(self, native: NativeUpdate, *, decoupled: bool, seed: int) -> None:
        """Make the rule of AdamW if weight decay is `decoupled` from the gradient, else that of Adam."""
        super().__init__(native, decoupled=decoupled)
        self._seed = seed

    def apply_(self, slots: SlotUpdate) -> None:
        if not slots.numbers:
            super().apply_(slots)
        elif slots.weights[0].dtype not in _KERNEL_DTYPES:
            self._apply_in_another_dtype(slots)
        else:
            self._run(slots)

    def _apply_in_another_dtype(self, slots: SlotUpdate) -> None:
        """Update weights that there is no kernel for, such as float64, in their dtype; round states to nearest."""
        codes = {spec.role: spec.codes for spec in self.all_states if spec.codes is not None}
        weights = flat_views(slots.weights)
        values = {
            role: [
                code.decode(stored, w.numel()).to(w.dtype)
                for stored, w in zip(slots.states[role], weights, strict=True)
            ]
            for role, code in codes.items()
        }
        grads, rounded = flat_views(slots.grads), flat_views(slots.rounded)
        super().apply_(replace(slots, weights=weights, grads=grads, states=values, rounded=rounded))
        for role, code in codes.items():
            for stored, value in zip(slots.states[role], values[role], strict=True):
                stored.copy_(code.encode(value.float()))

    def can_update_into(self, dtype: torch.dtype, *, is_master: bool) -> bool:
        """Tell whether the kernel takes weights of a dtype; in plain PyTorch it is left to the step."""
        return dtype in _KERNEL_DTYPES and self._native.runs_on_host

    def _tail_width(self) -> int:
        return 0  # no bits of torch's are promised

    def _keys(self, numbers: Sequence[int], counts: Sequence[int]) -> list[int]:
        return [update_key(self._seed, number, count) for number, count in zip(numbers, counts, strict=True)]


def adam_states(params: OptimizerParams) -> tuple[StateSpec, ...]:
    """Return the states that Adam and AdamW keep with these options."""
    return BlockAdamRule.all_states if params.states == "8bit" else AdamRule.all_states


def adam_rule(params: OptimizerParams, native: NativeUpdate, *, decoupled: bool) -> AdamRule:
    """Return the rule of AdamW if weight decay is `decoupled`, else that of Adam, with these options."""
    if params.states == "8bit":
        return BlockAdamRule(native, decoupled=decoupled, seed=params.seed)
    return AdamRule(native, decoupled=decoupled)
