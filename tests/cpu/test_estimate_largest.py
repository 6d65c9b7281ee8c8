"""The largest model that fits, and names of sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chunkmem.cli.main import main
from chunkmem.estimate.families import Family
from chunkmem.estimate.gpt import GPT, shape_of
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.largest import MOST_LAYERS, largest
from chunkmem.estimate.models import resolve_model
from chunkmem.estimate.question import Question, fits
from tests.helpers.estimate_command import asked, assert_refused

TOWER = "tests.helpers.estimated:tower"
BLOCK_NBYTES = (64 * 64 + 64) * 4
"""Of one block's chunk in each of four roles."""


def question(**changes: Any) -> Question:
    given: dict[str, Any] = {"batch": 8, "hardware": HARDWARE["h100"], "chunk_numel": 4160, **changes}
    return Question(model=lambda batch: resolve_model(TOWER, batch=batch), **given)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("blocks_on_device", "blocks_on_host", "tier"),
    [(4, 10, "host"), (4, 37, "host"), (1.2, 400, "device"), (40, 8, "host")],
)
def test_one_layer_more_does_not_fit(
    blocks_on_device: float, blocks_on_host: int, tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Activations grow by the batch with each block, so with ample HOST it is DEVICE that binds.
    device_nbytes, host_nbytes = int(4 * BLOCK_NBYTES * blocks_on_device), 4 * BLOCK_NBYTES * blocks_on_host
    words = ("--device", str(device_nbytes), "--host", str(host_nbytes), "--batch", "8", "--chunk-size", "4160")
    said = asked(capsys, TOWER, *words, "--largest")
    layers = said["largest"]["layers"]
    assert said["fits"] is True
    assert said["parameters"] == said["largest"]["parameters"] == layers * (64 * 64 + 64)
    assert said["limit"]["tier"] == tier
    assert said["limit"]["layers"] == layers + 1
    assert said["limit"]["needed_nbytes"] > said["limit"]["cap_nbytes"]
    assert said["step_s"] > 0
    family, start = Family(TOWER, None), question(device_nbytes=device_nbytes, host_nbytes=host_nbytes)
    for count, expected in ((layers, True), (layers + 1, False)):
        one = Question(**{**vars(start), "model": family.sized(0, count)})
        assert fits(one) is expected


@pytest.mark.full
def test_times_are_those_of_the_blocks_that_training_would_recompute(capsys: pytest.CaptureFixture[str]) -> None:
    """HOST binds, and DEVICE has room to keep what some blocks save."""
    caps = "--device", str(30 * BLOCK_NBYTES), "--host", str(20 * BLOCK_NBYTES)
    words = *caps, "--batch", "8", "--chunk-size", "4160", "--largest"
    recompute, auto = (asked(capsys, TOWER, *words, "--activations", policy) for policy in ("recompute", "auto"))
    assert auto["largest"]["layers"] == recompute["largest"]["layers"]
    assert {region["policy"] for region in recompute["regions"]} == {"recompute"}
    assert "keep" in {region["policy"] for region in auto["regions"]}
    assert auto["step_s"] < recompute["step_s"]


def test_more_memory_never_fits_less() -> None:
    family, found = Family(TOWER, None), []
    for num_blocks in (6, 9, 12, 18):
        tight = question(device_nbytes=12 * BLOCK_NBYTES, host_nbytes=4 * BLOCK_NBYTES * num_blocks)
        best = largest(family, tight, note=lambda tried: None).fitting
        assert best is not None
        found.append(best.layers)
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_few_tries_are_needed() -> None:
    tries: list[int] = []
    ample = question(device_nbytes=16 * BLOCK_NBYTES, host_nbytes=4 * BLOCK_NBYTES * 30)
    found = largest(Family(TOWER, None), ample, note=lambda tried: tries.append(tried.layers))
    assert found.fitting is not None
    assert found.fitting.layers > 25
    assert len(tries) == found.num_tried <= 9, tries


@pytest.mark.full
def test_a_width_is_chosen_of_which_a_layer_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seq", "64", "--precision", "bf16", "--checkpointing")
    ample = asked(capsys, "gpt", "--device", "600MiB", "--host", "420MiB", *words, "--largest")
    width, layers = ample["largest"]["width"], ample["largest"]["layers"]
    assert ample["model"] == f"gpt:{width}x{layers}"
    # Its embedding is one chunk: where DEVICE is small, it binds, and the model gets narrower.
    narrow = asked(capsys, "gpt", "--device", "110MiB", "--host", "420MiB", *words, "--largest")
    assert narrow["largest"]["width"] < width


def test_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, "gpt", "--device", "4MiB", "--host", "1GiB", "--seq", "8", "--largest", status=1)
    assert (said["fits"], said["largest"]) == (False, None)
    assert said["limit"]["tier"] == "device"
    assert main(["estimate", TOWER, "--largest", "--device", "20KB", "--host", "1MB"]) == 1
    out, _ = capsys.readouterr()
    assert re.fullmatch(r"no model fits: with 1 layer, .*:tower with 1 layers? lacks room: DEVICE needs .*\n", out), out


def test_it_is_said_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", str(16 * BLOCK_NBYTES), "--host", str(40 * BLOCK_NBYTES), "--chunk-size", "4160"]
    assert main(["estimate", TOWER, "--largest", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"largest that fits: .*:tower with \d+ layers, \S+ k parameters, at 1 sequence a step", lines[0])
    assert re.match(r"HOST binds: with \d+ layers, HOST needs \S+ KiB, and has 650.00 KiB", lines[1])
    assert any(line.startswith("a step takes about ") for line in lines)


@pytest.mark.full
def test_a_configuration_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=320
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    said = asked(capsys, str(path), "--seq", "8", "--device", "2MiB", "--host", "8MiB", "--largest")
    config.num_hidden_layers = said["largest"]["layers"]
    assert config.num_hidden_layers > 3
    plain = transformers.LlamaForCausalLM(config)
    assert said["parameters"] == sum(p.numel() for p in plain.parameters())


# Sizes by name.


@pytest.mark.parametrize(
    ("size", "billions"), [("9.4b", 9.4), ("0.3b", 0.3), ("20b", 20), ("750m", 0.75), ("2t", 2000)]
)
def test_a_number_of_parameters(size: str, billions: float) -> None:
    shape = shape_of(size)
    with torch.device("meta"):
        model = GPT(shape, seq=2048)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.04)
    assert shape.width % shape.heads == 0
    assert 64 <= shape.width / shape.layers <= 256 or billions < 1


def test_width_and_layers() -> None:
    assert (shape_of("4096x45").width, shape_of("4096x45").layers) == (4096, 45)
    assert resolve_model("gpt:4096x45", batch=1).name == "gpt:4096x45"


WRONG = {
    "no parameters": (["gpt:0b"], "'gpt:0b' has fewer parameters than a GPT with 50257 words and one layer, 6.6m"),
    "no layers": (["gpt:4096x0"], "'gpt:4096x0' has 0 layers; give 1 to 4096"),
    "no width": (["gpt:0x4"], "has a width of 0; give a multiple of 64"),
    "an odd width": (["gpt:100x4"], "has a width of 100; give a multiple of 64"),
    "too wide": (["gpt:1048576x4"], "has a width of 1048576"),
    "not a size": (["gpt:big"], r"'gpt:big' is not a size of GPT; there are gpt:1m, .*\(gpt:9.4b\).*\(gpt:4096x45\)"),
    "negative": (["gpt:-1b"], "'gpt:-1b' is not a size of GPT"),
    "a family alone": (["gpt"], r"'gpt' is a family; give a size \(gpt:1m, .*\), or --largest"),
    "unknown family": (
        ["bert", "--largest", "--host", "1GiB"],
        "'bert' is not a family of models; --largest takes gpt, a",
    ),
    "a size and --largest": (["gpt:7b", "--largest", "--host", "1GiB"], "has a size, and --largest looks for one"),
    "no cap on HOST": (["gpt", "--largest"], "--largest needs --host"),
    "no layers to choose": (
        ["tests.helpers.estimated:mlp", "--largest", "--host", "1GiB"],
        "takes no `layers`, so there is none that is the largest",
    ),
    "no file": (["nowhere/config.json", "--largest", "--host", "1GiB"], "nowhere/config.json cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert_refused(capsys, *words, message=message)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkmem.estimate.largest.MOST_LAYERS", 5)
    assert MOST_LAYERS == 1000
    found = largest(Family(TOWER, None), question(device_nbytes=1 << 30, host_nbytes=1 << 30), note=lambda t: None)
    assert found.beyond is None
    assert found.fitting is not None
    assert found.fitting.layers == 5
