"""trl's SFTTrainer over two ranks, as torchrun starts them: DistributedDataParallel's losses, saved and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.libraries import AMPLE_NBYTES, Side, llama, manager_of
from tests.helpers.ranks import Team
from tests.helpers.twins import assert_equal, cpu_only
from tests.integrations.test_ranks import SIZE, started_by_torchrun
from tests.integrations.test_trl import LOGGED, lora, options_of, text, tokenizer

trl = pytest.importorskip("trl", minversion="1.16")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.full, cpu_only, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(SIZE) as found:
        yield found


def train(rank: int, folder: str, is_plain: bool, adapts: bool, resume: str | None) -> dict[str, Any]:
    """The script of one rank, with SFTTrainer's own defaults: bf16, gradient checkpointing, clipping."""
    own = {key: value for key, value in options_of(Path(folder)).items() if key != "bf16"}
    data = [{"text": text(random.Random(row))} for row in range(24)]
    with started_by_torchrun(rank), nullcontext() if is_plain else manager_of(AMPLE_NBYTES) as manager:
        side = Side(manager)
        args = trl.SFTConfig(**own | {"save_strategy": "steps", "save_steps": 2})
        torch.manual_seed(7)
        trainer = trl.SFTTrainer(
            model=side.ready(llama()),
            args=args,
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=tokenizer(),
            peft_config=lora() if adapts else None,
            optimizer_cls_and_kwargs=side.adamw_class,
        )
        assert trainer.args.bf16
        assert trainer.args.world_size == SIZE
        if manager is not None:
            from chunkmem.integrations.transformers import ChunkmemCallback

            ChunkmemCallback(manager).add_to(trainer)
        trainer.train(resume_from_checkpoint=resume)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "logs": [{key: entry[key] for key in LOGGED if key in entry} for entry in logs],
            "weights": {key: value.clone() for key, value in trainer.model.state_dict().items()},
            "states": dict(trainer.optimizer.state_dict()["state"]),
        }


def without_count(entry: dict[str, float]) -> dict[str, float]:
    """SFTTrainer counts tokens from its start, resumed or not."""
    return {key: value for key, value in entry.items() if key != "num_tokens"}


@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
@pytest.mark.parametrize("adapts", [False, True], ids=["all", "lora"])
def test_supervised_fine_tuning_over_ranks(adapts: bool, team: Team, tmp_path: Path) -> None:
    """The two gradients of a sum over two ranks have one order, so the bits are those of DistributedDataParallel."""
    plain = team.run(train, str(tmp_path / "plain"), True, adapts, None, timeout_s=300.0)
    whole = team.run(train, str(tmp_path / "whole"), False, adapts, None, timeout_s=300.0)
    resumed = team.run(
        train, str(tmp_path / "resumed"), False, adapts, str(tmp_path / "whole" / "checkpoint-2"), timeout_s=300.0
    )
    for expected, found, second in zip(plain, whole, resumed, strict=True):
        assert found["logs"] == expected["logs"]
        assert_equal(found["weights"], expected["weights"])
        assert [without_count(entry) for entry in second["logs"]] == [without_count(entry) for entry in found["logs"]]
        assert_equal(second["weights"], found["weights"])
        assert_equal(second["states"], found["states"])
