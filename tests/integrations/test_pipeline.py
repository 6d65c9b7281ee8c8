"""A model of transformers by micro-batches, one layer after the other: what blocks need besides hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.libraries import AMPLE_NBYTES, llama
from tests.helpers.pipelined import loop_step
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
