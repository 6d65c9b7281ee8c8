"""What `chunkmem estimate` says: one answer where it fits, another where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, counted, table
from chunkmem.cli.estimate_times import assumption_lines, below_data, below_lines, time_data, time_lines
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import BELOW, TIERS, Role, Tier
from chunkmem.estimate.question import device_need
from chunkmem.report.regions import region_data
from chunkmem.report.text import REGION_COLUMNS, region_rows

if TYPE_CHECKING:
    from chunkmem.data.errors import CapacityError
    from chunkmem.estimate.changes import Change
    from chunkmem.estimate.largest import Largest, TooLarge
    from chunkmem.estimate.needs import DeviceNeed
    from chunkmem.estimate.question import Finding, Question


def answer(found: Largest) -> CommandResult:
    """Return the answer; without a model that fits, it is no."""
    fitting, beyond = found.fitting, found.beyond
    limit = None if beyond is None else {
        "tier": beyond.shortage.tier.value,
        "layers": beyond.layers,
        "needed_nbytes": beyond.shortage.needed_nbytes,
        "cap_nbytes": beyond.shortage.cap_nbytes,
    }  # fmt: skip
    if fitting is None:
        assert beyond is not None
        line = (
            f"no model fits: with {counted(beyond.layers, 'layer')}, {beyond.question.name} lacks room: {_why(beyond)}"
        )
        return CommandResult({"fits": False, "largest": None, "limit": limit}, line, fits=False)
    said = yes(fitting.finding, None, fitting.device_need)
    name, params = fitting.question.name, fitting.question.rehearsal.num_params
    data = {"model": name, "width": fitting.width or None, "layers": fitting.layers, "parameters": params,
            "num_tried": found.num_tried}  # fmt: skip
    batch, rate = fitting.question.batch, said.data["tokens_per_s"]
    at = f"{counted(batch, 'sequence')} a step" + (f", {rate:,.0f} tokens/s a rank" if rate else "")
    lines = [f"largest that fits: {name}, {billions(params)} parameters, at {at} (--batch)"]
    if beyond is None:
        lines.append(f"the search ended at {counted(fitting.layers, 'layer')}")
    else:
        lines.append(f"{beyond.shortage.tier.name} binds: with {counted(beyond.layers, 'layer')}, {_why(beyond)}")
    return CommandResult({**said.data, "largest": data, "limit": limit}, "\n".join([*lines, "", said.text]))


def _why(beyond: TooLarge) -> str:
    tier, need, shortage = beyond.shortage.tier, beyond.device_need, beyond.shortage
    if tier is not Tier.DEVICE:
        return (
            f"{tier.name} needs {format_nbytes(shortage.needed_nbytes)}, and has {format_nbytes(shortage.cap_nbytes)}"
        )
    rehearsal = beyond.question.rehearsal
    chunk_nbytes = max(rehearsal.trace.chunk_nbytes.values())
    return (
        f"DEVICE needs {format_nbytes(need.nbytes)} (most at {need.moment}; activations take up to "
        f"{format_nbytes(rehearsal.activation_nbytes)}, the largest chunk {format_nbytes(chunk_nbytes)}), and has "
        f"{format_nbytes(beyond.question.device_nbytes)}"
    )


_SAID = ("precision", "checkpointing", "cpu_embedding", "tile_numel", "activations")
"""Of a question, in the answer."""


def yes(finding: Finding, other_nbytes: int | None, need: DeviceNeed) -> CommandResult:
    """Say that it fits, and what a step takes; `other_nbytes`: activations with checkpointing, or without."""
    question = finding.question
    device_nbytes, host_nbytes = finding.device_peak_nbytes, finding.host_peak_nbytes
    updated = Counter(finding.plan.update_tiers.values())
    data = _subject(question, other_nbytes, need) | time_data(finding) | {
        "fits": True,
        "limit": None,
        "planned": True,
        "moved_nbytes": {lane.value: nbytes for lane, nbytes in finding.timeline.moved_nbytes.items()},
        "device": {"peak_nbytes": device_nbytes,
                   "chunk_peak_nbytes": finding.timeline.peak_nbytes.get(Tier.DEVICE, 0),
                   "cap_nbytes": question.device_nbytes},
        "host": {"peak_nbytes": host_nbytes, "first_step_nbytes": finding.first_host_nbytes,
                 "cap_nbytes": question.host_nbytes},
        **{tier.value: below_data(finding, tier) for tier in BELOW},
        "exchanged": {"sent_nbytes": finding.exchanged.sent_nbytes,
                      "received_nbytes": finding.exchanged.received_nbytes,
                      "across_nbytes": finding.across_nbytes,
                      "buffered_nbytes": finding.exchanged.peak_buffered_nbytes},
        "updated_on_device": updated[Tier.DEVICE],
        "updated_on_host": updated[Tier.HOST],
        "regions": [region_data(region) for region in finding.regions],
    }  # fmt: skip
    below = "".join(
        f", {tier.name} at {format_nbytes(data[tier.value]['peak_nbytes'])} of {format_nbytes(cap_nbytes)}"
        for tier, cap_nbytes in question.below_nbytes.items()
    )
    host_cap = "" if question.host_nbytes is None else f" of {format_nbytes(question.host_nbytes)}"
    lines = [
        f"fits: DEVICE peaks at {format_nbytes(device_nbytes)} of {format_nbytes(question.device_nbytes)}, "
        f"HOST at {format_nbytes(host_nbytes)}{host_cap}{below}",
        _least(need),
        *_beyond(question),
        *time_lines(finding, data),
        *(line for tier in question.below_nbytes for line in below_lines(tier, data[tier.value])),
    ]
    if question.mesh.world > 1:
        across = finding.across_nbytes
        more = f", and {format_nbytes(across)} each from replica to replica" if across else ""
        lines.append(
            f"each step, a rank sends {format_nbytes(finding.exchanged.sent_nbytes)} and receives "
            f"{format_nbytes(finding.exchanged.received_nbytes)}{more}; these are figures of the rank that owns most"
        )
    if finding.first_host_nbytes > host_nbytes:
        is_sparing = question.is_accumulating or question.mesh.world == 1
        hint = "" if is_sparing else ": gradients wait for optimizer.step(), unless manager.accumulate(1) precedes it"
        lines.append(f"the first step needs {format_nbytes(finding.first_host_nbytes)} on HOST{hint}")
    if finding.regions:
        lines += ["", table(REGION_COLUMNS, region_rows(finding.regions))]
    return CommandResult(data, "\n".join([_subject_text(question, other_nbytes), "", *lines]))


def _least(need: DeviceNeed) -> str:
    if need.first_nbytes > need.planned_nbytes:
        return (
            f"smallest cap on DEVICE: {format_nbytes(need.first_nbytes)} for the first step, "
            f"{format_nbytes(need.planned_nbytes)} for planned ones"
        )
    return f"smallest cap on DEVICE: {format_nbytes(need.nbytes)}, at {need.moment}"


def _beyond(question: Question) -> Iterator[str]:
    """Yield a warning if the cap on DEVICE leaves nothing for what is not counted."""
    hardware = question.hardware
    if hardware.is_accelerator and question.device_nbytes > hardware.usable_nbytes:
        yield (
            f"warning: of the card's {format_nbytes(hardware.device_nbytes)}, about "
            f"{format_nbytes(hardware.usable_nbytes)} can be used: CUDA's context takes 0.5 GiB, cuBLAS "
            f"{format_nbytes(hardware.workspace_nbytes)}, and gaps in torch's allocator 5 %"
        )


def without_plan(question: Question, other_nbytes: int | None, shortage: CapacityError) -> CommandResult:
    """Say that it fits, but not with a plan, which needs more of HOST; so how long a step takes is not known."""
    data = _subject(question, other_nbytes, device_need(question)) | {
        "fits": True,
        "limit": None,
        "planned": False,
        "step_s": None,
        **_caps(question),
    }
    for tier in (*TIERS[1:], shortage.tier):
        data[tier.value]["planned_nbytes"] = shortage.needed_nbytes if tier is shortage.tier else None
    line = (
        f"fits, but {shortage.tier.name} has {format_nbytes(shortage.cap_nbytes)}, and a plan needs "
        f"{format_nbytes(shortage.needed_nbytes)} ({shortage.needed_nbytes} bytes) at least: every access is served on "
        "demand, which is slower"
    )
    return CommandResult(data, "\n".join([_subject_text(question, other_nbytes), "", line]))


def no(question: Question, other_nbytes: int | None, shortage: CapacityError, changes: list[Change]) -> CommandResult:
    """Say that it does not fit, which limit binds, and what to change."""
    limit, need = shortage.tier.value, device_need(question)
    described = [{"what": change.what, "options": list(change.options)} for change in changes]
    data = _subject(question, other_nbytes, need) | {
        "fits": False,
        "limit": limit,
        "needed_nbytes": shortage.needed_nbytes,
        "cap_nbytes": shortage.cap_nbytes,
        "change": described[0],
        "changes": described,
        **_caps(question),
    }
    where = f" (most at {need.moment})" if limit == "device" else ""
    lines = [
        f"does not fit: {limit.upper()} needs {format_nbytes(shortage.needed_nbytes)}{where}, "
        f"and has {format_nbytes(shortage.cap_nbytes)}",
        f"smallest change that fits: {_shown(changes[0])}",
    ]
    if len(changes) > 1:
        lines.append(f"or one of: {'; '.join(map(_shown, changes[1:]))}")
    return CommandResult(data, "\n".join([_subject_text(question, other_nbytes), "", *lines]), fits=False)


def _caps(question: Question) -> dict[str, Any]:
    return {tier.value: {"cap_nbytes": getattr(question, f"{tier.value}_nbytes") or None} for tier in TIERS}


_ASSUMED = ("link_Bps", "eager_share", "duplex_Bps", "host_memory_Bps", "memory_Bps", "disk_read_Bps", "disk_write_Bps",
            "ranks_a_machine", "nics", "nic_Bps")  # fmt: skip
"""Of the hardware, what an answer names."""


def _subject(question: Question, other_nbytes: int | None, need: DeviceNeed) -> dict[str, Any]:
    hardware, mesh, rehearsal = question.hardware, question.mesh, question.rehearsal
    return {
        "model": question.name,
        "parameters": rehearsal.num_params,
        "batch": question.batch,
        "tokens": rehearsal.tokens,
        **{name: getattr(question, name) for name in _SAID},
        "world": mesh.world,
        "replicas": mesh.replicate,
        "tp": mesh.tp,
        "optimizer": question.optimizer,
        "role_nbytes": {role.value: nbytes for role, nbytes in rehearsal.role_nbytes.items()},
        "parameter_nbytes": rehearsal.layout.payload_nbytes,
        "slab_nbytes": rehearsal.layout.slab_nbytes,
        "activation_nbytes": rehearsal.activation_nbytes,
        "activation_nbytes_by_checkpointing": {
            str(way).lower(): nbytes
            for way, nbytes in (
                (question.checkpointing, rehearsal.activation_nbytes),
                (not question.checkpointing, other_nbytes),
            )
            if nbytes is not None
        },
        "flop": rehearsal.flop,
        "need": {"device_nbytes": need.nbytes, "moment": need.moment, "first_step_nbytes": need.first_nbytes,
                 "planned_nbytes": need.planned_nbytes},
        "assumed": {name: getattr(hardware, name) for name in _ASSUMED} | {
            "flop_per_s": hardware.flop_rate(question.dtype),
            "network_Bps": question.peers.exchange_Bps(mesh.shard)},
    }  # fmt: skip


def _subject_text(question: Question, other_nbytes: int | None) -> str:
    subject, rehearsal = _subject_line(question), question.rehearsal
    params = max(1, sum(managed.slot.numel for managed in rehearsal.step.parameters))
    rows = [
        (
            "gradients, at one time" if question.in_backward and role is Role.GRAD else role.label,
            format_nbytes(nbytes),
            f"{nbytes / params:.2f}",
        )
        for role, nbytes in rehearsal.role_nbytes.items()
        if not role.kind.is_of_call
    ]
    in_chunks = sum(nbytes for role, nbytes in rehearsal.role_nbytes.items() if role.kind.is_of_call)
    total = sum(rehearsal.role_nbytes.values()) - in_chunks
    rows.append(("model data", format_nbytes(total), f"{total / params:.2f}"))
    if in_chunks:
        rows.append(("activations in chunks", format_nbytes(in_chunks), ""))
    rows.append(("other activations" if in_chunks else "activations", format_nbytes(rehearsal.activation_nbytes), ""))
    if other_nbytes is not None:
        way = "without" if question.checkpointing else "with"
        rows.append((f"  {way} checkpointing", format_nbytes(other_nbytes), ""))
    mesh = question.mesh
    scope = "" if mesh.world == 1 else "over all ranks" if mesh.replicate == 1 else "of each replica"
    scope = f"1 of {mesh.tp} parts" if mesh.tp > 1 else scope
    assumed = "\n".join(assumption_lines(question))
    return f"{subject}\n{assumed}\n\n{table((scope, 'bytes', 'a parameter'), rows)}"


def _subject_line(question: Question) -> str:
    mesh, rehearsal = question.mesh, question.rehearsal
    batch = f"{rehearsal.tokens:,} tokens" if rehearsal.tokens else f"a batch of {question.batch}"
    ranks = f", {mesh.num_ranks} ranks" if mesh.num_ranks > 1 else ""
    ranks += f" in {mesh.replicate} replicas" if mesh.replicate > 1 else ""
    ranks += f", tensor-parallel by {mesh.tp}" if mesh.tp > 1 else ""
    recomputing = ", recomputing blocks" if question.checkpointing else ""
    if question.activations is not None:
        recomputing = f", activations: {question.activations}"
    embedding = ", embeddings on HOST" if question.cpu_embedding else ""
    optimizer = "" if question.optimizer == "adamw" else f", optimizer {question.optimizer}"
    tiled = "" if question.tile_numel is None else f", tiles of at most {question.tile_numel:,} elements"
    return (
        f"{question.name}: {billions(rehearsal.num_params)} parameters in {len(rehearsal.layout.groups)} chunk groups, "
        f"{batch} a step{ranks}, {str(question.dtype).removeprefix('torch.')}{recomputing}{embedding}{tiled}{optimizer}"
    )


def billions(count: int) -> str:
    """Return a number of parameters for people: 6.66 B."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {name}"
    return str(count)


def _shown(change: Change) -> str:
    """Return the options to add or change, sizes also for people."""
    words = []
    for option, word in zip(("", *change.options), change.options, strict=False):
        is_size = option[2:] in (tier.value for tier in TIERS) and int(word) > 2**20
        words.append(f"{word} ({format_nbytes(int(word))})" if is_size else word)
    return " ".join(words)
