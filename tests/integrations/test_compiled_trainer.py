"""transformers' Trainer with `torch_compile=True`: decoder layers are compiled, to the bits of eager plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import torch._dynamo  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import chunkmem  # noqa: E402

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="a small cap covers activations there")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))


def trained(folder: Path, manager: chunkmem.ChunkManager | None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after eight steps."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    optimizer: Any
    if manager is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = chunkmem.AdamW(manager.wrap(model).parameters(), manager=manager, lr=1e-3)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=8, report_to=[], save_strategy="no", use_cpu=True, **options
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    )
    trainer.train()
    return model.state_dict()


def test_layers_are_compiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    expected = trained(tmp_path, None)
    config = chunkmem.Config.from_dict({"memory": {"device": "200KiB"}, "default_chunk_size": 2304})
    with chunkmem.ChunkManager(config) as manager:
        found = trained(tmp_path, manager, torch_compile=True, torch_compile_backend="aot_eager")
        assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0
        assert all(torch.equal(found[name], value) for name, value in expected.items())
