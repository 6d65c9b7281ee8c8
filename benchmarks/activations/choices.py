"""How long a step takes with the regions that are chosen, for steps that are written down: simulated, in milliseconds.

python -m benchmarks.activations.choices > after.txt
python -m benchmarks.activations.choices --against before.txt    # ratios to another run
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from chunkmem.activations.region_choice import RegionChoices
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.gaps import in_use_nbytes
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from tests.helpers.region_traces import Block, as_recorded, cnn_like, gpt_like

MODELS = {"gpt-8": gpt_like(8), "cnn-9": cnn_like(9), "cnn-16": cnn_like(16), "gpt-24": gpt_like(24)}
INPUTS_NBYTES = 1 << 20
LINKS_BPS = (1e9, 4e9, 16e9)
SHARES = (0.05, 0.25, 0.5, 0.75)
"""Of the activations that may be kept besides what the step needs that recomputes all."""


def _cases() -> Iterator[tuple[str, list[Block], Machine]]:
    for name, blocks in MODELS.items():
        least_nbytes = max(in_use_nbytes(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES), charges_non_model=True))
        all_nbytes = sum(block.saved_nbytes for block in blocks)
        for link_Bps in LINKS_BPS:
            for share in SHARES:
                machine = Machine(
                    int(least_nbytes + share * all_nbytes),
                    16 << 30,
                    host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps),
                    charges_non_model=True,
                    one_processor=False,
                    host_update_Bps=10e9,
                    device_update_Bps=500e9,
                    shadow_nbytes=1 << 30,
                )
                yield f"{name},{link_Bps / 1e9:g}GB/s,{share}", blocks, machine


def main() -> None:
    """Print a line for each case: its name, milliseconds of the step, regions kept, seconds of CPU to choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="output of another run: print ratios to it, too")
    before = parser.parse_args().against
    known = {} if before is None else {line.split()[0]: float(line.split()[1]) for line in before.open()}
    ratios = []
    for name, blocks, machine in _cases():
        choices = RegionChoices(lambda machine=machine: machine, PlanOptions())  # type: ignore[misc]
        began_s = time.process_time()
        kept = choices.choose(as_recorded(blocks, inputs_nbytes=INPUTS_NBYTES))
        took_s = time.process_time() - began_s
        trace = as_recorded(blocks, kept, inputs_nbytes=INPUTS_NBYTES)
        step_s = simulate(make_plan(trace, machine), trace).step_s
        ratio = step_s * 1e3 / known[name] if name in known else None
        ratios += [] if ratio is None else [ratio]
        print(name, f"{step_s * 1e3:.3f}", len(kept), f"{took_s:.2f}", *([] if ratio is None else [f"{ratio:.3f}"]))
    if ratios:
        print(f"# ratios: median {median(ratios):.4f}, worst {max(ratios):.4f}, best {min(ratios):.4f}")


if __name__ == "__main__":
    main()
