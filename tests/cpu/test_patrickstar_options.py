"""PatrickStar's options for activations, embeddings and wide layers, all at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import chunkmem
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

OPTIONS = {
    "use_ckp": True,
    "with_activation_offload": True,
    "use_cpu_embedding": True,
    "with_tiling_linear": True,
    "use_fake_dist": False,
}
WIDTH, VOCAB, STEPS = 32, 50, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def losses(**options: object) -> list[float]:
    torch.manual_seed(0)
    config = {"memory": {"device": "2MiB", "host": "64MiB"}, "default_chunk_size": 4096, **options}
    engine, optimizer = chunkmem.initialize_engine(Model, 0, config)
    seen = []
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = engine(tokens)
        engine.backward(loss)
        optimizer.step()
        seen.append(loss.item())
    engine.manager.close()
    return seen


def test_all_of_them_train() -> None:
    expected = losses()
    assert losses(use_ckp=True, with_activation_offload=True, use_cpu_embedding=True) == expected
    # Sums over tiles are rounded otherwise.
    assert losses(**OPTIONS) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"use_ckp": True}, "recompute"),
        ({"with_activation_offload": True}, "offload"),
        ({"use_ckp": True, "with_activation_offload": True}, "recompute"),
        ({"use_ckp": False, "with_activation_offload": False}, None),
        ({"use_ckp": True, "activations": {"policy": "recompute"}}, "recompute"),
    ],
)
def test_what_they_are_here(options: dict[str, object], policy: str | None) -> None:
    assert chunkmem.Config.from_dict(options).activations.policy == policy


@pytest.mark.parametrize("key", ["use_ckp", "with_activation_offload"])
def test_a_contradiction_is_an_error(key: str) -> None:
    with pytest.raises(chunkmem.ConfigError, match=rf"{key} is true, which is activations\.policy"):
        chunkmem.Config.from_dict({key: True, "activations": {"policy": "keep"}})
    with pytest.raises(chunkmem.ConfigError, match=key):
        chunkmem.Config.from_dict({key: "yes"})
