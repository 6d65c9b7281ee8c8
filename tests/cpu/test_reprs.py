"""What objects show in a prompt: one line or a small table."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

import chunkmem
from chunkmem.data.types import Tier
from tests.cpu.test_metrics import Training, manager_of


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


def test_a_report_of_memory_is_its_table() -> None:
    with manager_of() as manager:
        Training(manager).step()
        report = manager.memory()
    assert repr(report) == str(report)
    with_more = replace(report, tiers={**report.tiers, Tier.DISK: report.host}, exchange_nbytes=(1, 2), left_nbytes=3)
    header, *lines = str(with_more).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")][:3] == ["DEVICE", "HOST", "DISK"]
    assert len(header) >= max(len(line) for line in lines if line.startswith("DEVICE"))
