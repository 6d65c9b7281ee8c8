"""Train the steps of `pretrain_gpt.py` again in plain PyTorch, and compare to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

if TYPE_CHECKING:
    from pretrain_gpt import Run


@dataclass(frozen=True)
class Outcome:
    """What a training left behind."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    """The optimizer's, by the index of the parameter."""


def train_in_plain_pytorch(run: Run) -> Outcome:
    """Train the same steps from the same start without chunkmem."""
    model = run.model().to(run.device)
    given = run.config.optimizer.params
    options = {"lr": given.lr, "betas": given.betas, "eps": given.eps, "weight_decay": given.weight_decay}
    optimizer = getattr(torch.optim, run.config.optimizer.type)(model.parameters(), fused=True, **options)
    scheduler = run.scheduler(optimizer)
    if run.start:
        weights, states = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": states, "extra": None}
        dcp.load(saved, checkpoint_id=run.checkpoints.of(run.start), no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        scheduler.load_state_dict(saved["extra"]["scheduler"])

    losses: list[float] = []
    with run.bar("plain PyTorch") as bar:
        for step in run.steps:
            loss = model(*run.batch(run.text.training, step))
            loss.backward()
            if run.config.gradient_clipping > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.config.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            bar.update()
    return Outcome(losses, model.state_dict(), optimizer.state_dict()["state"])


def first_difference(chunked: Outcome, plain: Outcome) -> str | None:
    """Name the first loss, weight or optimizer state that is not the same to the last bit; None if all are."""
    for index, (ours, theirs) in enumerate(zip(chunked.losses, plain.losses, strict=True)):
        if ours != theirs:
            return f"loss {index} is {ours} in chunks and {theirs} in plain PyTorch"
    tensors = ({**outcome.weights, **_by_name(outcome.states)} for outcome in (chunked, plain))
    ours_by_name, theirs_by_name = tensors
    if ours_by_name.keys() != theirs_by_name.keys():
        return f"only one side has {min(ours_by_name.keys() ^ theirs_by_name.keys())}"
    for name, tensor in theirs_by_name.items():
        if not torch.equal(ours_by_name[name], tensor.cpu()):
            return f"{name} differs by up to {(ours_by_name[name] - tensor.cpu()).abs().max().item()}"
    return None


def _by_name(states: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{key} of parameter {index}": value for index, state in states.items() for key, value in state.items()}
