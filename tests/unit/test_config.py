"""Every key of the configuration: its default, what it takes and becomes, what it refuses and says."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.config import (
    ActivationsConfig,
    ClientConfig,
    Config,
    DiskConfig,
    DistributedConfig,
    Fp16Config,
    MemoryConfig,
    MemTracerConfig,
    OptimizerConfig,
    OptimizerParams,
    OptsConfig,
)
from chunkmem.data.errors import ConfigError
from tests.helpers.config_keys import CASES, DISK_KEYS, KEYS

SECTIONS: Mapping[str, Callable[..., object]] = {
    "": Config,
    "optimizer": OptimizerConfig,
    "optimizer.params": OptimizerParams,
    "fp16": Fp16Config,
    "memory": MemoryConfig,
    "activations": ActivationsConfig,
    "memory.disk": DiskConfig,
    "distributed": DistributedConfig,
    "client": ClientConfig,
    "client.mem_tracer": MemTracerConfig,
    "client.opts": OptsConfig,
}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` to ``{"a": {"b": 1}}``."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return result


def given_alone(path: str, value: object) -> dict[str, Any]:
    """The smallest data that sets `path`."""
    disk = {"memory.disk.path": "swap", "memory.disk.capacity": 1} if path in DISK_KEYS else {}
    return nested({**disk, path: value})


def get(config: object, path: str) -> Any:
    """Follow attributes, as a program does: ``config.client.opts.with_mem_cache``."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def paths(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The dotted paths of the leaves of nested data."""
    found: set[str] = set()
    for key, value in values.items():
        found |= paths(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key}
    return found


def error_of(values: Any) -> str:
    """The message with which `values` are refused."""
    with pytest.raises(ConfigError) as raised:
        Config.from_dict(values)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_keys_and_their_defaults_are_the_contract() -> None:
    assert paths(Config().to_dict()) == set(KEYS)
    for path, key in KEYS.items():
        default = get(Config(), path)
        assert default == key.default
        assert type(default) is type(key.default), path


def test_the_keys_of_the_disk_tier_are_the_contract() -> None:
    config = Config.from_dict({"memory": {"disk": {"path": "swap", "capacity": 1}}})
    assert paths(config.to_dict()) - set(KEYS) == set(DISK_KEYS)


@pytest.mark.parametrize("path", SECTIONS)
def test_each_section_knows_where_it_is(path: str) -> None:
    config = Config(memory=MemoryConfig(disk=DiskConfig(path="swap", capacity=1)))
    assert type(get(config, path) if path else config) is SECTIONS[path]


@pytest.mark.parametrize(
    ("path", "value", "kept"), [(path, *pair) for path, key in CASES.items() for pair in key.good], ids=repr
)
def test_good_values_are_kept(path: str, value: object, kept: object) -> None:
    config = Config.from_dict(given_alone(path, value))
    assert get(config, path) == kept
    assert type(get(config, path)) is type(kept)


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, key in CASES.items() for value in key.bad])
def test_bad_values_are_refused_by_name_value_and_what_is_allowed(path: str, value: object) -> None:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    assert error_of(given_alone(path, value)) == f"{path} is {shown}, but must be {CASES[path].allowed}"


@pytest.mark.parametrize("path", CASES)
def test_constructors_refuse_the_same(path: str) -> None:
    section, _, key = path.rpartition(".")
    others = {"path": "swap", "capacity": 1} if path in DISK_KEYS else {}
    for value in CASES[path].bad:
        with pytest.raises(ConfigError, match=f"^{re.escape(path)} is "):
            SECTIONS[section](**{**others, key: value})


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", [None, True, 1, "x", [], [("a", 1)]])
def test_a_section_that_is_not_an_object(section: str, value: object) -> None:
    if section == "memory.disk" and value is None:
        return
    message = error_of(nested({section: value}) if section else value)
    assert message.startswith(f"{section or 'the configuration'} is {value!r}, but must be ")
    assert "an object with" in message


@pytest.mark.parametrize("path", [path for path in CASES if path != "memory.disk"])
def test_a_misspelled_key_names_the_nearest(path: str) -> None:
    section, _, key = path.rpartition(".")
    message = error_of(given_alone(path + "x", 5))
    assert message.startswith(f"{path}x, set to 5, is not a known key (did you mean {path}?); allowed ")
    assert (f"in {section}: " if section else "at the top level: ") in message
    assert re.search(rf"[:,] {key}(,|$)", message)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_like_no_other_lists_what_is_allowed(section: str) -> None:
    path = f"{section}.zzzzzz" if section else "zzzzzz"
    message = error_of(nested({path: True}))
    assert message.startswith(f"{path}, set to True, is not a known key; allowed ")


def test_keys_that_are_not_strings() -> None:
    assert error_of({1: 2}).startswith("1, set to 2, is not a known key; allowed at the top level: optimizer, ")


@pytest.mark.parametrize(("given_key", "missing"), [("path", "capacity"), ("capacity", "path")])
def test_the_disk_tier_needs_both_keys(given_key: str, missing: str) -> None:
    message = error_of({"memory": {"disk": {given_key: "1GiB"}}})
    assert message == f"memory.disk.{missing} is missing, it must be {DISK_KEYS[f'memory.disk.{missing}'].allowed}"


def test_disk_paths_may_be_path_objects() -> None:
    assert DiskConfig(path=Path("swap"), capacity=1) == DiskConfig(path="swap", capacity=1)  # type: ignore[arg-type]


# As values.


def keys_given() -> st.SearchStrategy[dict[str, Any]]:
    """Draw data that sets some keys, without contradictions of `precision` with other keys."""
    ratio = st.floats(0, 1, exclude_min=True)
    not_negative = st.floats(0, allow_infinity=False) | st.integers(0, 10**9)
    beta = st.floats(0, 1, exclude_max=True)
    size = st.integers(1, 2**63 - 1) | st.sampled_from(["4096", "24GiB", "1.5GiB", "200GB"])
    drawn = {
        "optimizer.params.lr": not_negative,
        "optimizer.params.betas": st.tuples(beta, beta) | st.lists(beta, min_size=2, max_size=2),
        "optimizer.params.eps": not_negative,
        "optimizer.params.weight_decay": not_negative,
        "optimizer.params.states": st.sampled_from(["fp32", "8bit"]),
        "optimizer.params.seed": st.integers(0, 2**63 - 1),
        "fp16.loss_scale": not_negative,
        "fp16.loss_scale_window": st.integers(1, 2**63 - 1),
        "gradient_clipping": st.floats(allow_nan=False, allow_infinity=False),
        "default_chunk_size": st.just("auto") | st.integers(1, 2**63 - 1),
        "memory.device": st.none() | size,
        "memory.disk": st.none() | st.fixed_dictionaries({"path": st.text("ab/~ é", min_size=1), "capacity": size}),
        "client.mem_tracer.overall_gpu_mem_ratio": ratio,
        "client.mem_tracer.warmup_gpu_chunk_mem_ratio": ratio,
    }
    listed = {path: st.sampled_from([value for value, _ in key.good]) for path, key in KEYS.items()}

    def agree(values: dict[str, Any]) -> dict[str, Any]:
        if "precision" in values and "fp16.enabled" in values:
            values["fp16.enabled"] = values["precision"] == "fp16"
        if values.get("fp16.enabled") or values.get("precision") == "fp16":
            values.pop("master_weights", None)
        return nested(values)

    return st.fixed_dictionaries({}, optional={**listed, **drawn}).map(agree)


@given(keys_given())
def test_round_trip(values: dict[str, Any]) -> None:
    before = copy.deepcopy(values)
    config = Config.from_dict(values)
    assert values == before
    plain = config.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    again = Config.from_dict(plain)
    assert again == config
    assert hash(again) == hash(config)


def test_equal_by_value_and_hashable() -> None:
    assert Config() == Config.from_dict({}) == Config.from_dict(Config().to_dict())
    assert {Config(): 1}[Config.from_dict({})] == 1
    assert Config() != Config(gradient_clipping=1.0)
    # Integers are taken for floats, and are then the same configuration.
    assert hash(Config(gradient_clipping=1)) == hash(Config(gradient_clipping=1.0))


def test_frozen() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.precision = "fp16"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.client.opts.with_mem_cache = False  # type: ignore[misc]


def test_copies_and_pickles_are_equal() -> None:
    config = Config(precision="bf16", memory=MemoryConfig(device=2**30, disk=DiskConfig(path="swap", capacity=1)))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, gradient_clipping=1.0).gradient_clipping == 1.0


def test_the_defaults_that_migrating_tells() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    table = page.partition("| key | PatrickStar | chunkmem |\n")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `([\w.]+)`[^|]* \|[^|]*\| `?([^|`,]*)`?[^|]* \|$", table, re.MULTILINE))
    values = Config().to_dict()
    said = {"AdamW": "AdamW", "false": False, "the size that wastes least": "auto", "the faster of both": None}
    checked = 0
    for key, text in told.items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        if key != "fp16.hysteresis":
            assert value == (said[text] if text in said else float(text)), key
            checked += 1
    assert checked == 7
