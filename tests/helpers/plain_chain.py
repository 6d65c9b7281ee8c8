"""A small chain of layers, and its weights before each step in plain PyTorch, for tests in which copies fail."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, DEPTH, BATCH = 64, 5, 4
NUM_STEPS = 6


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(DEPTH)))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def values(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.values()]


def plain_weights() -> list[list[torch.Tensor]]:
    """Return the weights before each step, and after the last, in plain PyTorch."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen = [values(model.state_dict())]
    for step in range(NUM_STEPS):
        model(batch_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(values(model.state_dict()))
    return seen
