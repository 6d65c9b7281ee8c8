"""A plain loop: default AdamW, schedule, accumulation, clipping."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=options.fused or None)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(options.steps):
        for _ in range(2):
            x = torch.randn(16, 64)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 2
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(step, loss.item().hex(), norm.item().hex(), schedule.get_last_lr())
    total = sum(value.double().sum() for value in model.state_dict().values())
    print(total.item().hex())


if __name__ == "__main__":
    main()
