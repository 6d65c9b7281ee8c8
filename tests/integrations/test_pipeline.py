"""Models of transformers by micro-batches, one layer after the other, or as stages: what blocks need besides states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.libraries import AMPLE_NBYTES, LLAMA, llama
from tests.helpers.pipelined import loop_step
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]


class First(nn.Module):
    """Embeddings, and what all layers are given besides."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return hidden, *self.rotary_emb(hidden, position_ids=positions)


class Layer(nn.Module):
    """A layer that passes on what the next one needs, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(hidden, position_embeddings=(cos, sin)), cos, sin


class Last(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor, _cos: Tensor, _sin: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("checkpoint", ["auto", "always", "never"])
def test_llama_by_layer(checkpoint: str, is_wrapped: bool) -> None:
    torch.manual_seed(3)
    plain = llama()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(3)
    config = chunkmem.Config.from_dict({"memory": {"device": AMPLE_NBYTES, "host": 64 << 20}})
    with chunkmem.ChunkManager(config) as manager:
        if is_wrapped:
            model = manager.wrap(llama())
        else:
            with manager.init():
                model = llama()
        optimizer = chunkmem.AdamW(model.parameters(), lr=1e-2, manager=manager)
        layers = [Layer(layer) for layer in model.model.layers]
        pipe = manager.pipeline(
            layers,
            first=First(model.model),
            last=Last(model),
            loss_fn=next_token,
            micro_batches=3,
            checkpoint=checkpoint,
        )
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(plain.config.vocab_size, (8, 13), generator=generator)
            inputs, targets = text[:, :-1], text[:, 1:]
            expected = loop_step(lambda tokens: plain(tokens).logits, next_token, inputs, targets, num=3)
            assert pipe.step(inputs, targets).item() == expected.item()
            for each in (plain_optimizer, optimizer):
                each.step()
                each.zero_grad()
            audit(manager)
            timeline = manager.timeline()
            assert step < 3 or (timeline is not None and not timeline.plan_misses)
        state = manager.state_dict(model)
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), name


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    },
}


def mixture(kind: str, experts: str) -> Any:
    """A mixture of experts, which layers choose by values."""
    options = {**LLAMA, "num_hidden_layers": 4, **EXPERTS[kind]}
    config = getattr(transformers, f"{kind}Config")(**options, experts_implementation=experts)
    torch.manual_seed(5)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def texts() -> list[Tensor]:
    return [torch.randint(LLAMA["vocab_size"], (4, 13), generator=torch.Generator().manual_seed(k)) for k in range(4)]


def train_stages(rank: int, kind: str, experts: str, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    memory = {"device": AMPLE_NBYTES, "host": 64 << 20}
    config = chunkmem.Config.from_dict({"memory": memory, "precision": precision, "default_chunk_size": 4096})
    with chunkmem.ChunkManager(config, mesh=mesh) as manager:
        with manager.init():
            model = mixture(kind, experts)
        pipe = manager.pipeline(
            [Layer(layer) for layer in model.model.layers],
            first=First(model.model),
            last=Last(model),
            loss_fn=next_token,
            micro_batches=2,
            schedule="1f1b",
        )
        optimizer = chunkmem.AdamW(model.parameters(), lr=1e-2, manager=manager)
        losses = []
        for text in texts():
            losses.append(pipe.step(text[:, :-1], text[:, 1:]).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, manager.state_dict()


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_mixtures_of_experts_as_stages(kind: str, experts: str) -> None:
    """They were refused: which experts a layer runs cannot be told from shapes."""
    model = mixture(kind, experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for text in texts():
        pairs = zip(text[:, :-1].chunk(2), text[:, 1:].chunk(2), strict=True)
        parts = [next_token(model(tokens).logits, targets) / 2 for tokens, targets in pairs]
        losses.append(float(sum(part.detach() for part in parts)))
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
    with Team(2) as pair:
        for found, weights in pair.run(train_stages, kind, experts, "fp32"):
            assert found == losses
            for name, value in model.state_dict().items():
                assert torch.equal(weights[name], value), name
        for found, _ in pair.run(train_stages, kind, experts, "bf16"):
            assert found == pytest.approx(losses, rel=0.02)
