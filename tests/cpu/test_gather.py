"""`manager.gather`, and reading and writing parameters without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features, same

SMALL_NBYTES = 4 * 1024
CHUNK_NBYTES = 1024


def gather(twin: Twin, params: Any) -> AbstractContextManager[None]:
    return nullcontext() if twin.manager is None else twin.manager.gather(params)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda p: p.mul_(1.5),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "through data": lambda p: p.data.add_(0.25),
    "through detach": lambda p: p.detach().neg_(),
    "through numpy": lambda p: (p.detach().numpy() if p.device.type == "cpu" else p.detach()).__setitem__(..., 0.5),
    "copy": lambda p: p.copy_(torch.linspace(0, 1, p.numel()).view(p.shape)),
    "a view": lambda p: p.view(-1)[:3].zero_(),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("how", WRITES)
def test_writes_inside_are_kept(how: str) -> None:
    """Chunk after chunk is written, read by an evaluation that pushes it out, and trained on."""

    def scenario(twin: Twin) -> list[Any]:
        left = []
        for seed in range(3):
            with torch.no_grad():
                left.append(twin.model(features(seed)))
            for parameter in twin.model.parameters():
                with gather(twin, parameter), torch.no_grad():
                    WRITES[how](parameter)
                    left.append(parameter.clone())
            left += [twin.weights(), twin.steps(seed)]
        return left

    same(Blocks, scenario)


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "a parameter": lambda model: model.blocks[0][0].weight,
    "a module": lambda model: model.blocks[0],
    "a generator": lambda model: model.parameters(),
    "a list of both": lambda model: [model.inner, model.head.bias],
    "nested": lambda model: [[model.inner], (model.head.weight, model.head.bias), {"a": 1}.keys() and []],
    "nothing at all": lambda model: [],
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_what_is_gathered_is_whole(what: str) -> None:
    plain = Twin(None, lambda: Blocks(num_blocks=1))
    values = dict(plain.model.named_parameters())
    with chunkmem.ChunkManager(config(7 * CHUNK_NBYTES)) as manager:
        model = Twin(manager, lambda: Blocks(num_blocks=1)).model
        with manager.gather(ARGUMENTS[what](model)):
            wanted = {
                "nothing": "",
                "a parameter": "blocks.0.0.weight",
                "a module": "blocks.0",
                "a list of both": "inner",
                "nested": "head",
                "nothing at all": "-",
            }.get(what, "")
            for name, parameter in model.named_parameters():
                if name.startswith(wanted):
                    assert torch.equal(parameter, values[name])
        audit(manager)


def test_writes_outside_of_gather_are_kept() -> None:

    def scenario(twin: Twin) -> list[Any]:
        losses = []
        for seed in range(3):
            with torch.no_grad():
                twin.model.inner.weight.mul_(1.5)
                twin.model.blocks[1][2].weight[3] = 0.5
                twin.model.head.bias.add_(1)
            losses += twin.steps(seed)
        return losses

    same(Blocks, scenario)


class Scalars(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain + self.shift


def test_writes_to_scalars_that_are_away_are_kept() -> None:
    """They cannot be refused, so they are carried over to the chunk; also into a state, also when frozen."""

    def scenario(twin: Twin) -> list[Any]:
        left = []
        parameters = dict(twin.model.named_parameters())
        parameters["shift"].requires_grad_(False)
        for seed in range(3):
            with torch.no_grad():
                parameters["gain"].fill_(0.5 + seed)
                parameters["shift"].fill_(2.0 * seed)
            left.append(twin.weights() if seed else None)
            left += twin.steps(seed)
        return left

    same(Scalars, scenario)


@cpu_only
def test_too_much_is_refused_with_the_sizes_and_changes_nothing() -> None:
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        moved = manager.memory().moved
        with (
            pytest.raises(chunkmem.CapacityError, match=r"gather: 8 chunks need 8.00 KiB .* cap is 4.00 KiB") as raised,
            manager.gather(),
        ):
            pytest.fail("it does not fit")
        assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (8 * CHUNK_NBYTES, SMALL_NBYTES)
        assert manager.memory().moved == moved
        audit(manager)
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())
    with (
        chunkmem.ChunkManager(config(raised.value.needed_nbytes)) as manager,
        manager.gather(Twin(manager, Blocks).model),
    ):
        pass


@cpu_only
def test_nested_blocks_share_the_room() -> None:
    with chunkmem.ChunkManager(config(3 * CHUNK_NBYTES)) as manager:
        model = Twin(manager, Blocks).model
        with manager.gather(model.blocks[0][0].weight):
            with manager.gather(model.blocks[0][0].weight), manager.gather(model.blocks[1][0].weight):
                with torch.no_grad():
                    model.blocks[0][0].weight.fill_(2)
                with pytest.raises(chunkmem.CapacityError), manager.gather(model.blocks[2][0]):
                    pass
            assert (model.blocks[0][0].weight == 2).all()
        audit(manager)
        assert (manager.state_dict()["blocks.0.0.weight"] == 2).all()


def test_an_error_inside_keeps_the_writes_and_no_pins() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        model = Twin(manager, Blocks).model
        with pytest.raises(KeyboardInterrupt), manager.gather(model.head), torch.no_grad():
            model.head.weight.fill_(3)
            raise KeyboardInterrupt
        audit(manager)
        assert (manager.state_dict()["head.weight"] == 3).all()


def test_training_inside_a_block_of_some_parameters() -> None:
    """Forward and backward use what is gathered like anything else."""

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        with gather(twin, twin.model.head):
            loss = twin.loss(features(1))
            loss.backward()
        twin.update()
        return [*losses, loss.item(), *twin.steps(2)]

    plain = Twin(None, Blocks)
    expected = scenario(plain), plain.left()
    with chunkmem.ChunkManager(config(4 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin), twin.left()), expected)


STRAYED: dict[str, Callable[[nn.Linear], Any]] = {
    "set_": lambda layer: layer.weight.set_(torch.zeros_like(layer.weight)),
    "two of them": lambda layer: [p.set_(torch.ones_like(p)) for p in layer.parameters()],
}


@pytest.mark.parametrize("how", STRAYED)
def test_a_parameter_given_other_memory_is_named_and_put_back(how: str) -> None:
    """`set_` passes by torch's own functions. The next call says so, once; training goes on with the values before."""
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    uses: list[Callable[[Twin], Any]] = [
        lambda twin: twin.model(features(0)),
        lambda twin: twin.weights(),
        lambda twin: twin.manager.gather().__enter__(),
        lambda twin: twin.manager.load_state_dict({}, strict=False),
    ]
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        for use in uses:
            with torch.no_grad():
                STRAYED[how](twin.model.blocks[0][0])
            with pytest.raises(chunkmem.StateError, match=r"parameter blocks\.0\.0\..*was given other memory"):
                use(twin)
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


ASSIGNED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "transposed": lambda weight: weight.data.t().contiguous(),
    "an average": lambda weight: weight.data * 0.9 + 0.1,
}


@pytest.mark.parametrize("how", ASSIGNED)
def test_values_assigned_to_data_are_taken(how: str) -> None:
    """Between steps, inside of a forward, and inside of gather."""

    class Assigns(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.head.weight.data = self.head.weight.data * 0.5
            return super().forward(x)

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        for block in twin.model.blocks:
            block[0].weight.data = ASSIGNED[how](block[0].weight)
        losses += twin.steps(1)
        with gather(twin, twin.model.inner.weight):
            twin.model.inner.weight.data = ASSIGNED[how](twin.model.inner.weight)
        return [*losses, *twin.steps(2)]

    same(Assigns, scenario)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(16, 16).half()], ids=["shape", "dtype"])
def test_data_of_another_form_is_refused_and_changes_nothing(value: torch.Tensor) -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        before = twin.weights()
        with pytest.raises(chunkmem.StateError, match=r"blocks\.0\.0\.weight \(16, 16\).*keeps its shape and dtype"):
            twin.model.blocks[0][0].weight.data = value.to(features(0).device)
        assert_equal(twin.weights(), before)


@cpu_only
def test_a_loop_over_all_modules_needs_room_for_one() -> None:

    def scenario(twin: Twin) -> list[Any]:
        seen = []
        layers = [module for module in twin.model.modules() if isinstance(module, nn.Linear)]
        for seed in range(2):
            for layer in layers:
                seen += [layer.weight.shape, layer.weight.detach().norm()]
            with torch.no_grad():
                for layer in layers:
                    layer.weight.mul_(0.5)
            for layer in layers:
                with gather(twin, layer.weight):
                    layer.bias.data.fill_(0.25)
                    seen.append(layer.weight.detach().norm())
            seen += twin.steps(seed)
        return seen

    plain = Twin(None, Blocks)
    expected = scenario(plain), plain.left()
    with chunkmem.ChunkManager(config(3 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin), twin.left()), expected)


@cpu_only
def test_a_graph_over_what_was_read_outside_needs_no_room_until_its_backward() -> None:

    def scenario(twin: Twin, *, look: bool) -> list[float]:
        losses = []
        for seed in range(2):
            penalty = twin.model.blocks[0][0].weight.square().sum() + twin.model.blocks[1][0].weight.square().sum()
            if look:
                for block in twin.model.blocks:
                    assert block[2].weight.shape == (WIDTH, WIDTH)
            loss = penalty + twin.loss(features(seed))
            loss.backward()
            twin.update()
            losses.append(loss.item())
        return losses

    plain = Twin(None, Blocks)
    expected = scenario(plain, look=True), plain.left()
    with chunkmem.ChunkManager(config(8 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin, look=True), twin.left()), expected)
    with chunkmem.ChunkManager(config(3 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin, look=True), twin.left()), expected)
