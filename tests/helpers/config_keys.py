"""The keys of the configuration: defaults, values taken, values refused, and the words that refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chunkmem.config import DiskConfig


@dataclass(frozen=True)
class Key:
    """One key: its default, values as given and as kept, values refused, and the words an error uses."""

    default: object
    good: tuple[tuple[Any, Any], ...]
    bad: tuple[Any, ...]
    allowed: str


def same(*values: Any) -> tuple[tuple[Any, Any], ...]:
    """Values that are kept as they are given."""
    return tuple((value, value) for value in values)


NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = (True, False, None, "0.5", [], {}, NAN, INF, -INF, 10**400)
NOT_INTEGERS = (True, False, None, "2", 2.0, [], NAN)

BOOLEAN = (same(True, False), (0, 1, 1.0, "true", None, []), "true or false")
MAYBE_BOOLEAN = (same(True, False, None), (0, 1, 1.0, "null", []), "null, or true or false")
RATIO = (
    ((0.5, 0.5), (1, 1.0), (1.0, 1.0), (1e-9, 1e-9)),
    (0, 0.0, -0.1, 1.5, 1.0000001, *NOT_NUMBERS),
    "a number above 0 and at most 1",
)
SHARE = (((0, 0.0), (0.5, 0.5), (1, 1.0)), (-0.1, 1.5, *NOT_NUMBERS), "a number from 0 to 1")
MAYBE_SHARE = (
    ((None, None), *SHARE[0]),
    (-0.1, 1.5, True, False, "0.5", [], {}, NAN, INF, -INF, 10**400),
    f"null, or {SHARE[2]}",
)
NOT_NEGATIVE = (
    ((0, 0.0), (3, 3.0), (0.25, 0.25), (128, 128.0)),
    (-1, -1e-9, *NOT_NUMBERS),
    "a finite number of at least 0",
)
POSITIVE = (((1, 1.0), (0.25, 0.25)), (0, 0.0, -1, *NOT_NUMBERS), "a finite number above 0")
COUNT = (same(1, 2, 1000), (0, -1, 2**63, *NOT_INTEGERS), "an integer from 1 to 2**63 - 1")
SIZE = 'a size in bytes above 0, such as 4096, "512MiB", "1.5GiB" or "200GB"'
NOT_SIZES = (0, "0", "0GiB", -1, 2**63, True, 4096.0, "24GiBs", "", "nan", NAN, [], {})
CAP = (
    ((None, None), (4096, 4096), ("4096", 4096), ("24GiB", 24 * 2**30), ("1.5GiB", 3 * 2**29), ("200GB", 200 * 10**9)),
    NOT_SIZES,
    f"null, or {SIZE}",
)

KEYS: Mapping[str, Key] = {
    "optimizer.type": Key(
        "AdamW", same("AdamW", "Adam"), ("adamw", "SGD", "", None, 1, ["AdamW"]), '"AdamW" or "Adam"'
    ),
    "optimizer.params.lr": Key(1e-3, *NOT_NEGATIVE),
    "optimizer.params.betas": Key(
        (0.9, 0.999),
        (((0.8, 0.9), (0.8, 0.9)), ([0.8, 0.9], (0.8, 0.9)), ([0, 0], (0.0, 0.0))),
        ([], [0.9], [0.9, 0.9, 0.9], [0.9, 1], [-0.1, 0.9], [0.9, NAN], [True, 0.9], ["0.9", 0.9], 0.9, None, "ab", {}),
        "two values, each a number of at least 0 and below 1",
    ),
    "optimizer.params.eps": Key(1e-8, *NOT_NEGATIVE),
    "optimizer.params.weight_decay": Key(0.01, *NOT_NEGATIVE),
    "optimizer.params.states": Key("fp32", same("fp32", "8bit"), ("x", "bf16", "8BIT", None, 8), '"fp32" or "8bit"'),
    "optimizer.params.master": Key("fp32", same("fp32"), ("x", "split", "bf16", None, 0), '"fp32" or "none"'),
    "optimizer.params.seed": Key(0, same(0, 1, 1000), (-1, 2**63, *NOT_INTEGERS), "an integer from 0 to 2**63 - 1"),
    "optimizer.params.in_backward": Key(False, *BOOLEAN),
    "optimizer.params.use_hybrid_adam": Key(True, *BOOLEAN),
    "precision": Key(
        "fp32", same("fp32", "bf16", "fp16"), ("x", "", "FP32", "float32", None, 32), '"fp32", "bf16" or "fp16"'
    ),
    "master_weights": Key(True, *BOOLEAN),
    "fp16.enabled": Key(False, *BOOLEAN),
    "fp16.loss_scale": Key(0.0, *NOT_NEGATIVE),
    "fp16.initial_scale_power": Key(
        16, (*same(0, 8, 127), (12.0, 12)), (-1, 128, 8.5, True, None, "2", [], NAN, INF), "an integer from 0 to 127"
    ),
    "fp16.loss_scale_window": Key(2000, *COUNT),
    "fp16.hysteresis": Key(2, *COUNT),
    "fp16.min_loss_scale": Key(1.0, *POSITIVE),
    "gradient_clipping": Key(
        0.0, ((-1, -1.0), (0, 0.0), (1, 1.0), (0.5, 0.5)), NOT_NUMBERS, "a finite number; 0 or less is off"
    ),
    "default_chunk_size": Key(
        "auto",
        same("auto", 1, 32 * 2**20),
        (0, -1, 2**63, True, False, 2.0, None, "Auto", "", "32MiB", "4096", []),
        '"auto", or an integer from 1 to 2**63 - 1',
    ),
    "release_after_init": Key(False, *BOOLEAN),
    "use_cpu_embedding": Key(False, *BOOLEAN),
    "with_tiling_linear": Key(
        False,
        same(True, False, 1, 4096),
        (0, -1, 2**63, 1.0, "true", None, []),
        "true or false, or an integer from 1 to 2**63 - 1",
    ),
    "memory.device": Key(None, *CAP),
    "memory.host": Key(None, *CAP),
    "memory.disk": Key(
        None,
        ((None, None), ({"path": "swap", "capacity": "200GiB"}, DiskConfig(path="swap", capacity=200 * 2**30))),
        ("swap", 1, True, []),
        "null, or an object with the keys path, capacity, verify",
    ),
    "activations.policy": Key(
        None,
        same(None, "auto", "keep", "offload", "recompute"),
        ("Auto", "", "none", True, 1, []),
        'null, or "auto", "keep", "offload" or "recompute"',
    ),
    "distributed.timeout_s": Key(600.0, *POSITIVE),
    "distributed.reduce_dtype": Key(
        "fp32", same("fp32", "bf16"), ("bfloat16", "fp16", "", None, True, 16, []), '"fp32" or "bf16"'
    ),
    "client.mem_tracer.use_async_mem_monitor": Key(True, *BOOLEAN),
    "client.mem_tracer.warmup_gpu_chunk_mem_ratio": Key(0.1, *RATIO),
    "client.mem_tracer.overall_gpu_mem_ratio": Key(0.8, *RATIO),
    "client.mem_tracer.overall_cpu_mem_ratio": Key(0.8, *RATIO),
    "client.mem_tracer.margin_use_ratio": Key(0.8, *SHARE),
    "client.mem_tracer.use_fake_dist": Key(False, *BOOLEAN),
    "client.mem_tracer.with_static_partition": Key(False, *BOOLEAN),
    "client.opts.with_mem_saving_comm": Key(None, *MAYBE_BOOLEAN),
    "client.opts.with_mem_cache": Key(True, *BOOLEAN),
    "client.opts.mem_cache_capacity": Key(
        2, same(0, 1, 64), (-1, 2**63, *NOT_INTEGERS), "an integer from 0 to 2**63 - 1"
    ),
    "client.opts.with_async_move": Key(True, *BOOLEAN),
    "client.opts.overlap_optimizer": Key(None, *MAYBE_BOOLEAN),
    "client.opts.update_threads": Key(
        None, same(None, 1, 16), (0, -1, 2**63, True, 2.0, "2"), "null, or an integer from 1 to 2**63 - 1"
    ),
    "client.opts.undo_log_ratio": Key(None, *MAYBE_SHARE),
}
"""The whole of the contract. A key added to or dropped from `Config` must be added to or dropped from here."""

DISK_KEYS: Mapping[str, Key] = {
    "memory.disk.path": Key(None, same("swap", "/mnt/x"), ("", None, 1, b"swap", []), "a path as a non-empty string"),
    "memory.disk.capacity": Key(None, (("200GiB", 200 * 2**30), (1, 1)), (*NOT_SIZES, None), SIZE),
    "memory.disk.verify": Key(False, *BOOLEAN),
}
"""The keys of the optional disk tier; both must be given."""

CASES = {**KEYS, **DISK_KEYS}
