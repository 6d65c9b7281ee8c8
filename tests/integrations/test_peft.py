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
from tests.helpers.twins import assert_equal, copied, cpu_only

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


def frozen_bf16(adapter: str = "lora") -> Callable[[Side], Any]:
    """A frozen base in bf16, which is wrapped first; its adapters are fp32, as peft makes them."""

    def build(side: Side) -> Any:
        base = side.ready(llama().to(torch.bfloat16))
        torch.manual_seed(6)
        return peft.get_peft_model(base, ADAPTERS[adapter]())

    return build


AFTER = ("lora", "lora with dropout", "lora of embeddings", "dora", "ia3", "loha", "oft")
"""Adapters inside of the model; prompts are modules around it."""


@pytest.mark.parametrize("adapter", AFTER)
def test_an_adapter_is_made_after_wrapping(adapter: str) -> None:
    """The base is in chunks, the adapter is ordinary, and chunkmem's optimizer steps it."""

    def scenario(side: Side) -> Any:
        base = side.ready(llama())
        torch.manual_seed(6)
        model = peft.get_peft_model(base, ADAPTERS[adapter]())
        seen = train(model, side.adamw(model.parameters()))
        return {"seen": seen, "weights": dict(model.state_dict())}

    same(scenario)


@pytest.mark.parametrize("adapter", [name for name in MERGED if name != "lora of embeddings"])
def test_an_adapter_made_after_wrapping_is_merged(adapter: str) -> None:
    def scenario(side: Side) -> Any:
        base = side.ready(llama())
        torch.manual_seed(6)
        model = peft.get_peft_model(base, ADAPTERS[adapter]())
        seen: list[Any] = train(model, side.adamw(model.parameters()))
        model.merge_adapter()
        seen.append(copied(dict(model.state_dict())))
        model.unmerge_adapter()
        seen.append(dict(model.state_dict()))
        return seen

    same(scenario)


@pytest.mark.parametrize("is_first", [True, False], ids=["adapter, wrap", "wrap, adapter"])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_a_frozen_base_in_bf16_with_adapters_in_fp32(adapter: str, is_first: bool) -> None:
    def scenario(side: Side) -> Any:
        base = llama().to(torch.bfloat16)
        base = base if is_first else side.ready(base)
        torch.manual_seed(6)
        model = peft.get_peft_model(base, ADAPTERS[adapter]())
        model = side.ready(model) if is_first else model
        dtypes = {param.requires_grad: param.dtype for param in model.parameters()}
        assert dtypes == {False: torch.bfloat16, True: torch.float32}
        seen = train(model, side.adamw(model.parameters()))
        return {"seen": seen, "weights": dict(model.state_dict())}

    same(scenario)


@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3"])
def test_adapters_of_a_managed_model_may_stay_outside_of_it(adapter: str) -> None:
    """Only the frozen base is in chunks; the adapters are ordinary parameters of an ordinary optimizer."""

    def scenario(side: Side) -> Any:
        base = side.ready(llama())
        torch.manual_seed(6)
        model = peft.get_peft_model(base, ADAPTERS[adapter]())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        return {"seen": train(model, optimizer), "weights": dict(model.state_dict())}

    same(scenario)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["chunkmem", "torch"])
def test_plans_are_followed_while_only_adapters_are_trained(is_ours: bool, checkpoints: bool) -> None:
    """No parameter in a chunk is updated, and with torch's AdamW no optimizer of chunkmem's steps at all."""
    device_nbytes = AMPLE_NBYTES
    for _ in range(2):
        with manager_of(device_nbytes) as manager:
            model = frozen_bf16()(Side(manager))
            if checkpoints:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable()
            trained = [param for param in model.parameters() if param.requires_grad]
            optimizer = chunkmem.AdamW(trained, manager=manager) if is_ours else torch.optim.AdamW(trained)
            misses = []
            for _ in range(12):
                train(model, optimizer, steps=1)
                misses.append(None if manager.plan is None else manager.timeline().plan_misses)
            assert misses[4:] == [0] * 8, misses
            timeline, device_nbytes = manager.timeline(), manager.memory().device.required_nbytes
    assert timeline.fetched > 0, "the smallest cap held everything"


def test_its_checkpoint_has_adapters_made_after_wrapping(tmp_path: Path) -> None:
    """Weights and states of what no chunk holds, too."""

    def built(manager: chunkmem.ChunkManager) -> tuple[Any, Any]:
        side = Side(manager)
        model = frozen_bf16()(side)
        return model, side.adamw(model.parameters())

    with manager_of(AMPLE_NBYTES) as manager:
        model, optimizer = built(manager)
        train(model, optimizer)
        manager.save(tmp_path / "half", optimizer)
        expected = [train(model, optimizer), copied(dict(model.state_dict()))]
    with manager_of(AMPLE_NBYTES) as manager:
        model, optimizer = built(manager)
        manager.load(tmp_path / "half", optimizer)
        assert_equal([train(model, optimizer), copied(dict(model.state_dict()))], expected)


def test_prompts_around_a_managed_model_are_refused() -> None:
    """They are in no model that the manager knows: made before wrapping, they are."""
    with manager_of(AMPLE_NBYTES) as manager:
        model = peft.get_peft_model(manager.wrap(llama()), ADAPTERS["prompt"]())
        with pytest.raises(chunkmem.StateError, match=r"neither managed nor excluded.*manager\.wrap\(\) first"):
            chunkmem.AdamW([p for p in model.parameters() if p.requires_grad], manager=manager)


def test_copies_of_modules_in_chunks_are_trained() -> None:
    """`modules_to_save`: the original stays in its chunk, and the copy is an ordinary module."""

    def scenario(side: Side) -> Any:
        base = side.ready(llama())
        torch.manual_seed(6)
        model = peft.get_peft_model(base, ADAPTERS["lora and a trained head"]())
        seen = train(model, side.adamw([param for param in model.parameters() if param.requires_grad]))
        return {"seen": seen, "weights": dict(model.state_dict())}

    same(scenario)


def test_an_adapter_in_bf16_is_not_loaded_by_peft(tmp_path: Path) -> None:
    """It would put others in fp32 in place of them, as Trainer does when it resumes; `manager.load` has no need to."""
    with manager_of(AMPLE_NBYTES, precision="bf16") as manager:
        model = manager.wrap(adapted("lora"))
        model.save_pretrained(tmp_path)
        with pytest.raises(chunkmem.StateError, match=r"lora_A\.default\.weight was packed .* cannot be replaced"):
            model.load_adapter(tmp_path, "default", is_trainable=True)
