"""What a managed model, its optimizer and its manager can be asked besides training, and after they are closed."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.assembly.change import Repacking
from chunkmem.data.types import Role, Tier
from chunkmem.freezing.packing_again import PackingAgain
from tests.helpers.audit import audit, audit_ledgers
from tests.helpers.spread import spread
from tests.helpers.training import compute_device
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features, same

SMALL_NBYTES = 4 * 1024


class Model(Blocks):
    """A convolution that is never called, a normalisation with buffers, and an LSTM."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH), num_blocks=1)
        self.conv, self.lstm, self.act = nn.Conv2d(2, 2, 1), nn.LSTM(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.act(self.lstm(x)[0]))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to dtype": lambda model: model.to(torch.bfloat16),
    "to meta": lambda model: model.to("meta"),
    "to memory format": lambda model: model.to(memory_format=torch.channels_last),
    "to shared memory": lambda model: model.share_memory() if not torch.accelerator.is_available() else model.half(),
    "a part": lambda model: model.blocks.half(),
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "replace": lambda model: setattr(model.inner, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "replace by None": lambda model: setattr(model.inner, "weight", None),
    "register": lambda model: model.inner.register_parameter("weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "delete": lambda model: delattr(model.inner, "weight"),
    "pruning": lambda model: prune.l1_unstructured(model.inner, "weight", 0.5),
    "weight norm": lambda model: torch.nn.utils.parametrizations.weight_norm(model.inner),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_served_says_so_and_changes_nothing(how: str) -> None:
    plain = Twin(None, Model)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(16 * 1024)) as manager:
        twin = Twin(manager, Model)
        assert twin.steps(0) == losses[:1]
        buffers = {name: (b.dtype, b.device) for name, b in twin.model.named_buffers()}
        with pytest.raises(chunkmem.StateError) as raised:
            REFUSED[how](twin.model)
        assert "\n" not in str(raised.value)
        assert {name: (b.dtype, b.device) for name, b in twin.model.named_buffers()} == buffers
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


SERVED: dict[str, Callable[[Any], Any]] = {
    "to device": lambda model: model.to(compute_device()),
    "float": lambda model: model.float(),
    "to memory format": lambda model: model.blocks.to(memory_format=torch.contiguous_format),
    "train": lambda model: model.eval().train(),
    "requires_grad_": lambda model: model.requires_grad_(False).requires_grad_(True),
    "apply": lambda model: model.apply(lambda module: None),
    "another child": lambda model: model.add_module("more", nn.Linear(2, 2)),
    "another parameter": lambda model: model.inner.register_parameter("more", nn.Parameter(torch.ones(2))),
    "a copy": lambda model: copy.deepcopy(model).to("cpu")(features(3).to("cpu")).sum().backward(),
    "a copy of a part": lambda model: nn.init.zeros_(copy.deepcopy(model.inner).weight),
    "a pickle of what has no parameters": lambda model: pickle.loads(pickle.dumps(model.act))(features(3)),
    "a copy of what has no parameters": lambda model: copy.deepcopy(model.act)(features(3)),
    "a shallow copy": lambda model: copy.copy(model)(features(3)).sum().item() and None,
}


@pytest.mark.parametrize("how", SERVED)
def test_what_changes_nothing_is_served(how: str) -> None:
    """At the smallest cap: an RNN looks all its weights up in `to`, and must not need them all for that."""

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        random_numbers = torch.get_rng_state()
        twin.model.eval()
        SERVED[how](twin.model)
        twin.model.train()
        torch.set_rng_state(random_numbers)
        return losses + twin.steps(1)

    same(Model, scenario)


def test_printing_a_model_reads_nothing() -> None:
    """`Linear` looks at `self.bias` to say whether there is one; also when everything is closed."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        model = Twin(manager, Model).model
        assert str(model) == str(Model())
        audit(manager)
    assert str(model) == str(Model())


def test_the_optimizer_and_the_manager_cannot_be_copied() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        for use, value in ((copy.deepcopy, twin.optimizer), (pickle.dumps, twin.optimizer), (pickle.dumps, manager)):
            with pytest.raises(chunkmem.StateError, match="cannot be copied or pickled"):
                use(value)
        twin.steps(0)


def test_a_copy_of_what_holds_the_manager_holds_it_too() -> None:
    """As a LightningModule, which callbacks that average weights copy."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        holder = nn.Module()
        holder.manager, holder.model = manager, twin.model
        twin.steps(0)
        copied = copy.deepcopy(holder)
        assert copied.manager is manager
        same_weights = dict(manager.state_dict(twin.model))
        for name, param in copied.model.named_parameters():
            assert type(param) is nn.Parameter
            assert torch.equal(param, same_weights[name])
        twin.steps(1)


AFTER: dict[str, Callable[[Twin, torch.Tensor, Any], Any]] = {
    "forward": lambda twin, loss, state: twin.model(features(0)),
    "a part": lambda twin, loss, state: twin.model.blocks[0](features(0)),
    "a parameter": lambda twin, loss, state: twin.model.inner.weight.norm(),
    "backward": lambda twin, loss, state: loss.backward(),
    "backward by the manager": lambda twin, loss, state: twin.manager.backward(loss),
    "step": lambda twin, loss, state: twin.optimizer.step(),
    "zero_grad": lambda twin, loss, state: twin.optimizer.zero_grad(),
    "clip": lambda twin, loss, state: twin.optimizer.clip_grad_norm_(1.0),
    "optimizer state": lambda twin, loss, state: twin.optimizer.state_dict(),
    "load optimizer state": lambda twin, loss, state: twin.optimizer.load_state_dict(state),
    "another optimizer": lambda twin, loss, state: chunkmem.AdamW(twin.model.parameters(), manager=twin.manager),
    "another group": lambda twin, loss, state: twin.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))]}
    ),
    "state": lambda twin, loss, state: twin.manager.state_dict(),
    "state of the model": lambda twin, loss, state: twin.model.state_dict(),
    "load": lambda twin, loss, state: twin.manager.load_state_dict({}, strict=False),
    "copy": lambda twin, loss, state: copy.deepcopy(twin.model),
    "unwrap": lambda twin, loss, state: twin.manager.unwrap(),
    "load into the model": lambda twin, loss, state: twin.model.load_state_dict(
        {"inner.weight": torch.ones(16, 16)}, False
    ),
    "gather": lambda twin, loss, state: twin.manager.gather().__enter__(),
    "init": lambda twin, loss, state: twin.manager.init().__enter__(),
    "wrap": lambda twin, loss, state: twin.manager.wrap(nn.Linear(2, 2)),
}


@pytest.fixture(scope="module")
def closed() -> tuple[Twin, torch.Tensor, Any]:
    """A training that was closed in the middle of a step, twice."""
    manager = chunkmem.ChunkManager(config(SMALL_NBYTES))
    twin = Twin(manager, Blocks)
    twin.steps(0, 1)
    state = twin.optimizer.state_dict()
    twin.loss(features(2)).backward()
    loss = twin.loss(features(3))
    manager.close()
    manager.close()
    return twin, loss, state


@pytest.mark.parametrize("how", AFTER)
def test_everything_after_close_says_that_it_is_closed(how: str, closed: tuple[Twin, torch.Tensor, Any]) -> None:
    with pytest.raises(chunkmem.StateError, match=r"manager is closed; take manager\.state_dict\(\) before"):
        AFTER[how](*closed)


def test_close_gives_all_memory_back(closed: tuple[Twin, torch.Tensor, Any]) -> None:
    twin, _, _ = closed
    manager = twin.manager
    assert manager is not None
    audit_ledgers(manager.runtime.memory.store)
    report = manager.memory()
    assert (report.device.now_nbytes, report.host.now_nbytes) == (0, 0)
    for chunk in manager.runtime.memory.store.chunks.values():
        assert not chunk.replicas
        if chunk.home is not None:
            assert chunk.home._storage.storage.nbytes() == 0


@cpu_only
@pytest.mark.parametrize("end", ["close", "unwrap", "freeze fails"])
def test_no_thread_outlives_a_training_that_is_still_referred_to(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made by threads, which chunks that are packed again keep; they end with the tiers."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("in the middle")

    before = set(threading.enumerate())
    manager = chunkmem.ChunkManager(config(16 * 1024))
    twin = Twin(manager, Model)
    twin.steps(0, 4)
    assert {thread.name for thread in set(threading.enumerate()) - before} & {"chunkmem d2h", "chunkmem h2d"}
    if end == "close":
        manager.close()
    elif end == "unwrap":
        twin.optimizer.zero_grad()
        manager.unwrap(twin.model)
    else:
        monkeypatch.setattr(PackingAgain, "is_worth_it", lambda self: True)
        monkeypatch.setattr(Repacking, "move", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            manager.freeze(twin.model.inner)
    assert not set(threading.enumerate()) - before


def test_nothing_keeps_a_closed_training_alive() -> None:
    """Not torch's global tables, not a second manager."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as other:
        Twin(other, Blocks).steps(0)
        with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
            twin = Twin(manager, Blocks)
            twin.steps(0)
            refs = [weakref.ref(x) for x in (manager, twin.model, twin.optimizer, twin.model.inner.weight)]
        del manager, twin
        gc.collect()
        assert [ref() for ref in refs] == [None] * 4


class Shared(nn.Module):
    """Has an activation, and a table of positions, that a library keeps for all of its models."""

    def __init__(self, act: nn.Module, table: nn.Module) -> None:
        super().__init__()
        self.table, self.layers = table, nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.table(x))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1 / 3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positions[: x.shape[-1]]


@spread(precision=["fp32", "bf16"], policy=["keep", "recompute"])
def test_modules_that_a_plain_model_has_too(precision: str, policy: str) -> None:
    """A module-level activation, or one that is a default argument: closing a manager killed each model that has it."""

    def losses(model: nn.Module) -> list[float]:
        loss = model(features(1)).square().mean()
        recomputed = checkpoint(model, features(1), use_reentrant=False).square().mean()
        (loss + recomputed).backward()
        return [loss.item(), recomputed.item(), model.layers[0].weight.grad.sum().item()]

    act, table = nn.Tanh(), Table().to(compute_device())
    before = set(vars(act)), set(vars(table))
    options = config(SMALL_NBYTES).to_dict() | {"precision": precision, "activations": {"policy": policy}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(options)) as manager:
        twin = Twin(manager, lambda: Shared(act, table))
        plain = Shared(act, table).to(compute_device())
        plain.load_state_dict(manager.state_dict())
        reference = Shared(nn.Tanh(), Table()).to(compute_device())
        reference.load_state_dict(manager.state_dict())
        expected = losses(reference)
        for seed in range(3):
            twin.steps(seed)
            plain.zero_grad()
            assert losses(plain) == expected
        trained = manager.runtime.controller.known.plan
    plain.zero_grad()
    assert losses(plain) == expected
    assert (set(vars(act)), set(vars(table))) == before
    assert not act._forward_hooks
    assert not table._forward_hooks
    assert trained is not None
    with pytest.raises(chunkmem.StateError, match="manager is closed"):
        twin.model(features(0))


def test_a_plain_model_after_ctrl_c_in_the_managed_one_that_has_the_same_module() -> None:
    """The interrupted call, which has no end, seemed to be the caller: what the module returned came in bf16."""
    table = Table().to(compute_device())
    expected = table(features(1))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    options = config(SMALL_NBYTES).to_dict() | {"precision": "bf16"}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(options)) as manager:
        twin = Twin(manager, lambda: Shared(nn.Tanh(), table))
        twin.steps(0)
        handle = twin.model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            twin.loss(features(1))
        handle.remove()
        assert table(features(1)).dtype is torch.float32
        assert torch.equal(table(features(1)), expected)
        twin.steps(1)


def test_a_module_that_lives_for_ever_keeps_no_manager_alive() -> None:
    act = nn.Tanh()
    manager = chunkmem.ChunkManager(config(SMALL_NBYTES))
    model = manager.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), act).to(compute_device()))
    model(features(0)).sum().backward()
    refs = [weakref.ref(x) for x in (manager, model, model[0].weight)]
    del manager, model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert torch.equal(act(features(0)), torch.tanh(features(0)))


def test_a_manager_leaves_nothing_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks at a fork cannot be taken away again: each manager left one, for ever."""
    hooks: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **kinds: hooks.append(kinds))
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        Twin(manager, Blocks).steps(0)
    assert hooks == []


@pytest.mark.parametrize("grads", [False, True])
def test_close_inside_gather(grads: bool) -> None:
    manager = chunkmem.ChunkManager(config(AMPLE_NBYTES))
    twin = Twin(manager, Blocks)
    twin.loss(features(0)).backward()
    with manager.gather(grads=grads):
        manager.close()
    with pytest.raises(chunkmem.StateError, match="manager is closed"):
        twin.model(features(0))


def test_leaving_the_with_block_by_an_error_closes() -> None:
    with pytest.raises(ZeroDivisionError), chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        model = Twin(manager, Blocks).model
        raise ZeroDivisionError
    with pytest.raises(chunkmem.StateError, match="manager is closed"):
        model(features(0))


@cpu_only
def test_the_memory_report() -> None:
    """Roles, peaks and caps are those of the ledgers; the table says the same."""
    with chunkmem.ChunkManager(config(6 * 1024)) as manager:
        assert manager.memory().device.now_nbytes == manager.memory().host.now_nbytes == 0
        twin = Twin(manager, Blocks)
        packed = manager.memory()
        assert packed.host.by_role == {"param": (8 * 1024, 8 * 1024)}
        assert packed.padding_nbytes == 8 * 1024 - sum(p.nbytes for p in twin.model.parameters())
        twin.steps(0, 1)
        report = manager.memory()
        assert (report.device.cap_nbytes, report.host.cap_nbytes) == (6 * 1024, AMPLE_NBYTES)
        assert report.device.now_nbytes <= report.device.peak_nbytes <= 6 * 1024
        assert report.device.required_nbytes <= 6 * 1024
        for tier, side in ((Tier.DEVICE, report.device), (Tier.HOST, report.host)):
            for role in (Role.PARAM, Role.GRAD, Role("exp_avg"), Role("exp_avg_sq")):
                live = [
                    c for c in manager.runtime.memory.store.chunks.values() if c.id.role == role and tier in c.replicas
                ]
                assert side.by_role.get(role.value, (0, 0))[0] == sum(chunk.nbytes for chunk in live)
            assert sum(now for now, _ in side.by_role.values()) == side.now_nbytes
        assert report.moved.h2d_nbytes > 0 < report.moved.d2h_nbytes
        table = str(report).splitlines()
        assert table[0].split() == ["tier", "role", "now", "last", "step", "peak", "cap"]
        assert "6.00 KiB" in table[1]
        assert {line.split()[0] for line in table[2:-1]} >= {"param", "grad", "exp_avg", "HOST"}
        assert table[-1].startswith("padding ")
