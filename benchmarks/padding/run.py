"""How much of the chunks is padding, how many parameters share one, and how even are the shares of ranks?

At the slab size chosen by itself. Writes `results.json` and `ranks.json` beside this file and prints the tables of the
README. Arithmetic only: no torch, no model is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.results import write
from chunkmem.data.layout_pack import choose_slab_nbytes, pack, search_slab_nbytes, slab_candidates
from tests.helpers import shapes

MIB, GIB = 1 << 20, 1 << 30

CAPS = {"64 MiB": 64 * MIB, "1 GiB": GIB, "80 GiB": 80 * GIB}

MODELS: Mapping[str, Callable[[], shapes.Model]] = {
    **shapes.MODELS,
    "GPT 175B": lambda: shapes.gpt(96, 12288, context=2048),
    "MoE 9555 tensors": lambda: shapes.llama(48, 2048, 768, experts=64),
}

RANKS = (2, 4, 8, 16, 32, 64, 128)

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


def shares(model: str, num_ranks: int) -> Row:
    """What the fullest of so many ranks owns of the chunks of a role, as a multiple of the mean."""
    tensors = MODELS[model]()
    slab_nbytes = choose_slab_nbytes(tensors, chunk_numel=None, device_cap_nbytes=CAPS["80 GiB"], num_ranks=num_ranks)
    layout = pack(tensors, slab_nbytes=slab_nbytes, num_ranks=num_ranks)
    owned, in_turn = Counter[int](), Counter[int]()
    for group in layout.groups:
        owned[group.owner] += group.nbytes
        in_turn[group.id % num_ranks] += group.nbytes
    mean_nbytes = layout.chunk_nbytes / num_ranks
    return {
        "model": model,
        "num_ranks": num_ranks,
        "fullest": max(owned.values()) / mean_nbytes,
        "fullest_in_turn": max(in_turn.values()) / mean_nbytes,
        "largest_group": max(group.nbytes for group in layout.groups) / mean_nbytes,
    }


def as_rank_table(rows: list[Row]) -> str:
    """Format the shares of ranks as markdown: a line for each model, by bytes and in turn."""
    lines = [f"| model, ranks | {' | '.join(map(str, RANKS))} |", "|---|" + "---:|" * len(RANKS)]
    for model in MODELS:
        for key, way in (("fullest", "by bytes"), ("fullest_in_turn", "in turn")):
            cells = [f"{float(row[key]):.2f}" for row in rows if row["model"] == model]
            lines.append(f"| {model}, {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    by_ranks = [shares(model, num_ranks) for model in MODELS for num_ranks in RANKS]
    write(Path(__file__).with_name("ranks.json"), by_ranks)
    print(f"\n{as_rank_table(by_ranks)}")


if __name__ == "__main__":
    main()
