"""`chunkmem estimate --optimizer`: the chunks of states that a run with that optimizer then has, and its plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.cli.main import main
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.estimate.model import Model
from chunkmem.estimate.optimizers import is_elementwise
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.model import Plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from tests.helpers.any_class import Lion
from tests.helpers.estimate_command import asked, assert_refused
from tests.helpers.training import capped, freeze_half
from tests.helpers.zoo import ZOO, ZooModel

GPT = next(case for case in ZOO if case.name == "gpt")
MLP = "tests.helpers.estimated:mlp"
Make = Callable[[nn.Module, chunkmem.ChunkManager], torch.optim.Optimizer]


def of_class(kind: type[torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model, manager: chunkmem.Optimizer(kind, model.parameters(), manager=manager, **options)


def muon(model: nn.Module, manager: chunkmem.ChunkManager) -> torch.optim.Optimizer:
    """As docs/getting-started.md has it."""
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]  # type: ignore[operator, union-attr]
    rest = [param for param in model.parameters() if all(param is not one for one in matrices)]
    return chunkmem.Optimizer([(torch.optim.Muon, matrices), (torch.optim.AdamW, rest)], manager=manager)


@dataclass(frozen=True)
class Way:
    """A name on the command line, and what is trained with."""

    name: str
    make: Make
    precision: str = "fp32"
    is_half_frozen: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.precision}{'-half_frozen' if self.is_half_frozen else ''}"


MAKES: dict[str, Make] = {
    "adamw": lambda model, manager: chunkmem.AdamW(model.parameters(), manager=manager),
    "torch.optim:AdamW": of_class(torch.optim.AdamW),
    "sgd": of_class(torch.optim.SGD),
    "sgd-momentum": of_class(torch.optim.SGD, momentum=0.9),
    "chunkmem:SGD": lambda model, manager: chunkmem.SGD(model.parameters(), manager=manager),
    "muon": muon,
    "adafactor": of_class(torch.optim.Adafactor),
    "tests.helpers.any_class:Lion": of_class(Lion),
}
ORDINARY = (
    ("torch.optim:AdamW", "fp32", False),
    ("sgd-momentum", "fp32", True),
    ("chunkmem:SGD", "bf16", False),
    ("muon", "bf16", False),
)
WAYS = [
    pytest.param(
        Way(name, make, precision, frozen),
        id=str(Way(name, make, precision, frozen)),
        marks=[] if (name, precision, frozen) in ORDINARY else [pytest.mark.full],
    )
    for name, make in MAKES.items()
    for precision in ("fp32", "bf16")
    for frozen in (False, True)
]


def built(case: ZooModel, way: Way) -> nn.Module:
    model = case.build()
    if way.is_half_frozen:
        freeze_half(model)
    return model


@functools.cache
def estimated(way: Way) -> Rehearsal:
    model = Model("gpt", lambda: built(GPT, way), lambda model: GPT.loss(model, GPT.batch(0)))
    return rehearse(model, Setting(chunk_numel=GPT.chunk_numel, precision=way.precision, optimizer=way.name))


@dataclass(frozen=True)
class Run:
    """What three steps have recorded."""

    trace: Trace | None
    plan: Plan | None
    happened: Timeline | None
    role_nbytes: dict[str, int]


def trained(way: Way, *, device_nbytes: int, trace: Trace | None = None) -> Run:
    settings = capped(GPT, device_nbytes).to_dict() | {"precision": way.precision}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        with manager.init():
            model = built(GPT, way)
        optimizer = way.make(model, manager)
        if trace is not None:
            manager.trace = trace  # nothing is recorded: the first step has a plan already
        for _ in range(3):
            manager.backward(GPT.loss(model, GPT.batch(0)))
            optimizer.step()
            optimizer.zero_grad()
        roles = Counter[str]()
        for chunk in manager.runtime.memory.store.chunks.values():
            roles[chunk.id.role.value] += chunk.nbytes if chunk.replicas else 0
        return Run(manager.trace, manager.plan, manager.timeline(), dict(roles))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_has_the_moments_and_the_chunks_of_states_that_were_predicted(way: Way) -> None:
    run, mine = trained(way, device_nbytes=1 << 30), estimated(way)
    assert run.trace is not None
    assert [str(m) for m in mine.trace.moments] == [str(m) for m in run.trace.moments]
    assert mine.trace.chunk_nbytes == run.trace.chunk_nbytes
    assert mine.trace.digest == run.trace.digest
    predicted = {role.value: nbytes for role, nbytes in mine.role_nbytes.items() if role is not Role.GRAD}
    assert {role: run.role_nbytes[role] for role in predicted} == predicted
    assert {role for role, nbytes in run.role_nbytes.items() if nbytes} <= {*predicted, "grad"}


@pytest.mark.few(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_plan_of_the_estimate_is_followed(way: Way) -> None:
    trace = estimated(way).trace
    run = trained(way, device_nbytes=estimated(way).role_nbytes[Role.PARAM] // 2, trace=trace)
    assert run.plan is not None
    assert run.happened is not None
    assert run.happened.plan_misses == 0
    assert run.happened.peak_nbytes[Tier.DEVICE] == simulate(run.plan, trace).peak_nbytes[Tier.DEVICE]


# On the command line.


def test_the_answer_names_the_optimizer_and_counts_its_states(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--optimizer", "sgd-momentum", "--chunk-size", "4160")
    numel = 6 * (64 * 64 + 64)
    assert said["optimizer"] == "sgd-momentum"
    assert said["role_nbytes"] == dict.fromkeys(("grad", "momentum_buffer", "param"), 4 * numel)
    assert main(["estimate", MLP, "--optimizer", "sgd"]) == 0
    out = capsys.readouterr().out
    assert ", optimizer sgd\n" in out
    assert "8.00" in next(line for line in out.splitlines() if line.startswith("model data"))
    assert "arithmetic" not in out


def test_muon_s_arithmetic_is_said_not_to_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", MLP, "--optimizer", "muon"]) == 0
    assert "the arithmetic of muon is not counted" in capsys.readouterr().out


def test_tiles_are_not_offered_to_a_class_that_needs_whole_matrices(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ("tests.helpers.estimated:wide", "--device", "420KiB")
    offered = {tuple(change["options"])[:1] for change in asked(capsys, *wide, status=1)["changes"]}
    assert ("--tile",) in offered
    changes = asked(capsys, *wide, "--optimizer", "muon", status=1)["changes"]
    assert ("--tile",) not in {tuple(change["options"])[:1] for change in changes}


WRONG = {
    "no such class": (
        ["--optimizer", "adamx"],
        r"optimizer 'adamx' is not known; allowed: sgd-momentum, .*adamw.*muon",
    ),
    "no such module": (["--optimizer", "nowhere:Lion"], r"optimizer 'nowhere:Lion' cannot be loaded: ModuleNotFound"),
    "no class": (["--optimizer", "math:pi"], r"takes a class that derives from torch\.optim\.Optimizer, not 3\.14"),
    "a closure": (["--optimizer", "lbfgs"], r"LBFGS\.step\(\) needs a closure"),
    "tiles": (["--optimizer", "muon", "--tile", "1024"], r"Muon may need whole matrices, and parameter .* is a tile"),
    "states in 8 bits": (
        ["--optimizer", "sgd", "--states", "8bit"],
        r"--states and --master are about chunkmem's Adam",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_trained_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert_refused(capsys, MLP, *words, message=message)


def test_muon_needs_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tests.helpers.estimated:without_blocks", "--optimizer", "muon")
    assert_refused(capsys, *words, message=r"Muon takes the matrices of blocks, and the model has none")


@pytest.mark.full
def test_ranks_share_the_states(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, MLP, "--optimizer", "muon", "--world", "2", "--chunk-size", "4160")
    assert said["fits"]
    assert said["role_nbytes"]["momentum_buffer"] == 6 * 4 * 64 * 64


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamw", True), ("muon", False), ("chunkmem:SGD", True), ("tests.helpers.any_class:Lion", True)],
)
def test_a_class_that_says_so_is_elementwise(name: str, expected: bool) -> None:
    """Its arithmetic counts as no more than its bytes, and tiles are offered, as training allows them."""
    assert is_elementwise(name) is expected
