"""The frozen `Config`: every option with its default and what it takes. Does not look at the hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from chunkmem.data.deepspeed import check_not_deepspeed
from chunkmem.data.errors import ConfigError
from chunkmem.data.schema import (
    BOOL,
    CAPACITY,
    NULL,
    PATH,
    Section,
    either,
    integer,
    number,
    one_of,
    option,
    pair_of,
    read_json,
    subsection,
    whole,
)
from chunkmem.data.types import ACTIVATION_POLICIES

_ABOVE_ZERO = number("a finite number above 0", lambda x: x > 0, exclusiveMinimum=0)
_FINITE = number("a finite number; 0 or less is off", lambda x: True)
_NOT_NEGATIVE = number("a finite number of at least 0", lambda x: x >= 0, minimum=0)
_RATIO = number("a number above 0 and at most 1", lambda x: 0 < x <= 1, exclusiveMinimum=0, maximum=1)
_SHARE = number("a number from 0 to 1", lambda x: 0 <= x <= 1, minimum=0, maximum=1)
_BETA = number("a number of at least 0 and below 1", lambda x: 0 <= x < 1, minimum=0, exclusiveMaximum=1)


@dataclass(frozen=True)
class OptimizerParams(Section, at="optimizer.params"):
    """What `chunkmem.AdamW` and `chunkmem.Adam` use for arguments they are not given."""

    lr: float = option(_NOT_NEGATIVE, 1e-3, about="Learning rate.")
    betas: tuple[float, float] = option(pair_of(_BETA), (0.9, 0.999), about="Decay of the two moving averages.")
    eps: float = option(_NOT_NEGATIVE, 1e-8, about="Added to the denominator.")
    weight_decay: float = option(_NOT_NEGATIVE, 0.01, about="Default: torch's, 0.01 for AdamW and 0 for Adam.")
    states: Literal["fp32", "8bit"] = option(
        one_of("fp32", "8bit"),
        "fp32",
        about="What chunks hold of the two moving averages; 8bit: codes with a scale for each 256 elements.",
    )
    master: Literal["fp32", "none"] = option(
        one_of("fp32", "none"),
        "fp32",
        about="What updates go to in bf16; none: the weights, rounded stochastically; needs 8bit states.",
    )
    seed: int = option(integer(0), 0, about="Of the random bits of stochastic rounding, which 8bit updates by.")
    in_backward: bool = option(
        BOOL,
        False,
        about="Update each chunk group inside backward, so that gradients never exist all at once; without clipping.",
    )
    use_hybrid_adam: bool = option(
        BOOL, True, about="Optimizer states may live on DEVICE, within `margin_use_ratio`; false: never (CPU offload)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.master == "none" and self.states != "8bit":
            raise ConfigError(
                'optimizer.params.master is "none", but optimizer.params.states is "fp32", which takes more bytes than '
                'master weights in fp32 with states in 8 bits; make states "8bit"'
            )


_UNSET_PARAMS: Final = OptimizerParams()
_WEIGHT_DECAY: Final = MappingProxyType({"AdamW": 0.01, "Adam": 0.0})
"""torch's defaults: the two classes share the others."""


@dataclass(frozen=True)
class OptimizerConfig(Section, at="optimizer"):
    """Which optimizer, and its parameters. A weight decay that is not given is torch's default for `type`."""

    type: Literal["AdamW", "Adam"] = option(
        one_of(*_WEIGHT_DECAY), "AdamW", about="What `initialize_engine` makes: decoupled weight decay, or L2."
    )
    params: OptimizerParams = option(subsection(OptimizerParams), _UNSET_PARAMS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.params is _UNSET_PARAMS:
            object.__setattr__(self, "params", dataclasses.replace(self.params, weight_decay=_WEIGHT_DECAY[self.type]))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make the section from plain data; see `Section.from_dict`."""
        optimizer = super().from_dict(values)
        params = values.get("params")
        if not isinstance(params, Mapping) or "weight_decay" in params:
            return optimizer
        default = dataclasses.replace(optimizer.params, weight_decay=_WEIGHT_DECAY[optimizer.type])
        return dataclasses.replace(optimizer, params=default)

    def params_for(self, kind: Literal["AdamW", "Adam"]) -> OptimizerParams:
        """Return the parameters for an optimizer class that may not be the one `type` names.

        A weight decay that is only the default of `type` becomes the default of `kind`: AdamW's 0.01, decoupled, would
        be L2 regularization in Adam, where torch has 0.
        """
        if self.params.weight_decay != _WEIGHT_DECAY[self.type]:
            return self.params
        return dataclasses.replace(self.params, weight_decay=_WEIGHT_DECAY[kind])


@dataclass(frozen=True)
class Fp16Config(Section, at="fp16"):
    """The loss scale of fp16 mixed precision."""

    enabled: bool = option(BOOL, False, about="The same as `precision` fp16.")
    loss_scale: float = option(_NOT_NEGATIVE, 0.0, about="A fixed loss scale; 0: dynamic.")
    initial_scale_power: int = option(whole(0, 127), 16, about="A dynamic loss scale starts at 2 to this power.")
    loss_scale_window: int = option(integer(1), 2000, about="Steps without overflow before a dynamic loss scale grows.")
    hysteresis: int = option(integer(1), 2, about="Overflows before a dynamic loss scale shrinks.")
    min_loss_scale: float = option(_ABOVE_ZERO, 1.0, about="A dynamic loss scale does not shrink below it.")


@dataclass(frozen=True)
class DiskConfig(Section, at="memory.disk"):
    """The third tier: a file, for what HOST has no room for."""

    path: str = option(PATH, about="A folder on a fast disk, where each process has a file without a name.")
    capacity: int = option(CAPACITY, about="Cap on its bytes, of each process.")
    verify: bool = option(BOOL, False, about="Compare what is read with a checksum of what was written, kept in RAM.")


@dataclass(frozen=True)
class MemoryConfig(Section, at="memory"):
    """Caps of the tiers, in bytes, over all roles."""

    device: int | None = option(
        either(NULL, CAPACITY),
        None,
        about="Cap on accelerator memory; null: its capacity times `overall_gpu_mem_ratio`.",
    )
    host: int | None = option(
        either(NULL, CAPACITY),
        None,
        about="Cap on host memory; null: its capacity times `overall_cpu_mem_ratio`, divided by the ranks on the "
        "machine.",
    )
    disk: DiskConfig | None = option(
        either(NULL, subsection(DiskConfig)), None, about="The third tier; null: there is none."
    )

    @property
    def below(self) -> str:
        """The key of the tier below HOST, for what does without; empty: there is none."""
        return "" if self.disk is None else "memory.disk"


@dataclass(frozen=True)
class ActivationsConfig(Section, at="activations"):
    """What becomes of activations between forward and backward."""

    policy: str | None = option(
        either(NULL, one_of(*ACTIVATION_POLICIES)),
        None,
        about="Of each block: keep: on DEVICE; offload: on DEVICE as far as there is room, or to HOST and back; "
        "recompute: only its inputs are kept; auto: what makes the step fastest; null: left to the model.",
    )


@dataclass(frozen=True)
class DistributedConfig(Section, at="distributed"):
    """Data parallelism."""

    timeout_s: float = option(_ABOVE_ZERO, 600.0, about="Seconds after which a rank that does not answer is an error.")
    reduce_dtype: Literal["fp32", "bf16"] = option(
        one_of("fp32", "bf16"),
        "fp32",
        about="What gradients are sent and summed in over ranks; bf16 halves the bytes.",
    )


@dataclass(frozen=True)
class MemTracerConfig(Section, at="client.mem_tracer"):
    """How much of a tier may be used."""

    use_async_mem_monitor: bool = option(
        BOOL, True, about="A sampling thread measures non-model memory; false: measured at operator boundaries."
    )
    warmup_gpu_chunk_mem_ratio: float = option(
        _RATIO, 0.1, about="Share of the cap on DEVICE for chunks until the first step has been traced."
    )
    overall_gpu_mem_ratio: float = option(_RATIO, 0.8, about="Share of the accelerator's memory to use.")
    overall_cpu_mem_ratio: float = option(_RATIO, 0.8, about="Share of host memory to use.")
    margin_use_ratio: float = option(
        _SHARE, 0.8, about="Share of DEVICE left free at the traced peak that optimizer states may take."
    )
    use_fake_dist: bool = option(BOOL, False, about="Several ranks share one device, each with its part of the caps.")
    with_static_partition: bool = option(
        BOOL, False, about="`warmup_gpu_chunk_mem_ratio` holds after the first step, too."
    )


@dataclass(frozen=True)
class OptsConfig(
    Section,
    at="client.opts",
    aliases={"mem_saving_com": "with_mem_saving_comm", "with_mem_saving_com": "with_mem_saving_comm"},
):
    """Switches of the runtime; null is "whatever is faster"."""

    with_mem_saving_comm: bool | None = option(
        either(NULL, BOOL),
        None,
        about="True: broadcast and reduce one chunk at a time; false: all-gather and reduce-scatter groups of "
        "world-size chunks.",
    )
    with_mem_cache: bool = option(BOOL, True, about="Memory of freed chunks is kept for reuse.")
    mem_cache_capacity: int = option(integer(0), 2, about="How many chunks' memory is kept on DEVICE.")
    with_async_move: bool = option(
        BOOL, True, about="Chunks are copied asynchronously; false: the same copies, blocking."
    )
    overlap_optimizer: bool | None = option(
        either(NULL, BOOL), None, about="The optimizer's update on HOST overlaps with backward."
    )
    update_threads: int | None = option(
        either(NULL, integer(1)),
        None,
        about="Threads of such an update; null: all cores but two, or without an accelerator as many as torch uses.",
    )
    undo_log_ratio: float | None = option(
        either(NULL, _SHARE),
        None,
        about="Largest share of the cap on HOST for the shadow buffers that such updates write to before `step()`; "
        "null: all that the plan leaves.",
    )


@dataclass(frozen=True)
class ClientConfig(Section, at="client"):
    """PatrickStar's grouping of the two sections below it."""

    mem_tracer: MemTracerConfig = option(subsection(MemTracerConfig), MemTracerConfig())
    opts: OptsConfig = option(subsection(OptsConfig), OptsConfig())


@dataclass(frozen=True)
class Config(Section):
    """Every option; equal by value, hashable, and valid from construction on.

    ``Config(precision="fp16")`` and ``Config(fp16=Fp16Config(enabled=True))`` are the same configuration.
    """

    optimizer: OptimizerConfig = option(subsection(OptimizerConfig), OptimizerConfig())
    precision: Literal["fp32", "bf16", "fp16"] = option(
        one_of("fp32", "bf16", "fp16"), "fp32", about="What the model computes in; bf16 and fp16 are mixed precision."
    )
    master_weights: bool = option(
        BOOL,
        True,
        about="Mixed precision updates in fp32, with fp32 states and master weights; false (bf16 only): no master "
        "weights, updates and states in bf16.",
    )
    fp16: Fp16Config = option(subsection(Fp16Config), Fp16Config())
    gradient_clipping: float = option(_FINITE, 0.0, about="Largest global norm of gradients; 0 or less is off.")
    default_chunk_size: int | Literal["auto"] = option(
        either(one_of("auto"), integer(1)),
        "auto",
        about="Elements in a chunk; auto: the size that wastes least to padding.",
    )
    release_after_init: bool = option(
        BOOL,
        False,
        about="With several ranks, free other ranks' weights when the model is built; false: when a module is "
        "attached, so that no rank holds the whole model.",
    )
    use_cpu_embedding: bool = option(
        BOOL,
        False,
        about="Each nn.Embedding and nn.EmbeddingBag computes on HOST, where its weights stay; see `manager.on_host`.",
    )
    with_tiling_linear: bool | int = option(
        either(BOOL, integer(1)),
        False,
        about="Split `nn.Linear` weights with more elements than this into `TiledLinear`s; true: than a quarter of the "
        "widest.",
    )
    memory: MemoryConfig = option(subsection(MemoryConfig), MemoryConfig())
    activations: ActivationsConfig = option(subsection(ActivationsConfig), ActivationsConfig())
    distributed: DistributedConfig = option(subsection(DistributedConfig), DistributedConfig())
    client: ClientConfig = option(subsection(ClientConfig), ClientConfig())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp16.enabled and self.precision == "bf16":
            raise _precision_contradiction(self.precision, enabled=True)
        if not self.master_weights and (self.fp16.enabled or self.precision == "fp16"):
            raise ConfigError(
                "master_weights is false, but updates in fp16 vanish or overflow; leave it out, or make precision "
                '"bf16"'
            )
        if self.optimizer.params.master == "none":
            precision = "fp16" if self.fp16.enabled else self.precision
            if precision != "bf16":
                raise ConfigError(
                    f'optimizer.params.master is "none", but precision is "{precision}"; weights are rounded '
                    'stochastically in bf16 only: leave master out, or make precision "bf16"'
                )
            object.__setattr__(self, "master_weights", False)
        if self.fp16.enabled:
            object.__setattr__(self, "precision", "fp16")
        elif self.precision == "fp16":
            object.__setattr__(self, "fp16", dataclasses.replace(self.fp16, enabled=True))

    def __repr__(self) -> str:
        """Say what differs from the defaults; `to_dict` has every key."""
        defaults, own = flattened(type(self)().to_dict()), flattened(self.to_dict())
        return f"Config({', '.join(f'{key}={value!r}' for key, value in own.items() if defaults.get(key) != value)})"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from plain data, which is only read. PatrickStar's own is understood.

        Raises:
            ConfigError: a key is unknown or DeepSpeed's, its value is not allowed, or two keys contradict each other.
        """
        if not isinstance(values, Mapping):
            return super().from_dict(values)
        check_not_deepspeed(values)
        given = dict(values)
        fake_dist = BOOL("use_fake_dist", given.pop("use_fake_dist", False))
        given = _with_policy(given)
        config = super().from_dict(given)
        # Both keys have defaults, so only here is it known that both were given.
        fp16 = given.get("fp16")
        enabled = fp16.get("enabled") if isinstance(fp16, Mapping) else None
        precision = given.get("precision")
        if None not in (precision, enabled) and enabled != (precision == "fp16"):
            raise _precision_contradiction(precision, enabled=enabled)
        return config._with_fake_dist() if fake_dist else config

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read a configuration from a JSON file in UTF-8.

        Raises:
            ConfigError: as `from_dict`, or the file cannot be read or is not JSON; the message names it.
        """
        values = read_json(path)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    def _with_fake_dist(self) -> Self:
        # PatrickStar's examples hard-code false in client.mem_tracer and switch it on at the top level.
        tracer = dataclasses.replace(self.client.mem_tracer, use_fake_dist=True)
        return dataclasses.replace(self, client=dataclasses.replace(self.client, mem_tracer=tracer))


def _with_policy(values: dict[str, Any]) -> dict[str, Any]:
    """Return values in which PatrickStar's options for activations are ours.

    What it recomputes from is kept on DEVICE as far as there is room, with either of its options.
    """
    recomputes = BOOL("use_ckp", values.pop("use_ckp", False))
    offloads = BOOL("with_activation_offload", values.pop("with_activation_offload", False))
    if not (recomputes or offloads):
        return values
    policy = "recompute" if recomputes else "offload"
    section = values.get("activations", {})
    if not isinstance(section, Mapping) or section.get("policy", policy) != policy:
        name = "use_ckp" if recomputes else "with_activation_offload"
        raise ConfigError(f'{name} is true, which is activations.policy "{policy}"; leave one of them out')
    return {**values, "activations": {**section, "policy": policy}}


def num_processes_said() -> int:
    """Return how many processes there are of this program, as torchrun tells each of them in WORLD_SIZE; else 1."""
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 1


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Have variables of the environment for what runs inside and reads them, as libraries do; those that are set stay.

    Other threads see them, too, until the first that has set them is done.
    """
    own = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in own})
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def flattened(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their key paths."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flattened(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": value}
    return found


def _precision_contradiction(precision: object, *, enabled: object) -> ConfigError:
    return ConfigError(
        f'precision is "{precision}", but fp16.enabled is {str(enabled).lower()}; leave one of them out, or make '
        'fp16.enabled true for precision "fp16" and false for any other'
    )
