"""Updates inside backward wait where something may still read the weights or change the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkmem
from tests.helpers.lanes import adversarial
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, features

ONE_LAYER = WIDTH * WIDTH
THREE_LAYERS = 3 * ONE_LAYER


class Layers(nn.Module):
    """Each has a chunk of its own, or shares one with two others, by the size of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor, *, without: int | None = None) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = x if at == without else torch.tanh(layer(x))
        return x


class ReadsAhead(Layers):
    """Next to the first layer, it multiplies by the weight of the last one, which gets no gradient from there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, *, without: int | None = None) -> Tensor:
        weight = self.layers[-1].weight
        assert isinstance(weight, Tensor)
        x = torch.tanh(self.layers[0](x))
        return super().forward(torch.tanh(x @ (weight.data if self.how == "data" else weight.detach())), without=0)


class Normalised(nn.Module):
    """Its forward writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return torch.tanh(x @ self.weight)


def train(twin: Twin) -> list[float]:
    return twin.steps(*range(5))


def graph_kept(twin: Twin) -> list[float]:
    """Two losses of one forward."""
    losses = []
    for seed in range(4):
        out = twin.model(features(seed))
        first, second = out[:, :2].square().mean(), out[:, 2:].square().mean()
        first.backward(retain_graph=True)
        second.backward()
        twin.update()
        losses += [first.item(), second.item()]
    return losses


def assigned_by_a_hook(twin: Twin) -> list[float]:
    """Other gradients of the same chunk land later."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 0.5

    twin.model.layers[5].weight.register_post_accumulate_grad_hook(halve)
    return train(twin)


WAITING: dict[str, tuple[Callable[[], nn.Module], Callable[[Twin], list[float]], int]] = {
    "a graph has saved weight.data": (lambda: ReadsAhead("data"), train, ONE_LAYER),
    "a graph has saved weight.detach()": (lambda: ReadsAhead("detach"), train, ONE_LAYER),
    "forward writes to weights": (lambda: nn.Sequential(*(Normalised() for _ in range(4))), train, ONE_LAYER),
    "the graph is kept": (Layers, graph_kept, THREE_LAYERS),
    "a hook assigns a gradient": (Layers, assigned_by_a_hook, THREE_LAYERS),
}


@pytest.mark.parametrize("what", WAITING)
def test_it_has_the_numbers_of_plain_pytorch(what: str) -> None:
    build, scenario, chunk_numel = WAITING[what]
    plain = Twin(None, build)
    expected = scenario(plain), plain.left()
    cap_nbytes = AMPLE_NBYTES
    for _ in range(2):  # with ample room, and at the smallest cap
        with chunkmem.ChunkManager(config(cap_nbytes, default_chunk_size=chunk_numel)) as manager:
            ours = Twin(manager, build, in_backward=True)
            assert_equal((scenario(ours), ours.left()), expected)
            cap_nbytes = manager.memory().device.required_nbytes


def test_updates_overlap_with_backward() -> None:
    """A gradient of the next layer takes the memory on HOST of one that an update reads, and waits for that."""
    keys: dict[str, Any] = {"precision": "bf16", "default_chunk_size": ONE_LAYER}
    keys["client"] = {"opts": {"overlap_optimizer": True}}
    found, cap_nbytes = [], AMPLE_NBYTES
    for in_backward in (False, True, True):
        lanes = adversarial(3) if len(found) == 2 else None
        with chunkmem.ChunkManager(config(cap_nbytes, **keys), make_lanes=lanes) as manager:
            ours = Twin(manager, lambda: Blocks(num_blocks=6), in_backward=in_backward)
            found.append((ours.steps(*range(6)), ours.left()))
            assert manager.plan is not None
            cap_nbytes = manager.memory().device.required_nbytes
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.fixture
def ours() -> Any:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=ONE_LAYER)) as manager:
        yield Twin(manager, Layers, in_backward=True)


def test_after_a_graph_that_was_kept_groups_are_updated_inside_backward_again(ours: Twin) -> None:
    ours.loss(features(0)).backward(retain_graph=True)
    ours.optimizer.zero_grad()  # nothing was updated
    ours.loss(features(0)).backward(retain_graph=True)
    ours.optimizer.step()
    ours.optimizer.zero_grad(set_to_none=False)
    ours.loss(features(1)).backward()
    with pytest.raises(chunkmem.StateError, match=r"6 parameters.*were updated inside backward"):
        ours.optimizer.zero_grad()
    ours.update()


def test_a_gradient_of_the_step_before_is_not_left_out(ours: Twin) -> None:
    """Plain PyTorch would use it again."""
    ours.loss(features(0)).backward()
    ours.optimizer.step()
    for layer in (*ours.model.layers[:2], *ours.model.layers[3:]):
        layer.weight.grad = None
    ours.model(features(1), without=2).square().mean().backward()
    with pytest.raises(chunkmem.StateError, match=r"layers\.2\.weight was consumed"):
        ours.optimizer.step()


def test_another_optimizer_cannot_come_in_between(ours: Twin) -> None:
    plain = Twin(None, Layers)
    ours.loss(features(0)).backward()
    with pytest.raises(chunkmem.StateError, match=r"another optimizer.*optimizer\.step\(\) first"):
        ours.make("AdamW", ours.model.parameters(), lr=1e-2)
    ours.update()
    plain.step(features(0))
    assert_equal((ours.steps(1, 2), ours.left()), (plain.steps(1, 2), plain.left()))


def test_an_optimizer_that_has_lost_parameters_updates_none(ours: Twin) -> None:
    plain = Twin(None, Layers)
    for twin in (plain, ours):
        twin.former = twin.optimizer  # type: ignore[attr-defined]
        twin.optimizer = twin.make("AdamW", list(twin.model.layers[:3].parameters()), lr=1e-2)
        twin.losses = []  # type: ignore[attr-defined]
        for seed in range(3):
            loss = twin.loss(features(seed))
            loss.backward()
            twin.optimizer.step()
            twin.model.zero_grad()
            twin.losses.append(loss.item())  # type: ignore[attr-defined]
    assert_equal((ours.losses, ours.weights()), (plain.losses, plain.weights()))  # type: ignore[attr-defined]


def test_shared_layers_under_reentrant_checkpoints_are_refused(ours: Twin) -> None:
    """Each is a backward of its own, inside of the other: the second gradient of a weight comes after its update."""
    x = features(0).requires_grad_()
    for _ in range(2):
        x = checkpoint(ours.model.layers[0], x, use_reentrant=True)
    with pytest.raises(chunkmem.StateError, match=r"layers\.0\.weight, were updated inside backward"):
        x.square().mean().backward()


def test_of_two_losses_one_may_leave_weights_out(ours: Twin) -> None:
    """As in the two steps of a GAN: `inputs` says what gets gradients, and so what is updated."""
    plain = Twin(None, Layers)
    losses: dict[Twin, list[float]] = {plain: [], ours: []}
    for twin, found in losses.items():
        first, last = twin.model.layers[:3], twin.model.layers[3:]
        options = {"lr": 1e-2} if twin is plain else {"lr": 1e-2, "in_backward": True}
        optimizers = [twin.make("AdamW", list(part.parameters()), **options) for part in (first, last)]
        for seed in range(4):
            for part, optimizer in zip((first, last), optimizers, strict=True):
                loss = twin.loss(features(seed))
                loss.backward(inputs=list(part.parameters()))
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
    assert_equal((losses[ours], ours.weights()), (losses[plain], plain.weights()))


class NoRoom:
    """For the states, or the update, of one group."""

    def __init__(self, at: Any, call: str) -> None:
        self._at, self._call = at, call

    def __enter__(self) -> None:
        def fail(*_args: Any, **_options: Any) -> None:
            raise chunkmem.CapacityError("no room", needed_nbytes=2, cap_nbytes=1)

        setattr(self._at, self._call, fail)

    def __exit__(self, *_error: object) -> None:
        delattr(self._at, self._call)


def test_a_step_that_fails_can_be_tried_again(ours: Twin) -> None:
    plain = Twin(None, Layers)
    for twin in (plain, ours):
        held = twin.model.layers[0].weight.detach()  # updated by the step
        twin.loss(features(0)).backward()
        if twin is ours:
            with NoRoom(ours.manager.runtime.updater, "update"), pytest.raises(chunkmem.CapacityError):
                ours.optimizer.step()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        del held
    assert_equal((ours.steps(1, 2), ours.left()), (plain.steps(1, 2), plain.left()))


def test_options_may_change_after_a_backward_that_has_updated_nothing(ours: Twin) -> None:
    plain = Twin(None, Layers)
    with NoRoom(ours.manager.runtime.updater, "make_states"), pytest.raises(chunkmem.CapacityError):
        ours.loss(features(0)).backward()
    ours.optimizer.zero_grad()
    for twin in (plain, ours):
        twin.optimizer.param_groups[0]["lr"] = 0.05
    assert_equal((ours.steps(0, 1), ours.left()), (plain.steps(0, 1), plain.left()))
