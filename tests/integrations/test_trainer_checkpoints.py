"""Checkpoints of transformers' Trainer over two ranks: one rank writes, all of them give what they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.libraries import AMPLE_NBYTES, LR, Side, llama, manager_of, rows
from tests.helpers.ranks import Team
from tests.helpers.twins import assert_equal, cpu_only
from tests.integrations.test_ranks import OPTIONS, SIZE, started_by_torchrun

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate", minversion="1.15")

pytestmark = [pytest.mark.full, cpu_only]

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
SAVED = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(SIZE) as found:
        yield found


def trainer_of(side: Side, folder: str, *, kind: str = "model", **options: Any) -> Any:
    """A Trainer as a script makes it, and the line over ranks; dropout, so that random numbers are part of a resume."""
    from chunkmem.integrations.transformers import ChunkmemCallback

    options = SAVING | {"per_device_train_batch_size": 2} | options
    args = transformers.TrainingArguments(output_dir=folder, warmup_steps=1, **(OPTIONS | options))
    model = side.ready(llama(attention_dropout=0.1)) if kind != "adapter, wrap" else llama(attention_dropout=0.1)
    if "adapter" in kind:
        peft = pytest.importorskip("peft", minversion="0.21")
        torch.manual_seed(6)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        model = side.ready(model) if kind == "adapter, wrap" else model
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(4),
        optimizer_cls_and_kwargs=side.adamw_class,
    )
    assert side.manager is not None
    ChunkmemCallback(side.manager).add_to(trainer)
    return trainer


def train(
    rank: int, folder: str, kind: str, keys: dict[str, Any], options: dict[str, Any], resume: str | None
) -> dict[str, Any]:
    """The script of one rank, and all that training leaves."""
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES, **keys) as manager:
        trainer = trainer_of(Side(manager), folder, kind=kind, **options)
        trainer.train(resume_from_checkpoint=resume)
        return {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "weights": {key: value.clone() for key, value in trainer.model.state_dict().items()},
            "states": dict(trainer.optimizer.state_dict()["state"]),
            "best": [trainer.state.best_metric, trainer.state.best_model_checkpoint],
        }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("model", {}, {}),
    "bf16": ("model", {"precision": "bf16"}, {}),
    "accumulation": ("model", {}, {"gradient_accumulation_steps": 2}),
    "epochs": ("model", {}, {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}),
    "adapter, wrap": ("adapter, wrap", {}, {}),
    "wrap, adapter": ("wrap, adapter", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_resumed_has_the_bits_of_one_that_was_not(case: str, team: Team, tmp_path: Path) -> None:
    """Weights, states, schedule and random numbers of each rank come from the files that the first run wrote."""
    kind, keys, options = CASES[case]
    whole = team.run(train, str(tmp_path / "whole"), kind, keys, options, None, timeout_s=300.0)
    saved = sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(saved) == 2
    wanted = SAVED if kind == "model" else SAVED - {"model.safetensors"} | {"adapter_model.safetensors"}
    assert wanted <= {path.name for path in saved[0].iterdir()}
    resumed = team.run(train, str(tmp_path / "resumed"), kind, keys, options, str(saved[0]), timeout_s=300.0)
    for first, second in zip(whole, resumed, strict=True):
        num_done = len(first["losses"]) - len(second["losses"])
        assert second["losses"] == first["losses"][num_done:]
        assert second["losses"][-1] == first["losses"][-1]
        assert_equal(second["weights"], first["weights"])
        assert_equal(second["states"], first["states"])
        assert_equal(second["weights"], whole[0]["weights"])


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_checkpoint_is_loaded_on_all_ranks(strategy: str, team: Team, tmp_path: Path) -> None:
    """That with the largest loss is to be the best one, so that it is not the last."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": strategy}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    outcomes = team.run(train, str(tmp_path), "model", {}, options, None, timeout_s=300.0)
    for found in outcomes:
        assert found["best"] == outcomes[0]["best"]
        assert found["best"][1] is not None
        assert Path(found["best"][1]).name != "checkpoint-4"
        saved = transformers.LlamaForCausalLM.from_pretrained(found["best"][1]).state_dict()
        assert_equal(found["weights"], dict(saved))


def test_a_checkpoint_of_ranks_is_resumed_by_one_process(team: Team, tmp_path: Path) -> None:
    """What the first rank writes is what Trainer writes of a model of plain PyTorch."""
    team.run(train, str(tmp_path / "ranks"), "model", {}, {}, None, timeout_s=300.0)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "one"), per_device_train_batch_size=4, save_strategy="no", **OPTIONS
    )
    trainer = transformers.Trainer(
        model=llama(),
        args=args,
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": LR, "fused": True}),
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "ranks" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert len(trainer.optimizer.state_dict()["state"]) == len(list(trainer.model.parameters()))


def save_by_all(rank: int, folder: str) -> dict[str, Any]:
    """`trainer.save_model()` at the end, as the scripts of transformers have it."""
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES) as manager:
        trainer = trainer_of(Side(manager), folder, save_strategy="no")
        trainer.train()
        trainer.save_model()
        trainer.save_state()
        return manager.state_dict()


def test_the_model_is_saved_when_all_ranks_ask_for_it(team: Team, tmp_path: Path) -> None:
    weights = team.run(save_by_all, str(tmp_path), timeout_s=300.0)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert_equal(dict(saved), weights[0])
