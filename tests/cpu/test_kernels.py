"""The native optimizer kernels: against fp64, against their PyTorch reference and torch's own, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from chunkmem.optim.device_order import DevicePowers, has_order
from chunkmem.optim.kernels import Kernels, arguments, load_kernels
from chunkmem.optim.native import CPU, NativeUpdate
from chunkmem.optim.segments import HyperParameters, SegmentPass, Segments
from tests.helpers.adam_on_cuda import CASES, Case, on_host, recorded
from tests.helpers.kernel_reference import Reference, norm_and_finite


def single(value: float) -> float:
    """A number as the kernels use it."""
    return torch.tensor(value, dtype=torch.float32).item()


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOWP = (torch.bfloat16, torch.float16)
HYPER = HyperParameters([1e-2], [0.9], [0.999], [1e-8], [0.1], [3])
CUDA_ORDER = replace(HYPER, beta1_power=[single(0.9**3)], beta2_power=[single(0.999**3)])
ORDERS = pytest.mark.parametrize("hyper", [HYPER, CUDA_ORDER], ids=["of the CPU", "of CUDA"])
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 2049)
# Zero, denormals on either side of the least normal number, the largest numbers, and what is no number.
EDGES = (0.0, -0.0, 1e-45, -3e-39, 1.2e-38, 1e-20, 1.0, -3.0, 6e4, 1e19, 3e38, -3.4e38, math.inf, -math.inf, math.nan)


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = load_kernels()
    assert kernels.native_devices == {"cpu"}, "the tests of the native kernels need a C++ compiler"
    return kernels


@pytest.fixture(params=["native", "reference"])
def either(request: pytest.FixtureRequest, native: Kernels) -> Kernels:
    return native if request.param == "native" else Reference()


def levels() -> range:
    """The instruction sets of this processor."""
    return range(torch.ops.chunkmem._best_level() + 1)


def make(
    *numels: int, grad: torch.dtype = torch.float32, out: torch.dtype | None = None, offset: int = 0, seed: int = 0
) -> Segments:
    """Random segments; `offset` elements before each one make its address odd."""
    draw = torch.Generator().manual_seed(seed)

    def tensors(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
        return [(scale * torch.randn(n + offset, generator=draw)).to(dtype)[offset:] for n in numels]

    exp_avg_sqs = [tensor.square_() for tensor in tensors(0.1, torch.float32)]
    outs = [] if out is None else tensors(0.0, out)
    return Segments(tensors(1.0, torch.float32), tensors(0.1, grad), tensors(0.1, torch.float32), exp_avg_sqs, outs)


def map_lists(segments: Segments, function: object) -> Segments:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "lowp_outs")
    return Segments(*(function(getattr(segments, name)) for name in names))  # type: ignore[operator]


def copy(segments: Segments) -> Segments:
    return map_lists(segments, lambda tensors: [tensor.clone() for tensor in tensors])


def cut(segments: Segments, ends: Sequence[int]) -> Segments:
    """Views into the only tensors of `segments`."""
    bounds = list(zip([0, *ends], ends, strict=False))
    return map_lists(segments, lambda tensors: [tensor[a:b] for tensor in tensors for a, b in bounds])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers; every NaN counts as the same one."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), -1, tensor.view(integer))


def differences(a: Segments, b: Segments) -> list[str]:
    return [
        f"{name}[{index}]"
        for name in ("params", "exp_avgs", "exp_avg_sqs", "lowp_outs")
        for index, (x, y) in enumerate(zip(getattr(a, name), getattr(b, name), strict=True))
        if not torch.equal(bits(x), bits(y))
    ]


def at_level(segments: Segments, hyper: HyperParameters, how: SegmentPass, level: int) -> Segments:
    updated = copy(segments)
    torch.ops.chunkmem._adamw_at_(*arguments(updated, hyper, how), level)
    return updated


def updated(kernels: Kernels, segments: Segments, hyper: HyperParameters, how: SegmentPass) -> Segments:
    result = copy(segments)
    kernels.adamw_(result, hyper, how)
    return result


def edges(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(EDGES).to(dtype)


# The values.


def ulps(error: torch.Tensor, *operands: torch.Tensor) -> float:
    """The largest error in units of the last fp32 place of the largest operand."""
    largest = torch.stack([operand.double().abs() for operand in operands]).amax(0)
    _, exponent = torch.frexp(largest)
    return float((error.abs() / torch.ldexp(torch.ones_like(largest), exponent - 24)).max())


@pytest.mark.parametrize("is_cuda_order", [False, True])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize("grad", FLOATS)
def test_within_a_few_ulps_of_fp64(
    either: Kernels, decoupled: bool, beta1: float, grad: torch.dtype, is_cuda_order: bool
) -> None:
    before = make(10_000, grad=grad)
    hyper, weight, weight_sq = replace(HYPER, beta1=[beta1]), single(1 - beta1), single(1 - 0.999)
    correction, correction_sq = 1 - beta1**3, 1 - 0.999**3
    if is_cuda_order:  # what is rounded there are the betas and their powers
        powers = single(single(beta1) ** 3), single(single(0.999) ** 3)
        hyper = replace(hyper, beta1_power=[powers[0]], beta2_power=[powers[1]])
        weight, weight_sq, correction, correction_sq = (
            1 - single(beta1),
            1 - single(0.999),
            1 - powers[0],
            1 - powers[1],
        )
    after = updated(either, before, hyper, SegmentPass(unscale=0.5, clip_coefficient=0.3, decoupled=decoupled))
    p, m, v = (tensor.double() for (tensor,) in (before.params, before.exp_avgs, before.exp_avg_sqs))
    g = (before.grads[0].float() * single(0.15)).double()  # multiplied in fp32, as told
    if not decoupled:
        g = (g + single(0.1) * p).float().double()
    decayed = p * single(1 - 1e-2 * 0.1) if decoupled else p
    new_m = m + weight * (g - m)
    new_v = single(0.999) * v + weight_sq * g * g
    assert ulps(after.exp_avgs[0] - new_m, m, g) <= 2
    assert ulps(after.exp_avg_sqs[0] - new_v, v, new_v) <= 2
    # The parameter from the states as they were rounded: what they lost by cancellation is not its error.
    root = after.exp_avg_sqs[0].double().sqrt() / single(math.sqrt(correction_sq)) + single(1e-8)
    change = single(1e-2 / correction) * after.exp_avgs[0].double() / root
    # Seven roundings, of which those in a change as large as the parameter count in full.
    assert ulps(after.params[0] - (decayed - change), p, change) <= 4


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_tail_differs_from_the_rest_in_its_last_bits_only(either: Kernels, decoupled: bool) -> None:
    before = make(4095)
    uniform = updated(either, before, HYPER, SegmentPass(decoupled=decoupled))
    with_tail = updated(either, before, HYPER, SegmentPass(decoupled=decoupled, tail_width=4096))
    assert differences(uniform, with_tail) != []
    torch.testing.assert_close(uniform.exp_avg_sqs, with_tail.exp_avg_sqs, rtol=3e-7, atol=0)


def test_every_tensor_has_its_own_hyper_parameters(either: Kernels) -> None:
    both = make(40, 50)
    hyper = HyperParameters([1e-2, 1e-3], [0.9, 0.8], [0.99, 0.9], [1e-8, 1e-6], [0.1, 0.0], [1, 1000])
    together = updated(either, both, hyper, SegmentPass(decoupled=False))
    for index in range(2):
        one = map_lists(both, lambda tensors, index=index: tensors[index : index + 1])
        names = ("lr", "beta1", "beta2", "eps", "weight_decay", "step")
        alone = HyperParameters(*([getattr(hyper, name)[index]] for name in names))
        apart = updated(either, one, alone, SegmentPass(decoupled=False))
        assert differences(apart, map_lists(together, lambda tensors, index=index: tensors[index : index + 1])) == []


# The same bits: reference, instruction sets, threads, cuts, addresses.


@pytest.mark.few(18)
@ORDERS
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("out", [None, *LOWP])
@pytest.mark.parametrize("grad", FLOATS)
def test_all_instruction_sets_equal_the_reference(
    native: Kernels, grad: torch.dtype, out: torch.dtype | None, decoupled: bool, hyper: HyperParameters
) -> None:
    before = make(*LENGTHS, grad=grad, out=out)
    how = SegmentPass(0.37, 0.9, decoupled=decoupled, tail_width=8)
    expected = updated(Kernels(frozenset()), before, hyper, how)
    for level in levels():
        assert differences(at_level(before, hyper, how, level), expected) == []


@ORDERS
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_edges_are_the_same_everywhere(
    native: Kernels, decoupled: bool, weight_decay: float, hyper: HyperParameters
) -> None:
    grid = torch.cartesian_prod(edges(), edges(), edges())
    p, g, m = (column.contiguous() for column in grid.T)
    hyper = replace(hyper, weight_decay=[weight_decay])
    for v in EDGES:
        before = Segments([p], [g], [m], [torch.full_like(p, v)], [p.bfloat16()])
        how = SegmentPass(0.7, decoupled=decoupled, tail_width=8)
        expected = updated(Kernels(frozenset()), before, hyper, how)
        for level in levels():
            assert differences(at_level(before, hyper, how, level), expected) == []


def test_threads_and_cuts_do_not_show(native: Kernels) -> None:
    whole = make(200_001, grad=torch.bfloat16, out=torch.bfloat16)
    how = SegmentPass(0.5)
    expected = updated(native, whole, HYPER, how)
    torch.set_num_threads(2)
    assert differences(updated(native, whole, HYPER, how), expected) == []
    pieces = copy(whole)
    native.adamw_(cut(pieces, [1, 1, 8, 301, 66_666, 131_075, 200_001]), HYPER, how)
    assert differences(pieces, expected) == []
    torch.set_num_threads(1)
    in_two_calls = copy(whole)
    native.adamw_(cut(in_two_calls, [777]), HYPER, how)
    rest = map_lists(in_two_calls, lambda tensors: [tensor[777:] for tensor in tensors])
    native.adamw_(rest, HYPER, how)
    assert differences(in_two_calls, expected) == []


@pytest.mark.parametrize("numel", [33, 1 << 20])
@pytest.mark.parametrize("offset", range(1, 33, 5))
def test_addresses_do_not_show(native: Kernels, numel: int, offset: int) -> None:
    # From 1 Mi elements on, the outputs are stored past the caches, which needs aligned addresses.
    aligned = make(numel, grad=torch.float16, out=torch.bfloat16)
    shifted = make(numel, grad=torch.float16, out=torch.bfloat16, offset=offset)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        getattr(shifted, name)[0].copy_(getattr(aligned, name)[0])
    for segments in (aligned, shifted):
        native.adamw_(segments, HYPER)
    assert differences(shifted, aligned) == []


def test_nothing_is_written_beside_the_tensors(native: Kernels) -> None:
    for numel in LENGTHS:
        around = make(numel + 40, out=torch.bfloat16)
        inside = map_lists(around, lambda tensors, n=numel: [tensor[19 : 19 + n] for tensor in tensors])
        before = copy(around)
        native.adamw_(inside, HYPER)
        for name in ("params", "exp_avgs", "exp_avg_sqs", "lowp_outs"):
            now, was = getattr(around, name)[0], getattr(before, name)[0]
            assert torch.equal(now[:19], was[:19])
            assert torch.equal(now[19 + numel :], was[19 + numel :])


# The bits of torch's own fused kernel.


def fused_by_torch(segments: Segments, hyper: HyperParameters, decoupled: bool) -> None:
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        *(segments.params, segments.grads, segments.exp_avgs, segments.exp_avg_sqs, []),
        [torch.tensor(float(hyper.step[0]))] * len(segments.params),
        lr=hyper.lr[0],
        beta1=hyper.beta1[0],
        beta2=hyper.beta2[0],
        weight_decay=hyper.weight_decay[0],
        eps=hyper.eps[0],
        amsgrad=False,
        maximize=False,
    )


MANY_LENGTHS = (*range(200), 40_000, 3, 70_007)


@pytest.mark.few(8)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("beta1", [0.9, 0.5, 0.3])
@pytest.mark.parametrize(
    ("numels", "num_threads"), [(MANY_LENGTHS, 1), ((70_007, 5, 40_000), 2)], ids=["one thread", "two threads"]
)
def test_the_same_bits_as_torch(
    native: Kernels, numels: tuple[int, ...], num_threads: int, beta1: float, weight_decay: float, decoupled: bool
) -> None:
    width = native.torch_tail_width()
    assert width is not None, "torch's kernel works in another order here: it has to be used instead of ours"
    torch.set_num_threads(num_threads)
    ends = torch.tensor(numels).cumsum(0).tolist()  # views that begin and end anywhere
    chunk = make(ends[-1])
    theirs = copy(chunk)
    hyper = replace(HYPER, beta1=[beta1], weight_decay=[weight_decay])
    for step in range(1, 6):
        at_step = replace(hyper, step=[step])
        native.adamw_(cut(chunk, ends), at_step, SegmentPass(decoupled=decoupled, tail_width=width))
        fused_by_torch(cut(theirs, ends), at_step, decoupled)
    assert differences(chunk, theirs) == []


@pytest.mark.parametrize(
    ("lr", "weight_decay"),
    [(0.0010187160816223335, 0.09721365852646896), (0.0010936296151829996, 0.012290127489411473)],
)
def test_the_factor_of_the_decay_is_rounded_as_by_torch(either: Kernels, lr: float, weight_decay: float) -> None:
    # Computed without a fused multiply-add, 1 - lr * weight_decay is another fp32 number for these two.
    hyper = replace(HYPER, lr=[lr], weight_decay=[weight_decay], step=[1])
    ones = Segments([torch.ones(8)], *([torch.zeros(8)] for _ in range(3)))
    theirs = copy(ones)
    either.adamw_(ones, hyper)
    fused_by_torch(theirs, hyper, True)
    assert ones.params[0][0] != single(1 - lr * weight_decay)
    assert differences(ones, theirs) == []


def test_another_order_of_torch_is_noticed(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch._fused_adam_

    def other_order(params: list[torch.Tensor], *rest: object, **options: object) -> None:
        fused(params, *rest, **options)
        params[-1][-1].copy_(torch.nextafter(params[-1][-1], torch.tensor(0.0)))

    monkeypatch.setattr(torch, "_fused_adam_", other_order)
    assert native.torch_tail_width() is None


@pytest.mark.few(24)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_torch_on_cuda(either: Kernels, case: Case) -> None:
    expected = recorded()[CASES.index(case)]
    found = on_host(either.adamw_, case, tuple(expected["powers"]))
    assert {name: expected[name] for name in found} == found


def test_a_trial_tells_the_order_of_cuda_from_another(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    powers = DevicePowers(CPU)
    assert not has_order(native.adamw_, CPU, powers), "a CPU's is another"
    for name, decoupled in (("_fused_adamw_", True), ("_fused_adam_", False)):

        def as_cuda(*lists: list[torch.Tensor], decoupled: bool = decoupled, **numbers: float) -> None:
            hyper = HyperParameters(
                *([numbers[key]] for key in ("lr", "beta1", "beta2", "eps", "weight_decay")),
                step=[int(lists[5][0])],
                beta1_power=[powers.of(numbers["beta1"], int(lists[5][0]))],
                beta2_power=[powers.of(numbers["beta2"], int(lists[5][0]))],
            )
            Kernels(frozenset()).adamw_(Segments(*lists[:4]), hyper, SegmentPass(decoupled=decoupled))

        monkeypatch.setattr(torch, name, as_cuda)
    assert has_order(native.adamw_, CPU, powers)


def test_powers_of_betas_that_change_in_every_step_are_not_kept_for_ever() -> None:
    powers = DevicePowers(CPU)
    for step in range(1, 200):
        beta = 0.8 + 1e-4 * step
        assert powers.of(beta, step) == DevicePowers(CPU).of(beta, step)
    assert powers._page.cache_info().currsize <= 32


def test_what_computes_on_host_is_updated_as_on_a_cpu() -> None:
    def none() -> Kernels:
        raise AssertionError("nothing is tried")

    assert NativeUpdate(none, torch.device("cuda")).powers_for(CPU) is None


def test_a_device_without_a_fused_kernel_is_named(native: Kernels) -> None:
    update = NativeUpdate(lambda: native, torch.device("meta"))
    with pytest.warns(UserWarning, match="fused Adam on meta has other bits.*depend on memory.device"):
        assert update.powers is None


# Low precision.


@pytest.mark.parametrize("out", LOWP)
def test_outputs_round_as_torch_does(either: Kernels, out: torch.dtype) -> None:
    # All upper halves of fp32 numbers, with lower halves around every tie of either type.
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (upper[:, None] | lower).flatten().to(torch.int32).view(torch.float32)
    zeros = [torch.zeros_like(values) for _ in range(3)]
    segments = Segments([values], [zeros[0]], [zeros[1]], [zeros[2]], [torch.empty_like(values, dtype=out)])
    either.adamw_(segments, replace(HYPER, lr=[0.0]))
    assert torch.equal(bits(segments.lowp_outs[0]), bits(values.to(out)))


@pytest.mark.parametrize("grad", LOWP)
def test_every_low_precision_gradient_is_read_exactly(native: Kernels, grad: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(grad)
    for level in levels():
        zeros = [torch.zeros(1 << 16) for _ in range(3)]
        segments = Segments([zeros[0]], [every], [zeros[1]], [zeros[2]])
        read = at_level(segments, replace(HYPER, beta1=[0.0]), SegmentPass(), level).exp_avgs[0]
        finite = every.isfinite()
        assert torch.equal(bits(read[finite]), bits(every[finite].float()))
        assert not read[~finite].isfinite().any()


# The norm.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 31, 2047, 2048, 2049, 3 * 2048, 100_003])
def test_the_norm(native: Kernels, numel: int, dtype: torch.dtype) -> None:
    (grad,) = make(numel, grad=dtype).grads
    expected = norm_and_finite([grad], unscale=0.3)
    exact = math.fsum(((grad.float() * torch.tensor(0.3)).double() ** 2).tolist())
    assert expected.tolist() == [pytest.approx(exact, rel=1e-14), 1.0]
    for level in levels():
        assert torch.equal(torch.ops.chunkmem._norm_and_finite_at([grad], 0.3, level), expected)


def test_threads_and_cuts_do_not_show_in_the_norm(either: Kernels) -> None:
    (grad,) = make(300_001).grads
    expected = either.norm_and_finite([grad])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for cuts in ([1], [2048, 4096], [5, 5, 6, 2050, 2051, 100_000], list(range(0, 5000, 7))):
            parts = [grad[a:b] for a, b in zip([0, *cuts], [*cuts, grad.numel()], strict=True)]
            assert torch.equal(either.norm_and_finite(parts), expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 2047, 5000, 9999])
def test_one_bad_element_is_noticed(either: Kernels, bad: float, at: int) -> None:
    (grad,) = make(10_000).grads
    assert either.norm_and_finite([grad])[1] == 1
    grad[at] = bad
    assert either.norm_and_finite([grad])[1] == 0


def test_unscaling_can_overflow(either: Kernels) -> None:
    grads = [torch.full((3,), 3e38)]
    assert either.norm_and_finite(grads).tolist() == [pytest.approx(3 * 9e76, rel=1e-6), 1]
    assert either.norm_and_finite(grads, unscale=2.0)[1] == 0


def test_no_gradients_have_norm_zero(either: Kernels) -> None:
    assert either.norm_and_finite([]).tolist() == [0, 1]
    either.adamw_(Segments([], [], [], []), HYPER)


# As operators of torch.


def test_opcheck(native: Kernels) -> None:
    segments = make(100, 3, out=torch.bfloat16)
    torch.library.opcheck(torch.ops.chunkmem.adamw_.default, arguments(segments, HYPER, SegmentPass()))
    torch.library.opcheck(torch.ops.chunkmem.adamw_.default, arguments(make(5), HYPER, SegmentPass(decoupled=False)))
    torch.library.opcheck(torch.ops.chunkmem.norm_and_finite.default, (segments.grads, 0.5))


def test_autograd_notices_the_update(either: Kernels) -> None:
    segments = make(4)
    weight = segments.params[0].requires_grad_()
    loss = (weight * weight).sum()
    with torch.no_grad():
        either.adamw_(segments, HYPER)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Errors.


def _with(name: str, tensors: list[torch.Tensor]) -> Segments:
    return replace(make(4, 5, out=torch.bfloat16), **{name: tensors})


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (
            _with("params", [torch.ones(4), torch.ones(5).double()]),
            r"params\[1\] has a dtype that is not one of float32",
        ),
        (_with("exp_avgs", [torch.ones(4).half(), torch.ones(5)]), r"exp_avgs\[0\] has a dtype .* float32$"),
        (_with("grads", [torch.ones(4), torch.ones(5).int()]), r"grads\[1\] has a dtype .* float32, bfloat16, float16"),
        (_with("grads", [torch.ones(4), torch.ones(5).half()]), r"grads\[1\] has another dtype than grads\[0\]"),
        (_with("lowp_outs", [torch.ones(4), torch.ones(5)]), r"lowp_outs\[0\] has a dtype .* of bfloat16, float16"),
        (_with("grads", [torch.ones(4)]), "grads has 1 entries for 2 tensors in params"),
        (_with("lowp_outs", [torch.ones(4).half()]), "lowp_outs has 1 entries for 2 tensors"),
        (_with("exp_avg_sqs", [torch.ones(4), torch.ones(6)]), r"exp_avg_sqs\[1\] has another shape than params\[1\]"),
        (_with("exp_avgs", [torch.ones(8)[::2], torch.ones(5)]), r"exp_avgs\[0\] is not contiguous"),
    ],
)
def test_tensors_that_do_not_fit(native: Kernels, segments: Segments, message: str) -> None:
    before = copy(segments)
    with pytest.raises(RuntimeError, match=message):
        native.adamw_(segments, HYPER)
    assert differences(segments, before) == []


@pytest.mark.parametrize(
    ("hyper", "how", "message"),
    [
        (replace(HYPER, step=[0]), SegmentPass(), r"step\[0\] is 0; updates are counted from 1"),
        (replace(HYPER, step=[3, -7]), SegmentPass(), r"step\[1\] is -7"),
        (replace(HYPER, lr=[0.1, 0.1, 0.1]), SegmentPass(), "lr has 3 entries for 2 tensors"),
        (replace(HYPER, beta2=[]), SegmentPass(), "beta2 has 0 entries for 2 tensors"),
        (HYPER, SegmentPass(tail_width=-1), "tail_width is -1; it must be at least 0"),
    ],
)
def test_numbers_that_do_not_fit(native: Kernels, hyper: HyperParameters, how: SegmentPass, message: str) -> None:
    segments = make(4, 5)
    before = copy(segments)
    with pytest.raises(RuntimeError, match=message):
        native.adamw_(segments, hyper, how)
    assert differences(segments, before) == []


def test_gradients_of_a_norm_that_do_not_fit(native: Kernels) -> None:
    with pytest.raises(RuntimeError, match=r"grads\[1\] has another dtype than grads\[0\]"):
        native.norm_and_finite([torch.ones(2), torch.ones(2).half()])
    with pytest.raises(RuntimeError, match=r"grads\[0\] has a dtype that is not one of"):
        native.norm_and_finite([torch.ones(2).double()])


def test_an_instruction_set_that_is_not_there(native: Kernels) -> None:
    with pytest.raises(RuntimeError, match="level 9 is not one of 0 to"):
        torch.ops.chunkmem._norm_and_finite_at([torch.ones(2)], 1.0, 9)
