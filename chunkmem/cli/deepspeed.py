"""A DeepSpeed configuration in our keys, and what becomes of each of its own. Pure.

Source of their keys and defaults: DeepSpeed 0.18, `runtime/config.py`, `runtime/zero/config.py`,
`runtime/zero/offload_config.py`, `runtime/precision_config.py`; `ops/adam/cpu_adam.py` for those of its optimizers.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from chunkmem.deepspeed import COUNTERPARTS
from chunkmem.errors import ConfigError
from chunkmem.sizes import shown

AUTO: Final = "auto"
"""What Trainer of transformers replaces by one of its arguments."""


class Outcome(enum.Enum):
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
    outcome: Outcome
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass
class Converted:
    """Our configuration, and a note for each key of theirs."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def keep(self, key: str, value: object, *path: str, because: str = "") -> None:
        """Write a key, and note that it was kept; `path`: where it is here, if not at `key`."""
        self.put(value, *(path or key.split(".")))
        here = ".".join(path) if path and ".".join(path) != key else ""
        text = f"is {here}" if here else "kept"
        self.notes.append(Note(key, Outcome.CHANGED if here else Outcome.KEPT, f"{text}{because}"))

    def put(self, value: object, *path: str) -> None:
        """Write a key of ours."""
        section = self.values
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value

    def change(self, key: str, text: str) -> None:
        """Note what a key is now."""
        self.notes.append(Note(key, Outcome.CHANGED, text))

    def drop(self, key: str, reason: str) -> None:
        """Note why a key has no counterpart."""
        self.notes.append(Note(key, Outcome.DROPPED, f"has no counterpart because {reason}"))

    def unknown(self, key: str, known: Mapping[str, object]) -> None:
        """Note a key that nobody knows."""
        near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        self.notes.append(Note(key, Outcome.UNKNOWN, f"is not known as a key of DeepSpeed{meant}"))


_BITS = "results are bit-identical to plain PyTorch's, and nothing is quantized"
_BUCKETS = "weights and gradients move in chunks, whose size is default_chunk_size"
_PLANNED = "a plan decides what is fetched and dropped, and when, from a recorded step"
_ALWAYS = "that is always so"
_LINEAR = "linear layers are torch's"
_MEASURED = "the disk's speed is measured, and block size and queue depth follow from it"
_PINNED = "HOST memory is pinned whenever there is an accelerator"
_HYBRID = "is the dimension shard of a mesh, whose dimension replicate has the other ranks"

_DROPPED: Final = MappingProxyType(
    {
        "zero_allow_untested_optimizer": "every optimizer of chunkmem is tested with all it can be combined with",
        "zero_force_ds_cpu_optimizer": "updates on HOST use kernels with torch's bits",
        "prescale_gradients": "gradients are added in rank order, and divided once",
        "gradient_predivide_factor": "gradients are added in rank order, and divided once",
        "sparse_gradients": "gradients of chunks are dense",
        "communication_data_type": "chunks are exchanged in the dtype that they have",
        "seq_parallel_communication_data_type": "there is no sequence parallelism",
        "disable_allgather": "weights are gathered by the plan",
        "aio": _MEASURED,
        "steps_per_print": "nothing is printed; manager.metrics() has numbers to log",
        "memory_breakdown": "manager.memory() has it at any time",
        "dump_state": "config.to_dict() has every key",
        "autotuning": "plans are made for this machine's measured speeds",
        "compression_training": _BITS,
        "quantize_training": _BITS,
        "weight_quantization": _BITS,
        "eigenvalue": _BITS,
        "sparse_attention": "attention is the model's",
        "progressive_layer_drop": "leaving out layers is the model's; steps that do follow their plan all the same",
        "curriculum_learning": "batches are your loop's",
        "data_efficiency": "batches are your loop's",
        "dataloader_drop_last": "batches are your loop's",
        "elasticity": "a checkpoint loads over any number of ranks",
        "nebula": "manager.save(asynchronous=True) writes while training continues",
        "hybrid_engine": "generation uses the same weights as training",
        "tensor_parallel": "weights are sharded over ranks, and gathered for their module",
        "graph_harvesting": "steps are replayed by plan",
        "use_data_before_expert_parallelism": "experts are modules as others",
        "timers": "manager.timeline() times every moment",
        "vocabulary_size": "nothing depends on it",
    }
)
"""Top-level keys of theirs that are nothing here, with the reason."""

_CHANGED: Final = MappingProxyType(
    {
        "wall_clock_breakdown": "is manager.record(DIR) and chunkmem report DIR",
        "flops_profiler": "is manager.record(DIR) and chunkmem report DIR",
        "comms_logger": "is manager.record(DIR) and chunkmem report DIR",
        "tensorboard": "is manager.metrics() in your loop, for any logger",
        "wandb": "is manager.metrics() in your loop, for any logger",
        "comet": "is manager.metrics() in your loop, for any logger",
        "csv_monitor": "is manager.metrics() in your loop, for any logger",
        "scheduler": COUNTERPARTS["scheduler"],
        "amp": COUNTERPARTS["amp"],
        "torch_autocast": "is torch.autocast around the model, over fp32 weights",
        "checkpoint": "is manager.save() and manager.load()",
        "data_types": "is now fixed: gradients have the dtype of the weights that are computed with",
        "pipeline": "is manager.pipeline()",
        "compile": "is torch.compile of the model's functions",
        "train_batch_size": COUNTERPARTS["train_batch_size"],
        "train_micro_batch_size_per_gpu": COUNTERPARTS["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": COUNTERPARTS["gradient_accumulation_steps"],
    }
)

_ZERO: Final = MappingProxyType(
    {
        "contiguous_gradients": "gradients of a chunk are always contiguous",
        "overlap_comm": "exchanges overlap with computing wherever that is faster",
        "reduce_scatter": _ALWAYS,
        "allgather_partitions": _ALWAYS,
        **dict.fromkeys(
            ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "use_multi_rank_bucket_allreduce"),
            _BUCKETS,
        ),
        **dict.fromkeys(
            (
                *(
                    "stage3_max_live_parameters",
                    "max_live_parameters",
                    "stage3_max_reuse_distance",
                    "max_reuse_distance",
                ),
                *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_allgather_sequential"),
                *("stage3_param_persistence_threshold", "param_persistence_threshold"),
                *("stage3_model_persistence_threshold", "model_persistence_threshold"),
                *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
                *("log_trace_cache_warnings", "round_robin_gradients"),
            ),
            _PLANNED,
        ),
        "stage3_partition_stream_chunk_size": "manager.wrap() packs a model on the meta device, module by module",
        "ignore_unused_parameters": "parameters without a gradient are left alone, as in torch",
        "load_from_fp32_weights": "checkpoints have the fp32 master weights",
        "elastic_checkpoint": "a checkpoint loads over any number of ranks",
        "pipeline_loading_checkpoint": "checkpoints are read a parameter at a time",
        "legacy_stage1": "sharding is that of stage 3",
        **dict.fromkeys(
            (
                *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
                "zeropp_loco_param",
            ),
            _BITS,
        ),
        "memory_efficient_linear": _LINEAR,
        "override_module_apply": "parameters serve themselves, and module.apply works",
        "enable_sanity_checks": "every plan is verified before it is followed",
        "zenflow": "an update uses all gradients of its step",
        "save_muon_momentum_buffer_in_memory": "a plan decides where states are",
        "cpu_offload_use_pin_memory": _PINNED,
        "mics_hierarchical_params_gather": _PLANNED,
    }
)
"""Keys of `zero_optimization` that are nothing here, with the reason."""

_OFFLOAD: Final = MappingProxyType(
    {
        "pin_memory": _PINNED,
        **dict.fromkeys(("buffer_count", "buffer_size", "max_in_cpu"), _PLANNED),
        **dict.fromkeys(("pipeline_read", "pipeline_write"), "reading, updating and writing always overlap"),
        "fast_init": "optimizer states are made when they are first needed",
        "ratio": "a plan decides how many states stay on DEVICE, within margin_use_ratio",
        "super_offload": _PLANNED,
        "convert_grad_on_cpu": "gradients stay in the dtype that they have",
        "cpuadam_cores_perc": "update_threads says how many threads update",
    }
)

_LOSS_SCALE: Final = MappingProxyType(
    {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
)
"""Keys that both have, with their defaults."""
_FP16: Final = MappingProxyType(
    {
        "auto_cast": "inputs of the model are cast where a module computes",
        "consecutive_hysteresis": "overflows are counted since the scale last changed",
        "fp16_master_weights_and_grads": "updates in fp16 vanish or overflow; master weights are fp32",
    }
)
_BF16: Final = MappingProxyType(
    {
        "immediate_grad_update": _PLANNED,
        "check_grad_overflow": "gradients in bf16 have the range of fp32",
    }
)
_CHECKPOINTING: Final = (
    *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints"),
    *("synchronize_checkpoint_boundary", "profile"),
)
_ADAM_DEFAULTS: Final = MappingProxyType({"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})


def convert(theirs: Mapping[str, Any], *, disk_capacity: str | None = None) -> Converted:
    """Return what a DeepSpeed configuration is here.

    Args:
        theirs: the object in their file.
        disk_capacity: bytes of each process on the disk that they offload to; None: `memory.disk` is left out.

    Raises:
        ConfigError: a section is no object, or two contradict each other.
    """
    if not isinstance(theirs, Mapping):
        raise ConfigError(f"a configuration of DeepSpeed is an object with keys, not {shown(theirs)}")
    found = Converted()
    sections: dict[str, Callable[[Converted, Any], None]] = {
        "optimizer": _optimizer,
        "zero_optimization": lambda found, value: _zero(found, value, disk_capacity),
        "bf16": lambda found, value: _bf16(found, value, "bf16"),
        "bfloat16": lambda found, value: _bf16(found, value, "bfloat16"),
        "fp16": _fp16,
        "gradient_clipping": _clipping,
        "activation_checkpointing": _checkpointing,
    }
    for key, value in theirs.items():
        if key in sections:
            sections[key](found, value)
        elif key in _CHANGED:
            found.change(key, _CHANGED[key])
        elif key in _DROPPED:
            found.drop(key, _DROPPED[key])
        else:
            found.unknown(key, {**sections, **_CHANGED, **_DROPPED})
    if found.values.get("precision") == "bf16" and "fp16" in found.values:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; make one of them false")
    return found


def _entries(value: object, at: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the path and the value of each entry of a section."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} is {shown(value)}, but must be an object with keys")
    for key, inner in value.items():
        yield str(key), f"{at}.{key}", inner


def _optimizer(found: Converted, value: object) -> None:
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


def _adam(found: Converted, name: str, given: dict[str, tuple[str, Any]]) -> None:
    """Write an Adam: theirs decays weights as AdamW does, unless `adam_w_mode` is false."""
    decoupled = name.lower() == "adamw" or given.get("adam_w_mode", ("", True))[1] is not False
    ours = "AdamW" if decoupled else "Adam"
    because = "" if ours == name else ": with adam_w_mode, DeepSpeed's Adam decouples weight decay"
    found.put(ours, "optimizer", "type")
    if ours == name:
        found.notes.append(Note("optimizer.type", Outcome.KEPT, "kept"))
    else:
        found.change("optimizer.type", f'is "{ours}"{because if decoupled else ""}')
    for key, (path, value) in given.items():
        if key in _ADAM_DEFAULTS and value == AUTO:
            found.change(path, f"is an argument of chunkmem.{ours}: {AUTO} is what Trainer's arguments say")
        elif key in _ADAM_DEFAULTS:
            found.keep(path, value)
        elif key == "adam_w_mode":
            found.change(path, "is optimizer.type")
        elif key in ("torch_adam", "bias_correction", "freeze_step", "amsgrad", "fp32_optimizer_states"):
            said = "updates have the bits of torch's fused kernels, with bias correction, and states in fp32"
            found.drop(path, said)
        else:
            found.unknown(path, {**_ADAM_DEFAULTS, "adam_w_mode": 0, "torch_adam": 0})
    if "weight_decay" not in given and given.get("torch_adam", ("", False))[1] is not True:
        found.put(0.0, "optimizer", "params", "weight_decay")
        found.change("optimizer.params.weight_decay", "not given: is 0, DeepSpeed's default; ours for AdamW is 0.01")


def _zero(found: Converted, value: object, disk_capacity: str | None) -> None:
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
            found.change(path, _HYBRID)
        elif key == "leaf_module":
            found.change(path, "is manager.unit(module)")
        elif key in _ZERO:
            found.drop(path, _ZERO[key])
        else:
            found.unknown(path, {**_ZERO, "stage": 0, "offload_optimizer": 0, "offload_param": 0})


def _offload(found: Converted, value: object, at: str, disk_capacity: str | None) -> None:
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
        elif key in _OFFLOAD:
            found.drop(path, _OFFLOAD[key])
        else:
            found.unknown(path, {**_OFFLOAD, "device": 0, "nvme_path": 0})


def _what_offloading_is(device: object) -> str:
    if device in ("none", None):
        return "is now the plan's choice: nothing moves if everything fits memory.device"
    if device == "nvme":
        return "is now the plan's choice: what neither memory.device nor memory.host has room for is on memory.disk"
    return "is now the plan's choice: what memory.device has no room for is on HOST, and updated there"


def _bf16(found: Converted, value: object, at: str) -> None:
    section = {key: inner for key, _, inner in _entries(value, at)}
    for key, path, inner in _entries(value, at):
        if key == "enabled":
            _enabled(found, path, inner, "bf16")
        elif key == "bf16_master_weights_and_grads" and inner is True and section.get("enabled") is True:
            found.keep(path, False, "master_weights", because=" = false")
        elif key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            found.change(path, "is master_weights: false, where it is true")
        elif key in _BF16:
            found.drop(path, _BF16[key])
        else:
            found.unknown(path, {**_BF16, "enabled": 0})


def _fp16(found: Converted, value: object) -> None:
    section = {key: inner for key, _, inner in _entries(value, "fp16")}
    enabled = section.get("enabled") is True
    for key, path, inner in _entries(value, "fp16"):
        if key == "enabled":
            _enabled(found, path, inner, "fp16")
        elif key in _LOSS_SCALE and not enabled:
            found.drop(path, "fp16 is not enabled")
        elif key in _LOSS_SCALE and inner == AUTO:
            found.change(path, f"is DeepSpeed's default: {AUTO} is none of ours")
        elif key in _LOSS_SCALE:
            found.keep(path, inner)
        elif key in _FP16:
            found.drop(path, _FP16[key])
        else:
            found.unknown(path, {**_LOSS_SCALE, **_FP16, "enabled": 0})
    if enabled and section.get("loss_scale_window", AUTO) == AUTO:
        found.put(_LOSS_SCALE["loss_scale_window"], "fp16", "loss_scale_window")
    if enabled and "loss_scale_window" not in section:
        found.change("fp16.loss_scale_window", "not given: is 1000, DeepSpeed's default; ours is 2000")


def _enabled(found: Converted, path: str, value: object, precision: str) -> None:
    if value == AUTO:
        found.change(
            path, f'is "precision": "{precision}" if you train with --{precision}: {AUTO} is Trainer\'s argument'
        )
    elif value is True and precision == "fp16":
        found.keep(path, True)
    elif value is True:
        found.keep(path, precision, "precision", because=f' "{precision}"')
    else:
        found.change(path, 'is false: "precision" is another one')


def _clipping(found: Converted, value: object) -> None:
    if value == AUTO:
        found.change("gradient_clipping", f"is max_grad_norm of Trainer, which clips: {AUTO} is its argument")
    else:
        found.keep("gradient_clipping", value)


def _checkpointing(found: Converted, value: object) -> None:
    at = "activation_checkpointing"
    for key, path, _ in _entries(value, at):
        if key in _CHECKPOINTING:
            found.change(path, "is activations.policy: what is recomputed from stays on DEVICE as far as there is room")
        else:
            found.unknown(path, dict.fromkeys(_CHECKPOINTING))
    if value:
        found.put("recompute", "activations", "policy")
        found.change(at, 'is activations.policy "recompute": leave out deepspeed.checkpointing in the model')
