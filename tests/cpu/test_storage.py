"""The three ways to exchange the memory of two storages, through the same tests; and what autograd saved across it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.errors import StateError
from chunkmem.runtime import build, storage
from chunkmem.runtime.storage import (
    ChunkStorage,
    StorageBackend,
    can_swap,
    default_backend,
    native_backend,
    resize_backend,
)
from tests.helpers.training import (
    VARIANTS,
    Chunked,
    Trainer,
    assert_same,
    capped,
    compute_device,
    footprint,
    train_plain,
)
from tests.helpers.zoo import ZOO

KEEPS_CONTENTS = ("swap", "native")
NAN_BYTE = 0xFF


@pytest.fixture(scope="module", params=["swap", "native", "resize"])
def backend(request: pytest.FixtureRequest) -> StorageBackend:
    """Each back end; the native one is compiled from csrc/ once for a torch version."""
    if request.param == "resize":
        return resize_backend()
    if request.param == "swap":
        if not can_swap():
            pytest.skip("this torch has no _swap_data_ptr_")
        return default_backend()
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    library = build.storage_library("nothing is tested")
    assert library is not None, "csrc/storage.cpp does not compile"
    return native_backend(library)


def test_the_native_back_end_is_not_loaded_from_a_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "default_cache_dir", lambda: tmp_path / "native")
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    with pytest.warns(UserWarning, match=r"could not be built .*others may write to it \(mode 777\)"):
        assert build.storage_library("nothing is swapped") is None


def full(nbytes: int, fill: int = 1) -> torch.UntypedStorage:
    return torch.full((nbytes,), fill, dtype=torch.uint8, device=compute_device()).untyped_storage()


def empty() -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=compute_device())


def content(of: torch.UntypedStorage) -> list[int]:
    return torch.empty(0, dtype=torch.uint8, device=of.device).set_(of).tolist()


@pytest.mark.few(2)
def test_names(backend: StorageBackend) -> None:
    assert backend.name in ("swap", "native", "resize")
    assert backend.moves_contents is (backend.name in KEEPS_CONTENTS)


@pytest.mark.parametrize("first_is_full", [True, False])
def test_memory_changes_sides_and_comes_back(backend: StorageBackend, first_is_full: bool) -> None:
    a, b = (full(64), empty()) if first_is_full else (empty(), full(64))
    sizes = a.nbytes(), b.nbytes()
    address = max(a.data_ptr(), b.data_ptr())
    backend.exchange(a, b)
    assert (b.nbytes(), a.nbytes()) == sizes
    if backend.name in KEEPS_CONTENTS:
        assert (b if first_is_full else a).data_ptr() == address
        assert content(b if first_is_full else a) == [1] * 64
    backend.exchange(a, b)
    assert (a.nbytes(), b.nbytes()) == sizes
    if backend.name in KEEPS_CONTENTS:
        assert content(a if first_is_full else b) == [1] * 64


def test_the_emptied_side_holds_no_memory(backend: StorageBackend) -> None:
    a, b = full(64), empty()
    backend.exchange(a, b)
    assert a.data_ptr() == 0
    assert content(a) == []


def test_the_exchanged_memory_can_be_written(backend: StorageBackend) -> None:
    a, b = full(64), empty()
    backend.exchange(a, b)
    torch.empty(0, dtype=torch.uint8, device=b.device).set_(b).fill_(9)
    assert content(b) == [9] * 64


@pytest.mark.parametrize("other_nbytes", [64, 32])
def test_two_full_ones_are_refused(backend: StorageBackend, other_nbytes: int) -> None:
    """Also of equal sizes, which torch itself would exchange: nothing here ever means to."""
    a, b = full(64, 1), full(other_nbytes, 2)
    with pytest.raises(StateError, match=f"storages of 64 and {other_nbytes} bytes: one of them has to be empty"):
        backend.exchange(a, b)
    assert content(a) == [1] * 64
    assert content(b) == [2] * other_nbytes


def test_two_empty_ones_stay_empty(backend: StorageBackend) -> None:
    a, b = empty(), empty()
    backend.exchange(a, b)
    assert a.nbytes() == b.nbytes() == 0


def chunk_storage(backend: StorageBackend, dtype: torch.dtype = torch.float32) -> ChunkStorage:
    return ChunkStorage(backend, device=compute_device(), dtype=dtype)


def test_a_chunk_takes_a_slab_and_returns_that_very_one(backend: StorageBackend) -> None:
    chunk, slab = chunk_storage(backend), full(64)
    chunk.attach(slab)
    assert chunk._slab is not None
    assert (slab.nbytes(), chunk.storage.nbytes(), chunk.flat.numel()) == (0, 64, 16)
    chunk.flat.fill_(2.0)
    assert chunk.detach() is slab
    assert chunk._slab is None
    assert (slab.nbytes(), chunk.storage.nbytes()) == (64, 0)


def test_views_come_back_with_another_slab(backend: StorageBackend) -> None:
    chunk = chunk_storage(backend)
    chunk.attach(full(64))
    view = chunk.flat[4:12].view(2, 4).t()
    identity = chunk.storage._cdata
    chunk.detach()
    chunk.attach(full(64))
    chunk.flat.copy_(torch.arange(16.0))
    assert torch.equal(view.cpu(), torch.arange(4.0, 12.0).view(2, 4).t())
    assert chunk.storage._cdata == identity == view.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_flat_has_the_dtype_of_the_chunk(backend: StorageBackend, dtype: torch.dtype) -> None:
    chunk = chunk_storage(backend, dtype)
    chunk.attach(full(64))
    assert chunk.flat.dtype == dtype
    assert chunk.flat.nbytes == 64


def test_attaching_and_detaching_twice_is_refused(backend: StorageBackend) -> None:
    chunk, slab = chunk_storage(backend), full(64)
    with pytest.raises(StateError, match="no slab is attached"):
        chunk.detach()
    chunk.attach(slab)
    with pytest.raises(StateError, match="attached to this chunk already"):
        chunk.attach(full(64))
    assert chunk.detach() is slab


class Tied(nn.Module):
    """Embedding and head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.embedding(tokens)), self.embedding.weight)


class Lambda(nn.Module):
    """One weight in any expression."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


def attend(x: Tensor) -> tuple[Tensor, ...]:
    return (x, x, x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear": (lambda: nn.Linear(24, 40), lambda: (torch.randn(5, 24),)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3, padding=1), lambda: (torch.randn(2, 3, 9, 9),)),
    "layer_norm": (lambda: nn.LayerNorm(24), lambda: (torch.randn(5, 24),)),
    "embedding": (lambda: nn.Embedding(11, 16), lambda: (torch.randint(11, (4, 6)),)),
    "attention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda: attend(torch.randn(2, 7, 16))),
    "gru": (lambda: nn.GRU(12, 16, num_layers=2, bidirectional=True), lambda: (torch.randn(6, 2, 12),)),
    "x @ w.t()": (lambda: Lambda((40, 24), lambda x, w: x @ w.t()), lambda: (torch.randn(5, 24),)),
    "x * w[0]": (lambda: Lambda((3, 24), lambda x, w: x * w[0]), lambda: (torch.randn(5, 24),)),
    "einsum": (
        lambda: Lambda((4, 6, 5), lambda x, w: torch.einsum("bi,hij->bhj", x, w)),
        lambda: (torch.randn(3, 6),),
    ),
    "tied": (Tied, lambda: (torch.randint(11, (4, 6)),)),
}
PLAIN = VARIANTS[0]


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and its inputs, the same at every call; floating inputs want gradients."""
    build, make_inputs = CASES[name]
    torch.manual_seed(3)
    module = build().to(compute_device())
    inputs = tuple(t.to(compute_device()) for t in make_inputs())
    return module, tuple(t.requires_grad_() if t.is_floating_point() else t for t in inputs)


def loss_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    result = module(*inputs)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output.square().sum()


def gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    return [t.grad for t in (*module.parameters(), *inputs)]


class InOneChunk:
    """The parameters of a module as views into one chunk storage, as binding places them."""

    def __init__(self, backend: StorageBackend, module: nn.Module) -> None:
        parameters = list(module.parameters())
        offsets = [0]
        for parameter in parameters:
            offsets.append(offsets[-1] + -(-parameter.numel() // 16) * 16)
        self.nbytes = 4 * offsets[-1]
        self.chunk = chunk_storage(backend)
        self.chunk.attach(full(self.nbytes, 0))
        for parameter, offset in zip(parameters, offsets, strict=False):
            view = self.chunk.flat[offset : offset + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.values = self.chunk.flat.clone()

    def evict(self) -> None:
        """The chunk goes; its slab is poisoned, as if others used it."""
        torch.empty(0, dtype=torch.uint8, device=compute_device()).set_(self.chunk.detach()).fill_(NAN_BYTE)

    def fetch(self) -> None:
        """It comes back in a slab full of NaN, and is refilled through its flat base."""
        self.chunk.attach(full(self.nbytes, NAN_BYTE))
        self.chunk.flat.copy_(self.values)


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_saved_comes_back(backend: StorageBackend, name: str) -> None:
    """Forward, evict, fetch into other memory, backward: bit-equal gradients, with every slab poisoned in between."""
    plain, plain_inputs = made(name)
    loss_of(plain, plain_inputs).backward()
    module, inputs = made(name)
    chunk = InOneChunk(backend, module)
    loss = loss_of(module, inputs)
    chunk.evict()
    chunk.fetch()
    loss.backward()
    for actual, expected in zip(gradients(module, inputs), gradients(plain, plain_inputs), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or expected is None or torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["linear", "attention", "gru", "x @ w.t()", "tied"])
def test_a_slab_that_is_not_refilled_shows(backend: StorageBackend, name: str) -> None:
    """What makes the test above able to fail: backward does read the memory that was exchanged."""
    module, inputs = made(name)
    chunk = InOneChunk(backend, module)
    loss = loss_of(module, inputs)
    chunk.evict()
    chunk.chunk.attach(full(chunk.nbytes, NAN_BYTE))
    if backend.name not in KEEPS_CONTENTS:
        chunk.chunk.flat.fill_(float("nan"))
    loss.backward()
    assert any(grad is not None and grad.isnan().any() for grad in gradients(module, inputs))


def test_training_under_a_small_cap(backend: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO[0]
    needed = footprint(case, PLAIN).required_nbytes
    monkeypatch.setattr("chunkmem.assembly.make.default_backend", lambda: backend)
    with chunkmem.ChunkManager(capped(case, needed)) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        assert_same(Trainer(case, PLAIN, Chunked(manager)).run(), train_plain(case, PLAIN))
        moved = manager.memory().moved
        assert moved.h2d_nbytes > 0
        assert moved.d2h_nbytes > 0


@pytest.fixture
def without_swap(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(storage, "can_swap", lambda: False)
    return monkeypatch


def test_the_fastest_one_there_is_comes_by_default(without_swap: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(chunkmem_exchange_storages=SimpleNamespace())
    without_swap.setattr(build, "storage_library", lambda without: library)
    assert storage.default_backend().name == "native"
    without_swap.setattr(build, "storage_library", lambda without: None)
    assert storage.default_backend().name == "resize"
    without_swap.setattr(storage, "can_swap", lambda: True)
    assert storage.default_backend().name == "swap"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_one_warning(
    without_swap: pytest.MonkeyPatch, compiler: str, tmp_path: Path
) -> None:
    without_swap.setenv("CXX", compiler)
    without_swap.setattr(build, "default_cache_dir", lambda: tmp_path)
    with pytest.warns(UserWarning, match="eviction will be slower") as caught:
        assert storage.default_backend().name == "resize"
    assert len(caught) == 1
