"""The arguments that say which machine is meant: its caps, and how fast it copies and updates."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkmem.data.errors import ConfigError, PlanError
from chunkmem.data.sizes import parse_nbytes
from chunkmem.data.types import BELOW, MEMORY, PLACE, Tier, links_of
from chunkmem.plan.machine import LinkSpeed, Machine
from chunkmem.plan.model import LANE_LINKS, LANES, LINK_LANES, Plan

if TYPE_CHECKING:
    from chunkmem.runtime.tiers import TierCaps

_OPTIMIZERS = "adamw, adam, sgd, sgd-momentum, muon, another class of torch.optim in lower case, or module:Class"
_PRECISIONS = ("fp32", "bf16", "fp16")


def add_training_arguments(parser: argparse.ArgumentParser, *, seq: int, chunk_size: str) -> None:
    """Declare `--host --batch --seq --precision --optimizer --chunk-size`; what differs between commands is given."""
    add = parser.add_argument
    add_size(parser, "--host", help="cap on HOST; default: as much as it takes")
    add_count(parser, "--batch", "N", default=1, help="samples a step and rank (default: 1)")
    add_count(parser, "--seq", "N", help=f"positions a sample (default: {seq})")
    add("--precision", choices=_PRECISIONS, default="fp32", help="of weights and gradients (default: fp32)")
    add("--optimizer", default="adamw", metavar="NAME", help=f"{_OPTIMIZERS} (default: adamw)")
    add_count(parser, "--chunk-size", "NUMEL", help=f"default_chunk_size, in elements; default: {chunk_size}")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--device --host --disk --h2d --d2h --disk-read --disk-write --machine`; `machine_of` reads them."""
    add_size(parser, "--device", required=True, help="cap on DEVICE, such as 8GiB")
    add_size(parser, "--host", least=0, help="cap on HOST (default: enough for all that is not on DEVICE)")
    parser.add_argument(
        "--machine",
        metavar="FILE",
        type=Path,
        help="speeds of a saved machine, or of the machine of a saved plan (default: this machine's, measured once)",
    )
    add_speed(parser, "--h2d", help="bytes a second from HOST to DEVICE instead, such as 25GB/s")
    add_speed(parser, "--d2h", help="bytes a second from DEVICE to HOST instead, such as 25GB/s")
    add_caps_below(parser)
    for tier in BELOW:
        read, write = (f"--{lane.value}" for lane in LANES[tier])
        add_speed(parser, read, help=f"bytes a second from {tier.name}, such as 6GB/s")
        add_speed(parser, write, help=f"bytes a second to {tier.name}, such as 4GB/s")


def add_caps_below(parser: argparse.ArgumentParser) -> None:
    """Declare the caps of tiers below HOST, such as `--disk`; 0: there is none."""
    for tier in BELOW:
        told = f"memory.{tier.value}: cap on {tier.name} (default: there is none)"
        add_size(parser, f"--{tier.value}", dest=f"{tier.value}_nbytes", default=0, help=told)


def caps_below(options: argparse.Namespace) -> dict[str, int]:
    """Return the caps of tiers below HOST, by option."""
    return {f"--{tier.value}": getattr(options, f"{tier.value}_nbytes") for tier in BELOW}


def add_count(parser: argparse.ArgumentParser, option: str, metavar: str, **more: Any) -> None:
    """Declare an option that is a whole number above 0; `more` is for argparse."""
    parser.add_argument(option, metavar=metavar, type=_count, **more)


def add_size(parser: argparse.ArgumentParser, option: str, *, least: int = 1, **more: Any) -> None:
    """Declare an option of so many bytes; `more` is for argparse."""
    parser.add_argument(option, metavar="SIZE", type=partial(parse_size, option, least=least), **more)


def add_speed(parser: argparse.ArgumentParser, option: str, **more: Any) -> None:
    """Declare an option of so many bytes a second; `more` is for argparse."""
    parser.add_argument(option, metavar="SPEED", type=partial(parse_speed, option), **more)


def machine_of(options: argparse.Namespace, *, host_nbytes: int) -> Machine:
    """Return the machine that is meant; without `--host`, its HOST holds `host_nbytes`.

    Raises:
        ConfigError: something of a disk is given, and something else is missing.
        PlanError: the file of `--machine` cannot be read, or is something else.
    """
    caps = {Tier.DEVICE: options.device, Tier.HOST: host_nbytes if options.host is None else options.host}
    given = {lane: getattr(options, lane.value.replace("-", "_")) for lane in LANE_LINKS}
    for tier in BELOW:
        caps[tier] = getattr(options, f"{tier.value}_nbytes")
        for lane in LANES[tier]:
            if given[lane] and not caps[tier]:
                raise ConfigError(f"--{lane.value} is about {tier.name}; give --{tier.value}, too")
    machine = measured_machine() if options.machine is None else load_machine(options.machine)
    links = {link: replace(speed, Bps=given[LINK_LANES[link]] or speed.Bps) for link, speed in machine.links.items()}
    for link in links_of([tier for tier, nbytes in caps.items() if nbytes or tier in MEMORY]):
        lane, tier = LINK_LANES[link], max(link, key=PLACE.__getitem__)
        if link not in links and not given[lane]:
            raise ConfigError(f"--{tier.value} needs --{lane.value}: the machine has no speed of a {tier.value}")
        links.setdefault(link, LinkSpeed(given[lane] or 0.0))
    return replace(machine, links=links).with_caps(caps)


def parse_size(option: str, text: str, *, least: int = 1) -> int:
    """Return the bytes that an option gives.

    Raises:
        ConfigError: it is not a size, or less than `least`; names the option.
    """
    try:
        nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if nbytes < least:
        raise ConfigError(f"{option} is {nbytes} bytes; give at least {least}")
    return nbytes


def _count(text: str) -> int:
    """Return the number that an option gives, for argparse.

    Raises:
        ArgumentTypeError: it is not a whole number above 0.
    """
    value = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 2**31 - 1")
    return value


def parse_speed(option: str, text: str) -> float:
    """Return the bytes a second that an option gives: ``25GB``, ``25GB/s``, or in bits ``400Gb/s``, ``400Gbps``.

    Raises:
        ConfigError: it is neither; names the option.
    """
    size = text.removesuffix("/s").removesuffix("ps")
    return parse_size(option, f"{size[:-1]}B") / 8 if size.endswith("b") else float(parse_size(option, size))


def load_machine(path: Path) -> Machine:
    """Return a saved machine, or the one that a saved plan was made for.

    Raises:
        PlanError: it cannot be read, or is neither; names the file.
    """
    try:
        return Machine.load(path)
    except PlanError as error:
        try:
            return Plan.load(path).machine
        except PlanError as other:
            # Of a plan that is damaged, say how; of anything else, that it is no machine.
            raise (error if "has the format" in str(other) else other) from None


def measured_machine() -> Machine:
    """Return this machine with its default caps, and the speeds that are kept of it, or are measured now."""
    from chunkmem.optim.by_form import updates_by_form
    from chunkmem.optim.kernels import load_kernels
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.runtime.measure import cached_machine

    compute = ComputeDevice.default()
    return cached_machine(compute, default_caps(), by_form=lambda numel: updates_by_form(load_kernels(), numel))


def default_caps() -> TierCaps:
    """Return the caps of this machine's tiers where none are given."""
    from chunkmem.config import Config
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.runtime.tiers import tier_caps

    return tier_caps(Config(), ComputeDevice.default())
