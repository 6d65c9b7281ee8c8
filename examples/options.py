"""The command line of `pretrain_gpt.py`, and the configuration it makes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from gpt import GPT, PRESETS

import chunkmem


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=PRESETS, default="2m", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: 2m)")
    add("--data", type=Path, metavar="PATH", help="a file or folder; default: Python's standard library")
    add("--config", type=Path, default=Path(__file__).with_name("chunkmem.json"), metavar="JSON")
    add("--device-cap", metavar="SIZE", help='such as "512MiB", or "50%%" of the weights; default: a third')
    add("--disk", type=Path, metavar="PATH", help="a folder on a fast disk, for what HOST has no room for")
    add("--disk-capacity", default="64GiB", metavar="SIZE", help="of --disk, for each process (default: 64GiB)")
    add("--out", type=Path, default=Path("runs/gpt"), metavar="DIR", help="for checkpoint, report and sample")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--res_check", action="store_true", help="train again in plain PyTorch; exit with 1 if any bit differs")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="of the computing; default: the configuration's")
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    add("--steps", type=_integer(1), default=500, metavar="N", help="of the whole training (default: 500)")
    add("--stop-after", type=_integer(1), metavar="N", help="end early, after so many steps of this run")
    add("--keep", type=_integer(1), default=2, metavar="N", help="checkpoints to keep, the last ones (default: 2)")
    add("--save-every", type=_integer(1), default=100, metavar="N", help="steps (default: 100)")
    add("--batch", type=_integer(1), default=16, metavar="N", help="sequences a step and rank (default: 16)")
    add("--seq", type=_integer(1), default=64, metavar="N", help="bytes a sequence (default: 64)")
    add("--lr", type=float, help="at its peak; default: the configuration's, which suits a small model")
    add("--seed", type=_integer(0), default=0, metavar="N")
    add("--prompt", default="\ndef ", metavar="TEXT", help="what the sample begins with")
    add("--sample", type=_integer(0), default=400, metavar="N", help="bytes to generate (default: 400)")
    return parser.parse_args()


def make_config(args: argparse.Namespace, device: torch.device, *, num_ranks: int) -> chunkmem.Config:
    """Read the configuration; the command line wins. Without any cap, DEVICE gets a third of the weights' bytes.

    Over ranks it gets as much as they have: blocks come as a whole, gradients of several chunks at a time.
    An accelerator keeps the configuration's default: its cap covers activations too, which only a step can tell.
    """
    settings = chunkmem.Config.from_json(args.config).to_dict()
    if args.lr is not None:
        settings["optimizer"]["params"]["lr"] = args.lr
    if args.precision is not None:
        settings["precision"] = args.precision
        settings["fp16"]["enabled"] = args.precision == "fp16"
    if args.res_check and settings["precision"] != "fp32":
        fail(f"--res_check compares with plain PyTorch in fp32, and the precision is {settings['precision']}")
    if args.device_cap is not None:
        settings["memory"]["device"] = _parse_cap(args.device_cap, weight_nbytes(args))
    elif settings["memory"]["device"] is None and device.type == "cpu":
        settings["memory"]["device"] = weight_nbytes(args) // (3 if num_ranks == 1 else 1)
    if args.disk is not None:
        settings["memory"]["disk"] = {"path": str(args.disk), "capacity": args.disk_capacity}
    return chunkmem.Config.from_dict(settings)


def weight_nbytes(args: argparse.Namespace) -> int:
    """Return the bytes of a model's weights without building it."""
    with torch.device("meta"):
        return sum(param.nbytes for param in GPT(PRESETS[args.model], args.seq).parameters())


def fail(message: str, *, code: int = 2) -> NoReturn:
    """End with one line on stderr; of several ranks, it says which."""
    who = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"{Path(sys.argv[0]).name}: {who}{' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def _parse_cap(text: str, whole_nbytes: int) -> int | str:
    """Turn a share such as "33%" into bytes; leave sizes such as "2GiB" to the configuration."""
    if not text.endswith("%"):
        return text
    try:
        return int(float(text[:-1]) / 100 * whole_nbytes)
    except (ValueError, OverflowError):
        fail(f"--device-cap {text} is neither a size such as 512MiB nor a share such as 33%")


def _integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of integers in ``[low, high]``."""

    def integer(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return int(text)

    return integer
