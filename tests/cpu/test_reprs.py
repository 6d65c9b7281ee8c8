"""What objects show in a prompt: one line or a small table; and in a notebook."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import chunkmem
from chunkmem.memory import MemoryReport
from chunkmem.notebook import Bar, bars_html, table_html
from chunkmem.plan.timeline import Timeline
from tests.cpu.test_metrics import Training, manager_of
from tests.helpers.browser import HAS_BROWSER, Page, start_browser


@pytest.fixture(scope="module")
def shown() -> tuple[MemoryReport, Timeline]:
    with manager_of() as manager:
        training = Training(manager)
        for _ in range(3):
            training.step()
        timeline = manager.timeline()
        assert timeline is not None
        return manager.memory(), timeline


def test_each_is_one_line() -> None:
    manager = manager_of()
    training = Training(manager)
    numel = sum(param.numel() for param in training.model.parameters())
    held = rf"ChunkManager\(\d+ parameters of {numel:,} elements in \d+ chunk groups, DEVICE .* of .*, HOST .* of .*, "
    assert re.fullmatch(held + r"nothing recorded yet\)", repr(manager))
    training.step()
    assert repr(manager).endswith("nothing recorded yet)"), "what is recorded is learnt from when the next step begins"
    training.step()
    assert re.fullmatch(held + r"planned\)", repr(manager))
    assert re.fullmatch(r"Plan\('.+', \d+ moments, \d+ copies, groups updated: .* on HOST\)", repr(manager.plan))
    assert re.fullmatch(r"Trace\(train, \d+ moments, \d+ chunks of .* KiB, [\d.]+ ms\)", repr(manager.trace))
    timeline = manager.timeline()
    assert timeline is not None
    assert repr(timeline) == f"Timeline({1e3 * timeline.step_s:.1f} ms, {timeline})"
    assert "\n" not in repr(timeline)
    manager.close()
    assert repr(manager) == "ChunkManager(closed)"


def test_an_optimizer_shows_its_options() -> None:
    with manager_of() as manager:
        training = Training(manager)
        params = list(training.model.parameters())
        optimizer = chunkmem.AdamW(
            [{"params": params[:4]}, {"params": params[4:], "lr": torch.tensor(0.5)}],
            manager=manager,
            lr=0.25,
            eps=0.125,
        )
        assert repr(optimizer) == (
            f"AdamW({len(params)} parameters in 2 groups, lr=[0.25, 0.5], betas=(0.9, 0.999), eps=0.125, "
            "weight_decay=0.01)"
        )
        one = chunkmem.Optimizer(torch.optim.Adagrad, params, manager=manager, lr=0.5)
        assert repr(one) == f"Optimizer(Adagrad: {len(params)} parameters in 1 group, lr=0.5)"


def test_what_is_frozen_and_cached_and_split_shows_how_far_it_is() -> None:
    with manager_of() as manager:
        training = Training(manager)
        blocks = list(training.model.children())
        schedule = chunkmem.FreezeSchedule(blocks, alpha=0.5, adaptive=True)
        assert repr(schedule) == f"FreezeSchedule(0 of {len(blocks)} blocks frozen, epochs: 0, alpha=0.5, adaptive)"
        cache = chunkmem.FrozenCache(manager, host="64KiB")
        assert repr(cache) == "FrozenCache(0 samples from the cache, 0 computed)"
        cache.close()
        assert repr(cache) == "FrozenCache(closed)"
    assert repr(chunkmem.SplitSampler(64, batch_size=8)) == "SplitSampler(64 samples, batches of 8, epoch 0)"
    second = chunkmem.SplitSampler(64, batch_size=8, width=2, rank=1)
    assert repr(second) == "SplitSampler(64 samples, batches of 8, part 2 of 2, epoch 0)"


def test_a_configuration_shows_what_is_not_default() -> None:
    assert repr(chunkmem.Config()) == "Config()"
    config = chunkmem.Config.from_dict({"precision": "bf16", "memory": {"device": "4KiB"}})
    assert repr(config) == "Config(precision='bf16', memory.device=4096)"


def test_a_report_of_memory_is_its_table(shown: tuple[MemoryReport, Timeline]) -> None:
    report, _ = shown
    assert repr(report) == str(report)
    with_more = replace(report, disk=report.host, exchange_nbytes=(1, 2), left_nbytes=3)
    page = ET.fromstring(with_more._repr_html_())
    text = "".join(page.itertext())
    for line in str(with_more).splitlines():
        for cell in re.split(r"  +", line.strip()):
            assert cell in text
    rows = [[cell.text or "" for cell in row] for row in page.iter("tr")]
    assert {len(row) for row in rows} == {6}


def test_a_timeline_is_drawn(shown: tuple[MemoryReport, Timeline]) -> None:
    _, timeline = shown
    page = ET.fromstring(timeline._repr_html_())
    svg = "{http://www.w3.org/2000/svg}"
    names = [text.text for text in page.iter(f"{svg}text")]
    assert {"compute", "copies to DEVICE", "copies to HOST"} <= set(names)
    bars = list(page.iter(f"{svg}rect"))
    assert len(bars) > 10
    for bar in bars:
        assert 110 <= float(bar.get("x", "")) <= 900
        assert float(bar.get("width", "")) >= 1
        assert (bar.findtext(f"{svg}title") or "").strip()
    assert str(timeline) in "".join(page.itertext())


def test_what_it_shows_is_escaped() -> None:
    """Names of modules are the user's."""
    told = "<b>&'\""
    bars = bars_html([(told, [Bar(0.0, 1.0, told, "#000")])], end_s=1.0, caption=told)
    assert "".join(ET.fromstring(bars).itertext()).count(told) == 3
    assert "".join(ET.fromstring(table_html([told], [[told]], caption=told)).itertext()) == 3 * told


def test_there_are_no_more_bars_than_pixels() -> None:
    """A step of a large model has many thousands of operations."""
    bars = [Bar(1e-6 * index, 1e-6 * (index + 1), "x", "#000") for index in range(20_000)]
    page = ET.fromstring(bars_html([("compute", bars)], end_s=0.02, caption=""))
    found = list(page.iter("{http://www.w3.org/2000/svg}rect"))
    assert 300 < len(found) < 1000
    told = sum(int((bar[0].text or "").split()[0]) for bar in found if bar[0].text != "x")
    assert told + sum(bar[0].text == "x" for bar in found) == 20_000
    assert len(list(ET.fromstring(bars_html([("compute", [])], end_s=0.0, caption="")).iter())) > 1


@pytest.mark.full
@pytest.mark.skipif(not HAS_BROWSER, reason="needs Chromium and its driver")
def test_a_browser_shows_them(shown: tuple[MemoryReport, Timeline], tmp_path: Path) -> None:
    report, timeline = shown
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><body>{report._repr_html_()}{timeline._repr_html_()}</body>", encoding="utf-8")
    driver = start_browser(tmp_path / "profile")
    try:
        page = Page(driver, path)
        assert page.get("document.querySelectorAll('tr').length") > 5
        assert page.get("document.querySelector('svg').getBoundingClientRect().width") == 900
        assert page.get("document.querySelectorAll('rect').length") > 10
        assert driver.get_log("browser") == []
    finally:
        driver.quit()
