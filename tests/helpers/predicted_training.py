"""A serial simulation, in plain PyTorch, of stages that train on predicted weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.asynchronous_training import OPTIMIZERS, AsynchronousOutcome, AsynchronousTask, Stages
from tests.helpers.staged_training import Net, loss_of


def predicted(optimizer: torch.optim.Optimizer, param: nn.Parameter, rates: list[float]) -> Tensor:
    """The weight after as many updates as rates, by the formulas of FTPipe."""
    options, state = optimizer.param_groups[0], optimizer.state.get(param, {})
    weight, decay = param.detach().clone(), options["weight_decay"]
    if not state:
        return weight
    if "momentum_buffer" in state:
        gamma, velocity = options["momentum"], state["momentum_buffer"]
        if not decay:
            return weight - sum(lr * gamma**i for i, lr in enumerate(rates, start=1)) * velocity
        for lr in rates:
            velocity = gamma * velocity + decay * weight
            weight = weight - lr * velocity
        return weight
    beta1, beta2 = options["betas"]
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    exp_avg = state["exp_avg"]
    for i, lr in enumerate(rates, start=1):
        if decoupled:
            weight = weight * (1 - lr * decay)
            exp_avg = state["exp_avg"] * beta1**i
        else:
            exp_avg = exp_avg * beta1 + (1 - beta1) * decay * weight
        step = state["step"] + i
        denominator = state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5 + options["eps"]
        weight = weight - lr / (1 - beta1**step) * exp_avg / denominator
    return weight


def simulated(task: AsynchronousTask) -> AsynchronousOutcome:
    """One process runs the stages round by round: forward of one batch, backward of another, an update."""
    torch.manual_seed(0)
    model = Net(task.model)
    stages = Stages(model, task.stages)
    name, options = OPTIMIZERS[task.optimizer]
    truth = copy.deepcopy(model)  # what the optimizer updates; `model` has what stages compute with
    of = dict(zip(model.parameters(), truth.parameters(), strict=True))
    optimizer = getattr(torch.optim, name)(truth.parameters(), **options, **({"fused": True} if "Adam" in name else {}))
    scheduler = task.make_scheduler(optimizer)
    batches = list(task.batches())
    last = task.stages - 1
    graphs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    losses = []
    for number in range(len(batches) + last):
        rate = optimizer.param_groups[0]["lr"]
        for stage in range(task.stages):
            rates = [rate * (0.7**i if task.scheduled else 1) for i in range(last - stage)]
            for param in stages.params_of(stage):
                param.data.copy_(predicted(optimizer, of[param], rates))
        for stage in range(task.stages):  # in a round, stage s has the batch that stage s - 1 had in the one before
            batch = number - stage
            if not 0 <= batch < len(batches):
                continue
            x, y = batches[batch]
            before: list[Any] = list(x.chunk(task.micro_batches))
            if stage:
                before = [out.detach().requires_grad_() for _, out in graphs[batch, stage - 1]]
            outputs = [stages.stages[stage](value) for value in before]
            if stage == last:
                pairs = zip(outputs, y.chunk(task.micro_batches), strict=True)
                outputs = [loss_of(out, part) / (len(y) / len(part)) for out, part in pairs]
                losses.append(float(sum(out.detach() for out in outputs)))
            graphs[batch, stage] = list(zip(before, outputs, strict=True))
        batch = number - last
        if batch >= 0:
            grads: list[Tensor | None] = [None] * len(graphs[batch, last])
            for stage in reversed(range(task.stages)):
                pairs_of = graphs.pop((batch, stage))
                for (_, output), grad in zip(pairs_of, grads, strict=True):
                    output.backward(grad)
                grads = [value.grad for value, _ in pairs_of]
            for param, true in of.items():
                true.grad, param.grad = param.grad, None
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return AsynchronousOutcome(losses, {key: value.detach() for key, value in truth.state_dict().items()})
