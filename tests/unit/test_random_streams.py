"""Random numbers that micro-batches draw block by block are those that they draw in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from chunkmem.pipeline.random_streams import RandomStreams, states_of

DRAWS: dict[str, Callable[[], Tensor]] = {
    "nothing": lambda: torch.zeros(3),
    "one": lambda: torch.rand(1),
    "a period": lambda: torch.rand(624),
    "a period and one": lambda: torch.rand(625),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(1000), 0.3),
    "normals": lambda: torch.randn(100),
    "doubles": lambda: torch.rand(7, dtype=torch.float64),
    "a permutation": lambda: torch.randperm(10),
}
FORM = "form"


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def in_turn(streams: RandomStreams, blocks: list[Callable[[], Tensor]], num: int) -> list[list[Tensor]]:
    """By micro-batch, what each block draws; the streams learn from it."""
    states, drawn = [states_of(streams.generators)], []
    for _ in range(num):
        drawn.append([block() for block in blocks])
        states.append(states_of(streams.generators))
    streams.learn([FORM] * num, states)
    return drawn


def by_layer(streams: RandomStreams, blocks: list[Callable[[], Tensor]], num: int) -> list[list[Tensor]] | int:
    """The same block by block; or which micro-batch has drawn another amount."""
    found = streams.begin([FORM] * num)
    assert found is not None
    drawn: list[list[Tensor]] = [[] for _ in range(num)]
    for block in blocks:
        for number in range(num):
            with found.of(number):
                drawn[number].append(block())
    wrong = found.end()
    return drawn if wrong is None else wrong


def assert_same(found: list[list[Tensor]] | int, expected: list[list[Tensor]]) -> None:
    assert isinstance(found, list)
    assert all(
        torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_are_those_of_micro_batches_in_turn(name: str, num: int) -> None:
    blocks = [DRAWS[name], DRAWS["dropout"], DRAWS[name]]
    streams = RandomStreams([torch.default_generator])
    assert streams.begin([FORM] * num) is None  # nothing is known yet
    in_turn(streams, blocks, num)
    start = torch.get_rng_state()
    found, after = by_layer(streams, blocks, num), torch.get_rng_state()
    torch.set_rng_state(start)
    assert_same(found, in_turn(streams, blocks, num))
    assert torch.equal(after, torch.get_rng_state())


def test_several_generators() -> None:
    own = torch.Generator().manual_seed(5)
    blocks = [lambda: torch.rand(3, generator=own), DRAWS["one"]]
    streams = RandomStreams([torch.default_generator, own])
    in_turn(streams, blocks, 3)
    start = torch.get_rng_state(), own.get_state()
    found = by_layer(streams, blocks, 3)
    torch.set_rng_state(start[0])
    own.set_state(start[1])
    assert_same(found, in_turn(streams, blocks, 3))


@pytest.mark.parametrize("block", [lambda: torch.rand(int(torch.randint(1, 50, ()))), lambda: torch.randn(3)])
def test_what_varies_or_cannot_be_counted_runs_in_turn(block: Callable[[], Tensor]) -> None:
    """Few normals leave half of a pair in the generator, which no other way of drawing numbers does."""
    streams = RandomStreams([torch.default_generator])
    in_turn(streams, [block], 4)
    assert streams.begin([FORM] * 4) is None
    assert streams.begin([FORM] * 4) is None


def test_another_amount_is_noticed_and_undone() -> None:
    sizes = [8] * 4
    block = lambda: torch.rand(sizes[0])  # noqa: E731
    streams = RandomStreams([torch.default_generator])
    in_turn(streams, [block], 4)
    start = torch.get_rng_state()
    sizes[0] = 9
    assert by_layer(streams, [block], 4) == 0
    assert torch.equal(torch.get_rng_state(), start)
    streams.forget([FORM] * 4)
    assert streams.begin([FORM] * 4) is None


def test_other_forms_are_taken_to_draw_nothing_if_none_did() -> None:
    streams = RandomStreams([torch.default_generator])
    in_turn(streams, [DRAWS["nothing"]], 2)
    found = streams.begin(["another form"] * 2)
    assert found is not None
    with found.of(0):
        torch.rand(1)
    with found.of(1):
        torch.rand(1)
    assert found.end() == 0


def test_micro_batches_of_several_forms_have_amounts_of_their_own() -> None:
    """As of 9 samples in 4 parts: 3, 2, 2, 2."""
    sizes = [3, 2, 2, 2]
    streams = RandomStreams([torch.default_generator])

    def turn() -> list[Tensor]:
        states, drawn = [states_of(streams.generators)], []
        for size in sizes:
            drawn.append(torch.rand(40 * size))
            states.append(states_of(streams.generators))
        streams.learn(sizes, states)
        return drawn

    turn()
    start = torch.get_rng_state()
    found = streams.begin(sizes)
    assert found is not None
    drawn = {}
    for number in (3, 1, 0, 2):
        with found.of(number):
            drawn[number] = torch.rand(40 * sizes[number])
    assert found.end() is None
    torch.set_rng_state(start)
    assert all(torch.equal(drawn[number], expected) for number, expected in enumerate(turn()))
    assert streams.begin([2, 3, 2]) is not None
    assert streams.begin([2, 5, 2]) is None
