"""A model built over ranks with `release_after_init: false`, the default: no rank ever holds the whole of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.scales import Scales
from tests.helpers.shared_training import WIDTH, Block, Frozen, Net, Task, batch_of, loss_of, make_config, open_manager
from tests.helpers.twins import assert_equal

SIZES = [2, pytest.param(3, marks=pytest.mark.full)]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 3)}
    yield found
    for team in found.values():
        team.close()


def manager_with(**keys: Any) -> chunkmem.ChunkManager:
    return chunkmem.ChunkManager(make_config(Task(config=keys)))


# The weights of one process.


class Appended(nn.Module):
    """A list that grows, a dictionary, a module that takes another one's place, one that is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(3):
            block = Block()
            nn.init.orthogonal_(nn.Linear(WIDTH, WIDTH).weight)
            self.blocks.append(block)
        self.blocks.insert(1, Block())
        self.named = nn.ModuleDict({"a": nn.Linear(WIDTH, 3), "b": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))})
        self.named["a"] = nn.Linear(WIDTH, 4, bias=False)
        del self.blocks[0]


class Attended(nn.Sequential):
    """torch's attention writes to a child's bias when it has attached it."""

    def __init__(self) -> None:
        super().__init__(*(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2)))


class Unusual(nn.Module):
    """Its own weights, written last; halves of one piece of memory; other strides; one element or none; float64."""

    def __init__(self) -> None:
        super().__init__()
        halves = torch.randn(2 * WIDTH)
        parts = [nn.Parameter(halves[:WIDTH]), nn.Parameter(halves[WIDTH:]), nn.Parameter(torch.randn(WIDTH, 4).t())]
        parts += [nn.Parameter(torch.randn(WIDTH, 6)[:, ::2]), nn.Parameter(torch.randn(()))]
        parts += [nn.Parameter(torch.randn(1, 1)), nn.Parameter(torch.empty(0, 3))]
        self.parts = nn.ParameterList([*parts, nn.Parameter(torch.randn(5).double())])
        self.picture = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        nn.init.normal_(self.scale)


class Mixed(nn.Module):
    """A part in ordinary PyTorch, which may be written to at any time."""

    def __init__(self, manager: chunkmem.ChunkManager | None = None) -> None:
        super().__init__()
        self.first = Block()
        with manager.exclude() if manager else contextlib.nullcontext():
            self.ordinary = nn.Linear(WIDTH, WIDTH)
            self.ordinary_too = nn.Sequential(nn.Linear(WIDTH, 2))
        nn.init.normal_(self.ordinary.weight)
        self.last = nn.Linear(WIDTH, WIDTH)


class Looked(Net):
    """Looks at what was released in ways that need no values."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.blocks[0].up.weight
        views = [weight.detach(), weight.data[1:], weight.t(), weight.view(-1), weight.expand(2, *weight.shape)]
        assert [view.numel() for view in views] == [512, 496, 512, 512, 1024]
        like = [torch.zeros_like(weight), weight.new_ones(3), torch.empty_like(weight.data)]
        assert all(each.dtype == weight.dtype and each.device == weight.device for each in like)
        assert sum(param.nbytes for param in self.parameters()) > 4 * WIDTH
        assert self.state_dict()["blocks.0.up.weight"].shape == weight.shape
        assert self.float() is self
        self.blocks[0].requires_grad_(False).requires_grad_(True)
        weight.register_hook(lambda grad: grad)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "tied": Net,
    "frozen": Frozen,
    "appended": Appended,
    "attended": Attended,
    "unusual": Unusual,
    "mixed": Mixed,
    "looked at": Looked,
    "one layer": lambda: nn.Linear(WIDTH, 7),
}


def build(rank: int, name: str, precision: str, keys: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights, and the random number that comes after."""
    with manager_with(precision=precision, **keys) as manager:
        torch.manual_seed(3)
        with manager.init():
            model = MODELS[name](manager) if name == "mixed" else MODELS[name]()
        drawn = torch.rand(1)
        with manager.gather(model):
            gathered = {key: param.detach().clone() for key, param in model.named_parameters()}
        return {**manager.state_dict(), **{f"gathered {key}": value for key, value in gathered.items()}}, drawn


@pytest.mark.few(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_have_the_bits_of_one_process(teams: dict[int, Team], size: int, name: str, precision: str) -> None:
    expected, drawn = build(0, name, precision, {})
    torch.manual_seed(3)
    plain = MODELS[name]().state_dict()
    assert all(torch.equal(expected[key], value) for key, value in plain.items())
    for weights, drawn_too in teams[size].run(build, name, precision, {}):
        assert torch.equal(drawn_too, drawn)
        assert weights.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(weights[key], value)] == []
        assert [key for key, value in expected.items() if weights[key].stride() != value.stride()] == []


def build_example(rank: int) -> dict[str, Tensor]:
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPT, PRESETS

    config = chunkmem.Config.from_json(EXAMPLES / "chunkmem.json")
    with chunkmem.ChunkManager(config) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = GPT(PRESETS["1m"], 16)
        return manager.state_dict(model)


def test_the_example_begins_with_the_weights_of_one_process(
    teams: dict[int, Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from gpt import GPT, PRESETS

    torch.manual_seed(0)
    expected = GPT(PRESETS["1m"], 16).state_dict()
    for weights in teams[2].run(build_example):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def chunks_of(rank: int, keys: dict[str, Any]) -> dict[str, tuple[bool, int, list[str]]]:
    with manager_with(precision="bf16", **keys) as manager:
        with manager.init():
            model = Net()
        found = manager.runtime.memory.store.chunks.values()
        state = {str(c.id): (c.is_remote, c.version, sorted(tier.value for tier in c.replicas)) for c in found}
        assert len(list(model.parameters())) == 1 + 4 * 6
        return state


def test_chunks_are_left_as_if_the_model_had_been_built_whole(teams: dict[int, Team]) -> None:
    states = [teams[2].run(chunks_of, {"release_after_init": whole}) for whole in (False, True)]
    assert states[0] == states[1]
    assert states[0][0] != states[0][1]


# What a rank holds.


class Deep(nn.Module):
    """Weights of many sizes; the first is the largest, and what comes then is a few times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList()
        for _ in range(6):
            self.blocks.append(Block())
        self.head = nn.Linear(WIDTH, 9)


def weigh(rank: int, precision: str, keys: dict[str, Any]) -> tuple[int, int, int]:
    """Return the bytes that a rank has when all is built, when all is packed, and at the most."""
    with manager_with(precision=precision, **keys) as manager:
        scales = Scales(manager)
        with scales.watching():
            with manager.init():
                model = Deep()
                built_nbytes = scales.params_nbytes()
            scales.weigh()
        assert scales.params_nbytes() == 0 == scales.on_its_way_nbytes
        assert len(list(model.parameters())) == 1 + 6 * 6 + 2
        return built_nbytes, scales.chunks_nbytes(), scales.peak_nbytes


def shares_nbytes(size: int) -> list[int]:
    """Give every weight to the rank that was given the fewest bytes, the first of those that are alike."""
    given = [0] * size
    for param in Deep().parameters():
        given[min(range(size), key=lambda rank: (given[rank], rank))] += param.nbytes
    return given


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_two_shares_and_what_is_being_built(teams: dict[int, Team], size: int, precision: str) -> None:
    """The bound: what it keeps of what is built + its chunks + the largest module not attached yet, or weight sent."""
    model = Deep()
    whole_nbytes = sum(param.nbytes for param in model.parameters())
    leaves = [module for module in model.modules() if not list(module.children())]
    largest_nbytes = max(sum(param.nbytes for param in module.parameters()) for module in leaves)
    found = teams[size].run(weigh, precision, {})
    assert [built for built, _, _ in found] == shares_nbytes(size)
    for built_nbytes, packed_nbytes, peak_nbytes in found:
        assert built_nbytes <= whole_nbytes / size + largest_nbytes
        assert max(built_nbytes, packed_nbytes) <= peak_nbytes <= built_nbytes + packed_nbytes + largest_nbytes
        if precision == "fp32" and size > 2:
            assert peak_nbytes < whole_nbytes
    whole = teams[size].run(weigh, precision, {"release_after_init": True})
    assert all(built == whole_nbytes for built, _, _ in whole)
    assert max(peak for _, _, peak in found) < min(peak for _, _, peak in whole)


CHUNK_NBYTES = 1600 * 4
"""Of the model's seven, the first of two ranks has four."""


def test_own_share_is_all_that_has_to_fit(teams: dict[int, Team]) -> None:
    keys = {"memory": {"device": CHUNK_NBYTES, "host": 3 * CHUNK_NBYTES}}
    found = teams[2].run(weigh, "fp32", keys)
    assert [packed for _, packed, _ in found] == [4 * CHUNK_NBYTES, 3 * CHUNK_NBYTES]
    for words in teams[2].errors(weigh, "fp32", {**keys, "release_after_init": True}):
        assert words.startswith(
            "chunkmem.data.errors.CapacityError: packing: the weights take 43.75 KiB in chunks, and "
        )


def test_a_rank_without_room_stops_all(teams: dict[int, Team]) -> None:
    first, second = teams[2].errors(weigh, "fp32", {"memory": {"device": CHUNK_NBYTES, "host": 2 * CHUNK_NBYTES}})
    start = "chunkmem.data.errors.CapacityError: packing: the weights take "
    end = (
        "; raise memory.host from 12.50 KiB to at least 18.75 KiB (19200 bytes); training takes gradients and "
        "optimizer states too, for which 100.00 KiB (102400 bytes) is certain to do"
    )
    together = "in chunks, and DEVICE and HOST together have 18.75 KiB free"
    assert first == f"{start}25.00 KiB {together}{end}"
    assert second == f"{start}18.75 KiB {together}, and another rank lacks 6.25 KiB{end}"


def share_memory(rank: int, kind: str) -> None:
    with manager_with() as manager, manager.init():
        model = nn.Sequential(nn.Linear(3, 3), Block())
        if kind == "a buffer's, later":
            model.register_buffer("row", model[1].up.weight.data[3])
        else:
            first, second = nn.Linear(3, 3), nn.Linear(3, 3)
            second.weight.data = first.weight.data
            model.extend(nn.ModuleList([first, second]))


@pytest.mark.parametrize("kind", ["a buffer's, later", "another parameter's, before"])
def test_shared_memory_is_refused_on_every_rank(teams: dict[int, Team], kind: str) -> None:
    """Whoever holds which of them."""
    first, second = teams[2].errors(share_memory, kind)
    assert first == second
    assert "share memory, which chunks cannot keep up" in first


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


def apply_inside(rank: int, keys: dict[str, Any]) -> dict[str, Tensor]:
    with manager_with(**keys) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net().apply(reset)
        return manager.state_dict(model)


def test_release_after_init_lets_it_be(teams: dict[int, Team]) -> None:
    torch.manual_seed(0)
    expected = Net().apply(reset).state_dict()
    for weights in teams[2].run(apply_inside, {"release_after_init": True}):
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


def wrap(rank: int) -> dict[str, Tensor]:
    with manager_with() as manager:
        torch.manual_seed(0)
        return manager.state_dict(manager.wrap(Net().apply(reset)))


def test_a_model_that_exists_is_wrapped(teams: dict[int, Team]) -> None:
    torch.manual_seed(0)
    expected = Net().apply(reset).state_dict()
    for weights in teams[2].run(wrap):
        assert all(torch.equal(weights[key], value) for key, value in expected.items())


# Ranks that differ.


def build_more(rank: int) -> None:
    with manager_with() as manager, manager.init():
        model = nn.ModuleList([Block()])
        if rank == 1:
            nn.Sequential(nn.Linear(3, 3))
        model.append(Block())


def test_ranks_that_build_in_another_order_are_told(teams: dict[int, Team]) -> None:
    first, second = teams[2].errors(build_more)
    assert first == second
    assert "the order in which modules are built differs between ranks" in first


def fail_in_the_middle(rank: int) -> str:
    config = {"distributed": {"timeout_s": 8}}
    try:
        with manager_with(**config) as manager, manager.init():
            Block()
            if rank == 1:
                raise ZeroDivisionError
            Block()
    except (ZeroDivisionError, chunkmem.RankError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def test_a_rank_that_fails_while_it_builds(teams: dict[int, Team]) -> None:
    other, failed = teams[2].run(fail_in_the_middle)
    assert failed == "ZeroDivisionError "
    assert other.startswith("RankError ")
    assert "rank 1 does not answer" in other


def give_back(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train a step, then unwrap the model; steps of plain PyTorch on the same batches follow on each rank."""
    torch.set_num_threads(1)
    task = Task()
    manager = open_manager(rank, task)
    with manager.init():
        model = Net()
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
    loss_of(model, batch_of(task, rank, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    states, weights = optimizer.state_dict(), manager.state_dict()
    states.pop("master_weights", None)
    model = manager.unwrap(model)
    own = {key: value.clone() for key, value in model.state_dict().items()}
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    plain.load_state_dict(states)
    losses = []
    for step in range(2):
        loss = loss_of(model, batch_of(task, 0, step, 0))
        loss.backward()
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())
    return weights, own, losses


def test_a_model_over_ranks_is_given_back_whole(teams: dict[int, Team]) -> None:
    """`unwrap`: each rank has all weights then, and trains on by itself."""
    found = teams[2].run(give_back)
    for weights, own, losses in found:
        assert_equal(own, weights)
        assert losses == found[0][2]
