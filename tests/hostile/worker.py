"""Scripts run in forked processes, so that one that crashes or hangs is named and ends nothing but itself.

`python -m tests.hostile.worker 'MODE;MODE' SCRIPT...` prints one JSON object: by script and mode, what came of it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

import chunkmem
from tests.helpers.hearing import Hearing
from tests.hostile.harness import AMPLE_NBYTES, AXES, MODES, ORDINARY, SCRIPTS, SEED, Axis, Script, User, manager_for
from tests.hostile.judge import differences
from tests.hostile_ranks.harness import short_roll_calls

HERE = Path(__file__).parent
NOT_SCRIPTS = {"__init__", "harness", "judge", "models", "worker"}
THEMES = tuple(
    sorted(p.stem for p in HERE.glob("*.py") if p.stem not in NOT_SCRIPTS and not p.stem.startswith("test_"))
)
TIMEOUT_S = 60
"""Of one mode of one script; they take a tenth of a second."""

Report = dict[str, Any]


def load() -> dict[str, Script]:
    """All scripts by name, in the order of their files."""
    for theme in THEMES:
        import_module(f"tests.hostile.{theme}")
    return SCRIPTS


def raised(error: BaseException) -> Report:
    """An error as plain data, with the innermost place in the script or the package."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "/chunkmem/" in f.filename or "/hostile/" in f.filename] or frames
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in mine]
    is_ours = isinstance(error, chunkmem.ChunkmemError)
    kind, message = type(error).__name__, str(error).splitlines() or [""]
    return {"error": kind, "message": message[0][:400], "where": " < ".join(places[:-5:-1]), "is_ours": is_ours}


def run_plain(script: Script) -> tuple[Report, Any]:
    """Run a script in plain PyTorch."""
    user = User(None)
    try:
        return {}, _outcome(script, user)
    except Exception as error:
        return raised(error), None


def _outcome(script: Script, user: User) -> Any:
    if script.model is not None:
        user.build(script.model)
    torch.manual_seed(SEED)
    script.run(user)
    return user.left()


def run_reference(script: Script) -> tuple[Report, Any]:
    """Run what the others are compared with: plain PyTorch, or, in mixed precision, chunkmem with room for all."""
    if not script.is_lowered:
        return run_plain(script)
    with manager_for(AMPLE_NBYTES, keys=script.keys) as manager:
        try:
            return {}, _outcome(script, User(manager))
        except Exception as error:
            return raised(error), None


def run_chunked(script: Script, mode: str, device_nbytes: int, expected: Any) -> Report:
    """Run a script in chunkmem, and compare."""
    manager = manager_for(device_nbytes, seed=MODES[mode].seed, keys=script.keys)
    try:
        bare = MODES[mode].bare and not script.is_lowered  # the loss scale is the manager's to apply
        found = differences(_outcome(script, User(manager, bare=bare)), expected)
        report: Report = {"differences": found[:20]}
    except Exception as error:
        report = raised(error)
    report["required_nbytes"] = manager.memory().device.required_nbytes
    manager.close()
    return report


def smallest_nbytes(script: Script, report: Report) -> int:
    """The smallest cap: what the script needed, or, if it did not get far, what training its model needs."""
    if "error" not in report and report["required_nbytes"] > 0:
        return report["required_nbytes"]
    if script.model is None:
        return AMPLE_NBYTES
    manager = manager_for(AMPLE_NBYTES, keys=script.keys)
    user = User(manager)
    try:
        model = user.build(script.model)
        optimizer = user.adamw()
        for _ in range(2):
            takes_tokens = hasattr(model, "embed")
            user.backward(model(user.tokens() if takes_tokens else user.batch()).square().mean())
            optimizer.step()
    except (chunkmem.ChunkmemError, RuntimeError, IndexError, TypeError):  # no model for features
        return AMPLE_NBYTES
    finally:
        required_nbytes = manager.memory().device.required_nbytes
        manager.close()
    return max(required_nbytes, report["required_nbytes"])


def run_modes(script: Script, modes: list[str], smallest: int, out: IO[str]) -> None:
    """Run a script for reference and in some modes; each report is written as a line as soon as there is one."""

    def write(mode: str, report: Report) -> None:
        out.write(json.dumps([mode, report]) + "\n")
        out.flush()

    signal.alarm(TIMEOUT_S)
    plain, expected = run_reference(script)
    write("plain", plain)
    for mode in modes:
        signal.alarm(TIMEOUT_S)
        if mode in AXES:
            with tempfile.TemporaryDirectory() as folder:
                write(mode, run_axis(script, AXES[mode], expected, folder))
            continue
        room = MODES[mode].room
        report = run_chunked(script, mode, AMPLE_NBYTES if room is None else int(room * smallest), expected)
        if room is None:
            smallest = smallest_nbytes(script, report)
        write(mode, report | {"smallest_nbytes": smallest})


def run_axis(script: Script, axis: Axis, expected: Any, folder: str) -> Report:
    """Run a script with a feature, with room for all and then under a small cap with late copies, and compare both."""
    keys = (*script.keys, *axis.keys.items())
    # Excluded layers compute in the dtype that they were built in.
    if axis.own_bits or (axis.excludes and script.is_lowered):
        expected = None
    sizes = (AMPLE_NBYTES, AMPLE_NBYTES)
    for seed in (None, 3):
        memory: dict[str, Any] = {"device": sizes[0]}
        if axis.host_share is not None and seed is not None:
            memory |= {"host": int(axis.host_share * sizes[1])}
        if axis.host_share is not None:
            memory |= {"disk": {"path": folder, "capacity": AMPLE_NBYTES}}
        manager = manager_for(sizes[0], seed=seed, keys=(*keys, ("memory", memory)))
        if axis.ways:
            Hearing(manager, axis.ways)
        try:
            outcome = _outcome(script, User(manager, bare=not script.is_lowered, axis=axis))
            expected = outcome if expected is None else expected
            report: Report = {"differences": differences(outcome, expected)[:20]}
        except Exception as error:
            report = raised(error)
        seen = manager.memory()
        manager.close()
        report["room"] = "ample" if seed is None else "small"
        if report.get("error") or report["differences"]:
            break
        sizes = (
            int(1.25 * seen.device.required_nbytes) or AMPLE_NBYTES,
            seen.device.peak_nbytes + seen.host.peak_nbytes,
        )
    return report


def in_children(script: Script, modes: Iterable[str] = ORDINARY) -> dict[str, Report]:
    """Run a script in some modes, ample room among them, in a child that is replaced if it dies."""
    reports: dict[str, Report] = {}
    smallest = AMPLE_NBYTES
    while left := [mode for mode in modes if mode not in reports]:
        lines, died = _in_a_child(script, left, smallest)
        reports |= dict(lines)
        smallest = reports.get("ample", {}).get("smallest_nbytes", AMPLE_NBYTES)
        if died is not None:
            victim = next((mode for mode in ("plain", *left) if mode not in reports), "exit")
            reports[victim] = died
            if victim == "plain":
                return dict.fromkeys(("plain", *modes), died)
    return reports


def _in_a_child(script: Script, modes: list[str], smallest: int) -> tuple[list[Any], Report | None]:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as complaints:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reader)
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                os.dup2(complaints.fileno(), sys.stderr.fileno())
                faulthandler.enable()
                with os.fdopen(writer, "w") as out:
                    run_modes(script, modes, smallest, out)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = [json.loads(line) for line in pipe.read().splitlines()]
        _, status = os.waitpid(child, 0)
        if status == 0:
            return lines, None
        complaints.seek(0)
        said = complaints.read()[-2000:]
    by = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
    return lines, {"died": by, "stderr": said}


def run_share(rank: int, size: int, modes: dict[str, list[str]]) -> dict[str, dict[str, Report]]:
    """Run a share of some scripts, each in modes of its own: reports by script and mode. A `Team` calls it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # A daemon, as the processes of a `Team` are, may have no children; some scripts load batches in other processes.
    multiprocessing.current_process().daemon = False
    scripts = load()
    gc.freeze()  # a collection in a child would copy every page it visits
    return {name: in_children(scripts[name], modes[name]) for name in list(modes)[rank::size]}


def run_on_a_rank(_: int, name: str) -> tuple[Report, Report]:
    """Run a script in plain PyTorch, and in chunkmem on this rank, with the same batches as on others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    script = load()[name]
    plain, expected = run_plain(script)
    with short_roll_calls():
        report = run_chunked(script, "ample", AMPLE_NBYTES, expected)
    gc.collect()  # what a failed script left in cycles would be freed in the middle of another one
    return plain, report


if __name__ == "__main__":
    import tests.helpers.preloaded  # noqa: F401

    print(json.dumps(run_share(0, 1, dict.fromkeys(sys.argv[2:], sys.argv[1].split(";")))))
