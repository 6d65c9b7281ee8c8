"""What an installed package has to do at least; `tests/matrix.py` runs it in a folder that has nothing else.

python smoke.py              # with kernels compiled here
python smoke.py --prebuilt   # with those that the wheel carries

It takes seconds: the native kernels; training in fp32 as in plain PyTorch, bit for bit, and in bf16; a checkpoint; the
first example of the README; the commands; transformers' Trainer, if there is one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import chunkmem

STEPS = 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_training() -> None:
    """fp32: the bits of plain PyTorch, through a checkpoint."""
    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True), STEPS)
    config = chunkmem.Config.from_dict({"memory": {"device": "64KiB", "host": "8MiB"}, "default_chunk_size": 4200})
    with tempfile.TemporaryDirectory() as folder:
        for steps in (STEPS // 2, STEPS):
            with chunkmem.ChunkManager(config) as manager:
                model = manager.wrap(build())
                optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
                if steps == STEPS:
                    manager.load(f"{folder}/half", optimizer)
                    for step in range(STEPS // 2, STEPS):
                        torch.manual_seed(step)
                        model(torch.randn(4, 64)).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    weights = manager.state_dict()
                    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
                else:
                    train(model, optimizer, steps)
                    manager.save(f"{folder}/half", optimizer)


def check_low_precision() -> None:
    """bf16: master weights, the native kernels, plans."""
    config = chunkmem.Config.from_dict({"precision": "bf16", "memory": {"device": "64KiB", "host": "8MiB"}})
    with chunkmem.ChunkManager(config) as manager:
        model = manager.wrap(build())
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        train(model, optimizer, STEPS + 2)
        timeline: Any = manager.timeline()
        assert timeline.plan_misses == 0


def check_kernels(package: Path, is_prebuilt: bool) -> None:
    """The native kernels are in use and have the bits of the reference, so those of any other build."""
    from chunkmem.optim.kernels import Kernels, differing_calls, load_kernels
    from chunkmem.runtime.storage import default_backend

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels = load_kernels()
        assert is_prebuilt or default_backend().name != "resize"
    assert kernels.native_devices == {"cpu"}
    (loaded,) = torch.ops.loaded_libraries
    assert (Path(loaded).parent == package / "csrc") is is_prebuilt, f"{loaded} is in use"
    assert differing_calls(kernels, "cpu", expected=Kernels(frozenset())) == []


def check_readme() -> None:
    """The first example, which the package's metadata holds, in fp32 and in bf16."""
    readme = importlib.metadata.metadata("chunkmem").get_payload()
    example = readme.partition("```python\n")[2].partition("```")[0]
    cap = '"memory": {"device": "48MiB"}'
    assert cap in example
    for precision in ("fp32", "bf16"):
        exec(example.replace(cap, f'{cap}, "precision": "{precision}"'), {"__name__": "readme"})


def check_trainer() -> None:
    """Two steps of a small Llama under a cap end with the weights of two steps without."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8) + row, "labels": torch.arange(8) + row} for row in range(4)]
    shape = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    weights = []
    for device in (None, "128KiB"):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(shape)
        arguments = TrainingArguments("trainer", max_steps=2, report_to="none", use_cpu=True, save_strategy="no")
        if device is None:
            Trainer(model=model, args=arguments, train_dataset=rows).train()
            weights.append(model.state_dict())
            continue
        with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": device}})) as manager:
            model = manager.wrap(model)
            optimizer = (chunkmem.AdamW, {"manager": manager, "lr": arguments.learning_rate, "weight_decay": 0.0})
            Trainer(model=model, args=arguments, train_dataset=rows, optimizer_cls_and_kwargs=optimizer).train()
            weights.append(manager.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def check_commands() -> None:
    """The package is imported within 50 ms of CPU time; commands answer."""

    def said_by(*arguments: str) -> str:
        python = [sys.executable, *(["-I"] if sys.flags.isolated else [])]
        return subprocess.run([*python, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout

    timed = "import time; t = time.process_time(); import chunkmem; print(time.process_time() - t)"
    seconds = min(float(said_by("-c", timed)) for _ in range(5))
    assert seconds <= 0.05, f"import chunkmem takes {seconds} s of CPU time"
    command = ("-m", "chunkmem")
    assert said_by(*command, "--version") == f"chunkmem {chunkmem.__version__}\n"
    assert json.loads(said_by(*command, "info", "--json"))["updates"]["is_native"]
    assert said_by(*command, "estimate", "gpt:124m", "--device", "24GiB")


def main() -> None:
    installed = Path(chunkmem.__file__).resolve()
    assert "site-packages" in installed.parts, f"{installed} is a checkout"
    check_kernels(installed.parent, "--prebuilt" in sys.argv)
    check_training()
    check_low_precision()
    check_readme()
    if importlib.util.find_spec("transformers"):
        check_trainer()
    check_commands()
    print(f"chunkmem {chunkmem.__version__} on Python {platform.python_version()} with torch {torch.__version__}: ok")


if __name__ == "__main__":
    main()
