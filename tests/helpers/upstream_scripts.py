"""Training scripts that libraries ship, unchanged, and what they need of a folder, as there is no hub to ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

_SFT = ("trl/scripts/sft.py", "--dataset_name", "sentences")
_PAIRS = ("--dataset_name", "pairs")
_ONLINE = (
    *("--dataset_name", "prompts", "--reward_funcs", "rewards.num_words", "--num_generations", "2"),
    *("--max_completion_length", "6"),
)
SCRIPTS: dict[str, tuple[str, ...]] = {
    "SFT": _SFT,
    "SFT, LoRA": (*_SFT, "--use_peft", "--lora_r", "4"),
    "SFT, packed, checkpointing, bf16 autocast": (
        *_SFT,
        *("--packing", "--max_length", "16", "--gradient_checkpointing", "true", "--bf16", "true"),
    ),
    "DPO": ("trl/scripts/dpo.py", *_PAIRS),
    "KTO": ("trl/scripts/kto.py", "--dataset_name", "labels"),
    "reward model": ("trl/scripts/reward.py", *_PAIRS),
    "GRPO": ("trl/scripts/grpo.py", *_ONLINE, "--beta", "0.1"),
    "RLOO": ("trl/scripts/rloo.py", *_ONLINE),
}
"""A file of an installed package, and its arguments but for those that all have."""
_ALL = (
    *("--model_name_or_path", "base", "--output_dir", "out", "--max_steps", "4", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "2", "--report_to", "none", "--use_cpu", "--save_strategy", "no"),
    *("--disable_tqdm", "true", "--learning_rate", "1e-3", "--dtype", "float32"),
)
_WORDS = [f"w{index}" for index in range(60)]
_REWARDS = """\
def num_words(completions, **_):
    return [float(len(set(each[0]["content"].split()))) for each in completions]
"""


def prepare(folder: Path) -> None:
    """Write a base model, its tokenizer, data sets and a reward."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    known = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *_WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(folder / "base")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    numbers = range(24)
    tables = {
        "sentences": [{"text": _text(n)} for n in numbers],
        "pairs": [{"prompt": _text(n), "chosen": " " + _text(n + 1), "rejected": " " + _text(n + 2)} for n in numbers],
        "labels": [{"prompt": _text(n), "completion": " " + _text(n + 1), "label": n % 2 == 0} for n in numbers],
        "prompts": [{"prompt": [{"role": "user", "content": _text(n)}]} for n in numbers],
    }
    for name, rows in tables.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(_REWARDS)


def run(name: str, folder: Path, launcher: Sequence[str] = ()) -> tuple[list[str], dict[str, Tensor]]:
    """Run a script in a folder that is prepared; return the lines that it logs, and the weights that it saves.

    Args:
        name: of `SCRIPTS`.
        folder: where it runs.
        launcher: arguments of Python before the script's file.
    """
    file, *arguments = SCRIPTS[name]
    package, _, inside = file.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / inside
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, *launcher, str(path), *arguments, *_ALL]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{") and "train_runtime" not in line]
    weights: dict[str, Tensor] = {}
    for saved in sorted((folder / "out").glob("*.safetensors")):
        weights |= load_file(saved)
        saved.unlink()
    return [re.sub(r"'step_time': [^,}]+", "", line) for line in lines], weights


def _text(start: int) -> str:
    return " ".join(_WORDS[(start * 7 + step * step) % 60] for step in range(4 + start % 4))
