"""`ChunkmemCallback`: metrics among what Trainer logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import chunkmem
from tests.helpers.libraries import Side, manager_of
from tests.helpers.twins import cpu_only
from tests.integrations.test_transformers import trainer_of

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.full, cpu_only]

CAP = 96 << 10


class Reporter(transformers.TrainerCallback):
    """What is sent to a dashboard."""

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.sent.append(dict(logs or {}))


def test_metrics_are_in_what_is_reported_and_in_the_history(tmp_path: Path) -> None:
    """Whatever reports was there before."""
    from chunkmem.integrations.transformers import DEFAULT_NAMES, ChunkmemCallback

    with manager_of(CAP) as manager:
        trainer = trainer_of(Side(manager), tmp_path, eval_strategy="steps", eval_steps=2)
        reporter = Reporter()
        trainer.add_callback(reporter)
        ChunkmemCallback(manager).add_to(trainer)
        trainer.train()
        history = trainer.state.log_history
        trained = [entry for entry in history if "loss" in entry]
        assert len(trained) == 4
        sent = [entry for entry in reporter.sent if "loss" in entry]
        for entry, told in zip(trained, sent, strict=True):
            assert {name: entry[name] for name in DEFAULT_NAMES} == {name: told[name] for name in DEFAULT_NAMES}
            assert 0 < entry["memory/device_peak_bytes"] <= CAP
            assert entry["step/h2d_bytes"] > 0
        assert {name for entry in history if "loss" not in entry for name in entry if "/" in name} == set()
        assert trained[-1]["memory/device_peak_bytes"] == manager.memory().device.peak_nbytes
        trainer.state.save_to_json(str(tmp_path / "state.json"))


def test_as_one_of_the_callbacks_it_is_in_the_history(tmp_path: Path) -> None:
    from chunkmem.integrations.transformers import ChunkmemCallback

    with manager_of(CAP) as manager:
        trainer = trainer_of(Side(manager), tmp_path)
        trainer.add_callback(ChunkmemCallback(manager, names=["plan/seconds"]))
        trainer.train()
        planned = [entry["plan/seconds"] > 0 for entry in trainer.state.log_history if "plan/seconds" in entry]
        assert planned == [True] * 3, "the first step was recorded"
        assert not any("step/h2d_bytes" in entry for entry in trainer.state.log_history)


def test_all_names_or_none_that_is_not_there() -> None:
    from chunkmem.integrations.transformers import ChunkmemCallback

    with manager_of(CAP) as manager:
        ChunkmemCallback(manager, names=None)
        with pytest.raises(chunkmem.ConfigError, match=r"there is no metric step/sceonds; there are .*step/seconds"):
            ChunkmemCallback(manager, names=["step/sceonds"])
