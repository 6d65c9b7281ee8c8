"""States in 8 bits: what codes stand for, how far they are off, what rounds stochastically, and the kernel's bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from chunkmem.optim.codes import BLOCK, SIGNED, UNSIGNED, BlockCodes, random_words, to_bfloat16, update_key
from chunkmem.optim.kernels import Kernels, arguments, load_kernels
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments
from tests.cpu.test_kernels import EDGES, LENGTHS, bits, levels
from tests.helpers.spread import spread

HYPER = HyperParameters([1e-2], [0.9], [0.999], [1e-8], [0.1], [3])
CODES = {"signed": SIGNED, "unsigned": UNSIGNED}
REFERENCE = Kernels(frozenset())


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = load_kernels()
    assert kernels.native_devices == {"cpu"}, "the tests of the native kernels need a C++ compiler"
    return kernels


@pytest.fixture(params=["signed", "unsigned"])
def codes(request: pytest.FixtureRequest) -> BlockCodes:
    return CODES[request.param]


def all_codes(scale: float) -> torch.Tensor:
    """A block that has every code once."""
    return torch.cat([torch.arange(BLOCK, dtype=torch.uint8), torch.tensor([scale]).view(torch.uint8)])


def values_of(numel: int, seed: int = 0, *, decades: float = 6.0) -> torch.Tensor:
    """Magnitudes over many decades."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=draw) * 10 ** (-decades * torch.rand(numel, generator=draw))


@pytest.mark.parametrize("scale", [2.0**-80, 3e-20, 1e-8, 1.0, 0.7, 123.4, 1e19, 2.0**64, 3.0e38])
@pytest.mark.parametrize("is_dithered", [False, True])
def test_what_was_decoded_is_encoded_to_the_same_bytes(codes: BlockCodes, scale: float, *, is_dithered: bool) -> None:
    """However it rounds: so a state that is shown, saved and loaded is the same to the bit."""
    stored = all_codes(scale)
    values = codes.decode(stored, BLOCK)
    for extreme in (0, 0x7FFF) if is_dithered else (None,):
        dither = None if extreme is None else torch.full((BLOCK,), extreme, dtype=torch.int32)
        assert torch.equal(codes.encode(values, dither=dither), stored)


def test_codes_ascend_from_0_to_the_scale(codes: BlockCodes) -> None:
    values = codes.decode(all_codes(2.5), BLOCK)
    positive = values[: codes.top + 1]
    assert (positive[0], positive[codes.top]) == (0.0, 2.5)
    assert (positive.diff() > 0).all()
    if codes.is_signed:
        assert torch.equal(values[128:], -positive)


@pytest.mark.parametrize("numel", [1, 3, 255, 256, 257, 5000, (1 << 18) + 300])
@pytest.mark.parametrize("is_dithered", [False, True])
def test_the_error_in_a_block_is_bounded(codes: BlockCodes, numel: int, *, is_dithered: bool) -> None:
    """1/32 of a value to the nearest code, 1/16 stochastically, and a part of the largest: small ones have no code."""
    values = values_of(numel) if codes.is_signed else values_of(numel).square()
    dither = random_words(7, numel, torch.device("cpu")).int() & 0x7FFF if is_dithered else None
    off = (codes.decode(codes.encode(values, dither=dither), numel) - values).abs()
    padded = torch.nn.functional.pad(values.abs(), (0, -numel % BLOCK)).view(-1, BLOCK)
    largest = padded.amax(dim=1).repeat_interleave(BLOCK)[:numel]
    bound = values.abs() / (16 if is_dithered else 32) + largest * 17 / 16 * (2.0**-12 if codes.is_signed else 2.0**-20)
    assert (off <= (1 + 1e-5) * bound).all()


def test_a_second_moment_above_0_never_becomes_0() -> None:
    """An update divides by its root."""
    values = torch.full((BLOCK,), 1e-30)
    values[0] = 1.0
    assert (UNSIGNED.decode(UNSIGNED.encode(values), BLOCK) > 0).all()
    values[1] = 0.0
    assert UNSIGNED.decode(UNSIGNED.encode(values), BLOCK)[1] == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_finite_number_makes_its_block_nan(codes: BlockCodes, value: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = value
    decoded = codes.decode(codes.encode(values), 3 * BLOCK).view(3, BLOCK)
    assert decoded[1].isnan().all()
    assert (decoded[[0, 2]] == 1.0).all()


def test_small_blocks_keep_values_down_to_the_least_scale(codes: BlockCodes) -> None:
    values = torch.full((BLOCK,), 2.0**-81)
    assert ((codes.decode(codes.encode(values), BLOCK) / values - 1).abs() < 1 / 32).all()
    assert (codes.decode(codes.encode(torch.full((BLOCK,), 1e-45)), BLOCK) <= 2.0**-99).all()
    assert not codes.encode(torch.zeros(BLOCK)).any()


def test_stochastic_rounding_is_unbiased() -> None:
    """Over all 2^15 random numbers of an element, the mean is the value, up to one 2^15th of a step."""
    dither = torch.arange(1 << 15, dtype=torch.int32)
    for value in (0.9, 0.513, 0.07, 0.0123, 0.001):
        for codes in (SIGNED, UNSIGNED):
            total, count = 0.0, 0
            for part in dither.split(BLOCK - 1):
                values = torch.cat([torch.ones(1), torch.full((len(part),), value)])
                stored = codes.encode(values, dither=torch.cat([torch.zeros(1, dtype=torch.int32), part]))
                total += float(codes.decode(stored, len(values))[1:].double().sum())
                count += len(part)
            assert count == 1 << 15
            step = value / 16 + 2.0**-12
            assert abs(total / count - value) < step * 2.0**-15 + 1e-7


def test_bfloat16_is_rounded_without_bias_to_its_neighbours() -> None:
    value = torch.full((1 << 16,), 1.0 + 2.0**-7 * 0.37)
    rounded = to_bfloat16(value, torch.arange(1 << 16)).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(float(rounded.mean()) - float(value[0])) < 2.0**-22
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 1e-40]).bfloat16()
    for random in (0, 0xFFFF, 0xFFFFFFFF):
        assert torch.equal(to_bfloat16(exact.float(), torch.full((7,), random)), exact)
    assert to_bfloat16(torch.tensor([math.nan]), torch.tensor([0xFFFF])).isnan().all()


def test_random_bits_look_random() -> None:
    """Each bit is 1 half of the time, and agrees with that of the next element, update and parameter as often."""
    numel = 1 << 18
    key = update_key(0, 3, 1)

    def words(of: int, *, of_weights: bool = False) -> torch.Tensor:
        return random_words(of, numel, torch.device("cpu"), of_weights=of_weights)

    first = words(key)
    others = [words(update_key(0, 3, 2)), words(update_key(0, 4, 1)), words(key + 1)]
    others += [words(update_key(1, 3, 1)), words(key, of_weights=True)]
    others += [first.roll(1), first.roll(BLOCK)]
    tolerance = 5 * 0.5 / math.sqrt(numel)
    for bit in range(32):
        ones = (first >> bit) & 1
        assert abs(float(ones.double().mean()) - 0.5) < tolerance, bit
        for other in others:
            agree = (ones == (other >> bit) & 1).double().mean()
            assert abs(float(agree) - 0.5) < tolerance, bit
    both = ((first & 0xFFFF) / 65535 - 0.5) * ((first >> 16) / 65535 - 0.5)
    assert abs(float(both.mean())) < 5 / 12 / math.sqrt(numel)


@dataclass(frozen=True)
class BlockUpdate:
    """One call."""

    segments: Segments
    outputs: Outputs | None
    """None: in place."""
    keys: list[int]

    def run(
        self, kernels: Kernels, how: SegmentPass | None = None, hyper: HyperParameters = HYPER, num_threads: int = 0
    ) -> None:
        kernels.adamw_(self.segments, hyper, how, outputs=self.outputs, keys=self.keys, num_threads=num_threads)

    @property
    def to(self) -> Outputs:
        return self.segments.in_place if self.outputs is None else self.outputs


def make(*numels: int, param: torch.dtype, grad: torch.dtype, out: torch.dtype | None, has_codes: bool) -> BlockUpdate:
    draw = torch.Generator().manual_seed(0)

    def tensors(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
        return [(scale * values_of(n, n)).to(dtype) for n in numels]

    def states(codes: BlockCodes, values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [codes.encode(value) for value in values] if has_codes else values

    exp_avgs = states(SIGNED, tensors(0.1, torch.float32))
    exp_avg_sqs = states(UNSIGNED, [value.square() for value in tensors(0.1, torch.float32)])
    lowp = [] if out is None else tensors(0.0, out)
    segments = Segments(tensors(1.0, param), tensors(0.1, grad), exp_avgs, exp_avg_sqs, lowp)
    keys = torch.randint(-(2**62), 2**62, (len(numels),), generator=draw).tolist()
    return BlockUpdate(segments, None, keys)


def into(update: BlockUpdate, *, in_place: bool) -> BlockUpdate:
    """A copy, that writes to itself or to other memory."""
    lists = (getattr(update.segments, name) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "lowp_outs"))
    segments = Segments(*([tensor.clone() for tensor in tensors] for tensors in lists))
    others = ([torch.full_like(tensor, 77) for tensor in tensors] for tensors in segments.in_place.lists)
    return replace(update, segments=segments, outputs=None if in_place else Outputs(*others))


def result(update: BlockUpdate, run: Callable[[BlockUpdate], object]) -> list[torch.Tensor]:
    run(update)
    outputs = update.to
    found = (*outputs.params, *outputs.exp_avgs, *outputs.exp_avg_sqs, *update.segments.lowp_outs)
    return [tensor if tensor.dtype is torch.uint8 else bits(tensor) for tensor in found]


@spread(
    dtypes=[
        (torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, None),
    ],
    has_codes=[True, False],
    in_place=[True, False],
    num_threads=[0, 3],
)
def test_the_native_kernel_has_the_bits_of_the_reference(
    native: Kernels, dtypes: tuple[torch.dtype, ...], has_codes: bool, in_place: bool, num_threads: int
) -> None:
    param, grad, out = dtypes
    update = make(*LENGTHS, 20_000, param=param, grad=grad, out=out, has_codes=has_codes)
    for decoupled, tail_width in ((True, 0), (False, 8)):
        how = SegmentPass(0.5, decoupled=decoupled, tail_width=tail_width)
        expected = result(into(update, in_place=True), lambda u: u.run(REFERENCE, how))  # noqa: B023
        found = result(
            into(update, in_place=in_place),
            lambda u: u.run(native, how, num_threads=num_threads),  # noqa: B023
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not all(
            torch.equal(a, b) for a, b in zip(found, result(into(update, in_place=True), lambda u: None), strict=True)
        )


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16])
def test_every_instruction_set_has_the_same_bits(native: Kernels, param: torch.dtype) -> None:
    update = make(*LENGTHS, 3000, param=param, grad=torch.bfloat16, out=None, has_codes=True)
    expected = result(into(update, in_place=True), lambda u: u.run(REFERENCE))
    for level in levels():

        def run(u: BlockUpdate, level: int = level) -> None:
            torch.ops.chunkmem._adamw_blocks_at(
                *arguments(u.segments, HYPER, SegmentPass()), *u.to.lists, u.keys, 0, level
            )

        found = result(into(update, in_place=False), run)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), level


@pytest.mark.few(3)
@spread(
    dtypes=[
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.float32, None),
    ],
    beta1=[0.9, 0.4],
    decoupled=[True, False],
)
def test_updates_larger_than_caches_have_the_same_bits(
    native: Kernels, dtypes: tuple[torch.dtype, ...], beta1: float, decoupled: bool
) -> None:
    """Rounded weights are then stored past the caches, where they begin on a line; the second ones do not."""
    param, grad, out = dtypes
    update = make((1 << 20) + 300, 700, param=param, grad=grad, out=out, has_codes=True)
    found = []
    for level in levels():

        def run(u: BlockUpdate, level: int = level) -> None:
            given = arguments(u.segments, replace(HYPER, beta1=[beta1]), SegmentPass(decoupled=decoupled))
            torch.ops.chunkmem._adamw_blocks_at(*given, *u.to.lists, u.keys, 2, level)

        copy = into(update, in_place=True)
        if out is not None:
            lowp = [copy.segments.lowp_outs[0], torch.zeros(701, dtype=out)[1:]]
            copy = replace(copy, segments=replace(copy.segments, lowp_outs=lowp))
        found.append(result(copy, run))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    assert not torch.equal(found[0][0], result(update, lambda u: None)[0])


def test_edges_have_the_bits_of_the_reference(native: Kernels) -> None:
    """Gradients and weights that are denormal, huge or no numbers; each in a block of its own."""
    update = make(*[300] * len(EDGES), param=torch.float32, grad=torch.float32, out=torch.bfloat16, has_codes=True)
    for index, edge in enumerate(EDGES):
        update.segments.grads[index][index] = edge
        update.segments.params[index][270] = edge
    expected = result(into(update, in_place=True), lambda u: u.run(REFERENCE))
    found = result(into(update, in_place=True), lambda u: u.run(native))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for index, edge in enumerate(EDGES):
        decoded = SIGNED.decode(found[len(EDGES) + index], 300)
        assert bool(decoded[:BLOCK].isnan().all()) is not math.isfinite(edge)
        assert decoded[BLOCK:].isfinite().all()


def test_a_first_update_from_zeros_is_that_of_fp32_states(native: Kernels) -> None:
    """Weights have its bits; states those of its states, rounded."""
    first = replace(HYPER, step=[1])
    update = make(3000, param=torch.float32, grad=torch.float32, out=None, has_codes=True)
    exact = make(3000, param=torch.float32, grad=torch.float32, out=None, has_codes=False)
    for segments in (update.segments, exact.segments):
        segments.exp_avgs[0].zero_()
        segments.exp_avg_sqs[0].zero_()
    update.run(native, hyper=first)
    native.adamw_(exact.segments, first, SegmentPass())
    assert torch.equal(update.segments.params[0], exact.segments.params[0])
    off = SIGNED.decode(update.segments.exp_avgs[0], 3000) - exact.segments.exp_avgs[0]
    assert 0 < off.abs().max() < exact.segments.exp_avgs[0].abs().max() / 16


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("exp_avgs", lambda t: t[:-1], r"exp_avgs\[0\] has 307 elements instead of 308"),
        ("exp_avg_sqs", lambda t: t.float(), r"exp_avg_sqs\[0\] has another dtype"),
        ("params", lambda t: t.double(), r"params\[0\] has a dtype that is not one of float32, bfloat16"),
        ("grads", lambda t: t.double(), r"grads\[0\] has a dtype"),
        ("grads", lambda t: t[:-1], r"grads\[0\] has 299 elements instead of 300"),
    ],
)
def test_a_wrong_argument_is_named(
    native: Kernels, name: str, wrong: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    update = make(300, param=torch.float32, grad=torch.float32, out=None, has_codes=True)
    segments = replace(update.segments, **{name: [wrong(tensor) for tensor in getattr(update.segments, name)]})
    with pytest.raises(RuntimeError, match=words):
        replace(update, segments=segments).run(native)
