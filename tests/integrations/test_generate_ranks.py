"""`generate()` of transformers over ranks, to different lengths, between steps of training: as in GRPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.libraries import LLAMA, VOCAB, manager_of
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]

SIZES = [2, 3]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
}


def make() -> Any:
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, eos_token_id=3, pad_token_id=0))


def generated(model: Any, rank: int, step: int, kind: str) -> torch.Tensor:
    torch.manual_seed(100 * rank + step)
    prompt = torch.randint(4, VOCAB, (2, 5))
    result: torch.Tensor = model.generate(prompt, max_new_tokens=2 + (5 * rank + 3 * step) % 9, **KINDS[kind])
    return result


def train(rank: int, kind: str) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    torch.set_num_threads(1)
    found = []
    with manager_of(96 << 10) as manager:
        with manager.init():
            model = make()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(4):
            tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(10 * rank + step))
            manager.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            with manager.join():
                words = generated(model, rank, step, kind)
            found.append((manager.state_dict(), words))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_generate_as_each_would_alone(size: int, kind: str) -> None:
    with Team(size) as team:
        for rank, steps in enumerate(team.run(train, kind)):
            alone = make()
            for step, (weights, words) in enumerate(steps):
                alone.load_state_dict(weights)
                assert torch.equal(generated(alone, rank, step, kind), words)
