"""memory.png and the data of timeline.html: everything they promise is in them."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunkmem.data.trace import Kind
from chunkmem.plan.model import Lane
from chunkmem.report.page import timeline_page
from chunkmem.report.picture import memory_picture
from chunkmem.report.run import LANE_NAMES, Run, lane_of
from tests.helpers.runs import MIB, make_run

Color = tuple[int, int, int]
BESIDE, CAP, MEASURED = (0xDD,) * 3, (0xD5, 0x5E, 0x00), (0xCC, 0x79, 0xA7)
ROLES = {
    "param": (0x00, 0x72, 0xB2),
    "grad": (0xE6, 0x9F, 0x00),
    "exp_avg": (0x56, 0xB4, 0xE9),
    "sq": (0x00, 0x9E, 0x73),
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "tight", Bps=2e8, activation_nbytes=MIB // 64)


def colors_in(run: Run) -> dict[Color, int]:
    """How many pixels there are of each colour."""
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("matplotlib.image").imread(io.BytesIO(memory_picture(run)))
    # Numbers of 24 bits: sorting rows of three would take seconds.
    pixels = (image[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    colors, counts = numpy.unique(pixels, return_counts=True)
    numbers = zip(colors.tolist(), counts.tolist(), strict=True)
    return {(color >> 16, color >> 8 & 255, color & 255): count for color, count in numbers}


def test_every_role_the_cap_and_what_is_beside_are_in_the_picture(run: Run) -> None:
    found = colors_in(run)
    for name, color in {**ROLES, "beside": BESIDE, "cap": CAP, "measured": MEASURED}.items():
        assert found.get(color, 0) > 1000, name


def test_what_nobody_measured_is_not_drawn(run: Run) -> None:
    assert MEASURED not in colors_in(replace(run, happened=replace(run.happened, device_nbytes=())))


def test_what_the_cap_does_not_cover_and_dwarfs_it_has_a_panel_of_its_own(run: Run) -> None:
    moments = tuple(replace(m, non_model_peak_nbytes=100 * MIB, sampled_peak_nbytes=MIB) for m in run.trace.moments)
    before, after = colors_in(run), colors_in(replace(run, trace=replace(run.trace, moments=moments)))
    # Beside a whole panel of it, the chunks keep more than half of their height.
    assert after[BESIDE] > 3 * before[BESIDE]
    assert after[ROLES["param"]] > before[ROLES["param"]] / 2
    assert sum(after.values()) > 1.1 * sum(before.values())


def test_names_that_are_no_formulas_and_of_no_end(run: Run) -> None:
    odd = replace(run, path=Path("/runs/$\\frac{" + 300 * "x" + "\u4e2d\n"))
    assert sum(colors_in(odd).values()) == sum(colors_in(run).values())


# The page.


def data_of(page: str) -> Any:
    """What a browser makes of it: the element ends at the first thing that looks like its end."""
    start = page.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    return json.loads(page[start : page.index("</script", start)])


def summed(differences: list[int]) -> list[int]:
    return [sum(differences[: i + 1]) for i in range(len(differences))]


def slices_of(data: Any, layer: dict[str, list[int]]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Start, duration and the words of each slice of a layer."""
    tips = [tuple(data["texts"][text] for text in data["tips"][tip]) for tip in layer["tip"]]
    return list(zip(summed(layer["start"]), layer["took"], tips, strict=True))


def test_spans_are_as_in_the_timeline_to_the_nanosecond(run: Run) -> None:
    data = data_of(timeline_page([run]))
    view = data["runs"][0]["views"]["happened"]
    tracks = {track["name"]: track["layers"] for track in view["lanes"]}
    shown = set()
    for lane in LANE_NAMES.values():
        shown |= {(lane, *values) for layer in tracks.get(lane, [])[:1] for values in slices_of(data, layer)}
    expected = set()
    for span in run.happened.spans:
        if not span.is_stall:
            start, end = round(1e9 * span.start_s), round(1e9 * span.end_s)
            what = f"{span.chunk}, 1.00 MiB"
            if span.nbytes:
                what = f"1.00 MiB ({span.nbytes:,} bytes), {span.nbytes / (end - start):.2f} GB/s"
            moment = run.trace.moments[span.moment]
            told = f"{what}\nmoment {span.moment}: {moment} ({moment.kind.value} {moment.chunk})"
            lane = LANE_NAMES[lane_of(span, run)]
            expected.add((lane, start, end - start, (f"{lane}: {span.label}", "", told)))
    assert shown == expected
    stalls = [round(1e9 * s.start_s) for s in run.happened.spans if s.is_stall]
    assert summed(tracks["compute"][1]["start"]) == stalls
    # What is fetched for the next step arrives after this one's end.
    assert view["range"] == [0, round(1e9 * max(span.end_s for span in run.happened.spans))]
    assert summed(view["starts"])[-1] == round(1e9 * run.happened.step_s)
    assert view["graphs"][0]["areas"][0][1] == list(run.predicted.device_nbytes)


def test_updates_that_the_host_made_are_on_a_lane_of_their_own(run: Run) -> None:
    # A step log has every moment on COMPUTE.
    spans = tuple(replace(s, lane=Lane.COMPUTE) if s.lane is Lane.HOST_UPDATE else s for s in run.happened.spans)
    assert spans != run.happened.spans
    made_on_compute = replace(run, happened=replace(run.happened, spans=spans))
    data = data_of(timeline_page([made_on_compute]))
    lanes = {track["name"]: track["layers"] for track in data["runs"][0]["views"]["happened"]["lanes"]}
    kinds = {
        lane: {words[2].rpartition("(")[2].split()[0] for *_, words in slices_of(data, lanes[lane][0])}
        for lane in ("updates on HOST", "compute")
    }
    assert kinds["updates on HOST"] == {Kind.UPDATE.value}
    assert kinds["compute"]
    assert Kind.UPDATE.value not in kinds["compute"]


HOSTILE = "</script><script>document.title='owned'</script><!--DATA--> & \" ' \\ \u2028 \ud800 <b>"


def test_a_label_cannot_leave_the_data(run: Run) -> None:
    moments = (replace(run.trace.moments[0], label=HOSTILE), *run.trace.moments[1:])
    spans = tuple(replace(span, label="") for span in run.happened.spans)
    hostile = replace(
        run,
        path=Path("/runs") / HOSTILE.replace("/", "_"),
        trace=replace(run.trace, moments=moments),
        happened=replace(run.happened, spans=spans),
    )
    page = timeline_page([hostile])
    data = data_of(page)
    moment, told = hostile.trace.moments[0], data["runs"][0]["views"]["happened"]["moments"]["line"][0]
    assert data["texts"][told] == f"moment 0: {HOSTILE} ({moment.kind.value} {moment.chunk})"
    assert f">{html.escape(HOSTILE.replace('/', '_'))}</h2>".encode("ascii", "xmlcharrefreplace").decode() in page
    assert page.count("</script>") == timeline_page([run]).count("</script>") == 2
    page.encode()


def test_the_page_is_whole_and_asks_for_nothing(run: Run) -> None:
    page = timeline_page([run, run])
    assert len(data_of(page)["runs"]) == 2
    assert "<!--" not in page
    assert "default-src 'none'" in page
    # No address, and nothing that loads one.
    assert re.findall(r"""https?:|\bfetch\(|import\(|XMLHttpRequest|url\((?!data:)|src=|href="(?!data:)""", page) == []
