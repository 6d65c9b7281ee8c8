"""What `chunkmem.Optimizer` refuses by name, and why; what it takes although a trial on the meta device fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.packing.tiling import tile_linears
from tests.helpers.any_class import ClassTwin, Lion, muon_and_adamw
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, features, same


class Simple(torch.optim.Optimizer):
    """A user's class: `update` is what differs."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            self.update(params, group)

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            param.sub_(param.grad, alpha=group["lr"])


class Counting(Simple):
    """As Prodigy's and D-Adaptation's `d`, or the sum of weights of a schedule-free optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, d=1e-6)

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        group["d"] += sum(float(param.grad.abs().sum()) for param in params)
        super().update(params, group)


class Attribute(Simple):
    num_updates = 0

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        self.num_updates += 1
        super().update(params, {"lr": group["lr"] / self.num_updates})


class Collecting(Simple):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.norms: list[float] = []

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        self.norms.append(float(sum(param.grad.norm() for param in params)))
        super().update(params, group)


class Normed(Simple):
    """Gradients over the norm of all of them."""

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=group["lr"])


class Noisy(Simple):
    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class Listed(Simple):
    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self.state[param].setdefault("norms", []).append(1.0)
        super().update(params, group)


class Kept(Simple):
    """Parameters of its constructor, whatever is in its groups."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.kept = [param for group in self.param_groups for param in group["params"]]

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in self.kept:
            param.mul_(0.5)


class Broken(Simple):
    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        raise ValueError("there is no such update")


class FalselyElementwise(Simple):
    is_elementwise = True

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Late(Simple):
    """A state that comes with the fifth update."""

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            if state["step"] == 5:
                state["late"] = torch.zeros_like(param)
        super().update(params, group)


class ScheduledAway(Simple):
    """It changes its options in its fifth update."""

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            group["lr"] = 0.0 if state["step"] == 5 else group["lr"]
        super().update(params, group)


class Codes(torch.Tensor):
    """As states of torchao: a subclass, with memory of its own."""


class Quantised(torch.optim.Optimizer):
    """Keeps its states in a subclass."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["exp_avg"] = torch.zeros_like(param).as_subclass(Codes)
                    param.add_(param.grad, alpha=-group["lr"])


@pytest.fixture
def manager() -> Iterator[chunkmem.ChunkManager]:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as found:
        yield found


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, r"LBFGS\.step\(\) needs a closure, which it calls as often as it likes"),
    (torch.optim.SparseAdam, {}, r"SparseAdam cannot update parameter inner\.weight \(16, 16\).*dense gradients"),
    (Counting, {}, r"Counting\.step\(\) changes d of its parameter group: it has to see all parameters at once"),
    (Attribute, {}, r"Attribute\.step\(\) changes its attribute num_updates: it has to see all parameters at once"),
    (Collecting, {}, r"Collecting\.step\(\) changes its attribute norms"),
    (Normed, {}, "Normed updates a parameter differently when another one is updated with it"),
    (Noisy, {}, r"Noisy\.step\(\) draws random numbers, which parameters in chunks would get in another order"),
    (Listed, {}, "Listed keeps a list as state 'norms' of a parameter"),
    (
        Quantised,
        {},
        r"Quantised keeps a Codes as state 'exp_avg' of a parameter; .*take chunkmem\.AdamW\(\.\.\., states=\"8bit\"\)",
    ),
    (Kept, {}, r"Kept\.step\(\) updates parameters that it has taken from its constructor"),
    (Broken, {}, r"Broken cannot update parameter inner\.weight \(16, 16\) .*ValueError: there is no such update"),
    (
        FalselyElementwise,
        {},
        "FalselyElementwise.is_elementwise says that elements are updated by themselves",
    ),
    (torch.optim.Muon, {}, r"Muon cannot update parameter inner\.bias \(16,\) .*only supports 2D parameters"),
    (torch.optim.NAdam, {"lr": -1.0}, "NAdam cannot update parameter .*Invalid learning rate: -1.0"),
    (torch.optim.NAdam, {"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
    (torch.optim.AdamW, {"capturable": True}, "AdamW cannot update parameter .*capturable"),
    ("NAdam", {}, "takes a class that derives from torch.optim.Optimizer, not 'NAdam'; pass the class itself"),
    (nn.Linear, {}, "takes a class that derives from torch.optim.Optimizer"),
]


@pytest.mark.parametrize(("kind", "options", "says"), REFUSED)
def test_classes_that_are_refused(kind: Any, options: Any, says: str, manager: chunkmem.ChunkManager) -> None:
    """And the model trains on with another optimizer, as if there had been none."""
    twin = Twin(manager, Blocks)
    losses = twin.steps(0)
    draws = torch.get_rng_state()
    with pytest.raises(chunkmem.ConfigError, match=says):
        chunkmem.Optimizer(kind, twin.model.parameters(), manager=manager, **options)
    assert torch.equal(torch.get_rng_state(), draws), "trials have drawn random numbers"
    plain = Twin(None, Blocks)
    assert losses + twin.steps(1, 2) == plain.steps(0, 1, 2)
    assert_equal(twin.left(), plain.left())


CALLS: list[tuple[Callable[[nn.Module], tuple[Any, ...]], str]] = [
    (lambda model: (torch.optim.NAdam,), "there are no parameters"),
    (lambda model: ([(torch.optim.NAdam, model.parameters())], model.parameters()), "each class has its parameters in"),
    (lambda model: ([torch.optim.NAdam],), r"the list has to have \(class, params\) or \(class, params, options\)"),
    (lambda model: ([],), r"the list has to have \(class, params\)"),
]


@pytest.mark.parametrize(("arguments", "says"), CALLS)
def test_arguments_that_are_refused(arguments: Any, says: str, manager: chunkmem.ChunkManager) -> None:
    model = manager.wrap(Blocks())
    with pytest.raises(chunkmem.ConfigError, match=says):
        chunkmem.Optimizer(*arguments(model), manager=manager)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Late, r"Late has made a state 'late' of shape \(.*\) for parameter inner\.\S+, for which there is none"),
        (ScheduledAway, r"ScheduledAway\.step\(\) changes lr of its parameter group"),
    ],
)
def test_what_trials_cannot_show_is_refused_when_it_happens(
    kind: Any, says: str, manager: chunkmem.ChunkManager
) -> None:
    twin = Twin(manager, Blocks)
    twin.optimizer = chunkmem.Optimizer(kind, twin.model.parameters(), manager=manager)
    twin.steps(0, 1, 2, 3)
    twin.loss(features(4)).backward()
    with pytest.raises(chunkmem.ChunkmemError, match=says):
        twin.optimizer.step()


class Tabled(Simple):
    """It moves a table to the device of its parameters, as bitsandbytes does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.table = {"signs": torch.tensor([-1.0, 1.0])}

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self.table["signs"] = self.table["signs"].to(param.device)
            param.sub_(param.grad * self.table["signs"][1], alpha=group["lr"])


class NeedsValues(Simple):
    """Its states depend on what is in a parameter: a trial without memory cannot tell."""

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            if "rows" not in state:
                state["rows"] = torch.from_numpy(param.numpy().reshape(param.shape[0], -1).mean(1))
            param.sub_(state["rows"].mean() * param.grad, alpha=group["lr"])


class Assigning(Simple):
    """It assigns `.data`, and writes to the gradient."""

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            assert param.grad is not None
            param.grad.add_(param, alpha=0.1)
            param.data = param.data - group["lr"] * param.grad


class Either(Simple):
    """One state or the other, as an option says; the one that is not used stays."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, name="first")

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            average = self.state[param].setdefault(group["name"], torch.zeros_like(param))
            average.lerp_(param.grad, 0.5)
            param.sub_(average, alpha=group["lr"])


class UserTwin(ClassTwin):
    def make(self, kind: str, params: Any, **options: Any) -> Any:
        cls = {"values": NeedsValues, "assigning": Assigning, "tabled": Tabled, "either": Either}[kind]
        return cls(params) if self.manager is None else chunkmem.Optimizer(cls, params, manager=self.manager)


@pytest.mark.parametrize("kind", ["values", "assigning", "tabled"])
def test_users_classes(kind: str) -> None:
    same(Blocks, lambda twin: twin.steps(*range(6)), twin=UserTwin, kind=kind)


def test_adafactor_of_transformers() -> None:
    """It has no learning rate of its own, factors of one dimension, and a number that is a tensor from a step on."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"lr": None, "relative_step": True, "scale_parameter": True, "warmup_init": True}

    class AdafactorTwin(ClassTwin):
        def make(self, kind: str, params: Any, **_: Any) -> Any:
            cls = transformers.optimization.Adafactor
            if self.manager is None:
                return cls(params, **options)
            return chunkmem.Optimizer(cls, params, manager=self.manager, **options)

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0, 1, 2, 3)
        twin.optimizer.load_state_dict(twin.optimizer.state_dict())
        return losses + twin.steps(4, 5)

    same(Blocks, scenario, twin=AdafactorTwin)


def test_states_that_options_do_not_call_for_any_more_stay() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed, name in enumerate(["first", "first", "second", "second", "first", "second"]):
            twin.optimizer.param_groups[0]["name"] = name
            losses += twin.steps(seed)
        return losses

    same(Blocks, scenario, twin=UserTwin, kind="either")


def test_gradients_that_a_class_changes_are_there_again_if_an_update_during_backward_was_wrong() -> None:
    keys = {
        "optimizer": {"params": {"use_hybrid_adam": False}},
        "client": {"opts": {"overlap_optimizer": True, "undo_log_ratio": 0.5}},
    }
    plain = UserTwin(None, Blocks, kind="assigning")
    with chunkmem.ChunkManager(config(12 << 10, **keys)) as manager:
        twin = UserTwin(manager, Blocks, kind="assigning")
        losses: list[list[float]] = [[], []]
        for seed in range(10):
            for found, each in zip(losses, (plain, twin), strict=True):
                loss = each.loss(features(seed))
                loss.backward()
                if seed == 7:
                    each.optimizer.param_groups[0]["lr"] = 5e-3
                each.update()
                found.append(loss.item())
        assert manager.runtime.updater.ahead.guesses.num_wrong == 1
        assert losses[1] == losses[0]
        assert_equal(twin.left(), plain.left())


@spread(name=["AdamW8bit", "Lion8bit", "SGD8bit"], device_nbytes=[AMPLE_NBYTES, 200_000])
def test_optimizers_of_bitsandbytes(name: str, device_nbytes: int) -> None:
    """Parameters of 4,096 elements or more have states of 8 bits, with scales; others in the same chunk, of 32."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {"lr": 1e-3, "momentum": 0.9} if name == "SGD8bit" else {"lr": 1e-3}
    kind = getattr(bnb.optim, name)

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        with nullcontext() if manager is None else manager.init():
            model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8))
        optimizer = (
            kind(model.parameters(), **options)
            if manager is None
            else chunkmem.Optimizer(kind, model.parameters(), manager=manager, **options)
        )
        for seed in range(6):
            model(features(seed, shape=(4, 96))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = optimizer.state
        states = [copied(dict(found[param])) for param in model.parameters()]
        return copied(dict(model.state_dict() if manager is None else manager.state_dict(model))), states

    with chunkmem.ChunkManager(config(device_nbytes, default_chunk_size=12_000)) as manager:
        assert_equal(run(manager), run(None))
        assert {"state1.uint8", "state1"} <= {key.role for key in manager.runtime.memory.store.chunks}


# Tiles.


def tiled(manager: chunkmem.ChunkManager | None) -> nn.Module:
    torch.manual_seed(0)
    with nullcontext() if manager is None else manager.init():
        model = Blocks()
        tile_linears(model, max_numel=100)
    return model


def test_whole_matrix_classes_are_refused_over_tiles(manager: chunkmem.ChunkManager) -> None:
    model = tiled(manager)
    says = r"may need whole matrices, and parameter (\S+\.tile_0_0\.weight) is a tile of layer \S+; update parts with"
    for kind in (torch.optim.Adafactor, torch.optim.Muon, Simple):
        params = [param for param in model.parameters() if param.dim() == 2]
        with pytest.raises(chunkmem.ConfigError, match=f"{kind.__name__} {says}"):
            chunkmem.Optimizer(kind, params, manager=manager)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, Lion])
def test_elementwise_classes_over_tiles_have_the_bits_of_untiled_layers(kind: Any) -> None:
    """Of the same tiles in plain PyTorch; saved, states are those of untiled layers."""
    with chunkmem.ChunkManager(config(6 << 10)) as manager:
        model = tiled(manager)
        optimizer = chunkmem.Optimizer(kind, model.parameters(), manager=manager)
        plain = tiled(None)
        expected = kind(plain.parameters())
        for seed in range(5):
            for each, one in ((model, optimizer), (plain, expected)):
                each(features(seed)).square().mean().backward()
                one.step()
                one.zero_grad()
        assert_equal(copied(manager.state_dict(model)), copied(plain.state_dict()))
        untiled = chunkmem.untile_optimizer_state(model, optimizer)["state"]
        assert {tuple(entry["exp_avg"].shape) for entry in untiled.values()} == {(16, 16), (4, 16), (16,), (4,)}
        assert_equal(copied(untiled), copied(chunkmem.untile_optimizer_state(plain, expected)["state"]))


# Several classes.


def test_a_group_that_is_added_names_its_class(manager: chunkmem.ChunkManager) -> None:
    twin = ClassTwin(manager, Blocks, kind="pairs", params=lambda m: muon_and_adamw(m.blocks))
    head = list(twin.model.head.parameters())
    with pytest.raises(chunkmem.ConfigError, match=r"has the classes Muon, AdamW, and the group names None; say whose"):
        twin.optimizer.add_param_group({"params": head})
    with pytest.raises(chunkmem.ConfigError, match=r"the group names <class .*SGD.*; say whose it is"):
        twin.optimizer.add_param_group({"params": head, "optimizer": torch.optim.SGD})
    with pytest.raises(chunkmem.ConfigError, match=r"Muon cannot update parameter head\.bias"):
        twin.optimizer.add_param_group({"params": head, "optimizer": torch.optim.Muon})
    assert len(twin.optimizer.param_groups) == 2
    twin.optimizer.add_param_group({"params": head, "optimizer": torch.optim.AdamW, "lr": 0.1})
    group = twin.optimizer.param_groups[-1]
    assert (group["lr"], group["betas"], "momentum" in group, "optimizer" in group) == (0.1, (0.9, 0.999), False, False)
    twin.steps(0, 1)
    assert list(twin.optimizer.state[head[0]]) == ["step", "exp_avg", "exp_avg_sq"]


def test_adamw_of_chunkmem_and_a_class_share_chunks() -> None:
    """Both keep `exp_avg`, of some parameters each."""

    def run(manager: chunkmem.ChunkManager | None, scenario: int) -> Any:
        twin = Twin(manager, Blocks)
        parameters = list(twin.model.parameters())
        weights, biases = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
        if manager is None:
            optimizers = [torch.optim.AdamW(weights, lr=1e-2, fused=True), torch.optim.NAdam(biases, lr=1e-2)]
        else:
            own = [lambda: chunkmem.AdamW(weights, manager=manager, lr=1e-2)]
            own.append(lambda: chunkmem.Optimizer(torch.optim.NAdam, biases, manager=manager, lr=1e-2))
            made = [make() for make in (own if scenario == 0 else own[::-1])]
            optimizers = made if scenario == 0 else made[::-1]
        losses = []
        for seed in range(7):
            loss = twin.loss(features(seed))
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
            twin.model.zero_grad()
        states = [copied(dict(sorted(one.state_dict()["state"].items()))) for one in optimizers]
        return losses, twin.weights(), states

    plain = run(None, 0)
    for scenario in (0, 1):
        for device_nbytes in (6 << 10, AMPLE_NBYTES):
            with chunkmem.ChunkManager(config(device_nbytes)) as manager:
                assert_equal(run(manager, scenario), plain)


def test_a_new_optimizer_takes_over_and_the_old_one_says_so(manager: chunkmem.ChunkManager) -> None:
    twin = ClassTwin(manager, Blocks, kind="Adafactor")
    twin.steps(0, 1)
    old = twin.optimizer
    twin.optimizer = chunkmem.Optimizer(torch.optim.NAdam, twin.model.parameters(), manager=manager)
    assert not any(key.role.value in ("row_var", "variance") for key in manager.runtime.memory.store.chunks)
    with pytest.raises(chunkmem.StateError, match="was given to a newer optimizer"):
        old.state_dict()
    twin.steps(2, 3)


def test_room_that_states_do_not_have_is_refused_with_their_bytes() -> None:
    """Weights, gradients and one state fit; two would not."""
    memory = {"device": 60 << 10, "host": 4 << 10}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 1024})) as manager:
        model = manager.wrap(nn.Sequential(*(nn.Linear(31, 32) for _ in range(4))))
        with pytest.raises(chunkmem.CapacityError, match="optimizer: weights, gradients and states"):
            chunkmem.Optimizer(torch.optim.NAdam, model.parameters(), manager=manager)
        chunkmem.Optimizer(torch.optim.SGD, model.parameters(), manager=manager, lr=0.1, momentum=0.9)


def test_states_of_different_dtypes_under_one_name_are_refused(manager: chunkmem.ChunkManager) -> None:
    """Codes of 8 bits and values of a class would be in one chunk."""
    model = manager.wrap(Blocks())
    parameters = list(model.parameters())
    chunkmem.AdamW(parameters[::2], manager=manager, states="8bit")
    says = r"state exp_avg of parameter \S+ is .*, and that of \S+ in the same chunk is .*; use chunkmem\.Opt"
    with pytest.raises(chunkmem.ConfigError, match=says):
        chunkmem.Optimizer(torch.optim.NAdam, parameters[1::2], manager=manager)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Adafactor", "NAdam"])
def test_what_is_frozen_gives_its_states_back(kind: str) -> None:
    """And begins as the class makes them when it is trained again, as in plain PyTorch once its state was deleted."""

    def scenario(twin: Twin) -> list[float]:
        block = twin.model.blocks[0]
        losses = twin.steps(0, 1, 2)
        if twin.manager is None:
            block.requires_grad_(False)
            for param in block.parameters():
                del twin.optimizer.state[param]
        else:
            assert twin.manager.freeze(block).freed_nbytes > 0
        losses += twin.steps(3, 4, 5)
        if twin.manager is None:
            block.requires_grad_(True)
        else:
            twin.manager.unfreeze(block)
        return losses + twin.steps(6, 7)

    same(Blocks, scenario, twin=ClassTwin, kind=kind)
