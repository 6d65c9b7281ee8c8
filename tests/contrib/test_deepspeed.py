"""`chunkmem config --from`: a DeepSpeed configuration in our keys, and a line on each of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chunkmem.cli.main import main
from chunkmem.config import Config
from chunkmem.contrib.deepspeed import keys as deepspeed_keys
from chunkmem.contrib.deepspeed.convert import KeyOutcome, convert
from chunkmem.data.errors import ConfigError

OF_TRANSFORMERS: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "wall_clock_breakdown": False,
}
"""As transformers' documentation has it: nothing but what Trainer decides."""
OF_A_SCRIPT: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "adam_w_mode": True}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True, "ratio": 0.5},
        "offload_param": {"device": "cpu", "nvme_path": None},
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "aio": {"block_size": 1048576},
    "steps_per_prnt": 10,
}


def paths_of(theirs: dict[str, Any]) -> set[str]:
    """The keys that a line is expected for: those of sections are told one by one."""
    found = set()
    for key, value in theirs.items():
        told = key in ("optimizer", "fp16", "bf16", "zero_optimization", "activation_checkpointing")
        inner = value if told and isinstance(value, dict) else None
        if inner is None:
            found.add(key)
            continue
        for name, each in inner.items():
            if name in ("params", "offload_optimizer", "offload_param"):
                found |= {f"{key}.{name}.{last}" for last in each}
            else:
                found.add(f"{key}.{name}")
    return found


@pytest.mark.parametrize("theirs", [OF_TRANSFORMERS, OF_A_SCRIPT])
def test_every_key_is_told_about_once(theirs: dict[str, Any]) -> None:
    found = convert(theirs)
    told = [note.key for note in found.notes]
    assert len(told) == len(set(told))
    extra = {"optimizer.params.weight_decay", "activation_checkpointing"}
    assert set(told) - extra == paths_of(theirs) - extra
    assert all(
        note.text.startswith("has no counterpart because ")
        for note in found.notes
        if note.outcome is KeyOutcome.DROPPED
    )


def test_what_trainer_decides_is_left_out() -> None:
    found = convert(OF_TRANSFORMERS)
    assert found.values == {"optimizer": {"type": "AdamW"}}
    told = {note.key: note.text for note in found.notes}
    assert told["fp16.enabled"].startswith("is --fp16 of Trainer, which runs autocast over weights in fp32: ")
    (note,) = convert({"bf16": {"enabled": "auto"}}).notes
    assert note.text.endswith('"precision": "bf16" without that argument')
    assert told["optimizer.params.lr"] == (
        "is an argument of chunkmem.AdamW, or with `chunkmem run` what Trainer's arguments say"
    )
    assert "--lr_scheduler_type constant_with_warmup" in told["scheduler"]
    assert told["fp16.loss_scale"] == "has no counterpart because fp16 is not enabled"


def test_a_script_s_own_configuration() -> None:
    found = convert(OF_A_SCRIPT, disk_capacity="1TB")
    assert found.values == {
        "precision": "bf16",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "memory": {"disk": {"path": "/nvme", "capacity": "1TB"}},
        "activations": {"policy": "recompute"},
    }
    assert {str(note) for note in found.notes} >= {
        'bf16.enabled: is precision "bf16"',
        "gradient_clipping: kept",
        'optimizer.type: is "AdamW": with adam_w_mode, DeepSpeed\'s Adam decouples weight decay',
        "optimizer.params.lr: kept",
        "zero_optimization.offload_optimizer.nvme_path: is memory.disk.path",
        "zero_optimization.stage: is now always 3, as here: weights, gradients and states are sharded over ranks",
        "aio: has no counterpart because the disk's speed is measured, and block size and queue depth follow from it",
        "steps_per_prnt: is not known as a key of DeepSpeed; did you mean steps_per_print?",
    }
    config = Config.from_dict(found.values)
    assert (config.precision, config.optimizer.params.lr, config.activations.policy) == ("bf16", 3e-4, "recompute")
    without = convert(OF_A_SCRIPT)
    assert "memory" not in without.values
    (told,) = (note.text for note in without.notes if note.key.endswith("optimizer.nvme_path"))
    assert told == 'is memory.disk.path "/nvme"; name its bytes with --disk-capacity, and it is written'


@pytest.mark.parametrize(
    ("kind", "params", "ours"),
    [
        ("AdamW", {}, ("AdamW", 0.0)),  # their default; torch's, and ours, is 0.01
        ("AdamW", {"weight_decay": 0.1}, ("AdamW", 0.1)),
        ("AdamW", {"torch_adam": True}, ("AdamW", 0.01)),
        ("adam", {}, ("AdamW", 0.0)),
        ("Adam", {"adam_w_mode": False}, ("Adam", 0.0)),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, ("Adam", 0.1)),
    ],
)
def test_the_same_optimizer(kind: str, params: dict[str, Any], ours: tuple[str, float]) -> None:
    """DeepSpeed's "Adam" decouples weight decay, which is 0 if it is not given."""
    config = Config.from_dict(convert({"optimizer": {"type": kind, "params": params}}).values)
    assert (config.optimizer.type, config.optimizer.params.weight_decay) == ours


def test_another_optimizer_is_made_by_the_user() -> None:
    found = convert({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})
    assert found.values == {}
    assert [str(note) for note in found.notes] == [
        "optimizer.type: is the optimizer that you make: chunkmem.SGD, with manager=manager",
        "optimizer.params.lr: is an argument of that optimizer",
        "optimizer.params.momentum: is an argument of that optimizer",
    ]


def test_any_other_optimizer_is_made_of_a_class() -> None:
    (note,) = convert({"optimizer": {"type": "Lion"}}).notes
    assert (
        note.text
        == "is the optimizer that you make: chunkmem.Optimizer over a class of that kind, with manager=manager"
    )


def test_the_same_loss_scale() -> None:
    """Its window is 1000 steps there, and 2000 here."""
    values = convert({"fp16": {"enabled": True, "initial_scale_power": 12, "auto_cast": False}}).values
    fp16 = Config.from_dict(values).fp16
    assert (fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis) == (12, 1000, 2)
    values = convert({"fp16": {"enabled": True, "loss_scale_window": 500}}).values
    assert Config.from_dict(values).fp16.loss_scale_window == 500
    assert convert({"fp16": {"enabled": False, "loss_scale_window": 500}}).values == {}


def test_bf16_without_master_weights() -> None:
    values = convert({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}).values
    assert values == {"precision": "bf16", "master_weights": False}
    assert not Config.from_dict(values).master_weights


def test_old_spellings() -> None:
    assert convert({"zero_optimization": True}).values == {}
    (note,) = convert({"zero_optimization": {"cpu_offload": True}}).notes
    assert note.text == "is now the plan's choice: what memory.device has no room for is on HOST, and updated there"
    assert convert({"bfloat16": {"enabled": True}}).values == {"precision": "bf16"}


def test_keys_that_are_nothing_here_have_a_reason() -> None:
    """Each of the tables is read."""
    for key in (*deepspeed_keys.DROPPED, *deepspeed_keys.CHANGED):
        (note,) = convert({key: {}}).notes
        assert note.outcome in (KeyOutcome.DROPPED, KeyOutcome.CHANGED)
    for key in deepspeed_keys.ZERO:
        (note,) = convert({"zero_optimization": {key: 1}}).notes
        assert (note.key, note.outcome) == (f"zero_optimization.{key}", KeyOutcome.DROPPED)
    for key in deepspeed_keys.OFFLOAD:
        (note,) = convert({"zero_optimization": {"offload_optimizer": {key: 1}}}).notes
        assert note.outcome is KeyOutcome.DROPPED


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([], "a configuration of DeepSpeed is an object with keys, not []"),
        ({"zero_optimization": 3}, "zero_optimization is 3, but must be an object with keys"),
        ({"optimizer": {"params": 1}}, "optimizer.params is 1, but must be an object with keys"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"gradient_clipping": "a"}, "gradient_clipping is 'a', but must be a finite number"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": -1}}},
            "optimizer.params.lr is -1, but must be a finite number of at least 0",
        ),
    ],
)
def test_a_bad_configuration_names_the_key(
    theirs: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps(theirs), encoding="utf-8")
    assert main(["config", "--from", str(source), "--out", str(tmp_path / "ours.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"chunkmem: {source}: {says}")
    assert not (tmp_path / "ours.json").exists()


def test_the_command_prints_lines_and_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "ds.json", tmp_path / "ours.json"
    source.write_text(json.dumps(OF_A_SCRIPT), encoding="utf-8")
    assert main(["config", "--from", str(source)]) == 0
    lines, _, content = capsys.readouterr().out.partition("\n\n")
    assert lines.splitlines() == [str(note) for note in convert(OF_A_SCRIPT).notes]
    assert json.loads(content) == convert(OF_A_SCRIPT).values
    assert main(["config", "--from", str(source), "--out", str(target), "--disk-capacity", "1TB"]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten to {target}\n")
    assert Config.from_json(target) == Config.from_dict(convert(OF_A_SCRIPT, disk_capacity="1TB").values)
    assert main(["config", "--from", str(source), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"] == convert(OF_A_SCRIPT).values
    assert {note["outcome"] for note in answer["notes"]} == {"kept", "changed", "dropped", "unknown"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "ours.json"], "--out and --disk-capacity are about --from"),
        (["chunkmem.json", "--from", "ds.json"], "--from converts another file"),
        (["--from", "not-there.json"], "not-there.json cannot be read"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_capacity_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "ds.json"
    source.write_text("{}", encoding="utf-8")
    assert main(["config", "--from", str(source), "--disk-capacity", "many"]) == 2
    assert "--disk-capacity" in capsys.readouterr().err


def test_a_configuration_that_is_not_converted_yet_says_how() -> None:
    with pytest.raises(ConfigError, match="`chunkmem config --from FILE` converts one"):
        Config.from_dict(OF_A_SCRIPT)
