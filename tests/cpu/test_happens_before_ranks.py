"""Exchanges between ranks are in order with computing, copies and updates: no race, and what is left out is found."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.comm.methods import Chunkwise, ExchangeMethod, Grouped, PointToPoint
from tests.helpers import ordered_exchange
from tests.helpers.happens_before import HappensBefore
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager, serial
from tests.helpers.simulated import SimulatedAccelerator
from tests.helpers.training import compute_device

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="the accelerator is simulated in RAM")

Kinds = Counter[tuple[str, str, str]]
TIGHT = 32_000
"""Bytes of DEVICE: the fewest for the largest of the models."""
ROOMY = 100 << 10


def train(
    rank: int, task: Task, method: type[ExchangeMethod], mutant: str = "", sizes: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], Kinds, int]:
    """The weights after some steps of one rank, its races, and how many exchanges there were."""
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
    return weights, checker.kinds(), traffic.num_gathers + traffic.num_reductions


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


MUTANTS: dict[str, Any] = {
    "": lambda patch: None,
    "forget to wait": forget_to_wait,
    "forget replicas": forget_replicas,
}


ORDINARY = (("tied", Grouped, TIGHT), ("reused", PointToPoint, TIGHT), ("checkpointed", Chunkwise, ROOMY))


def cases() -> Iterator[Any]:
    models, methods = ("tied", "reused", "checkpointed"), (PointToPoint, Chunkwise, Grouped)
    for case in itertools.product(models, methods, (TIGHT, ROOMY)):
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
    for weights, races, num_exchanges in pair.run(train, task, method):
        assert races == {}
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
    for _, races, num_exchanges in team.run(train, task, method, "", sizes):
        assert races == {}
        assert num_exchanges > 50


@pytest.mark.few(1)
@pytest.mark.parametrize(("mutant", "sizes"), [("forget to wait", ()), ("forget replicas", (2, 1))])
def test_mutants_are_found(pair: Team, mutant: str, sizes: tuple[int, ...]) -> None:
    for _, races, _ in pair.run(train, Task(steps=3, device_nbytes=ROOMY), PointToPoint, mutant, sizes):
        assert races
