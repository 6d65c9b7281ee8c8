"""A DeepSpeed configuration in our keys, and what becomes of each of its own. Pure.

Source of their keys and defaults: DeepSpeed 0.18, `runtime/config.py`, `runtime/zero/config.py`,
`runtime/zero/offload_config.py`, `runtime/precision_config.py`; `ops/adam/cpu_adam.py` for those of its optimizers.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from chunkmem.contrib.deepspeed.keys import (
    ADAM_DEFAULTS,
    BF16,
    CHANGED,
    CHECKPOINTING,
    DROPPED,
    FP16,
    HYBRID,
    LOSS_SCALE,
    OFFLOAD,
    SCHEDULERS,
    WITH_MASTERS,
    ZERO,
)
from chunkmem.data.deepspeed import COUNTERPARTS
from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import shown

AUTO: Final = "auto"
"""What Trainer of transformers replaces by one of its arguments."""


class KeyOutcome(enum.Enum):
    """What becomes of a key."""

    KEPT = "kept"
    CHANGED = "changed"
    """It is called otherwise, or is decided elsewhere."""
    DROPPED = "dropped"
    """It has no counterpart."""
    UNKNOWN = "unknown"
    """DeepSpeed has no such key, as far as is known here."""


@dataclass(frozen=True)
class Note:
    """What becomes of one key."""

    key: str
    """Its path in their configuration."""
    outcome: KeyOutcome
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass
class ConvertedConfig:
    """Our configuration, and a note for each key of theirs."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def keep(self, key: str, value: object, *path: str, because: str = "") -> None:
        """Write a key, and note that it was kept; `path`: where it is here, if not at `key`."""
        self.put(value, *(path or key.split(".")))
        here = ".".join(path) if path and ".".join(path) != key else ""
        text = f"is {here}" if here else "kept"
        self.notes.append(Note(key, KeyOutcome.CHANGED if here else KeyOutcome.KEPT, f"{text}{because}"))

    def put(self, value: object, *path: str) -> None:
        """Write a key of ours."""
        section = self.values
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value

    def change(self, key: str, text: str) -> None:
        """Note what a key is now."""
        self.notes.append(Note(key, KeyOutcome.CHANGED, text))

    def drop(self, key: str, reason: str) -> None:
        """Note why a key has no counterpart."""
        self.notes.append(Note(key, KeyOutcome.DROPPED, f"has no counterpart because {reason}"))

    def unknown(self, key: str, known: Mapping[str, object]) -> None:
        """Note a key that nobody knows."""
        near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        self.notes.append(Note(key, KeyOutcome.UNKNOWN, f"is not known as a key of DeepSpeed{meant}"))


def convert(theirs: Mapping[str, Any], *, disk_capacity: str | None = None) -> ConvertedConfig:
    """Return what a DeepSpeed configuration is here.

    Args:
        theirs: the object in their file.
        disk_capacity: bytes of each process on the disk that they offload to; None: `memory.disk` is left out.

    Raises:
        ConfigError: a section is no object, or two contradict each other.
    """
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"a configuration of DeepSpeed is an object with keys, not {shown(theirs)}")
    found = ConvertedConfig()
    sections: dict[str, Callable[[ConvertedConfig, Any], None]] = {
        "optimizer": _optimizer,
        "zero_optimization": lambda found, value: _zero(found, value, disk_capacity),
        "bf16": lambda found, value: _bf16(found, value, "bf16"),
        "bfloat16": lambda found, value: _bf16(found, value, "bfloat16"),
        "fp16": _fp16,
        "gradient_clipping": _clipping,
        "scheduler": _scheduler,
        "activation_checkpointing": _checkpointing,
    }
    for key, value in theirs.items():
        if key in sections:
            sections[key](found, value)
        elif key in CHANGED:
            found.change(key, CHANGED[key])
        elif key in DROPPED:
            found.drop(key, DROPPED[key])
        else:
            found.unknown(key, {**sections, **CHANGED, **DROPPED})
    if found.values.get("precision") == "bf16" and "fp16" in found.values:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; make one of them false")
    return found


def _entries(value: object, at: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the path and the value of each entry of a section."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} is {shown(value)}, but must be an object with keys")
    for key, inner in value.items():
        yield str(key), f"{at}.{key}", inner


def _optimizer(found: ConvertedConfig, value: object) -> None:
    entries = {key: inner for key, _, inner in _entries(value, "optimizer")}
    name, params = str(entries.pop("type", "")), entries.pop("params", {})
    for key in entries:
        found.unknown(f"optimizer.{key}", {"type": 0, "params": 0})
    given = {key: (path, inner) for key, path, inner in _entries(params, "optimizer.params")}
    if name.lower() not in ("adam", "adamw"):
        if name:
            known = "chunkmem.SGD" if name.lower() == "sgd" else "chunkmem.Optimizer over a class of that kind"
            found.change("optimizer.type", f"is the optimizer that you make: {known}, with manager=manager")
        for path, _ in given.values():
            found.change(path, "is an argument of that optimizer")
        return
    _adam(found, name, given)


def _adam(found: ConvertedConfig, name: str, given: dict[str, tuple[str, Any]]) -> None:
    """Write an Adam: theirs decays weights as AdamW does, unless `adam_w_mode` is false."""
    decoupled = name.lower() == "adamw" or given.get("adam_w_mode", ("", True))[1] is not False
    ours = "AdamW" if decoupled else "Adam"
    because = "" if ours == name else ": with adam_w_mode, DeepSpeed's Adam decouples weight decay"
    found.put(ours, "optimizer", "type")
    if ours == name:
        found.notes.append(Note("optimizer.type", KeyOutcome.KEPT, "kept"))
    else:
        found.change("optimizer.type", f'is "{ours}"{because if decoupled else ""}')
    for key, (path, value) in given.items():
        if key in ADAM_DEFAULTS and value == AUTO:
            found.change(
                path, f"is an argument of chunkmem.{ours}, or with `chunkmem run` what Trainer's arguments say"
            )
        elif key in ADAM_DEFAULTS:
            found.keep(path, value)
        elif key == "adam_w_mode":
            found.change(path, "is optimizer.type")
        elif key in ("torch_adam", "bias_correction", "freeze_step", "amsgrad", "fp32_optimizer_states"):
            said = "updates have the bits of torch's fused kernels, with bias correction, and states in fp32"
            found.drop(path, said)
        else:
            found.unknown(path, {**ADAM_DEFAULTS, "adam_w_mode": 0, "torch_adam": 0})
    if "weight_decay" not in given and given.get("torch_adam", ("", False))[1] is not True:
        found.put(0.0, "optimizer", "params", "weight_decay")
        found.change("optimizer.params.weight_decay", "not given: is 0, DeepSpeed's default; ours for AdamW is 0.01")


def _zero(found: ConvertedConfig, value: object, disk_capacity: str | None) -> None:
    at = "zero_optimization"
    if isinstance(value, bool):
        value = {"stage": int(value)}
    for key, path, inner in _entries(value, at):
        if key == "stage":
            same = "as here" if inner == 3 else "in place of this stage"
            found.change(path, f"is now always 3, {same}: weights, gradients and states are sharded over ranks")
        elif key in ("offload_optimizer", "offload_param"):
            _offload(found, {} if inner is None else inner, path, disk_capacity)
        elif key in ("cpu_offload", "cpu_offload_param", "cpu_offload_params"):
            found.change(path, _what_offloading_is("cpu" if inner else "none"))
        elif key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
            found.change(path, "is manager.save_pretrained(DIR), or manager.state_dict()")
        elif key in ("zero_hpz_partition_size", "mics_shard_size"):
            found.change(path, HYBRID)
        elif key == "leaf_module":
            found.change(path, "is manager.unit(module)")
        elif key in ZERO:
            found.drop(path, ZERO[key])
        else:
            found.unknown(path, {**ZERO, "stage": 0, "offload_optimizer": 0, "offload_param": 0})


def _offload(found: ConvertedConfig, value: object, at: str, disk_capacity: str | None) -> None:
    section = {key: inner for key, _, inner in _entries(value, at)}
    for key, path, inner in _entries(value, at):
        if key == "device":
            found.change(path, _what_offloading_is(inner))
        elif key == "nvme_path" and (inner is None or section.get("device") != "nvme"):
            found.drop(path, "the device is not nvme")
        elif key == "nvme_path" and disk_capacity is None:
            found.change(path, f'is memory.disk.path "{inner}"; name its bytes with --disk-capacity, and it is written')
        elif key == "nvme_path":
            found.keep(path, inner, "memory", "disk", "path")
            found.put(disk_capacity, "memory", "disk", "capacity")
        elif key in OFFLOAD:
            found.drop(path, OFFLOAD[key])
        else:
            found.unknown(path, {**OFFLOAD, "device": 0, "nvme_path": 0})


def _what_offloading_is(device: object) -> str:
    if device in ("none", None):
        return "is now the plan's choice: nothing moves if everything fits memory.device"
    if device == "nvme":
        return "is now the plan's choice: what neither memory.device nor memory.host has room for is on memory.disk"
    return "is now the plan's choice: what memory.device has no room for is on HOST, and updated there"


def _bf16(found: ConvertedConfig, value: object, at: str) -> None:
    section = {key: inner for key, _, inner in _entries(value, at)}
    for key, path, inner in _entries(value, at):
        if key == "enabled":
            _enabled(found, path, inner, "bf16")
        elif key == "bf16_master_weights_and_grads" and inner is True and section.get("enabled") is True:
            found.keep(path, False, "master_weights", because=" = false")
        elif key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            found.change(path, "is master_weights: false, where it is true")
        elif key in BF16:
            found.drop(path, BF16[key])
        else:
            found.unknown(path, {**BF16, "enabled": 0})


def _fp16(found: ConvertedConfig, value: object) -> None:
    section = {key: inner for key, _, inner in _entries(value, "fp16")}
    enabled = section.get("enabled") is True
    for key, path, inner in _entries(value, "fp16"):
        if key == "enabled":
            _enabled(found, path, inner, "fp16")
        elif key in LOSS_SCALE and not enabled:
            found.drop(path, "fp16 is not enabled")
        elif key in LOSS_SCALE and inner == AUTO:
            found.change(path, f"is DeepSpeed's default: {AUTO} is none of ours")
        elif key in LOSS_SCALE:
            found.keep(path, inner)
        elif key in FP16:
            found.drop(path, FP16[key])
        else:
            found.unknown(path, {**LOSS_SCALE, **FP16, "enabled": 0})
    if enabled and section.get("loss_scale_window", AUTO) == AUTO:
        found.put(LOSS_SCALE["loss_scale_window"], "fp16", "loss_scale_window")
    if enabled and "loss_scale_window" not in section:
        found.change("fp16.loss_scale_window", "not given: is 1000, DeepSpeed's default; ours is 2000")


def _enabled(found: ConvertedConfig, path: str, value: object, precision: str) -> None:
    if value == AUTO:
        other = WITH_MASTERS if precision == "bf16" else "loss scale is torch's GradScaler"
        found.change(path, f"is --{precision} of Trainer, which runs autocast over weights in fp32: {other}")
    elif value is True and precision == "fp16":
        found.keep(path, True)
    elif value is True:
        found.keep(path, precision, "precision", because=f' "{precision}"')
    else:
        found.change(path, 'is false: "precision" is another one')


def _clipping(found: ConvertedConfig, value: object) -> None:
    if value == AUTO:
        found.change("gradient_clipping", f"is max_grad_norm of Trainer, which clips: {AUTO} is its argument")
    else:
        found.keep("gradient_clipping", value)


def _scheduler(found: ConvertedConfig, value: object) -> None:
    kind = {key: inner for key, _, inner in _entries(value, "scheduler")}.get("type")
    found.change("scheduler", f"{COUNTERPARTS['scheduler']}{SCHEDULERS.get(str(kind), '')}")


def _checkpointing(found: ConvertedConfig, value: object) -> None:
    at = "activation_checkpointing"
    for key, path, _ in _entries(value, at):
        if key in CHECKPOINTING:
            found.change(path, "is activations.policy: what is recomputed from stays on DEVICE as far as there is room")
        else:
            found.unknown(path, dict.fromkeys(CHECKPOINTING))
    if value:
        found.put("recompute", "activations", "policy")
        found.change(at, 'is activations.policy "recompute": leave out deepspeed.checkpointing in the model')
