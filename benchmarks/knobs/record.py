"""The traces of one GPT, with chunks of several sizes: what the knobs are turned on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import chunkmem
from benchmarks.program import BenchmarkError, surroundings
from benchmarks.results import write
from chunkmem.data.layout import TensorSpec
from chunkmem.data.layout_pack import search_slab_nbytes
from chunkmem.data.trace import Trace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt import GPT, VOCAB, Shape

FOLDER = Path(__file__).parent / "traces"
RECORDED = FOLDER / "recorded.json"
SHAPE = Shape(layers=8, width=256, heads=8)
NUM_SEQUENCES, NUM_TOKENS = 4, 128
BASE_NUMEL = 264_000
CHUNK_NUMELS = (66_000, 132_000, BASE_NUMEL, 400_000, 530_000, 790_000, 1_118_464, 2_380_000, 6_450_000)
"""Elements; the largest tensor has 262 144, the model 6.4 M. 1 118 464 is what "auto" chooses under the cap they are
compared at."""
AMPLE_NBYTES = 1 << 30
NUM_STEPS = 4
"""The first is recorded, the second is timed while it follows a plan; one more, and the times are in the trace."""


def record(chunk_numel: int) -> tuple[Trace, int]:
    """Train a few steps with everything resident; return the trace, and the number of the model's parameters.

    Raises:
        BenchmarkError: the steps left no trace.
    """
    memory = {"device": AMPLE_NBYTES, "host": AMPLE_NBYTES}
    config = chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": chunk_numel})
    torch.manual_seed(0)
    with chunkmem.ChunkManager(config) as manager:
        with manager.init():
            model = GPT(SHAPE, NUM_TOKENS)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-4)
        tokens = torch.randint(VOCAB, (NUM_SEQUENCES, NUM_TOKENS + 1))
        for _ in range(NUM_STEPS):
            manager.backward(model(tokens[:, :-1], tokens[:, 1:]))
            optimizer.step()
            optimizer.zero_grad()
        trace = manager.trace
    if trace is None:
        raise BenchmarkError(f"{NUM_STEPS} steps with chunks of {chunk_numel} elements left no trace")
    return trace, sum(param.numel() for param in model.parameters())


def record_all() -> None:
    """Record a trace for each chunk size into a file each, and beside them where and how."""
    FOLDER.mkdir(exist_ok=True)
    before = os.getloadavg()[0]
    numel = 0
    for chunk_numel in tqdm(CHUNK_NUMELS, unit="trace", disable=None):
        trace, numel = record(chunk_numel)
        trace.save(path_of(chunk_numel))
    made = {
        **surroundings(),
        "threads": torch.get_num_threads(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "numel": numel,
    }
    write(RECORDED, made)


def load_all() -> tuple[Mapping[int, Trace], dict[str, Any]]:
    """Return the recorded traces by the elements of their chunks, and where and how they were made."""
    made: dict[str, Any] = json.loads(RECORDED.read_text())
    return {chunk_numel: Trace.load(path_of(chunk_numel)) for chunk_numel in CHUNK_NUMELS}, made


def auto_numel(cap_nbytes: int) -> int:
    """Return the elements a chunk that `default_chunk_size: "auto"` would choose under a cap."""
    with torch.device("meta"):
        model = GPT(SHAPE, NUM_TOKENS)
    tensors = [TensorSpec(name, tuple(p.shape), "float32", 4) for name, p in model.named_parameters()]
    return search_slab_nbytes(tensors, device_cap_nbytes=cap_nbytes) // 4


def path_of(chunk_numel: int) -> Path:
    """Return where the trace with chunks of so many elements is."""
    return FOLDER / f"chunks-{chunk_numel}.json"
