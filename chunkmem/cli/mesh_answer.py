"""What `chunkmem estimate --mesh` says: a row for each mesh of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, counted, table
from chunkmem.data.sizes import format_nbytes
from chunkmem.report.text import format_s

if TYPE_CHECKING:
    from chunkmem.estimate.meshes import MeshChoice, MeshStep, TooSmall
    from chunkmem.estimate.question import Question

_COLUMNS = ("mesh", "step", "tokens/s a rank", "MFU", "DEVICE", "HOST", "most of it")


def mesh_answer(question: Question, choice: MeshChoice) -> CommandResult:
    """Return the answer: the fastest mesh first; where none fits, it is no."""
    fitting, too_small, num_ranks = choice.fitting, choice.too_small, question.mesh.num_ranks
    head = f"{question.name} on {num_ranks} ranks, {counted(question.batch, 'sample')} a step over all of them"
    data = {"model": question.name, "num_ranks": num_ranks, "batch": question.batch, "fits": bool(fitting)}
    rows = [mesh_data(step) for step in fitting]
    short = [
        {"mesh": asdict(each.mesh), "tier": each.shortage.tier.value, "needed_nbytes": each.shortage.needed_nbytes,
         "cap_nbytes": each.shortage.cap_nbytes}
        for each in too_small
    ]  # fmt: skip
    data |= (rows[0] if rows else {}) | {"meshes": rows, "too_small": short}
    data["refused"] = list(choice.refused)
    best = [f"fastest: --mesh {fitting[0].mesh}"] if fitting else ["does not fit on any mesh that was tried"]
    lines = [head, *best, "", *mesh_lines(fitting, too_small)]
    lines += [f"not estimated: {reason}" for reason in choice.refused]
    return CommandResult(data, "\n".join(lines), fits=bool(fitting))


def mesh_data(step: MeshStep) -> dict[str, Any]:
    """Return what ``--json`` prints of a mesh."""
    return {**vars(step), "mesh": asdict(step.mesh)}


def mesh_lines(fitting: Sequence[MeshStep], too_small: Sequence[TooSmall]) -> Iterator[str]:
    """Yield a table of meshes, and why others are too small."""
    if fitting:
        yield table(_COLUMNS, [
            (str(step.mesh), format_s(step.step_s), "" if step.tokens_per_s is None else f"{step.tokens_per_s:,.0f}",
             "" if step.mfu is None else f"{100 * step.mfu:.0f} %", format_nbytes(step.device_nbytes),
             format_nbytes(step.host_nbytes), step.binding)
            for step in fitting
        ])  # fmt: skip
    for each in too_small:
        short = each.shortage
        needed, cap = format_nbytes(short.needed_nbytes), format_nbytes(short.cap_nbytes)
        yield f"{each.mesh} does not fit: {short.tier.name} needs {needed}, and has {cap}"
