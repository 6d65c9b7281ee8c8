"""`chunkmem run` over unchanged scripts of training libraries: what they print, and their checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkmem.contrib.deepspeed.convert import convert
from chunkmem.data.errors import ConfigError, StateError
from chunkmem.integrations.trainer import ChunkmemArguments, TrainsInChunks
from tests.contrib.test_deepspeed import OF_TRANSFORMERS
from tests.helpers.libraries import decaying, llama, rows
from tests.helpers.scripts import SMALL, Scripts
from tests.helpers.twins import cpu_only
from tests.helpers.upstream_scripts import SCRIPTS, prepare, run

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments

pytestmark = [
    pytest.mark.full,
    cpu_only,
    pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning", "ignore::FutureWarning"),
]

TRAINER = (
    *("--output_dir", "out", "--max_steps", "4", "--logging_steps", "1", "--report_to", "none", "--use_cpu"),
    *("--disable_tqdm", "1", "--per_device_train_batch_size", "2"),
)
UNSAVED = (*TRAINER, "--save_strategy", "no")

CASES: dict[str, tuple[str, ...]] = {
    "Trainer": ("trainer.py", *UNSAVED),
    "Trainer in bf16 autocast": ("trainer.py", *UNSAVED, "--bf16"),
    "Trainer that accumulates": ("trainer.py", *UNSAVED, "--gradient_accumulation_steps", "2", "--weight_decay", "0.1"),
    "Trainer with checkpointing": ("trainer.py", *UNSAVED, "--gradient_checkpointing"),
    "Trainer with another optimizer": ("trainer.py", *UNSAVED, "--optim", "adafactor"),
    "Trainer that loads its best": (
        *("trainer.py", *TRAINER, "--save_strategy", "steps", "--save_steps", "2"),
        *("--eval_strategy", "steps", "--eval_steps", "2", "--load_best_model_at_end"),
    ),
    "accelerate": ("accelerated.py",),
    "accelerate in bf16 autocast": ("accelerated.py", "--mixed_precision", "bf16"),
    "Lightning": ("lightning_fit.py",),
    "Lightning that resumes": ("lightning_fit.py", "--twice"),
    "Lightning in bf16 autocast": ("lightning_fit.py", "--precision", "bf16-mixed"),
}


def told(out: str) -> list[str]:
    """What was printed but times."""
    return [line for line in out.splitlines() if "train_runtime" not in line and "eval_runtime" not in line]


@pytest.mark.parametrize("case", CASES)
def test_an_unchanged_script_prints_the_same(case: str, scripts: Scripts) -> None:
    script, *arguments = CASES[case]
    if script.startswith("lightning"):
        pytest.importorskip("lightning")
    expected = told(scripts.plain(script, *arguments))
    status, out, err = scripts.chunked(script, *arguments)
    assert status == 0, err
    assert told(out) == expected
    assert len(expected) > 4
    assert "chunkmem: last step: moved" in err


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_libraries_ship(name: str, tmp_path: Path) -> None:
    for package in ("trl", "datasets", "peft"):
        pytest.importorskip(package)
    prepare(tmp_path)
    (tmp_path / "chunkmem.json").write_text(json.dumps({"memory": {"device": "64KiB"}, "default_chunk_size": 2304}))
    lines, weights = run(name, tmp_path)
    found, found_weights = run(name, tmp_path, ("-m", "chunkmem", "run", "chunkmem.json"))
    assert found == lines
    assert found_weights.keys() == weights.keys()
    assert all(torch.equal(value, found_weights[key]) for key, value in weights.items())
    assert len(lines) >= 4


def test_resumed_from_a_checkpoint_of_plain_pytorch(scripts: Scripts) -> None:
    """And the other way round: one run, of which each half is of one kind."""
    saving = (*TRAINER, "--save_strategy", "steps", "--save_steps", "2")
    expected = told(scripts.plain("trainer.py", *saving))
    resuming = (*saving, "--resume_from_checkpoint", "out/checkpoint-2")
    assert told(scripts.chunked("trainer.py", *resuming)[1])[-5:] == expected[-5:]
    assert scripts.chunked("trainer.py", *saving)[0] == 0
    assert told(scripts.plain("trainer.py", *resuming))[-5:] == expected[-5:]


OVER_RANKS = {
    "Trainer": ("trainer.py", *TRAINER, "--save_strategy", "steps"),
    "accelerate": ("accelerated.py",),
    "Lightning": ("lightning_fit.py", "--devices", "2"),
}


def printed(*command: str, status: int = 0) -> list[str]:
    """What a module run as a program prints, in no order of ranks."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return sorted(told(done.stdout if status == 0 else done.stderr))


@pytest.mark.parametrize("case", OVER_RANKS)
def test_two_ranks_that_torchrun_starts(case: str, scripts: Scripts, tmp_path: Path) -> None:
    """DDP's sum of two gradients has no order, so the bits are the same; all ranks take part in checkpoints."""
    script, *arguments = OVER_RANKS[case]
    pytest.importorskip("lightning" if case == "Lightning" else "transformers")
    (tmp_path / "chunkmem.json").write_text(json.dumps(SMALL))
    file = str(scripts.file(script))
    expected = printed("torch.distributed.run", "--standalone", "--nproc-per-node", "2", file, *arguments)
    assert printed("chunkmem", "run", "--nproc", "2", "chunkmem.json", file, *arguments) == expected
    assert len(expected) > 4


def test_ranks_that_lightning_starts_itself(scripts: Scripts, tmp_path: Path) -> None:
    """It runs the script in plain Python, whose ranks waited for those in chunks, and these for them."""
    pytest.importorskip("lightning")
    (tmp_path / "chunkmem.json").write_text(json.dumps(SMALL))
    script = str(scripts.file("lightning_fit.py"))
    (line,) = [
        line
        for line in printed("chunkmem", "run", "chunkmem.json", script, "--devices", "2", status=2)
        if line.startswith("chunkmem: ")
    ]
    assert "Lightning has started other ranks itself" in line
    assert "--nproc N" in line


@pytest.mark.parametrize("devices", ["1", "2"])
def test_lightning_by_its_strategy(
    devices: str, scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that Lightning starts train in chunks, too: all of them make the strategy."""
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chunkmem.json").write_text(json.dumps(SMALL))
    script = str(scripts.file("lightning_fit.py"))

    def fit(*words: str) -> list[str]:
        command = (sys.executable, script, "--devices", devices, "--twice", *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return sorted(line for line in done.stdout.splitlines() if line)

    expected = fit("--strategy", "ddp")
    assert fit("--chunkmem", "chunkmem.json") == expected
    assert sum(line.startswith("validated") for line in expected) >= 18


@pytest.mark.parametrize("size", ["1", "2"])
def test_accelerate_by_its_accelerator(size: str, scripts: Scripts, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "chunkmem.json").write_text(json.dumps(SMALL))
    script = str(scripts.file("accelerated.py"))
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node", size, script)
    expected = printed(*command)
    assert printed(*command, "--chunkmem", str(tmp_path / "chunkmem.json")) == expected
    assert len(expected) > 4


CONTRADICTED = {
    "autocast": (("--bf16",), {"precision": "bf16"}, 'precision is "bf16" in the configuration, and accelerate'),
    "clipping": ((), {"gradient_clipping": 0.5}, "gradient_clipping is 0.5 in the configuration, and max_grad_norm"),
    "learning rate": (
        *(("--learning_rate", "1e-3"), {"optimizer": {"params": {"lr": 0.1}}}),
        "lr is 0.1 in the configuration, and lr is 0.001",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_arguments_that_contradict_the_configuration(case: str, scripts: Scripts) -> None:
    arguments, config, expected = CONTRADICTED[case]
    status, _, err = scripts.chunked("trainer.py", *UNSAVED, *arguments, config=config)
    assert status == 2
    assert err.splitlines()[-1].startswith("chunkmem: ")
    assert expected in err.splitlines()[-1]


def written_out() -> dict[str, Any]:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {"precision": "auto", "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": params}}


@pytest.mark.parametrize("make", [written_out, lambda: convert(OF_TRANSFORMERS).values], ids=["auto", "DeepSpeed's"])
def test_auto_is_what_the_arguments_say(make: Callable[[], dict[str, Any]], scripts: Scripts) -> None:
    """A configuration whose every value is auto trains as one that says nothing."""
    expected = told(scripts.plain("trainer.py", *UNSAVED, "--bf16"))
    status, out, err = scripts.chunked("trainer.py", *UNSAVED, "--bf16", config={**SMALL, **make()})
    assert status == 0, err
    assert told(out) == expected


# a flag


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "trainer.py")
SHORT = (
    *(
        "--output_dir",
        "out",
        "--max_steps",
        "4",
        "--logging_steps",
        "1",
        "--report_to",
        "none",
        "--use_cpu",
        "--seq",
        "16",
    ),
    *("--disable_tqdm", "1", "--save_strategy", "steps", "--save_steps", "2", "--data", __file__),
)
FLAG = ("--chunkmem", "chunkmem.json")


@pytest.fixture
def flagged(scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What the example prints, losses and norms, with some arguments."""
    monkeypatch.syspath_prepend(Path(EXAMPLE).parent)
    (tmp_path / "chunkmem.json").write_text(json.dumps({"memory": {"device": "512KiB"}}))

    def run(*arguments: str) -> list[str]:
        return [line for line in told(scripts.plain(EXAMPLE, *SHORT, *arguments)) if "loss" in line]

    return run


def test_a_flag_of_a_trainer_script(flagged: Callable[..., list[str]]) -> None:
    """Its checkpoints resume with the flag and without it, whichever wrote them."""
    expected = flagged()
    assert len(expected) == 4
    assert flagged(*FLAG, "--resume_from_checkpoint", "out/checkpoint-2") == expected[2:]
    assert flagged(*FLAG) == expected
    assert flagged("--resume_from_checkpoint", "out/checkpoint-2") == expected[2:]


def test_a_flag_with_what_contradicts_it(flagged: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "chunkmem.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    with pytest.raises(ConfigError, match=r"gradient_clipping is 0\.5 in the configuration, and max_grad_norm is 1\.0"):
        flagged(*FLAG)


def test_an_optimizer_that_was_made_before(tmp_path: Path) -> None:
    @dataclass
    class Arguments(ChunkmemArguments, TrainingArguments):  # type: ignore[misc]
        pass

    class ChunkTrainer(TrainsInChunks, Trainer):  # type: ignore[misc]
        pass

    (tmp_path / "chunkmem.json").write_text("{}")
    args = Arguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], chunkmem=str(tmp_path / "chunkmem.json"))
    model = llama()
    made = torch.optim.AdamW(model.parameters())
    trainer = ChunkTrainer(model=model, args=args, train_dataset=rows(), optimizers=(made, decaying(made)))
    with pytest.raises(StateError, match=r"optimizers=.* pass optimizer_cls_and_kwargs"):
        trainer.train()
