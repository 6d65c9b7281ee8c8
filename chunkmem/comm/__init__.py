"""Exchange of chunks over a process group: the only package that uses torch.distributed."""

from __future__ import annotations

from chunkmem.comm.ranks import require_one_process

__all__ = ["require_one_process"]
