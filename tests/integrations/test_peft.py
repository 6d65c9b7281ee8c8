"""peft: adapters inside of managed modules, their base frozen; merging writes through `.data`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, Side, llama, manager_of, same, tokens
from tests.helpers.twins import copied, cpu_only

peft = pytest.importorskip("peft", minversion="0.21")

pytestmark = [pytest.mark.full, cpu_only, pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate")]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "lora with dropout": lambda: lora(lora_dropout=0.1),
    "lora of embeddings": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "lora and biases": lambda: lora(bias="all"),
    "lora and a trained head": lambda: lora(modules_to_save=["lm_head"]),
    "dora": lambda: lora(use_dora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=["q_proj"]),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
MERGED = ("lora", "lora of embeddings", "dora", "ia3")


def adapted(adapter: str) -> Any:
    """A small model with an adapter; the rest is frozen."""
    model = llama()
    torch.manual_seed(6)
    return peft.get_peft_model(model, ADAPTERS[adapter]())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Losses and norms of some steps."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        batch = tokens(2, seed=step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        seen += [loss.item(), clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_trains_as_in_plain_pytorch(adapter: str) -> None:
    def scenario(side: Side) -> Any:
        model = side.ready(adapted(adapter))
        seen = train(model, side.adamw(model.parameters()))
        return {"seen": seen, "weights": dict(model.state_dict())}

    same(scenario)


@pytest.mark.parametrize("adapter", MERGED)
def test_an_adapter_is_merged_and_unmerged(adapter: str) -> None:
    """`weight.data += delta` was refused at the next call, as if the weight had been given other memory."""

    def scenario(side: Side) -> Any:
        model = side.ready(adapted(adapter))
        optimizer = side.adamw(model.parameters())
        batch = tokens(2)
        seen: list[Any] = train(model, optimizer)
        model.eval()
        with torch.no_grad():
            with model.disable_adapter():
                seen.append(model(input_ids=batch).logits)
            for is_safe in (False, True):
                model.merge_adapter(safe_merge=is_safe)
                seen += [model(input_ids=batch).logits, copied(dict(model.state_dict()))]
                model.unmerge_adapter()
                seen += [model(input_ids=batch).logits, copied(dict(model.state_dict()))]
        model.train()
        seen += train(model, optimizer)
        merged = model.merge_and_unload().eval()
        with torch.no_grad():
            seen += [merged(input_ids=batch).logits, dict(merged.state_dict())]
        return seen

    same(scenario)


def test_what_it_saves_is_an_adapter_of_plain_pytorch(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        model = side.ready(adapted("lora"))
        train(model, side.adamw(model.parameters()))
        model.save_pretrained(str(tmp_path / "adapter"))
        return dict(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").state_dict())

    same(scenario)


def test_adapters_of_a_managed_model_may_stay_outside_of_it() -> None:
    """Only the frozen base is in chunks; the adapters are ordinary parameters of an ordinary optimizer."""

    def scenario(side: Side) -> Any:
        base = side.ready(llama())
        torch.manual_seed(6)
        model = peft.get_peft_model(base, lora())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        return {"seen": train(model, optimizer), "weights": dict(model.state_dict())}

    same(scenario)


def test_chunkmem_refuses_adapters_that_it_does_not_have() -> None:
    with manager_of(AMPLE_NBYTES) as manager:
        model = peft.get_peft_model(manager.wrap(llama()), lora())
        with pytest.raises(chunkmem.StateError, match=r"\(4, 32\) was added to the model after it was packed"):
            chunkmem.AdamW([p for p in model.parameters() if p.requires_grad], manager=manager)
