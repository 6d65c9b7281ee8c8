"""What is measured: one GPT, trained over ranks by DDP, FSDP2, DeepSpeed and by chunkmem's three ways to exchange.

Every rank of every variant is a process of its own (`serve`), and trains one step when it is asked to.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.checkout import import_chunkmem
from benchmarks.overhead.variants import ADAMW, GPT, NUM_BATCHES, Shape, num_params

NUM_RANKS = 2
TIMEOUT_S = 300
"""How long a rank waits for the others before it fails."""
MODEL_DATA_NBYTES_PER_PARAM = 16
"""In fp32: weight, gradient and two states."""


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    trainer: str
    memory_saving: bool | None = None
    """chunkmem's `client.opts.with_mem_saving_comm`."""
    aim: float | None = None
    """The lower end of the ratio's interval should not be above this."""
    checkout: str | None = None
    """The folder whose chunkmem it runs; None: this one's."""

    def before(self, checkout: Path) -> Variant:
        """The same variant with the chunkmem of another checkout."""
        return replace(
            self, name=f"{self.name}-before", title=f"{self.title}; before", aim=None, checkout=str(checkout)
        )


VARIANTS = (
    Variant("ddp", "DDP", "ddp"),
    Variant("ddp-again", "DDP again (A/A)", "ddp"),
    Variant("fsdp2", "FSDP2, `fully_shard` per block", "fsdp2"),
    Variant("zero3", "DeepSpeed ZeRO-3", "zero3"),
    Variant("point-to-point", "chunkmem, point to point (`null`, the default)", "chunkmem", None, aim=1.05),
    Variant("grouped", "chunkmem, grouped (`false`)", "chunkmem", False),
    Variant("memory-saving", "chunkmem, memory-saving (`true`)", "chunkmem", True, aim=1.30),
)


@dataclass(frozen=True)
class Account:
    """What one rank's process has of memory; None where the variant does not tell."""

    process_peak_nbytes: int
    kept_nbytes: int | None = None
    """Weights, gradients and states now."""
    peak_nbytes: int | None = None
    """The same at the highest point of the last step, gathered weights included."""
    by_role: Mapping[str, int] = field(default_factory=dict)
    """chunkmem's roles to the bytes that are in `kept_nbytes`."""


@dataclass(frozen=True)
class Failure:
    """A rank's process ended on an exception, or otherwise."""

    what: str


@dataclass(frozen=True)
class Missing:
    """The variant cannot run here."""

    reason: str


class MissingLibraryError(Exception):
    """A variant needs what is not installed, or does not work beside this torch."""


@dataclass(frozen=True)
class Training:
    """A rank's part of a training, whoever holds the parameters."""

    model: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], None]
    update: Callable[[], None]
    zero_grad: Callable[[], None]
    account: Callable[[], Account]

    def step(self, batch: Tensor) -> float:
        """Train one step on `batch` and return this rank's loss."""
        # First, not last: between steps the gradients are there to be counted.
        self.zero_grad()
        loss = self.model(batch)
        self.backward(loss)
        self.update()
        return loss.item()


def train_ddp(_variant: Variant, shape: Shape) -> Training:
    """DDP as it is meant to be used: gradients live in the buckets that are reduced, once."""
    model = nn.parallel.DistributedDataParallel(GPT(shape), gradient_as_bucket_view=True)
    return _in_torch(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def train_fsdp2(_variant: Variant, shape: Shape) -> Training:
    """FSDP2 with its defaults: a block's weights are freed after forward and gathered again for backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _in_torch(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def _in_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    def account() -> Account:
        params = list(model.parameters())
        tensors = [*params, *(param.grad for param in params if param.grad is not None)]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        return Account(process_peak_nbytes(), kept_nbytes=_sum_nbytes(tensors))

    return Training(model, Tensor.backward, optimizer.step, optimizer.zero_grad, account)


def _sum_nbytes(tensors: Iterable[Tensor]) -> int:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in local)


def train_zero3(_variant: Variant, shape: Shape) -> Training:
    """DeepSpeed ZeRO-3 with torch's fused AdamW; weights below its default threshold stay whole on every rank."""
    if find_spec("deepspeed") is None:
        raise MissingLibraryError("`deepspeed` is not installed")
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_SIZE": str(NUM_RANKS)}
    os.dup2(2, 1)  # What it prints is no part of the table.
    try:
        import deepspeed
    except Exception as error:  # Beside another torch than it knows, it may fail in any way.
        raise MissingLibraryError(f"`import deepspeed` fails: {error!r}") from error
    config = {
        "train_micro_batch_size_per_gpu": shape.num_sequences,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return Training(engine, engine.backward, engine.step, lambda: None, lambda: Account(process_peak_nbytes()))


def train_chunkmem(variant: Variant, shape: Shape) -> Training:
    """The same training loop with the model in chunks that the ranks share."""
    chunkmem = import_chunkmem(variant.checkout)
    ample_nbytes = 2 * MODEL_DATA_NBYTES_PER_PARAM * num_params(shape)
    keys = {
        "memory": {"device": ample_nbytes, "host": ample_nbytes},
        "client": {"opts": {"with_mem_saving_comm": variant.memory_saving}},
    }
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(keys))
    with manager.init():
        model = GPT(shape)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **ADAMW)

    def account() -> Account:
        report = manager.memory()
        tiers = (report.device, report.host)
        by_role: dict[str, int] = {}
        for role, (now_nbytes, _) in (item for tier in tiers for item in tier.by_role.items()):
            by_role[role] = by_role.get(role, 0) + now_nbytes
        kept_nbytes = sum(nbytes for role, nbytes in by_role.items() if role != "cache")
        return Account(process_peak_nbytes(), kept_nbytes, sum(tier.step_peak_nbytes for tier in tiers), by_role)

    return Training(model, manager.backward, optimizer.step, optimizer.zero_grad, account)


TRAINERS = {"ddp": train_ddp, "fsdp2": train_fsdp2, "zero3": train_zero3, "chunkmem": train_chunkmem}


def serve(connection: Connection, variant: Variant, shape: Shape, rank: int, store: Path) -> None:
    """Be one rank of `variant`: answer each request until the other end is gone.

    A step's number is answered with `(seconds, loss, CPU seconds)`, `"account"` with an `Account`. The first message,
    unasked, is None, or `Missing`. A `Failure` in place of any answer is the last message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets Ctrl-C too, and ends every process.
    try:
        torch.set_num_threads(1)
        files = dist.FileStore(str(store), NUM_RANKS)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=NUM_RANKS, timeout=timeout)
        torch.manual_seed(0)  # The same first weights on all ranks.
        own = torch.Generator().manual_seed(1 + rank)
        shape_of_batches = (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1)
        batches = torch.randint(shape.vocabulary, shape_of_batches, generator=own)
        training = TRAINERS[variant.trainer](variant, shape)
        connection.send(None)
        while True:
            connection.send(_answer(connection.recv(), training, batches))
    except EOFError:
        pass
    except MissingLibraryError as error:
        connection.send(Missing(str(error)))
    except Exception:
        connection.send(Failure(traceback.format_exc()))
    finally:
        # Not through torch's end of a process: it may wait for ranks that are gone.
        os._exit(0)


def _answer(request: int | str, training: Training, batches: Tensor) -> tuple[float, float, float] | Account:
    if request == "account":
        return training.account()
    batch = batches[int(request) % NUM_BATCHES]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    loss = training.step(batch)
    return time.perf_counter() - began_s, loss, time.process_time() - began_cpu_s


def process_peak_nbytes() -> int:
    """Return the peak resident set of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
