"""The others: plain PyTorch with everything on the device, FSDP2, DeepSpeed, torchao, each as its documentation says.

All train the same GPT on the same tokens, with the same blocks recomputed, under the same limit of torch's allocator.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.model import build
from benchmarks.gpu.rows import NoRoomError, NotHereError
from benchmarks.gpu.work import ADAMW, Training, Work, compute_device
from chunkmem.estimate.model import checkpointed

NO_OFFLOAD_NBYTES_PER_PARAM = 16
"""bf16 weight and gradient, fp32 master weight and two states."""


class MastersOnDevice:
    """AdamW of a bf16 model with fp32 master weights and states, one parameter at a time: 16 bytes for each, no more.

    torch's own optimizers would need the fp32 gradients of all parameters at once.
    """

    def __init__(self, params: list[nn.Parameter], max_norm: float) -> None:
        self._params = params
        self._max_norm = max_norm
        self._masters = [param.detach().float() for param in params]
        self._exp_avgs = [torch.zeros_like(master) for master in self._masters]
        self._exp_avg_sqs = [torch.zeros_like(master) for master in self._masters]
        device = params[0].device
        self._steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in params]

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update once, and drop the gradients."""
        nn.utils.clip_grad_norm_(self._params, self._max_norm)
        lists = zip(self._params, self._masters, self._exp_avgs, self._exp_avg_sqs, self._steps, strict=True)
        for param, master, exp_avg, exp_avg_sq, step in lists:
            assert param.grad is not None
            grad, param.grad = param.grad.float(), None
            step += 1
            torch._fused_adamw_(
                [master],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                lr=ADAMW["lr"],
                beta1=ADAMW["betas"][0],
                beta2=ADAMW["betas"][1],
                eps=ADAMW["eps"],
                weight_decay=ADAMW["weight_decay"],
                amsgrad=False,
                maximize=False,
            )
            param.copy_(master)


def train_plain(work: Work) -> Training:
    """Plain PyTorch, nothing offloaded: bf16 with fp32 master weights on the device."""
    device = compute_device()
    needed_nbytes = NO_OFFLOAD_NBYTES_PER_PARAM * work.size.num_params
    if work.cap_nbytes is not None and needed_nbytes > work.cap_nbytes:
        raise NoRoomError(
            f"its model data alone is {needed_nbytes / 2**30:.0f} GiB, and the cap {work.cap_nbytes / 2**30:.0f} GiB"
        )
    model = build(work.size).bfloat16().to(device)
    checkpointed(model)
    optimizer = MastersOnDevice(list(model.parameters()), work.max_norm)
    return Training(model, _backward, optimizer.step)


def _backward(loss: Tensor, _last: bool) -> None:
    loss.backward()


def train_fsdp2(work: Work) -> Training:
    """FSDP2 with `CPUOffloadPolicy`: fp32 shards, pinned, updated by torch's fused AdamW on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not torch.cuda.is_available():
        raise NotHereError("CPUOffloadPolicy is for CUDA")
    # One process talks to nobody: no interface but the machine's own is looked for.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    # Shards live on the host, so a collective on them would need a backend for the CPU as well.
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    model = build(work.size)
    checkpointed(model)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), work.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, _backward, update)


def train_deepspeed(work: Work) -> Training:
    """DeepSpeed ZeRO-3, parameters and optimizer offloaded to the host, sizes of its buckets as `"auto"` makes them."""
    if find_spec("deepspeed") is None:
        raise NotHereError("deepspeed is not installed")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ |= alone
    try:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except Exception as error:  # Beside another torch than it knows, it may fail in any way.
        raise NotHereError(f"import deepspeed fails: {error!r}"[:200]) from error
    width = work.size.width
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.num_micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": work.max_norm,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        },
    }
    # Partitions each module as soon as it is built; otherwise all of it would have to fit the device once.
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(work.size)
    checkpointed(model)
    try:
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    except Exception as error:  # It compiles its kernel now.
        raise NotHereError(f"DeepSpeedCPUAdam could not be built: {error!r}"[:200]) from error
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def forward(batch: Tensor) -> Tensor:
        # It divides by the number of micro-batches itself.
        loss: Tensor = engine(batch) * work.num_micro_batches
        return loss

    def backward(loss: Tensor, _last: bool) -> None:
        engine.backward(loss)
        engine.step()  # It knows by itself which one is the last.

    return Training(forward, backward, lambda: None)


def train_torchao(work: Work) -> Training:
    """torchao's `CPUOffloadOptimizer`: gradients and states on the host, weights on the device, all in bf16.

    It has no fp32 master weights, so it holds and moves less than the others do. Gradients leave the device while
    backward runs, so it alone does not clip them.
    """
    if find_spec("torchao") is None:
        raise NotHereError("torchao is not installed")
    if not torch.cuda.is_available():
        raise NotHereError("CPUOffloadOptimizer is for CUDA")
    try:
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError:
            from torchao.prototype.low_bit_optim import CPUOffloadOptimizer
    except Exception as error:
        raise NotHereError(f"import torchao fails: {error!r}"[:200]) from error
    if work.num_micro_batches > 1:
        raise NotHereError("CPUOffloadOptimizer with offload_gradients does not accumulate gradients")
    model = build(work.size).bfloat16().to(compute_device())
    checkpointed(model)
    params = list(model.parameters())
    optimizer = CPUOffloadOptimizer(params, torch.optim.AdamW, offload_gradients=True, fused=True, **ADAMW)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, _backward, update)


TRAINERS = {
    "plain": train_plain,
    "fsdp2": train_fsdp2,
    "deepspeed": train_deepspeed,
    "torchao": train_torchao,
}
TITLES = {
    "chunkmem": "chunkmem",
    "plain": "PyTorch, no offload",
    "fsdp2": "FSDP2, `CPUOffloadPolicy`",
    "deepspeed": "DeepSpeed ZeRO-3 offload",
    "torchao": "torchao `CPUOffloadOptimizer`",
}
PEERS = ("fsdp2", "deepspeed", "torchao")
