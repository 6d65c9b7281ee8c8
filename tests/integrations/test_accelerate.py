"""accelerate: it wraps the optimizer, runs backward, clips, and counts micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, Side, decaying, llama, manager_of, same, tokens
from tests.helpers.twins import cpu_only

accelerate = pytest.importorskip("accelerate", minversion="1.15")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.full, cpu_only]

CLIPPING = {
    "norm": lambda accelerator, params: accelerator.clip_grad_norm_(params, 1.0).item(),
    "value": lambda accelerator, params: accelerator.clip_grad_value_(params, 0.01),
}


def train(side: Side, *, clipping: str = "norm", **options: Any) -> tuple[Any, Any, list[Any]]:
    """Four micro-batches and more, as accelerate's own examples do; the accelerator, the model and what was seen."""
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = side.ready(llama())
    optimizer = side.adamw(model.parameters())
    loader = DataLoader(tokens(12), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, decaying(optimizer))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(CLIPPING[clipping](accelerator, model.parameters()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return accelerator, model, seen


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("steps", [1, 3])
def test_it_trains_as_in_plain_pytorch(clipping: str, steps: int) -> None:
    def scenario(side: Side) -> Any:
        accelerator, model, seen = train(side, clipping=clipping, gradient_accumulation_steps=steps)
        return {"seen": seen, "weights": dict(accelerator.get_state_dict(model))}

    same(scenario)


@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_its_mixed_precision_is_that_of_plain_pytorch() -> None:
    def scenario(side: Side) -> Any:
        accelerator, model, seen = train(side, mixed_precision="bf16")
        return {"seen": seen, "weights": dict(accelerator.unwrap_model(model).state_dict())}

    same(scenario)


def test_its_checkpoint_is_loaded_again(tmp_path: Path) -> None:
    """`save_state` and `load_state`: weights, optimizer and schedule, through files."""

    def scenario(side: Side) -> Any:
        accelerator, model, _ = train(side)
        accelerator.save_state(str(tmp_path / "state"))
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(str(tmp_path / "state"))
        return dict(accelerator.get_state_dict(model))

    same(scenario)


def test_an_optimizer_of_torch_is_refused() -> None:
    class Torch(Side):
        def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params)

    with (
        manager_of(AMPLE_NBYTES) as manager,
        pytest.raises(chunkmem.StateError, match=r"AdamW\.step\(\): parameter .* is managed.*chunkmem\.AdamW"),
    ):
        train(Torch(manager))
