"""`chunkmem.Optimizer(class, ..., whole=True)`: closures, other methods of a class, memory, and errors in its step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import chunkmem
from chunkmem.data.layout import ALIGN_NBYTES
from chunkmem.packing.tiling import tile_linears
from tests.helpers.any_class import ClassTwin
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, cpu_bits_only, features, same
from tests.helpers.whole_classes import Prodigy, ScheduleFree, StackedMuon

pytestmark = cpu_bits_only
SMALL_NBYTES = 6 << 10


class Ascending(torch.optim.Optimizer):
    """As sharpness-aware minimisation: up along the gradient, a second gradient there, and down from where it was."""

    def __init__(self, params: Any, lr: float = 1e-2, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        with torch.no_grad():
            for param in params:
                self.state[param]["before"] = param.clone()
                param.add_(param.grad, alpha=self.param_groups[0]["rho"] / norm.item())
        self.zero_grad()
        loss = closure()
        with torch.no_grad():
            for param in params:
                param.copy_(self.state[param].pop("before")).sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss


class WholeTwin(Twin):
    """A class that a test names itself."""

    def make(self, kind: Any, params: Any, **options: Any) -> Any:
        for name in ("betas", "weight_decay", "lr"):
            options.pop(name)
        options.setdefault("lr", 0.05)
        if self.manager is None:
            return kind(params, **options)
        return chunkmem.Optimizer(kind, params, manager=self.manager, whole=True, **options)

    def closure(self, seed: int) -> Callable[[], Tensor]:
        def called() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(features(seed))
            loss.backward()
            return loss

        return called


@pytest.mark.parametrize("line_search", [None, pytest.param("strong_wolfe", marks=pytest.mark.full)])
def test_lbfgs_calls_its_closure(line_search: str | None) -> None:
    """As often as it likes: weights follow, gradients come back, and lists of tensors are states."""

    def scenario(twin: Any) -> list[float]:
        return [twin.optimizer.step(twin.closure(seed)).item() for seed in (0, 0, 1)]

    same(Blocks, scenario, twin=WholeTwin, kind=torch.optim.LBFGS, max_iter=4, line_search_fn=line_search)


def test_a_class_that_needs_gradients_before_its_closure() -> None:
    """It discards them before it calls: those of the second backward are by themselves."""

    def scenario(twin: Any) -> list[float]:
        losses = []
        for seed in range(4):
            twin.loss(features(seed)).backward()

            def again(seed: int = seed) -> Tensor:
                loss: Tensor = twin.loss(features(seed))
                loss.backward()
                return loss

            losses.append(float(twin.optimizer.step(again)))
            twin.optimizer.zero_grad()
        return losses

    same(Blocks, scenario, twin=WholeTwin, kind=Ascending)


def test_other_methods_of_a_class() -> None:
    """Evaluation on averaged weights, in the middle of training, and after the end of it."""

    def scenario(twin: Any) -> list[float]:
        losses = []
        for seed in range(6):
            losses.append(twin.step(features(seed)))
            if seed in (2, 5):
                twin.optimizer.eval()
                with torch.no_grad():
                    losses.append(twin.loss(features(9)).item())
                if seed == 2:
                    twin.optimizer.train()
        return losses

    same(Blocks, scenario, twin=WholeTwin, kind=ScheduleFree)


def test_a_class_that_makes_its_own_groups_and_stacks() -> None:
    """One group a shape, with one state for all of it, as in the plain class's `state_dict`."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin, plain = (WholeTwin(each, Blocks, kind=StackedMuon) for each in (manager, None))
        assert [len(group["params"]) for group in twin.optimizer.param_groups] == [7, 7, 1, 1]
        twin.steps(0, 1)
        plain.steps(0, 1)
        saved = twin.optimizer.state_dict()
        assert saved["state"][0]["momentum_buffer"].shape == (7, 16, 16)
        assert_equal(copied(saved), copied(plain.optimizer.state_dict()))


@pytest.mark.full
def test_states_that_are_lists_are_saved(tmp_path: Path) -> None:
    plain = WholeTwin(None, Blocks, kind=torch.optim.LBFGS)
    losses = [float(plain.optimizer.step(plain.closure(seed))) for seed in range(4)]
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = WholeTwin(manager, Blocks, kind=torch.optim.LBFGS)
        assert [twin.optimizer.step(twin.closure(seed)).item() for seed in range(2)] == losses[:2]
        manager.save(tmp_path / "ckpt", twin.optimizer)
        state = copy.deepcopy(twin.optimizer.state_dict())
    for load in (True, False):
        with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
            twin = WholeTwin(manager, Blocks, kind=torch.optim.LBFGS)
            manager.load(tmp_path / "ckpt", twin.optimizer)
            if not load:
                twin.optimizer.load_state_dict(state)
            assert [twin.optimizer.step(twin.closure(seed)).item() for seed in range(2, 4)] == losses[2:]
            assert_equal(twin.left(), plain.left())


def test_torch_distributed_checkpoint_steps_to_have_states() -> None:
    """As with the plain class, since nobody knows before which states there will be."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin, plain = (ClassTwin(each, Blocks, kind="Prodigy") for each in (manager, None))
        for each in (twin, plain):
            _, found = get_state_dict(each.model, each.optimizer)
            assert len(found["state"]) == 16
        assert twin.steps(0, 1) == plain.steps(0, 1)
        assert_equal(twin.left(), plain.left())


# Memory.


def test_host_counts_what_is_there_at_once() -> None:
    """Weights and gradients from the beginning, states once the class has made them; freezing gives states back."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="Prodigy")
        params = list(twin.model.parameters())
        numel = sum(param.numel() for param in params)
        both = sum(2 * -(-param.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES for param in params)
        assert manager.memory().host.by_role["whole"][0] == both
        twin.steps(0)
        assert manager.memory().host.by_role["whole"][0] == both + 4 * 4 * numel
        manager.freeze(twin.model.blocks)
        twin.steps(1)
        left = sum(param.numel() for param in params if param.requires_grad)
        assert manager.memory().host.by_role["whole"][0] == both + 4 * 4 * left
        del twin.optimizer
        twin.optimizer = chunkmem.Optimizer(StackedMuon, params, manager=manager, whole=True)
        assert manager.memory().host.by_role["whole"][0] == both
        twin.steps(2)
        audit(manager)


def test_room_that_host_does_not_have() -> None:
    """For weights and gradients at once: when the optimizer is made. For states: when the class has made them."""
    memory = {"device": AMPLE_NBYTES, "host": 12 << 10}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 256})) as manager:
        model = manager.wrap(Blocks())
        says = r"Prodigy, whole=True\): weights and gradients of 16 parameters at once: .*raise memory.host from"
        with pytest.raises(chunkmem.CapacityError, match=says):
            chunkmem.Optimizer(Prodigy, model.parameters(), manager=manager, whole=True)
    memory["host"] = 40 << 10
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 256})) as manager:
        model = manager.wrap(Blocks())
        optimizer = chunkmem.Optimizer(Prodigy, model.parameters(), manager=manager, whole=True)
        model(features()).square().mean().backward()
        for _ in range(2):
            with pytest.raises(chunkmem.CapacityError, match=r"states of 16 parameters: .* raise memory\.host from"):
                optimizer.step()


# Errors.


class Failing(StackedMuon):
    """Raises once, after some parameters are new."""

    has_failed = False

    def step(self) -> None:  # type: ignore[override]
        if not self.has_failed:
            self.has_failed = True
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)
            raise KeyError("in the middle")
        super().step()


def test_an_error_in_the_step_of_a_class(tmp_path: Path) -> None:
    """Chunks are as they were; what the class has in its states, nobody knows: it is loaded."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = WholeTwin(manager, Blocks, kind=Failing)
        manager.save(tmp_path / "ckpt", twin.optimizer)
        plain = WholeTwin(None, Blocks, kind=StackedMuon)
        twin.loss(features()).backward()
        with pytest.raises(KeyError, match="in the middle"):
            twin.optimizer.step()
        for call in (twin.optimizer.step, twin.optimizer.zero_grad, twin.weights):
            with pytest.raises(chunkmem.StateError, match="an update of all parameters of Failing has failed"):
                call()
        manager.load(tmp_path / "ckpt", twin.optimizer)
        twin.optimizer.zero_grad()
        assert twin.steps(0, 1, 2) == plain.steps(0, 1, 2)
        assert_equal(twin.left(), plain.left())


def test_an_error_in_a_closure() -> None:
    """In its first call nothing has changed, and it is called again; later ones leave weights in the middle."""
    plain = WholeTwin(None, Blocks, kind=torch.optim.LBFGS)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = WholeTwin(manager, Blocks, kind=torch.optim.LBFGS)
        calls = iter([0, 0, 0, 1])

        def closure() -> Tensor:
            if next(calls, 0):
                raise KeyError("fourth")
            return twin.closure(0)()

        def at_once() -> Tensor:
            raise KeyError("first")

        with pytest.raises(KeyError, match="first"):
            twin.optimizer.step(at_once)
        assert float(twin.optimizer.step(twin.closure(0))) == float(plain.optimizer.step(plain.closure(0)))
        assert_equal(twin.left(), plain.left())
        with pytest.raises(KeyError, match="fourth"):
            twin.optimizer.step(closure)
        with pytest.raises(chunkmem.StateError, match="all parameters of LBFGS has failed in its middle"):
            twin.optimizer.step(twin.closure(0))


def test_a_class_that_refuses_to_step_may_be_called_again() -> None:
    """As schedule-free classes do in evaluation: nothing has changed."""
    plain = ClassTwin(None, Blocks, kind="schedule-free")
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="schedule-free")
        assert twin.steps(0, 1) == plain.steps(0, 1)
        for each in (twin, plain):
            each.optimizer.eval()
            each.loss(features(2)).backward()
            with pytest.raises(RuntimeError, match="not in train mode"):
                each.optimizer.step()
            with pytest.raises(TypeError):
                each.optimizer.train("with arguments")
            each.optimizer.train()
            each.update()
        assert twin.steps(3, 4) == plain.steps(3, 4)
        assert_equal(twin.left(), plain.left())


@pytest.mark.parametrize("num_updated", [0, 2])
def test_a_step_that_fails_when_chunks_are_to_follow_continues(
    num_updated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class has stepped, and does not step again."""
    plain = ClassTwin(None, Blocks, kind="Prodigy")
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="Prodigy")
        assert twin.steps(0) == plain.steps(0)
        twin.loss(features(1)).backward()
        update, calls = manager.runtime.updater.update, iter([*[0] * num_updated, 1])

        def failing(*args: Any, **kwargs: Any) -> None:
            if next(calls, 0):
                raise chunkmem.CapacityError("no room", needed_nbytes=1, cap_nbytes=0)
            update(*args, **kwargs)

        monkeypatch.setattr(manager.runtime.updater, "update", failing)
        with pytest.raises(chunkmem.CapacityError, match="no room"):
            twin.optimizer.step()
        with pytest.raises(chunkmem.StateError, match="after an error in optimizer"):
            twin.loss(features(1))
        twin.update()
        plain.steps(1)
        assert_equal(twin.left(), plain.left())
        assert twin.steps(2, 3) == plain.steps(2, 3)


def test_half_precision_skips_what_overflows() -> None:
    """The class does not step then, and the loss scale falls; later gradients are without it."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES, precision="fp16")) as manager:
        twin = WholeTwin(manager, Blocks, kind=Prodigy)
        scaler, before = twin.optimizer.loss_scaler, twin.weights()
        scaler.loss_scale = 2.0**40
        twin.backward(twin.loss(features(0)))
        twin.update()
        assert_equal(twin.weights(), before)
        assert twin.optimizer.param_groups[0]["k"] == 0
        scaler.loss_scale = 2.0**8
        twin.backward(twin.loss(features(0)))
        twin.update()
        assert twin.optimizer.param_groups[0]["k"] == 1
        with pytest.raises(chunkmem.ConfigError, match=r"step\(closure\) with whole=True and a loss scale \(fp16\)"):
            twin.optimizer.step(twin.closure(0))


def tiled(manager: chunkmem.ChunkManager) -> nn.Module:
    with manager.init():
        model = Blocks()
        tile_linears(model, max_numel=100)
    return model


REFUSED: list[tuple[Callable[[Any, chunkmem.ChunkManager], Any], str]] = [
    (
        lambda model, manager: chunkmem.Optimizer([(Prodigy, model.parameters())], manager=manager, whole=True),
        "make an optimizer for each class",
    ),
    (
        lambda model, manager: chunkmem.Optimizer(
            Prodigy, model.parameters(), manager=manager, whole=True, in_backward=True
        ),
        r"Optimizer\(Prodigy, whole=True\) needs all gradients before it updates anything: leave out in_backward",
    ),
    (
        lambda model, manager: chunkmem.Optimizer(Prodigy, model.parameters(), manager=manager, whole="yes"),
        "whole = 'yes' has to be True or False",
    ),
    (
        lambda model, manager: chunkmem.Optimizer(Prodigy, tiled(manager).parameters(), manager=manager, whole=True),
        r"is a tile of layer .*, and Prodigy with whole=True sees whole matrices: do not divide that layer",
    ),
    (
        lambda model, manager: chunkmem.Optimizer(torch.optim.LBFGS, model.parameters(), manager=manager),
        "pass whole=True",
    ),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_what_is_refused(make: Callable[[Any, chunkmem.ChunkManager], Any], says: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.ConfigError, match=says):
            make(model, manager)
        with pytest.raises(AttributeError, match="nowhere"):
            _ = chunkmem.Optimizer(Prodigy, model.parameters(), manager=manager, whole=True).nowhere


def whole_over_ranks(rank: int) -> str:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        try:
            chunkmem.Optimizer(Prodigy, model.parameters(), manager=manager, whole=True)
        except chunkmem.ChunkmemError as error:
            return str(error)
    return ""


def test_several_ranks_are_refused(pair: Team) -> None:
    assert all("chunkmem.Optimizer(Prodigy, whole=True)" in said for said in pair.run(whole_over_ranks))
