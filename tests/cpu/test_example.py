"""The example is run as a user runs it; so is the code in the documents a user reads first."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.programs import run_python
from tests.helpers.saved_files import last_contents

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
LIBRARIES = ("transformers", "accelerate", "peft", "lightning")
DOCUMENTS = (
    "README.md",
    "docs/getting-started.md",
    "docs/distributed.md",
    *(
        pytest.param(f"docs/{name}.md", marks=pytest.mark.full, id=f"docs/{name}.md")
        for name in (
            "differences",
            "checking",
            "checkpoints",
            "sharding",
            "tuning",
            "timeline",
            "migrating",
            "freezing",
        )
    ),
    pytest.param(
        "docs/integrations.md",
        marks=[
            pytest.mark.full,
            pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason="needs the extra integrations"),
        ],
        id="docs/integrations.md",
    ),
)

NOT_RUN = {"docs/activations.md": 1, "docs/pipelines.md": 6}
"""Blocks that take a model of the reader's; the last one of pipelines.md is run by tests/contrib/test_elastic.py."""
TINY = ("--model", "1m", "--batch", "2", "--seq", "16", "--sample", "4")
WRITTEN = {"checkpoints", "sample.txt"}
RECORDED = {"trace.json", "plan.json", "timeline.json"}
TEXT = b"for word in ('chunk', 'slab', 'tier', 'role'):\n    print(word)\n" * 20

# Runs main() on each list of arguments in one process, as importing torch takes longer than everything else.
ALL_IN_ONE = """
import contextlib, io, json, sys
import pretrain_gpt
answers = []
for arguments in json.load(sys.stdin):
    sys.argv = ["pretrain_gpt.py", *arguments]
    stderr = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(stderr):
        try:
            pretrain_gpt.main()
        except SystemExit as error:
            code = error.code
    answers.append((code, stderr.getvalue()))
print(json.dumps(answers))
"""

# One weight is off by the smallest step there is.
ONE_BIT_OFF = """
import pretrain_gpt, torch
train = pretrain_gpt.train_in_plain_pytorch
def train_wrongly(run):
    outcome = train(run)
    weight = outcome.weights["blocks.2.up.weight"]
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(torch.inf))
    return outcome
pretrain_gpt.train_in_plain_pytorch = train_wrongly
pretrain_gpt.main()
"""

WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
import pretrain_gpt
pretrain_gpt.main()
"""


def python(*arguments: object, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run this interpreter on one thread, with the package and the example's modules in reach.

    It sees no accelerator: there, caps cover activations too, and those of a few MiB do not fit.
    """
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_python(*arguments, cwd=cwd, stdin=stdin, env=env, paths=(ROOT, EXAMPLE.parent))


def as_a_user(*arguments: object, cwd: Path, accelerator: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the example in a process that begins with nothing, as a user does."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env |= {} if accelerator else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def train(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = python(EXAMPLE, *TINY, *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.py"
    path.write_bytes(TEXT)
    return path


def tensors(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists by their path."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, value in items for path, leaf in tensors(value, f"{name}/{key}").items()}
    return {name: tree}


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    ours, theirs = tensors(left), tensors(right)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
        assert same, name


def test_it_trains_on_the_standard_library_as_plain_pytorch_does(tmp_path: Path) -> None:
    result = as_a_user(*TINY, "--steps", 3, "--res_check", "--out", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "3 losses, 52 weights and the states of 52 parameters are bit for bit" in result.stdout
    assert re.search(r"[\d,]+ tokens/s, moved [\d.]+ MiB, stalled \d+ ms, .+ of 1\.0\d MiB", result.stdout)
    assert re.search(r"DEVICE held 1\.0\d MiB .* plain PyTorch would hold [\d.]+ MiB\n", result.stdout)
    assert re.search(r"loss \d\.\d{3}, validation loss \d\.\d{3} nats a byte", result.stdout)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*WRITTEN, *RECORDED, "memory.png", "timeline.html"}
    assert (tmp_path / "run" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "the last step: run/memory.png, run/timeline.html\n" in result.stdout
    assert len((tmp_path / "run" / "sample.txt").read_bytes()) == len("\ndef ") + 4


@pytest.mark.full
@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
def test_adapters_are_trained_over_a_base_that_moves(tmp_path: Path, text: Path) -> None:
    """What is printed in the end, and an adapter that peft loads; the loss falls."""
    folder = tmp_path / "adapter"
    options = ("--data", text, "--steps", 10, "--batch", 2, "--seq", 16, "--lr", 0.01, "--out", folder)
    result = python(ROOT / "examples" / "finetune_lora.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = re.search(r"loss ([\d.]+) to ([\d.]+), [\d,]+ tokens/s, moved [\d.]+ MiB, .*plan misses 0", result.stdout)
    assert found is not None, result.stdout
    assert float(found[2]) < float(found[1]) - 0.3
    held = re.search(r"DEVICE held ([\d.]+) MiB .* plain PyTorch would hold ([\d.]+) MiB", result.stdout)
    assert held is not None, result.stdout
    assert float(held[1]) < 0.5 * float(held[2])
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}


@pytest.mark.full
@pytest.mark.skipif(not find_spec("peft"), reason="needs peft")
def test_the_adapters_example_says_what_is_wrong(tmp_path: Path, text: Path) -> None:
    script = ROOT / "examples" / "finetune_lora.py"
    for said, options in {
        "nowhere does not exist": ("--data", "nowhere"),
        "64.00 KiB": ("--device-cap", "64KiB"),
    }.items():
        result = python(script, "--data", text, "--seq", 16, *options, cwd=tmp_path)
        assert result.returncode == 2
        assert said in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_trains_on_an_accelerator_as_plain_pytorch_does(tmp_path: Path) -> None:
    result = as_a_user(*TINY, "--steps", 3, "--res_check", cwd=tmp_path, accelerator=True)
    assert result.returncode == 0, result.stderr
    assert "3 losses, 52 weights and the states of 52 parameters are bit for bit" in result.stdout


@pytest.mark.full
def test_another_optimizer_cap_and_checkpointing_are_plain_pytorch_too(tmp_path: Path, text: Path) -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}, "default_chunk_size": 70_000}
    (tmp_path / "adam.json").write_text(json.dumps(config))
    options = ("--checkpointing", "--device-cap", "80%", "--lr", 0.002, "--config", "adam.json")
    result = train("--steps", 2, "--res_check", "--data", text, *options, cwd=tmp_path)
    assert "bit for bit" in result.stdout
    group = last_contents(tmp_path / "runs" / "gpt")["optimizer"]["param_groups"][0]
    assert (group["initial_lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (0.002, 0.1, False)


@pytest.mark.full
def test_a_disk_below_host_is_plain_pytorch_too(tmp_path: Path, text: Path) -> None:
    """The weights alone are larger than HOST."""
    (tmp_path / "small.json").write_text(json.dumps({"memory": {"host": "2MiB"}, "default_chunk_size": 70_000}))
    options = ("--config", "small.json", "--disk", "disk", "--disk-capacity", "64MiB")
    result = train("--steps", 3, "--res_check", "--data", text, *options, cwd=tmp_path)
    assert "bit for bit" in result.stdout
    assert re.search(r"DISK +all .* 64\.00 MiB", result.stdout), result.stdout
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_less_than_fp32_it_learns_and_resumes_to_the_bit(tmp_path: Path, text: Path, precision: str) -> None:
    options = ("--steps", 4, "--data", text, "--precision", precision)
    train(*options, "--out", "whole", cwd=tmp_path)
    train(*options, "--out", "parts", "--stop-after", 2, cwd=tmp_path)
    train(*options, "--out", "parts", "--resume", cwd=tmp_path)
    assert_equal(last_contents(tmp_path / "parts"), last_contents(tmp_path / "whole"))


@pytest.mark.full
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, text: Path) -> None:
    whole, parts = ("--steps", 4, "--data", text, "--out", "whole"), ("--steps", 4, "--data", text, "--out", "parts")
    train(*whole, cwd=tmp_path)
    train(*parts, "--stop-after", 2, cwd=tmp_path)
    assert last_contents(tmp_path / "parts")["extra"]["step"] == 2
    result = train(*parts, "--resume", "--res_check", cwd=tmp_path)
    assert "2 losses" in result.stdout
    assert_equal(last_contents(tmp_path / "parts"), last_contents(tmp_path / "whole"))


def test_res_check_finds_a_single_bit(tmp_path: Path, text: Path) -> None:
    result = python("-c", ONE_BIT_OFF, *TINY, "--steps", 1, "--data", text, "--res_check", cwd=tmp_path)
    assert result.returncode == 1
    assert "not what plain PyTorch gives: blocks.2.up.weight differs by up to" in result.stderr.splitlines()[-1]


@pytest.mark.full
def test_without_matplotlib_only_the_picture_is_missing(tmp_path: Path, text: Path) -> None:
    result = python("-c", WITHOUT_MATPLOTLIB, *TINY, "--steps", 2, "--data", text, "--out", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert '.[plot]" brings it' in result.stderr.splitlines()[-1]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {*WRITTEN, *RECORDED, "timeline.html"}


@pytest.mark.full
def test_one_step_has_no_plan_and_says_so(tmp_path: Path, text: Path) -> None:
    result = train("--steps", 1, "--data", text, "--out", "run", cwd=tmp_path)
    assert result.stderr.splitlines()[-1] == (
        "no report: no plan was followed (the first step is recorded, the second one planned)"
    )
    assert {path.name for path in (tmp_path / "run").iterdir()} == WRITTEN


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, text: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_bytes(b"x" * 33)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "unknown.json").write_text('{"optimiser": {}}')
    (tmp_path / "small.json").write_text('{"memory": {"host": "1GiB"}}')
    (tmp_path / "junk" / "checkpoints" / "step-1").mkdir(parents=True)
    cases: dict[str, tuple[object, ...]] = {
        "nowhere does not exist": ("--data", "nowhere"),
        "empty has 0 bytes": ("--data", "empty"),
        "folder has 0 bytes": ("--data", "folder"),
        "short has 33 bytes, and sequences of 16 need at least 34": ("--data", "short"),
        "invalid choice: 'gpt5'": ("--model", "gpt5"),
        "nowhere.json cannot be read": ("--config", "nowhere.json"),
        "broken.json is not JSON": ("--config", "broken.json"),
        "did you mean optimizer?": ("--config", "unknown.json"),
        "--model 13b takes": ("--model", "13b", "--config", "small.json"),
        "--out words.py cannot be written to": ("--out", "words.py"),
        "--out words.py/run cannot be written to": ("--out", "words.py/run"),
        "invalid integer value: 'many'": ("--steps", "many"),
        "0 is not between 1 and": ("--batch", 0),
        "optimizer.params.lr is -1.0": ("--lr", "-1"),
        "--device-cap x% is neither": ("--device-cap", "x%"),
        "memory.device is '24GiBs'": ("--device-cap", "24GiBs"),
        "memory.disk.capacity is 'much'": ("--disk", "disk", "--disk-capacity", "much"),
        "words.py cannot be used": ("--disk", "words.py", "--disk-capacity", "1MiB"),
        "new/checkpoints has no checkpoint, so there is nothing to resume": ("--out", "new", "--resume"),
        "step-1 has no .metadata, so it is no checkpoint": ("--out", "junk", "--resume", "--steps", 2),
        "unrecognized arguments: --stepz": ("--stepz", 3),
        "invalid choice: 'fp8'": ("--precision", "fp8"),
        "--res_check compares with plain PyTorch in fp32": ("--precision", "bf16", "--res_check"),
    }
    base = (*TINY, "--data", text, "--steps", 1)
    commands = [[str(part) for part in (*base, *arguments)] for arguments in cases.values()]
    result = python("-c", ALL_IN_ONE, cwd=tmp_path, stdin=json.dumps(commands))
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout)
    for (message, arguments), (code, stderr) in zip(cases.items(), answers, strict=True):
        assert code == 2, (arguments, stderr)
        assert message in stderr
        assert stderr.startswith("pretrain_gpt.py: ")
        assert stderr.count("\n") == 1, stderr


@pytest.mark.full
def test_a_cap_too_small_ends_in_one_sentence(tmp_path: Path, text: Path) -> None:
    result = python(EXAMPLE, *TINY, "--data", text, "--steps", 1, "--device-cap", "64KiB", cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert re.search(r"pretrain_gpt\.py: .*DEVICE.*64\.00 KiB", result.stderr.splitlines()[-1])


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from text import batch_at, load_text

    for name, content in {"b": b"3", "a/z": b"2", "a/b": b"1", ".git/x": b"no", "a/.y": b"no", "c": b"4567"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    text = load_text(tmp_path, seq=2)
    assert bytes(text.training.tolist()) == b"1234"
    assert bytes(text.validation.tolist()) == b"567"
    inputs, targets = batch_at(text.validation, 0, batch=3, seq=2, seed=0, device=torch.device("cpu"))
    assert inputs.tolist() == [[ord("5"), ord("6")]] * 3
    assert targets.tolist() == [[ord("6"), ord("7")]] * 3


DOES_NOT_FIT = "# does not fit"
"""Stands behind a command of a document that is to answer so."""

RUN = """
def run_command(arguments, code):
    from chunkmem.cli.main import main
    status = main(arguments)
    assert status == code, (arguments, status)
"""


def program_of(document: str) -> str:
    """Return the Python blocks of a document and the chunkmem commands of its shell blocks as one program, in order."""
    parts = [RUN]
    for language, block in re.findall(r"^```(python|sh)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        if language == "python":
            parts.append(block)
            continue
        for command in block.splitlines():
            name, *arguments = shlex.split(command, comments=True) or [""]
            if name == "chunkmem":
                parts.append(f"run_command({arguments}, {int(DOES_NOT_FIT in command)})")
    return "\n".join(parts)


def write_named_blocks(document: str, folder: Path) -> None:
    """Write the Python blocks that begin with a comment of a file's name, for commands that import them."""
    for name, block in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(block, encoding="utf-8")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_code_in_documents_runs(tmp_path: Path, name: str) -> None:
    document = (ROOT / name).read_text(encoding="utf-8")
    assert "\n```python\n" in document
    write_named_blocks(document, tmp_path)
    result = python("-c", program_of(document), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_no_code_in_documents_is_forgotten() -> None:
    run = {name if isinstance(name, str) else str(name.values[0]) for name in DOCUMENTS}
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in documents}
    blocks = {name: text.count("\n```python\n") for name, text in texts.items()}
    assert {name: count for name, count in blocks.items() if count and name not in run} == NOT_RUN


def test_the_program_of_a_document() -> None:
    document = (
        "# Title\n```\nchunkmem no\n```\n```python\nx = 1\n```\n"
        "```sh\npip install no\nchunkmem report 'a b'\n\n# chunkmem no\nchunkmem estimate m:f  # does not fit\n```\n"
        "```python\nassert x == 1\n```\n"
    )
    assert program_of(document).removeprefix(RUN).split("\n") == [
        *("", "x = 1", "", "run_command(['report', 'a b'], 0)", "run_command(['estimate', 'm:f'], 1)"),
        *("assert x == 1", ""),
    ]
    failing = "```python\nx = 1\n```\n```sh\nchunkmem report nowhere\n```\n"
    result = python("-c", program_of(failing), cwd=ROOT)
    assert result.returncode != 0
    assert "nowhere does not exist" in result.stderr


@pytest.mark.full
@pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason="needs the extra integrations")
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "finetune.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    (tmp_path / "examples").mkdir()
    (tmp_path / "run.py").write_text("\n".join([*code, "assert status == 0", "assert losses[-1] < losses[0] - 1"]))
    done = python(tmp_path / "run.py", cwd=tmp_path / "examples")
    assert done.returncode == 0, done.stderr
    assert "plan misses 0" in done.stdout
    for name in ("memory.png", "timeline.html", "model/model.safetensors"):
        assert (tmp_path / "examples" / "runs" / "notebook" / name).exists()
