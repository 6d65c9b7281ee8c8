"""A small mixture of experts that are divided over ranks, as in expert parallelism: tokens go to their experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH, WORDS = 16, 11


class Experts(nn.Module):
    """Each token is computed on by one expert, on the rank that has it."""

    def __init__(self, num: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num)
        up, down = torch.randn(num, WIDTH, 2 * WIDTH) / 4, torch.randn(num, 2 * WIDTH, WIDTH) / 4
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))
        self._mesh, self._num = mesh, num

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self._num)
        size = self._mesh.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._mesh.get_group())
        sent = counts.view(size, -1).sum(1).tolist()
        coming = received.view(size, -1).sum(1).tolist()
        tokens = all_to_all_single_autograd(flat[order], coming, sent, self._mesh)
        own = self._num // size
        number = torch.arange(own).repeat(size).repeat_interleave(received)  # of the expert that each is for
        up, down = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in (self.up, self.down))
        made = tokens * 0  # backward exchanges also where no token has come
        for expert in range(own):
            at = (number == expert).nonzero().flatten()
            if len(at):  # else it has no gradient
                made = made.index_add(0, at, torch.relu(tokens[at] @ up[expert]) @ down[expert])
        back = all_to_all_single_autograd(made, sent, coming, self._mesh)
        result = torch.empty_like(flat).index_copy(0, order, back) * scores[:, None]
        return x + result.view_as(x)


class Mixture(nn.Module):
    """In the last block, no token goes to the last rank's experts, which are never trained."""

    def __init__(self, mesh: DeviceMesh, num_blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), Experts(4, mesh), nn.Linear(WIDTH, WIDTH)) for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        own = 4 // mesh.size()
        with torch.no_grad():
            self.blocks[-1][1].router.bias[-own:] -= 100  # type: ignore[index]

    def forward(self, x: Any) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result
