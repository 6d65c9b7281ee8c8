"""An optimizer of torch's, as a model's own `configure_optimizers` makes it, taken over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import chunkmem
from tests.helpers.spread import spread
from tests.helpers.training import compute_device
from tests.helpers.twins import OTHER_BITS, Blocks, assert_equal, config, copied, features

CAP_NBYTES = 12_000
MADE = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, fused=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, foreach=False),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
}


def require_same_bits(kind: str) -> None:
    """Skip the test if a class has other bits on HOST than where the model computes."""
    if kind not in ("AdamW", "Adam") and compute_device().type != "cpu":
        pytest.skip(OTHER_BITS)


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Two, as nanoGPT has them: matrices decay."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(model: Any, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        model(features(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("is_before", [True, False], ids=["made before", "made after"])
def test_it_has_the_groups_options_and_states(kind: str, is_before: bool) -> None:
    """Also when it has trained already, before the model was wrapped."""
    require_same_bits(kind)

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(3)
        model = Blocks().to(compute_device())
        optimizer: Any = None
        if is_before:
            optimizer = MADE[kind](groups_of(model))
            train(model, optimizer, 7, 8)
        if manager is not None:
            model = manager.wrap(model)
        if not is_before:
            optimizer = MADE[kind](groups_of(model))
        if manager is not None:
            optimizer = manager.optimizer(optimizer)
            assert type(optimizer) is getattr(chunkmem, kind, chunkmem.Optimizer)
        train(model, optimizer, 0, 1, 2)
        return copied([dict(model.state_dict()), optimizer.state_dict()["state"]])

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(manager), scenario(None))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    ),
}


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@spread(schedule=SCHEDULES, kind=["AdamW", "RMSprop", "SGD"], in_backward=[False, True])
def test_schedules_and_hooks_from_before_are_those_of_what_is_returned(
    schedule: str, kind: str, in_backward: bool
) -> None:
    """The schedule changed the learning rate of an optimizer that is not stepped any more; hooks were not called."""
    require_same_bits(kind)

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(3)
        model, called = Blocks().to(compute_device()), []
        model = model if manager is None else manager.wrap(model)
        optimizer: Any = MADE[kind](groups_of(model))
        scheduler = SCHEDULES[schedule](optimizer)
        first = optimizer.param_groups[0]
        removed = optimizer.register_step_pre_hook(lambda *_: called.append("removed"))
        optimizer.register_step_pre_hook(lambda own, args, kwargs: called.append(own.param_groups[0]["lr"]))
        optimizer.register_state_dict_post_hook(lambda own, state: called.append(sorted(state)))
        before = optimizer
        if manager is not None:
            optimizer = manager.optimizer(optimizer, in_backward=in_backward)
        removed.remove()
        rates = []
        for seed in range(5):
            train(model, optimizer, seed)
            scheduler.step()
            rates.append(first["lr"])
        saved = copied([optimizer.state_dict(), scheduler.state_dict()])
        train(model, optimizer, 5)
        scheduler.step()
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        train(model, optimizer, 6)
        scheduler.step()
        assert before.param_groups == optimizer.param_groups
        rates += [group["lr"] for group in optimizer.param_groups]
        return copied([dict(model.state_dict()), rates, called])

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(manager), scenario(None))


def test_an_optimizer_whose_step_was_replaced_is_refused() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        optimizer = torch.optim.AdamW(manager.wrap(Blocks()).parameters())
        step = optimizer.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        optimizer.step = counted  # type: ignore[method-assign]
        with pytest.raises(chunkmem.StateError, match=r"step of this AdamW was replaced by .*counted"):
            manager.optimizer(optimizer)


def test_a_class_that_needs_all_parameters_at_once_is_refused() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.ConfigError, match="LBFGS"):
            manager.optimizer(torch.optim.LBFGS(model.parameters()))


def test_one_of_ours_is_returned_to_the_user() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        optimizer = chunkmem.AdamW(manager.wrap(Blocks()).parameters(), manager=manager)
        with pytest.raises(chunkmem.StateError, match=r"given a chunkmem\.AdamW: use it as it is"):
            manager.optimizer(optimizer)
