"""What fewer bytes a parameter cost in what is learnt: the validation loss of the example's model, over three seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH, SEQ = 200, 16, 64


def validation_loss(seed: int, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> float:
    """Train the example's model for some steps; return its mean loss over text that was kept back."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    from gpt import GPT, PRESETS
    from text import batch_at, load_text

    text = load_text(None, seq=SEQ)
    options = {"batch": BATCH, "seq": SEQ, "seed": seed, "device": torch.device("cpu")}
    params = {"lr": 2.5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, **keys.pop("params", {})}
    given = {"optimizer": {"params": params}, "gradient_clipping": 1.0, **keys}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(given)) as manager:
        torch.manual_seed(seed)
        with manager.init():
            model = GPT(PRESETS["2m"], SEQ)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 20, 1 - 0.9 * i / STEPS))
        for step in range(STEPS):
            manager.backward(model(*batch_at(text.training, step, **options)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            return sum(model(*batch_at(text.validation, i, **options)).item() for i in range(64)) / 64


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_states_in_8_bits_learn_as_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = validation_loss(seed, monkeypatch)
    found = validation_loss(seed, monkeypatch, params={"states": "8bit"})
    print(f"seed {seed}: {expected:.4f} with states in fp32, {found:.4f} in 8 bits")
    assert abs(found / expected - 1) < 0.005


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_bf16_weights_without_masters_learn_as_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = validation_loss(seed, monkeypatch, precision="bf16")
    found = validation_loss(seed, monkeypatch, precision="bf16", params={"states": "8bit", "master": "none"})
    print(f"seed {seed}: {expected:.4f} with master weights and states in fp32, {found:.4f} without, in 8 bits")
    assert abs(found / expected - 1) < 0.005
