"""accelerate and the Trainer of transformers over two ranks, as torchrun starts them: the losses of one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, Side, decaying, llama, manager_of, rows, tokens
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

pytest.importorskip("accelerate", minversion="1.15")
pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]

SIZE = 2
MAX_NORM = 0.5
OPTIONS: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(SIZE) as found:
        yield found


@contextlib.contextmanager
def started_by_torchrun(rank: int) -> Iterator[None]:
    """The variables that say to accelerate which rank this is; the process group is there already."""
    from accelerate.state import AcceleratorState, GradientState

    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE}
    os.environ.update({key: str(value) for key, value in said.items()} | {"HF_HUB_OFFLINE": "1"})
    try:
        yield
    finally:
        for key in said:
            del os.environ[key]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Sums of means are not the mean of a sum: the last bits differ, and AdamW makes something of them."""
    assert first.keys() == second.keys()
    return all(torch.allclose(value, second[key], atol=1e-4) for key, value in first.items())


# accelerate.


def loop(side: Side, batch_size: int, *, wraps: str = "") -> tuple[list[float], dict[str, torch.Tensor], str]:
    """A loop as accelerate's examples have it; `wraps` says how the model is prepared, if it is."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = side.ready(llama())
    optimizer = side.adamw(model.parameters())
    loader = DataLoader(tokens(24), batch_size=batch_size)
    schedule = decaying(optimizer)  # one that is prepared is stepped once for each rank
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if wraps == "prepare":
        model = accelerator.prepare(model)
    elif wraps == "prepare_model":
        model = accelerator.prepare_model(model, evaluation_mode=True)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if wraps == "prepare":
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                else:
                    clip(side, optimizer, model)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = model.state_dict() if side.manager is None else side.manager.state_dict()
    # The wrapper that there is over ranks has the model as `.module`.
    assert accelerator.unwrap_model(model).__class__.__name__ == "LlamaForCausalLM"
    return losses, {key: value.detach().clone() for key, value in weights.items()}, type(model).__name__


def clip(side: Side, optimizer: Any, model: Any) -> None:
    """By the optimizer's own method; accelerate's is used where it has prepared the model."""
    if side.manager is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    else:
        optimizer.optimizer.clip_grad_norm_(MAX_NORM)


def loop_over_ranks(rank: int, wraps: str) -> Any:
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES) as manager:
        return loop(Side(manager), 2, wraps=wraps)


@pytest.mark.parametrize("wraps", ["", "prepare_model", "prepare"])
def test_accelerate_trains_a_model_that_it_wraps_or_not(wraps: str, team: Team) -> None:
    """`prepare` puts DistributedDataParallel around it, and its own clipping asks lazy gradients for norms."""
    losses, weights, _ = loop(Side(None), 2 * SIZE)
    for found, others, kind in team.run(loop_over_ranks, wraps, timeout_s=300.0):
        assert kind == ("ManagedDataParallel" if wraps == "prepare" else "LlamaForCausalLM")
        assert found == pytest.approx(losses, abs=1e-4)
        assert close(others, weights)


# Trainer.


def trainer_of(side: Side, folder: str, batch_size: int, **options: Any) -> Any:
    import transformers

    options = {"save_strategy": "no", "max_grad_norm": MAX_NORM, "per_device_train_batch_size": batch_size} | options
    args = transformers.TrainingArguments(output_dir=folder, **(OPTIONS | options))
    return transformers.Trainer(
        model=side.ready(llama()),
        args=args,
        train_dataset=rows(),
        eval_dataset=rows(4),
        optimizer_cls_and_kwargs=side.adamw_class,
    )


def logs_of(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train_over_ranks(rank: int, folder: str, options: dict[str, Any]) -> Any:
    """The script of one process: the library puts its wrapper around the model, and clips as ever."""
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES) as manager:
        trainer = trainer_of(Side(manager), f"{folder}/{rank}", 2, **options)
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "ManagedDataParallel"
        weights = manager.state_dict()
        if rank == 0:
            trainer.model.save_pretrained(f"{folder}/saved", state_dict=dict(weights))  # it empties what it is given
        return [logs_of(trainer, key) for key in LOGGED], weights, trainer.args.world_size


LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1},
    "autocast": {"bf16": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_the_trainer_trains_over_ranks(variant: str, team: Team, tmp_path: Path) -> None:
    """AdamW's steps are large where gradients are small: losses are compared, and weights of all ranks."""
    import transformers

    options = VARIANTS[variant]
    plain = trainer_of(Side(None), str(tmp_path / "plain"), 2 * SIZE, **options)
    plain.train()
    tolerance = 3e-2 if variant == "autocast" else 1e-4
    outcomes = team.run(train_over_ranks, str(tmp_path), options, timeout_s=300.0)
    assert max(logs_of(plain, "grad_norm")) > MAX_NORM, "nothing was clipped"
    for logged, weights, world_size in outcomes:
        assert world_size == SIZE
        for key, found in zip(LOGGED, logged, strict=True):
            assert found == pytest.approx(logs_of(plain, key), abs=tolerance), key
        assert all(torch.equal(value, outcomes[0][1][key]) for key, value in weights.items())
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[key]) for key, value in outcomes[0][1].items())


def save_over_ranks(rank: int, folder: str) -> str:
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES) as manager:
        trainer = trainer_of(Side(manager), f"{folder}/{rank}", 2, save_strategy="steps", save_steps=2)
        try:
            trainer.train()
        except chunkmem.StateError as error:
            return str(error)
    return "nothing raised"


def test_checkpoints_that_one_rank_writes_are_refused_at_the_start(team: Team, tmp_path: Path) -> None:
    """At the first checkpoint, after 500 steps by default, the first rank asked for weights and all of them waited."""
    said = team.run(save_over_ranks, str(tmp_path), timeout_s=300.0)
    assert said[0] == said[1]
    assert said[0].startswith("Trainer with save_strategy='steps' over 2 ranks")
    assert "manager.save(path, optimizer)" in said[0]


# Adapters.


def adapted_trainer(side: Side, folder: str, batch_size: int, *, is_first: bool, **options: Any) -> Any:
    """The base is frozen; the adapter is made before the model is wrapped, or afterwards."""
    import peft
    import transformers

    options = {"save_strategy": "no", "max_grad_norm": 0.05, "per_device_train_batch_size": batch_size} | options
    args = transformers.TrainingArguments(output_dir=folder, **(OPTIONS | options))
    base = llama() if is_first else side.ready(llama())
    torch.manual_seed(6)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if is_first:
        model = side.ready(model)
    return transformers.Trainer(model=model, args=args, train_dataset=rows(), optimizer_cls_and_kwargs=side.adamw_class)


def adapt_over_ranks(rank: int, folder: str, is_first: bool, options: dict[str, Any]) -> Any:
    with started_by_torchrun(rank), manager_of(AMPLE_NBYTES) as manager:
        trainer = adapted_trainer(Side(manager), f"{folder}/{rank}", 2, is_first=is_first, **options)
        trainer.train()
        return [logs_of(trainer, key) for key in ("loss", "grad_norm")], manager.state_dict()


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["", "accumulation"])
@pytest.mark.parametrize("is_first", [True, False], ids=["adapter, wrap", "wrap, adapter"])
def test_adapters_are_trained_over_ranks(is_first: bool, options: dict[str, Any], team: Team, tmp_path: Path) -> None:
    """Clipped by the norm over ranks, also where they are ordinary parameters: each rank had a norm of its own."""
    pytest.importorskip("peft", minversion="0.21")
    plain = adapted_trainer(Side(None), str(tmp_path / "plain"), 2 * SIZE, is_first=is_first, **options)
    plain.train()
    assert max(logs_of(plain, "grad_norm")) > 0.05, "nothing was clipped"
    outcomes = team.run(adapt_over_ranks, str(tmp_path), is_first, options, timeout_s=300.0)
    for logged, weights in outcomes:
        for key, found in zip(("loss", "grad_norm"), logged, strict=True):
            assert found == pytest.approx(logs_of(plain, key), abs=2e-5), key
        assert all(torch.equal(value, outcomes[0][1][key]) for key, value in weights.items())
