"""What ranks are told when they are not about to do the same: the same clear error on each of them, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import ChunkmemError
from chunkmem.ranks.agreement import Operation, numbers_of, verdict
from chunkmem.ranks.ranks import open_ranks
from chunkmem.ranks.shards import ShardStore
from tests.helpers.ranks import Team
from tests.helpers.shared_training import WIDTH, Block
from tests.helpers.spread import spread

WAYS = {"point to point": None, "grouped": False, "memory-saving": True}
TIMEOUT_S = 120.0
AT_ONCE_S = 40.0
"""Far below the timeout: nobody has waited for it."""


class Chosen(nn.Module):
    """Experts in a list of its own, of which each rank runs another one: each of them is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, index: int) -> Tensor:
        result: Tensor = self.experts[index](self.first(x))
        return result


class Dropped(nn.Module):
    """Blocks of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, left_out: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != left_out:
                x = block(x)
        return x


Script = Callable[[int, chunkmem.ChunkManager], Any]


def made(model: Callable[[], nn.Module], manager: chunkmem.ChunkManager) -> tuple[nn.Module, chunkmem.AdamW]:
    torch.manual_seed(0)
    with manager.init():
        built = model()
    return built, chunkmem.AdamW(built.parameters(), manager=manager, lr=1e-2)


def step(model: nn.Module, optimizer: chunkmem.AdamW, manager: chunkmem.ChunkManager, *args: Any) -> Tensor:
    loss = model(torch.ones(3, WIDTH), *args).square().mean()
    manager.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def evaluates_another_expert(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, _ = made(Chosen, manager)
    with torch.no_grad():
        model(torch.ones(3, WIDTH), rank)


def trains_another_expert(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Chosen, manager)
    for at in range(5):
        step(model, optimizer, manager, rank if at == 4 else 0)


def leaves_out_another_layer(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    for at in range(5):
        step(model, optimizer, manager, 2 * rank if at == 3 else 3)


def evaluates_alone(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(3, WIDTH), 3)
    step(model, optimizer, manager, 3)


def saves_alone(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 0:
        manager.state_dict()
    step(model, optimizer, manager, 3)


def clips_alone(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    manager.backward(model(torch.ones(3, WIDTH), 3).square().mean())
    if rank == 1:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def learns_at_another_rate(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    step(model, optimizer, manager, 3)


def freezes_alone(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 1:
        model.blocks[1].up.requires_grad_(False)
    step(model, optimizer, manager, 3)


def _refuse_tokens(*_: Any) -> None:
    raise ValueError("bad token 17")


def raises_in_forward(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 0:
        model.blocks[2].register_forward_pre_hook(_refuse_tokens)
    step(model, optimizer, manager, 3)


def raises_and_goes_on(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 0:
        handle = model.blocks[2].register_forward_pre_hook(_refuse_tokens)
        with pytest.raises(ValueError, match="bad token 17"):
            step(model, optimizer, manager, 3)
        handle.remove()
    step(model, optimizer, manager, 3)
    found, expected = manager.state_dict(), trained_by_torch(2)
    assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


def trained_by_torch(num_steps: int) -> dict[str, Tensor]:
    """Do such steps in plain PyTorch; all ranks have the same batch."""
    torch.manual_seed(0)
    model = Dropped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(num_steps):
        model(torch.ones(3, WIDTH), 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def raises_in_backward(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    x = torch.ones(3, WIDTH, requires_grad=True)
    loss = model(x, 3).square().mean()

    def refuse(grad: Tensor) -> None:
        raise ValueError("bad gradient")

    if rank == 1:
        model.blocks[1].up.weight.register_hook(refuse)
        loss = model(x, 3).square().mean()
    else:
        loss = model(x, 3).square().mean()
    manager.backward(loss)


def has_no_room(rank: int, manager: chunkmem.ChunkManager) -> None:
    model, optimizer = made(Dropped, manager)
    step(model, optimizer, manager, 3)
    if rank == 1:
        manager.runtime.memory.pager.pin_remote = _no_room  # type: ignore[method-assign]
    step(model, optimizer, manager, 3)


def _no_room(*_: Any, **__: Any) -> None:
    raise chunkmem.CapacityError("DEVICE is full", needed_nbytes=2, cap_nbytes=1)


SCRIPTS: dict[Script, tuple[str, ...]] = {
    evaluates_another_expert: ("rank 0 in 'unit experts.0", "rank 1 in 'unit experts.1", "manager.unit(module)"),
    trains_another_expert: ("rank 0 in 'unit experts.0", "rank 1 in 'unit experts.1"),
    leaves_out_another_layer: ("rank 0 in 'unit blocks.1", "rank 1 in 'unit blocks.0"),
    evaluates_alone: ("rank 0 in '", "rank 1 in '", "all have to run the same modules in the same order"),
    saves_alone: ("rank 0 in 'manager.state_dict()'", "rank 1 in 'unit blocks.0"),
    clips_alone: ("rank 0 in 'optimizer.step() with ", "rank 1 in 'clipping of gradients with a norm of 1.0'"),
    learns_at_another_rate: ("rank 0 in 'optimizer.step() with ", ", lr 0.01, ", ", lr 0.02, "),
    freezes_alone: ("parameter blocks.1.up.bias (32,) is frozen on rank 1 and not on rank 0 (and 1 more)",),
    raises_in_forward: ("unit blocks.2", " s rank 0 raised ValueError: bad token 17"),
    raises_in_backward: (" s rank 1 raised ValueError: bad gradient",),
    has_no_room: ("unit blocks.0: gather of ", " s rank 1 raised CapacityError: DEVICE is full"),
    raises_and_goes_on: ("rank 0 in 'unit ", "rank 1 in 'unit ", "rank 0 raised ValueError: bad token 17 before"),
}
WHERE_UNITS_STAY: dict[Script, tuple[str, ...]] = {
    trains_another_expert: ("rank 0 in 'reduction of gradients", "rank 1 in 'unit experts.1"),
    raises_in_forward: ("reduction of gradients", " s rank 0 raised ValueError: bad token 17"),
    raises_and_goes_on: (),
}
"""Of scripts in which ranks come upon each other later, or not at all: with no phrases, all goes well."""
RAISED = {raises_in_forward: (0, ValueError), raises_in_backward: (1, ValueError)}


def run(rank: int, script: Script, memory_saving: bool | None, stay: bool) -> tuple[str, str, float]:
    torch.set_num_threads(1)
    num_staying = ShardStore.num_that_stay if stay else lambda *_, **__: 0
    opts = {} if memory_saving is None else {"with_mem_saving_comm": memory_saving}
    config = chunkmem.Config.from_dict(
        {
            "default_chunk_size": 400,
            "client": {"opts": opts},
            "distributed": {"timeout_s": TIMEOUT_S},
            "release_after_init": True,
        }
    )
    with patch.object(ShardStore, "num_that_stay", num_staying), chunkmem.ChunkManager(config) as manager:
        started_s = time.monotonic()
        try:
            script(rank, manager)
        except (ChunkmemError, ValueError) as error:
            return type(error).__name__, str(error), time.monotonic() - started_s
    return "", "", 0.0


@pytest.mark.few(4)
@spread(script=SCRIPTS, way=WAYS, stay=[True, False])
def test_every_rank_hears_the_same_at_once(pair: Team, script: Script, way: str, stay: bool) -> None:
    answers = pair.run(run, script, WAYS[way], stay)
    phrases = WHERE_UNITS_STAY.get(script, SCRIPTS[script]) if stay else SCRIPTS[script]
    if not phrases:
        assert [kind for kind, _, _ in answers] == ["", ""]
        return
    for rank, (kind, message, took_s) in enumerate(answers):
        assert took_s < AT_ONCE_S
        if rank == 1 and script is has_no_room:
            assert kind == "CapacityError"
        elif RAISED.get(script, (None,))[0] == rank:
            assert kind == "ValueError"
        else:
            assert kind == "RankError", message
            for phrase in phrases:
                assert phrase in message
    if script not in RAISED and script is not has_no_room:
        assert answers[0][1] == answers[1][1]


def go_on(rank: int) -> list[float]:
    """All ranks raise the same, catch it, and go on."""
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"default_chunk_size": 400})) as manager:
        model, optimizer = made(Dropped, manager)
        losses = []
        for at in range(4):
            handle = None
            if at == 2:
                handle = model.blocks[1].register_forward_hook(_refuse)
            try:
                losses.append(step(model, optimizer, manager, 3).item())
            except ValueError:
                losses.append(-1.0)
            if handle is not None:
                handle.remove()
        return losses


def _refuse(*_: Any) -> None:
    raise ValueError("all of them")


def test_what_all_ranks_raise_ends_nothing(pair: Team) -> None:
    first, second = pair.run(go_on)
    assert first == second
    assert first[2] == -1.0
    assert first[3] > 0


def decline_while_one_waits(rank: int) -> Any:
    ranks = open_ranks(timeout_s=TIMEOUT_S)
    if rank == 1:
        asked = ranks.connection.wait_for_others("the end")
        assert ranks.connection.wait_for_others("the end") is None
        return asked
    assert not ranks.connection.begin(Operation("a gather that there is no room for", joinable="gather 1", can=False))
    assert ranks.connection.begin(Operation("a gather", joinable="gather 2"))
    return ranks.connection.wait_for_others("the end")


def test_what_is_not_begun_is_not_joined_in(pair: Team) -> None:
    assert pair.run(decline_while_one_waits) == [None, "gather 2"]


def look_at_metadata(rank: int) -> list[Any]:
    config = chunkmem.Config.from_dict({"default_chunk_size": 400, "distributed": {"timeout_s": TIMEOUT_S}})
    with chunkmem.ChunkManager(config) as manager:
        model, optimizer = made(Dropped, manager)
        seen: list[Any] = []
        for param in model.parameters() if rank == 1 else ():  # on one rank alone: nobody is asked
            seen.append((param.shape, param.dtype, param.numel(), param.is_leaf, param.device))
            param.requires_grad_(param.requires_grad)
            param.register_hook(lambda grad: grad).remove()
            assert isinstance(param, nn.Parameter)
        step(model, optimizer, manager, 3)
        with pytest.raises(chunkmem.StateError) as caught:
            model.blocks[0].up.weight.norm()
        losses = step(model, optimizer, manager, 3).item()
        return [str(caught.value), losses]


def test_metadata_is_free_and_values_are_refused_on_all_ranks_alike(pair: Team) -> None:
    first, second = pair.run(look_at_metadata)
    assert first == second
    assert "blocks.0.up.weight" in first[0]
    assert "manager.gather()" in first[0]


# Without processes.


@pytest.mark.parametrize(
    ("operations", "outcome"),
    [
        ([Operation("a"), Operation("a")], "same"),
        ([Operation("a"), Operation("b")], "differ"),
        ([Operation("a", "1"), Operation("a", "2")], "differ"),
        ([Operation("end", waits=True), Operation("end", waits=True)], "end"),
        ([Operation("end", waits=True), Operation("other end", waits=True)], "differ"),
        ([Operation("end", waits=True), Operation("a", joinable=1)], "join"),
        ([Operation("end", waits=True), Operation("a")], "differ"),
        ([Operation("a", joinable=1), Operation("end", waits=True), Operation("b", joinable=1)], "differ"),
    ],
)
def test_what_ranks_conclude(operations: list[Operation], outcome: str) -> None:
    rows = [numbers_of(op, rank, facts="", has_joined=False) for rank, op in enumerate(operations)]
    found = verdict([min(column) for column in zip(*rows, strict=True)])
    said = "differ" if not found.is_same else "end" if found.all_wait else "join" if found.one_waits else "same"
    assert said == outcome


def test_facts_have_to_be_the_same() -> None:
    rows = [numbers_of(Operation("a"), rank, facts=str(rank), has_joined=False) for rank in range(2)]
    assert not verdict([min(column) for column in zip(*rows, strict=True)]).is_same


def test_one_rank_that_cannot_is_enough() -> None:
    rows = [numbers_of(Operation("a", can=rank != 1), rank, facts="", has_joined=False) for rank in range(3)]
    found = verdict([min(column) for column in zip(*rows, strict=True)])
    assert found.is_same
    assert not found.all_can
