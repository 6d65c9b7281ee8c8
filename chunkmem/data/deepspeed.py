"""What the keys of a DeepSpeed configuration are called here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from chunkmem.data.errors import ConfigError

_BATCH = "is the batch that your loop gives the model"
_OUTPUT = "has no counterpart, leave it out"
COUNTERPARTS: Final = MappingProxyType(
    {
        "train_batch_size": _BATCH,
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_accumulation_steps": "is manager.accumulate(n), or several backwards before a step()",
        "zero_optimization": "is always on: weights, gradients and optimizer states are sharded over ranks; what is to "
        'be offloaded follows from "memory": {"device": "20GiB", "host": "100GiB"}',
        "bf16": '{"enabled": true} is "precision": "bf16"',
        "bfloat16": '{"enabled": true} is "precision": "bf16"',
        "amp": 'is "precision": "bf16" or "fp16"',
        "scheduler": "is a learning rate scheduler of torch over the optimizer",
        "activation_checkpointing": "is torch.utils.checkpoint in the model",
        "zero_allow_untested_optimizer": _OUTPUT,
        "zero_force_ds_cpu_optimizer": _OUTPUT,
        "prescale_gradients": _OUTPUT,
        "communication_data_type": _OUTPUT,
        "aio": _OUTPUT,
        "steps_per_print": _OUTPUT,
        "wall_clock_breakdown": "is manager.record(DIR) and chunkmem report DIR",
        "flops_profiler": "is manager.record(DIR) and chunkmem report DIR",
        "dump_state": _OUTPUT,
        "tensorboard": _OUTPUT,
        "wandb": _OUTPUT,
        "csv_monitor": _OUTPUT,
        "comms_logger": _OUTPUT,
    }
)
"""Keys that DeepSpeed alone has. `optimizer`, `fp16` and `gradient_clipping` mean the same in both."""


def check_not_deepspeed(values: Mapping[str, object]) -> None:
    """Raise if a configuration is DeepSpeed's.

    Raises:
        ConfigError: it has a key that only DeepSpeed's have; with what each of those is here.
    """
    found = [key for key in values if key in COUNTERPARTS]
    if found:
        said = "; ".join(f"{key} {COUNTERPARTS[key]}" for key in found)
        keys = f"key{'s' if len(found) > 1 else ''} {', '.join(found)}"
        raise ConfigError(
            f"this is a configuration of DeepSpeed, by its {keys}. Here: {said}. The keys optimizer, fp16 and "
            "gradient_clipping are the same. `chunkmem config --from FILE` converts one"
        )
