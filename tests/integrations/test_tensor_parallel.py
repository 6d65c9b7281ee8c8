"""Models of transformers that its own `tp_plan="auto"` makes tensor-parallel, some with experts over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.tensor_parallel import full, in_two_groups
from tests.helpers.twins import cpu_only

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]

OPTIONS = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen3Config": {"head_dim": 8},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeConfig": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
STEPS = 4


def loss_of(model: Any, step: int) -> torch.Tensor:
    batch = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train(rank: int, family: str, folder: str, device: int | None, with_experts: bool) -> None:
    torch.set_num_threads(1)

    def load() -> Any:
        wanted = {"tp_size": 2, "tp_plan": "auto", "enable_expert_parallel": with_experts}
        config = transformers.distributed.DistributedConfig(**wanted)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)

    plain, model = load(), load()
    expected_optimizer = torch.optim.AdamW(in_two_groups(plain), lr=1e-2, fused=True)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    config = chunkmem.Config.from_dict({"memory": {"device": device}})
    with chunkmem.ChunkManager(config, mesh=mesh) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(STEPS):
            expected_optimizer.zero_grad()
            expected = loss_of(plain, step)
            expected.backward()
            for param in plain.parameters():
                if isinstance(param.grad, DTensor):
                    param.grad = param.grad.redistribute(placements=param.placements)
            expected_optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            manager.backward(loss)
            optimizer.step()
            assert loss.item() == expected.item(), f"step {step}"
        weights = {name: full(value) for name, value in plain.state_dict().items()}
        found = {name: full(value) for name, value in manager.state_dict().items()}
        torch.testing.assert_close(found, weights, rtol=0, atol=0)
        moved = manager.memory().moved.h2d_nbytes
        assert (moved > 0) == (device is not None)


@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize(
    ("family", "with_experts"),
    [
        (family, kind)
        for family in FAMILIES
        for kind in (False, True)
        if "num_experts_per_tok" in FAMILIES[family] or not kind
    ],
)
def test_families(tmp_path: Path, family: str, with_experts: bool, is_capped: bool) -> None:
    is_dense = "num_experts_per_tok" not in FAMILIES[family]
    config = getattr(transformers, family)(**OPTIONS, **FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    device = (24 << 10 if is_dense else 64 << 10) if is_capped else None
    with Team(2) as team:
        team.run(train, family, str(tmp_path), device, with_experts)
