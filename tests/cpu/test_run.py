"""`chunkmem run`: an unchanged script prints in chunks what it prints in plain PyTorch, or is refused by one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.integrations.run import PostponedMoves, TakeOver
from chunkmem.report.run import load_run
from tests.helpers.scripts import SMALL, Scripts
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

NETWORK = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
"""


@pytest.mark.parametrize("arguments", [(), ("--fused",)])
def test_a_plain_loop_prints_the_same(arguments: tuple[str, ...], scripts: Scripts) -> None:
    """torch's default AdamW and its fused one have other bits: ours have those of the one that the script makes."""
    expected = scripts.plain("plain.py", *arguments)
    status, out, err = scripts.chunked("plain.py", *arguments)
    assert status == 0
    assert out == expected
    assert len(expected.splitlines()) == 7
    assert "chunkmem: last step: moved" in err
    assert "plan misses 0" in err


def test_steps_are_recorded_meanwhile(scripts: Scripts, tmp_path: Path) -> None:
    expected = scripts.plain("plain.py")
    status, out, _ = scripts.chunked("plain.py", options=("--record", str(tmp_path / "run")))
    assert (status, out) == (0, expected)
    assert load_run(tmp_path / "run").happened.plan_misses == 0


def test_the_two_adams_differ(scripts: Scripts) -> None:
    """Else the test above would not see which one is repeated."""
    assert scripts.plain("plain.py") != scripts.plain("plain.py", "--fused")


TWO_MODELS = """\
import torch
from torch import nn

torch.manual_seed(0)


def network(width, out):
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out))


generator, critic, target = network(8, 16), network(16, 1), network(8, 16).requires_grad_(False)
first = torch.optim.Adam(params=iter(generator.parameters()), lr=1e-3, betas=(0.5, 0.9))
second = torch.optim.SGD(
    [{"params": critic[0].parameters(), "lr": 1e-2}, {"params": critic[2:].parameters()}], lr=1e-3, momentum=0.9
)
free = nn.Parameter(torch.ones(()))
third = torch.optim.RMSprop(iter([free]))
for _ in range(5):
    noise = torch.randn(8, 8)
    loss = (critic(target(noise)) - free).square().mean() + critic(generator(noise).detach()).square().mean()
    for optimizer in (second, third):
        optimizer.zero_grad()
    loss.backward()
    second.step()
    third.step()
    cheated = (critic(generator(noise)) - 1).square().mean()
    first.zero_grad()
    cheated.backward()
    first.step()
    print(loss.item().hex(), cheated.item().hex(), free.item().hex())
print(type(first).__module__.partition(".")[0], type(third).__module__.partition(".")[0])
"""


def test_several_models_and_a_tensor_of_no_module(scripts: Scripts) -> None:
    """Each optimizer takes its own model over; one of a tensor that no module holds stays torch's."""
    expected = scripts.plain(TWO_MODELS)
    status, out, _ = scripts.chunked(TWO_MODELS)
    assert status == 0
    assert out.splitlines()[:-1] == expected.splitlines()[:-1]
    assert out.splitlines()[-1] == "chunkmem torch"


PHASES = (
    NETWORK
    + """
def train(optimizer):
    for x in torch.randn(4, 8, 64):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())


train(torch.optim.AdamW(model.named_parameters(), lr=1e-3))
train(torch.optim.SGD(model.parameters(), lr=1e-3))
model[0].requires_grad_(False)
train(torch.optim.NAdam([param for param in model.parameters() if param.requires_grad], lr=1e-3))
"""
)


def test_one_optimizer_after_the_other(scripts: Scripts) -> None:
    expected = scripts.plain(PHASES)
    status, out, _ = scripts.chunked(PHASES)
    assert status == 0
    assert out == expected
    assert len(out.splitlines()) == 12


class Wrapper(nn.Module):
    """Has a buffer and one child."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("scale", torch.ones(()))


def test_the_outermost_module_is_packed_frozen_layers_included() -> None:
    """The optimizer knows the last layer only, and the wrapper is as large as what it holds."""
    taken = TakeOver(SMALL)
    with taken.watching():
        wrapper = Wrapper(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)))
        optimizer = torch.optim.SGD(wrapper.model[2].parameters(), lr=0.1)
    assert taken.manager is not None
    with taken.manager as manager:
        assert isinstance(optimizer, chunkmem.Optimizer)
        assert (
            manager.state_dict().keys()
            == wrapper.state_dict().keys()
            == {
                "scale",
                *(f"model.{layer}.{name}" for layer in range(3) for name in ("weight", "bias")),
            }
        )


REFUSED = {
    "LBFGS": (
        NETWORK + "torch.optim.LBFGS(model.parameters())",
        SMALL,
        "LBFGS cannot be taken over: .* closure",
    ),
    "a refusal is not swallowed": (
        NETWORK + "try:\n    torch.optim.LBFGS(model.parameters())\nexcept Exception:\n    print('went on')",
        SMALL,
        "LBFGS cannot be taken over: .* closure",
    ),
    "another learning rate": (
        NETWORK + "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        {"optimizer": {"params": {"lr": 0.1}}},
        "optimizer.params.lr is 0.1 in the configuration, and lr is 0.0001 in the script",
    ),
    "autocast": (
        NETWORK
        + "torch.optim.AdamW(model.parameters())\nwith torch.autocast('cpu', torch.bfloat16): model(torch.ones(1, 64))",
        {"precision": "bf16"},
        'precision is "bf16" in the configuration, and torch.autocast around the model',
    ),
    "ranks of its own": (
        NETWORK + "torch.multiprocessing.spawn(print, nprocs=2)",
        SMALL,
        "the script starts ranks itself, by torch.multiprocessing, .* `chunkmem run --nproc N`",
    ),
    "ranks by a launcher": (
        NETWORK + "torch.multiprocessing.start_processes(print, nprocs=2)",
        SMALL,
        "the script starts ranks itself",
    ),
    "a parameter of no module": (
        NETWORK + "torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])",
        SMALL,
        r"a parameter of shape \(3,\)",
    ),
    "nothing is trained": ("print('done')", SMALL, "nothing was in chunks: script.py made no optimizer"),
    "no object": (NETWORK, [], "chunkmem.json: a configuration is an object with keys, not"),
    "DeepSpeed's": (NETWORK, {"zero_optimization": {}}, "this is a configuration of DeepSpeed"),
    "a configuration": (NETWORK, {"memory": {"devise": 1}}, "chunkmem.json: .*devise"),
    "fp16": (NETWORK, {"precision": "fp16"}, "fp16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_one_line(case: str, scripts: Scripts) -> None:
    script, config, expected = REFUSED[case]
    status, out, err = scripts.chunked(script, config=config)
    assert status == 2
    assert "went on" not in out
    (line,) = err.splitlines()
    assert line.startswith("chunkmem: ")
    assert re.search(expected, line), line


def test_a_script_that_fails_shows_its_own_traceback(scripts: Scripts) -> None:
    script = NETWORK + "torch.optim.AdamW(model.parameters())\ndef fail():\n    raise ValueError('mine')\nfail()\n"
    status, _, err = scripts.chunked(script)
    assert status == 1
    first, *frames = [line for line in err.splitlines() if line.startswith(("Traceback", "  File"))]
    assert first == "Traceback (most recent call last):"
    assert all('File "script.py"' in frame for frame in frames)
    assert err.splitlines()[-1] == "ValueError: mine"


@pytest.mark.parametrize(("ending", "expected"), [("sys.exit(3)", 3), ("sys.exit('no')", 1), ("sys.exit()", 0)])
def test_exit_statuses_are_the_scripts(ending: str, expected: int, scripts: Scripts) -> None:
    status, _, err = scripts.chunked(NETWORK + f"import sys\ntorch.optim.AdamW(model.parameters())\n{ending}")
    assert status == expected
    assert err == ("no\n" if expected == 1 else "")


def test_a_script_is_compiled_as_it_is(scripts: Scripts) -> None:
    """It was, with the `__future__` of what ran it: dataclasses and parsers found strings for types."""
    script = NETWORK + "torch.optim.AdamW(model.parameters())\ndef f(x: int): ...\nprint(f.__annotations__, __name__)"
    assert scripts.chunked(script)[:2] == (0, "{'x': <class 'int'>} __main__\n")


SPAWNING = (
    NETWORK
    + """\
import sys
from multiprocessing import get_context
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        other = torch.optim.SGD(nn.Linear(2, 2).parameters())
        return torch.full((64,), float(index)), type(other).__module__


if __name__ == "__main__":
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for row, kinds in DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn"):
        model(row).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(kinds, type(optimizer).__module__, sys.argv)
"""
)


@pytest.mark.full
def test_spawned_workers_take_nothing_over(tmp_path: Path) -> None:
    """As a command of its own: workers import the script by its file, and are ordinary."""
    (tmp_path / "script.py").write_text(SPAWNING)
    (tmp_path / "chunkmem.json").write_text(json.dumps(SMALL))
    command = [sys.executable, "-m", "chunkmem", "run", "chunkmem.json", "script.py", "--some", "argument"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line = "('torch.optim.sgd',) chunkmem.optim.any_class ['script.py', '--some', 'argument']"
    assert done.stdout.splitlines() == [line] * 4


def test_a_move_to_the_accelerator_waits_for_a_call() -> None:
    """A model that is trained is packed where it was built. The meta device stands for an accelerator."""
    packed: list[nn.Module] = []
    moves = PostponedMoves(packed.__contains__, at_once=("cpu",))
    to = nn.Module.to
    with moves.watching():
        trained, teacher, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))
        for model in (trained, teacher, other):
            assert model.to("meta", torch.float64) is model
            assert {(param.device.type, param.dtype) for param in model.parameters()} == {("cpu", torch.float64)}
        moves.forget(trained)
        packed.append(trained)
        teacher[1](torch.ones(1, 2, device="meta", dtype=torch.float64))
        assert [param.device.type for param in teacher.parameters()] == ["meta"] * 4
        assert other[0].weight.device.type == "cpu"
        trained(torch.ones(1, 2, dtype=torch.float64))
        assert other.to("cpu")(torch.ones(1, 2, dtype=torch.float64)).device.type == "cpu"
        assert trained.to("meta")[0].weight.device.type == "meta", "it is packed: not asked for here"
    assert nn.Module.to is to
    assert not torch.nn.modules.module._global_forward_pre_hooks
