"""Calls that cannot be served: one readable sentence that names the object and the next step, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.twins import WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features

SMALL_NBYTES = 4 * 1024


def outside() -> nn.Module:
    return nn.Linear(2, 3)


def optimizer(twin: Twin, **options: Any) -> Any:
    return chunkmem.AdamW(twin.model.parameters(), manager=twin.manager, **options)


def group(twin: Twin, **options: Any) -> Any:
    return optimizer_over(twin, [{"params": twin.model.inner.parameters(), **options}])


def later(twin: Twin, **options: Any) -> None:
    """Set options of a parameter group between steps, as a schedule of one's own does."""
    before = dict(twin.optimizer.param_groups[0])
    twin.optimizer.param_groups[0].update(options)
    try:
        twin.optimizer.step()
    finally:
        twin.optimizer.param_groups[0].update(before)


def optimizer_over(twin: Twin, params: Any) -> Any:
    return chunkmem.Adam(params, manager=twin.manager)


CALLS: dict[str, tuple[Callable[[Twin], Any], type[Exception], str]] = {
    "step without backward": (
        lambda twin: twin.optimizer.step(),
        chunkmem.StateError,
        r"^step\(\) without a gradient: call manager.backward\(loss\) or loss.backward\(\) before it$",
    ),
    "clip without backward": (
        lambda twin: twin.optimizer.clip_grad_norm_(1.0),
        chunkmem.StateError,
        r"^no gradient to clip: call manager.backward",
    ),
    "a model outside": (
        lambda twin: optimizer_over(twin, outside().parameters()),
        chunkmem.StateError,
        r"^a parameter of shape \(3, 2\) is neither managed nor excluded by this manager; build its model inside "
        r"manager.init\(\) or pass it to manager.wrap\(\) first$",
    ),
    "a plain tensor": (
        lambda twin: optimizer_over(twin, [torch.zeros(4, requires_grad=True)]),
        chunkmem.StateError,
        r"^a parameter of shape \(4,\) is neither managed nor excluded",
    ),
    "gather outside": (
        lambda twin: twin.manager.gather(outside()).__enter__(),
        chunkmem.StateError,
        r"^a parameter of shape \(3, 2\) is neither managed nor excluded",
    ),
    "gather a name": (
        lambda twin: twin.manager.gather("inner.weight").__enter__(),
        chunkmem.StateError,
        r"^manager.gather\(\) takes parameters, modules or a list of them, not a str$",
    ),
    "gather named parameters": (
        lambda twin: twin.manager.gather(twin.model.named_parameters()).__enter__(),
        chunkmem.StateError,
        r"takes parameters, modules or a list of them, not a str$",
    ),
    "negative rate": (lambda twin: optimizer(twin, lr=-1.0), chunkmem.ConfigError, r"^lr = -1.0 has to be a number of"),
    "nan rate": (lambda twin: optimizer(twin, lr=float("nan")), chunkmem.ConfigError, r"^lr = nan has to be a number"),
    "rate in words": (lambda twin: optimizer(twin, lr="1e-3"), chunkmem.ConfigError, r"^lr = 1e-3 has to be a number"),
    "rate that is set to words": (
        lambda twin: later(twin, lr="x"),
        chunkmem.ConfigError,
        r"^lr = x has to be a number, such as 0.1, or a tensor of one element$",
    ),
    "no eps later": (lambda twin: later(twin, eps=None), chunkmem.ConfigError, r"^eps = None has to be a number"),
    "beta in words later": (
        lambda twin: later(twin, betas=(0.9, "x")),
        chunkmem.ConfigError,
        r"^betas\[1\] = x has to be a number",
    ),
    "one beta later": (lambda twin: later(twin, betas=(0.9,)), chunkmem.ConfigError, r"^betas = .* has to be two"),
    "two decays later": (
        lambda twin: later(twin, weight_decay=torch.ones(2)),
        chunkmem.ConfigError,
        r"^weight_decay = tensor.* has to be a number",
    ),
    "in backward in words": (
        lambda twin: optimizer(twin, in_backward="no"),
        chunkmem.ConfigError,
        r"^in_backward = 'no' has to be True or False$",
    ),
    "a norm in words": (
        lambda twin: twin.optimizer.clip_grad_norm_("1"),
        chunkmem.ConfigError,
        r"^max_norm = 1 has to be a number",
    ),
    "a norm that is set to words": (
        lambda twin: setattr(twin.optimizer, "max_grad_norm", "1"),
        chunkmem.ConfigError,
        r"^max_grad_norm = 1 has to be a number",
    ),
    "two rates": (lambda twin: optimizer(twin, lr=torch.ones(2)), chunkmem.ConfigError, r"^lr = tensor.* has to be"),
    "one beta": (lambda twin: optimizer(twin, betas=(0.9,)), chunkmem.ConfigError, r"^betas = \(0.9,\) has to be two"),
    "no tuple": (lambda twin: optimizer(twin, betas=0.9), chunkmem.ConfigError, r"^betas = 0.9 has to be two numbers"),
    "beta of 1": (
        lambda twin: optimizer(twin, betas=(0.9, 1.0)),
        chunkmem.ConfigError,
        r"^betas\[1\] = 1.0 .* 1$",
    ),
    "negative eps": (lambda twin: optimizer(twin, eps=-1e-8), chunkmem.ConfigError, r"^eps = -1e-08 has to be"),
    "negative decay": (lambda twin: optimizer(twin, weight_decay=-1), chunkmem.ConfigError, r"^weight_decay = -1 has"),
    "no decay": (lambda twin: group(twin, weight_decay=None), chunkmem.ConfigError, r"^weight_decay = None has to be"),
    "clipping in words": (
        lambda twin: optimizer(twin, max_grad_norm="1"),
        chunkmem.ConfigError,
        r"^max_grad_norm = 1",
    ),
    "amsgrad": (lambda twin: group(twin, amsgrad=True), chunkmem.ConfigError, r"^amsgrad=True is not available; use"),
    "maximize": (
        lambda twin: group(twin, maximize=True),
        chunkmem.ConfigError,
        r"^maximize=True is not available",
    ),
    "a loss that is none": (
        lambda twin: twin.manager.backward({"loss": 1}),
        chunkmem.StateError,
        r"^manager.backward\(\) takes the loss as a tensor, not a dict$",
    ),
}


@pytest.mark.few(16)
@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_cannot_be_served_changes_nothing(what: str) -> None:
    call, error, message = CALLS[what]
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        with pytest.raises(error, match=message) as raised:
            call(twin)
        assert "\n" not in str(raised.value)
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


class WithSparse(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


GRADIENTS: dict[str, tuple[Callable[[Any], Tensor], type[Exception], str]] = {
    "sparse": (
        lambda model: model.table(features(0).argmax(dim=1)).sum(),
        chunkmem.StateError,
        r"^parameter table.weight got a torch.sparse_coo gradient; chunks hold dense ones \(sparse=False\)$",
    ),
    "complex": (
        lambda model: (model.phase * 2j).abs().sum(),
        chunkmem.ConfigError,
        r"^parameter phase is torch.complex64; Adam takes reals$",
    ),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_a_gradient_that_fused_adam_cannot_take(what: str) -> None:
    """The step is refused as a whole; `zero_grad()`, and training goes on without it."""
    use, error, message = GRADIENTS[what]
    plain = Twin(None, WithSparse)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, WithSparse)
        assert twin.steps(0) == losses[:1]
        with pytest.raises(error, match=message):
            (twin.loss(features(1)) + use(twin.model)).backward()
            twin.optimizer.step()
        twin.optimizer.zero_grad()
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


MANAGERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a dict": (
        lambda: chunkmem.ChunkManager({}),
        r"^config is a dict; pass Config.from_json\(path\)",
    ),
    "a path": (lambda: chunkmem.ChunkManager("chunkmem.json"), r"^config is a str; pass Config.from_json\(path\)"),
    "a third tier": (
        lambda: chunkmem.ChunkManager(
            chunkmem.Config.from_dict({"memory": {"disk": {"path": "/dev/null", "capacity": 1}}})
        ),
        r"^memory.disk.path: /dev/null cannot be used: Not a directory",
    ),
    "a device that is not there": (
        lambda: chunkmem.ChunkManager(device_index=99),
        r"^there is no accelerator 99: \d+ are visible to this process$",
    ),
}


@pytest.mark.parametrize("what", MANAGERS)
def test_a_manager_that_cannot_be_made(what: str) -> None:
    make, message = MANAGERS[what]
    with pytest.raises(chunkmem.ConfigError, match=message):
        make()


def run_in_a_child(use: Callable[[], Any]) -> str:
    """Call `use` in a forked process; the message of the `StateError` it raises, or what came instead."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use()
            message = "no error"
        except chunkmem.StateError as error:
            message = str(error)
        except BaseException as error:
            message = repr(error)
        os.write(sender, message.encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        message = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child was killed by a signal"
    return message


@cpu_only
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_cannot_use_the_manager() -> None:
    """And does not disturb the parent's."""
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        uses: list[Callable[[], Any]] = [
            lambda: twin.model(features(0)),
            lambda: twin.model.inner.weight.sum(),
            lambda: twin.optimizer.step(),
            manager.state_dict,
            twin.optimizer.state_dict,
            lambda: manager.gather().__enter__(),
        ]
        for use in uses:
            assert "lives in the parent process; a forked child cannot use it" in run_in_a_child(use)
        assert run_in_a_child(manager.close) == "no error"
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


@pytest.mark.parametrize("policy", ["alternate", None, 5, ["keep"], {}], ids=str)
def test_a_policy_that_there_is_not(policy: Any) -> None:
    """Also one that no table can look up."""
    message = r"policy is .*; give one of auto, keep, offload, recompute"
    manager = chunkmem.ChunkManager(config(1 << 20))
    with manager, pytest.raises(chunkmem.ConfigError, match=message):
        manager.region(nn.Linear(2, 2), policy=policy)
