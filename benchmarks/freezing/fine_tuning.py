"""A small GPT that was trained on one half of a text, and samples of the other half to fine-tune it on."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.pipeline.models import Workload, loss_of
from benchmarks.program import BenchmarkError

PRETRAINING_LR = 1e-3
NUM_VALIDATION = 64
"""Sequences that are not trained on."""


@dataclass(frozen=True)
class Samples:
    """What is trained on, and what losses are compared on: (samples, tokens + 1) bytes each, as int64."""

    training: Tensor
    validation: Tensor

    @classmethod
    def of_manual(cls, work: Workload, num: int) -> Samples:
        """Return `num` samples of the second half of Python's manual, spread over it, and others to validate by.

        Raises:
            BenchmarkError: this Python comes without it, or it is too short.
        """
        rows = _rows(_manual()[1], work)
        if len(rows) < num + NUM_VALIDATION:
            raise BenchmarkError(f"there are {len(rows)} sequences, and {num + NUM_VALIDATION} are needed")
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))]
        return cls(rows[NUM_VALIDATION : NUM_VALIDATION + num].contiguous(), rows[:NUM_VALIDATION].contiguous())


def pretrained(work: Workload, num_steps: int) -> Mapping[str, Tensor]:
    """Return the weights of a model that was trained on the first half of the manual, and on Python's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [_rows(_manual()[0], work), _rows(b"".join(file.read_bytes() for file in files), work)]
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_LR, fused=True)
    draw = torch.Generator().manual_seed(3)
    for _ in tqdm(range(num_steps), desc="training before the training", disable=None):
        half = work.num_sequences // 2
        batch = torch.cat([rows[torch.randint(len(rows), (half,), generator=draw)] for rows in sources])
        loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _manual() -> tuple[bytes, bytes]:
    """Return both halves of the text of Python's manual that `help()` shows.

    Raises:
        BenchmarkError: this Python comes without it.
    """
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    if not path.exists():
        raise BenchmarkError(f"there is no {path}, whose text is trained on")
    data = path.read_bytes()
    return data[: len(data) // 2], data[len(data) // 2 :]


def _rows(data: bytes, work: Workload) -> Tensor:
    """Return the bytes as (sequences, tokens + 1)."""
    length = work.num_tokens + 1
    text = torch.frombuffer(bytearray(data[: len(data) // length * length]), dtype=torch.uint8)
    return text.view(-1, length).long()
