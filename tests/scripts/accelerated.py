"""accelerate: a schedule made before `prepare`, accumulation, clipping, and a module that is called before."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--chunkmem", help="a configuration of the accelerator")
    options = parser.parse_args()
    settings = {"gradient_accumulation_steps": 2, "cpu": True, "mixed_precision": options.mixed_precision}
    accelerator = Accelerator(**settings) if options.chunkmem is None else in_chunks(options.chunkmem, settings)
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
    rows = torch.randn(96, 64)
    assert model(rows[:1]).shape == (1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, 8), schedule)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(loss.item().hex(), norm, schedule.get_last_lr())
    weights = accelerator.get_state_dict(model)
    accelerator.print(sum(value.double().sum() for value in weights.values()).item().hex())


def in_chunks(config: str, settings: dict) -> Accelerator:
    from chunkmem.integrations.accelerate import ChunkmemAccelerator

    return ChunkmemAccelerator(config, **settings)


if __name__ == "__main__":
    main()
