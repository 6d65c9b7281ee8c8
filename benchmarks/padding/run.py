"""How much of the chunks is padding, and how many parameters share one, at the slab size chosen by itself?

Writes `results.json` beside this file and prints the table of the README. Arithmetic only: no torch, no model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.results import write
from chunkmem.layout.pack import pack, search_slab_nbytes, slab_candidates
from tests.helpers import shapes

MIB, GIB = 1 << 20, 1 << 30

CAPS = {"64 MiB": 64 * MIB, "1 GiB": GIB, "80 GiB": 80 * GIB}

MODELS: Mapping[str, Callable[[], shapes.Model]] = {
    **shapes.MODELS,
    "GPT 175B": lambda: shapes.gpt(96, 12288, context=2048),
    "MoE 9555 tensors": lambda: shapes.llama(48, 2048, 768, experts=64),
}

Row = dict[str, str | int | float]


def measure(model: str, cap: str) -> Row:
    """Search the slab size for one model under one cap on the device, then pack."""
    tensors = MODELS[model]()
    slab_nbytes = search_slab_nbytes(tensors, device_cap_nbytes=CAPS[cap])
    layout = pack(tensors, slab_nbytes=slab_nbytes)
    candidates = slab_candidates(tensors, device_cap_nbytes=CAPS[cap])
    return {
        "model": model,
        "numel": sum(tensor.numel for tensor in tensors),
        "num_tensors": len(tensors),
        "cap": cap,
        "slab_nbytes": slab_nbytes,
        "padding_share": layout.padding_nbytes / layout.chunk_nbytes,
        "num_groups": len(layout.groups),
        "tensors_per_group": len(tensors) / len(layout.groups),
        "max_slabs_per_group": max(group.num_slabs for group in layout.groups),
        "num_chunk_sizes": len({group.num_slabs for group in layout.groups}),
        "num_candidates": len(candidates),
        "least_padding_share": min(candidate.padding_share for candidate in candidates),
    }


def as_table(rows: list[Row]) -> str:
    """Format the rows as markdown."""
    lines = [
        "| model | elements | device cap | slab, MiB | padding, % | groups | mean parameters per chunk "
        "| most slabs in a chunk | chunk sizes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            row["model"],
            f"{float(row['numel']) / 1e6:,.1f} M",
            row["cap"],
            f"{float(row['slab_nbytes']) / MIB:.2f}",
            f"{100 * float(row['padding_share']):.2f}",
            row["num_groups"],
            f"{float(row['tensors_per_group']):.1f}",
            row["max_slabs_per_group"],
            row["num_chunk_sizes"],
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = [measure(model, cap) for model in MODELS for cap in CAPS]
    write(Path(__file__).with_name("results.json"), rows)
    print(as_table(rows))


if __name__ == "__main__":
    main()
