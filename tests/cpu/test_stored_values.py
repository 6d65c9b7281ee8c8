"""Values in files: found in archives of `torch.save`, and read straight to where they are wanted."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.checkpoints import stored_values
from chunkmem.checkpoints.stored_values import StoredValues, find_values
from chunkmem.modules.lazy_tensor import LazyTensor, Source
from tests.helpers.spread import spread

BEFORE = 13
"""Bytes of a file before an archive: its values are not aligned."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def archive(path: Path, values: torch.Tensor) -> int:
    """Write a file with an archive in the middle; return the bytes of the archive."""
    file = io.BytesIO()
    torch.save(values, file)
    path.write_bytes(b"b" * BEFORE + file.getvalue() + b"a" * 7)
    return len(file.getvalue())


def found_in(path: Path, values: torch.Tensor) -> StoredValues | None:
    nbytes = archive(path, values)
    found = find_values(path, offset=BEFORE, nbytes=nbytes)
    if found is not None:
        like = torch.empty(found.shape, dtype=found.dtype, device="meta")
        assert find_values(path, offset=BEFORE, nbytes=nbytes, like=like) == found
    return found


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, shape, generator=draw).to(dtype)


def bytes_of(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@spread(shape=((), (0,), (3, 0), (1,), (5,), (7, 3), (2, 3, 4), (1 << 19, 3)), dtype=DTYPES)
def test_they_are_found_and_have_their_checksum(shape: Sequence[int], dtype: torch.dtype, tmp_path: Path) -> None:
    values = numbers(*shape, dtype=dtype)
    found = found_in(tmp_path / "file", values)
    assert found is not None
    assert (found.shape, found.dtype) == (tuple(shape), dtype)
    assert found.checksum() == found.archived_crc == zlib.crc32(bytes_of(values))
    read = torch.zeros(shape, dtype=dtype)
    found.read_into((0,) * len(shape), read)
    assert torch.equal(read, values)


@pytest.mark.parametrize("of", [lambda whole: whole.t(), lambda whole: whole[1:], lambda whole: whole[:, :2]])
def test_values_in_another_order_or_with_gaps_are_left_to_torch(
    of: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    assert found_in(tmp_path / "file", of(numbers(4, 5))) is None


def deflated(path: Path, nbytes: int) -> int:
    whole = io.BytesIO(path.read_bytes()[BEFORE : BEFORE + nbytes])
    again = io.BytesIO()
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    path.write_bytes(b"b" * BEFORE + again.getvalue())
    return len(again.getvalue())


def test_an_archive_of_something_else_is_left_to_torch(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = io.BytesIO()
    torch.save([numbers(64), numbers(64)], file)  # data/0 and data/1
    path.write_bytes(file.getvalue())
    with pytest.raises(AttributeError, match="list"):
        find_values(path, offset=0, nbytes=len(file.getvalue()))
    nbytes = archive(path, numbers(64))
    assert find_values(path, offset=BEFORE, nbytes=nbytes) is not None
    for shape, dtype in ((63, torch.float32), (64, torch.bfloat16)):
        like = torch.empty(shape, dtype=dtype, device="meta")
        assert find_values(path, offset=BEFORE, nbytes=nbytes, like=like) is None
    nbytes = deflated(path, nbytes)
    assert find_values(path, offset=BEFORE, nbytes=nbytes) is None


# Parts.

INTO: dict[str, Callable[[Sequence[int], torch.dtype], torch.Tensor]] = {
    "alike": lambda shape, dtype: torch.zeros(*shape, dtype=dtype),
    "wider": lambda shape, dtype: torch.zeros(*shape, dtype=torch.float64),
    "narrower": lambda shape, dtype: torch.zeros(*shape, dtype=torch.bfloat16),
    "rows of a larger one": lambda shape, dtype: torch.zeros(*(size + 2 for size in shape), dtype=dtype)[
        tuple(slice(1, 1 + size) for size in shape)
    ],
    "permuted": lambda shape, dtype: torch.zeros(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape)))),
}
SHAPES = ((11,), (6, 5), (4, 3, 5), (2, 3, 2, 3))


def parts(shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All offsets and shapes of parts of a tensor, some left out."""
    ranges = [[(a, b - a) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    every = [(tuple(a for a, _ in each), tuple(n for _, n in each)) for each in itertools.product(*ranges)]
    return every[:: max(1, len(every) // 200)] + every[-1:]


@spread(shape=SHAPES, into=INTO, piece_nbytes=(8, 40, 1 << 20), dtype=(torch.float32, torch.int16))
def test_any_part_is_read_to_anywhere(
    shape: tuple[int, ...],
    into: str,
    piece_nbytes: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_values, "PIECE_NBYTES", piece_nbytes)
    values = numbers(*shape, dtype=dtype)
    found = found_in(tmp_path / "file", values)
    assert found is not None
    for start, size in parts(shape):
        target = INTO[into](size, dtype)
        around = target.untyped_storage().nbytes()
        found.read_into(start, target)
        wanted = values[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]
        assert torch.equal(target, wanted.to(target.dtype)), (start, size)
        assert target.untyped_storage().nbytes() == around
        if into == "rows of a larger one":
            assert target._base is not None
            assert target._base.count_nonzero() == wanted.count_nonzero()


def test_what_the_file_gives_goes_straight_to_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of the same dtype: in one call, with no memory in between."""
    values = numbers(64, 33)
    found = found_in(tmp_path / "file", values)
    assert found is not None
    read = torch.zeros(40, 33)
    version = read._version
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", None)
        found.read_into((8, 0), read)
    assert torch.equal(read, values[8:48])
    assert read._version > version  # autograd is to notice, as of `copy_`


def test_one_element_of_a_column(tmp_path: Path) -> None:
    """It is contiguous, whatever its strides are."""
    found = found_in(tmp_path / "file", numbers(5))
    assert found is not None
    column = torch.zeros(4, 2)
    found.read_into((3,), column[2:3, 1])
    assert column.flatten().tolist() == [0, 0, 0, 0, 0, numbers(5)[3], 0, 0]


def test_the_system_may_give_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers(300, 7)
    found = found_in(tmp_path / "file", values)
    assert found is not None
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(descriptor, [memoryview(buffers[0])[:5]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    read, wide = torch.zeros(300, 7), torch.zeros(300, 7, dtype=torch.float64)
    for into in (read, wide):
        found.read_into((0, 0), into)
        assert torch.equal(into, values.to(into.dtype))
    assert found.checksum() == zlib.crc32(bytes_of(values))


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    values = numbers(300, 7)
    found = found_in(tmp_path / "file", values)
    assert found is not None
    os.truncate(tmp_path / "file", found.offset + 100)
    for read in (found.checksum, lambda: found.read_into((0, 0), torch.zeros(300, 7))):
        with pytest.raises(EOFError, match=rf"has {found.offset + 100} bytes, and values end at \d+"):
            read()


# `copy_` of lazy values.


class Stored(Source):
    is_here = True
    place = ""

    def __init__(self, found: StoredValues) -> None:
        self.found = found
        self.num_copies = 0

    def read_here(self, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        self.num_copies += 1
        values = torch.zeros(*shape)
        self.found.read_into(tuple(start), values)
        return values

    def read_into(self, start: Sequence[int], into: torch.Tensor) -> None:
        self.found.read_into(tuple(start), into)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = found_in(tmp_path / "file", numbers(6, 5))
    assert found is not None
    return Stored(found)


def test_copying_lazy_values_reads_them_in_place(stored: Stored) -> None:
    lazy, values = LazyTensor.of(stored, (6, 5), torch.float32), numbers(6, 5)
    param, low = nn.Parameter(torch.zeros(6, 5)), torch.zeros(6, 5, dtype=torch.bfloat16)
    version = param._version
    with torch.no_grad():
        assert param.copy_(lazy) is param
    assert param._version > version
    assert low.copy_(lazy, non_blocking=True) is low
    assert torch.equal(param, values)
    assert torch.equal(low, values.bfloat16())
    joined = torch.cat([lazy[4:], lazy[:3]])
    assert torch.equal(torch.zeros(5, 5).copy_(joined), torch.cat([values[4:], values[:3]]))
    with torch.inference_mode():
        assert torch.equal(torch.zeros(6, 5).copy_(lazy), values)
    assert stored.num_copies == 0
    assert torch.equal(torch.zeros(2, 6, 5).copy_(lazy), values.expand(2, 6, 5))
    assert stored.num_copies == 1
    with pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad"):
        param.copy_(lazy)
    with pytest.raises(RuntimeError, match=r"must match the size"):
        torch.zeros(6, 4).copy_(lazy)
    with pytest.raises(chunkmem.StateError, match=r"copy_ of a lazy value"):
        lazy.copy_(values)
