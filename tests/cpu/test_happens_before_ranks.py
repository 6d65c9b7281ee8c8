"""Exchanges between ranks are in order with computing, copies and updates: no race, and what is left out is found."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.ranks import methods
from chunkmem.ranks.exchange import PendingWork
from chunkmem.ranks.methods import Chunkwise, ExchangeMethod, Grouped, PointToPoint
from tests.helpers import ordered_exchange
from tests.helpers.happens_before import HappensBefore
from tests.helpers.ranks import Team
from tests.helpers.recorded_group import Collective
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager, serial
from tests.helpers.simulated import SimulatedAccelerator
from tests.helpers.training import compute_device

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="the accelerator is simulated in RAM")

Kinds = Counter[tuple[str, str, str]]
TIGHT = 32_000
"""Bytes of DEVICE: the fewest for the largest of the models."""
LOW = {"precision": "bf16"}
ROOMY = 100 << 10


def train(
    rank: int, task: Task, method: type[ExchangeMethod], mutant: str = "", sizes: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], Kinds, int, list[tuple[list[Collective], list[str]]]]:
    """The weights after some steps of one rank, its races, how many exchanges there were, and those of each group."""
    torch.set_num_threads(1)
    with HappensBefore() as checker, pytest.MonkeyPatch.context() as patch:
        MUTANTS[mutant](patch)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")) if sizes else None
        options = {"exchange": checker.exchange(method), "make_lanes": checker.lanes, "mesh": mesh}
        with open_manager(rank, task, **options) as manager:
            torch.manual_seed(0)
            with manager.init():
                model = MODELS[task.model]()
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
            for step in range(task.steps):
                for micro in range(task.micro_batches):
                    manager.backward(loss_of(model, batch_of(task, step, micro, rank)))
                optimizer.step()
                optimizer.zero_grad()
            assert manager.runtime.sharding.shards is not None
            traffic = manager.runtime.sharding.shards.exchange.traffic
            weights = manager.state_dict()
    assert checker.memory.num_accesses > 0
    groups = [(group.collectives, group.freed) for group in checker.groups]
    return weights, checker.kinds(), traffic.num_gathers + traffic.num_reductions, groups


def forget_to_wait(patch: pytest.MonkeyPatch) -> None:
    """An exchange is waited for by nobody: computing continues at once."""
    patch.setattr(ordered_exchange._OrderedWork, "wait", lambda self: self.inner.wait())


def forget_replicas(patch: pytest.MonkeyPatch) -> None:
    """What goes across replicas is waited for by nobody."""
    overlap = SimulatedAccelerator.overlap

    def forgetful(compute: SimulatedAccelerator, work: Callable[[], None]) -> Callable[[], None]:
        overlap(compute, work)
        return lambda: None

    patch.setattr(SimulatedAccelerator, "overlap", forgetful)


def forget_memory(patch: pytest.MonkeyPatch) -> None:
    """Copies that are sent in another dtype are freed where an exchange is issued."""

    def keep_nothing(*args: Any, held: object = (), finish: object = None) -> PendingWork:
        return PendingWork(*args)

    patch.setattr(methods, "PendingWork", keep_nothing)


MUTANTS: dict[str, Any] = {
    "": lambda patch: None,
    "forget to wait": forget_to_wait,
    "forget replicas": forget_replicas,
    "forget memory": forget_memory,
}


def assert_as_nccl(groups: Sequence[list[tuple[list[Collective], list[str]]]]) -> None:
    """Assert that some ranks' first, second, ... groups were asked for the same in one order, and that memory lived."""
    assert all([calls for calls, _ in own] == [calls for calls, _ in groups[0]] for own in groups[1:])
    assert all(not freed for own in groups for _, freed in own)


ORDINARY = (("tied", Grouped, TIGHT), ("reused", PointToPoint, TIGHT), ("checkpointed", Chunkwise, ROOMY))


def cases() -> Iterator[Any]:
    models, ways = ("tied", "reused", "checkpointed"), (PointToPoint, Chunkwise, Grouped)
    for case in itertools.product(models, ways, (TIGHT, ROOMY)):
        name = f"{case[0]}-{case[1].__name__}-{case[2]}"
        yield pytest.param(*case, id=name, marks=() if case in ORDINARY else pytest.mark.full)


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "method", "device_nbytes"), cases())
def test_no_race_between_exchanges_and_all_else(
    pair: Team, model: str, method: type[ExchangeMethod], device_nbytes: int
) -> None:
    task = Task(model, steps=5, device_nbytes=device_nbytes, micro_batches=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, expected, _ = serial(task, 2)
    torch.set_num_threads(threads)
    outcomes = pair.run(train, task, method)
    assert_as_nccl([groups for *_, groups in outcomes])
    for weights, races, num_exchanges, groups in outcomes:
        assert races == {}
        assert method is PointToPoint or sum(len(calls) for calls, _ in groups) > 50
        assert num_exchanges > 50
        if method is PointToPoint:
            assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []


@pytest.mark.parametrize(
    ("model", "method", "device_nbytes", "sizes"),
    [
        ("reused", Grouped, ROOMY, (2, 1)),
        pytest.param("reused", Grouped, ROOMY, (2, 2), marks=pytest.mark.full),
        pytest.param("checkpointed", Chunkwise, ROOMY, (2, 2), marks=pytest.mark.full),
        pytest.param("tied", PointToPoint, TIGHT, (2, 2), marks=pytest.mark.full),
    ],
)
def test_no_race_where_replicas_are_averaged(
    request: pytest.FixtureRequest,
    model: str,
    method: type[ExchangeMethod],
    device_nbytes: int,
    sizes: tuple[int, int],
) -> None:
    task = Task(model, steps=5, device_nbytes=device_nbytes, micro_batches=2)
    team: Team = request.getfixturevalue("pair" if sizes == (2, 1) else "four")
    outcomes = team.run(train, task, method, "", sizes)
    of_ranks = [groups for *_, groups in outcomes]
    assert_as_nccl([own[:1] for own in of_ranks])  # within a replica: the same in each
    for first in range(sizes[1]):  # across replicas: those of what one rank of each owns
        assert_as_nccl([own[1:] for own in of_ranks[first :: sizes[1]]])
    for _, races, num_exchanges, _ in outcomes:
        assert races == {}
        assert num_exchanges > 50


@pytest.mark.few(1)
@pytest.mark.parametrize(("mutant", "sizes"), [("forget to wait", ()), ("forget replicas", (2, 1))])
def test_mutants_are_found(pair: Team, mutant: str, sizes: tuple[int, ...]) -> None:
    for _, races, _, _ in pair.run(train, Task(steps=3, device_nbytes=ROOMY), PointToPoint, mutant, sizes):
        assert races


@pytest.mark.few(1)
@pytest.mark.parametrize("mutant", ["forget memory", ""])
def test_what_nccl_forbids_is_found(pair: Team, mutant: str) -> None:
    task = Task(steps=3, device_nbytes=ROOMY, config=LOW)
    first, last = [groups for *_, groups in pair.run(train, task, Chunkwise, mutant)]
    if not mutant:
        assert_as_nccl([first, last])
        calls = last[0][0]
        at = next(at for at in range(1, len(calls)) if calls[at] != calls[at - 1])
        calls[at], calls[at - 1] = calls[at - 1], calls[at]  # one rank would wait for ever, so it is not really done
    with pytest.raises(AssertionError):
        assert_as_nccl([first, last])
