"""trl: its trainers are the Trainer of transformers, with losses, masks and checkpointing of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.libraries import AMPLE_NBYTES, LR, Side, decaying, llama, manager_of, same, tokens
from tests.helpers.twins import assert_equal, cpu_only

trl = pytest.importorskip("trl", minversion="1.16")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.full, cpu_only, pytest.mark.filterwarnings("ignore::FutureWarning")]

WORDS = tuple(f"w{index}" for index in range(60))
LOGGED = ("loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy", "rewards/margins", "logps/chosen")

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},  # with gradient checkpointing
    "packing": {"packing": True},
    "no checkpointing": {"gradient_checkpointing": False},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def tokenizer() -> Any:
    """Words to tokens, made here as there is no hub to ask."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(4, 8)))


def options_of(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "logging_steps": 1,
        "max_steps": 4,
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def train(trainer: Any) -> dict[str, Any]:
    """Train; what was logged, and the weights."""
    trainer.train()
    logs = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
    assert all(entry["grad_norm"] > 0 for entry in logs[:4])
    return {"logs": logs, "weights": dict(trainer.model.state_dict())}


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_supervised_fine_tuning(variant: str, adapts: bool, tmp_path: Path) -> None:
    generator = random.Random(0)
    data = [{"text": text(generator)} for _ in range(24)]

    def scenario(side: Side) -> Any:
        model = side.ready(peft.get_peft_model(llama(), lora()) if adapts else llama())
        optimizer = side.adamw(model.parameters())
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**options_of(tmp_path), **VARIANTS[variant]),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(),
            optimizers=(optimizer, decaying(optimizer)),
        )
        return train(trainer)

    same(scenario)


@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
def test_a_script_that_names_the_class(adapts: bool, tmp_path: Path) -> None:
    """With SFTTrainer's own defaults: bf16, gradient checkpointing, clipping; evaluated, and the best one loaded."""
    generator = random.Random(0)
    data = [{"text": text(generator)} for _ in range(24)]
    own = {key: value for key, value in options_of(tmp_path).items() if key not in ("bf16", "save_strategy")}
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def scenario(side: Side) -> Any:
        model = side.ready(llama())
        torch.manual_seed(7)
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**own, **steps, load_best_model_at_end=True),
            train_dataset=datasets.Dataset.from_list(data),
            eval_dataset=datasets.Dataset.from_list(data[:8]),
            processing_class=tokenizer(),
            peft_config=lora() if adapts else None,
            optimizer_cls_and_kwargs=side.adamw_class,
        )
        assert trainer.args.bf16
        assert trainer.args.max_grad_norm == 1.0
        trainer.train()
        keys = (*LOGGED, "eval_loss")
        logs = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
        return {"logs": logs, "weights": dict(trainer.model.state_dict())}

    same(scenario)


@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
def test_preferences(adapts: bool, tmp_path: Path) -> None:
    """With an adapter, the model without it is the reference: two ways through the same weights in one step."""
    generator = random.Random(0)
    data = [{key: text(generator) for key in ("prompt", "chosen", "rejected")} for _ in range(24)]

    def scenario(side: Side) -> Any:
        model = side.ready(peft.get_peft_model(llama(), lora()) if adapts else llama())
        optimizer = side.adamw(model.parameters())
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=None if adapts else llama(),
            args=trl.DPOConfig(**options_of(tmp_path)),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(),
            optimizers=(optimizer, decaying(optimizer)),
        )
        return train(trainer)

    same(scenario)


def test_an_adapter_that_trl_makes(tmp_path: Path) -> None:
    """It is made of the model in chunks, around modules that are in them, and stays ordinary."""
    generator = random.Random(0)
    data = [{"text": text(generator)} for _ in range(24)]

    def scenario(side: Side) -> Any:
        torch.manual_seed(7)
        trainer = trl.SFTTrainer(
            model=side.ready(llama()),
            args=trl.SFTConfig(**options_of(tmp_path), learning_rate=LR),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(),
            peft_config=lora(),
            optimizer_cls_and_kwargs=side.adamw_class,
        )
        return train(trainer)

    same(scenario)


def test_a_reference_that_trl_copies() -> None:
    """An ordinary model, frozen; the one that is trained stays managed."""
    from trl.models import create_reference_model

    with manager_of(AMPLE_NBYTES) as manager:
        model = manager.wrap(llama())
        reference = create_reference_model(model)
        assert not any(param.requires_grad for param in reference.parameters())
        assert_equal(dict(reference.state_dict()), manager.state_dict())
        assert torch.equal(reference(tokens(2)).logits, model(tokens(2)).logits)
        assert all(param.requires_grad for param in model.parameters())
