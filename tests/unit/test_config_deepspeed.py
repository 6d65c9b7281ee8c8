"""A configuration of DeepSpeed is told as such, with what each of its keys is here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkmem.config import Config
from chunkmem.data.errors import ConfigError

ZERO_3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
"""As transformers' documentation has it."""
MESSAGE = (
    "this is a configuration of DeepSpeed, by its keys train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
    "bf16, zero_optimization. Here: train_micro_batch_size_per_gpu is the batch that your loop gives the model; "
    "gradient_accumulation_steps is manager.accumulate(n), or several backwards before a step(); "
    'bf16 {"enabled": true} is "precision": "bf16"; zero_optimization is always on: weights, gradients and optimizer '
    'states are sharded over ranks; what is to be offloaded follows from "memory": {"device": "20GiB", "host": '
    '"100GiB"}. The keys optimizer, fp16 and gradient_clipping are the same. `chunkmem config --from FILE` converts one'
)


def from_json(values: dict[str, Any], folder: Path) -> object:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(values))
    return Config.from_json(path)


@pytest.mark.parametrize("use", [lambda values, _: Config.from_dict(values), from_json])
def test_it_says_what_each_key_is_here(use: Callable[[dict[str, Any], Path], object], tmp_path: Path) -> None:
    """It was "not a known key" of the first one alone."""
    with pytest.raises(ConfigError) as raised:
        use(ZERO_3, tmp_path)
    prefix = f"{tmp_path / 'ds_config.json'}: " if use is from_json else ""
    assert str(raised.value) == prefix + MESSAGE


def test_a_single_key_is_enough() -> None:
    with pytest.raises(
        ConfigError, match=r"^this is a configuration of DeepSpeed, by its key zero_optimization\. Here: "
    ):
        Config.from_dict({"zero_optimization": {"stage": 2}})


def test_what_both_have_is_read() -> None:
    """The advice works: the same training, in our words."""
    config = Config.from_dict(
        {
            "gradient_clipping": 1.0,
            "precision": "bf16",
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "memory": {"device": "20GiB", "host": "100GiB"},
        }
    )
    assert (config.gradient_clipping, config.precision, config.optimizer.params.lr) == (1.0, "bf16", 3e-4)
