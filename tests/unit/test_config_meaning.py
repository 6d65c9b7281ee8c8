"""Keys that depend on each other, and the spellings of PatrickStar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chunkmem.config import (
    ClientConfig,
    Config,
    Fp16Config,
    MemTracerConfig,
    OptimizerConfig,
    OptimizerParams,
    OptsConfig,
)
from chunkmem.data.errors import ConfigError

ALIASES = ("mem_saving_com", "with_mem_saving_com")


def error_of(values: dict[str, Any]) -> str:
    """The message with which `values` are refused."""
    with pytest.raises(ConfigError) as raised:
        Config.from_dict(values)
    return str(raised.value)


# Precision and fp16: two spellings of one choice.


def test_updates_without_master_weights_need_bf16_and_states_in_8_bits() -> None:
    params = {"master": "none", "states": "8bit"}
    config = Config.from_dict({"precision": "bf16", "optimizer": {"params": params}})
    assert not config.master_weights
    assert Config.from_dict(config.to_dict()) == config
    for precision in ("fp32", "fp16"):
        message = error_of({"precision": precision, "optimizer": {"params": params}})
        assert message.startswith(f'optimizer.params.master is "none", but precision is "{precision}"')
    message = error_of({"precision": "bf16", "optimizer": {"params": {"master": "none"}}})
    assert message.startswith('optimizer.params.master is "none", but optimizer.params.states is "fp32"')


@pytest.mark.parametrize(
    "config",
    [
        Config(precision="fp16"),
        Config(fp16=Fp16Config(enabled=True)),
        Config(precision="fp16", fp16=Fp16Config(enabled=True)),
        Config.from_dict({"precision": "fp16"}),
        Config.from_dict({"precision": "fp16", "fp16": {}}),
        Config.from_dict({"fp16": {"enabled": True}}),
        Config.from_dict({"precision": "fp16", "fp16": {"enabled": True}}),
    ],
)
def test_fp16_enabled_and_precision_fp16_are_the_same(config: Config) -> None:
    assert (config.precision, config.fp16.enabled) == ("fp16", True)
    assert config == Config(precision="fp16")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp16_not_enabled_goes_with_the_other_precisions(precision: str) -> None:
    config = Config.from_dict({"precision": precision, "fp16": {"enabled": False}})
    assert (config.precision, config.fp16.enabled) == (precision, False)


@pytest.mark.parametrize(("precision", "enabled"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_precision_against_fp16_is_an_error(precision: str, enabled: bool) -> None:
    message = error_of({"precision": precision, "fp16": {"enabled": enabled}})
    assert message.startswith(f'precision is "{precision}", but fp16.enabled is {str(enabled).lower()}; ')


def test_bf16_with_fp16_enabled_is_an_error_in_the_constructor_too() -> None:
    with pytest.raises(ConfigError, match=r'^precision is "bf16", but fp16\.enabled is true; '):
        Config(precision="bf16", fp16=Fp16Config(enabled=True))


@pytest.mark.parametrize("values", [{"precision": "fp16"}, {"fp16": {"enabled": True}}])
def test_fp16_without_master_weights_is_an_error(values: dict[str, Any]) -> None:
    assert error_of(values | {"master_weights": False}).startswith(
        "master_weights is false, but updates in fp16 vanish"
    )
    assert Config.from_dict(values | {"master_weights": True}).master_weights


# Weight decay: the one default in which torch's Adam and AdamW differ.


@pytest.mark.parametrize(
    ("optimizer", "weight_decay"),
    [
        ({}, 0.01),
        ({"params": {"lr": 1}}, 0.01),
        ({"type": "AdamW"}, 0.01),
        ({"type": "AdamW", "params": {"lr": 1}}, 0.01),
        ({"type": "Adam"}, 0.0),
        ({"type": "Adam", "params": {}}, 0.0),
        ({"type": "Adam", "params": {"lr": 1}}, 0.0),
        ({"params": {"lr": 1}, "type": "Adam"}, 0.0),
        ({"type": "Adam", "params": {"weight_decay": 0.01}}, 0.01),
        ({"type": "AdamW", "params": {"weight_decay": 0}}, 0.0),
    ],
)
def test_weight_decay_not_given_is_torchs_default_for_the_type(optimizer: dict[str, Any], weight_decay: float) -> None:
    config = Config.from_dict({"optimizer": optimizer})
    assert config.optimizer.params.weight_decay == weight_decay
    assert config.optimizer.params.lr == optimizer.get("params", {}).get("lr", 1e-3)
    assert Config.from_dict(config.to_dict()) == config


def test_the_constructor_has_the_same_defaults() -> None:
    assert OptimizerConfig(type="Adam").params.weight_decay == 0
    assert OptimizerConfig(type="Adam", params=OptimizerParams(weight_decay=0.01)).params.weight_decay == 0.01
    assert OptimizerConfig().params == OptimizerParams()


@pytest.mark.parametrize(
    ("configured", "weight_decay", "built", "used"),
    [
        ("AdamW", 0.01, "AdamW", 0.01),
        ("AdamW", 0.01, "Adam", 0.0),
        ("AdamW", 0.1, "Adam", 0.1),
        ("Adam", 0.0, "Adam", 0.0),
        ("Adam", 0.01, "Adam", 0.01),
        ("Adam", 0.0, "AdamW", 0.01),
        ("Adam", 0.1, "AdamW", 0.1),
    ],
)
def test_params_for_another_class_than_configured(
    configured: Any, weight_decay: float, built: Any, used: float
) -> None:
    optimizer = OptimizerConfig(type=configured, params=OptimizerParams(lr=0.5, weight_decay=weight_decay))
    assert optimizer.params_for(built) == OptimizerParams(lr=0.5, weight_decay=used)


# PatrickStar's spellings.


def patrickstar(*, fake_dist: bool = False) -> dict[str, Any]:
    """All keys that PatrickStar's examples write, where they write them."""
    return {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
        },
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 10,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "gradient_clipping": -1,
        "default_chunk_size": 32 * 1024 * 1024,
        "release_after_init": True,
        "use_fake_dist": fake_dist,
        "use_cpu_embedding": False,
        "client": {
            "mem_tracer": {
                "use_async_mem_monitor": True,
                "warmup_gpu_chunk_mem_ratio": 0.1,
                "overall_gpu_mem_ratio": 0.9,
                "overall_cpu_mem_ratio": 0.9,
                "margin_use_ratio": 0.8,
                "use_fake_dist": False,
                "with_static_partition": False,
            },
            "opts": {"with_mem_saving_comm": True, "with_mem_cache": True, "with_async_move": False},
        },
    }


def test_patrickstars_own_configuration_loads(tmp_path: Path) -> None:
    file = tmp_path / "patrickstar.json"
    file.write_text(json.dumps(patrickstar()))
    config = Config.from_json(file)
    assert config == Config.from_dict(patrickstar())
    assert config == Config(
        optimizer=OptimizerConfig("Adam", OptimizerParams(eps=1e-6, weight_decay=0.0)),
        precision="fp16",
        fp16=Fp16Config(enabled=True, initial_scale_power=10, loss_scale_window=1000),
        gradient_clipping=-1.0,
        default_chunk_size=33554432,
        release_after_init=True,
        client=ClientConfig(
            MemTracerConfig(overall_gpu_mem_ratio=0.9, overall_cpu_mem_ratio=0.9),
            OptsConfig(with_mem_saving_comm=True, with_async_move=False),
        ),
    )


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"use_fake_dist": True}, True),
        ({"use_fake_dist": False}, False),
        ({"use_fake_dist": True, "client": {"mem_tracer": {"use_fake_dist": True}}}, True),
        ({"use_fake_dist": False, "client": {"mem_tracer": {"use_fake_dist": True}}}, True),
        (patrickstar(fake_dist=True), True),
    ],
)
def test_use_fake_dist_is_on_where_one_place_says_so(values: dict[str, Any], kept: bool) -> None:
    config = Config.from_dict(values)
    assert config.client.mem_tracer.use_fake_dist is kept
    assert "use_fake_dist" not in config.to_dict()


def test_the_users_data_is_only_read() -> None:
    values = patrickstar(fake_dist=True)
    Config.from_dict(values)
    assert values == patrickstar(fake_dist=True)


@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_use_fake_dist_at_the_top_level_is_strict(value: object) -> None:
    assert error_of({"use_fake_dist": value}) == f"use_fake_dist is {value!r}, but must be true or false"


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("value", [True, False, None])
def test_other_spellings_of_with_mem_saving_comm(alias: str, value: object) -> None:
    config = Config.from_dict({"client": {"opts": {alias: value}}})
    assert config.client.opts.with_mem_saving_comm is value
    assert config == Config.from_dict({"client": {"opts": {alias: value, "with_mem_saving_comm": value}}})
    assert alias not in config.client.opts.to_dict()


@pytest.mark.parametrize("alias", ALIASES)
def test_a_bad_value_is_reported_under_the_spelling_given(alias: str) -> None:
    message = error_of({"client": {"opts": {alias: 1}}})
    assert message == f"client.opts.{alias} is 1, but must be null, or true or false"


@pytest.mark.parametrize(
    ("first", "second"), [("with_mem_saving_comm", ALIASES[0]), (ALIASES[1], "with_mem_saving_comm"), ALIASES]
)
def test_two_spellings_with_different_values(first: str, second: str) -> None:
    message = error_of({"client": {"opts": {first: True, second: None}}})
    assert message == (
        f"client.opts.{second} is None, but client.opts.{first}, another spelling of it, is True; give only one of them"
    )
