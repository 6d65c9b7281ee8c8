"""What does each knob of the configuration do to a step? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.knobs.pictures import MIB, Row, by_cap, draw_all
from benchmarks.knobs.record import BASE_NUMEL, NUM_SEQUENCES, NUM_TOKENS, auto_numel, load_all, record_all
from benchmarks.knobs.sweeps import setting_of, turn_all
from benchmarks.program import carry_out, command, parse

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan and simulate every position; return the rows with all that is needed to repeat them."""
    if arguments.record:
        record_all()
    traces, recorded = load_all()
    numel = recorded["numel"]
    base = setting_of(traces, BASE_NUMEL, numel=numel)
    turns = turn_all(traces, numel=numel, auto_numel=auto_numel)
    return {
        "command": command("knobs"),
        "recorded": recorded,
        "compute_s": base.compute_s,
        "activations_nbytes": base.peak_nbytes,
        "link_Bps": base.machine.h2d_Bps,
        "rows": list(tqdm(turns, unit="plan", disable=None)),
    }


def tables(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: where the traces come from, and some rows of each knob."""
    made = results["recorded"]
    hardware, versions = made["hardware"], made["versions"]
    rows: Sequence[Row] = results["rows"]
    compute_s = results["compute_s"]
    lines = [
        f"`{results['command']}`",
        "",
        f"Traces recorded on {hardware['cpu']}, {hardware['num_cpus']} cores, {made['threads']} threads; torch "
        f"{versions['torch']}, Python {versions['python']}, {versions['os']}; load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in made['load_average_1min'])}. {made['numel'] / 1e6:.1f} M parameters, "
        f"{NUM_SEQUENCES} × {NUM_TOKENS} tokens; forward and backward {compute_s:.3f} s, activations "
        f"{results['activations_nbytes'] / MIB:.1f} MiB; base link {results['link_Bps'] / 1e6:.0f} MB/s each way.",
        "",
        "| knob | cap, MiB | position | step / (forward + backward) | copies block | stalled | in + out, MiB "
        "| peak, MiB | groups updated on DEVICE |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *("| " + " | ".join(cells) + " |" for row in _chosen(rows) for cells in [list(_cells(row, compute_s))]),
    ]
    return "\n".join(lines)


def _chosen(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield some positions of the long knobs, and all of the chunk sizes."""
    for knob, every in (("cap", 4), ("margin", 5), ("link", 2), ("static", 6), ("size", 1)):
        of_knob = [row for row in rows if row["knob"] == knob]
        # Only of the other knobs there is a series of positions for each cap.
        for series in [of_knob] if knob == "cap" else by_cap(of_knob).values():
            yield from series[::every]


def _cells(row: Row, compute_s: float) -> Iterator[str]:
    yield row["knob"]
    yield f"{row['cap_nbytes'] / MIB:.1f}"
    yield _position(row)
    if not row["fits"]:
        yield f"does not fit: needs {row['needed_nbytes'] / MIB:.1f} MiB"
        yield from [""] * 5
        return
    yield f"{row['step_s'] / compute_s:.3f}"
    yield f"{row['in_a_row_s'] / compute_s:.3f}"
    yield f"{row['stall_s'] / compute_s:.3f}"
    yield f"{row['h2d_nbytes'] / MIB:.1f} + {row['d2h_nbytes'] / MIB:.1f}"
    yield f"{row['peak_nbytes'] / MIB:.1f}"
    yield f"{row['groups_updated_on_device']} of {row['groups_updated']}"


def _position(row: Row) -> str:
    if row["knob"] == "size":
        return f"{row['position']}, padding {100 * row['padding_share']:.1f} %"
    return "none" if row["position"] is None else f"{row['position']:g}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Simulated step, traffic and peak over the knobs of planning.")
    parser.add_argument(
        "--record", action="store_true", help="record the traces again instead of using those kept here"
    )
    parser.add_argument("--pictures", type=Path, nargs="?", const=IMAGES, metavar="FOLDER",
                        help="draw the pictures (default: into docs/images)")  # fmt: skip
    arguments = parse(parser)
    if arguments.pictures is not None and not arguments.pictures.is_dir():
        parser.error(f"--pictures: there is no folder {arguments.pictures}")
    return arguments


def main() -> int:
    """Run, save, show and draw; return the exit status."""
    arguments = parse_arguments()

    def draw(results: dict[str, Any]) -> None:
        if arguments.pictures:
            draw_all(results, arguments.pictures)

    return carry_out(arguments, run, tables, readme=HERE / "README.md", then=draw)


if __name__ == "__main__":
    sys.exit(main())
