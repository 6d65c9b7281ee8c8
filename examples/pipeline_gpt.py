"""Pretrain a byte-level GPT by micro-batches, one block after the other; under torchrun, its blocks on several ranks.

python examples/pipeline_gpt.py --micro-batches 8
torchrun --nproc-per-node 2 --max-restarts 1 examples/pipeline_gpt.py --stages 2    # --batch is each pipeline's
torchrun --nproc-per-node 4 examples/pipeline_gpt.py --stages 2 --schedule looped-bfs    # 2 stages x 2 shards

A run that was killed continues from its checkpoint: torchrun starts it again, or you do with --resume, with as many
ranks and stages as you like.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# See pretrain_gpt.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from checkpoints import Checkpoints
from files import make_folder
from gpt import PRESETS, VOCAB, Block, Shape, embedding, linear
from options import fail
from ranks import Ranks, join_ranks
from text import TextError, batch_at, load_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import chunkmem


class Start(nn.Module):
    """What comes before the blocks."""

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.embedding = embedding(VOCAB, shape.width)
        self.position = embedding(seq, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, width)
        return self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class End(nn.Module):
    """What comes after them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.head = linear(shape.width, VOCAB)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> (batch, time, 256)
        return self.head(self.norm(x))


class GPT(nn.Module):
    """An ordinary model: calling it runs what the pipeline runs."""

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.start = Start(shape, seq)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.end = End(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.start(tokens)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(args: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
    if ranks.size % args.stages:
        fail(f"--stages {args.stages} does not divide the {ranks.size} ranks; start others with --nproc-per-node")
    num_shards = ranks.size // args.stages
    mesh = None
    if args.stages > 1:
        mesh = init_device_mesh(device.type, (args.stages, num_shards), mesh_dim_names=("stage", "shard"))
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": args.device_cap}}), mesh=mesh)
    with manager.init():
        torch.manual_seed(0)
        model = GPT(PRESETS[args.model], args.seq)
        manager.unit(model.start)
        manager.unit(model.end)
    pipe = manager.pipeline(
        model.blocks,
        first=model.start,
        last=model.end,
        loss_fn=mean_loss,
        micro_batches=args.micro_batches,
        checkpoint=args.checkpoint,
        schedule=args.schedule,
    )
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: 1 - 0.9 * step / args.steps)

    checkpoints = Checkpoints(args.out)
    first = checkpoints.start(ranks, resume=args.resume)
    if first:
        scheduler.load_state_dict(manager.load(checkpoints.of(first), optimizer)["scheduler"])
        if ranks.num_restarts and ranks.is_first:
            print(f"started again by torchrun: goes on after step {first} of {args.steps}", file=sys.stderr)

    text, losses = load_text(args.data, seq=args.seq), [float("nan")]
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, unit="step", disable=not ranks.is_first)
    for step in bar:
        # All stages of a pipeline are given the same batch: the first one uses the tokens, the last one the targets.
        number = step * num_shards + ranks.rank % num_shards
        tokens, targets = batch_at(text.training, number, batch=args.batch, seq=args.seq, seed=0, device=device)
        losses.append(pipe.step(tokens, targets).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {manager.timeline()}", refresh=False)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            path = checkpoints.of(step + 1)
            manager.save(path, optimizer, extra={"scheduler": scheduler.state_dict(), "step": step + 1})
            if ranks.is_first:
                checkpoints.prune(keep=1)
    ranks.say(f"\nloss {losses[-1]:.3f} nats a byte after {args.steps} steps; {args.out}\n\n{manager.memory()}")
    manager.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=PRESETS, default="2m", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: 2m)")
    add("--data", type=Path, metavar="PATH", help="a file or folder; default: Python's standard library")
    add("--device-cap", default="6MiB", metavar="SIZE", help="of each rank (default: 6MiB)")
    add("--micro-batches", type=int, default=8, metavar="N", help="parts of a batch (default: 8)")
    add("--checkpoint", choices=("auto", "always", "except_last", "never"), default="auto", help="what is recomputed")
    add("--stages", type=int, default=1, metavar="N", help="ranks that the blocks are divided over (default: 1)")
    add("--schedule", default="auto", metavar="NAME", help="by-layer, gpipe, 1f1b, interleaved or looped-bfs")
    add("--steps", type=int, default=100, metavar="N", help="of the whole training (default: 100)")
    add("--batch", type=int, default=16, metavar="N", help="sequences a step and pipeline (default: 16)")
    add("--seq", type=int, default=64, metavar="N", help="bytes a sequence (default: 64)")
    add("--save-every", type=int, default=50, metavar="N", help="steps (default: 50)")
    add("--out", type=Path, default=Path("runs/pipeline"), metavar="DIR", help="for the checkpoint")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    ranks, device = join_ranks()
    try:
        if ranks.is_first:
            make_folder(args.out)
        train(args, ranks, device)
    except (TextError, chunkmem.ChunkmemError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; --resume continues from the last checkpoint", code=130)
    ranks.leave()


if __name__ == "__main__":
    sys.exit(main())
