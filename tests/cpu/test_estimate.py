"""The answers of `chunkmem estimate`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chunkmem.cli.main import main
from chunkmem.data.types import Tier
from chunkmem.estimate.changes import smallest_changes
from chunkmem.estimate.gpt import GPT, SHAPES
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.mesh import RankMesh
from chunkmem.estimate.models import resolve_model
from chunkmem.estimate.question import (
    Question,
    device_need,
    find,
    fits,
    host_need,
    step_range_s,
    trains_on_demand,
)
from tests.helpers.estimate_command import asked, assert_refused
from tests.helpers.estimated import WORDS

MLP = "tests.helpers.estimated:mlp"


def question(name: str = MLP, **changes: Any) -> Question:
    start = Question(
        model=lambda batch: resolve_model(f"tests.helpers.estimated:{name}" if ":" not in name else name, batch=batch),
        batch=64,
        hardware=HARDWARE["h100"],
        device_nbytes=1 << 20,
        chunk_numel=4160,
    )
    return replace(start, **changes)


# What is said where it fits.


def test_a_model_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--device", "1MiB", "--batch", "16", "--chunk-size", "4160")
    numel = 6 * (64 * 64 + 64)
    assert said["fits"] is True
    assert said["parameters"] == numel
    assert said["parameter_nbytes"] == 4 * numel
    assert said["role_nbytes"] == dict.fromkeys(("exp_avg", "exp_avg_sq", "grad", "param"), 4 * numel)
    # Each block keeps what its Tanh returned, the first also the batch; gradients pass beside them.
    assert 7 * 16 * 64 * 4 <= said["activation_nbytes"] <= 14 * 16 * 64 * 4
    assert set(said["activation_nbytes_by_checkpointing"]) == {"true", "false"}
    assert said["device"]["peak_nbytes"] <= said["device"]["cap_nbytes"] == 1 << 20
    assert said["lower_bounds"]["binding"] in ("compute", "link", "host memory", "network")
    assert said["step_s"] >= max(
        said["lower_bounds"][key] for key in ("compute_s", "link_s", "host_memory_s", "network_s", "disk_s")
    )


def test_a_step_without_memory_to_spare_takes_longer_than_its_floors() -> None:
    tight = question()
    tight = replace(tight, device_nbytes=device_need(tight).nbytes)
    finding = find(tight)
    assert finding.timeline.step_s >= finding.lower_bounds.step_s
    assert finding.timeline.peak_nbytes[Tier.HOST] > 0


@pytest.mark.parametrize("name", ["without_blocks", "positional"])
def test_functions_may_return_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, f"tests.helpers.estimated:{name}", "--seq", "4")
    assert said["parameters"] == 64 * 64
    assert list(said["activation_nbytes_by_checkpointing"]) == ["false"]


@pytest.mark.parametrize(
    ("name", "billions"), [("125m", 0.124), ("1.3b", 1.31), ("7b", 6.65), ("175b", 174.6), ("1t", 1008)]
)
def test_presets_have_the_parameters_they_are_named_for(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name], seq=2048)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_mixed_precision_has_a_master_copy(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--precision", "bf16", "--chunk-size", "8320")
    numel = 6 * (64 * 64 + 64)
    by_role = {"param": 2, "grad": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
    # Chunks of one block each; their ends are pads.
    assert {role: nbytes // by_role[role] for role, nbytes in said["role_nbytes"].items()}.keys() == by_role.keys()
    assert said["parameter_nbytes"] == 2 * numel
    for role, nbytes in by_role.items():
        assert said["role_nbytes"][role] * 2 == said["role_nbytes"]["param"] * nbytes


def test_gradients_that_never_exist_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients of a block, of one chunk, are gone before those of the one before it begin."""
    words = (MLP, "--precision", "bf16", "--chunk-size", "8320")
    before, said = asked(capsys, *words), asked(capsys, *words, "--in-backward")
    assert said["role_nbytes"].pop("grad") * 3 == before["role_nbytes"].pop("grad")
    assert said["role_nbytes"] == before["role_nbytes"]


@pytest.mark.full
def test_a_configuration_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=320
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    said = asked(capsys, str(path), "--seq", "32", "--batch", "2")
    plain = transformers.LlamaForCausalLM(config)
    assert said["parameters"] == sum(p.numel() for p in plain.parameters())
    assert said["activation_nbytes_by_checkpointing"]["true"] < said["activation_nbytes_by_checkpointing"]["false"]


# What is said about time.


def test_a_step_is_a_range_around_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--device", "96KiB", "--chunk-size", "4160", "--batch", "4")
    fastest_s, slowest_s = said["step_range_s"]
    assert fastest_s < said["step_s"] < slowest_s
    assert slowest_s < 1.5 * fastest_s / 0.8
    assert said["step_s"] >= max(said["lower_bounds"][key] for key in ("compute_s", "link_s", "host_memory_s"))


@pytest.mark.few(6)
@pytest.mark.parametrize("name", HARDWARE)
def test_slower_hardware_takes_longer(name: str) -> None:
    start = question(hardware=HARDWARE[name], device_nbytes=96 << 10, batch=4)
    found = find(start)
    fastest_s, slowest_s = step_range_s(found)
    assert fastest_s < found.step_s < slowest_s
    assert 0.5 < HARDWARE[name].eager_share <= 1
    assert HARDWARE[name].duplex_Bps < 2 * HARDWARE[name].link_Bps


def test_eager_training_is_slower_than_its_operators() -> None:
    start = question(batch=64)
    alone = replace(start, hardware=replace(start.hardware, eager_share=1.0))
    assert alone.rehearsal.trace.compute_s == pytest.approx(0.75 * start.rehearsal.trace.compute_s)
    bounds = [find(asked).lower_bounds.compute_s for asked in (start, alone)]
    assert bounds[0] == pytest.approx(bounds[1]), "lower bounds are of the operators"


def test_what_comes_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--device", "96KiB", "--chunk-size", "4160")
    assert said["start_up"]["build_s"] == pytest.approx(4 * said["parameters"] / 0.5e9)
    assert said["start_up"]["pin_s"] == pytest.approx(said["host"]["peak_nbytes"] / 3e9)
    words = ["gpt:125m", "--seq", "8", "--device", "1GiB", "--host", "8GiB"]
    assert main(["estimate", *words]) == 0
    assert re.search(r"before the first step: about .* s to draw initial weights in fp32, and", capsys.readouterr().out)


def test_what_a_card_cannot_give_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    usable_gib = HARDWARE["rtx4090"].usable_nbytes / 2**30
    assert 21.5 < usable_gib < 23.6 - 0.5
    for gib, expected in ((int(usable_gib), False), (23.5, True)):
        assert main(["estimate", MLP, "--hardware", "rtx4090", "--device", f"{gib}GiB"]) == 0
        assert ("warning: of the card's 23.60 GiB" in capsys.readouterr().out) is expected


def test_the_first_step_and_planned_ones_need_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    alone = asked(capsys, MLP, "--chunk-size", "4160")["need"]
    assert alone["first_step_nbytes"] == alone["planned_nbytes"] == alone["device_nbytes"]
    words = [MLP, "--chunk-size", "4160", "--world", "6", "--batch", "1"]
    shared = asked(capsys, *words)["need"]
    # Nobody says that a backward is the last one, so the first step reduces everything at its end.
    assert shared["first_step_nbytes"] == shared["device_nbytes"] > shared["planned_nbytes"]
    assert main(["estimate", *words]) == 0
    assert re.search(
        r"smallest cap on DEVICE: \S+ KiB for the first step, \S+ KiB for planned", capsys.readouterr().out
    )


# What is said where it does not fit.


def test_the_limit_that_binds(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--device", "64KiB", "--batch", "64", status=1)
    assert said["limit"] == "device"
    assert said["needed_nbytes"] > said["cap_nbytes"] == 64 << 10
    said = asked(capsys, MLP, "--device", "150KiB", "--host", "64KiB", "--batch", "4", status=1)
    assert said["limit"] == "host"
    assert said["needed_nbytes"] > said["cap_nbytes"] == 64 << 10


FULL = pytest.mark.full
GRID = [
    pytest.param(
        *(name, share, host_share, batch, checkpointing),
        id=f"{name}-{share}-{host_share}-{batch}-{checkpointing}",
        marks=[] if (share, host_share) in ((0.35, None), (0.97, 0.6)) and not (checkpointing and batch == 1) else FULL,
    )
    for name in ("mlp", "without_blocks")
    for share in (0.35, 0.7, 0.97)
    for host_share in (None, 0.6)
    for batch in (1, 64)
    for checkpointing in ((False, True) if name == "mlp" else (False,))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "share", "host_share", "batch", "checkpointing"), GRID)
def test_every_change_that_is_named_makes_it_fit(
    name: str, share: float, host_share: float | None, batch: int, checkpointing: bool
) -> None:
    start = question(name, batch=batch, checkpointing=checkpointing)
    rehearsal = start.rehearsal
    need = device_need(start).nbytes
    host = None if host_share is None else int(host_share * sum(rehearsal.trace.chunk_nbytes.values()))
    start = replace(start, device_nbytes=int(share * need), host_nbytes=host)
    assert not fits(start)
    changes = smallest_changes(start)
    assert changes
    for change in changes:
        assert fits(change.question), change.what
        assert change.options, change.what


def test_the_caps_that_are_named_are_the_smallest() -> None:
    start = question(device_nbytes=1 << 16, host_nbytes=1 << 16)
    (caps,) = (c for c in smallest_changes(start) if c.what == "device + host")
    raised = caps.question
    assert raised.host_nbytes is not None
    assert fits(raised)
    assert not fits(replace(raised, device_nbytes=raised.device_nbytes - 1))
    assert not fits(replace(raised, host_nbytes=raised.host_nbytes - 1))


def test_the_batch_that_is_named_is_the_largest() -> None:
    start = question(batch=64)
    need = device_need(start).nbytes
    start = replace(start, device_nbytes=need // 2)
    (batch,) = (c for c in smallest_changes(start) if c.what == "batch")
    more = replace(start, batch=batch.question.batch + 1)
    assert 1 < batch.question.batch < 64
    assert not fits(more)


def test_the_options_that_are_printed_work(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "96KiB", "--batch", "64", "--chunk-size", "4160"]
    said = asked(capsys, MLP, *words, status=1)
    assert {change["what"] for change in said["changes"]} >= {"batch", "device"}
    for change in said["changes"]:
        assert asked(capsys, MLP, *words, *change["options"])["fits"] is True


def test_no_change_is_named_that_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """Without gradients it would fit, but in fp16 nothing is updated inside backward: a step may be skipped."""
    words = (MLP, "--chunk-size", "4160", "--device", "64KiB", "--host", "310KiB", "--precision", "fp16")
    for change in asked(capsys, *words, status=1)["changes"]:
        assert asked(capsys, *words, *change["options"])["fits"] is True


def test_tiles_are_offered_where_a_wide_layer_is_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tests.helpers.estimated:wide", "--batch", "2", "--chunk-size", "4096", "--device"]
    said = asked(capsys, *words, "256KiB", status=1)
    assert said["change"] == {"what": "tile", "options": ["--tile", str(64 * 1024 // 4)]}
    tiled = asked(capsys, *words, "256KiB", *said["change"]["options"])
    assert tiled["fits"] is True
    assert tiled["tile_numel"] == 64 * 1024 // 4
    assert tiled["parameters"] == said["parameters"]
    assert main(["estimate", *words, "256KiB"]) == 1
    assert "smallest change that fits: --tile 16384\n" in capsys.readouterr().out
    (sixteenth,) = (c for c in asked(capsys, *words, "128KiB", status=1)["changes"] if c["what"] == "tile")
    assert sixteenth["options"] == ["--tile", str(64 * 1024 // 16)]


def test_tiles_are_not_offered_where_activations_or_host_are_what_does_not_fit() -> None:
    wide = question("wide", batch=4096, chunk_numel=4096)
    activations = replace(wide, device_nbytes=wide.rehearsal.activation_nbytes - 1)
    host = question("wide", batch=2, chunk_numel=4096, device_nbytes=2 << 20, host_nbytes=1 << 20)
    for each in (activations, host):
        changes = smallest_changes(each)
        assert "tile" not in {change.what for change in changes}


# Several ranks.


def test_ranks_share_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    alone = asked(capsys, MLP, "--device", "300KiB", "--chunk-size", "4160")
    shared = asked(capsys, MLP, "--device", "300KiB", "--chunk-size", "4160", "--world", "3")
    assert shared["role_nbytes"] == alone["role_nbytes"]
    held = {name: said["device"]["chunk_peak_nbytes"] + said["host"]["peak_nbytes"] for name, said in
            (("alone", alone), ("shared", shared))}  # fmt: skip
    assert held["shared"] <= held["alone"] / 2
    assert shared["lower_bounds"]["network_s"] > 0 == alone["lower_bounds"]["network_s"]


@pytest.mark.parametrize("name", HARDWARE)
def test_exchanges_are_as_fast_as_the_slowest_of_what_they_cross(name: str) -> None:
    usual = HARDWARE[name]
    within, world = usual.ranks_a_machine, 4 * usual.ranks_a_machine
    assert usual.exchange_Bps(within) == usual.send_Bps(within) == usual.peer_Bps
    assert 0 < usual.send_Bps(world) <= usual.exchange_Bps(world) == usual.exchange_Bps(2 * world) <= usual.peer_Bps
    speeds = [replace(usual, nics=nics, nic_Bps=1e9).exchange_Bps(world) for nics in (1, 2, 2000)]
    assert speeds == [0.92e9, 1.84e9, min(usual.peer_Bps, within * usual.link_Bps)]
    assert replace(usual, ranks_a_machine=1, nics=2000).exchange_Bps(2) == min(usual.peer_Bps, usual.link_Bps)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "GBps", "says"),
    [
        ("--world 8", 360, r"network 360 GB/s a rank$"),
        ("--world 1024", 360, r"a rank, over 128 machines of 8 ranks and 8 NICs of 400 Gb/s \(--nnodes"),
        ("--world 16 --hardware rtx4090", 2.875, r"2.88 GB/s a rank, over 2 machines of 8 ranks and 1 NIC of 25 Gb/s"),
        (
            "--world 12 --nnodes 3 --nics 2 --nic-speed 100Gb/s",
            23,
            r"over 3 machines of 4 ranks and 2 NICs of 100 Gb/s",
        ),
        ("--world 12 --nnodes 12 --nic-speed 400Gbps", 55, r"over 12 machines of 1 rank and 8 NICs of 400 Gb/s"),
        ("--world 12 --nnodes 1", 360, r"network 360 GB/s a rank$"),
        ("--world 12 --network 50GB/s", 50, r"network 50 GB/s a rank$"),
    ],
)
def test_networks_of_machines(words: str, GBps: float, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask = (MLP, "--chunk-size", "4160", *words.split())
    said = asked(capsys, *ask)
    assert said["assumed"]["network_Bps"] == pytest.approx(1e9 * GBps)
    sent_nbytes = max(said["exchanged"]["sent_nbytes"], said["exchanged"]["received_nbytes"])
    assert said["lower_bounds"]["network_s"] == pytest.approx(sent_nbytes / (1e9 * GBps))
    assert main(["estimate", *ask]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed: "))
    assert re.search(says, line), line


def test_gradients_are_reduced_within_a_replica_and_across() -> None:
    usual = HARDWARE["h100"]
    machine = usual.machine(1 << 30, 1 << 30, mesh=RankMesh(2, 8), sent_share=2.0)
    across_Bps = min(usual.peer_Bps, 0.92 * usual.nics * usual.nic_Bps / 8, usual.link_Bps)
    assert machine.exchange_Bps == pytest.approx(usual.peer_Bps * 8 / 7)
    assert 1 / machine.reduce_Bps == pytest.approx(2 * (7 / 8 / usual.peer_Bps + 2 / 16 / across_Bps))


def test_replicas_are_sharded_over_a_part_of_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    ask = [MLP, "--chunk-size", "4160", "--precision", "bf16"]
    network = ["--nnodes", "2", "--nics", "1", "--nic-speed", "0.1Gb/s"]
    one = asked(capsys, *ask, "--world", "2")
    both = asked(capsys, *ask, "--world", "4", "--replicas", "2", *network)
    assert (both["world"], both["replicas"]) == (4, 2)
    for key in ("device", "host"):
        assert both[key]["peak_nbytes"] == one[key]["peak_nbytes"]  # each replica is as if it were alone
    assert both["assumed"]["network_Bps"] == one["assumed"]["network_Bps"]  # within a machine
    assert both["exchanged"] == one["exchanged"] | {"across_nbytes": both["exchanged"]["across_nbytes"]}
    # Two ranks of each replica all-reduce half of the gradients each, in fp32, and a machine's two share its card.
    gradients_nbytes = 2 * both["role_nbytes"]["grad"]
    assert both["exchanged"]["across_nbytes"] == gradients_nbytes / 2
    across_s = gradients_nbytes / 2 / (0.92 * 0.1e9 / 8 / 2)
    assert both["lower_bounds"]["network_s"] == pytest.approx(one["lower_bounds"]["network_s"] + across_s)
    assert both["step_s"] >= across_s > 2 * one["step_s"]
    assert main(["estimate", *ask, "--world", "4", "--replicas", "2", *network]) == 0
    said = capsys.readouterr().out
    assert "4 ranks in 2 replicas" in said
    assert "a rank of a replica, 0.00575 GB/s to other replicas, over 2 machines" in said
    assert re.search(r"KiB, and \S+ KiB each from replica to replica", said)


def test_more_ranks_are_spread_evenly_over_machines(capsys: pytest.CaptureFixture[str]) -> None:
    words = [MLP, "--chunk-size", "4160", "--batch", "4", "--accumulate", "--device", "130KiB", "--host", "30KiB"]
    words += ["--world", "3", "--nnodes", "3"]
    options = [change["options"] for change in asked(capsys, *words, status=1)["changes"]]
    assert ["--world", "6"] in options
    assert asked(capsys, *words, "--world", "6")["fits"] is True


def test_a_first_step_that_reduces_everything_at_its_end_needs_more() -> None:
    asked = question(mesh=RankMesh(shard=6), batch=1)
    knowing = replace(asked, is_accumulating=True)
    need_nbytes = device_need(knowing).nbytes
    assert need_nbytes < device_need(asked).nbytes
    tight = replace(asked, device_nbytes=need_nbytes)
    found = {change.what: change for change in smallest_changes(tight)}
    assert found["accumulate"].options == ("--accumulate",)
    assert fits(found["accumulate"].question)


def test_where_host_is_too_small_for_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = [MLP, "--world", "2", "--batch", "1", "--chunk-size", "4160"]
    need = asked(capsys, *words)["need"]["device_nbytes"]
    words += ["--device", str(need), "--host"]
    planned_nbytes = asked(capsys, *words, "1", status=1)["needed_nbytes"]
    assert planned_nbytes > 1
    sure = question(mesh=RankMesh(shard=2), batch=1, device_nbytes=need)
    host_nbytes = host_need(sure)
    assert trains_on_demand(replace(sure, host_nbytes=host_nbytes - 1))
    said = asked(capsys, *words, str(host_nbytes - 1))
    assert said["fits"] is True
    assert said["planned"] is False
    assert said["host"]["planned_nbytes"] == host_nbytes


def test_low_precision_without_master_weights(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--precision", "bf16", "--no-master-weights", "--chunk-size", "8320")
    assert len(set(said["role_nbytes"].values())) == 1
    assert set(said["role_nbytes"]) == {"param", "grad", "exp_avg", "exp_avg_sq"}


# Bad input.

WRONG = {
    "no such preset": (["gpt:8k"], r"MODEL 'gpt:8k' is not a size of GPT; there are gpt:1m, gpt:125m"),
    "no kind of model": (["llama"], r"MODEL 'llama' is not known; allowed: a GPT"),
    "no module": (["nowhere.at.all:f"], r"cannot be loaded: ModuleNotFoundError: No module named"),
    "no function": (["tests.helpers.estimated:nothing"], r"cannot be loaded: .*nothing"),
    "not a function": (["tests.helpers.estimated:NOT_A_FUNCTION"], r"is a int, not a function"),
    "no step": (["tests.helpers.estimated:without_step"], r"returned a Head; return \(model, step\)"),
    "no loss": (["tests.helpers.estimated:without_loss"], r"a tensor of shape \(1, 64\) instead of a loss"),
    "the user's own error": (
        ["tests.helpers.estimated:failing"],
        r"raised KeyError: 'no such layer' \(.*estimated.py:\d+\)",
    ),
    "shapes that do not fit": (["tests.helpers.estimated:misfit"], r"raised RuntimeError: .*\(.*estimated.py:\d+\)"),
    "nothing to train": (["tests.helpers.estimated:empty"], r"no parameters"),
    "values are needed": (
        ["tests.helpers.estimated:branching"],
        r"Branching forward: operator aten\._local_scalar_dense",
    ),
    "nothing to recompute": (["tests.helpers.estimated:without_blocks", "--checkpointing"], r"no nn\.ModuleList"),
    "no file": (["nowhere/config.json"], r"nowhere/config.json cannot be read: No such file"),
    "a size in words": ([MLP, "--device", "much"], r"--device: 'much' is not a size in bytes"),
    "no bytes": ([MLP, "--host", "0"], r"--host is 0 bytes; give at least 1"),
    "updates in backward over ranks": (
        [MLP, "--in-backward", "--world", "2"],
        r"--in-backward is estimated for one process",
    ),
    "no speed": ([MLP, "--link", "fast"], r"--link: 'fast' is not a size"),
    "bits of nothing": ([MLP, "--nic-speed", "0Gb/s"], r"--nic-speed is 0 bytes; give at least 1"),
    "replicas of unlike sizes": ([MLP, "--world", "6", "--replicas", "4"], r"6 ranks.*4 replicas.*such as 8 ranks"),
    "replicas of one rank": ([MLP, "--world", "4", "--replicas", "4"], r"4 ranks.*4 replicas.*such as 8 ranks"),
    "machines of unlike sizes": ([MLP, "--world", "12", "--nnodes", "8"], r"12 ranks.* 8 machines.* such as 16 rank"),
    "more machines than ranks": ([MLP, "--nnodes", "2"], r"1 rank .* 2 machines .* such as 2 ranks"),
    "cards of no machine": ([MLP, "--world", "16", "--nics", "4"], r"--nics and --nic-speed .*; give --nnodes, too"),
    "two networks": (
        [MLP, "--world", "4", "--nnodes", "2", "--network", "9GB/s"],
        r"--network .*leave one of them out",
    ),
}
REFUSED = {
    "no model": [],
    "half a sample": [MLP, "--batch", "0.5"],
    "no samples": [MLP, "--batch", "0"],
    "no machine": [MLP, "--nnodes", "0"],
    "fewer than no cards": [MLP, "--nnodes", "1", "--nics", "-1"],
    "too many ranks": [MLP, "--world", str(2**40)],
    "unknown hardware": [MLP, "--hardware", "abacus"],
    "unknown precision": [MLP, "--precision", "int3"],
    "no arithmetic": [MLP, "--tflops", "nan"],
    "an option in doubt": [MLP, "--ba"],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert_refused(capsys, *words, message=message)


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_command_line_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["estimate", *REFUSED[case]])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chunkmem estimate: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        ("[]", 'has no "model_type"'),
        ('{"model_type": "abacus"}', "abacus"),
        ('{"model_type": "vit"}', "vit"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["estimate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


# Embeddings on HOST.

TABLE_NBYTES = WORDS * 64 * 4


def test_an_embedding_on_host_is_offered_where_it_is_enough() -> None:
    """At a fifth of the table on DEVICE nothing else is: its gradient is as large, whatever the batch."""
    asked_about = question("worded", batch=2, device_nbytes=TABLE_NBYTES // 5)
    changes = smallest_changes(asked_about)
    assert [change.what for change in changes] == ["cpu embedding", "device"]
    assert changes[0].options == ("--cpu-embedding",)
    assert find(changes[0].question).on_host_nbytes >= 4 * TABLE_NBYTES


def test_a_tied_embedding_is_not_offered() -> None:
    tied = Question(
        model=lambda batch: resolve_model("gpt:64x2", batch=batch, seq=16),
        batch=1,
        hardware=HARDWARE["h100"],
        device_nbytes=1 << 20,
    )
    changes = smallest_changes(tied)
    assert not any("cpu embedding" in change.what for change in changes)


def test_what_an_embedding_on_host_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """DEVICE no longer has the table, HOST has it in four roles; the sum stays, and its update takes HOST's time."""
    words = ("tests.helpers.estimated:worded", "--batch", "2", "--chunk-size", "4160", "--device", "8MiB")
    away = asked(capsys, *words, "--host", "64MiB", "--cpu-embedding")
    here = asked(capsys, *words, "--host", "64MiB")
    assert away["cpu_embedding"]
    assert away["need"]["device_nbytes"] < TABLE_NBYTES // 5 < 2 * TABLE_NBYTES < here["need"]["device_nbytes"]
    assert away["activation_nbytes"] < TABLE_NBYTES // 5 < here["activation_nbytes"]
    assert away["role_nbytes"] == here["role_nbytes"]
    assert away["host"]["peak_nbytes"] >= 4 * TABLE_NBYTES
    assert away["step_s"] > 4 * 2 * TABLE_NBYTES / HARDWARE["h100"].host_memory_Bps


def test_host_has_to_have_room_for_an_embedding() -> None:
    asked_about = question("worded", batch=2, device_nbytes=1 << 20, cpu_embedding=True, host_nbytes=2 * TABLE_NBYTES)
    assert not fits(asked_about)
    enough = host_need(asked_about)
    assert 4 * TABLE_NBYTES <= enough < 5 * TABLE_NBYTES
    assert fits(replace(asked_about, host_nbytes=enough))


@pytest.mark.parametrize("world", [1, 2])
def test_the_cap_that_is_predicted_for_an_embedding_on_host_is_enough(world: int) -> None:
    """One rank trains with it, and not with a byte less."""
    asked_about = question("worded", batch=2, cpu_embedding=True, host_nbytes=64 << 20, mesh=RankMesh(shard=world))
    need = device_need(asked_about)
    assert need.nbytes < TABLE_NBYTES // 5
    assert fits(replace(asked_about, device_nbytes=need.nbytes))
    assert not fits(replace(asked_about, device_nbytes=need.nbytes - 1))
    exchanged = find(asked_about).exchanged  # the gradient of the table to its owner, and its weights to all
    assert (exchanged.sent_nbytes + exchanged.received_nbytes >= 2 * TABLE_NBYTES) is (world > 1)
