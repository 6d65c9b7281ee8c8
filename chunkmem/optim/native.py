"""Updates and norms by the native kernels, where they have the bits of torch's calls; else by those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from chunkmem.layout.spec import Group
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.kernels import Kernels
from chunkmem.optim.ops import AdamTensors, fused_adam_
from chunkmem.optim.segments import HyperParameters, Outputs, Pass, Segments
from chunkmem.optim.speculation import Items
from chunkmem.types import Role


class NativeUpdate:
    """One pass over gradient, weights and states. The kernels are loaded when they are first needed."""

    def __init__(self, load: Callable[[], Kernels]) -> None:
        """Make one; `load` gives the kernels, and may have to compile them."""
        self._load = load

    @cached_property
    def _kernels(self) -> Kernels:
        return self._load()

    @cached_property
    def _tail_width(self) -> int | None:
        return self._kernels.torch_tail_width() if "cpu" in self._kernels.native_devices else None

    @property
    def has_torch_bits(self) -> bool:
        """There is a native kernel for the CPU, and a trial shows that it gives the bits of torch's."""
        return self._tail_width is not None

    def _runs_on(self, device: torch.device) -> bool:
        """There is a native kernel for a device: it has the bits of the CPU's, so where a group is does not show."""
        return self.has_torch_bits and device.type in self._kernels.native_devices

    def update_lowered(
        self,
        slots: Mapping[Role, Sequence[torch.Tensor]],
        steps: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        *,
        multiplier: float,
    ) -> None:
        """Update parameters of one group whose weights are rounded from a float32 master copy, in place.

        Args:
            slots: by role, the memory of each parameter as 1-D elements, on one device.
            steps: the number of each one's update, already counted up.
            options: of a parameter group.
            multiplier: of the gradients, in float32.
        """
        roles = (Role.PARAM, Role.GRAD, Role.MASTER, Role.EXP_AVG, Role.EXP_AVG_SQ)
        params, grads, masters, exp_avgs, exp_avg_sqs = (list(slots[role]) for role in roles)
        if self._runs_on(params[0].device):
            hyper = _hyper_parameters([(options, int(step)) for step in steps])
            segments = Segments(masters, grads, exp_avgs, exp_avg_sqs, params)
            self._kernels.adamw_(segments, hyper, self._pass(options, multiplier))
            return
        full = [grad.float().mul(multiplier) for grad in grads]
        on_device = [step.to(params[0].device) for step in steps]
        fused_adam_(AdamTensors(masters, full, exp_avgs, exp_avg_sqs, on_device), dict(options))
        for param, master in zip(params, masters, strict=True):
            param.copy_(master)

    def update_beside(
        self,
        layout: Group,
        old: Mapping[Role, torch.Tensor],
        new: Mapping[Role, torch.Tensor],
        items: Items,
        *,
        multiplier: float | None,
        num_threads: int,
    ) -> None:
        """Write a group's chunks of after an update to other memory; parameters that are not updated are copied.

        Args:
            layout: where parameters are.
            old: by role, what is read, 1-D: all roles but a PARAM that is rounded from MASTER.
            new: by role, what is written: all roles but GRAD.
            items: what to update.
            multiplier: of the gradients, in float32.
            num_threads: of the kernel.
        """
        rows = in_slot_order(items)
        positions = [managed.position for managed, _, _ in rows]
        weights = Role.MASTER if Role.MASTER in old else Role.PARAM
        is_lowered = weights is Role.MASTER

        def slots(memory: Mapping[Role, torch.Tensor], role: Role) -> list[torch.Tensor]:
            return [memory[role][layout.slots[at].offset : layout.slots[at].end] for at in positions]

        segments = Segments(
            slots(old, weights),
            slots(old, Role.GRAD),
            slots(old, Role.EXP_AVG),
            slots(old, Role.EXP_AVG_SQ),
            slots(new, Role.PARAM) if is_lowered else [],
        )
        outputs = Outputs(slots(new, weights), slots(new, Role.EXP_AVG), slots(new, Role.EXP_AVG_SQ))
        hyper = _hyper_parameters([(options, int(step)) for _, step, options in rows])
        how = self._pass(rows[0][2], 1.0 if multiplier is None else multiplier)
        self._kernels.adamw_into(segments, outputs, hyper, how, num_threads=num_threads)
        for role, memory in new.items():
            fill(memory, old[weights if role is Role.PARAM else role], layout, besides=positions)

    def squares(self, grads: Sequence[torch.Tensor], *, num_threads: int = 0) -> torch.Tensor:
        """Return the sum of squares of gradients on one device, and 1 if all are finite, else 0: 2 doubles, on the CPU.

        The bits depend on the order of the gradients, on a CPU on nothing else.
        """
        if self._runs_on(grads[0].device):
            return self._kernels.norm_and_finite(grads, num_threads=num_threads).cpu()
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        total = torch.stack(norms).double().square().sum()
        return torch.stack([total, total.isfinite().double()]).cpu()

    def _pass(self, options: Mapping[str, Any], multiplier: float) -> Pass:
        assert self._tail_width is not None
        return Pass(unscale=multiplier, decoupled=options["decoupled_weight_decay"], tail_width=self._tail_width)


def in_slot_order(items: Items) -> list[tuple[ManagedParameter, torch.Tensor, dict[str, Any]]]:
    """Return (parameter, number of its update, options) of all items, in the order of their slots."""
    rows = [(managed, step, options) for options, pairs in items.values() for managed, step in pairs]
    return sorted(rows, key=lambda row: row[0].position)


def fill(to: torch.Tensor, of: torch.Tensor, layout: Group, *, besides: Iterable[int]) -> None:
    """Copy all slots of a chunk, and zero its pads, but leave out the slots at some positions."""
    left_out = set(besides)
    for position, slot in enumerate(layout.slots):
        if position not in left_out:
            to[slot.offset : slot.end].copy_(of[slot.offset : slot.end])
    for start, stop in layout.pads:
        to[start:stop].zero_()


def _hyper_parameters(rows: Sequence[tuple[Mapping[str, Any], int]]) -> HyperParameters:
    betas = [tuple(map(float, options["betas"])) for options, _ in rows]
    return HyperParameters(
        lr=[float(options["lr"]) for options, _ in rows],
        beta1=[beta1 for beta1, _ in betas],
        beta2=[beta2 for _, beta2 in betas],
        eps=[float(options["eps"]) for options, _ in rows],
        weight_decay=[float(options["weight_decay"]) for options, _ in rows],
        step=[step for _, step in rows],
    )
