"""Bytes of non-model data: every storage that an operator made counts once, for exactly as long as it lives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from chunkmem.data.errors import StateError
from chunkmem.modules.guard import AccessGuard
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.steps.probe import LiveStorageProbe
from chunkmem.steps.watch import Watch
from tests.helpers.probe_mode import watching

N = 1000
BYTES = 4 * N
"""Of one float32 tensor of N elements, the unit of this file."""


def no_chunk(storage_id: int) -> bool:
    return False


def make(is_chunk: Callable[[int], bool] = no_chunk) -> LiveStorageProbe:
    return LiveStorageProbe(is_chunk)


def peak(work: Callable[[], object], is_chunk: Callable[[int], bool] = no_chunk) -> float:
    """What `work` takes at its highest, in units of `BYTES`; nothing of it may count when it is over."""
    probe = make(is_chunk)
    with watching(probe):
        work()
    found = probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == 0, "something counts that is gone"
    return found / BYTES


# What counts, and how long.


def test_a_peak_is_that_of_its_interval() -> None:
    # y    |------|
    # z       |-------------|
    # u                  |--|
    #         ^take     ^take   ^take, take
    probe = make()
    x = torch.ones(N)
    with watching(probe):
        y = x * 2
        z = y + 1
        assert probe.take_peak_nbytes() == 2 * BYTES
        del y
        assert probe.take_peak_nbytes() == 2 * BYTES  # the interval began with both
        assert probe.take_peak_nbytes() == BYTES
        u = z[: N // 2] * 2
        del u, z
    assert probe.take_peak_nbytes() == 1.5 * BYTES
    assert probe.take_peak_nbytes() == 0


def both(x: Tensor) -> None:
    kept = [x + 1]
    kept.append(kept[0] + 1)


CASES: dict[str, tuple[Callable[[Tensor], object], float]] = {
    "chain drops its links": (lambda x: x.exp().exp().exp().exp(), 2),
    "both are kept": (both, 2),
    "factory": (lambda x: torch.zeros(N), 1),
    "other dtype": (lambda x: x.double(), 2),
    "no change of dtype": (lambda x: x.float(), 0),
    "views of a result": (lambda x: (x + 1).view(10, 100).t()[3:].unbind(), 1),
    "views of what was there": (lambda x: x.view(10, 100).t()[3:].detach().unbind(), 0),
    "reshape that is a view": (lambda x: x.reshape(10, 100), 0),
    "reshape that copies": (lambda x: x.view(10, 100).t().reshape(N), 1),
    "matmul folds its input without a copy": (lambda x: x.view(2, 50, 10) @ x[:100].view(10, 10), 1),
    "in place on a result": (lambda x: (x + 1).mul_(2).add_(x), 1),
    "in place on what was there": (lambda x: x.mul_(1).add_(0), 0),
    "out= of a result": (lambda x: torch.add(x, 1, out=torch.empty(N)), 1),
    "out= of what was there": (lambda x: torch.add(x, 0, out=x), 0),
    "a tuple": (lambda x: torch.sort(x), 1 + 2),  # float32 values, int64 indices
    "a list": (lambda x: torch._foreach_add([x, x, x], 1), 3),
    "a list in place": (lambda x: torch._foreach_mul_([x], 1), 0),
    "nothing": (lambda x: x.sum().item(), 1 / N),
    "meta": (lambda x: torch.empty(N, device="meta") + 1, 0),
    "sparse, which has no storage of its own": (lambda x: x.to_sparse(), 0),
    "empty": (lambda x: x[:0] + 1, 0),
}


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference_mode"])
@pytest.mark.parametrize("name", CASES)
def test_what_operators_make_counts_once(name: str, inference: bool) -> None:
    work, expected = CASES[name]
    with torch.inference_mode(inference):
        x = torch.ones(N)
        assert peak(lambda: work(x)) == expected


def test_chunks_do_not_count_even_if_an_operator_returns_them() -> None:
    slabs: set[int] = set()

    def work() -> None:
        (x + 1).add_(1)

    class Slabs(TorchDispatchMode):
        """Runs below the probe; every new tensor of `add` is one of ours."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.add.Tensor:
                slabs.add(result.untyped_storage()._cdata)
            return result

    x = torch.ones(N)
    with Slabs():
        assert peak(work) == 1
        assert peak(work, lambda storage_id: storage_id in slabs) == 0
    assert slabs


def test_a_storage_counts_while_only_autograd_holds_it() -> None:
    # Its Python object is gone, and must not be mistaken for the storage itself.
    probe = make()
    x = torch.ones(N, requires_grad=True)
    with watching(probe):
        total = x.exp().sum()
        gc.collect()
        probe.take_peak_nbytes()
        assert probe.take_peak_nbytes() == BYTES + 4
        total.backward()
        x.grad = None
        del total
    probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == 0


def test_backward_by_formula() -> None:
    #                    live when the operator ends, in units of N elements
    # y = exp(x)         y
    # z = exp(y)         y z
    # sum                y z             (+ 4 bytes of the sum, as also below)
    # backward: sum      y z             (+ 4 bytes of its gradient, seen N times by a view)
    #           exp      y z gz*z
    #           exp      y   gz*z gy*y   z is released with its node; gy*y becomes x.grad
    probe = make()
    x = torch.ones(N, requires_grad=True)
    with watching(probe):
        total = x.exp().exp().sum()
    assert probe.take_peak_nbytes() == 2 * BYTES + 4
    with watching(probe):
        total.backward()
    assert probe.take_peak_nbytes() == 3 * BYTES + 8
    assert probe.take_peak_nbytes() == BYTES + 4, "x.grad and the sum are still there"
    x.grad = None
    del total
    probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_model_by_formula(count: int) -> None:
    # Each ReLU saves its output, which is the next Linear's input; a Linear's own output is dropped, so that one of
    # them is there beside what is saved.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(count)))
    batch = torch.randn(100, 10)
    probe = make()
    with watching(probe):
        output = model(batch)
    assert probe.take_peak_nbytes() == (count + 1) * BYTES
    with watching(probe):
        output.sum().backward()
    gradients = sum(4 * p.numel() for p in model.parameters())
    probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == BYTES + gradients, "the output, and .grad of every parameter"


def test_an_address_used_again_is_another_storage() -> None:
    probe = make()
    x = torch.ones(N)
    seen = set()
    with watching(probe):
        for _ in range(100):
            y = x + 1
            seen.add(y.untyped_storage()._cdata)
            del y
            assert probe.take_peak_nbytes() == BYTES
            probe.take_peak_nbytes()
    assert len(seen) < 100, "no address came twice: the test shows nothing"
    assert probe.take_peak_nbytes() == 0


def test_an_address_used_again_while_the_operator_runs() -> None:
    class Frees(TorchDispatchMode):
        """Runs below the probe, which learns of the release and of the new storage at once."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            box.clear()
            return func(*args, **(kwargs or {}))

    probe = make()
    x = torch.ones(N)
    box: list[Tensor] = []
    same = 0
    with Frees(), watching(probe):
        for _ in range(100):
            box.extend(torch._foreach_add([x] * 8, 1))
            before = {old.untyped_storage()._cdata for old in box}
            new = torch._foreach_add([x] * 8, 1)
            same += any(one.untyped_storage()._cdata in before for one in new)
            probe.take_peak_nbytes()
            assert probe.take_peak_nbytes() == 8 * BYTES
            del new
    assert same, "no address came twice: the test shows nothing"


def test_a_storage_released_by_another_thread() -> None:
    probe = make()
    with watching(probe):
        box = [torch.ones(N) + i for i in range(50)]
    held = probe.take_peak_nbytes()
    assert held == 50 * BYTES + BYTES  # torch.ones is an operator too
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == 0


# Beside others.


def test_results_have_the_bits_they_have_without() -> None:
    def step(probe: LiveStorageProbe | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20), nn.GELU(), nn.Dropout(0.5), nn.Linear(20, 5))
        batch = torch.randn(7, 20)
        with ExitStack() as stack:
            if probe is not None:
                stack.enter_context(watching(probe))
            loss = model(batch).square().mean()
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    for plain, watched in zip(step(None), step(make()), strict=True):
        assert torch.equal(plain, watched)


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True], ids=["probe outside", "probe inside"])
def test_nests_with_other_modes(inside: bool) -> None:
    def undeclared(storage_id: int) -> str | None:
        return "secret" if storage_id == secret.untyped_storage()._cdata else None

    x, secret = torch.ones(N, requires_grad=True), torch.ones(N)
    probe, guard, counter = make(), AccessGuard(undeclared, lambda: "here"), CountsOperators()
    modes: list[Any] = [guard, counter]
    modes.insert(2 if inside else 0, watching(probe))
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        (x.exp() + 1).sum().backward()
        assert x.grad is not None
        with pytest.raises(StateError, match="secret"):
            secret + 1
    assert counter.count > 3
    assert probe.take_peak_nbytes() == 3 * BYTES + 8 - BYTES
    assert _len_torch_dispatch_stack() == 0


def test_watching_twice_counts_once() -> None:
    probe = make()
    x = torch.ones(N)
    with watching(probe):
        y = x + 1
        with watching(probe):
            z = y + 1
    assert probe.take_peak_nbytes() == 2 * BYTES
    del y, z


def test_compiled_code_stays_compiled() -> None:
    # Run eagerly, its results would have other bits in the recorded step than in all the others.
    graphs = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(N)
    with watching(make()):
        result = compiled(x)
    assert len(graphs) == 1
    assert torch.equal(result, x.sin() + 1)


@pytest.mark.filterwarnings("ignore")
def test_operators_of_higher_order() -> None:
    query = torch.randn(1, 1, 16, 16)
    plain = flex_attention(query, query, query)
    probe = make()
    with watching(probe):
        result = flex_attention(query, query, query)
    assert torch.equal(plain, result)
    assert probe.take_peak_nbytes() >= result.nbytes


# The end.


@pytest.mark.parametrize("where", ["operator", "forward", "backward"])
def test_left_by_an_exception(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            gradient.exp()
            raise KeyboardInterrupt

    def work() -> None:
        y = x.exp()
        if where == "operator":
            y.view(7)
        if where == "forward":
            raise KeyboardInterrupt
        Fails.apply(y).sum().backward()

    probe = make()
    x = torch.ones(N, requires_grad=True)
    with pytest.raises(RuntimeError if where == "operator" else KeyboardInterrupt), watching(probe):
        work()
    assert _len_torch_dispatch_stack() == 0
    gc.collect()
    probe.take_peak_nbytes()
    assert probe.take_peak_nbytes() == 0
    with watching(probe):
        y = x.detach() + 1
    assert probe.take_peak_nbytes() == BYTES
    del y


def test_stop_forgets_and_keeps_nothing_alive() -> None:
    class Model:
        def is_chunk(self, storage_id: int) -> bool:
            return False

    model = Model()
    probe = make(model.is_chunk)
    gone = weakref.ref(model)
    with watching(probe):
        y = torch.ones(N) + 1
        probe.stop()
        probe.stop()
        z = y + 1  # still under the mode
    assert probe.take_peak_nbytes() == probe.take_peak_nbytes() == 0
    assert weakref.getweakrefcount(y.untyped_storage()) == weakref.getweakrefcount(z.untyped_storage()) == 0
    del model
    assert gone() is None
    with watching(probe):
        y = y + z
    assert probe.take_peak_nbytes() == 0


def test_a_probe_that_is_dropped_goes_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        probe = make()
        with watching(probe):
            y = torch.ones(N) + 1
        gone, storage = weakref.ref(probe), y.untyped_storage()
        del probe
        assert gone() is None
        assert weakref.getweakrefcount(storage) == 0
    finally:
        gc.enable()


def test_nothing_is_left_of_many_operators() -> None:
    def work() -> None:
        with watching(probe):
            for _ in range(200):
                (x + 1).view(10, -1).t().sum()

    probe = make()
    x = torch.ones(N)
    work()
    gc.collect()
    before = len(gc.get_objects())
    work()
    probe.take_peak_nbytes()
    gc.collect()
    assert len(gc.get_objects()) <= before + 5
    assert probe._live == {}
    assert not probe._dead


# The allocator of an accelerator.


class FakeDevice:
    """Counts as the allocator does: what is there now, and its highest since the last reset."""

    def __init__(self) -> None:
        self.chunks = self.other = 0
        self.peak = 0

    def set(self, *, chunks: int | None = None, other: int | None = None) -> None:
        self.chunks = self.chunks if chunks is None else chunks
        self.other = self.other if other is None else other
        self.peak = max(self.peak, self.chunks + self.other)

    @property
    def total_nbytes(self) -> int:
        """As the ledger of its chunks says."""
        return self.chunks

    def used_nbytes(self) -> int:
        return self.chunks + self.other

    def take_peak_nbytes(self) -> int:
        found, self.peak = self.peak, self.chunks + self.other
        return found


def watch_of(meter: NonModelMeter) -> Watch:
    """Watch an accelerator."""
    tiers: Any = SimpleNamespace(meter=meter)
    return Watch(tiers, is_chunk=no_chunk, sample=False)


def test_the_allocators_peak_less_the_chunks() -> None:
    device = FakeDevice()
    device.set(chunks=100, other=1000)
    device.set(other=7)
    watch = watch_of(NonModelMeter(device, device))
    assert watch.run_operator is None
    device.set(other=50)
    device.set(other=20)
    assert watch.take_peaks() == (50, 0), "what was before the start does not count"
    assert watch.take_peaks() == (20, 0)
    assert watch.take_peaks() == (20, 0)


@pytest.mark.parametrize(("begin", "end"), [(100, 100), (100, 60), (60, 100), (100, 0)])
def test_chunks_that_come_and_go_never_hide_other_bytes(begin: int, end: int) -> None:
    # The peak of the rest, 50, comes while the chunks still take `begin` bytes: they are moved after it.
    device = FakeDevice()
    device.set(chunks=begin)
    meter = NonModelMeter(device, device)
    watch = watch_of(meter)
    device.set(other=50)
    device.set(other=10)
    with meter.excluding():
        device.set(chunks=end)
    assert watch.take_peaks() == (50, 0)
    assert watch.take_peaks() == (10, 0), "the next interval begins with the chunks of now"


def test_a_stopped_watch_leaves_the_allocators_counter_alone() -> None:
    device = FakeDevice()
    watch = watch_of(NonModelMeter(device, device))
    device.set(other=50)
    device.set(other=0)
    watch.stop()
    watch.stop()
    assert watch.take_peaks() == (0, 0)
    assert device.peak == 50
