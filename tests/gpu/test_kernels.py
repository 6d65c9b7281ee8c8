"""The optimizer kernels on CUDA: the bits of those on the CPU, and a stream that nobody waits for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

from chunkmem.optim.device_order import DevicePowers, has_order
from chunkmem.optim.kernels import Kernels, differing_calls, load_kernels
from chunkmem.optim.segments import Outputs, SegmentPass, Segments
from tests.cpu.test_kernels import FLOATS, HYPER, LENGTHS, LOWP, bits, copy, cut, differences, make, map_lists, updated
from tests.helpers.adam_on_cuda import CASES, Case, on_card, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def native() -> Kernels:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels = load_kernels(with_cuda=True)
    assert kernels.native_devices == {"cpu", "cuda"}
    return kernels


def on(device: str, segments: Segments) -> Segments:
    return map_lists(segments, lambda tensors: [tensor.to(device, copy=True) for tensor in tensors])


def outputs_for(tensors: Sequence[torch.Tensor], offset: int) -> Outputs:
    """Outputs full of what no update writes, in memory whose addresses are odd for an odd `offset`."""
    lists = ([torch.full((t.numel() + offset,), 77.0, device=t.device)[offset:] for t in tensors] for _ in range(3))
    return Outputs(*lists)


def test_the_trial_finds_no_difference(native: Kernels) -> None:
    assert differing_calls(native, "cuda", expected=native) == []


@pytest.mark.parametrize("tail_width", [0, 8])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("out", [None, *LOWP])
@pytest.mark.parametrize("grad", FLOATS)
def test_the_bits_of_the_cpu_in_place_and_out_of_place(
    native: Kernels, grad: torch.dtype, out: torch.dtype | None, decoupled: bool, tail_width: int
) -> None:
    before = make(*LENGTHS, 70_007, grad=grad, out=out)
    how = SegmentPass(0.37, 0.9, decoupled=decoupled, tail_width=tail_width)
    expected = updated(native, before, HYPER, how)
    assert differences(on("cpu", updated(native, on("cuda", before), HYPER, how)), expected) == []
    for offset in (0, 1, 4):
        inputs = on("cuda", before)
        outputs = outputs_for(inputs.params, offset)
        native.adamw_(inputs, HYPER, how, outputs=outputs, num_threads=2)
        made = Segments(outputs.params, inputs.grads, outputs.exp_avgs, outputs.exp_avg_sqs, inputs.lowp_outs)
        assert differences(on("cpu", made), expected) == []
        kept = on("cpu", inputs)
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
            pairs = zip(getattr(kept, name), getattr(before, name), strict=True)
            assert all(torch.equal(bits(now), bits(was)) for now, was in pairs), name


def test_views_that_begin_anywhere(native: Kernels) -> None:
    whole = make(10_000, grad=torch.bfloat16, out=torch.bfloat16)
    ends = [*range(1, 300, 7), 2049, 5555, 10_000]
    expected = copy(whole)
    native.adamw_(cut(expected, ends), HYPER, SegmentPass(tail_width=8))
    inputs = on("cuda", whole)
    outputs = outputs_for(inputs.params, 3)
    made = Segments(outputs.params, inputs.grads, outputs.exp_avgs, outputs.exp_avg_sqs, inputs.lowp_outs)
    views = cut(made, ends)
    lists = Outputs(views.params, views.exp_avgs, views.exp_avg_sqs)
    native.adamw_(cut(inputs, ends), HYPER, SegmentPass(tail_width=8), outputs=lists)
    assert differences(on("cpu", made), expected) == []


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 2047, 2048, 2049, 300_001])
def test_the_norm_of_the_cpu(native: Kernels, numel: int, dtype: torch.dtype) -> None:
    (grad,) = make(numel, grad=dtype).grads
    expected = native.norm_and_finite([grad], unscale=0.3)
    there = grad.to("cuda")
    for parts in ([there], [there[: numel // 3], there[numel // 3 :]], list(there.split(1000))):
        assert torch.equal(native.norm_and_finite(parts, unscale=0.3, num_threads=2).cpu(), expected)


def test_the_host_does_not_wait(native: Kernels) -> None:
    inputs = on("cuda", make(10_000))
    outputs = outputs_for(inputs.params, 0)
    native.adamw_(inputs, HYPER, outputs=outputs)  # the first launch loads the kernel
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    native.adamw_(inputs, HYPER, outputs=outputs)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_what_does_not_fit_is_refused_as_on_the_cpu(native: Kernels) -> None:
    inputs = on("cuda", make(4, 5))
    outputs = outputs_for(inputs.params, 0)
    shared = Outputs(outputs.params, [outputs.exp_avgs[0], inputs.grads[1]], outputs.exp_avg_sqs)
    with pytest.raises(RuntimeError, match=r"out_exp_avgs\[1\] begins where grads\[1\] does"):
        native.adamw_(inputs, HYPER, outputs=shared)
    with pytest.raises(RuntimeError, match="num_threads is -1; it must be at least 0"):
        native.adamw_(inputs, HYPER, outputs=outputs, num_threads=-1)


def test_the_kernel_of_the_cpu_has_the_bits_of_torch_on_the_card(native: Kernels) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert has_order(native.adamw_, device, DevicePowers(device))


@pytest.mark.parametrize("case", CASES)
def test_the_record_is_true_here(native: Kernels, case: Case) -> None:
    found = on_card(case, torch.device("cuda"))
    assert found == recorded()[CASES.index(case)]
