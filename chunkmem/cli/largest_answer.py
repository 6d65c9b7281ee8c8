"""What `chunkmem estimate --largest` says: the largest model that fits, what binds, and what is said of any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult
from chunkmem.cli.estimate_answer import billions, yes
from chunkmem.sizes import format_nbytes

if TYPE_CHECKING:
    from chunkmem.errors import CapacityError
    from chunkmem.estimate.largest import Largest, Tried


def answer(found: Largest) -> CommandResult:
    """Return the answer; without a model that fits, it is no."""
    from chunkmem.estimate.question import device_need

    fitting, beyond = found.fitting, found.beyond
    limit = None if beyond is None else _limit(beyond)
    if fitting is None or fitting.finding is None:
        assert beyond is not None
        line = f"no model fits: with {_layers(beyond.layers)}, {name_of(beyond)} lacks room: {_why(beyond)}"
        return CommandResult({"fits": False, "largest": None, "limit": limit}, line, fits=False)
    need = device_need(fitting.question, fitting.rehearsal)
    said = yes(fitting.question, fitting.rehearsal, None, need, fitting.finding)
    name, params = name_of(fitting), fitting.rehearsal.num_params
    data = {"model": name, "width": fitting.width or None, "layers": fitting.layers, "parameters": params,
            "num_tried": found.num_tried}  # fmt: skip
    batch, rate = fitting.question.batch, said.data["tokens_per_s"]
    at = f"{batch} sequence{'s' * (batch > 1)} a step" + (f", {rate:,.0f} tokens/s a rank" if rate else "")
    lines = [f"largest that fits: {name}, {billions(params)} parameters, at {at} (--batch)"]
    if beyond is None:
        lines.append(f"the search ended at {_layers(fitting.layers)}")
    else:
        lines.append(f"{str(limit and limit['tier']).upper()} binds: with {_layers(beyond.layers)}, {_why(beyond)}")
    return CommandResult({**said.data, "largest": data, "limit": limit}, "\n".join([*lines, "", said.text]))


def name_of(tried: Tried) -> str:
    """Return the model's name."""
    return tried.question.model(tried.question.batch).name


def _limit(beyond: Tried) -> dict[str, Any]:
    from chunkmem.estimate.largest import binds_on_device

    shortage = _shortage(beyond)
    return {
        "tier": "device" if binds_on_device(beyond) else "disk" if shortage.on_disk else "host",
        "layers": beyond.layers,
        "needed_nbytes": shortage.needed_nbytes,
        "cap_nbytes": shortage.cap_nbytes,
    }


def _why(beyond: Tried) -> str:
    from chunkmem.estimate.largest import binds_on_device
    from chunkmem.estimate.question import device_need

    shortage = _shortage(beyond)
    if not binds_on_device(beyond):
        tier = "DISK" if shortage.on_disk else "HOST"
        return f"{tier} needs {format_nbytes(shortage.needed_nbytes)}, and has {format_nbytes(shortage.cap_nbytes)}"
    need = device_need(beyond.question, beyond.rehearsal)
    activations_nbytes = beyond.rehearsal.activation_nbytes
    chunk_nbytes = max(beyond.rehearsal.trace.chunk_nbytes.values())
    return (
        f"DEVICE needs {format_nbytes(need.nbytes)} (most at {need.moment}; activations take up to "
        f"{format_nbytes(activations_nbytes)}, the largest chunk {format_nbytes(chunk_nbytes)}), and has "
        f"{format_nbytes(beyond.question.device_nbytes)}"
    )


def _shortage(beyond: Tried) -> CapacityError:
    assert beyond.shortage is not None
    return beyond.shortage


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"
