"""`chunkmem chunk-size`: what each chunk size would waste."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, table
from chunkmem.cli.machine import add_size, default_caps
from chunkmem.data.errors import ChunkmemError, ConfigError
from chunkmem.data.layout_pack import SlabCandidate, search_slab_nbytes, slab_candidates
from chunkmem.data.sizes import format_nbytes, shown

if TYPE_CHECKING:
    from chunkmem.data.layout import TensorSpec

NAME = "chunk-size"
SUMMARY = "what each chunk size would waste"
DESCRIPTION = """\
List chunk sizes for a model, with what each would leave unused, and mark the one that "default_chunk_size": "auto"
takes. Nothing is built: the model takes no memory.

  chunkmem chunk-size gpt:7b --device 24GiB
  chunkmem chunk-size path/to/config.json --device 80GiB --json | jq .best.chunk_numel
  chunkmem chunk-size mypackage.train:make --device 8GiB

MODEL is named as for chunkmem estimate. The smaller the cap on DEVICE, the smaller chunks may be, so that there are
enough of them to choose from. The number of elements can be pasted into the JSON configuration."""

_FP32_NBYTES = 4
_NUM_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", help="gpt:7b, a config.json of transformers, or module:function")
    add_size(parser, "--device", help="cap on DEVICE, such as 8GiB (default: what this machine's would be)")


def run(options: argparse.Namespace) -> CommandResult:
    """Answer what each candidate would cost.

    Raises:
        ChunkmemError: the model cannot be built, or has nothing to pack.
    """
    tensors = _tensors(options.model)
    device_nbytes = options.device or default_caps().device_nbytes
    found = slab_candidates(tensors, device_cap_nbytes=device_nbytes)
    best_nbytes = search_slab_nbytes(tensors, device_cap_nbytes=device_nbytes)
    best = next(candidate for candidate in found if candidate.slab_nbytes == best_nbytes)
    data = {
        "model": options.model,
        "device_cap_nbytes": device_nbytes,
        "num_tensors": len(tensors),
        "numel": sum(tensor.numel for tensor in tensors),
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "best": _row(best),
        "candidates": [_row(candidate) for candidate in found],
    }
    return CommandResult(data, _text(data, found, best))


def _tensors(model: str) -> list[TensorSpec]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from chunkmem.estimate.models import resolve_model
    from chunkmem.packing.packer import tensor_specs

    resolved = resolve_model(model, batch=1, seq=None)
    try:
        with FakeTensorMode():
            tensors = tensor_specs(list(resolved.build().named_parameters()))
    except ChunkmemError:
        raise
    except Exception as error:  # what a user's function raises can be anything
        raise ConfigError(f"MODEL {shown(model)} cannot be built: {type(error).__name__}: {error}") from error
    if not tensors:
        raise ConfigError(f"MODEL {shown(model)} has no parameters, so there is nothing to put into chunks")
    return tensors


def _row(candidate: SlabCandidate) -> dict[str, Any]:
    return {
        "chunk_numel": candidate.slab_nbytes // _FP32_NBYTES,
        "chunk_nbytes": candidate.slab_nbytes,
        "padding_share": candidate.padding_share,
        "num_groups": candidate.num_groups,
        "tensors_per_group": candidate.tensors_per_group,
    }


def _text(data: dict[str, Any], found: list[SlabCandidate], best: SlabCandidate) -> str:
    few = sorted(found, key=lambda candidate: (candidate is not best, candidate.padding_share))[:_NUM_SHOWN]
    rows = [
        (
            f"{candidate.slab_nbytes // _FP32_NBYTES}",
            format_nbytes(candidate.slab_nbytes),
            f"{100 * candidate.padding_share:.2f} %",
            f"{candidate.num_groups}",
            f"{candidate.tensors_per_group:.1f}",
            "<- best" if candidate is best else "",
        )
        for candidate in sorted(few, key=lambda candidate: candidate.slab_nbytes)
    ]
    header = ("elements (fp32)", "size", "unused", "chunks a role", "tensors a chunk", "")
    return "\n".join([
        f"{data['model']}: {data['numel']:,} parameters in {data['num_tensors']} tensors, "
        f"{format_nbytes(data['nbytes'])}; cap on DEVICE {format_nbytes(data['device_cap_nbytes'])}",
        "",
        table(header, rows),
        f"{len(rows)} of {len(found)} sizes, those that leave least unused; --json prints all",
        "",
        f'"default_chunk_size": {best.slab_nbytes // _FP32_NBYTES}',
    ])  # fmt: skip
