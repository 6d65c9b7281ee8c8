"""The CUDA kernels on a CPU: the bits of the PyTorch reference, and one launch for many tensors."""

from __future__ import annotations

import pytest

from chunkmem.runtime import build
from chunkmem.runtime.own_folder import default_cache_dir
from tests.helpers.programs import run_python

pytestmark = pytest.mark.skipif(not build.cpu_recipe().compiler, reason="needs a C++ compiler")

PROGRAM = """
import sys
from pathlib import Path
import torch
from chunkmem.optim.kernels import differing_calls
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments
from tests.helpers.kernel_reference import Reference
from tests.helpers.cuda_on_cpu import KernelsOnCpu

cuda = KernelsOnCpu(Path(sys.argv[1]))
reference = Reference()
assert differing_calls(cuda.kernels, "cpu", expected=reference) == []

draw = torch.Generator().manual_seed(0)
lengths = [0, 1, 7, 8, 9, 2047, 2048, 2049, 70_007, *(1 + 3 * n for n in range(100)), 0, 4096, 0]
def tensors(dtype=torch.float32):
    flat = torch.rand(sum(lengths) + 1, generator=draw).to(dtype)[1:]  # not on a boundary of 16 bytes
    return list(flat.split(lengths))
def launches(call, *given, **named):
    before = cuda.num_launches()
    call(*given, **named)
    return cuda.num_launches() - before

# Updates: values of their own for each tensor, so that one that is taken for another shows.
hyper = HyperParameters(*([0.01 * (n + 1) for n in range(len(lengths))], [0.9], [0.99], [1e-8], [0.1]), [3])
for grad, out in ((torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
    before = Segments(tensors(), tensors(grad), tensors(), tensors(), [] if out is None else tensors(out))
    def copy():
        lists = (before.params, before.grads, before.exp_avgs, before.exp_avg_sqs, before.lowp_outs)
        return Segments(*([t.clone() for t in ts] for ts in lists))
    def same(a, b):
        lists = ("params", "exp_avgs", "exp_avg_sqs", "lowp_outs")
        return all(torch.equal(x, y) for n in lists for x, y in zip(getattr(a, n), getattr(b, n), strict=True))
    ours, theirs = copy(), copy()
    num_tensors = sum(length > 0 for length in lengths)
    assert launches(cuda.kernels.adamw_, ours, hyper, SegmentPass(0.5, tail_width=8)) == -(-num_tensors // 24)
    reference.adamw_(theirs, hyper, SegmentPass(0.5, tail_width=8))
    assert same(ours, theirs), grad
    inputs = copy()
    made = Outputs(*([torch.full_like(t, 77.0) for t in before.params] for _ in range(3)))
    cuda.kernels.adamw_(inputs, hyper, SegmentPass(0.5, tail_width=8), outputs=made)
    assert same(Segments(made.params, [], made.exp_avgs, made.exp_avg_sqs, inputs.lowp_outs), theirs), grad
assert launches(cuda.kernels.adamw_, Segments([], [], [], []), hyper) == 0

# Updates by blocks: states in 8 bits, or weights in bfloat16 that are rounded stochastically.
from chunkmem.optim.codes import SIGNED, UNSIGNED
for param, grad, out, has_codes in (
    (torch.float32, torch.bfloat16, torch.bfloat16, True), (torch.float32, torch.float16, torch.float16, True),
    (torch.bfloat16, torch.bfloat16, None, True), (torch.bfloat16, torch.bfloat16, None, False),
):
    states = [[codes.encode(t) if has_codes else t for t in tensors()] for codes in (SIGNED, UNSIGNED)]
    before = Segments(tensors(param), tensors(grad), *states, [] if out is None else tensors(out))
    def update():
        lists = (before.params, before.grads, before.exp_avgs, before.exp_avg_sqs, before.lowp_outs)
        return Segments(*([t.clone() for t in ts] for ts in lists))
    ours, theirs, how, keys = update(), update(), SegmentPass(0.5, tail_width=8), list(range(len(lengths)))
    assert launches(cuda.kernels.adamw_, ours, hyper, how, keys=keys) == -(-num_tensors // 24)
    reference.adamw_(theirs, hyper, how, keys=keys)
    assert same(ours, theirs), (param, grad, has_codes)
    assert not same(ours, update())

# Norms: whole blocks within tensors, blocks in which tensors meet, and the last one.
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for grads in (tensors(dtype), [torch.rand(300_001, generator=draw).to(dtype)], [torch.rand(2048).to(dtype)] * 250,
                  list(torch.rand(700_000, generator=draw).to(dtype).split(1000)), [torch.zeros(0, dtype=dtype)]):
        found = cuda.kernels.norm_and_finite(grads, unscale=0.3)
        assert torch.equal(found, reference.norm_and_finite(grads, unscale=0.3)), (dtype, len(grads))
assert cuda.kernels.norm_and_finite([torch.tensor([1.0, float("inf")])])[1] == 0
norms = [torch.rand(4096, generator=draw) for _ in range(400)]
assert launches(cuda.kernels.norm_and_finite, norms) <= 5 + 2, "whole blocks, two levels above them, the result"
print("done")
"""


def test_the_kernels_have_the_bits_of_the_reference_and_few_launches() -> None:
    """They are compiled where the package's own are, once for as long as their code stays as it is."""
    done = run_python("-c", PROGRAM, default_cache_dir())
    assert (done.stdout, done.stderr[-2000:]) == ("done\n", "")
