"""torchtitan's Llama 3, and Llama 4 with experts, divided by its own functions, train in chunks as without them."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.tensor_parallel import full, in_two_groups
from tests.helpers.twins import cpu_only

pytestmark = [
    pytest.mark.full,
    cpu_only,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

WORDS = 64


@dataclass(frozen=True)
class Case:
    model: str
    num_ranks: int
    tp: int
    has_experts_over_ranks: bool = False
    device: int | None = None


def prepare() -> None:
    """What runs on GPUs alone has a stand-in: torchtitan imports triton, and counts tokens by a kernel of it."""
    importlib.import_module("functorch.compile")  # which looks for triton when it is imported
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton:
        triton: Any = types.ModuleType("triton")
        triton.jit, triton.language = (lambda function: function), types.ModuleType("triton.language")
        triton.language.constexpr, triton.__version__ = object, "0.0"
        sys.modules |= {"triton": triton, "triton.language": triton.language}
    import torchtitan.models.moe.utils as utils

    for name in () if has_triton else ("triton", "triton.language"):
        del sys.modules[name]
    histc = torch.histc
    torch.histc = lambda x, **options: histc(x.float(), **options).to(x.dtype)  # type: ignore[assignment]
    utils.generate_permute_indices = functools.partial(utils.generate_permute_indices, use_cpu=True)


def llama3(mesh: DeviceMesh, experts: DeviceMesh | None) -> Any:
    from torchtitan.models.llama3.infra.parallelize import apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    options = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": WORDS, "max_seq_len": 64}
    model = Transformer(TransformerModelArgs(**options, multiple_of=16))
    with torch.no_grad():
        model.init_weights()
    apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    return model


def llama4(mesh: DeviceMesh, experts: DeviceMesh | None) -> Any:
    from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp, apply_non_moe_tp
    from torchtitan.models.llama4.model.args import TransformerModelArgs
    from torchtitan.models.llama4.model.model import Transformer
    from torchtitan.models.moe import MoEArgs

    moe = MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False, load_balance_coeff=None)
    options = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": WORDS, "max_seq_len": 64}
    model = Transformer(TransformerModelArgs(**options, multiple_of=16, interleave_moe_layer_step=1, moe_args=moe))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    tp_mesh = mesh if mesh.size() > 1 else None
    if tp_mesh is not None:
        apply_non_moe_tp(model, tp_mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    apply_moe_ep_tp(model, tp_mesh=tp_mesh, ep_mesh=experts, etp_mesh=None, ep_etp_mesh=None)
    return model


def train(rank: int, case: Case) -> None:
    torch.set_num_threads(1)
    prepare()
    num_shards = case.num_ranks // case.tp
    mesh = init_device_mesh("cpu", (num_shards, case.tp), mesh_dim_names=("shard", "tp"))
    experts = init_device_mesh("cpu", (case.num_ranks,), mesh_dim_names=("ep",))

    def make() -> Any:
        torch.manual_seed(0)
        return globals()[case.model](mesh["tp"], experts if case.has_experts_over_ranks else None)

    def loss_of(model: Any, step: int) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + mesh["shard"].get_local_rank())
        batch = torch.randint(0, WORDS, (2, 16), generator=made)
        return torch.nn.functional.cross_entropy(full(model(batch)).flatten(0, 1).float(), batch.flatten())

    plain, model = make(), make()
    expected_optimizer = torch.optim.AdamW(in_two_groups(plain), lr=1e-3, fused=True)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": case.device}}), mesh=mesh) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
        for step in range(4):
            expected_optimizer.zero_grad()
            expected = loss_of(plain, step)
            expected.backward()
            for param in (param for param in plain.parameters() if param.grad is not None):
                is_whole_row = True
                if isinstance(param, DTensor):
                    param.grad = param.grad.redistribute(placements=param.placements)
                    is_whole_row = num_shards == 1 or param.device_mesh.size() < case.num_ranks
                local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
                if is_whole_row:  # else each rank has the sum for its own experts
                    dist.all_reduce(local, group=mesh["shard"].get_group())
                local.div_(num_shards)
            expected_optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            manager.backward(loss)
            optimizer.step()
            assert loss.item() == expected.item(), f"step {step}"
        found = {name: full(value) for name, value in manager.state_dict().items()}
        expected_state = {name: full(value) for name, value in plain.state_dict().items()}
        torch.testing.assert_close(found, expected_state, rtol=0, atol=0)
        assert (manager.memory().moved.h2d_nbytes > 0) == (case.device is not None)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama3", 2, tp=2),
        Case("llama3", 2, tp=2, device=48 << 10),
        Case("llama3", 4, tp=2, device=64 << 10),
        Case("llama4", 2, tp=2, device=96 << 10),
        Case("llama4", 2, tp=2, has_experts_over_ranks=True, device=96 << 10),
        Case("llama4", 2, tp=1, has_experts_over_ranks=True),
        Case("llama4", 2, tp=1, has_experts_over_ranks=True, device=112 << 10),
        Case("llama4", 4, tp=2, device=96 << 10),
    ],
    ids=str,
)
def test_a_model_of_torchtitan(case: Case) -> None:
    with Team(case.num_ranks) as team:
        team.run(train, case)
