"""The update out of place: the bits of the one in place, inputs that stay, threads of its own, Python's lock free.

And the trial that decides whether the kernels for CUDA are used.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from chunkmem.optim import kernels
from chunkmem.optim.kernels import Kernels, arguments, differing_calls, load_kernels
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments
from tests.cpu.test_kernels import (
    CUDA_ORDER,
    FLOATS,
    HYPER,
    LENGTHS,
    LOWP,
    bits,
    copy,
    cut,
    differences,
    levels,
    make,
    updated,
)
from tests.helpers.kernel_reference import Reference
from tests.helpers.programs import run_python

LARGE = (1 << 20) + 77
"""Elements of a call that writes past the caches."""


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = load_kernels()
    assert kernels.native_devices == {"cpu"}, "the tests of the native kernels need a C++ compiler"
    return kernels


@pytest.fixture(params=["native", "reference"])
def either(request: pytest.FixtureRequest, native: Kernels) -> Kernels:
    return native if request.param == "native" else Reference()


def outputs_for(segments: Segments, *, offset: int = 0) -> Outputs:
    """Outputs full of what no update writes; `offset` elements before each one make its address odd."""

    def like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.full((tensor.numel() + offset,), 77.0)[offset:] for tensor in tensors]

    return Outputs(like(segments.params), like(segments.exp_avgs), like(segments.exp_avg_sqs))


def as_segments(outputs: Outputs, segments: Segments) -> Segments:
    """What an update in place would have left in `segments`."""
    return replace(segments, params=outputs.params, exp_avgs=outputs.exp_avgs, exp_avg_sqs=outputs.exp_avg_sqs)


def updated_into(
    kernels: Kernels,
    segments: Segments,
    hyper: HyperParameters,
    how: SegmentPass,
    *,
    num_threads: int = 0,
    offset: int = 0,
) -> Segments:
    """Update out of place, check that the inputs stayed, and return what an update in place would leave."""
    inputs = copy(segments)
    outputs = outputs_for(inputs, offset=offset)
    kernels.adamw_(inputs, hyper, how, outputs=outputs, num_threads=num_threads)
    assert_kept(inputs, segments)
    return as_segments(outputs, inputs)


def assert_kept(inputs: Segments, before: Segments) -> None:
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        for now, was in zip(getattr(inputs, name), getattr(before, name), strict=True):
            assert torch.equal(bits(now), bits(was)), name


# The same bits as in place: instruction sets, threads, cuts, addresses.


@pytest.mark.few(18)
@pytest.mark.parametrize(("hyper", "tail_width"), [(HYPER, 0), (HYPER, 8), (CUDA_ORDER, 8)])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("out", [None, *LOWP])
@pytest.mark.parametrize("grad", FLOATS)
def test_all_instruction_sets_give_the_bits_of_in_place(
    native: Kernels,
    grad: torch.dtype,
    out: torch.dtype | None,
    decoupled: bool,
    hyper: HyperParameters,
    tail_width: int,
) -> None:
    before = make(*LENGTHS, grad=grad, out=out)
    how = SegmentPass(0.37, 0.9, decoupled=decoupled, tail_width=tail_width)
    expected = updated(native, before, hyper, how)
    assert differences(updated_into(native, before, hyper, how), expected) == []
    assert differences(updated_into(Kernels(frozenset()), before, hyper, how), expected) == []
    for level in levels():
        inputs = copy(before)
        outputs = outputs_for(inputs)
        lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
        torch.ops.chunkmem._adamw_into_at(*arguments(inputs, hyper, how), *lists, 0, level)
        assert_kept(inputs, before)
        assert differences(as_segments(outputs, inputs), expected) == []


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("hyper", [HYPER, replace(HYPER, beta1=[0.3]), CUDA_ORDER])
@pytest.mark.parametrize("numels", [(LARGE, 33), (300, 33)])
def test_every_kind_of_update(
    native: Kernels, numels: tuple[int, ...], hyper: HyperParameters, decoupled: bool
) -> None:
    before = make(*numels, grad=torch.float16, out=torch.bfloat16)
    how = SegmentPass(0.37, decoupled=decoupled, tail_width=8)
    expected = updated(native, before, hyper, how)
    for level in levels():
        outputs = outputs_for(before)
        lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
        torch.ops.chunkmem._adamw_into_at(*arguments(before, hyper, how), *lists, 0, level)
        assert differences(as_segments(outputs, before), expected) == []


@pytest.mark.few(8)
@pytest.mark.parametrize("num_threads", [0, 1, 2, 3])
@pytest.mark.parametrize("numel", [0, 1, 40_001, LARGE])
def test_threads_do_not_show(native: Kernels, numel: int, num_threads: int) -> None:
    before = make(numel, grad=torch.bfloat16, out=torch.bfloat16)
    how = SegmentPass(0.5, tail_width=8)
    expected = updated(native, before, HYPER, how)
    torch.set_num_threads(2)
    assert differences(updated_into(native, before, HYPER, how, num_threads=num_threads), expected) == []
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_cuts_do_not_show(native: Kernels, num_threads: int) -> None:
    before = make(200_001, grad=torch.float16, out=torch.float16)
    ends = [1, 1, 8, 301, *range(1000, 1100), 66_666, 131_075, 200_001]
    expected = updated(native, before, HYPER, SegmentPass())
    inputs, outputs = copy(before), outputs_for(before)
    pieces = cut(as_segments(outputs, inputs), ends)
    native.adamw_(cut(inputs, ends), HYPER, outputs=pieces.in_place, num_threads=num_threads)
    assert_kept(inputs, before)
    assert differences(as_segments(outputs, inputs), expected) == []


@pytest.mark.few(15)
@pytest.mark.parametrize("out", [None, torch.bfloat16])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(("offset", "out_offset"), [(0, 0), (1, 1), (0, 3), (5, 0), (7, 21)])
def test_addresses_do_not_show(
    native: Kernels, offset: int, out_offset: int, level: int, out: torch.dtype | None
) -> None:
    # So many that the outputs are stored past the caches, which needs aligned addresses.
    level = min(level, max(levels()))
    before = make(LARGE, out=out, offset=offset)
    expected = updated(native, before, HYPER, SegmentPass(tail_width=8))
    outputs = outputs_for(before, offset=out_offset)
    lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
    torch.ops.chunkmem._adamw_into_at(*arguments(before, HYPER, SegmentPass(tail_width=8)), *lists, 0, level)
    assert differences(as_segments(outputs, before), expected) == []


@pytest.mark.parametrize("numel", [1, 31, 257, LARGE])
def test_nothing_is_written_beside_the_outputs(native: Kernels, numel: int) -> None:
    inputs, around = make(numel), outputs_for(make(numel + 40))
    lists = (around.params, around.exp_avgs, around.exp_avg_sqs)
    native.adamw_(inputs, HYPER, outputs=Outputs(*([tensors[0][19 : 19 + numel]] for tensors in lists)))
    for (tensor,) in lists:
        assert set(tensor[:19].tolist()) | set(tensor[19 + numel :].tolist()) == {77.0}
        assert not (tensor[19 : 19 + numel] == 77.0).any()


def test_an_update_can_be_thrown_away_and_done_again(either: Kernels) -> None:
    before = make(1000, 33, grad=torch.bfloat16, out=torch.bfloat16)
    expected = updated(either, before, HYPER, SegmentPass(clip_coefficient=0.25))
    outputs = outputs_for(before)
    either.adamw_(before, HYPER, outputs=outputs)
    assert differences(as_segments(outputs, before), expected) != []
    either.adamw_(before, HYPER, SegmentPass(clip_coefficient=0.25), outputs=outputs)
    assert differences(as_segments(outputs, before), expected) == []


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_do_not_show_in_the_norm(either: Kernels, dtype: torch.dtype, num_threads: int) -> None:
    (grad,) = make(300_001, grad=dtype).grads
    expected = either.norm_and_finite([grad], unscale=0.3)
    assert torch.equal(either.norm_and_finite([grad], unscale=0.3, num_threads=num_threads), expected)
    parts = list(grad.split(7001))
    assert torch.equal(either.norm_and_finite(parts, unscale=0.3, num_threads=num_threads), expected)
    assert either.norm_and_finite([grad[:0]], num_threads=num_threads).tolist() == [0, 1]


# Threads.


class Watched:
    """An update that runs on a thread of its own, by `num_threads` threads, and what can be seen meanwhile."""

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        self._kernels, self._num_threads = kernels, num_threads
        values = torch.rand(4 << 20)
        self._segments = Segments([values], [values], [values], [values], [values.bfloat16()])
        self._outputs = outputs_for(self._segments)
        self._first_and_last = self._outputs.params[0].numpy()[:: values.numel() - 1]

    def watch(self) -> Iterator[int]:
        """Run it once; yield the number of threads whenever it has begun to write, but not yet written all."""
        self._outputs.params[0].fill_(77.0)
        runs = threading.Thread(target=self._run)
        runs.start()
        while runs.is_alive():
            first, last = self._first_and_last
            if first != 77.0 and last == 77.0:
                yield len(os.listdir("/proc/self/task"))
        runs.join()

    def _run(self) -> None:
        self._kernels.adamw_(self._segments, HYPER, outputs=self._outputs, num_threads=self._num_threads)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_python_runs_beside_the_kernel_on_its_own_threads(native: Kernels, num_threads: int) -> None:
    # One that held Python's lock would show this thread nothing written, or everything, however often it is tried.
    torch.set_num_threads(2)
    watched = Watched(native, num_threads)  # by now torch has started its own
    before = len(os.listdir("/proc/self/task"))
    seen: list[int] = []
    for _ in range(1000):
        seen += watched.watch()
        if seen and max(seen) == before + num_threads:
            break
    assert max(seen) == before + num_threads, "that of the call, and those it started"


WITHOUT_MORE_THREADS = """
import resource, threading
import torch
from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.segments import Outputs, SegmentPass
from tests.cpu.test_kernels import HYPER, copy, differences, make, updated
from tests.cpu.test_kernels_into import as_segments, outputs_for

kernels = load_kernels()
before = make(300_001)
expected, outputs = updated(kernels, before, HYPER, SegmentPass()), outputs_for(before)
squares = kernels.norm_and_finite(before.grads)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Room for what a call needs, but not for the stack of a thread.
resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 20), resource.RLIM_INFINITY))
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    print(error)
kernels.adamw_(before, HYPER, outputs=outputs, num_threads=8)
again = kernels.norm_and_finite(before.grads, num_threads=8)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(differences(as_segments(outputs, before), expected), torch.equal(again, squares))
"""


def test_where_no_thread_can_be_started_the_calling_one_does_it_all() -> None:
    done = run_python("-c", WITHOUT_MORE_THREADS)
    assert (done.stdout, done.stderr) == ("can't start new thread\n[] True\n", "")


# As an operator of torch.


def test_opcheck(native: Kernels) -> None:
    segments = make(100, 3, out=torch.bfloat16)
    outputs = outputs_for(segments)
    lists = (outputs.params, outputs.exp_avgs, outputs.exp_avg_sqs)
    for num_threads in (0, 2):
        given = (*arguments(segments, HYPER, SegmentPass()), *lists, num_threads)
        torch.library.opcheck(torch.ops.chunkmem.adamw_into.default, given)
    torch.library.opcheck(torch.ops.chunkmem.norm_and_finite.default, (segments.grads, 0.5, 2))


def test_autograd_notices_what_is_written_and_only_that(either: Kernels) -> None:
    segments = make(4, out=torch.bfloat16)
    outputs = outputs_for(segments)
    read = (*segments.params, *segments.grads, *segments.exp_avgs, *segments.exp_avg_sqs)
    written = (*outputs.params, *outputs.exp_avgs, *outputs.exp_avg_sqs, *segments.lowp_outs)
    versions = [tensor._version for tensor in (*read, *written)]
    either.adamw_(segments, HYPER, outputs=outputs)
    now = [tensor._version for tensor in (*read, *written)]
    assert [new > old for new, old in zip(now, versions, strict=True)] == [False] * len(read) + [True] * len(written)


def test_nothing_to_do(either: Kernels) -> None:
    either.adamw_(Segments([], [], [], []), HYPER, outputs=Outputs([], [], []), num_threads=2)


# Errors.


def _bad_outputs(name: str, tensors: list[torch.Tensor]) -> Outputs:
    return replace(outputs_for(make(4, 5)), **{name: tensors})


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (_bad_outputs("params", [torch.ones(4)]), "out_params has 1 entries for 2 tensors in params"),
        (
            _bad_outputs("exp_avgs", [torch.ones(4), torch.ones(5).half()]),
            "out_exp_avgs[1] has a dtype that is not one of float32",
        ),
        (
            _bad_outputs("exp_avg_sqs", [torch.ones(4), torch.ones(6)]),
            "out_exp_avg_sqs[1] has another shape than params[1]",
        ),
        (_bad_outputs("params", [torch.ones(8)[::2], torch.ones(5)]), "out_params[0] is not contiguous"),
    ],
)
def test_outputs_that_do_not_fit(native: Kernels, outputs: Outputs, message: str) -> None:
    segments = make(4, 5, out=torch.bfloat16)
    _assert_refused(native, segments, outputs, message)


@pytest.mark.parametrize("name", ["params", "exp_avgs", "exp_avg_sqs"])
@pytest.mark.parametrize("other", ["params", "grads", "exp_avgs", "exp_avg_sqs"])
def test_an_output_that_is_an_input_is_refused(native: Kernels, name: str, other: str) -> None:
    segments = make(4, 5)
    shared = getattr(segments, other)
    outputs = _bad_outputs(name, [torch.ones(4), shared[1].view(-1)])
    message = f"out_{name}[1] begins where {other}[1] does; an output needs memory of its own"
    _assert_refused(native, segments, outputs, message)


def test_two_outputs_in_one_place_are_refused(native: Kernels) -> None:
    shared = torch.ones(5)
    outputs = replace(_bad_outputs("params", [torch.ones(4), shared]), exp_avg_sqs=[torch.ones(4), shared])
    message = "out_exp_avg_sqs[1] begins where out_params[1] does; an output needs memory of its own"
    _assert_refused(native, make(4, 5), outputs, message)


def test_tensors_without_elements_may_lie_anywhere(either: Kernels) -> None:
    slab = torch.rand(10)
    segments = Segments([slab[5:5]], [torch.ones(0)], [slab[5:5]], [slab[5:5]])
    either.adamw_(segments, HYPER, outputs=Outputs([slab[5:5]], [slab[5:5]], [slab[5:5]]))
    beside = Segments([slab[5:5], slab[:5]], *([torch.ones(0), torch.ones(5)] for _ in range(3)))
    outputs = Outputs([slab[:0], slab[5:]], *([torch.ones(0), torch.ones(5)] for _ in range(2)))
    either.adamw_(beside, HYPER, outputs=outputs)


def test_inputs_may_share_memory(either: Kernels) -> None:
    values = torch.rand(100)
    same = Segments([values], [values], [values], [values])
    apart = copy(same)
    expected = updated(either, apart, HYPER, SegmentPass())
    assert differences(updated_into(either, same, HYPER, SegmentPass()), expected) == []


def test_outputs_that_torch_has_not_copied_yet(native: Kernels) -> None:
    # A lazy clone shares the memory until either is written.
    before = make(1000)
    outputs = Outputs(
        *([torch._lazy_clone(getattr(before, name)[0])] for name in ("params", "exp_avgs", "exp_avg_sqs"))
    )
    expected = updated(native, make(1000), HYPER, SegmentPass())
    native.adamw_(before, HYPER, outputs=outputs)
    assert_kept(before, make(1000))
    assert differences(as_segments(outputs, before), expected) == []


def test_a_negative_number_of_threads_is_refused(native: Kernels) -> None:
    message = "num_threads is -1; it must be at least 0"
    segments = make(4, 5)
    _assert_refused(native, segments, outputs_for(segments), message, num_threads=-1)
    with pytest.raises(RuntimeError) as caught:
        native.norm_and_finite(segments.grads, num_threads=-1)
    assert _first_line(caught.value) == f"chunkmem: {message}"


def test_wrong_inputs_are_refused_as_in_place(native: Kernels) -> None:
    segments = replace(make(4, 5), grads=[torch.ones(4)])
    _assert_refused(native, segments, outputs_for(make(4, 5)), "grads has 1 entries for 2 tensors in params")
    with pytest.raises(RuntimeError, match=r"step\[0\] is 0; updates are counted from 1"):
        native.adamw_(make(4), replace(HYPER, step=[0]), outputs=outputs_for(make(4)))


def _assert_refused(
    kernels: Kernels, segments: Segments, outputs: Outputs, message: str, *, num_threads: int = 0
) -> None:
    before = copy(as_segments(outputs, segments))
    with pytest.raises(RuntimeError) as caught:
        kernels.adamw_(segments, HYPER, outputs=outputs, num_threads=num_threads)
    assert _first_line(caught.value) == f"chunkmem: {message}"
    assert differences(as_segments(outputs, segments), before) == [], "something was written"


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0]


# Whether the kernels for CUDA are used.


class Off(Kernels):
    """Kernels whose updates of one kind are off by one bit, in the last element of a state."""

    def is_meant(self, segments: Segments, outputs: Outputs | None, keys: Sequence[int] | None) -> bool:
        """Out of place, for float16 gradients."""
        return outputs is not None and segments.grads[0].dtype is torch.float16

    def adamw_(
        self,
        segments: Segments,
        hyper: HyperParameters,
        how: SegmentPass | None = None,
        *,
        outputs: Outputs | None = None,
        keys: Sequence[int] | None = None,
        num_threads: int = 0,
    ) -> None:
        super().adamw_(segments, hyper, how, outputs=outputs, keys=keys, num_threads=num_threads)
        if self.is_meant(segments, outputs, keys):
            written = segments.in_place if outputs is None else outputs
            written.exp_avg_sqs[-1].view(torch.uint8)[-1] ^= 1


class OffByBlocks(Off):
    def is_meant(self, segments: Segments, outputs: Outputs | None, keys: Sequence[int] | None) -> bool:
        return keys is not None


class Overwrites(Kernels):
    """Kernels that work in place where they should not."""

    def adamw_(
        self,
        segments: Segments,
        hyper: HyperParameters,
        how: SegmentPass | None = None,
        *,
        outputs: Outputs | None = None,
        keys: Sequence[int] | None = None,
        num_threads: int = 0,
    ) -> None:
        super().adamw_(segments, hyper, how, outputs=outputs, keys=keys, num_threads=num_threads)
        if outputs is not None:
            super().adamw_(segments, hyper, how)


class OffInTheNorm(Kernels):
    """Kernels whose norm is off by one bit."""

    def norm_and_finite(
        self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0, num_threads: int = 0
    ) -> torch.Tensor:
        result = super().norm_and_finite(grads, unscale=unscale)
        return torch.stack([torch.nextafter(result[0], result[1]), result[1]])


def test_a_trial_finds_no_difference_where_there_is_none(native: Kernels) -> None:
    assert differing_calls(native, "cpu", expected=Reference()) == []


def test_a_trial_finds_one_bit(native: Kernels) -> None:
    into = [f"adamw_into of float16 gradients and tail_width {width}" for width in (0, 8)]
    assert differing_calls(Off(native.native_devices), "cpu", expected=native) == into
    blocks = ["adamw_blocks of float32 weights", "adamw_blocks of bfloat16 weights"]
    assert differing_calls(OffByBlocks(native.native_devices), "cpu", expected=native) == blocks
    norms = [f"norm_and_finite of {name} gradients" for name in ("float32", "bfloat16", "float16")]
    assert differing_calls(OffInTheNorm(native.native_devices), "cpu", expected=native) == norms


def test_a_trial_finds_inputs_that_are_overwritten(native: Kernels) -> None:
    found = differing_calls(Overwrites(native.native_devices), "cpu", expected=native)
    assert len(found) == 6
    assert all(name.startswith("adamw_into of") for name in found)


@pytest.fixture
def cuda_is_loaded(native: Kernels) -> Iterator[None]:
    """Have torch know a kernel for CUDA, so that none is built: it is never called."""
    library = torch.library.Library("chunkmem", "IMPL")
    library.impl("adamw_", lambda *given: None, "CUDA")
    yield
    library._destroy()


@pytest.mark.usefixtures("cuda_is_loaded")
def test_cuda_kernels_with_the_bits_of_the_cpu_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "differing_calls", lambda *_, **__: [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_kernels(with_cuda=True).native_devices == {"cpu", "cuda"}


@pytest.mark.usefixtures("cuda_is_loaded")
@pytest.mark.parametrize(
    ("different", "message"),
    [(["this"], r"than those for the CPU in this; try"), (["a", "b", "c"], "in a and 2 other calls; try another")],
)
def test_cuda_kernels_with_other_bits_are_not_used(
    different: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "differing_calls", lambda *_, **__: different)
    with pytest.warns(UserWarning, match=f"in plain PyTorch on CUDA, .* gave other bits .*{message}") as caught:
        found = load_kernels(with_cuda=True)
    assert found.native_devices == {"cpu"}
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("cuda_is_loaded")
def test_cuda_kernels_that_do_not_run_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> list[str]:
        raise RuntimeError("CUDA error: no kernel image is available\nmore about it")

    message = "plain PyTorch on CUDA, .* could not be tried: CUDA error: no kernel image is available$"
    monkeypatch.setattr(kernels, "differing_calls", fails)
    with pytest.warns(UserWarning, match=message):
        assert load_kernels(with_cuda=True).native_devices == {"cpu"}


@pytest.mark.usefixtures("cuda_is_loaded")
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_the_trial_itself_needs_a_device() -> None:
    with pytest.warns(UserWarning, match="plain PyTorch on CUDA, .* could not be tried"):
        assert load_kernels(with_cuda=True).native_devices == {"cpu"}
