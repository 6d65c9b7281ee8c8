"""A serial simulation, in plain PyTorch, of stages that train on predicted weights, with the formulas written again.

They are in the order of `chunkmem.contrib.async_pipeline.prediction`, update by update. A closed form is the same
number, but not the same float32: it differs by a last bit of the weight, of which a gap makes as much as that bit
is of an expected step, and momentum ten times that. `test_prediction.py` has the closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chunkmem.contrib.async_pipeline.gap_aware import expected_step, note_step_, reduced
from chunkmem.contrib.async_pipeline.prediction import predict_
from tests.helpers.asynchronous_training import (
    OPTIMIZERS,
    AsynchronousOutcome,
    AsynchronousTask,
    Stages,
    frozen_of,
    outcome_of,
)
from tests.helpers.staged_training import Net, loss_of

Group = dict[str, Any]
State = dict[str, Tensor]


class Written:
    """The formulas, written again."""

    @staticmethod
    def predicted(weight: Tensor, state: State, group: Group, rates: Sequence[float]) -> Tensor:
        """The weight after as many updates as rates, by the formulas of FTPipe."""
        decay = group["weight_decay"]
        if not state:
            return weight
        if "momentum_buffer" in state:
            gamma, velocity = group["momentum"], state["momentum_buffer"]
            for lr in rates:
                velocity = gamma * velocity + decay * weight
                weight = weight - lr * velocity
            return weight
        beta1, beta2 = group["betas"]
        exp_avg = state["exp_avg"]
        for i, lr in enumerate(rates, start=1):
            if group["decoupled_weight_decay"]:
                weight = weight * (1 - lr * decay)
                exp_avg = state["exp_avg"] * beta1**i
            else:
                exp_avg = exp_avg * beta1 + (1 - beta1) * decay * weight
            step = state["step"] + i
            denominator = state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
            weight = weight - lr / (1 - beta1**step) * exp_avg / denominator
        return weight

    @staticmethod
    def noted(average: Tensor, state: State, group: Group, lr: float) -> Tensor:
        """The average of squared steps after one more."""
        if "betas" in group:
            (beta1, beta2), step = group["betas"], float(state["step"])
            root = (state["exp_avg_sq"] / (1 - beta2**step)) ** 0.5
            moved = lr * state["exp_avg"] / (1 - beta1**step) / (root + group["eps"])
        else:
            beta2, moved = 0.999, state["momentum_buffer"]
        return beta2 * average + (1 - beta2) * moved**2

    @staticmethod
    def expected(average: Tensor, group: Group, num: int, max_lr: float) -> Tensor:
        """How far an update moves each element, by so many of them."""
        if "betas" in group:
            return (average / (1 - group["betas"][1] ** num)) ** 0.5 + group["eps"]
        return max_lr * ((average / (1 - 0.999**num)) ** 0.5 + 1e-8)

    @staticmethod
    def reduced(grad: Tensor, weight: Tensor, seen: Tensor, expected: Tensor, group: Group, scale: float) -> Tensor:
        """(gradient + decay * weight) / penalty is what the optimizer makes of it."""
        penalty = 1 + (weight - seen).abs() / expected
        decay = 0 if group.get("decoupled_weight_decay") else scale * group["weight_decay"]
        return (grad + decay * weight) / penalty - decay * weight


class OfTheCode:
    """Those of chunkmem: where forward computes in fp16, the last bit of a float32 formula may be a bit of fp16."""

    @staticmethod
    def predicted(weight: Tensor, state: State, group: Group, rates: Sequence[float]) -> Tensor:
        found = weight.clone()
        predict_(found, state, group, rates)
        return found

    @staticmethod
    def noted(average: Tensor, state: State, group: Group, lr: float) -> Tensor:
        found = average.clone()
        note_step_(found, state, group, lr)
        return found

    @staticmethod
    def expected(average: Tensor, group: Group, num: int, max_lr: float) -> Tensor:
        return expected_step(average, group, num=num, max_rate=max_lr)

    @staticmethod
    def reduced(grad: Tensor, weight: Tensor, seen: Tensor, expected: Tensor, group: Group, scale: float) -> Tensor:
        return reduced(grad, weight, seen, expected, options=group, scale=scale).to(grad.dtype)


class Gaps:
    """Divides gradients by 1 + |weight - what forward took| / the root of an average of squared steps."""

    def __init__(self, formulas: Written | OfTheCode) -> None:
        self._formulas = formulas
        self._averages: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._max_lr: dict[nn.Parameter, float] = {}

    def reduced(self, param: nn.Parameter, grad: Tensor, seen: Tensor, group: Group, scale: float) -> Tensor:
        """What the update of `param` is given: `grad` has the loss scale and the dtype that forward computes in."""
        self._max_lr[param] = max(self._max_lr.get(param, 0.0), group["lr"])
        if param not in self._averages:
            return grad
        num, average = self._averages[param]
        expected = self._formulas.expected(average, group, num, self._max_lr[param])
        return self._formulas.reduced(grad, param.detach().to(seen.dtype), seen, expected, group, scale)

    def note(self, param: nn.Parameter, state: State, group: Group, lr: float) -> None:
        """The optimizer has updated `param`, at this learning rate."""
        num, average = self._averages.get(param, (0, torch.zeros_like(param)))
        self._averages[param] = num + 1, self._formulas.noted(average.detach(), state, group, lr)


def simulated(task: AsynchronousTask) -> AsynchronousOutcome:
    """One process runs the stages round by round: forward of one batch, backward of another, an update.

    `model` has what stages compute with; the weights that the optimizer updates are others, in float32.
    """
    torch.manual_seed(0)
    model = Net(task.model)
    name, options = OPTIMIZERS[task.optimizer]
    low = task.lowered()
    if task.precision == "fp32":
        of = {param: nn.Parameter(param.detach().clone()) for param in model.parameters()}
        fused = {"fused": True} if "Adam" in name else {}
        optimizer: Any = getattr(torch.optim, name)(task.groups(of.values()), **options, **fused)
    else:
        low.ready(model)
        of = low.masters
        optimizer = task.low_optimizer(low, model)
    stages = Stages(model, task.stages)
    scheduler = task.make_scheduler(optimizer)
    batches, last, losses = list(task.batches()), task.stages - 1, []
    begin = 0
    for end in [*(step + 1 for step in task.flush_after), len(batches)]:
        losses += _epoch(task, stages, optimizer, scheduler, batches[begin:end], of, low, last)
        for module in frozen_of(model) if end - 1 == task.freeze_after else ():
            module.requires_grad_(False)
        begin = end
    names = {param: key for key, param in model.named_parameters()}
    return outcome_of(losses, {names[param]: true for param, true in of.items()}, low)


def _epoch(
    task: AsynchronousTask,
    stages: Stages,
    optimizer: Any,
    scheduler: Any,
    batches: list[tuple[Tensor, Tensor]],
    of: dict[nn.Parameter, nn.Parameter],
    low: Any,
    last: int,
) -> list[float]:
    """Train on some batches, from filling the pipeline until it has drained; return their losses."""
    formulas: Written | OfTheCode = Written() if task.precision == "fp32" else OfTheCode()
    gaps = Gaps(formulas) if task.versions == "predict+gap" else None
    seen: dict[tuple[int, nn.Parameter], Tensor] = {}
    graphs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    losses = []
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    for number in range(len(batches) + last):
        for stage in range(task.stages):
            for param in stages.params_of(stage):
                true = of[param]
                lr, state = group_of[true]["lr"], optimizer.state.get(true, {}) if param.requires_grad else {}
                rates = [lr * (0.7**i if task.scheduled else 1) for i in range(last - stage)]
                param.data.copy_(formulas.predicted(true.detach(), state, group_of[true], rates))
        for stage in range(task.stages):  # in a round, stage s has the batch that stage s - 1 had in the one before
            batch = number - stage
            if not 0 <= batch < len(batches):
                continue
            x, y = batches[batch]
            seen |= {(batch, param): param.detach().clone() for param in stages.params_of(stage)}
            before: list[Any] = list(x.chunk(task.micro_batches))
            if stage:
                before = [out.detach().requires_grad_() for _, out in graphs[batch, stage - 1]]
            outputs = [stages.stages[stage](value) for value in before]
            if stage == last:
                pairs = zip(outputs, y.chunk(task.micro_batches), strict=True)
                outputs = [loss_of(out.float(), part) / (len(y) / len(part)) for out, part in pairs]
                losses.append(float(sum(out.detach() for out in outputs)))
            graphs[batch, stage] = list(zip(before, outputs, strict=True))
        batch = number - last
        if batch < 0:
            continue
        scale = 1.0 if low.scaler is None else low.scaler.loss_scale
        num_skipped = 0 if low.scaler is None else low.scaler.num_skipped
        grads: list[Tensor | None] = [None] * len(graphs[batch, last])
        for stage in reversed(range(task.stages)):
            pairs_of = graphs.pop((batch, stage))
            for (_, output), grad in zip(pairs_of, grads, strict=True):
                (output * scale if stage == last else output).backward(grad)
            grads = [value.grad for value, _ in pairs_of]
        delayed = [param for stage in range(last) for param in stages.params_of(stage) if param.requires_grad]
        delayed = [] if gaps is None else delayed
        for param in delayed:
            true = of[param]
            param.grad = gaps.reduced(true, param.grad, seen[batch, param], group_of[true], scale)
        if task.precision == "fp32":
            for param, true in of.items():
                true.grad, param.grad = param.grad, None
        if task.clip:
            nn.utils.clip_grad_norm_(list(of.values()), task.clip)
        rate_of = {param: group_of[of[param]]["lr"] for param in delayed}
        with torch.autograd._unsafe_preserve_version_counter(tuple(of)):  # batches under way run on what comes
            optimizer.step()
        for param in delayed if low.scaler is None or low.scaler.num_skipped == num_skipped else ():
            gaps.note(of[param], optimizer.state[of[param]], group_of[of[param]], rate_of[param])
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses
