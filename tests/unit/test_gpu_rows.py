"""The rows of the GPU suite on disk: kept, whole, and never of two machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import harness
from benchmarks.gpu.harness import Choice, Task, carry_out, log_of
from benchmarks.gpu.rows import Reason, Row, Store, StoreError, read
from benchmarks.gpu.setting import Card, Setting
from tests.helpers.processes import assert_end, wait_for

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "none", "torch": "2.x"}
CARD = Card("a card", 2**34, 2**34, "9.0", 132, 2**25, "1")


def open_store(path: Path, **machine: str) -> Store:
    return Store(path, machine={**MACHINE, **machine}, told={"part": "probe"})


def on_disk(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_rows_outlive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    rows = [
        Row("a", {"x": 1.5}, wall_s=2.0, at="2030-01-02 03:04"),
        Row("b", why_not="no room here", reason=Reason.NO_ROOM, wall_s=1.0, at="2030-01-02 03:05"),
    ]
    store = open_store(path)
    for row in rows:
        store.put(row)
    assert list(open_store(path)) == rows
    assert open_store(path).figures("a") == {"x": 1.5}
    assert open_store(path).figures("b") is None


def test_every_row_is_on_disk_as_soon_as_it_is_known(tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    for index in range(3):
        store.put(Row(str(index), {"x": index}))
        assert list(on_disk(store.path)["rows"]) == [str(i) for i in range(index + 1)]
    assert os.listdir(tmp_path) == ["probe.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    store.put(Row("a", {"x": 1}))
    with pytest.raises(ValueError, match="JSON"):
        store.put(Row("b", {"x": float("nan")}))
    assert list(on_disk(store.path)["rows"]) == ["a"]


def test_rows_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    open_store(tmp_path / "probe.json").save()
    with pytest.raises(StoreError, match=r"gpu none, torch 2\.x, and this is gpu H100, torch 2\.x: name another --out"):
        open_store(tmp_path / "probe.json", gpu="H100")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rows": []}', '{"rows": {"a": {"figures": {}}}, "machine": {}}', '{"rows": {}}']
)
def test_what_is_no_file_of_rows_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(StoreError, match="is no file of rows"):
        read(path)


@pytest.mark.parametrize("given", [{}, {"figures": {}, "why_not": "x", "reason": Reason.FAILED}, {"why_not": "x"}])
def test_a_row_has_figures_or_says_why_not(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either figures, or why not"):
        Row("a", **given)


class Found:
    """Stands in for the processes: answers by key, and notes who was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, task: Task, arguments: dict[str, Any], _setting: Setting, _limit_s: float) -> Any:
        self.asked.append((task.key, dict(arguments)))
        answer = self.answers[task.key]
        return answer.pop(0) if isinstance(answer, list) else answer


def run(
    monkeypatch: pytest.MonkeyPatch,
    store: Store,
    tasks: Any,
    answers: dict[str, Any],
    *,
    card: Card | None = CARD,
    **choice: Any,
) -> tuple[list[str], list[tuple[str, Any]]]:
    found = Found(answers)
    monkeypatch.setattr(harness, "_in_a_process", found)
    setting = Setting(card, 2**34, 4, store.path.parent)
    return carry_out(tasks, store, setting, Choice(**{"budget_s": 600, **choice})), found.asked


YES = {"figures": {"x": 1}}
NO_ROOM = {"why_not": "out of memory", "reason": "no room"}
FAILED = {"why_not": "it broke", "reason": "failed"}


def test_finished_rows_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("a", "f"), Task("b", "f")]
    answers = {"a": YES, "b": FAILED}
    assert run(monkeypatch, store, tasks, answers) == ([], [("a", {}), ("b", {})])
    assert run(monkeypatch, store, tasks, answers) == ([], [])
    assert run(monkeypatch, store, tasks, answers, retry=True) == ([], [("b", {})])


def test_a_row_that_needs_a_gpu_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("a", "f"), Task("b", "f", needs_gpu=False)]
    assert run(monkeypatch, store, tasks, {"b": YES}, card=None) == ([], [("b", {})])
    assert [(row.key, row.why_not, row.figures) for row in store] == [("a", "no GPU", None), ("b", None, {"x": 1})]


def test_without_room_the_alternatives_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    task = Task("a", "f", {"n": 4, "m": 1}, alternatives=[{"n": 2}, {"n": 1}])
    _, asked = run(monkeypatch, store, [task], {"a": [dict(NO_ROOM), dict(YES)]})
    assert asked == [("a", {"n": 4, "m": 1}), ("a", {"n": 2, "m": 1})]
    assert store.figures("a") == {"x": 1}
    failing = Task("b", "f", {"n": 4}, alternatives=[{"n": 2}])
    assert run(monkeypatch, store, [failing], {"b": dict(FAILED)})[1] == [("b", {"n": 4})]


def test_a_spent_budget_leaves_rows_and_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("long", "f", limit_s=100), Task("short", "f", limit_s=20)]
    assert run(monkeypatch, store, tasks, {"short": YES}, budget_s=10) == (["long"], [("short", {})])
    # A row that the part's end cuts short, not its own limit, is left as well.
    assert run(monkeypatch, store, tasks, {"long": None}, budget_s=50) == (["long"], [("long", {})])
    assert run(monkeypatch, store, tasks, {"long": None}, budget_s=500) == ([], [("long", {})])
    row = store.get("long")
    assert row is not None
    assert (row.reason, row.why_not) == (Reason.TIME, "not done after 100 s")


def test_a_row_that_the_end_of_two_calls_cuts_is_not_begun_a_third_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("long", "f", limit_s=100)]
    cut = [("long", {})]
    assert run(monkeypatch, store, tasks, {"long": None}, budget_s=50) == (["long"], cut)
    assert [(row.reason, row.tries) for row in store] == [(Reason.CUT, 1)]
    assert run(monkeypatch, store, tasks, {"long": None}, budget_s=50) == ([], cut)
    assert run(monkeypatch, store, tasks, {"long": YES}) == ([], [])
    assert run(monkeypatch, store, tasks, {"long": YES}, retry=True) == ([], cut)
    assert [(row.figures, row.tries) for row in store] == [({"x": 1}, 1)]


def test_a_row_is_on_disk_while_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    while_it_ran = []

    def killed(*_: Any) -> Any:
        while_it_ran.append(on_disk(store.path)["rows"]["a"])
        return YES

    monkeypatch.setattr(harness, "_in_a_process", killed)
    carry_out([Task("a", "f")], store, Setting(CARD, 2**34, 4, tmp_path), Choice(600))
    (row,) = while_it_ran
    assert (row["reason"], row["why_not"]) == ("cut", "the call was killed while it ran")


def test_rows_are_measured_again_on_demand_and_their_figures_kept_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("a", "f"), Task("b", "f")]
    run(monkeypatch, store, tasks, {"a": YES, "b": YES})
    found = run(monkeypatch, store, tasks, {"a": {"figures": {"x": 2}}}, again=True, only=("a",))
    assert found == ([], [("a", {})])
    assert [row.figures for row in store] == [{"x": 2}, {"x": 1}]
    # The time ends: the figures that were there are worth more than to say so.
    run(monkeypatch, store, tasks, {"a": None, "b": None}, again=True, budget_s=50)
    assert [row.figures for row in store] == [{"x": 2}, {"x": 1}]


def test_tasks_may_follow_from_rows_before_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")

    def tasks() -> Iterator[Task]:
        yield Task("first", "f")
        if store.figures("first"):
            yield Task("second", "f")

    assert run(monkeypatch, store, tasks(), {"first": dict(FAILED)})[1] == [("first", {})]
    answers = {"first": YES, "second": YES}
    assert run(monkeypatch, store, tasks(), answers, retry=True)[1] == [("first", {}), ("second", {})]


def test_only_rows_that_match(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    tasks = [Task("chunkmem / 1", "f"), Task("plain / 1", "f")]
    assert run(monkeypatch, store, tasks, {"plain / 1": YES}, only=("torchao*", "plain*"))[1] == [("plain / 1", {})]


# Real processes, of functions that do without torch.


def real(tmp_path: Path, *tasks: Task, budget_s: float = 60) -> Store:
    store = open_store(tmp_path / "probe.json")
    carry_out(tasks, store, Setting(None, 2**34, 4, tmp_path), Choice(budget_s))
    return store


def task_of(name: str, **more: Any) -> Task:
    return Task(name, f"tests.helpers.gpu_rows:{name}", needs_gpu=False, **more)


def test_a_process_returns_figures_or_why_not(tmp_path: Path) -> None:
    names = ("give", "miss", "run_out_of_room", "leave", "be_killed")
    tasks = [task_of("give", arguments={"x": 3}), *(task_of(name) for name in names[1:])]
    store = real(tmp_path, *tasks)
    assert {row.key: (row.figures, row.reason) for row in store} == {
        "give": ({"x": 3}, None),
        "miss": (None, Reason.MISSING),
        "run_out_of_room": (None, Reason.NO_ROOM),
        "leave": (None, Reason.FAILED),
        "be_killed": (None, Reason.NO_ROOM),
    }
    assert [store.get(name).why_not for name in names[1:]] == [  # type: ignore[union-attr]
        "no such library",
        "it needs 3 GiB and has 2",
        "its process ended with exit status 7: last words",
        "the system killed it, as it does when RAM is short",
    ]
    assert log_of(tmp_path, "leave").read_text().splitlines()[-1] == "last words"


def test_all_that_a_row_tries_is_within_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store(tmp_path / "probe.json")
    limits = []
    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)

    def without_room(_task: Task, arguments: dict[str, Any], _setting: Setting, limit_s: float) -> Any:
        limits.append(limit_s)
        clock.now_s += 30
        return dict(NO_ROOM)

    monkeypatch.setattr(harness, "time", clock)
    monkeypatch.setattr(harness, "_in_a_process", without_room)
    task = Task("a", "f", {"n": 4}, alternatives=[{"n": 2}, {"n": 1}], limit_s=50)
    carry_out([task], store, Setting(CARD, 2**34, 4, tmp_path), Choice(600))
    assert limits == [50, 20]
    row = store.get("a")
    assert row is not None
    assert row.reason is Reason.NO_ROOM


def test_a_function_that_ends_by_itself_is_told_when(tmp_path: Path) -> None:
    store = real(tmp_path, task_of("until", limit_s=100, needs_s=5, is_told=True), budget_s=30)
    figures = store.figures("until")
    assert figures is not None
    assert 0 < figures["limit_s"] < 30


def test_what_ends_at_its_limit_leaves_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "begun"
    for limit_s in (3, 30):  # on a busy machine, a process may not have begun after 3 s
        folder = tmp_path / f"{limit_s} s"
        folder.mkdir()
        store = real(folder, task_of("count", arguments={"path": str(path), "seconds": 60}, limit_s=limit_s))
        if path.exists():
            break
    assert [row.why_not for row in store] == [f"not done after {limit_s} s: half way there"]


def test_a_row_ends_with_the_call_that_began_it(tmp_path: Path) -> None:
    """A killed command leaves no process behind that holds the device's memory from its successor."""
    started = tmp_path / "pid"
    code = "from tests.helpers.gpu_rows import killed; import sys; killed(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, start_new_session=True)
    wait_for(started, process)
    process.kill()
    process.wait()
    assert_end(int(started.read_text()))
    assert read(tmp_path / "probe.json")["rows"]["hang"]["reason"] == "cut"


@pytest.mark.full
def test_a_row_is_ended_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    store = real(tmp_path, task_of("hang", arguments={"path": str(started)}, limit_s=5))
    assert [(row.reason, row.why_not) for row in store] == [(Reason.TIME, "not done after 5 s")]
    assert_end(int(started.read_text()))


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.helpers.gpu_rows import interrupted; import sys; interrupted(sys.argv[1])",
         str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_for(started, process)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert list(read(tmp_path / "probe.json")["rows"]) == ["give"]
    assert os.path.exists(tmp_path / "probe.json.new") is False
    assert_end(int(started.read_text()))
