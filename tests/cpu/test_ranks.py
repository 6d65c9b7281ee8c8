"""Training over ranks: the numbers of one process that adds up the gradients of all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.trace import Kind
from tests.helpers.ranks import Team
from tests.helpers.shared_training import (
    MODELS,
    Block,
    Net,
    Outcome,
    Task,
    batch_of,
    loss_of,
    make_config,
    serial,
    train,
)
from tests.helpers.spread import spread

ALL = (2, 3, 4)
ORDINARY = {(2, model) for model in MODELS}
"""What an ordinary run trains: ranks and models."""
CHUNK_NBYTES = 1600 * 4
NUM_CHUNKS = 4
"""Of weights, in the model with tied ones."""
LEAST_NBYTES = {"reused": 32_000, "routed": 44_800}
"""What DEVICE has to hold at least, where that is more than for the other models."""
WAYS: dict[str, dict[str, Any]] = {
    "point to point": {},
    "grouped": {"client": {"opts": {"with_mem_saving_comm": False}}},
    "memory-saving": {"client": {"opts": {"with_mem_saving_comm": True}}},
}


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in ALL}
    yield found
    for team in found.values():
        team.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(teams: dict[int, Team], size: int, task: Task) -> list[Outcome]:
    outcomes: list[Outcome] = teams[size].run(train, task)
    for outcome in outcomes[1:]:
        assert_equal(outcome, outcomes[0].weights, outcomes[0].states)
    return outcomes


def assert_equal(outcome: Outcome, weights: dict[str, Tensor], states: dict[int, dict[str, Tensor]]) -> None:
    assert outcome.weights.keys() == weights.keys()
    assert [key for key, value in weights.items() if not torch.equal(value, outcome.weights[key])] == []
    assert outcome.states.keys() == states.keys()
    for index, state in states.items():
        assert all(torch.equal(value, outcome.states[index][key]) for key, value in state.items()), index


def matrix() -> list[Any]:
    return [
        pytest.param(size, model, marks=[] if (size, model) in ORDINARY else [pytest.mark.full], id=f"{size}-{model}")
        for size in ALL
        for model in MODELS
    ]


SIZES = [pytest.param(size, marks=[] if size == 2 else [pytest.mark.full]) for size in ALL]


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "model"), matrix())
def test_point_to_point_has_the_bits_of_one_process(teams: dict[int, Team], size: int, model: str) -> None:
    task = Task(model)
    losses, weights, states = serial(task, size)
    for rank, outcome in enumerate(run(teams, size, task)):
        assert outcome.losses == losses[rank]
        assert_equal(outcome, weights, states)


@pytest.mark.full
@pytest.mark.parametrize("size", ALL)
@pytest.mark.parametrize("is_tight", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_at_any_cap(teams: dict[int, Team], size: int, model: str, *, is_tight: bool) -> None:
    task = Task(model, steps=20, device_nbytes=LEAST_NBYTES.get(model, 26 << 10) if is_tight else 1 << 20)
    _, weights, states = serial(task, size)
    for outcome in run(teams, size, task):
        assert_equal(outcome, weights, states)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "point to point"])
def test_collectives_of_the_library_come_close(teams: dict[int, Team], size: int, way: str) -> None:
    task = Task("reused", steps=20, config=WAYS[way])
    losses, _, _ = serial(task, size)
    for rank, outcome in enumerate(run(teams, size, task)):
        assert outcome.losses == pytest.approx(losses[rank], abs=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("keys", "model"),
    [
        pytest.param({}, "tied", id="guessed-tied", marks=pytest.mark.full),
        pytest.param({}, "reused", id="guessed-reused"),
        pytest.param({"says_last": True}, "tied", id="said-tied"),
        pytest.param({"says_last": True}, "reused", id="said-reused", marks=pytest.mark.full),
    ],
)
def test_micro_batches_are_reduced_once_a_step(teams: dict[int, Team], keys: dict[str, Any], model: str) -> None:
    """Also where backward comes to a unit twice."""
    task = Task(model, micro_batches=3, steps=5, **keys)
    _, weights, states = serial(task, 2)
    one = run(teams, 2, Task(model, steps=5, **keys))
    for outcome in run(teams, 2, task):
        assert outcome.num_reductions == one[0].num_reductions
        assert_equal(outcome, weights, states)


def test_a_wrong_guess_costs_traffic_only(teams: dict[int, Team]) -> None:
    """The first step has one backward more than declared: what was reduced too early is reduced again."""
    outcomes = teams[2].run(train_with_a_wrong_guess)
    expected = serial(Task(micro_batches=2, steps=3), 2)[1]
    for weights in outcomes:
        # Means are added up in another order: (a + b) / 2 + (c + d) / 2.
        assert all(torch.allclose(weights[key], value, atol=1e-6) for key, value in expected.items())
    assert all(torch.equal(outcomes[0][key], value) for key, value in outcomes[1].items())


class Prefixed(Net):
    """The first blocks without gradients: a step of training, and no evaluation."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return x


def exchange(rank: int, model: type[nn.Module]) -> list[int]:
    """Train; return the bytes that came from other ranks in each step."""
    torch.set_num_threads(1)
    task = Task(device_nbytes=120 << 10)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        with manager.init():
            built = model()
        optimizer = chunkmem.AdamW(built.parameters(), manager=manager, lr=1e-2)
        assert manager.runtime.sharding.shards is not None
        traffic, received = manager.runtime.sharding.shards.exchange.traffic, [0]
        for step in range(6):
            manager.backward(loss_of(built, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
            received.append(traffic.received_nbytes)
        return [after - before for before, after in pairwise(received)]


def test_a_part_without_gradients_exchanges_no_more_than_with_them(teams: dict[int, Team]) -> None:
    for whole, part in zip(teams[2].run(exchange, Net), teams[2].run(exchange, Prefixed), strict=True):
        assert max(part[-2:]) <= min(whole[-2:])


def train_with_a_wrong_guess(rank: int) -> dict[str, Tensor]:
    task = Task(micro_batches=2, steps=3)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.accumulate(1)
        for step in range(3):
            for micro in range(2):
                manager.backward(loss_of(model, batch_of(task, step, micro, rank)))
            optimizer.step()
            optimizer.zero_grad()
        return manager.state_dict()


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_a_batch_adds_zeros(teams: dict[int, Team], size: int) -> None:
    task = Task("routed", steps=6, empty=((0, 0), (2, 1), (4, 0), (5, 1)))
    _, weights, states = serial(task, size)
    for outcome in run(teams, size, task):
        assert_equal(outcome, weights, states)


UNEVEN = {
    "fewer micro-batches on one rank": Task(micro_batches=2, short=((0, 1, 1), (3, 0, 1), (4, 1, 0))),
    "more than in the step before": Task(micro_batches=1, short=((3, 1, 2), (4, 0, 3))),
    "no backward on one rank": Task("tied", without_backward=((1, 0), (4, 1))),
    "no backward on any rank": Task("plain", steps=6, without_backward=((2, 0), (2, 1))),
    "no batch on any rank": Task("reused", device_nbytes=96 << 10, steps=6, empty=((0, 0), (0, 1), (3, 0), (3, 1))),
}
WRONG_GUESSES = ("more than in the step before",)
"""What is reduced too early is added up in another order."""


@pytest.mark.few(1)
@spread(what=UNEVEN, way=WAYS)
def test_ranks_that_have_less_to_do_take_part_in_what_others_exchange(
    teams: dict[int, Team], what: str, way: str
) -> None:
    task = replace(UNEVEN[what], config=WAYS[way])
    _, weights, states = serial(task, 2)
    for outcome in run(teams, 2, task):
        if way == "point to point" and what not in WRONG_GUESSES:
            assert_equal(outcome, weights, states)
        else:
            assert all(torch.allclose(outcome.weights[key], value, atol=1e-4) for key, value in weights.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_clipping_is_by_the_norm_over_all_ranks(teams: dict[int, Team], precision: str) -> None:
    keys = {
        "gradient_clipping": 0.05,
        "precision": precision,
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8},
    }
    task = Task(config=keys, steps=4)
    losses, _, _ = serial(task, 2)
    tolerance = 1e-5 if precision == "fp32" else 5e-2
    for rank, outcome in enumerate(run(teams, 2, task)):
        assert outcome.losses == pytest.approx(losses[rank], abs=tolerance)


IN_BACKWARD = {"optimizer": {"params": {"in_backward": True}}}


@pytest.mark.few(1)
@spread(model=MODELS, way=WAYS, precision=("fp32", "bf16"), is_tight=(True, False))
def test_updates_inside_backward_change_no_bit(
    teams: dict[int, Team], model: str, way: str, precision: str, *, is_tight: bool
) -> None:
    """Also where a rank has no batch, or no backward."""
    task = Task(
        model,
        steps=6,
        config=WAYS[way] | {"precision": precision},
        device_nbytes=LEAST_NBYTES.get(model, 26 << 10) if is_tight else 1 << 20,
        empty=((2, 1),),
        without_backward=((3, 0),),
    )
    expected = run(teams, 2, task)[0]
    for outcome in run(teams, 2, replace(task, config=task.config | IN_BACKWARD)):
        assert_equal(outcome, expected.weights, expected.states)


def update_in_backward(rank: int, size: int) -> tuple[int, int, int]:
    """Of a planned step: own groups, those updated before the last gradient begins, and plan misses."""
    torch.set_num_threads(1)
    task = Task("plain", device_nbytes=26 << 10, config=IN_BACKWARD)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = nn.Sequential(*(Block() for _ in range(8)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(5):
            draw = torch.Generator().manual_seed(size * step + rank)
            manager.backward(model(torch.randn(4, 16, generator=draw)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        trace, timeline, slots = manager.trace, manager.timeline(), manager.runtime.updater.gradients.slots
        assert trace is not None
        assert timeline is not None
        kinds = [moment.kind for moment in trace.moments]
        last = max(index for index, kind in enumerate(kinds) if kind is Kind.CREATE)
        owned = [group for group in slots.groups if manager.runtime.sharding.shards.owns(group)]
        return len(owned), kinds[:last].count(Kind.UPDATE), timeline.plan_misses


def test_updates_come_after_each_reduction_and_are_planned(teams: dict[int, Team]) -> None:
    for num_owned, num_early, plan_misses in teams[2].run(update_in_backward, 2):
        assert num_owned > 2
        assert num_early >= num_owned - 1, "all but the last"
        assert plan_misses == 0


def two_graphs(rank: int, keys: dict[str, Any]) -> dict[str, Tensor]:
    """Two graphs are there before the first backward, so weights that the second has saved wait for the step."""
    torch.set_num_threads(1)
    task = Task(config=keys)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        manager.accumulate(1)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(3):
            for loss in [loss_of(model, batch_of(task, step, micro, rank)) for micro in range(2)]:
                manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return manager.state_dict()


def test_weights_that_another_graph_has_saved_are_updated_by_the_step(teams: dict[int, Team]) -> None:
    expected = teams[2].run(two_graphs, {})
    for weights in teams[2].run(two_graphs, IN_BACKWARD):
        assert [key for key, value in expected[0].items() if not torch.equal(value, weights[key])] == []


def compute_too_early(rank: int, what: str) -> None:
    task = Task(config=IN_BACKWARD)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.backward(loss_of(model, batch_of(task, 0, 0, rank)))
        if what == "zero_grad":
            optimizer.zero_grad()
        elif what == "forward":
            loss_of(model, batch_of(task, 1, 0, rank))
        elif what == "options":
            optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("forward", "forward reads parameter words.weight between backward and optimizer.step(): 1 parameters"),
        ("zero_grad", "zero_grad() between backward and optimizer.step()"),
        ("options", "the optimizer's options were changed between backward and step()"),
    ],
)
def test_nothing_is_computed_with_weights_that_are_newer_than_their_step(
    teams: dict[int, Team], what: str, words: str
) -> None:
    for said in teams[2].errors(compute_too_early, what):
        assert said.startswith("chunkmem.data.errors.StateError: ")
        assert words in said


def test_each_rank_keeps_its_share(teams: dict[int, Team]) -> None:
    """Own weights and states, and on DEVICE what units need of the others."""
    task = Task(steps=4, device_nbytes=26 << 10)
    outcomes = run(teams, 2, task)
    shares = [NUM_CHUNKS // 2 * CHUNK_NBYTES, (NUM_CHUNKS + 1) // 2 * CHUNK_NBYTES]
    for role in ("param", "exp_avg", "exp_avg_sq"):
        assert sorted(outcome.memory.host.by_role[role][0] for outcome in outcomes) == shares
    for outcome, share in zip(outcomes, sorted(shares, reverse=True), strict=True):
        assert outcome.memory.device.by_role["param"][0] <= share, "what was fetched for the next step"
    assert all(outcome.memory.device.peak_nbytes <= 26 << 10 for outcome in outcomes)
    assert all(
        outcome.memory.host.by_role["exp_avg"][1] <= (NUM_CHUNKS + 1) // 2 * CHUNK_NBYTES for outcome in outcomes
    )


def test_another_configuration_on_a_rank_stops_all(teams: dict[int, Team]) -> None:
    said = teams[2].errors(train_otherwise)
    assert said[0] == said[1]
    assert "memory.device of the configuration differs between ranks: 65536 on rank 0, 65537 on rank 1" in said[0]


def train_otherwise(rank: int) -> None:
    train(rank, Task(device_nbytes=(64 << 10) + rank))


def test_another_model_on_a_rank_stops_all(teams: dict[int, Team]) -> None:
    said = teams[2].errors(train_another_model)
    assert said[0] == said[1]
    assert "the layout of the chunks differs between ranks" in said[0]


def train_another_model(rank: int) -> None:
    train(rank, Task("tied" if rank else "plain"))


# What is not in chunks, and what leaves them.


class Mixed(nn.Module):
    """A shared part, an excluded one whose gradients are averaged, and one whose are each rank's own."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        self.first = Block()
        with manager.exclude() if manager else contextlib.nullcontext():
            self.averaged = nn.Linear(16, 16)
        with manager.exclude(reduce=False) if manager else contextlib.nullcontext():
            self.own = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.own(self.averaged(self.first(x)))
        return result


class Normed(nn.Module):
    """A batch norm, whose statistics are each rank's, a buffer of random numbers, and a module outside of chunks."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        self.first = Block()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("noise", torch.randn(16))
        self.register_buffer("mask", torch.rand(16) > 0.5)
        with manager.exclude() if manager else contextlib.nullcontext():
            self.averaged = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.averaged(self.norm(self.first(x)) + self.noise * self.mask)
        return result


def rows_of(step: int, rank: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def train_normed(rank: int) -> tuple[dict[str, Tensor], Tensor, float]:
    torch.set_num_threads(1)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"default_chunk_size": 1600})) as manager:
        torch.manual_seed(5 + rank)
        own = torch.random.get_rng_state()
        with manager.init():
            model = Normed(manager)
        is_own_again = rank == 0 or torch.equal(torch.random.get_rng_state(), own)
        assert is_own_again
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(3):
            manager.backward(model(rows_of(step, rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            seen = model.eval()(rows_of(9, 0)).sum().item()
        model.train()(rows_of(7, rank))  # a rank's own statistics again
        return manager.state_dict(), model.averaged.weight.detach().clone(), seen


def test_ranks_with_seeds_and_statistics_of_their_own_have_those_of_the_first(teams: dict[int, Team]) -> None:
    torch.manual_seed(5)
    model = Normed(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        before = {key: value.clone() for key, value in model.named_buffers()}
        optimizer.zero_grad()
        model(rows_of(step, 1)).square().mean().backward()
        others = [param.grad for param in model.parameters()]
        for key, value in model.named_buffers():
            value.copy_(before[key])
        optimizer.zero_grad()
        model(rows_of(step, 0)).square().mean().backward()
        for param, other in zip(model.parameters(), others, strict=True):
            assert param.grad is not None
            assert other is not None
            param.grad = (param.grad + other) / 2
        optimizer.step()
    with torch.no_grad():
        expected = model.eval()(rows_of(9, 0)).sum().item()
    model.train()(rows_of(7, 0))
    for state, averaged, seen in teams[2].run(train_normed):
        assert seen == expected
        assert torch.equal(averaged, model.averaged.weight)
        assert state.keys() == model.state_dict().keys()
        assert [key for key, value in model.state_dict().items() if not torch.equal(state[key], value)] == []


def train_mixed(rank: int) -> dict[str, Tensor]:
    with chunkmem.ChunkManager(make_config(Task())) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Mixed(manager)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + rank)
            manager.backward(model(torch.randn(3, 16, generator=draw)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return manager.state_dict()


def test_excluded_modules_are_averaged_unless_said_otherwise(teams: dict[int, Team]) -> None:
    first, second = teams[2].run(train_mixed)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Mixed(None))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    for step in range(4):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(
                torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().mean().backward()
        for (name, one), two in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if not name.startswith("own"):
                assert one.grad is not None
                assert two.grad is not None
                one.grad = (one.grad + two.grad) / 2
                two.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for outcome, model in zip((first, second), models, strict=True):
        assert all(torch.equal(value, outcome[key]) for key, value in model.state_dict().items())
    assert not torch.equal(first["own.weight"], second["own.weight"])


def overflow(rank: int) -> tuple[list[int], list[float], dict[str, Tensor], dict[str, Tensor]]:
    task = Task(config={"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}})
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        skipped, scales = [], []
        before = manager.state_dict()
        after = before
        for step in range(3):
            factor = float("inf") if (step, rank) == (1, 1) else 1.0
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)) * factor)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(manager.num_skipped_steps)
            scales.append(manager.loss_scale)
            if step == 0:
                before = manager.state_dict()
            elif step == 1:
                after = manager.state_dict()
        return skipped, scales, before, after


def test_an_overflow_on_one_rank_is_skipped_by_all(teams: dict[int, Team]) -> None:
    for skipped, scales, before, after in teams[2].run(overflow):
        assert skipped == [0, 1, 1]
        assert scales == [16, 8, 8]
        assert all(torch.equal(value, after[key]) for key, value in before.items())


def resume(rank: int, folder: str, part: int) -> dict[str, Tensor]:
    """Train 6 steps (part 0), or 3 and save (1), or load into other weights and train 3 more (2)."""
    task = Task(config={"precision": "bf16"})
    path = Path(folder) / "state.pt"
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(7 if part == 2 else 0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        if part == 2:
            saved = torch.load(path)
            manager.load_state_dict(saved["weights"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in (range(6), range(3), range(3, 6))[part]:
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        weights, states = manager.state_dict(rank0_only=part == 1), optimizer.state_dict()
        assert bool(weights) == (part != 1 or rank == 0)
        if part == 1 and rank == 0:
            torch.save({"weights": weights, "optimizer": states}, path)
        return weights


def test_a_training_is_resumed_to_the_bit(teams: dict[int, Team], tmp_path: Path) -> None:
    whole, _, again = (teams[2].run(resume, str(tmp_path), part) for part in range(3))
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def look(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """Gather, write, and look again; read outside of everything."""
    with chunkmem.ChunkManager(make_config(Task())) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        with manager.gather(), torch.no_grad():
            seen = {key: value.clone() for key, value in model.named_parameters()}
            for param in model.parameters():
                param.mul_(2 + rank)
        with manager.gather(model.blocks[1]):
            doubled = {key: value.detach().clone() for key, value in model.blocks[1].named_parameters()}
        said = ""
        try:
            for param in model.parameters():
                param.sum()
            (model.blocks[0].up.weight + model.blocks[2].up.weight + model.blocks[3].up.weight).sum()
        except chunkmem.StateError as error:
            said = str(error)
        return seen, doubled, said


def test_gather_is_whole_on_every_rank_and_keeps_what_owners_write(teams: dict[int, Team]) -> None:
    torch.manual_seed(0)
    model = Net()
    outcomes = teams[2].run(look)
    for seen, _, said in outcomes:
        assert all(torch.equal(seen[key], value) for key, value in model.named_parameters())
        assert "words.weight (11, 16) is used by sum outside of its unit's forward" in said
    for key, value in model.blocks[1].named_parameters():
        written = [outcome[1][key] for outcome in outcomes]
        assert torch.equal(written[0], written[1])
        assert any(torch.equal(written[0], value * (2 + rank)) for rank in range(2))


def keep_aliases(rank: int) -> tuple[list[bool], bool, bool]:
    """Keep other tensors over the memory of all weights: over steps, and when the manager is closed."""
    task = Task()
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        with manager.gather():
            kept = {key: param.detach() for key, param in model.named_parameters()}
        seen = []
        for step in range(3):
            weights = manager.state_dict()
            loss = loss_of(model, batch_of(task, step, 0, rank))
            seen.append(all(torch.equal(alias, weights[key]) for key, alias in kept.items()))
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        shards = manager.runtime.sharding.shards
        assert shards is not None
        owned = {managed.name for managed in manager.runtime.registry.parameters if shards.owns(managed.group)}
        assert owned
        newest = all(torch.equal(kept[key], value) for key, value in manager.state_dict().items() if key in owned)
        expected = {key: alias.clone() for key, alias in kept.items()}
    return seen, newest, all(torch.equal(kept[key], value) for key, value in expected.items())


def test_aliases_are_memory_that_can_be_read(teams: dict[int, Team]) -> None:
    """On each rank as of the last forward, on the owner's as of the last update, and after all of it as they were."""
    assert teams[2].run(keep_aliases) == [([True] * 3, True, True)] * 2


def look_at_gradients(rank: int, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """Gather gradients between backward and step, and halve them; return them, and the weights after the step."""
    task = Task(config={"client": {"opts": {"with_async_move": how != "blocking"}}})
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        seen: dict[str, Tensor] = {}
        for step in range(5):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            with manager.gather(grads=True), torch.no_grad():
                for key, param in model.named_parameters():
                    assert param.grad is not None
                    seen[f"{step} {key}"] = param.grad.clone()
                    if how == "in place":
                        param.grad.mul_(0.5)
                    else:
                        param.grad = param.grad * 0.5
            optimizer.step()
            optimizer.zero_grad()
        left = [param.grad is None for param in model.parameters()]
        return seen, manager.state_dict(), left


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["in place", "instead", "blocking"])
def test_gathered_gradients_are_means_and_what_owners_write_is_kept(teams: dict[int, Team], how: str) -> None:
    task = Task()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    outcomes = teams[2].run(look_at_gradients, how)
    for step in range(5):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, batch_of(task, step, 0, rank)).backward()
            grads.append([param.grad for param in model.parameters()])
        for (key, param), one, two in zip(model.named_parameters(), *grads, strict=True):
            mean = (one + two) / 2
            assert all(torch.equal(seen[f"{step} {key}"], mean) for seen, _, _ in outcomes)
            param.grad = mean * 0.5
        optimizer.step()
    for _, weights, left in outcomes:
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        assert all(left)


def die(rank: int) -> str:
    task = Task(config={"distributed": {"timeout_s": 8}})
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        try:
            for step in range(3):
                loss = loss_of(model, batch_of(task, step, 0, rank))
                if (step, rank) == (1, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                manager.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        except chunkmem.RankError as error:
            return f"{error.ranks} {error}"
    return "nothing happened"


def test_a_rank_that_dies_is_named_by_the_others(teams: dict[int, Team]) -> None:
    (said, _) = teams[2].run(die, lost=(1,))
    assert said.startswith("(1,) ")
    assert "rank 1 does not answer" in said
