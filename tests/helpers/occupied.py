"""What a CUDA device holds before there is a manager."""

from __future__ import annotations

import gc

import torch
from torch import nn


def occupied_nbytes(*streams: torch.cuda.Stream) -> int:
    """Return the bytes that torch has on the device while a small linear layer computes, twice.

    Those are the workspaces of cuBLAS, which stay: the thread that launches and that of autograd have one each on each
    stream, of 32 MiB with CUBLAS_WORKSPACE_CONFIG=:4096:8; what a layer takes while it computes; and what earlier tests
    have left. A cap on DEVICE covers it all.

    Args:
        streams: on which something will be computed, in addition to the current one.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for stream in (torch.cuda.current_stream(), *streams):
        with torch.cuda.stream(stream):
            for _ in range(2):  # the first time, one workspace may be made when another one's use is over
                nn.Linear(8, 8, device="cuda")(torch.ones(8, 8, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
