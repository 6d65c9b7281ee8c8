"""What `--stages` says: how a model is cut into stages of a pipeline, and how fast that would be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, counted, does_not_fit, table
from chunkmem.data.errors import CapacityError, ConfigError, PlanError
from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.balance import Block, Stage, balance, tie_groups, tied_over
from chunkmem.plan.pipeline_choice import PipelineCandidate, PipelineChoice
from chunkmem.plan.pipeline_schedule import PipelineStep, Schedule
from chunkmem.report.text import format_s

if TYPE_CHECKING:
    from chunkmem.estimate.question import Question

_COLUMNS = ("stage", "blocks", "weights", "model data", "computes", "share")


def cut_answer(
    source: str, blocks: Sequence[Block], num_stages: int, *, cap_nbytes: int | None, keeps_ties: bool
) -> CommandResult:
    """Cut blocks into stages, and show them.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    ties = tie_groups(blocks) if keeps_ties else ()
    data: dict[str, Any] = {"source": source, "num_stages": num_stages, "num_blocks": len(blocks)}
    try:
        stages = balance(blocks, num_stages, cap_nbytes=cap_nbytes, ties=ties)
    except CapacityError as error:
        return does_not_fit(data | {"cap_nbytes": error.cap_nbytes}, error)
    head = f"{source}: {len(blocks)} blocks in {num_stages} stages"
    return CommandResult(
        data | {"fits": True} | _data(stages, num_stages), "\n".join([head, "", *_lines(stages, num_stages)])
    )


def pipeline_answer(
    question: Question, *, has_mesh: bool, num_micro_batches: int | None, picture: Path | None
) -> CommandResult:
    """Say how a model runs as a pipeline over devices: the best schedule, its stages, and the other schedules.

    With `has_mesh`, it says how fast ranks of the question's mesh are. With `picture`, schedules are drawn into that
    file, of each kind the fastest.

    Raises:
        ConfigError: there are fewer blocks than devices; matplotlib is missing, or the file cannot be written.
    """
    from chunkmem.cli.mesh_answer import mesh_data, mesh_lines
    from chunkmem.estimate.meshes import of_stages
    from chunkmem.estimate.model_blocks import model_blocks
    from chunkmem.estimate.staged import micro_batches, staged_step

    name, num_devices = question.name, question.mesh.stage
    num_micro_batches, size = micro_batches(question.batch, num_devices, num_micro_batches)
    data: dict[str, Any] = {"model": name, "num_devices": num_devices, "num_micro_batches": num_micro_batches}
    try:
        blocks = model_blocks(question)
        staged = staged_step(question, blocks, num_micro_batches=num_micro_batches)
    except CapacityError as error:
        return does_not_fit(data | {"cap_nbytes": error.cap_nbytes}, error)
    data |= _choice_data(staged.choice) | {"picture": None if picture is None else str(picture)}
    over = f"{counted(num_devices, 'device')}, {counted(num_micro_batches, 'micro-batch', 'es')}"
    lines = [f"{name}: a pipeline over {over} of {counted(size, 'sample')}", *_choice_lines(staged.choice)]
    if has_mesh:
        row = of_stages(question, staged, batch=question.batch)
        data |= mesh_data(row)
        lines += ["", *mesh_lines([row], [])]
    if picture is not None:
        _draw(picture, (staged.choice.best, *staged.choice.others))
        lines.append(f"\nwrote {picture}")
    return CommandResult(data, "\n".join(lines))


def _choice_data(choice: PipelineChoice) -> dict[str, Any]:
    step = choice.best.step
    return {
        "fits": True,
        "schedule": step.schedule.value,
        "step_s": step.step_s,
        "bubble": step.bubble,
        "bubbles": list(step.bubbles),
        "num_in_flight": list(step.num_in_flight),
        "reason": choice.reason,
        "schedules": [_candidate(each) for each in (choice.best, *choice.others)],
        **_data(choice.best.stages, step.num_devices),
    }


def _choice_lines(choice: PipelineChoice) -> Iterator[str]:
    step = choice.best.step
    yield (
        f"forward and backward of a step take {format_s(step.step_s)}, of which a device waits "
        f"{100 * step.bubble:.0f} %; updates are not in it"
    )
    yield f"schedule: {choice.reason}"
    yield ""
    yield from _lines(choice.best.stages, step.num_devices)
    yield ""
    yield table(("schedule", "stages", "step", "bubble", "in flight"), [
        (each.schedule.value, str(each.num_stages), format_s(each.step_s), f"{100 * each.bubble:.1f} %",
         str(max(each.num_in_flight)))
        for each in (step, *(other.step for other in choice.others))
    ])  # fmt: skip


def _draw(path: Path, candidates: Sequence[PipelineCandidate]) -> None:
    from chunkmem.report.files import write_whole
    from chunkmem.report.schedule import schedule_picture

    fastest: dict[Schedule, PipelineStep] = {}
    for candidate in candidates:
        fastest.setdefault(candidate.step.schedule, candidate.step)
    try:
        write_whole(path, schedule_picture(list(fastest.values())))
    except (ModuleNotFoundError, PlanError) as error:
        raise ConfigError(f"--picture: {str(error).replace('--out', '--picture')}") from None


def blocks_named(text: str) -> tuple[Block, ...]:
    """Return the blocks of a recorded step, or of a model as `chunkmem estimate` takes it.

    Raises:
        ChunkmemError: there is no such trace or model, or it has no blocks.
    """
    from chunkmem.data.trace import Trace
    from chunkmem.report.blocks import blocks_of

    path = Path(text)
    if path.is_dir():
        return blocks_of(Trace.load(path / "trace.json"))
    if not _is_model(text):
        return blocks_of(Trace.load(path))
    from chunkmem.estimate.hardware import HARDWARE
    from chunkmem.estimate.model_blocks import model_blocks
    from chunkmem.estimate.models import resolve_model
    from chunkmem.estimate.question import Question
    from chunkmem.runtime.quiet import silenced

    device_nbytes = HARDWARE["h100"].usable_nbytes
    question = Question(model=lambda batch: resolve_model(text, batch=batch), batch=1, device_nbytes=device_nbytes)
    with silenced("torch._subclasses.fake_tensor"):
        return model_blocks(question)


def _is_model(text: str) -> bool:
    if not text.endswith(".json"):
        return ":" in text and not Path(text).exists()
    try:
        return "model_type" in json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _tied(stages: Sequence[Stage], num_devices: int) -> dict[str, list[int]]:
    """Return the stages that have a parameter, for those that several devices have."""
    tied = tied_over(stages).items()
    return {name: list(having) for name, having in tied if len({at % num_devices for at in having}) > 1}


def _data(stages: Sequence[Stage], num_devices: int) -> dict[str, Any]:
    total_s = sum(stage.seconds for stage in stages)
    return {
        "stages": [
            {
                "blocks": [block.name for block in stage.blocks],
                "weight_nbytes": stage.weight_nbytes,
                "nbytes": stage.nbytes,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "share": stage.seconds / total_s if total_s else None,
                "output_nbytes": stage.output_nbytes,
            }
            for stage in stages
        ],
        "tied": _tied(stages, num_devices),
    }


def _lines(stages: Sequence[Stage], num_devices: int) -> Iterator[str]:
    total_s = sum(stage.seconds for stage in stages)
    rows = []
    for at, stage in enumerate(stages):
        first, last = stage.blocks[0].name, stage.blocks[-1].name
        share = f"{100 * stage.seconds / total_s:.1f} %" if total_s else ""
        rows.append(
            (f"{at}: {first}" if first == last else f"{at}: {first} to {last}", str(len(stage.blocks)),
             format_nbytes(stage.weight_nbytes), format_nbytes(stage.nbytes), format_s(stage.seconds), share)
        )  # fmt: skip
    yield table(_COLUMNS, rows)
    if total_s and num_devices > 1:
        slowest = max(stage.seconds for stage in stages) * len(stages) / total_s
        yield f"the slowest stage takes {slowest:.2f} x the mean; no other cut is faster"
    for name, having in _tied(stages, num_devices).items():
        places = " and ".join(map(str, having))
        yield f"{name} is tied: stages {places} have a copy each, whose gradients are added"


def _candidate(candidate: PipelineCandidate) -> dict[str, Any]:
    step = candidate.step
    return {
        "schedule": step.schedule.value,
        "num_stages": step.num_stages,
        "step_s": step.step_s,
        "bubble": step.bubble,
        "num_in_flight": max(step.num_in_flight),
    }


def refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Raise a ConfigError if an option is given with others that it does not go with, by what is given for them."""
    if given := [other for other, value in others.items() if value]:
        raise ConfigError(f"{option} cannot be given with {' or '.join(given)}; leave one of them out")
