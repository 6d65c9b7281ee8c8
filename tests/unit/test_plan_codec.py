"""Plans, machines and timelines in files, and what damage of any kind of file leads to."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.errors import PlanError, TraceError
from chunkmem.data.trace import Kind, Mode, Moment, Trace
from chunkmem.data.types import LINKS, ChunkId, Role, Tier
from chunkmem.plan.machine import LinkSpeed, Machine, host_links
from chunkmem.plan.model import Action, Alloc, Copy, Free, Lane, Placed, Plan, Update, Wait
from chunkmem.plan.timeline import Span, StageCall, StageWork, Timeline
from tests.helpers.cpu_time import cpu_s

save_trace, load_trace = Trace.save, Trace.load
save_plan, load_plan, plan_to_dict, plan_from_dict = Plan.save, Plan.load, Plan.to_dict, Plan.from_dict
save_machine, load_machine, machine_to_dict, machine_from_dict = (
    Machine.save, Machine.load, Machine.to_dict, Machine.from_dict,
)  # fmt: skip
save_timeline, load_timeline, timeline_to_dict, timeline_from_dict = (
    Timeline.save, Timeline.load, Timeline.to_dict, Timeline.from_dict,
)  # fmt: skip

PARAM, GRAD = ChunkId(Role.PARAM, 0), ChunkId(Role.GRAD, 0)

MACHINE = Machine(device_nbytes=4096, host_nbytes=2**40, links=host_links(h2d_Bps=1.2e10, d2h_Bps=inf, latency_s=1e-5))

PLAN = Plan(
    trace_digest="0123456789abcdef",
    machine=MACHINE,
    start=frozenset({Placed(PARAM, Tier.HOST, True), Placed(GRAD, Tier.DEVICE, False)}),
    actions=(
        (Alloc(PARAM, Tier.DEVICE), Wait(Lane.H2D, Lane.COMPUTE, -2), Copy(PARAM, Tier.HOST, Tier.DEVICE)),
        (),
        (Update(0, Tier.HOST), Free(PARAM, Tier.DEVICE)),
    ),
    update_tiers={0: Tier.HOST},
    name="belady, 2 ahead",
)

TIMELINE = Timeline(
    spans=(
        Span(Lane.H2D, "copy param 0", -0.5, 0.25, 0, PARAM, 4096),
        Span(Lane.COMPUTE, "fc forward", 0.0, 0.25, 0, is_stall=True),
        Span(Lane.COMPUTE, "fc forward", 0.25, 1.0, 0),
    ),
    step_s=1.0,
    peak_nbytes={Tier.DEVICE: 4096, Tier.HOST: 8192},
    role_peak_nbytes={(Tier.DEVICE, "param"): 4096},
    cap_nbytes={Tier.DEVICE: 5000, Tier.HOST: 2**40},
    device_nbytes=(4096,),
    plan_misses=1,
    prefetched=2,
    fetched=3,
)

TRACE = Trace(
    Mode.EVAL,
    "layout",
    {PARAM: 4096, GRAD: 4096},
    (Moment(Kind.HOLD, PARAM, "fc", 0.5), Moment(Kind.WRITE, GRAD), Moment(Kind.RELEASE, PARAM, "fc", 0.25, 7, 8)),
)

MACHINE_TEXT = (
    '{"format":"chunkmem machine","version":2,"device_nbytes":4096,"host_nbytes":1099511627776,'
    '"links":[["device","host",null,1e-05],["host","device",12000000000.0,1e-05]],"device_update_Bps":null,"host_update_Bps":null,'
    '"charges_non_model":false,"one_processor":true,"shadow_nbytes":0,"exchange_Bps":null}'
)
PLAN_TEXT = (
    '{"format":"chunkmem plan","version":2,"chunks":[["grad",0],["param",0]],"trace_digest":"0123456789abcdef",'
    f'"machine":{MACHINE_TEXT},"start":[[0,"device",false],[1,"host",true]],'
    '"actions":[[["alloc",1,"device"],["wait","h2d","compute",-2],["copy",1,"host","device"]],[],'
    '[["update",0,"host"],["free",1,"device"]]],"update_tiers":[[0,"host"]],"name":"belady, 2 ahead"}'
)
TIMELINE_TEXT = (
    '{"format":"chunkmem timeline","version":2,"chunks":[["param",0]],"labels":["copy param 0","fc forward"],'
    '"spans":[["h2d",0,-0.5,0.25,0,0,4096,false],["compute",1,0.0,0.25,0,null,0,true],'
    '["compute",1,0.25,1.0,0,null,0,false]],"step_s":1.0,'
    '"peak_nbytes":[["device",4096],["host",8192]],"role_peak_nbytes":[["device","param",4096]],'
    '"cap_nbytes":[["device",5000],["host",1099511627776]],"device_nbytes":[4096],'
    '"plan_misses":1,"prefetched":2,"fetched":3}'
)


@dataclasses.dataclass(frozen=True)
class FileKind:
    """How one kind of file is saved and loaded, and a small one of it."""

    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]
    small: object
    error: type[Exception]


KINDS = {
    "trace": FileKind(save_trace, load_trace, TRACE, TraceError),
    "plan": FileKind(save_plan, load_plan, PLAN, PlanError),
    "machine": FileKind(save_machine, load_machine, MACHINE, PlanError),
    "timeline": FileKind(save_timeline, load_timeline, TIMELINE, PlanError),
}


def chunks() -> st.SearchStrategy[ChunkId]:
    return st.builds(
        ChunkId,
        st.sampled_from([Role.PARAM, Role.GRAD, Role.MASTER, Role("exp_avg"), Role("another_state")]),
        st.integers(0, 5),
    )


def machines() -> st.SearchStrategy[Machine]:
    nbytes, speeds = st.integers(0, 2**63 - 1), st.floats(0, exclude_min=True)
    latency = st.floats(0, allow_infinity=False)
    flags = st.booleans()
    links = st.fixed_dictionaries(dict.fromkeys(LINKS, st.builds(LinkSpeed, speeds, latency)))
    return st.builds(Machine, nbytes, nbytes, links, speeds, speeds, flags, flags)


def plans() -> st.SearchStrategy[Plan]:
    tiers, lanes, groups = st.sampled_from(Tier), st.sampled_from(Lane), st.integers(0, 5)
    actions: st.SearchStrategy[Action] = st.one_of(
        st.builds(Alloc, chunks(), tiers),
        st.builds(Free, chunks(), tiers),
        st.builds(Copy, chunks(), tiers, tiers),
        st.builds(Update, groups, tiers),
        st.builds(Wait, lanes, lanes, st.integers(-(2**63), 2**63 - 1)),
    )
    # A replica is newest or not, never both.
    placed = st.dictionaries(st.tuples(chunks(), tiers), st.booleans(), max_size=6)
    start = placed.map(lambda found: frozenset(Placed(*place, newest) for place, newest in found.items()))
    moments = st.lists(st.lists(actions, max_size=5).map(tuple), max_size=5).map(tuple)
    return st.builds(Plan, st.text(), machines(), start, moments, st.dictionaries(groups, tiers), st.text())


def timelines() -> st.SearchStrategy[Timeline]:
    count, seconds = st.integers(0, 2**63 - 1), st.floats(0, 1e6)
    moments = st.integers(-5, 5)
    ends = st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)).map(sorted)
    spans = st.builds(
        lambda lane, label, ends, *rest: Span(lane, label, *ends, *rest),
        *(st.sampled_from(Lane), st.text(), ends, moments, st.none() | chunks(), count, st.booleans()),
    )
    by_tier = st.fixed_dictionaries({Tier.DEVICE: count}, optional={Tier.HOST: count})
    by_role = st.dictionaries(st.tuples(st.sampled_from(Tier), st.text()), count, max_size=5)
    lists = st.lists(spans, max_size=5).map(tuple), st.lists(count, max_size=5).map(tuple)
    calls = st.lists(st.builds(StageCall, st.sampled_from(StageWork), count, count, seconds, seconds), max_size=5)
    rest = count, count, count, calls.map(tuple)
    return st.builds(Timeline, lists[0], seconds, by_tier, by_role, by_tier, lists[1], *rest)


def changed(values: dict[str, Any], path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """A copy of `values` with one of them, at `path`, replaced."""
    values = copy.deepcopy(values)
    *where, last = path
    inner: Any = values
    for key in where:
        inner = inner[key]
    inner[last] = value
    return values


def raised_by(call: Callable[[], object]) -> str:
    """The message of the PlanError that `call` raises."""
    with pytest.raises(PlanError) as raised:
        call()
    return str(raised.value)


# What is written.


def test_the_text_of_each_file(tmp_path: Path) -> None:
    save_machine(MACHINE, tmp_path / "machine.json")
    save_plan(PLAN, tmp_path / "plan.json")
    save_timeline(TIMELINE, tmp_path / "timeline.json")
    assert (tmp_path / "machine.json").read_text() == MACHINE_TEXT
    assert (tmp_path / "plan.json").read_text() == PLAN_TEXT
    assert (tmp_path / "timeline.json").read_text() == TIMELINE_TEXT
    assert load_machine(tmp_path / "machine.json") == MACHINE
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert load_timeline(tmp_path / "timeline.json") == TIMELINE


@given(machines())
def test_every_machine_survives(machine: Machine) -> None:
    read = machine_from_dict(json.loads(json.dumps(machine_to_dict(machine), allow_nan=False)))
    assert read == machine


@given(plans())
def test_every_plan_survives(plan: Plan) -> None:
    assert plan_from_dict(json.loads(json.dumps(plan_to_dict(plan), allow_nan=False))) == plan


@given(timelines())
def test_every_timeline_survives(timeline: Timeline) -> None:
    read = timeline_from_dict(json.loads(json.dumps(timeline_to_dict(timeline), allow_nan=False)))
    assert read == timeline
    assert str(read) == str(timeline)


@given(plans(), st.randoms(use_true_random=False))
def test_equal_plans_make_equal_files(plan: Plan, rng: random.Random) -> None:
    start, tiers = list(plan.start), list(plan.update_tiers.items())
    rng.shuffle(start)
    rng.shuffle(tiers)
    same = dataclasses.replace(plan, start=frozenset(start), update_tiers=dict(tiers))
    assert json.dumps(plan_to_dict(same)) == json.dumps(plan_to_dict(plan))


def test_a_machine_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(
        json.dumps(
            json.loads(MACHINE_TEXT) | {"links": [["host", "device", 12_000_000_000, 0], ["device", "host", None, 0]]},
            indent=2,
        )
    )
    assert load_machine(file) == dataclasses.replace(MACHINE, links=host_links(h2d_Bps=1.2e10, d2h_Bps=inf))


def test_time_grows_with_the_moments_and_not_with_their_square(tmp_path: Path) -> None:
    chunk_ids = [ChunkId(Role.PARAM, group) for group in range(100)]

    def took_s(num_moments: int) -> float:
        actions = tuple(
            (Alloc(chunk, Tier.DEVICE), Copy(chunk, Tier.HOST, Tier.DEVICE), Wait(Lane.COMPUTE, Lane.H2D, index))
            for index in range(num_moments)
            for chunk in [chunk_ids[index % 100]]
        )
        plan = dataclasses.replace(PLAN, actions=actions)
        saving_s = cpu_s(lambda: save_plan(plan, tmp_path / "plan.json"))
        loading_s = cpu_s(lambda: load_plan(tmp_path / "plan.json"))
        assert load_plan(tmp_path / "plan.json") == plan
        return saving_s + loading_s

    few, many = (min(took_s(count) for _ in range(3)) for count in (1_000, 10_000))
    assert many < 30 * few


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_plan(PLAN, file)
    wrong = dataclasses.replace(PLAN, actions=((Update(-1, Tier.HOST),),))
    assert raised_by(lambda: save_plan(wrong, file)) == (
        f"{file} cannot be written: actions[0][0][1] is -1, but must be an integer from 0 to 2**63 - 1"
    )
    assert file.read_text() == PLAN_TEXT


# Values that no plan, machine or timeline has.


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("format",), "chunkmem trace", "this has the format 'chunkmem trace', but a \"chunkmem plan\" is needed here"),
        (
            ("version",),
            7,
            "version of this chunkmem plan is 7, but this chunkmem reads only up to 2; update chunkmem, or save it "
            "again with this one",
        ),
        (("name",), 5, "name is 5, but must be a string"),
        (("trace_digest",), None, "trace_digest is None, but must be a string"),
        (("machine",), None, "machine is None, but must be an object: a chunkmem machine"),
        (("machine",), {}, "machine.format is missing, which every chunkmem machine has"),
        (
            ("machine", "format"),
            "chunkmem plan",
            "machine has the format 'chunkmem plan', but a \"chunkmem machine\" is needed here",
        ),
        (
            ("machine", "version"),
            3,
            "machine.version of this chunkmem machine is 3, but this chunkmem reads only up to 2; update chunkmem, or "
            "save it again with this one",
        ),
        (
            ("machine", "host_nbytes"),
            -1,
            "machine.host_nbytes is -1, but must be an integer from 0 to 2**63 - 1",
        ),
        (("chunks", 0), ["grad", "0"], "chunks[0][1] is '0', but must be an integer from 0 to 2**63 - 1"),
        (("start",), None, "start is None, but must be a list"),
        (("start", 0, 0), 2, "start[0][0] is 2, but must be an index into chunks, which has 2 of them"),
        (("start", 0, 1), "gpu", 'start[0][1] is \'gpu\', but must be "device", "host" or "disk"'),
        (("start", 0, 2), 1, "start[0][2] is 1, but must be true or false"),
        (
            ("start", 0),
            [1, "host", False],
            "start has param chunk 0 on HOST twice, with the newest version and without",
        ),
        (("start", 0), [1, "host", True], "start[1] is [1, 'host', True], but an earlier row is for the same"),
        (
            ("update_tiers",),
            [[0, "host"], [0, "device"]],
            "update_tiers[1] is [0, 'device'], but an earlier row is for",
        ),
        (("update_tiers", 0, 1), None, 'update_tiers[0][1] is None, but must be "device", "host" or "disk"'),
        (("actions",), {"0": []}, "actions is {'0': []}, but must be a list"),
        (("actions", 1), 0, "actions[1] is 0, but must be a list"),
        (("actions", 2, 0), "free", "actions[2][0] is 'free', but must be a list"),
        (
            ("actions", 2, 0),
            [],
            'actions[2][0][0] is None, but must be "alloc", "free", "copy", "round", "update" or "wait"',
        ),
        (
            ("actions", 2, 0, 0),
            "move",
            'actions[2][0][0] is \'move\', but must be "alloc", "free", "copy", "round", "update" or "wait"',
        ),
        (("actions", 2, 0), ["free"], "actions[2][0] is ['free'], but must be a list of 3 values"),
        (("actions", 0, 2, 3), "host ", 'actions[0][2][3] is \'host \', but must be "device", "host" or "disk"'),
        (
            ("actions", 0, 1, 2),
            "cpu",
            'actions[0][1][2] is \'cpu\', but must be "compute", "h2d", "d2h", "host-update", "collective", '
            '"disk-read" or "disk-write"',
        ),
        (
            ("actions", 0, 1, 3),
            0.5,
            "actions[0][1][3] is 0.5, but must be an integer from -9223372036854775808 to 2**63 - 1",
        ),
        (("lanes",), 1, "this has a key 'lanes', which no chunkmem plan has; allowed: format, version, chunks, trace_"),
    ],
)
def test_values_that_no_plan_has(path: tuple[Any, ...], value: object, says: str) -> None:
    assert raised_by(lambda: plan_from_dict(changed(plan_to_dict(PLAN), path, value))).startswith(says)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("device_nbytes", "8GiB", "device_nbytes is '8GiB', but must be an integer from 0 to 2**63 - 1"),
        ("device_nbytes", None, "device_nbytes is None, but must be an integer from 0 to 2**63 - 1"),
        (
            "links",
            [["host", "device", 0, 0.0], ["device", "host", 1e9, 0.0]],
            "machine: the link from HOST to DEVICE is 0.0 bytes/s, and nothing could ever arrive; ",
        ),
        (
            "links",
            [["device", "host", -1.5, 0], ["host", "device", 1, 0]],
            "machine: the link from DEVICE to HOST is -1.5 ",
        ),
        (
            "links",
            [["device", "host", 1, 0]],
            "machine: the link from HOST to DEVICE has no speed; give one of each link ",
        ),
        (
            "links",
            [["device", "host", 1, 0]] * 2,
            "links[1] is ['device', 'host', 1, 0], but an earlier row is for the same",
        ),
        (
            "links",
            [["host", "device", math.nan, 0.0], ["device", "host", 1e9, 0.0]],
            "links[0][2] is nan, but must be null, or a finite number of bytes a second",
        ),
        (
            "links",
            [["host", "device", inf, 0.0], ["device", "host", 1e9, 0.0]],
            "links[0][2] is inf, but must be null, or a finite number of bytes a second",
        ),
        (
            "host_update_Bps",
            "fast",
            "host_update_Bps is 'fast', but must be null, or a finite number of bytes a second",
        ),
        (
            "links",
            [["host", "device", 1e9, None], ["device", "host", 1e9, 0.0]],
            "links[0][3] is None, but must be a finite number of seconds, 0 or more",
        ),
        (
            "links",
            [["host", "device", 1e9, -1], ["device", "host", 1e9, 0.0]],
            "links[0][3] is -1, but must be a finite number of seconds, 0 or more",
        ),
        ("one_processor", 1, "one_processor is 1, but must be true or false"),
        ("gpu", 1, "this has a key 'gpu', which no chunkmem machine has; allowed: format, version, device_nbytes, "),
    ],
)
def test_values_that_no_machine_has(key: str, value: object, says: str) -> None:
    assert raised_by(lambda: machine_from_dict({**machine_to_dict(MACHINE), key: value})).startswith(says)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("step_s",), -1, "step_s is -1, but must be a finite number of seconds, 0 or more"),
        (("plan_misses",), None, "plan_misses is None, but must be an integer from 0 to 2**63 - 1"),
        (("peak_nbytes", 0, 1), -1, "peak_nbytes[0][1] is -1, but must be an integer from 0 to 2**63 - 1"),
        (("peak_nbytes", 1, 0), "device", "peak_nbytes[1] is ['device', 8192], but an earlier row is for the same"),
        (("cap_nbytes",), [], 'cap_nbytes has no row for "device", which every timeline has'),
        (("role_peak_nbytes", 0, 1), None, "role_peak_nbytes[0][1] is None, but must be a string"),
        (("device_nbytes", 0), 1.5, "device_nbytes[0] is 1.5, but must be an integer from 0 to 2**63 - 1"),
        (("spans", 0, 2), 0.5, "spans[0] ends at 0.25 s, before it starts at 0.5 s"),
        (("spans", 0, 3), math.nan, "spans[0][3] is nan, but must be a finite number"),
        (("spans", 0, 5), 1, "spans[0][5] is 1, but must be null, or an index into chunks, which has 1 of them"),
        (("spans", 0, 6), -1, "spans[0][6] is -1, but must be an integer from 0 to 2**63 - 1"),
        (("spans", 0, 7), None, "spans[0][7] is None, but must be true or false"),
    ],
)
def test_values_that_no_timeline_has(path: tuple[Any, ...], value: object, says: str) -> None:
    assert raised_by(lambda: timeline_from_dict(changed(timeline_to_dict(TIMELINE), path, value))) == says


@pytest.mark.parametrize("key", ["version", "trace_digest", "actions"])
def test_every_key_is_needed(key: str) -> None:
    values = plan_to_dict(PLAN)
    del values[key]
    assert raised_by(lambda: plan_from_dict(values)) == f"{key} is missing, which every chunkmem plan has"


# Every kind of file: of an old version, the wrong one, and damage.


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("trace", "record it again"),
        ("plan", "make it again with `chunkmem plan`"),
        ("machine", "save it again with this one"),
        ("timeline", "record the run again"),
    ],
)
def test_a_file_of_the_first_version_is_refused_with_what_to_do(kind: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"format": f"chunkmem {kind}", "version": 1, "chunks": [], "of the past": 3}))
    with pytest.raises(KINDS[kind].error) as raised:
        KINDS[kind].load(file)
    assert str(raised.value) == (
        f"{file}: version of this chunkmem {kind} is 1, but this chunkmem reads only 2; {says}"
    )


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("given_one", KINDS)
def test_one_kind_where_another_is_meant(given_one: str, wanted: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    KINDS[given_one].save(KINDS[given_one].small, file)
    if given_one == wanted:
        assert KINDS[wanted].load(file) == KINDS[wanted].small
        return
    with pytest.raises(KINDS[wanted].error) as raised:
        KINDS[wanted].load(file)
    assert str(raised.value) == (
        f"{file}: this has the format 'chunkmem {given_one}', but a \"chunkmem {wanted}\" is needed here"
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_truncated_file_is_called_one(kind: FileKind, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    kind.save(kind.small, file)
    content = file.read_bytes()
    for length in range(1, len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(kind.error, match="the file looks truncated: it ends inside its chunkmem "):
            kind.load(file)


def outcome(kind: FileKind, file: Path) -> str:
    """Load a damaged file: "refused" in one sentence that names it, or "read" as something that can be saved."""
    try:
        read = kind.load(file)
    except kind.error as error:
        message = str(error)
        assert message.startswith(f"{file}: ")
        assert message.isprintable()
        assert len(message) < len(str(file)) + 300
        return "refused"
    kind.save(read, file)
    assert kind.load(file) == read
    str(read)
    return "read"


def with_damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes overwritten, lost, doubled or put elsewhere, once to three times."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice((0, 1, 1, 2, 10)))
        instead = rng.choice(
            (
                b"",
                bytes(rng.choices(range(256), k=max(1, end - start))),
                bytes(rng.choices(b'0123456789-+.eE[]{},:" \\', k=max(1, end - start))),
                2 * content[start:end],
                content[(at := rng.randrange(len(content) + 1)) : at + 10],
                rng.choice((b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 30, b'"\\ud800"', b"[[", b"true")),
            )
        )
        content = content[:start] + instead + content[end:]
    return content


def with_damaged_values(values: object, rng: random.Random) -> object:
    """One value, however deep, replaced by one that some other place could have, or dropped or doubled."""
    inner: Any = values
    while True:
        key = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], dict | list) or not inner[key] or rng.random() < 0.2:
            break
        inner = inner[key]
    odd = (None, True, 0, 1, -1, 2, 2**64, 0.5, -0.5, 1e308, math.nan, inf, "", "host", "param", "hold", "\n", [], {})
    change = rng.randrange(4)
    if change == 0:
        del inner[key]
    elif change == 1 and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(rng.choice(inner)))
    else:
        inner[key] = copy.deepcopy(rng.choice(odd))
    return values


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_damaged_bytes_are_refused_in_one_sentence_or_harmless(kind: FileKind, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    kind.save(kind.small, file)
    content = file.read_bytes()
    rng = random.Random(20)
    seen = set()
    for _ in range(800):
        file.write_bytes(with_damaged_bytes(content, rng))
        seen.add(outcome(kind, file))
    assert seen == {"refused", "read"}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_damaged_values_are_refused_in_one_sentence_or_harmless(kind: FileKind, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    kind.save(kind.small, file)
    content = file.read_bytes()
    rng = random.Random(21)
    seen = set()
    for _ in range(800):
        file.write_text(json.dumps(with_damaged_values(json.loads(content), rng)))
        seen.add(outcome(kind, file))
    assert seen == {"refused", "read"}
