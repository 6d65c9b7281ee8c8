"""Scripts for training libraries, run with plain PyTorch and with chunkmem, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.twins import assert_equal, copied

VOCAB, LENGTH = 64, 12
LLAMA: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
AMPLE_NBYTES = 32 << 20
CHUNK_NUMEL = 2304
"""Holds the largest parameter of `llama()`; the model takes a dozen chunks."""
LR = 1e-2


@dataclass(frozen=True)
class Side:
    """The calls that differ between a script for plain PyTorch (no manager) and one for chunkmem."""

    manager: chunkmem.ChunkManager | None

    def ready(self, model: nn.Module) -> Any:
        """What follows once a model is built."""
        return model if self.manager is None else self.manager.wrap(model)

    def adamw(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """AdamW over the parameters that are not frozen."""
        kind, kwargs = self.adamw_class
        return kind([p for p in params if p.requires_grad], **kwargs, **options)

    @property
    def adamw_class(self) -> tuple[Any, dict[str, Any]]:
        """A class and its arguments, for what makes its optimizer itself."""
        if self.manager is None:
            return torch.optim.AdamW, {"lr": LR, "fused": True}
        return chunkmem.AdamW, {"lr": LR, "manager": self.manager}


def manager_of(device_nbytes: int, **keys: Any) -> chunkmem.ChunkManager:
    """Two tiers in RAM with a cap on DEVICE."""
    keys.setdefault("default_chunk_size", CHUNK_NUMEL)
    return chunkmem.ChunkManager(
        chunkmem.Config.from_dict({"memory": {"device": device_nbytes, "host": AMPLE_NBYTES}, **keys})
    )


def same(scenario: Callable[[Side], Any], **keys: Any) -> None:
    """Assert that a script returns the same in plain PyTorch, with ample room, and at the smallest cap that fits.

    That cap is the largest number of bytes that one operator needed at the same time, a few chunks.
    """
    torch.manual_seed(0)
    expected = copied(scenario(Side(None)))
    moved_nbytes, device_nbytes = [], AMPLE_NBYTES
    for _ in range(2):
        torch.manual_seed(0)
        with manager_of(device_nbytes, **keys) as manager:
            assert_equal(copied(scenario(Side(manager))), expected)
            memory = manager.memory()
            moved_nbytes.append(memory.moved.h2d_nbytes)
            device_nbytes = memory.device.required_nbytes
    assert moved_nbytes[0] < moved_nbytes[1], "the smallest cap held everything"


def llama(**options: Any) -> Any:
    """A causal language model of two layers, its weights a function of nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options}))


def tokens(num_rows: int = 24, *, seed: int = 0) -> Tensor:
    """Rows of tokens.

    Returns:
        int64, [num_rows, LENGTH].
    """
    return torch.randint(VOCAB, (num_rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def rows(num_rows: int = 24) -> list[dict[str, Tensor]]:
    """A data set for a causal language model, as a list."""
    return [{"input_ids": row, "labels": row.clone()} for row in tokens(num_rows)]


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that changes the learning rate at each step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
