"""How far off are estimates of clusters? `published.md` tells the method."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.program import BenchmarkError, Results, carry_out, command, parse, surroundings

HERE = Path(__file__).parent
FLOAT8_TFLOPS = "1187"
"""0.6 of the dense peak of an H100 in Float8: what matrix products are assumed to reach in bf16, of that peak."""
_TRAINED = ("--precision", "bf16", "--checkpointing", "--accumulate")


@dataclass(frozen=True)
class Row:
    """What was published, and the question."""

    name: str
    mesh: str
    batch: int
    """Samples of each rank of replicate x shard."""
    published: float
    """Tokens a second, or TFLOP/s, of each card."""
    words: tuple[str, ...]
    llama: tuple[int, ...] = ()
    """Width, width of the MLP, layers, heads and vocabulary."""
    teraflop_a_token: float = 0.0
    """By the formula of what was published; 0: it has tokens a second."""


def _megatron(billions: str, width: int, layers: int, mesh: str, batch: int, teraflops: float) -> Row:
    flop = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))  # its equation (3)
    micro = ("--micro-batches", str(batch)) if "stage" in mesh else ()
    words = (f"gpt:{width}x{layers}", "--hardware", "a100", "--device", "72GiB", "--seq", "2048", *micro)
    return Row(f"Megatron-LM, GPT {billions} B", mesh, batch, teraflops, words, teraflop_a_token=flop / 1e12)


def _torchtitan(name: str, mesh: str, batch: int, tokens_per_s: int, *more: str) -> Row:
    shapes = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64), "405B": (16384, 53248, 126, 128)}
    words = ("--hardware", "h100", "--device", "86GiB", "--seq", "8192", *more)
    return Row(f"torchtitan, Llama {name}", mesh, batch, tokens_per_s, words, (*shapes[name], 128256))


def _fsdp(mesh: str, tokens_per_s: int, *machines: str) -> Row:
    words = ("--device", "72GiB", "--seq", "4096", *machines)
    return Row("PyTorch FSDP, Llama 70B", mesh, 2, tokens_per_s, words, (8192, 28672, 80, 64, 32000))


_STAGED = ("--micro-batches", "32")
_FLOAT8 = ("--tflops", FLOAT8_TFLOPS)
ROWS = (
    _torchtitan("8B", "shard=8", 2, 5762),
    _torchtitan("8B", "shard=8", 2, 8532, *_FLOAT8),
    _torchtitan("8B", "shard=128", 2, 5605),
    _torchtitan("8B", "shard=128", 2, 8380, *_FLOAT8),
    _torchtitan("70B", "shard=32,tp=8", 16, 829, *_FLOAT8),
    _torchtitan("405B", "shard=8,tp=8,stage=8", 32, 128, *_STAGED, *_FLOAT8),
    _fsdp("shard=96", 800, "--nnodes", "12", "--nics", "2", "--nic-speed", "400Gb/s"),
    _fsdp("shard=128", 370, "--nnodes", "16", "--nics", "4", "--nic-speed", "100Gb/s", "--hardware", "a100"),
    _megatron("1.7", 2304, 24, "shard=32", 16, 137),
    _megatron("3.6", 3072, 30, "shard=32,tp=2", 16, 138),
    _megatron("7.5", 4096, 36, "shard=32,tp=4", 16, 142),
    _megatron("18.4", 6144, 40, "shard=32,tp=8", 32, 135),
    _megatron("39.1", 8192, 48, "shard=32,tp=8,stage=2", 48, 138),
    _megatron("76.1", 10240, 60, "shard=32,tp=8,stage=4", 56, 140),
    _megatron("145.6", 12288, 80, "shard=24,tp=8,stage=8", 96, 148),
    _megatron("310.1", 16384, 96, "shard=15,tp=8,stage=16", 144, 155),
    _megatron("529.6", 20480, 105, "shard=9,tp=8,stage=35", 280, 163),
    _megatron("1008", 25600, 128, "shard=6,tp=8,stage=64", 512, 163),
)


def _config(shape: tuple[int, ...]) -> str:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    same = {"model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": False}
    return json.dumps(same | dict(zip(names, shape, strict=True)) | {"max_position_embeddings": 131072})


def ask(row: Row, folder: Path) -> float:
    """Return what is estimated, in the unit that was published.

    Raises:
        BenchmarkError: there is no answer, or it does not fit.
    """
    model: tuple[str, ...] = ()
    if row.llama:
        path = folder / "config.json"
        path.write_text(_config(row.llama))
        model = (str(path),)
    words = (*model, *row.words, *_TRAINED, "--mesh", row.mesh, "--batch", str(row.batch), "--json")
    done = subprocess.run([sys.executable, "-m", "chunkmem", "estimate", *words], capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"chunkmem estimate {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    rate: float = json.loads(done.stdout)["tokens_per_s"]
    return rate * (row.teraflop_a_token or 1.0)


def run(arguments: argparse.Namespace) -> Results:
    """Ask all questions."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {
                "name": row.name,
                "mesh": row.mesh,
                "batch": row.batch,
                "words": list(row.words),
                "unit": "TFLOP/s" if row.teraflop_a_token else "tokens/s",
                "published": row.published,
                "estimated": ask(row, Path(folder)),
            }
            for row in tqdm(ROWS, unit="question", disable=None)
        ]
    return {"command": command("estimate").replace(".run", ".published"), **surroundings(), "rows": rows}


def _lines(results: Results) -> Iterator[str]:
    yield f"`{results['command']}`"
    yield ""
    yield "| published | `--mesh` | `--batch` | a card | published | estimated | factor | matrices in |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in results["rows"]:
        number = "Float8" if FLOAT8_TFLOPS in row["words"] else "bf16"
        yield (
            f"| {row['name']} | `{row['mesh']}` | {row['batch']} | {row['unit']} | {row['published']:,.0f} | "
            f"{row['estimated']:,.0f} | {row['estimated'] / row['published']:.2f} | {number} |"
        )


def table(results: Results) -> str:
    """Return the Markdown of the rows."""
    return "\n".join(_lines(results))


def main() -> int:
    """Run, save and show; return the exit status."""
    parser = argparse.ArgumentParser(description="Estimates of clusters, beside what was published.")
    return carry_out(parse(parser), run, table, readme=HERE / "published.md")


if __name__ == "__main__":
    sys.exit(main())
