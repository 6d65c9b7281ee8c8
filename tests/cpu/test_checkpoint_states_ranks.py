"""`torch.distributed.checkpoint.state_dict` over ranks, with each of its options: values, and what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import chunkmem
from tests.helpers.peak_memory import IS_COUNTED, MIB, NEEDS_COUNT, increase_nbytes
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager
from tests.helpers.twins import assert_equal

TASK = Task(model="tied", steps=2)


OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "on the CPU": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "full on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


class Training:
    def __init__(self, rank: int, *, seed: int) -> None:
        self.rank = rank
        self.manager = open_manager(rank, TASK)
        torch.manual_seed(seed)
        with self.manager.init():
            self.model = MODELS[TASK.model]()
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)

    def step(self, index: int) -> None:
        self.manager.backward(loss_of(self.model, batch_of(TASK, index, 0, self.rank)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Any:
        return self.manager.state_dict(), self.optimizer.state_dict()["state"]


def hand_over(rank: int, getting: str, setting: str) -> Any:
    first, second = Training(rank, seed=0), Training(rank, seed=1)
    for index in range(2):
        first.step(index)
    weights, states = get_state_dict(first.model, first.optimizer, options=StateDictOptions(**OPTIONS[getting]))
    sizes = len(weights), len(states)
    options = StateDictOptions(**OPTIONS[setting])
    if "broadcast" in setting:  # `set_state_dict` takes a rank's empty dict for one that is not meant to be loaded
        set_model_state_dict(second.model, weights, options=options)
        set_optimizer_state_dict(second.model, second.optimizer, states, options=options)
    else:
        set_state_dict(
            second.model, second.optimizer, model_state_dict=weights, optim_state_dict=states, options=options
        )
    found = [first.state(), second.state()]
    for training in (first, second):
        training.step(2)
        found.append(training.state())
        training.manager.close()
    return sizes, found


PAIRS = [
    ("plain", "plain"),
    ("on the CPU", "plain"),
    ("full", "full"),
    ("flat", "flat"),
    ("full on the CPU", "broadcast"),
    ("full", "broadcast"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("getting", "setting"), PAIRS)
def test_a_training_is_handed_over(getting: str, setting: str, pair: Team) -> None:
    found = pair.run(hand_over, getting, setting)
    for first, second, first_later, second_later in (states for _, states in found):
        assert_equal(second, first)
        assert_equal(second_later, first_later)
    # As torch has it, the first rank alone gets what is full and on the CPU.
    assert [sizes != (0, 0) for sizes, _ in found] == [True, getting != "full on the CPU"]


WEIGHTS_NBYTES = 20 * (1024 * 1023 + 1024) * 4
COPIES = {
    "plain": (1, 1, 0, 0),
    "on the CPU": (1, 1, 0, 0),
    "full": (1, 1, 0, 1),
    "flat": (1, 1, 0, 0),
    "broadcast": (1, 1, 1, 2),
}
"""Of all weights or all states, on every rank: to get weights, to get states, to set weights, to set states."""


def measure(rank: int, options: dict[str, bool]) -> list[int]:
    """Return by how many bytes memory grows at the most in each of these."""
    values = {"memory": {"device": "8MiB", "host": "2GiB"}, "default_chunk_size": 1 << 20}
    wanted = StateDictOptions(**options)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(1024, 1023) if i % 2 else nn.Linear(1023, 1024) for i in range(20)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(torch.ones(1, 1023)).sum())
        optimizer.step()
        get_model_state_dict(nn.Linear(1, 1), options=wanted)  # what is imported is imported
        kept: dict[str, Any] = {}

        def get_weights() -> None:
            kept["weights"] = get_model_state_dict(model, options=wanted)

        def get_states() -> None:
            kept["states"] = get_optimizer_state_dict(model, optimizer, options=wanted)

        def set_weights() -> None:
            set_model_state_dict(model, kept["weights"], options=wanted)

        def set_states() -> None:
            set_optimizer_state_dict(model, optimizer, kept["states"], options=wanted)

        return [increase_nbytes(each) for each in (get_weights, get_states, set_weights, set_states)]


@pytest.mark.full
@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name in ("plain", "broadcast") else pytest.mark.full) for name in COPIES]
)
def test_memory_is_a_copy_of_all_on_every_rank(options: str) -> None:
    """So `manager.save` is for models that have no room for that."""
    with Team(2) as fresh:
        for increases in fresh.run(measure, OPTIONS[options]):
            for nbytes, copies, all_nbytes in zip(
                increases, COPIES[options], (WEIGHTS_NBYTES, 2 * WEIGHTS_NBYTES) * 2, strict=True
            ):
                assert nbytes <= copies * all_nbytes + 32 * MIB
