"""The Trainer of transformers, with its defaults: it clips, logs norms, and saves by itself."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, LR, Side, decaying, llama, manager_of, rows, same, tokens
from tests.helpers.twins import assert_equal, cpu_only

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.full, cpu_only]

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
"""What depends on the numbers; the rest of a log entry is times."""

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "label smoothing": {"label_smoothing_factor": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "no clipping": {"max_grad_norm": 0.0},
    "autocast": {"bf16": True},
}


def trainer_of(side: Side, folder: Path, *, own_optimizer: bool = False, **options: Any) -> Any:
    """A Trainer over a small model: given an optimizer, or told by which class to make one."""
    options = {"max_steps": 4, "save_strategy": "no", "per_device_train_batch_size": 2} | options
    args = transformers.TrainingArguments(
        output_dir=str(folder), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    model = side.ready(llama())
    given: dict[str, Any] = {"optimizer_cls_and_kwargs": side.adamw_class}
    if not own_optimizer:
        optimizer = side.adamw(model.parameters())
        given = {"optimizers": (optimizer, decaying(optimizer))}
    return transformers.Trainer(model=model, args=args, train_dataset=rows(), eval_dataset=rows(4), **given)


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]


def result_of(trainer: Any) -> dict[str, Any]:
    """All that training left: what was logged, the weights, and the optimizer's states."""
    states = trainer.optimizer.state_dict()["state"]
    return {
        "logs": logs_of(trainer),
        "weights": dict(trainer.model.state_dict()),
        "states": dict(sorted(states.items())),
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_the_trainer_trains_as_in_plain_pytorch(variant: str, tmp_path: Path) -> None:
    """The norm that it logs was 0 when gradients could not be seen, and nothing was clipped."""

    def scenario(side: Side) -> Any:
        trainer = trainer_of(side, tmp_path, **VARIANTS[variant])
        trainer.train()
        norms = [entry["grad_norm"] for entry in logs_of(trainer) if "grad_norm" in entry]
        assert len(norms) == 4
        assert all(norm > 0 for norm in norms)
        assert variant == "no clipping" or max(norms) > 1.0, "nothing was clipped"
        return result_of(trainer)

    same(scenario)


def test_an_optimizer_and_a_schedule_that_the_trainer_makes(tmp_path: Path) -> None:
    """It makes two groups of parameters, and its own schedule, from a class and arguments."""

    def scenario(side: Side) -> Any:
        trainer = trainer_of(side, tmp_path, own_optimizer=True, weight_decay=0.1, warmup_steps=2, learning_rate=LR)
        trainer.train()
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
        return result_of(trainer)

    same(scenario)


def uneven_rows(num_rows: int = 24) -> list[dict[str, list[int]]]:
    """Rows of different lengths, which a collator pads."""
    return [{"input_ids": row["input_ids"][: 4 + index % 8].tolist()} for index, row in enumerate(rows(num_rows))]


AS_WRITTEN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"bf16": True},
    "checkpointing in bf16": {"bf16": True, "gradient_checkpointing": True},
    "rows of like length": {"train_sampling_strategy": "group_by_length"},
    "the best one is loaded": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "a norm that clips nothing": {"max_grad_norm": 1e9},
    "two epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"},
}


@pytest.mark.parametrize("variant", AS_WRITTEN)
@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_a_script_that_names_the_class(variant: str, tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs` and otherwise the script of plain PyTorch, with the Trainer's own defaults."""
    from transformers import DataCollatorForLanguageModeling

    from tests.integrations.test_trl import tokenizer

    def scenario(side: Side) -> Any:
        options = {"max_steps": 6, "save_strategy": "no", "per_device_train_batch_size": 4} | AS_WRITTEN[variant]
        trainer = transformers.Trainer(
            model=side.ready(llama()),
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **options
            ),
            train_dataset=uneven_rows(),
            eval_dataset=uneven_rows(8),
            data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
            optimizer_cls_and_kwargs=side.adamw_class,
        )
        trainer.train()
        return result_of(trainer) | {"evaluated": trainer.evaluate()["eval_loss"]}

    same(scenario)


def test_what_it_saves_is_a_model_of_plain_pytorch(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        trainer = trainer_of(side, tmp_path)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()

    same(scenario)


def test_the_best_checkpoint_is_loaded_in_the_end(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
        trainer = trainer_of(side, tmp_path, **steps, load_best_model_at_end=True, learning_rate=LR)
        trainer.train()
        return {"weights": dict(trainer.model.state_dict()), "best": trainer.state.best_metric}

    same(scenario)


@pytest.mark.parametrize("ends_in_chunks", [True, False])
@pytest.mark.parametrize("begins_in_chunks", [True, False])
def test_a_checkpoint_is_resumed_under_either(begins_in_chunks: bool, ends_in_chunks: bool, tmp_path: Path) -> None:
    """Four steps are two and two, whichever library saved the first two and whichever goes on."""

    def half(in_chunks: bool, name: str, resume: Path | None) -> dict[str, Any]:
        with manager_of(AMPLE_NBYTES) as manager:
            side = Side(manager if in_chunks else None)
            trainer = trainer_of(side, tmp_path / name, save_strategy="steps", save_steps=2)
            trainer.train(resume_from_checkpoint=resume and str(resume))
            return result_of(trainer)

    whole = half(False, "whole", None)
    half(begins_in_chunks, "first", None)
    assert_equal(half(ends_in_chunks, "second", tmp_path / "first" / "checkpoint-2"), whole)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_the_default_optimizer_of_the_trainer_is_refused(max_grad_norm: float, tmp_path: Path) -> None:
    """It makes torch's AdamW, which would find no gradients."""
    with manager_of(AMPLE_NBYTES) as manager:
        trainer = trainer_of(Side(manager), tmp_path, max_grad_norm=max_grad_norm)
        trainer = transformers.Trainer(model=trainer.model, args=trainer.args, train_dataset=rows())
        before = manager.state_dict()
        with pytest.raises(chunkmem.StateError, match=r"AdamW\.step\(\): parameter .* is managed.*chunkmem\.AdamW"):
            trainer.train()
        assert_equal(manager.state_dict(), before)


def test_fp16_is_refused_as_the_trainer_runs_the_backward(tmp_path: Path) -> None:
    with manager_of(AMPLE_NBYTES, precision="fp16") as manager:
        trainer = trainer_of(Side(manager), tmp_path)
        with pytest.raises(chunkmem.StateError, match=r"fp16 gradients need the loss scale.*manager\.backward"):
            trainer.train()


def test_in_bf16_the_master_weights_are_saved(tmp_path: Path) -> None:
    """The model says that it is bf16, and the file is fp32."""
    with manager_of(AMPLE_NBYTES, precision="bf16") as manager:
        trainer = trainer_of(Side(manager), tmp_path)
        trainer.train()
        assert all(entry["grad_norm"] > 0 for entry in logs_of(trainer)[:4])
        trainer.save_model(str(tmp_path / "saved"))
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert_equal(dict(saved.state_dict()), manager.state_dict())
        rounded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
        assert rounded.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_from_pretrained_inside_of_init(dtype: torch.dtype, tmp_path: Path) -> None:
    """It builds without memory, and gives modules their weights afterwards."""
    llama().to(dtype).save_pretrained(tmp_path)

    def scenario(side: Side) -> Any:
        with nullcontext() if side.manager is None else side.manager.init():
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        optimizer = side.adamw(model.parameters())
        model.train()
        for seed in range(2):
            batch = tokens(2, seed=seed)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    same(scenario)


def test_text_is_generated() -> None:
    def scenario(side: Side) -> Any:
        model = side.ready(llama()).eval()
        ids = tokens(2)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)

    same(scenario)


SURGERY = {
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(70),
    "half": lambda model: model.half(),
}


@pytest.mark.parametrize("what", SURGERY)
def test_what_would_change_the_shape_of_a_managed_model_is_refused(what: str) -> None:
    with manager_of(AMPLE_NBYTES) as manager:
        model = manager.wrap(llama())
        with pytest.raises(chunkmem.StateError, match=r"before manager\.wrap\(\)"):
            SURGERY[what](model)
