"""`check`: a model that trains alike is called equal; one that does not is named with its step and tensor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.cli.main import main
from chunkmem.estimate.optimizers import Trained
from chunkmem.runtime.events import Event
from chunkmem.testing import AdversarialLanes, CheckReport, check
from chunkmem.testing.difference import first_difference, same_bits
from chunkmem.testing.reasons import SECTIONS
from chunkmem.testing.training import Chunked, Stepped, TrainingResult
from tests.helpers.twins import cpu_only
from tests.helpers.zoo import ZOO

pytestmark = cpu_only

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in ZOO}
WIDTH = 16
LATE = [f"the smallest cap, late copies, seed {seed}" for seed in range(3)]
ALL = ["plain PyTorch again", "ample room", "the smallest cap", *LATE]


class Layers(nn.Module):
    """Eight layers, a chunk each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    @property
    def is_in_chunks(self) -> bool:
        """What no honest model asks: whether lookups of its weights are noticed."""
        return type(self.layers[0]._parameters) is not dict


def on_ones(model: nn.Module, _: int) -> Any:
    return model(torch.ones(2, WIDTH))


def checked(model: Callable[[], nn.Module], step: Callable[[Any, int], Any] = on_ones, **options: Any) -> CheckReport:
    return check(model, step, chunk_numel=WIDTH * (WIDTH + 1), **options)


# Equal.


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_gpt_is_equal_under_the_smallest_cap_and_late_copies(precision: str) -> None:
    case = CASES["gpt"]
    report = check(
        case.build,
        lambda model, index: case.loss(model, case.batch(index)),
        chunk_numel=case.chunk_numel,
        precision=precision,
    )
    assert [comparison.name for comparison in report.comparisons] == ALL
    assert report.is_equal, str(report)
    assert str(report).startswith("equal: 4 losses and ")
    _, room, *capped = report.comparisons
    assert room.device_nbytes is not None
    for comparison in capped:
        assert comparison.device_nbytes == report.smallest_nbytes < room.device_nbytes
        assert comparison.moved_nbytes > room.moved_nbytes


def test_below_the_smallest_cap_is_the_error_of_a_training() -> None:
    """So it is the smallest: a slab less is refused, with both numbers."""
    smallest_nbytes = checked(Layers, num_orders=0).smallest_nbytes
    assert smallest_nbytes is not None
    cap_nbytes = smallest_nbytes - 4 * WIDTH * (WIDTH + 1)
    report = checked(Layers, device_nbytes=cap_nbytes)
    assert not report.is_equal
    assert [comparison.name for comparison in report.comparisons] == ["plain PyTorch again", "the given cap"]
    assert report.comparisons[-1].error.startswith("CapacityError: ")
    assert f"({smallest_nbytes} bytes)" in report.comparisons[-1].error
    assert str(report).startswith("refused: the given cap: CapacityError: ")


def test_random_numbers_are_the_same_on_both_sides() -> None:
    """Dropout, layers left out by Python's generator, noise by NumPy's. The caller's own numbers are not disturbed."""

    class Random(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if random.random() < 0.7:
                    x = nn.functional.dropout(torch.tanh(layer(x)), 0.2)
            return x.square().mean() + float(np.random.rand())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    report = checked(Random, num_orders=1)
    assert report.is_equal, str(report)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_a_function_for_estimate_is_taken_as_it_is() -> None:
    assert check(lambda: (Layers(), torch.ones(2, WIDTH)), num_orders=0).is_equal
    assert check(lambda: (Layers(), {"x": torch.ones(2, WIDTH)}), num_orders=0).is_equal
    assert check(lambda: (Layers(), lambda model: {"loss": model(torch.ones(2, WIDTH))}), num_orders=0).is_equal


def test_progress_is_told_of_every_training() -> None:
    told: list[tuple[str, int]] = []
    checked(Layers, steps=3, on_step=lambda *step: told.append(step))
    assert told == [(name, num) for name in ["plain PyTorch", *ALL] for num in range(4)]


# Models that cheat.


class KeptCopy(Layers):
    """Uses a tensor that was taken out of a parameter before it was packed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[0].weight.detach()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.kept[0].square().mean()


class Alias(Layers):
    """Uses what it took out of a parameter in its first step, from its third on: the chunk stays for it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        extra = self.kept[0].sum() if len(self.kept) > 1 else 0.0
        self.kept.append(self.layers[3].weight.detach())
        return super().forward(x) + extra


class Storage(Layers):
    """Has a buffer that shows where its weights are, which changes no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[1] = float(self.is_in_chunks)
        return super().forward(x)


class Gradient(Layers):
    """Has a gradient that depends on where its weights are, from its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.layers[2].bias.register_hook(lambda g: -g if self.is_in_chunks and self.num_calls > 1 else g)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class Unseeded(Layers):
    """Draws numbers that no seed reaches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + random.SystemRandom().random()


class Counting(Layers):
    """Keeps a count that all models share."""

    num_calls: ClassVar = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls[0] += 1
        return super().forward(x) * self.num_calls[0]


CHEATS: dict[str, tuple[type[Layers], str, int, str, str, str]] = {
    "a buffer": (Storage, "ample room", 0, "buffer", "seen", "no operator has used a weight that it should not"),
    "a gradient": (
        Gradient,
        "ample room",
        1,
        "weight",
        "layers.2.bias",
        "no operator has used a weight that it should not",
    ),
    "no seed": (Unseeded, "plain PyTorch again", 0, "loss", "", "plain PyTorch does not repeat itself"),
    "global state": (Counting, "plain PyTorch again", 0, "loss", "", "plain PyTorch does not repeat itself"),
}


@pytest.mark.parametrize(("model", "training", "step", "kind", "name", "reason"), CHEATS.values(), ids=CHEATS)
def test_a_model_that_cheats_is_named(
    model: type[Layers], training: str, step: int, kind: str, name: str, reason: str
) -> None:
    report = checked(model)
    assert not report.is_equal
    *before, comparison = report.comparisons
    assert all(earlier.is_equal for earlier in before)
    assert comparison.name == training
    difference = comparison.difference
    assert difference is not None
    assert (difference.step, difference.kind, difference.name) == (step, kind, name)
    assert reason in comparison.reason
    assert str(report).startswith(f"differs: {training}, step {step}, {kind}")
    assert "\nlikely reason: " in str(report)


def test_an_alias_from_before_packing_is_refused() -> None:
    comparison = checked(KeptCopy).comparisons[-1]
    assert comparison.error.startswith("LayoutError: the memory of parameter layers.")


def test_an_alias_that_outlives_its_step_is_right() -> None:
    assert checked(Alias).is_equal


class Impatient(AdversarialLanes):
    """Computes without waiting for copies."""

    def compute_waits(self, event: Event) -> None:
        return None


def test_a_copy_that_is_not_waited_for_is_called_a_defect_of_chunkmem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkmem.testing.checking.AdversarialLanes", Impatient)
    comparison = checked(Layers).comparisons[-1]
    assert comparison.name in LATE
    assert comparison.difference is not None
    assert comparison.difference.is_nan
    assert "a defect of chunkmem" in comparison.reason


def test_an_error_in_chunks_only_is_reported() -> None:
    def replaced(model: Layers, index: int) -> Tensor:
        if index == 1:
            model.layers[1].bias = nn.Parameter(torch.zeros(WIDTH))
        return on_ones(model, index)

    def odd(model: Layers, index: int) -> Tensor:
        if index == 1 and model.is_in_chunks:
            raise KeyError("odd")
        return on_ones(model, index)

    own, foreign = (checked(Layers, step).comparisons[-1] for step in (replaced, odd))
    assert own.error.startswith("StateError: parameter layers.1.bias was packed into a chunk and cannot be replaced")
    assert own.reason == ""
    assert foreign.error.startswith(f"KeyError: 'odd' ({__file__}:")
    assert "in chunks only" in foreign.reason


def test_what_chunkmem_warns_of_is_reported() -> None:
    def in_autocast(model: Layers, index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return on_ones(model, index)

    comparisons = checked(Layers, in_autocast, num_orders=0).comparisons
    assert [len(comparison.warnings) for comparison in comparisons] == [0, 1, 1]
    assert "torch.autocast" in comparisons[1].warnings[0]


# What would prove nothing, and arguments.


def vector(model: nn.Module, _: int) -> Tensor:
    return model.layers[0](torch.ones(2, WIDTH))


def to_nan(model: nn.Module, index: int) -> Tensor:
    return on_ones(model, index) * (torch.nan if index == 2 else 1.0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "one step": (lambda: checked(Layers, steps=1), r"^steps is 1; give at least 2"),
    "fp8": (lambda: checked(Layers, precision="fp8"), r"^precision is 'fp8'; allowed: fp32, bf16, fp16$"),
    "an optimizer": (lambda: checked(Layers, optimizer="adamx"), r"^optimizer 'adamx' is not known; allowed: "),
    "no matrices in blocks": (
        lambda: check(lambda: nn.Linear(2, 2), lambda m, _: m(torch.ones(2)).sum(), optimizer="muon"),
        r"^Muon takes the matrices of blocks, and the model has none",
    ),
    "orders": (lambda: checked(Layers, num_orders=-1), r"^num_orders is -1; give at least 0$"),
    "no model": (lambda: check(lambda: 3, on_ones), r"^make\(\) returned a int; .* return the model$"),
    "a pair and a step": (lambda: check(lambda: (Layers(), 3), on_ones), r"^make\(\) returned a tuple; "),
    "no pair": (lambda: check(Layers), r"^make\(\) returned a Layers; return \(model, step\)"),
    "no loss": (lambda: checked(Layers, vector), r"^the step returned a tensor of shape \(2, 16\) instead of a loss"),
    "nan": (lambda: checked(Layers, to_nan), r"^in plain PyTorch the loss of step 2 is nan, .*; lower lr"),
    "no parameters": (lambda: checked(nn.ReLU), r"^plain PyTorch, in fp32, raised ValueError: .*empty parameter list"),
    "nothing updated": (
        lambda: checked(Layers, lambda model, index: 1e4 * on_ones(model, index), precision="fp16"),
        r"^in plain PyTorch no parameter was updated in 4 steps",
    ),
    "its own mistake": (
        lambda: checked(Layers, lambda model, _: model(torch.ones(2, 3))),
        rf"^plain PyTorch, in fp32, raised RuntimeError: .* \({__file__}:\d+\); take a model that plain PyTorch",
    ),
}


@pytest.mark.parametrize(("ask", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_checked_is_refused(ask: Callable[[], Any], says: str) -> None:
    with pytest.raises(chunkmem.ConfigError, match=says):
        ask()


# The comparison.


def outcome(**states: Tensor) -> TrainingResult:
    return TrainingResult((torch.tensor(1.0),), {}, {"w": torch.ones(2)}, {"exp_avg of w": torch.zeros(2), **states})


def test_the_first_difference_is_by_bits() -> None:
    nan = float("nan")
    assert same_bits(torch.tensor([nan, 1.0]), torch.tensor([-nan, 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1]), torch.tensor([1.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([[1.0]]))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert first_difference(outcome(), outcome(), names=("one", "other")) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            outcome(**{"exp_avg of w": torch.tensor([0.0, 0.5])}),
            "step 0, optimizer state exp_avg of w: 1 of 2 elements differ, by up to 0.5",
        ),
        (
            outcome(**{"exp_avg of w": torch.tensor([0.0, torch.nan])}),
            "step 0, optimizer state exp_avg of w: 1 of 2 elements differ, and some are nan in other",
        ),
        (outcome(step=torch.ones(())), "step 0, optimizer state step: only other has it"),
        (
            replace(outcome(), weights={"w": torch.ones(3)}, states={}),
            "step 0, weight w: torch.float32 (2,) in one, torch.float32 (3,) in other; 1 other tensors differ after "
            "that step",
        ),
        (replace(outcome(), losses=(torch.tensor(torch.nan),)), "step 0, loss: 1.0 in one, nan in other"),
    ],
)
def test_a_difference_says_what_where_and_how_much(other: TrainingResult, said: str) -> None:
    assert str(first_difference(outcome(), other, names=("one", "other"))) == said


def test_the_sections_that_reasons_name_are_there() -> None:
    lines = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in SECTIONS.values() if f"## {name}" not in lines] == []


# The command line.

REPORT_KEYS = {
    *("model", "equal", "precision", "steps", "seed", "num_params", "num_tensors", "chunk_numel", "smallest_nbytes"),
    "comparisons",
}
COMPARISON_KEYS = {"name", "equal", "device_nbytes", "moved_nbytes", "difference", "error", "reason", "warnings"}
DIFFERENCE_KEYS = {"step", "kind", "name", "detail", "num_others"}

MODELS = """
import ctypes, os, signal
import torch
from torch import nn

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def fine():
    print("what the user prints")
    return Layers(), torch.ones(2, 16)

def escapes():
    kept, calls = [], []
    def step(model):
        loss = model(torch.ones(2, 16))
        if not kept:
            kept.append(model.layers[3].weight.data_ptr())  # no operator is ever seen to read this
        calls.append(None)
        return loss + sum((ctypes.c_float * 256).from_address(kept[0])) if len(calls) > 2 else loss
    return Layers(), step

def dies():
    def step(model):
        if type(model.layers[0]._parameters) is not dict:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(torch.ones(2, 16))
    return Layers(), step

def dies_at_once():
    os._exit(3)

def fails():
    return Layers(), torch.ones(2, 3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models in it."""
    (tmp_path / "checked_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status: object = main(["check", *arguments])
    except SystemExit as exited:
        status = exited.code
    out, err = capfd.readouterr()
    assert isinstance(status, int)
    return status, out, err


@pytest.mark.full
def test_a_preset_from_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(capfd, "gpt:1m", "--seq", "16", "--orders", "1", "--json")
    assert (status, err) == (0, "")  # no progress bar: this is no terminal
    assert out.count("\n") == 1
    data = json.loads(out)
    assert data.keys() == REPORT_KEYS
    assert data["equal"] is True
    assert [comparison["name"] for comparison in data["comparisons"]] == [
        *ALL[:3],
        "the smallest cap, late copies, seed 1",
    ]
    assert all(comparison.keys() == COMPARISON_KEYS for comparison in data["comparisons"])


OPTIMIZERS = ("muon", "sgd", "sgd-momentum", "adam", "adafactor", "tests.helpers.any_class:Lion")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        pytest.param(
            name, dtype, marks=[] if (name, dtype) in (("muon", "bf16"), ("sgd", "fp32")) else pytest.mark.full
        )
        for name in OPTIMIZERS
        for dtype in ("fp32", "bf16", "fp16")
    ],
)
def test_any_optimizer_is_equal(optimizer: str, precision: str) -> None:
    num_orders = 1 if precision == "fp32" else 0
    report = check(
        lambda: CASES["gpt"].build(),
        lambda model, index: CASES["gpt"].loss(model, CASES["gpt"].batch(index)),
        chunk_numel=CASES["gpt"].chunk_numel,
        optimizer=optimizer,
        precision=precision,
        num_orders=num_orders,
    )
    assert report.is_equal, str(report)
    num_weights = len(list(CASES["gpt"].build().named_parameters()))
    assert (report.num_tensors or 0) >= (1 if optimizer == "sgd" else 2) * num_weights


@pytest.mark.parametrize("optimizer", ["muon", "sgd-momentum"])
def test_another_optimizer_in_chunks_is_not_equal(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and weights are compared: an update that is a little off is found, and named by its parameter."""
    made = Chunked.optimizer

    def slower(self: Chunked, name: str, trained: list[Trained]) -> Stepped:
        kind, params, options = trained[0]
        return made(self, name, [(kind, params, {**options, "lr": 0.9 * options["lr"]}), *trained[1:]])

    monkeypatch.setattr(Chunked, "optimizer", slower)
    report = check(Layers, on_ones, chunk_numel=WIDTH * (WIDTH + 1), optimizer=optimizer, steps=2)
    assert not report.is_equal
    assert "layers." in str(report) or "loss" in str(report)


@pytest.mark.full
def test_an_optimizer_from_the_command_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("checked_models:fine", "--orders", "1", "--optimizer", "sgd-momentum", "--chunk-size", "272")
    status, out, _ = asked(capfd, *words)
    assert status == 0
    lines = out.splitlines()
    assert "4 steps in fp32, seed 1, optimizer sgd-momentum, chunks of 272 elements" in lines[0]
    assert lines[-1] == "equal: 4 losses and 32 weights, buffers and optimizer states, to the last bit"


@pytest.mark.full
def test_a_function_from_the_command_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(
        capfd, "checked_models:fine", "--orders", "1", "--precision", "bf16", "--chunk-size", "272"
    )
    assert status == 0
    assert set(err.splitlines()) == {"what the user prints"}
    lines = out.splitlines()
    assert lines[0] == "checked_models:fine: 2,176 parameters, 4 steps in bf16, seed 1, chunks of 272 elements"
    assert lines[-1] == "equal: 4 losses and 64 weights, buffers and optimizer states, to the last bit"


@pytest.mark.full
def test_three_tiers_from_the_command_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """HOST has no room for weights, gradients and states, of 34,816 bytes; a disk has."""
    small = ("checked_models:fine", "--chunk-size", "272", "--orders", "1", "--host", "20KiB")
    status, out, _ = asked(capfd, *small)
    assert status == 1
    assert "memory.host" in out
    status, out, _ = asked(capfd, *small, "--disk", str(folder))
    assert status == 0
    assert out.splitlines()[-1] == "equal: 4 losses and 64 weights, buffers and optimizer states, to the last bit"


def test_a_read_that_escapes_has_status_1(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is read is memory that was given back: nobody knows what it holds, or whether it is there at all.

    It may hold the weight still, in the first step that reads it and in some after that.
    """
    status, out, err = asked(capfd, "checked_models:escapes", "--chunk-size", "272", "--steps", "10", "--json")
    assert (status, err) == (1, "")
    data = json.loads(out)
    assert data.keys() == REPORT_KEYS
    comparison = data["comparisons"][-1]
    assert (comparison["name"], comparison["equal"]) == ("the smallest cap", False)
    assert "a read that escaped" in comparison["reason"]
    if comparison["error"] is None:
        assert comparison["difference"].keys() == DIFFERENCE_KEYS
        assert comparison["difference"]["kind"] == "loss"
        assert comparison["difference"]["step"] >= 2, "nothing was read before that"


@pytest.mark.full
def test_a_process_that_dies_in_chunks_has_status_1(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(capfd, "checked_models:dies", "--chunk-size", "272")
    assert (status, err) == (1, "")
    assert "refused: ample room: the process ended with SIGKILL, after 0 steps of 4\n" in out
    assert "\nlikely reason: a read that escaped" in out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "required: MODEL"),
        (("gpt:1m", "--steps", "1"), "--steps is 1; give at least 2"),
        (("gpt:1m", "--steps", "many"), "argument --steps: 'many' is not a whole number"),
        (("gpt:1m", "--precision", "fp8"), "--precision: invalid choice: 'fp8'"),
        (("gpt:1m", "--device", "8 apples"), "--device: '8 apples'"),
        (("gpt:1m", "--host", "0"), "--host is 0 bytes"),
        (("gpt:1m", "--disk", "."), "--disk is for what HOST has no room for; give --host, too"),
        (("gpt:9",), "MODEL 'gpt:9' is not a size of GPT"),
        (("checked_models:nobody",), "has no attribute 'nobody'"),
        (("checked_models:fails",), "plain PyTorch, in fp32, raised RuntimeError: mat1 and mat2"),
        (
            ("checked_models:dies_at_once",),
            "in plain PyTorch: the process ended with exit status 3, after 0 steps of 4",
        ),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    status, out, err = asked(capfd, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("chunkmem")
    assert says in err
