"""The processes that train one model together under torchrun; started in any other way, one process by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from options import fail


@dataclass(frozen=True)
class Ranks:
    """Which of them this is."""

    rank: int = 0
    size: int = 1
    num_restarts: int = 0
    """How often torchrun has started all of them again."""
    may_restart: bool = False

    @property
    def is_first(self) -> bool:
        """The first rank is the one that shows and writes."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print it once."""
        if self.is_first:
            print(text, flush=True)

    def require_one(self, name: str, value: int) -> None:
        """Refuse to go on if the ranks do not have the same of something."""
        if self.size > 1:
            values = [0] * self.size
            dist.all_gather_object(values, value)
            if len(set(values)) > 1:
                fail(f"{name} differs between ranks: {values}; --out has to be a folder that all machines see")

    def leave(self) -> None:
        """Part from the others when all is done."""
        if self.size > 1:
            dist.destroy_process_group()


def join_ranks() -> tuple[Ranks, torch.device]:
    """Meet the other processes, if torchrun has started several; return where this one computes as well."""
    size, has_cuda = int(os.environ.get("WORLD_SIZE", 1)), torch.cuda.is_available()
    if size == 1:
        return Ranks(), torch.device("cuda" if has_cuda else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if has_cuda else torch.device("cpu")
    if has_cuda:
        if local_rank >= torch.cuda.device_count():
            fail(f"there are {torch.cuda.device_count()} GPUs here; start as many processes with --nproc-per-node")
        torch.cuda.set_device(device)
    restarts, limit = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    try:
        store, rank, size = next(dist.rendezvous("env://"))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            # torchrun keeps one store for all starts (pytorch/pytorch#135712): the dead ranks' addresses are in it.
            # The count is the same on all ranks of one machine only; docs/distributed.md tells what to do with more.
            store = dist.PrefixStore(f"start {restarts}", store)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            device_id=device if has_cuda else None,
        )
        counts = [0] * size
        dist.all_gather_object(counts, restarts)  # only the machine where a rank died has counted
    except (RuntimeError, ValueError) as error:
        fail(f"the {size} ranks do not meet: {error}")
    return Ranks(rank, size, max(counts), may_restart=limit > 0), device
