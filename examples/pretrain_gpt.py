"""Pretrain a byte-level GPT whose weights, gradients and optimizer states move through a capped device memory.

python examples/pretrain_gpt.py                            # a small model on the standard library's sources
python examples/pretrain_gpt.py --steps 20 --res_check     # the numbers of plain PyTorch, bit for bit?
python examples/pretrain_gpt.py --model gpt2-small --data my/text --device-cap 25% --out runs/small
python examples/pretrain_gpt.py --model gpt2-xl --disk /mnt/nvme           # what memory.host has no room for is there
torchrun --nproc-per-node 2 --max-restarts 1 examples/pretrain_gpt.py    # --batch is each rank's; restarts resume
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

# torch's threads wait for each other by spinning, which on cores shared with other programs makes everything several
# times slower. It has to be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from checkpoints import Checkpoints
from files import make_folder, replacing
from gpt import GPT, PRESETS, continue_text
from options import fail, make_config, parse_arguments, weight_nbytes
from ranks import Ranks, join_ranks
from res_check import Outcome, first_difference, train_in_plain_pytorch
from text import Text, TextError, batch_at, load_text
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import chunkmem
from chunkmem.data.sizes import format_nbytes
from chunkmem.report.files import write_report
from chunkmem.report.run import load_run


@dataclass(frozen=True)
class Run:
    """What training in chunks and training in plain PyTorch have in common."""

    args: argparse.Namespace
    config: chunkmem.Config
    text: Text
    device: torch.device
    ranks: Ranks
    start: int
    """The step whose checkpoint training continues from; 0 is the beginning."""

    @property
    def steps(self) -> range:
        return range(self.start, min(self.args.steps, self.start + (self.args.stop_after or self.args.steps)))

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.args.out)

    def model(self) -> GPT:
        torch.manual_seed(self.args.seed)
        return GPT(PRESETS[self.args.model], self.args.seq, checkpointing=self.args.checkpointing)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """A linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the learning rate."""
        steps = self.args.steps
        warm_up = max(1, steps // 10)
        return LambdaLR(optimizer, lambda i: min((i + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * i / steps)))

    def bar(self, title: str) -> tqdm[NoReturn]:
        # A log keeps every refresh as text: one in ten seconds is enough there.
        interval_s = 0.1 if sys.stderr.isatty() else 10
        span = {"total": self.args.steps, "initial": self.steps.start, "mininterval": interval_s}
        return tqdm(desc=title, unit="step", disable=not self.ranks.is_first, **span)

    def batch(self, text: Tensor, step: int) -> tuple[Tensor, Tensor]:
        args = self.args
        return batch_at(text, step, batch=args.batch, seq=args.seq, seed=args.seed, device=self.device)


def train(run: Run) -> Outcome | None:
    """Train in chunks, then save and show what came out; return it where it is compared."""
    args, ranks = run.args, run.ranks
    manager = chunkmem.ChunkManager(run.config)
    require_room(run, manager)
    with manager.init():
        model = run.model()
    optimizer = getattr(chunkmem, run.config.optimizer.type)(model.parameters(), manager=manager)
    scheduler = run.scheduler(optimizer)
    if run.start:
        saved = manager.load(run.checkpoints.of(run.start), optimizer)
        scheduler.load_state_dict(saved["scheduler"])

    losses: list[float] = []
    with Progress(run, manager) as progress:
        for step in run.steps:
            loss = model(*run.batch(run.text.training, step * ranks.size + ranks.rank))
            manager.backward(loss)
            optimizer.step()  # clips, too: gradient_clipping in the configuration
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            progress.show(losses[-1])
            if step == run.steps[-1] or (step + 1) % args.save_every == 0:
                # Every rank writes the chunks that it owns.
                manager.save(
                    run.checkpoints.of(step + 1),
                    optimizer,
                    extra={"scheduler": scheduler.state_dict(), "step": step + 1},
                )
                if ranks.is_first:
                    run.checkpoints.prune(keep=args.keep)

    memory = manager.memory()
    last = f"loss {losses[-1]:.3f}, " if losses else ""
    ranks.say(
        f"\n{progress}\nDEVICE held {format_nbytes(memory.device.step_peak_nbytes)} of weights, gradients and "
        f"optimizer states at the peak; plain PyTorch would hold {format_nbytes(4 * weight_nbytes(args))}\n"
        f"{last}validation loss {validation_loss(run, model):.3f} nats a byte\n\n{memory}\n"
    )
    sample = continue_text(model, os.fsencode(args.prompt), args.sample, device=run.device)
    ranks.say(sample.decode(errors="backslashreplace").expandtabs(4))
    if ranks.is_first:
        with replacing(args.out / "sample.txt") as file:
            file.write(sample)
        report(run, manager)
    return Outcome(losses, manager.state_dict(), optimizer.state_dict()["state"]) if args.res_check else None


@torch.no_grad()
def validation_loss(run: Run, model: GPT, *, num_batches: int = 16) -> float:
    """Return the mean loss over batches of the text that was kept back."""
    return sum(model(*run.batch(run.text.validation, i)).item() for i in range(num_batches)) / num_batches


class Progress:
    """A bar with the loss, the speed, and what the step moved, waited for, and took of the device."""

    def __init__(self, run: Run, manager: chunkmem.ChunkManager) -> None:
        self.manager = manager
        self.num_ranks = run.ranks.size
        self.step_tokens = run.args.batch * run.args.seq * self.num_ranks
        self.start_s = time.perf_counter()
        self.num_steps = 0
        self.bar = run.bar("chunks")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, loss: float) -> None:
        """Count a step."""
        self.num_steps += 1
        self.bar.set_postfix_str(f"loss {loss:.3f}, {self}", refresh=False)
        self.bar.update()

    def __str__(self) -> str:
        tokens_per_s = self.num_steps * self.step_tokens / (time.perf_counter() - self.start_s)
        if self.num_ranks == 1:
            return f"{tokens_per_s:,.0f} tokens/s, {self.manager.timeline()}"
        device = self.manager.memory().device
        peak = f"{format_nbytes(device.step_peak_nbytes)} of {format_nbytes(device.cap_nbytes)} on rank 0"
        return f"{tokens_per_s:,.0f} tokens/s on {self.num_ranks} ranks, peak {peak}"


def require_room(run: Run, manager: chunkmem.ChunkManager) -> None:
    """Refuse a model before it is built if its weights, gradients and two optimizer states fit nowhere."""
    weights = weight_nbytes(run.args)
    need = max(weights if run.config.release_after_init else 0, 4 * weights // run.ranks.size)
    memory = manager.memory()
    room = sum(tier.cap_nbytes for tier in (memory.device, memory.host, memory.disk) if tier is not None)
    if need > room:
        fail(f"--model {run.args.model} takes {format_nbytes(need)}, and there is room for {format_nbytes(room)}")


def report(run: Run, manager: chunkmem.ChunkManager) -> None:
    """Record the last training step, of this rank, and show it as `chunkmem report` does: a picture and a page."""
    folder = run.args.out
    if manager.plan is None:
        steps = "first step is recorded, the second" if run.ranks.size == 1 else "first three are recorded, the fourth"
        print(f"no report: no plan was followed (the {steps} one planned)", file=sys.stderr)
        return
    manager.record(folder)
    files, notes = write_report([load_run(folder)], folder)
    whose = "" if run.ranks.size == 1 else " of rank 0"
    print(f"\nthe last step{whose}: {', '.join(str(path) for path in files.values() if path)}")
    for note in notes:
        print(note, file=sys.stderr)


def main() -> None:
    args = parse_arguments(__doc__)
    sys.stdout.reconfigure(errors="backslashreplace")
    ranks, device = join_ranks()
    if args.res_check and ranks.size > 1:
        fail("--res_check compares one process with plain PyTorch; leave it out, or start without torchrun")
    if args.res_check and device.type == "cuda":  # otherwise plain PyTorch does not even repeat itself
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        if ranks.is_first:
            make_folder(args.out)
        text = load_text(args.data, seq=args.seq)
        start = Checkpoints(args.out).start(ranks, resume=args.resume)
        if start and ranks.num_restarts and ranks.is_first:
            print(f"started again by torchrun: goes on after step {start} of {args.steps}", file=sys.stderr)
        run = Run(args, make_config(args, device, num_ranks=ranks.size), text, device, ranks, start)
        if not run.steps and not ranks.num_restarts:
            fail(f"all {args.steps} steps are done; to go on, give more --steps")
        outcome = train(run)
    except (TextError, chunkmem.ChunkmemError) as error:
        fail(str(error))
    except OSError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; --resume goes on from the last checkpoint", code=130)
    if outcome is not None:
        difference = first_difference(outcome, train_in_plain_pytorch(run))
        if difference:
            fail(f"res_check: not what plain PyTorch gives: {difference}", code=1)
        print(
            f"res_check: {len(outcome.losses)} losses, {len(outcome.weights)} weights and the states of "
            f"{len(outcome.states)} parameters are bit for bit what plain PyTorch gives"
        )
    ranks.leave()


if __name__ == "__main__":
    main()
