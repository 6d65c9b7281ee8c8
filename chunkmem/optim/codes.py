"""Optimizer states in 8 bits, and the random bits of stochastic rounding, in plain PyTorch.

`csrc/block_math.h` has the same arithmetic, and says why it is so: [Note: Codes], [Note: Stochastic rounding].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch.nn.functional import pad

BLOCK = 256
"""Elements that share a scale."""
_SHIFT = 19
_ONE = 0x3F800000 >> _SHIFT
_NEAREST = 1 << (_SHIFT - 1)
_LEAST_SCALE = 2.0**-80
_WORD = 0xFFFFFFFF
_PIECE = 1 << 18
"""Elements at a time: there are temporaries of some dozen bytes for each."""


@dataclass(frozen=True)
class BlockCodes:
    """What a parameter's state is kept as: a code of 8 bits for each element, then a float32 scale for each block."""

    is_signed: bool

    @property
    def top(self) -> int:
        """The code of the largest magnitude in a block."""
        return 127 if self.is_signed else 255

    @property
    def _offset(self) -> int:
        return _ONE - self.top

    @property
    def _smallest(self) -> torch.Tensor:
        return torch.tensor([self._offset << _SHIFT], dtype=torch.int32).view(torch.float32)

    @staticmethod
    def numel_of(numel: int) -> int:
        """Return the bytes for so many elements."""
        return _scales_at(numel) + 4 * -(-numel // BLOCK)

    def decode(self, stored: torch.Tensor, numel: int) -> torch.Tensor:
        """Return `numel` elements in float32, 1-D."""
        values = torch.empty(numel, dtype=torch.float32, device=stored.device)
        scales = stored[_scales_at(numel) :].view(torch.float32)
        for at, blocks in _pieces(numel):
            codes = stored[at].int()
            values[at] = self._decoded(codes, scales[blocks].repeat_interleave(BLOCK)[: len(codes)])
        return values

    def _decoded(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        magnitude = codes & 127 if self.is_signed else codes
        c = self._smallest.to(codes.device)
        t = ((magnitude + self._offset) << _SHIFT).view(torch.float32)
        values = (t - c) * (1 / (1 - c)) * scales
        return torch.where(codes > 127, -values, values) if self.is_signed else values

    def encode(self, values: torch.Tensor, *, dither: torch.Tensor | None = None) -> torch.Tensor:
        """Return what `decode` makes the nearest values of: uint8, 1-D.

        Args:
            values: float32, 1-D.
            dither: random bits of each element, int32, of which the lower 15 count; None: round to nearest.
        """
        numel = values.numel()
        stored = torch.zeros(self.numel_of(numel), dtype=torch.uint8, device=values.device)
        scales = stored[_scales_at(numel) :].view(torch.float32)
        values = values.contiguous()
        for at, blocks in _pieces(numel):
            self._encode(values[at], None if dither is None else dither[at], stored[at], scales[blocks])
        return stored

    def _encode(
        self, values: torch.Tensor, dither: torch.Tensor | None, to: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Write codes and scales."""
        numel, bits = values.numel(), values.view(torch.int32)
        most = pad(bits & 0x7FFFFFFF, (0, -numel % BLOCK)).view(-1, BLOCK).amax(dim=1)
        scale, shrink, inverse = (column.repeat_interleave(BLOCK)[:numel] for column in _scales_of(most))
        ratio = values.abs() * shrink * inverse
        ratio = torch.where(ratio < 1 - 2.0**-22, ratio, 1.0)
        c = self._smallest.to(values.device)
        t = fused_multiply_add(ratio, 1 - c, c).view(torch.int32)
        added = _NEAREST if dither is None else ((dither & 0x7FFF) << (_SHIFT - 15)) + 8
        codes = ((t + added) >> _SHIFT) - self._offset
        if self.is_signed:
            codes = codes | torch.where(bits < 0, 128, 0)
        else:
            codes = torch.where((codes == 0) & (bits & 0x7FFFFFFF != 0), 1, codes)
        to.copy_(codes)
        scales.copy_(scale[::BLOCK])


SIGNED, UNSIGNED = BlockCodes(is_signed=True), BlockCodes(is_signed=False)


def _pieces(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of elements and those of their blocks: one after the other, temporaries stay small."""
    for begin in range(0, numel, _PIECE):
        end = min(numel, begin + _PIECE)
        yield slice(begin, end), slice(begin // BLOCK, -(-end // BLOCK))


def _scales_at(numel: int) -> int:
    return -(-numel // 4) * 4


def _scales_of(most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales, and by what blocks are multiplied, from the bits of their largest magnitudes."""
    largest = most.view(torch.float32)
    normal = torch.where(largest < _LEAST_SCALE, _LEAST_SCALE, largest)
    scale = torch.where(most >= 0x7F800000, torch.nan, torch.where(most == 0, 0.0, normal))
    shrink = torch.where(normal > 2.0**64, 2.0**-64, 1.0)
    return scale, shrink, 1 / (normal * shrink)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return `a * b + c` of fp32 tensors, rounded once.

    The product is exact in fp64. The sum there is rounded to odd, after which a second rounding, to fp32, does no harm.

    Source: Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    needs_odd = (error != 0) & total.isfinite() & (bits & 1 == 0)
    odd = bits + torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(needs_odd, odd, bits).view(torch.float64).float()


def update_key(seed: int, number: int, step: int) -> int:
    """Return the key of the random bits of a parameter's update: 64 bits, signed."""
    digest = blake2b(f"{seed} {number} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_words(key: int, numel: int, device: torch.device, *, of_weights: bool = False) -> torch.Tensor:
    """Return 32 random bits for each element of a tensor, as int64; `of_weights`: at least 16, which are others."""
    blocks = torch.arange(-(-numel // BLOCK), device=device)
    keys = _block_key(torch.tensor(key, device=device), blocks)
    if of_weights:
        keys = _block_key(keys, torch.zeros((), dtype=torch.int64, device=device))
    keys = keys.repeat_interleave(BLOCK)[:numel]
    index = torch.arange(numel, device=device) % BLOCK
    step = index % (BLOCK // 2) if of_weights else index
    x = (step + (keys & _WORD)) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ ((keys >> 32) & _WORD) ^ (x >> 15)) * 0x846CA68B) & _WORD
    x = x ^ (x >> 16)
    return torch.where(index < BLOCK // 2, x, x >> 16) if of_weights else x


def _block_key(key: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    x = key + (block + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return 64-bit integers shifted to the right, with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def to_bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return float32 values rounded stochastically, by the lower 16 of their random bits."""
    bits = values.view(torch.int32).long() & _WORD
    magnitude = bits & 0x7FFFFFFF
    rounded = torch.where(magnitude < 0x7F800000, bits + (random & 0xFFFF), bits)
    high = torch.where(magnitude > 0x7F800000, 0x7FC0, rounded >> 16)
    return high.to(torch.int32).to(torch.int16).view(torch.bfloat16)
