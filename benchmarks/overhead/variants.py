"""What is measured: one GPT, trained on the same tokens by plain PyTorch, by chunkmem under several caps and by FSDP2.

Every variant runs in a process of its own (`serve`) and trains one step when it is asked to.
"""

from __future__ import annotations

import hashlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.checkout import import_chunkmem
from benchmarks.overhead.masters import MasterAdamW

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
NUM_BATCHES = 4


@dataclass(frozen=True)
class Shape:
    """The size of the model and of one step's batch."""

    num_layers: int
    width: int
    num_heads: int
    num_sequences: int
    num_tokens: int
    """Tokens a sequence."""
    vocabulary: int = 256


FULL = Shape(num_layers=8, width=512, num_heads=8, num_sequences=4, num_tokens=256)
QUICK = Shape(num_layers=8, width=128, num_heads=4, num_sequences=2, num_tokens=64)


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    trainer: str
    cap_nbytes_per_param: float | None = None
    """chunkmem's device cap, in bytes for each parameter of the model; None: no cap."""
    aim: float | None = None
    """The lower end of the ratio's interval should not be above this."""
    precision: str = "fp32"
    checkout: str | None = None
    """The folder whose chunkmem it runs; None: this one's."""

    @property
    def baseline(self) -> str:
        """The variant it is paired with and has to equal bit for bit: plain PyTorch in the same precision."""
        return BASELINES[self.precision]

    def cap_nbytes(self, num_params: int) -> int | None:
        """The device cap in bytes for a model of `num_params` parameters."""
        return None if self.cap_nbytes_per_param is None else round(self.cap_nbytes_per_param * num_params)

    def before(self, checkout: Path) -> Variant:
        """The same variant with the chunkmem of another checkout."""
        return replace(
            self, name=f"{self.name}-before", title=f"{self.title}; before", aim=None, checkout=str(checkout)
        )


BASELINES = {"fp32": "plain", "bf16": "bf16-plain"}

# Model data is 16 bytes a parameter. fp32: weight, gradient and two states, of 4 bytes each, so PARAM is 4 of the 16.
# bf16: weight and gradient of 2, master weight and two states of 4. "All resident" caps at twice the model data, so
# that what a planner keeps free for other things cannot push chunks out either.
VARIANTS = (
    Variant("plain", "plain PyTorch", "plain"),
    Variant("plain-again", "plain PyTorch again (A/A)", "plain"),
    Variant("resident", "chunkmem, all model data resident", "chunkmem", 32, aim=1.02),
    Variant("no-cap", "chunkmem, `device: null`", "chunkmem"),
    Variant("data-50", "chunkmem, cap 50 % of model data", "chunkmem", 0.5 * 16),
    Variant("data-30", "chunkmem, cap 30 % of model data", "chunkmem", 0.3 * 16, aim=1.05),
    Variant("param-50", "chunkmem, cap 50 % of PARAM bytes", "chunkmem", 0.5 * 4),
    Variant("param-30", "chunkmem, cap 30 % of PARAM bytes", "chunkmem", 0.3 * 4, aim=1.08),
    Variant("fsdp2", "FSDP2, `fully_shard` per block", "fsdp2"),
    Variant("bf16-plain", "plain PyTorch, bf16 with fp32 master weights", "masters", precision="bf16"),
    Variant("bf16-resident", "chunkmem, bf16, all model data resident", "chunkmem", 32, precision="bf16"),
    Variant("bf16-data-30", "chunkmem, bf16, cap 30 % of model data", "chunkmem", 0.3 * 16, precision="bf16"),
)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (sequences, tokens, width), the same back
        """Mix tokens, then channels, each added to what came in."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (sequences, heads, tokens, width / heads)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_out(attended)
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A byte-level GPT with an untied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.num_tokens, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, batch: Tensor) -> Tensor:  # (sequences, tokens + 1)
        """Return the mean loss of predicting each token from those before it."""
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def num_params(shape: Shape) -> int:
    """Parameters of the model, counted without allocating it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


@dataclass(frozen=True)
class Account:
    """What a variant's process has used since it started; None where the variant keeps no such ledger."""

    process_peak_nbytes: int
    h2d_nbytes: int | None = None
    d2h_nbytes: int | None = None
    device_peak_nbytes: int | None = None


@dataclass(frozen=True)
class Failure:
    """A variant's process ended on an exception."""

    traceback: str


@dataclass(frozen=True)
class Training:
    """A model under training, whoever holds its parameters."""

    model: GPT
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None]
    account: Callable[[], Account]
    weights: Callable[[], Mapping[str, Tensor]]

    def step(self, batch: Tensor) -> float:
        """Train one step on `batch` and return its loss."""
        loss = self.model(batch)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def train_plain(_variant: Variant, shape: Shape) -> Training:
    """Plain PyTorch with its fused AdamW: what the others are compared to."""
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return Training(model, optimizer, Tensor.backward, lambda: Account(_process_peak_nbytes()), model.state_dict)


def train_masters(_variant: Variant, shape: Shape) -> Training:
    """Plain PyTorch in bf16 with fp32 master weights: what chunkmem in bf16 is compared to."""
    model = GPT(shape)
    optimizer = MasterAdamW(model, **ADAMW)
    return Training(model, optimizer, Tensor.backward, lambda: Account(_process_peak_nbytes()), optimizer.weights)


def train_chunkmem(variant: Variant, shape: Shape) -> Training:
    """The same training loop with the model in chunks under the variant's cap on device memory."""
    chunkmem = import_chunkmem(variant.checkout)
    keys = {"precision": variant.precision, "memory": {"device": variant.cap_nbytes(num_params(shape))}}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(keys))
    with manager.init():
        model = GPT(shape)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **ADAMW)

    def account() -> Account:
        report = manager.memory()
        return Account(
            _process_peak_nbytes(), report.moved.h2d_nbytes, report.moved.d2h_nbytes, report.device.peak_nbytes
        )

    return Training(model, optimizer, manager.backward, account, lambda: manager.state_dict(model))


def train_fsdp2(_variant: Variant, shape: Shape) -> Training:
    """FSDP2 over one process: what sharding machinery costs when there is nobody to share with."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def weights() -> dict[str, Tensor]:
        shards = model.state_dict()
        return {name: shard.full_tensor() if isinstance(shard, DTensor) else shard for name, shard in shards.items()}

    return Training(model, optimizer, Tensor.backward, lambda: Account(_process_peak_nbytes()), weights)


TRAINERS = {"plain": train_plain, "masters": train_masters, "chunkmem": train_chunkmem, "fsdp2": train_fsdp2}


def serve(connection: Connection, variant: Variant, shape: Shape) -> None:
    """Train `variant` in this process: answer each request until the other end is gone.

    A step's number is answered with `(seconds, loss)`, `"account"` with an `Account`, `"weights"` with their SHA-256.
    The first message, unasked, is the number of threads. A `Failure` in place of any answer is the last message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets Ctrl-C too, and ends every process.
    try:
        torch.manual_seed(0)
        batches = torch.randint(shape.vocabulary, (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1))
        training = TRAINERS[variant.trainer](variant, shape)
        connection.send(torch.get_num_threads())
        while True:
            connection.send(_answer(connection.recv(), training, batches))
    except EOFError:
        return
    except Exception:
        connection.send(Failure(traceback.format_exc()))


def _answer(request: int | str, training: Training, batches: Tensor) -> tuple[float, float] | Account | str:
    if request == "account":
        return training.account()
    if request == "weights":
        return _digest(training.weights())
    batch = batches[int(request) % NUM_BATCHES]
    began_s = time.perf_counter()
    loss = training.step(batch)
    return time.perf_counter() - began_s, loss


def _digest(weights: Mapping[str, Tensor]) -> str:
    """Hash names and bits, so that equal digests mean equal models."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _process_peak_nbytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
