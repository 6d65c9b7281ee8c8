"""Traces in files: what is written, how it is written, and what is said of files that are not a trace."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Entry, Kind, Mode, Moment, Region, Trace
from chunkmem.data.types import ChunkId, Role
from tests.helpers.cpu_time import cpu_s

save_trace, load_trace, trace_to_dict, trace_from_dict = Trace.save, Trace.load, Trace.to_dict, Trace.from_dict

PARAM, GRAD = ChunkId(Role.PARAM, 0), ChunkId(Role.GRAD, 0)

SMALL = Trace(
    mode=Mode.TRAIN,
    layout="5f0c",
    chunk_nbytes={PARAM: 4096, GRAD: 2048},
    moments=(
        Moment(Kind.HOLD, PARAM, "fc forward", 0.1, 300, 280),
        Moment(Kind.CREATE, GRAD, "fc backward", 1e-7, 500),
        Moment(Kind.RELEASE, PARAM, "fc forward"),
        Moment(Kind.UPDATE, PARAM, "update 0", 2.5),
        Moment(Kind.CONSUME, GRAD),
    ),
    sampling_interval_s=0.002,
)

SMALL_TEXT = (
    '{"format":"chunkmem trace","version":2,"chunks":[["param",0],["grad",0]],'
    '"labels":["fc forward","fc backward","update 0",""],"mode":"train","layout":"5f0c",'
    '"chunk_nbytes":[[0,4096],[1,2048]],'
    '"moments":[["hold",0,0,0.1,300,280],["create",1,1,1e-07,500,0],["release",0,0,0.0,0,0],["update",0,2,2.5,0,0],'
    '["consume",1,3,0.0,0,0]],"sampling_interval_s":0.002,"remote_groups":[]}'
)


def test_entries_are_in_rows_that_have_some() -> None:
    """A file from before there were any, or of a moment that has none, has rows without."""
    entries = (Entry("blocks.1 forward", 0.25), Entry("blocks.2 forward", 1.0))
    trace = replace(SMALL, moments=(replace(SMALL.moments[0], entered=entries), *SMALL.moments[1:]), before_s=0.5)
    values = trace_to_dict(trace)
    assert values["moments"][0] == ["hold", 0, 0, 0.1, 300, 280, [[1, 0.25], [2, 1.0]]]
    assert values["labels"][:3] == ["fc forward", "blocks.1 forward", "blocks.2 forward"]
    read = trace_from_dict(json.loads(json.dumps(values)))
    assert (read.moments[0].entered, read.moments[1].entered, read.before_s) == (entries, (), 0.5)
    values["moments"][0][6][0][1] = 1.5
    with pytest.raises(TraceError, match="modules are entered at shares from 0 to 1"):
        trace_from_dict(values)


def test_a_moment_that_is_longer_has_its_entries_when_they_were() -> None:
    first, later = Entry("a forward", 0.5), Entry("b forward", 0.5)
    found = replace(SMALL.moments[0], duration_s=1.0, entered=(first,)).longer(3.0, (later,))
    assert (found.duration_s, found.entered) == (4.0, (Entry("a forward", 0.125), Entry("b forward", 0.625)))
    assert replace(SMALL.moments[2], entered=(first,)).longer(0.0).entered == (first,)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace that the dataclass takes."""
    nbytes = st.integers(0, 2**63 - 1)
    chunk_ids = st.builds(
        ChunkId,
        st.sampled_from([Role.PARAM, Role.GRAD, Role.MASTER, Role("exp_avg"), Role("another_state")]),
        st.integers(0, 2**40),
    )
    sizes = draw(st.dictionaries(chunk_ids, nbytes.filter(bool), min_size=1, max_size=8))
    seconds = st.floats(0, allow_infinity=False, allow_nan=False)
    events = st.tuples(st.sampled_from(Kind), st.sampled_from(sorted(sizes, key=str)))
    chosen: list[tuple[Kind, ChunkId]] = []
    held: set[ChunkId] = set()
    exchanged: set[ChunkId] = set()
    for kind, chunk in draw(st.lists(events, max_size=20)):
        # Only what is held can be released or exchanged, and nothing else can happen to it.
        if (chunk in held) != (kind in (Kind.RELEASE, Kind.EXCHANGE, Kind.ARRIVE)):
            continue
        if (chunk in exchanged) != (kind is Kind.ARRIVE) and chunk in held:
            continue
        if kind in (Kind.EXCHANGE, Kind.ARRIVE):
            exchanged ^= {chunk}
        if kind is Kind.HOLD:
            held.add(chunk)
        elif kind is Kind.RELEASE:
            held.remove(chunk)
        chosen.append((kind, chunk))
    chosen += [(Kind.ARRIVE, chunk) for chunk in sorted(exchanged, key=str)]
    chosen += [(Kind.RELEASE, chunk) for chunk in sorted(held, key=str)]
    moments = tuple(Moment(*event, *draw(st.tuples(st.text(), seconds, nbytes, nbytes))) for event in chosen)
    remote = frozenset(draw(st.sets(st.integers(0, 2**40), max_size=3)))
    return Trace(draw(st.sampled_from(Mode)), draw(st.text()), sizes, moments, draw(seconds), remote)


def long_trace(num_moments: int) -> Trace:
    """A saw-tooth over 100 chunks."""
    chunks = [ChunkId(Role.PARAM, group) for group in range(100)]
    moments = tuple(
        Moment(kind, chunks[index % 100], f"blocks.{index % 100}.mlp forward", 1e-3 / (index + 1), index, index)
        for index in range(num_moments // 2)
        for kind in (Kind.HOLD, Kind.RELEASE)
    )
    return Trace(Mode.TRAIN, "long", dict.fromkeys(chunks, 2**20), moments)


def changed(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """The data of `SMALL` with one value replaced."""
    values = copy.deepcopy(trace_to_dict(SMALL))
    *where, last = path
    inner: Any = values
    for key in where:
        inner = inner[key]
    inner[last] = value
    return values


def raised_by(call: Callable[[], object]) -> str:
    """The message of the TraceError that `call` raises."""
    with pytest.raises(TraceError) as raised:
        call()
    return str(raised.value)


# What is written.


def test_the_text_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    save_trace(SMALL, file)
    assert file.read_text() == SMALL_TEXT
    assert load_trace(file) == load_trace(str(file)) == SMALL


@given(traces())
def test_every_trace_survives(trace: Trace) -> None:
    text = json.dumps(trace_to_dict(trace), allow_nan=False)
    read = trace_from_dict(json.loads(text))
    assert read == trace
    assert list(read.chunk_nbytes) == list(trace.chunk_nbytes)
    assert read.digest == trace.digest
    assert all(type(moment.duration_s) is float for moment in read.moments)


def test_an_editor_may_add_a_byte_order_mark_and_spaces(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("\ufeff" + json.dumps(json.loads(SMALL_TEXT), indent=2) + "\n", encoding="utf-8")
    assert load_trace(file) == SMALL


def test_time_and_size_grow_with_the_moments_and_not_with_their_square(tmp_path: Path) -> None:
    def took_s(num_moments: int) -> float:
        trace = long_trace(num_moments)
        saving_s = cpu_s(lambda: save_trace(trace, tmp_path / "trace.json"))
        loading_s = cpu_s(lambda: load_trace(tmp_path / "trace.json"))
        assert load_trace(tmp_path / "trace.json") == trace
        return saving_s + loading_s

    few, many = (min(took_s(count) for _ in range(3)) for count in (1_000, 10_000))
    assert many < 30 * few
    assert (tmp_path / "trace.json").stat().st_size < 60 * 10_000


# How it is written.


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    save_trace(long_trace(100), file)
    save_trace(SMALL, file)
    assert load_trace(file) == SMALL
    assert os.listdir(tmp_path) == ["trace.json"]


def test_others_may_read_it_as_they_may_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    save_trace(SMALL, tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to(tmp_path / "runs" / "trace.json")
    save_trace(SMALL, link)
    assert link.is_symlink()
    assert load_trace(tmp_path / "runs" / "trace.json") == SMALL


def test_a_name_of_full_length(tmp_path: Path) -> None:
    file = tmp_path / ("t" * 255)
    save_trace(SMALL, file)
    assert load_trace(file) == SMALL


@pytest.mark.parametrize(
    ("span", "says"),
    [
        (1, "is 1, but must be null, or a list"),
        ([1], "is [1], but must be null, or a list of 2 values"),
        ([0, -1], "[1] is -1, but must be an integer from 0 to 2**63 - 1"),
    ],
)
def test_what_may_be_null_says_what_else_it_may_be(span: object, says: str) -> None:
    """Of a row it said nothing after the comma."""
    region = Region("blocks.0", ChunkId(Role.ACTIVATION, 7), 1, (0, 0), (0, 0))
    values = replace(SMALL, regions=(region,)).to_dict()
    values["regions"][0][5] = span
    separator = "" if says.startswith("[") else " "
    assert raised_by(lambda: Trace.from_dict(values)) == f"regions[0][5]{separator}{says}"


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize(
    ("error", "seen", "says"),
    [
        (OSError(28, "No space left on device"), TraceError, "No space left on device; give the path of a file that "),
        (PermissionError(13, "Permission denied"), TraceError, "Permission denied; give the path of a file that can "),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
    ],
)
def test_an_error_halfway_leaves_the_old_file_alone(
    function: str,
    error: BaseException,
    seen: type[BaseException],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "trace.json"
    save_trace(SMALL, file)

    def fail(*_: object) -> None:
        assert len(os.listdir(tmp_path)) == 2
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(seen, match=says):
        save_trace(long_trace(100), file)
    assert file.read_text() == SMALL_TEXT
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize(
    ("moment", "says"),
    [
        (
            Moment(Kind.CREATE, PARAM, duration_s=math.nan),
            "moments[0][3] is nan, but must be a finite number of seconds",
        ),
        (
            Moment(Kind.CREATE, PARAM, duration_s=math.inf),
            "moments[0][3] is inf, but must be a finite number of seconds",
        ),
        (Moment(Kind.CREATE, PARAM, sampled_peak_nbytes=-1), "moments[0][5] is -1, but must be an integer from 0 to"),
        (Moment(Kind.CREATE, PARAM, non_model_peak_nbytes=1.5), "moments[0][4] is 1.5, but must be an integer from 0"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_again_is_not_written(moment: Moment, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    save_trace(SMALL, file)
    wrong = Trace(Mode.TRAIN, "wrong", {PARAM: 1}, (moment,))
    assert raised_by(lambda: save_trace(wrong, file)).startswith(f"{file} cannot be written: {says}")
    assert file.read_text() == SMALL_TEXT


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "trace.json"
    assert raised_by(lambda: save_trace(SMALL, nowhere)) == (
        f"{nowhere} cannot be written: No such file or directory; create the directory {tmp_path / 'missing'} first"
    )
    assert os.listdir(tmp_path) == []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for place in (tmp_path, fifo):
        assert raised_by(lambda place=place: save_trace(SMALL, place)) == (
            f"{place} cannot be written: it is not a regular file; give the path of a file that can be written"
        )
    assert fifo.is_fifo()
    below_a_file = tmp_path / "file" / "trace.json"
    (tmp_path / "file").touch()
    assert raised_by(lambda: save_trace(SMALL, below_a_file)).startswith(
        f"{below_a_file} cannot be written: Not a directory; give the path"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in raised_by(lambda: save_trace(SMALL, tmp_path / "trace.json"))


@pytest.mark.parametrize("path", [None, 5, "", "a\0b", b"trace.json"])
def test_what_is_no_path(path: Any) -> None:
    says = f"{path!r} is not the path of a file; give one of a chunkmem trace"
    assert raised_by(lambda: save_trace(SMALL, path)) == says
    assert raised_by(lambda: load_trace(path)) == says


# Files that are no trace.


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty, so it is no chunkmem trace; save it again"),
        (b" \n", "the file is empty, so it is no chunkmem trace; save it again"),
        (b"epoch,loss\n1,2.5\n", "not JSON: line 1, column 1: Expecting value"),
        (b"\x00\x01\x02\x03", "not JSON: line 1, column 1: Expecting value"),
        (bytes(range(256)), "byte 128 is not UTF-8 text, so this is no chunkmem trace"),
        (SMALL_TEXT.encode("utf-16"), "byte 0 is not UTF-8 text, so this is no chunkmem trace"),
        (b'{"format": "chunkmem trace", "version": one}', "not JSON: line 1, column 41: Expecting value"),
        (b"[" * 1_000_000, "the content is nested too deeply to be a chunkmem trace"),
        (b'{"format":' * 1_000_000, "the content is nested too deeply to be a chunkmem trace"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice in one object"),
        (b"[]", "the content is [], but must be an object: a chunkmem trace"),
        (b"null", "the content is None, but must be an object: a chunkmem trace"),
        (b"{}", "format is missing, which every chunkmem trace has"),
        (b'{"format": "chunkmem trace"}', "version is missing, which every chunkmem trace has"),
        (
            b'{"format": "chunkmem plan", "version": 1}',
            "this has the format 'chunkmem plan', but a \"chunkmem trace\" is needed here",
        ),
        (
            b'{"format": "chunkmem trace", "version": 3, "lanes": []}',
            "version of this chunkmem trace is 3, but this chunkmem reads only up to 2; update chunkmem, or save it "
            "again with this one",
        ),
    ],
)
def test_files_that_are_no_trace(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    assert raised_by(lambda: load_trace(file)) == f"{file}: {says}"


def test_every_truncated_file_is_called_one(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    text = SMALL_TEXT.replace("fc forward", "fc → forward").encode()
    for length in range(1, len(text)):
        file.write_bytes(text[:length])
        says = "the file looks truncated: it ends inside its chunkmem trace; save or copy it again"
        assert raised_by(lambda: load_trace(file)) == f"{file}: {says}", text[:length]


def test_an_integer_of_too_many_digits(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(SMALL_TEXT.replace("4096", "9" * 5000))
    assert re.fullmatch(f"{re.escape(str(file))}: .* digits.*", raised_by(lambda: load_trace(file)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    advice = "give the path of a chunkmem trace"
    assert raised_by(lambda: load_trace(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory; {advice}"
    missing = tmp_path / "missing.json"
    assert raised_by(lambda: load_trace(missing)) == f"{missing}: cannot be read: No such file or directory; {advice}"


def test_a_message_is_one_line_whatever_is_in_labels_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "two\nlines.json"
    values = changed(("labels", 0), "a\nb\ud800")
    values["moments"][2][0] = "hold"
    file.write_text(json.dumps(values))
    assert raised_by(lambda: load_trace(file)) == (
        f"{tmp_path}/two\\nlines.json: moment 2 (a\\nb\\ud800) holds param chunk 0, which is held already"
    )


# Values that no trace has.


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("format",), 5, 'this has the format 5, but a "chunkmem trace" is needed here'),
        (("version",), 0, "version is 0, but must be an integer from 1 to 2"),
        (("version",), True, "version is True, but must be an integer from 1 to 2"),
        (("version",), "1", "version is '1', but must be an integer from 1 to 2"),
        (("mode",), "test", 'mode is \'test\', but must be "train" or "eval"'),
        (("mode",), ["train"], 'mode is [\'train\'], but must be "train" or "eval"'),
        (("layout",), None, "layout is None, but must be a string"),
        (("chunks",), {}, "chunks is {}, but must be a list"),
        (("chunks", 1), 7, "chunks[1] is 7, but must be a list"),
        (("chunks", 1), ["grad"], "chunks[1] is ['grad'], but must be a list of 2 values"),
        (("chunks", 1), ["param", 0], "chunks[1] is ['param', 0], but an earlier row is for the same"),
        (
            ("chunks", 1, 0),
            "two words",
            "chunks[1][0] is 'two words', but must be the name of a role",
        ),
        (("chunks", 1, 1), -1, "chunks[1][1] is -1, but must be an integer from 0 to 2**63 - 1"),
        (("chunks", 1, 1), 0.0, "chunks[1][1] is 0.0, but must be an integer from 0 to 2**63 - 1"),
        (("chunks", 1, 1), True, "chunks[1][1] is True, but must be an integer from 0 to 2**63 - 1"),
        (("chunk_nbytes", 1), [0, 9], "chunk_nbytes[1] is [0, 9], but an earlier row is for the same"),
        (("chunk_nbytes", 1, 1), 0, "chunk_nbytes[1][1] is 0, but must be an integer from 1 to 2**63 - 1"),
        (
            ("chunk_nbytes", 1, 1),
            2**63,
            "chunk_nbytes[1][1] is 9223372036854775808, but must be an integer from 1 to 2**63 - 1",
        ),
        (("labels", 2), 3, "labels[2] is 3, but must be a string"),
        (("moments",), "none", "moments is 'none', but must be a list"),
        (("moments", 1), "create", "moments[1] is 'create', but must be a list"),
        (("moments", 1), ["create", 1], "moments[1] is ['create', 1], but must be a list of 6 values"),
        (
            ("moments", 1, 0),
            "read",
            'moments[1][0] is \'read\', but must be "hold", "release", "create", "write", "update", "consume", '
            '"exchange" or "arrive"',
        ),
        (("moments", 1, 1), 2, "moments[1][1] is 2, but must be an index into chunks, which has 2 of them"),
        (("moments", 1, 1), -1, "moments[1][1] is -1, but must be an index into chunks, which has 2 of them"),
        (("moments", 1, 2), 4, "moments[1][2] is 4, but must be an index into labels, which has 4 of them"),
        (("moments", 1, 3), -0.5, "moments[1][3] is -0.5, but must be a finite number of seconds, 0 or more"),
        (("moments", 1, 3), math.nan, "moments[1][3] is nan, but must be a finite number of seconds, 0 or more"),
        (("moments", 1, 3), math.inf, "moments[1][3] is inf, but must be a finite number of seconds, 0 or more"),
        (("moments", 1, 3), "1", "moments[1][3] is '1', but must be a finite number of seconds, 0 or more"),
        (("moments", 1, 4), -1, "moments[1][4] is -1, but must be an integer from 0 to 2**63 - 1"),
        (("moments", 1, 5), 1.5, "moments[1][5] is 1.5, but must be an integer from 0 to 2**63 - 1"),
        (("moments", 0, 0), "create", "moment 2 (fc forward) releases param chunk 0, which is not held"),
        (
            ("lanes",),
            [],
            "this has a key 'lanes', which no chunkmem trace has; allowed: format, version, chunks, labels, mode, "
            "layout, chunk_nbytes, moments, sampling_interval_s, remote_groups, regions, before_s, update_form, "
            "by_block",
        ),
        (
            ("sampling_interval_s",),
            -0.001,
            "sampling_interval_s is -0.001, but must be a finite number of seconds, 0 or more",
        ),
        (
            ("sampling_interval_s",),
            None,
            "sampling_interval_s is None, but must be a finite number of seconds, 0 or more",
        ),
    ],
)
def test_values_that_no_trace_has(path: tuple[Any, ...], value: object, says: str) -> None:
    assert raised_by(lambda: trace_from_dict(changed(path, value))) == says


@pytest.mark.parametrize("key", sorted(trace_to_dict(SMALL)))
def test_every_key_is_needed(key: str) -> None:
    values = trace_to_dict(SMALL)
    del values[key]
    assert raised_by(lambda: trace_from_dict(values)) == f"{key} is missing, which every chunkmem trace has"


EXCHANGED = [(Kind.HOLD, PARAM), (Kind.EXCHANGE, PARAM), (Kind.ARRIVE, PARAM), (Kind.RELEASE, PARAM)]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ((1, 2), "moment 0 (exchange param chunk 0): exchange of param chunk 0, which has to be held"),
        ((0, 2, 3), "moment 1 (arrive param chunk 0): arrive of param chunk 0, which has to be held"),
        ((0, 1, 1, 2, 3), "moment 2 (exchange param chunk 0): exchange of param chunk 0, which has to be held"),
        ((0, 1, 3), "moment 2 (release param chunk 0) releases param chunk 0, whose exchange has no ARRIVE"),
    ],
)
def test_an_exchange_is_of_what_is_held_and_ends_before_its_release(order: Sequence[int], says: str) -> None:
    moments = tuple(Moment(*EXCHANGED[at]) for at in order)
    assert raised_by(lambda: Trace(Mode.TRAIN, "", {PARAM: 4}, moments)).startswith(says)


def test_whose_groups_are_remote_is_part_of_the_identity() -> None:
    moments = tuple(Moment(*event) for event in EXCHANGED)
    one, other = (Trace(Mode.TRAIN, "", {PARAM: 4}, moments, remote_groups=frozenset(found)) for found in ((), (0,)))
    assert one.digest != other.digest


def test_a_negative_interval() -> None:
    says = "sampling_interval_s is -1; seconds are 0 or more"
    assert raised_by(lambda: replace(SMALL, sampling_interval_s=-1)) == says


def test_chunks_of_two_roles_held_to_the_end() -> None:
    values = trace_to_dict(SMALL)
    values["moments"] = [["hold", 0, 0, 0, 0, 0], ["hold", 1, 0, 0, 0, 0]]
    assert raised_by(lambda: trace_from_dict(values)) == "grad chunk 0 is still held at the trace's end"
