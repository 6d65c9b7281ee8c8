"""What `manager.init()` and `wrap` refuse: modules, torch and what was packed before stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import chunkmem
from chunkmem.modules.parameter_reads import ParameterReads
from tests.helpers.audit import audit
from tests.helpers.twins import SEED, WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features

SMALL_NBYTES = 4 * 1024


@contextmanager
def torch_as_found() -> Iterator[None]:
    """Assert that torch's tables of global hooks, and its random numbers beside what building draws, are left alone."""
    tables = {name: table for name, table in vars(torch_module).items() if name.startswith("_global")}
    before = {name: dict(table) if hasattr(table, "keys") else table for name, table in tables.items()}
    yield
    assert {name: dict(table) if hasattr(table, "keys") else table for name, table in tables.items()} == before


def fails_inside(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made.append(Blocks())
        raise ZeroDivisionError


def interrupted_inside(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init(), manager.exclude():
        made.append(Blocks())
        raise KeyboardInterrupt


def nested(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made.append(Blocks())
        with manager.init():
            pytest.fail("not refused")


def lazy(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))]


def lazy_buffer(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))]


def scripted(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()))]


def meta(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.ParameterList([nn.Parameter(torch.empty(3, 2, device="meta"))])]


def meta_half(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    """That is known when all are packed."""
    with manager.init():
        made += [Blocks(), nn.Sequential(nn.Linear(2, 3, device="meta"))]
        made[1][0].register_buffer("mask", torch.empty(4, device="meta"))


def sparse(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.ParameterList([nn.Parameter(torch.eye(2).to_sparse())])]


def same_memory(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    with manager.init():
        made += [Blocks(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))]
        made[1][0].weight.data = made[1][1].weight.data


def memory_of_a_buffer(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    made.append(Blocks())
    made[0].register_buffer("row", made[0].inner.weight.data[3])
    manager.wrap(made[0])


def too_large(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    """The first model fits."""
    with manager.init():
        made += [Blocks(), nn.Linear(2048, 2048)]


def not_a_module(manager: chunkmem.ChunkManager, made: list[nn.Module]) -> None:
    manager.wrap(torch.zeros(2))


FAILURES: dict[Callable[..., None], tuple[type[BaseException], str]] = {
    fails_inside: (ZeroDivisionError, "^$"),
    interrupted_inside: (KeyboardInterrupt, "^$"),
    nested: (chunkmem.StateError, r"^manager.init\(\) inside manager.init\(\): build all modules in one block"),
    lazy: (chunkmem.LayoutError, r"^parameter 1.weight is lazy.* run one batch .* then call manager.wrap\(model\)$"),
    lazy_buffer: (chunkmem.LayoutError, r"^buffer 1.running_mean is lazy.* then call manager.wrap\(model\)$"),
    scripted: (chunkmem.LayoutError, r"^module 1 is scripted by torch.jit, .* train the module that it was made of"),
    meta: (chunkmem.LayoutError, r"^parameter 0 \(3, 2\) is on the meta device .* has no reset_parameters\(\)"),
    meta_half: (chunkmem.LayoutError, r"^buffer 0.mask \(4,\) of a model on the meta device has no values, or not all"),
    sparse: (chunkmem.LayoutError, r"^parameter 0 is a Parameter of torch.sparse_coo; only plain dense tensors"),
    same_memory: (chunkmem.LayoutError, r"^[01].weight and [01].weight share memory.* register one nn.Parameter"),
    memory_of_a_buffer: (chunkmem.LayoutError, r"^inner.weight and row share memory"),
    too_large: (
        chunkmem.CapacityError,
        r"^packing: the weights take 16.* raise memory.host from 8.00 MiB to ",
    ),
    not_a_module: (chunkmem.LayoutError, r"^manager.wrap\(\) takes a torch.nn.Module, not a Tensor$"),
}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_a_failure_leaves_modules_and_torch_as_they_were(failure: Callable[..., None]) -> None:
    """They are ordinary modules that train on, and can be packed after all; what was packed before is not affected."""
    error, message = FAILURES[failure]
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1, 2)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        made: list[Any] = []
        torch.manual_seed(SEED)
        with torch_as_found(), pytest.raises(error, match=message) as raised:
            failure(manager, made)
        assert "\n" not in str(raised.value)
        del raised  # its traceback has the tensors that were in the way
        assert twin.steps(1) == losses[1:2]
        if made:
            torch.manual_seed(SEED)
            assert_equal(dict(made[0].named_parameters()), dict(Blocks().named_parameters()))
            assert not any(isinstance(module._parameters, ParameterReads) for root in made for module in root.modules())
            made[0](features(0)).sum().backward()
            assert made[0].inner.weight.grad is not None
            made[0]._buffers.clear()
            made[0].zero_grad()
            manager.wrap(made[0])
            made[0](features(0))
        audit(manager)
        assert twin.steps(2) == losses[2:]
        assert_equal(twin.left(), plain.left())


@cpu_only
def test_no_tier_has_room_in_one_piece() -> None:
    """There is room for the bytes of both models, and most of them are packed, when the last parameter finds none."""
    with chunkmem.ChunkManager(config(0, memory={"device": "4KiB", "host": "12KiB"})) as manager:
        torch.manual_seed(SEED)
        message = r"^packing: 7.00 KiB more needed on DEVICE"
        with pytest.raises(chunkmem.CapacityError, match=message) as raised, manager.init():
            model, large = Blocks(), nn.ParameterList([torch.ones(7 * 256)])
        assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (7 * 1024, 4 * 1024)
        torch.manual_seed(SEED)
        assert_equal(dict(model.named_parameters()), dict(Blocks().named_parameters()))
        assert (large[0] == 1).all()
        assert manager.memory().host.now_nbytes == manager.memory().device.now_nbytes == 0
        manager.wrap(model)
        audit(manager)


def test_a_module_is_packed_once() -> None:
    """Not twice, not as a part of another module, not by another manager, not when it is away there."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager, chunkmem.ChunkManager(config(SMALL_NBYTES)) as other:
        model = Twin(manager, Blocks).model
        again = [model, nn.Sequential(nn.Linear(2, 2), model.blocks[0])]
        for owner in (manager, other):
            for module in again:
                with pytest.raises(chunkmem.StateError, match=r"is managed already; a module can be built in one"):
                    owner.wrap(module)
        stolen = nn.Linear(WIDTH, WIDTH)
        stolen.weight = model._modules["inner"]._parameters._managed["weight"].param
        with pytest.raises(chunkmem.LayoutError, match=r"weight .* another manager"):
            other.wrap(stolen)
        model(features(0))
