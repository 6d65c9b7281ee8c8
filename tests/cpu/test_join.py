"""Ranks whose evaluations take different numbers of calls: who is done answers the others' gathers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import StateError
from chunkmem.runtime.policy import BetweenSteps
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager
from tests.helpers.twins import assert_equal, config, copied, features, mlp

SIZES = [pytest.param(2), pytest.param(3, marks=pytest.mark.full)]
TASKS = [Task(), Task(device_nbytes=8 << 20), Task("checkpointed", config={"precision": "bf16"})]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    made = {size: Team(size) for size in (2, 3)}
    yield made
    for team in made.values():
        team.close()


@torch.no_grad()
def generate(model: nn.Module, start: int, length: int) -> list[int]:
    """Greedy, without a cache."""
    words = [start]
    for _ in range(length):
        words.append(int(model(torch.tensor([words]))[0, -1].argmax()))
    return words


def lengths(rank: int, step: int) -> int:
    return (7 * rank + 3 * step) % 5


@dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    words: list[list[int]]
    before: list[dict[str, Tensor]]
    """Weights that words were generated with, two lists each."""
    recorded: list[str]
    """Which kinds of steps were recorded."""


@contextmanager
def noting(recorded: list[str]) -> Iterator[None]:
    """Inside, put down which kinds of steps are recorded."""
    log = logging.getLogger("chunkmem.plan")
    level = log.level
    log.setLevel(logging.INFO)

    def note(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        recorded.extend([message.split()[0]] if "recorded, as" in message else [])
        return False

    log.addFilter(note)
    yield
    log.removeFilter(note)
    log.setLevel(level)


def trained(rank: int, task: Task, joins: bool) -> Outcome:
    """Train, and generate between steps and in the middle of some; in one, rank 0 has no batch."""
    torch.set_num_threads(1)
    recorded: list[str] = []
    with open_manager(rank, task) as manager, noting(recorded):
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        found = Outcome([], {}, [], [], recorded)
        for step in range(7):
            for part in range(0 if (step, rank) == (4, 0) else 2):
                loss = loss_of(model, batch_of(task, step, part, rank))
                manager.backward(loss)
                found.losses.append(loss.item())
                if joins and step in (2, 5) and part == 0:
                    with manager.join():
                        generate(model, rank, lengths(rank, step))
            optimizer.step()
            optimizer.zero_grad()
            if joins:
                found.before.append(copied(manager.state_dict()))
                with manager.join():
                    found.words.append(generate(model, rank, lengths(rank, step)))
                    with manager.join():
                        found.words.append(generate(model, rank, 1))
                assert isinstance(manager.runtime.memory.pager.policy, BetweenSteps)  # the evaluation is over
            audit(manager)
        found.weights = copied(manager.state_dict())
        return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.few(1)
@pytest.mark.parametrize("task", TASKS)
def test_a_rank_that_is_done_answers_the_others(teams: dict[int, Team], size: int, task: Task) -> None:
    joined, plain = teams[size].run(trained, task, True), teams[size].run(trained, task, False)
    for rank, (found, expected) in enumerate(zip(joined, plain, strict=True)):
        assert_equal((found.losses, found.weights), (expected.losses, expected.weights))
        assert found.recorded == ["eval", "train"]
        alone = MODELS[task.model]()
        words = []
        for step, weights in enumerate(found.before if "precision" not in task.config else ()):
            alone.load_state_dict(weights)
            words += [generate(alone, rank, lengths(rank, step)), generate(alone, rank, 1)]
        assert words in (found.words, [])


# Errors.


def told(rank: int, deed: str) -> tuple[list[str], list[list[int]]]:
    """Do something odd on rank 0 inside a block; return the errors of this rank, and what it generated."""
    torch.set_num_threads(1)
    errors: list[str] = []
    words: list[list[int]] = []
    with open_manager(rank, Task(config={"distributed": {"timeout_s": 30.0}})) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS["tied"]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        task = Task()

        def train() -> None:
            manager.backward(loss_of(model, batch_of(task, 0, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()

        def answer(lists: Any) -> None:
            raise ValueError("no answer")

        def odd() -> None:
            if deed == "raises":
                raise ValueError("mine")
            if deed == "raises in a forward":
                hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
                try:
                    generate(model, 0, 1)
                finally:
                    hook.remove()
            if deed == "gradients":
                model(torch.tensor([[1]]))
            if deed == "backward":
                loss.backward()
            if deed == "step":
                optimizer.step()
            if deed == "state_dict":
                manager.state_dict()
            if deed == "cannot answer":
                manager.runtime.sharding.shards.join_gather = answer  # type: ignore[union-attr, method-assign]
            if deed == "interrupted":
                raise KeyboardInterrupt

        train()
        began_s = time.monotonic()
        loss = loss_of(model, batch_of(task, 0, 0, rank)) if deed == "backward" else None
        try:
            if deed == "no block" and rank == 0:
                train()
            else:
                with manager.join():
                    if deed != "no block":
                        words.append(generate(model, rank, 2))
                    if rank == 0:
                        odd()
                    elif deed != "no block":
                        words.append(generate(model, rank, 4))
        except (Exception, KeyboardInterrupt) as error:
            errors.append(f"{type(error).__name__}: {error}")
            if deed == "cannot answer" and rank == 0:
                time.sleep(6)  # it does not leave, and the others have heard of it
            assert (deed, rank) != ("cannot answer", 1) or time.monotonic() - began_s < 5
        if deed in GO_ON:
            optimizer.zero_grad()
            train()
            audit(manager)
            words.append(generate(model, 1, 2))
    return errors, words


GO_ON = {
    "raises": "ValueError: mine",
    "raises in a forward": "ZeroDivisionError: division by zero",
    "gradients": "StateError: manager.join(): a model is called with gradients inside; call it under torch.no_grad()",
    "backward": "StateError: manager.join(): a backward runs inside; leave the block first",
    "step": "StateError: optimizer.step() inside manager.join(): leave the block first",
}
"""Errors after which the others have what they wanted, and all can go on."""
ENDS = {
    "state_dict": "rank 0 in 'manager.state_dict()', rank 1 in",
    "no block": "rank 0 in 'optimizer.step() with",
    "cannot answer": "rank 0 raised ValueError: no answer",
    "interrupted": "rank 0",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("deed", GO_ON)
def test_a_rank_that_raises_answers_the_others_first(teams: dict[int, Team], deed: str) -> None:
    (errors, words), (others_errors, others_words) = teams[2].run(told, deed)
    assert errors == [GO_ON[deed]]
    assert others_errors == []
    assert [len(each) for each in others_words] == [3, 5, 3]
    assert words[-1] == others_words[-1]


@pytest.mark.parametrize("deed", [*list(ENDS)[:2], *(pytest.param(e, marks=pytest.mark.full) for e in list(ENDS)[2:])])
def test_errors_name_ranks_and_places(teams: dict[int, Team], deed: str) -> None:
    (errors, _), (others_errors, _) = teams[2].run(told, deed)
    assert len(errors) == len(others_errors) == 1
    assert others_errors[0].startswith("RankError: ")
    assert ENDS[deed] in others_errors[0]
    if deed == "state_dict":
        assert errors[0].startswith("RankError: the ranks are in different places")
    if deed == "no block":
        assert "rank 1 in 'manager.join()'" in others_errors[0]
        assert errors == others_errors


def test_one_process_joins_nobody() -> None:
    with chunkmem.ChunkManager(config(1 << 20)) as manager:
        model = manager.wrap(mlp())
        with manager.join(), manager.join():
            model(features(0)).sum().backward()
    with pytest.raises(StateError, match="closed"), manager.join():
        pass
