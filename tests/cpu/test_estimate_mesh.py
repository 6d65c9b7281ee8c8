"""Estimates of ranks in a mesh: local parts of tensor-parallel ranks, stages, and the fastest mesh of a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from chunkmem.cli.main import main
from chunkmem.data.errors import ConfigError
from chunkmem.estimate.families import Family
from chunkmem.estimate.gpt import shape_of
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.mesh import RankMesh, meshes
from chunkmem.estimate.model import Model
from chunkmem.estimate.models import resolve_model
from chunkmem.estimate.question import Question, find
from chunkmem.estimate.rehearse import Setting, rehearse
from tests.helpers.estimate_command import asked, assert_refused
from tests.helpers.ranks import Team
from tests.helpers.shared_training import WORDS, Net
from tests.helpers.tensor_parallel import LENGTH, ChunkTraining, Parallel, loss_of

H100 = HARDWARE["h100"]
SMALL = ("gpt:256x4", "--seq", "64", "--precision", "bf16", "--checkpointing")


class Planned(Net):
    """The model that ranks train, with the plan that they divide it by."""

    tp_plan = {  # noqa: RUF012
        "words": "embedding_rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }


def trained(rank: int) -> dict[str, int]:
    """Train a few steps over two tensor-parallel ranks; return the bytes of each chunk."""
    torch.set_num_threads(1)
    training = ChunkTraining(Parallel({"tp": 2}))
    with training.manager as manager:
        for number in range(3):
            training.step(number)
        assert manager.trace is not None
        return {str(chunk): nbytes for chunk, nbytes in manager.trace.chunk_nbytes.items()}


def test_chunks_of_local_parts_are_those_of_real_ranks() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(model, torch.randint(0, WORDS, (2, LENGTH)))

    found = rehearse(Model("planned", Planned, loss), Setting(mesh=RankMesh(tp=2)))
    expected = {str(chunk): nbytes for chunk, nbytes in found.trace.chunk_nbytes.items()}
    with Team(2) as team:
        assert team.run(trained)[0] == expected  # of an odd vocabulary, the first rank has the larger part
    assert found.num_params == sum(p.numel() for p in Net().parameters())


def of_parts(tp: int, *, world: int = 1, **changes: Any) -> Question:
    mesh = RankMesh(shard=world, tp=tp)
    given: dict[str, Any] = {"batch": 2, "mesh": mesh, "precision": "bf16", "device_nbytes": 8 << 30, **changes}
    return Question(model=lambda batch: resolve_model("gpt:256x4", batch=batch, seq=64), **given)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_work_weights_and_activations_are_divided(checkpointing: bool) -> None:
    whole, part = (of_parts(tp, checkpointing=checkpointing).rehearsal for tp in (1, 2))
    assert part.num_params == whole.num_params
    # Norms, positions and biases of sums are whole on each rank.
    assert 0.5 < part.layout.payload_nbytes / whole.layout.payload_nbytes < 0.51
    assert part.flop == pytest.approx(whole.flop / 2, rel=0.001)
    assert 0.45 < part.activation_nbytes / whole.activation_nbytes < 0.65
    # Gathered and scattered twice a block in forward and in backward, where recomputing but for the last scatter again;
    # and once each after the embedding and before the head.
    num_exchanges = (11 if checkpointing else 8) * 4 + 4
    assert part.exchange_s == pytest.approx(num_exchanges * (2 * 64 * 256 * 2) / 2 / H100.peer_Bps)
    assert whole.exchange_s == 0


def test_groups_share_the_network_of_their_machines() -> None:
    slow = replace(H100, nics=4)
    apart = slow.divided(4)
    assert apart.exchange_Bps(2) == slow.exchange_Bps(8)
    assert apart.exchange_Bps(4) == pytest.approx(slow.exchange_Bps(16) / 4)
    assert H100.divided(16).ranks_a_machine == 1
    findings = [find(of_parts(tp, world=4)) for tp in (1, 2)]
    sent = [finding.exchanged.sent_nbytes for finding in findings]
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.02)


def test_a_configuration_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=321,
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string())
    words = (str(path), "--seq", "8", "--device", "1GiB", "--host", "1GiB")
    whole, part = asked(capsys, *words), asked(capsys, *words, "--mesh", "tp=2")
    assert part["parameters"] == whole["parameters"]
    assert part["flop"] == pytest.approx(whole["flop"] / 2, rel=0.01)
    assert part["tokens_per_s"] == pytest.approx(8 / part["step_s"] / 2)
    assert_refused(capsys, *words, "--mesh", "tp=4", message="tp=4: .* has 2 num_key_value_heads")
    assert_refused(capsys, str(path), "--seq", "9", "--mesh", "tp=2", message="positions that do not divide")


# Meshes.


def test_meshes_of_a_number_of_ranks() -> None:
    found = list(meshes(24, most_tp=8, most_stages=4))
    assert {mesh.num_ranks for mesh in found} == {24}
    assert len(set(found)) == len(found)
    assert {mesh.tp for mesh in found} == {1, 2, 3, 4, 6, 8}
    assert {mesh.stage for mesh in found} == {1, 2, 3, 4}
    assert all(mesh.shard > 1 or mesh.replicate == 1 for mesh in found)
    for mesh in found:
        assert RankMesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("mesh", "words"),
    [("shard=4", "--world 4"), ("replicate=2,shard=4", "--world 8 --replicas 2"), ("stage=2", "--stages 2")],
)
def test_other_options_are_shorthand(mesh: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said, expected = asked(capsys, *SMALL, "--mesh", mesh), asked(capsys, *SMALL, *words.split())
    ours = ("mesh", "step_s", "tokens_per_s", "mfu", "device_nbytes", "host_nbytes", "binding")  # of `--mesh stage=2`
    for name in ours if "stage" in mesh else ():
        said.pop(name), expected.pop(name, None)
    assert said == expected


def test_largest_models_have_heads_for_all_parts() -> None:
    widths = Family("gpt", 64).widths(10**9, tp=3)
    assert widths == sorted(widths, reverse=True)
    assert all(shape_of(f"{width}x1").heads % 3 == 0 for width in widths)


def test_what_is_named_as_the_smallest_change_is_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpt:1m", "--seq", "64", "--chunk-size", "70000", "--device", "4MiB", "--host", "1MiB")
    said = asked(capsys, *words, "--mesh", "shard=2,tp=2", status=1)
    assert said["change"]["options"] == ["--mesh", "shard=4,tp=2"]
    asked(capsys, *words, *said["change"]["options"])


def test_stages_are_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--batch", "8", "--device", "1GiB", "--mesh")
    alone, parts, shards = (asked(capsys, *words, f"{mesh}stage=2") for mesh in ("", "tp=2,", "shard=4,"))
    assert parts["device_nbytes"] < 0.7 * alone["device_nbytes"]
    assert shards["device_nbytes"] < alone["device_nbytes"]
    assert shards["tokens_per_s"] <= alone["tokens_per_s"]
    for one, part, shard in zip(alone["stages"], parts["stages"], shards["stages"], strict=True):
        if one["blocks"] == shard["blocks"]:  # whole weights and gradients, in addition to a shard of everything
            assert shard["nbytes"] == pytest.approx(one["nbytes"] / 4 + 2 * one["weight_nbytes"], rel=0.01)
        if one["blocks"] == part["blocks"]:
            assert part["output_nbytes"] == one["output_nbytes"] / 2
    assert alone["stages"][0]["blocks"] == parts["stages"][0]["blocks"] == shards["stages"][0]["blocks"]
    assert parts["mesh"] == {"replicate": 1, "shard": 1, "tp": 2, "stage": 2}
    tokens = 8 * 64
    assert parts["tokens_per_s"] == pytest.approx(tokens / parts["step_s"] / 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["--world 8", "--nnodes 2 --hardware gh200 --batch 4", "--world 8 --host 1GiB"])
def test_the_fastest_mesh(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, *SMALL, *words.split(), "--mesh", "auto")
    rows = said["meshes"]
    assert said["num_ranks"] == 8
    assert rows[0]["step_s"] == said["step_s"] == min(row["step_s"] for row in rows)
    best = rows[0]["mesh"]
    batch = said["batch"] // (best["replicate"] * best["shard"])
    name = ",".join(f"{dim}={size}" for dim, size in best.items())
    more = [word for word in words.split() if word not in ("--world", "8", "--batch", "4")]
    one = asked(capsys, *SMALL, *more, "--batch", str(batch), "--mesh", name)
    # Times of stages are of fewer samples, and of matrices this small they do not quite grow with them.
    rel = 0.15 if best["stage"] > 1 else 1e-6
    assert one["step_s"] == pytest.approx(rows[0]["step_s"], rel=rel)
    assert one["tokens_per_s"] == pytest.approx(rows[0]["tokens_per_s"], rel=rel)


@pytest.mark.full
def test_no_other_mesh_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, *SMALL, "--world", "8", "--batch", "16", "--mesh", "auto")
    for mesh in meshes(8, most_tp=2, most_stages=4):
        batch = 16 // (mesh.replicate * mesh.shard)
        one = asked(capsys, *SMALL, "--batch", str(batch), "--mesh", str(mesh))
        assert one["step_s"] >= 0.85 * said["step_s"], mesh


def test_models_without_a_plan_have_meshes_without_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--world", "4", "--mesh", "auto")
    assert {row["mesh"]["tp"] for row in said["meshes"]} == {1}
    assert any("does not say how its weights are divided" in reason for reason in said["refused"])


def test_no_mesh_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--world", "8", "--mesh", "auto", "--device", "4MiB", "--host", "4MiB")
    said = asked(capsys, *SMALL, *words, status=1)
    assert (said["fits"], said["meshes"]) == (False, [])
    assert {short["tier"] for short in said["too_small"]} <= {"device", "host"}
    assert main(["estimate", *SMALL, *words]) == 1
    assert "does not fit on any mesh that was tried" in capsys.readouterr().out


MLP = "tests.helpers.estimated:mlp"
WRONG = {
    "not a divisor of heads": (["gpt:256x4", "--mesh", "tp=3"], "tp=3: GPT has 2 num_attention_heads"),
    "zero": (["gpt:1m", "--mesh", "tp=0"], "tp is '0'; give a whole number above 0"),
    "negative": (["gpt:1m", "--mesh", "shard=-2"], "shard is '-2'"),
    "no number": (["gpt:1m", "--mesh", "shard"], "shard is ''"),
    "unknown": (["gpt:1m", "--mesh", "cp=2"], "'cp' is no dimension; give some of replicate, shard, tp and stage"),
    "twice": (["gpt:1m", "--mesh", "tp=2,tp=2"], "'tp' is there twice"),
    "empty": (["gpt:1m", "--mesh", ""], "'' is no dimension"),
    "too large": (["gpt:1m", "--mesh", "shard=65536,tp=65536"], "has 4294967296 ranks; give at most"),
    "replicas alone": (["gpt:1m", "--mesh", "replicate=2"], "sharded over two ranks or more; give shard, too"),
    "not over machines": (["gpt:1m", "--mesh", "shard=3,tp=2", "--nnodes", "4"], r"6 ranks \(--mesh\) on 4 machines"),
    "more stages than blocks": (["gpt:1m", "--mesh", "stage=9"], "9 stages, and the model has"),
    "and --world": (["gpt:1m", "--mesh", "tp=2", "--world", "2"], "--mesh cannot be given with --world"),
    "and --stages": (["gpt:1m", "--mesh", "tp=2", "--stages", "2"], "--mesh cannot be given with --stages"),
    "auto and --replicas": (["gpt:1m", "--mesh", "auto", "--replicas", "2"], "--mesh auto cannot be given with --rep"),
    "auto and --largest": (["gpt", "--mesh", "auto", "--world", "2", "--largest"], "--mesh auto .* with --largest"),
    "tp and --tile": (["gpt:1m", "--mesh", "tp=2", "--tile", "999"], "--tile splits whole weights"),
    "auto and one rank": (["gpt:1m", "--mesh", "auto"], "give --world, its ranks, or --nnodes, its machines"),
    "auto and few samples": (["gpt:1m", "--mesh", "auto", "--world", "97"], "cannot be divided over 97 ranks"),
    "no plan": ([MLP, "--mesh", "tp=2"], "tp=2: a Sequential does not say how its weights are divided"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    if case == "auto and few samples":
        words = [*words, "--batch", "3"]
    assert_refused(capsys, *words, message=message)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.up": "local_colwise"}, "blocks.0.up is divided as 'local_colwise', which is not estimated"),
        ({"blocks.*.experts": "colwise"}, "of tp_plan is no module of a Planned"),
    ],
)
def test_plans_that_are_refused(plan: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "tp_plan", plan)
    model = Model("planned", Planned, lambda m: loss_of(m, torch.randint(0, WORDS, (2, LENGTH))))
    with pytest.raises(ConfigError, match=message):
        rehearse(model, Setting(mesh=RankMesh(tp=2)))
