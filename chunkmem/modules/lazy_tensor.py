"""Tensors that are read when somebody uses them: a state of a model that takes no second copy of the model.

A lazy tensor is put together of pieces. Each lies in a source: a slot of a chunk, or an entry of a checkpoint's files.
Joining lazy tensors (`torch.cat`) and taking parts of them (`tensor[2:4, :8]`) reads nothing and gives lazy ones: so
tiles of a wide layer become the layer's weight, and it becomes tiles again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import add, lt, sub
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from chunkmem.data.errors import StateError
from chunkmem.modules.tensor_functions import METADATA, is_write


class _Nowhere:
    """The device of a storage that has not been read. The format before torch 1.6 has no place for it: an error."""

    type = "lazy"


class LazyUntypedStorage:
    """As much of `torch.UntypedStorage` as `torch.save` asks for."""

    device = _Nowhere()

    def __init__(self, read: Callable[[], torch.Tensor], nbytes: int) -> None:
        self._read = read
        self._nbytes = nbytes

    @property
    def _cdata(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._nbytes

    def data_ptr(self) -> int:
        """Return that there is no memory."""
        return 0

    def cpu(self) -> torch.UntypedStorage:
        """Read it: torch writes all storages after it has pickled, one by one, those that are not in RAM by this."""
        return self._read().contiguous().untyped_storage()


class LazyTypedStorage(torch.storage.TypedStorage):
    """The same with a dtype, which is what a pickled tensor has."""

    def __new__(cls, read: Callable[[], torch.Tensor], dtype: torch.dtype, nbytes: int) -> LazyTypedStorage:
        """Make one of what `read` returns, contiguous."""
        return object.__new__(cls)

    def __init__(self, read: Callable[[], torch.Tensor], dtype: torch.dtype, nbytes: int) -> None:
        self._untyped_storage: Any = LazyUntypedStorage(read, nbytes)
        self.dtype = dtype
        self._fake_device = torch.device("cpu")

    def __reduce__(self) -> Any:
        """Be read by picklers that are not torch's."""
        storage = self._untyped_storage.cpu()
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True).__reduce__()


def pickled(read: Callable[[], torch.Tensor], like: torch.Tensor) -> tuple[Any, ...]:
    """Return what pickles an ordinary tensor that `read` returns; shape and dtype are those of `like`."""
    shape = tuple(like.shape)
    stride = torch.empty(shape, device="meta").stride()
    storage = LazyTypedStorage(read, like.dtype, like.dtype.itemsize * torch.Size(shape).numel())
    return torch._utils._rebuild_tensor_v2, (storage, 0, shape, stride, False, OrderedDict())


_TENSOR: Any = torch.Tensor
_SAME = frozenset({_TENSOR.clone, _TENSOR.detach, _TENSOR.contiguous, _TENSOR.data.__get__, torch.clone, torch.detach})
"""What gives the same values."""
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that nothing else sees the operators of."""
_MEMORY = frozenset({_TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage})
"""What asks for memory, which would be that of a copy that is gone at once."""
Extent = tuple[int, ...]
"""Offsets, or a shape."""


class Source(ABC):
    """Has values, somewhere."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """This rank can read them without the others."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where they are; what is together is read together."""

    @abstractmethod
    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        """Return a copy of a part of them on the CPU, where they are here."""

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        """Return the same on every rank; all of them call it."""
        return self.read_here(start, shape)

    def read_into(self, start: Extent, into: torch.Tensor) -> None:
        """Write a part of them to `into`, which has its shape, of any dtype and device; all ranks call it."""
        into.copy_(self.read(start, tuple(into.shape)))


@dataclass(frozen=True)
class Piece:
    """A part of a lazy tensor, in one source."""

    source: Source
    start: Extent
    """In the source."""
    offsets: Extent
    """In the tensor."""
    shape: Extent

    def read_here(self) -> torch.Tensor:
        """Return a copy of its values, which have to be here."""
        return self.source.read_here(self.start, self.shape)

    def moved(self, by: Iterable[int]) -> Piece:
        """Return the same for a tensor that has what this one has at these offsets."""
        return replace(self, offsets=tuple(map(add, self.offsets, by)))


class LazyTensor(torch.Tensor):
    """Shape and dtype of values that are elsewhere; an operator gets a copy, which is read for it.

    A write would be to that copy, so it is a StateError. `torch.save` reads one after the other, as it writes them.
    """

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, pieces: Sequence[Piece], shape: Extent, dtype: torch.dtype) -> LazyTensor:
        """Make one of pieces that cover all of it."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.pieces = tuple(pieces)
        return made

    @classmethod
    def of(cls, source: Source, shape: Extent, dtype: torch.dtype) -> LazyTensor:
        """Make one of all that a source has."""
        origin = (0,) * len(shape)
        return cls([Piece(source, origin, origin, tuple(shape))], tuple(shape), dtype)

    def read(self) -> torch.Tensor:
        """Return an ordinary copy; over ranks, all of them call it. Raises what the sources do."""
        first, *others = self.pieces
        if not others:
            return first.source.read(first.start, first.shape)
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(values)
        return values

    def read_into(self, into: torch.Tensor) -> None:
        """Write the values to a tensor of the same shape; where it can be, with none in between. Raises as `read`."""
        for piece in self.pieces:
            piece.source.read_into(piece.start, into[slices(piece.offsets, piece.shape)])

    def part(self, start: Extent, shape: Extent) -> LazyTensor:
        """Return a part of it, lazily."""
        found = []
        for piece in self.pieces:
            begin = tuple(map(max, start, piece.offsets))
            end = tuple(map(min, map(add, start, shape), map(add, piece.offsets, piece.shape)))
            if all(map(lt, begin, end)):
                in_piece = map(sub, begin, piece.offsets)
                place = tuple(map(add, piece.start, in_piece)), tuple(map(sub, begin, start))
                found.append(Piece(piece.source, *place, tuple(map(sub, end, begin))))
        return LazyTensor(found, shape, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _TENSOR.is_pinned:
            return False
        if func in _SAME:
            return args[0]
        if func is torch.cat and (joined := _joined(*args, **kwargs)) is not None:
            return joined
        if func is _TENSOR.__getitem__ and (bounds := _bounds(args[0].shape, args[1])) is not None:
            return args[0].part(*bounds)
        if func in _MEMORY:
            raise StateError(f"{func.__name__} of a lazy value, which has no memory; take that of value.read()")
        if isinstance(kwargs.get("out"), cls) or (is_write(func) and isinstance(args[0], cls)):
            name = getattr(func, "__name__", func)
            raise StateError(f"{name} of a lazy value, which is read by each use of it: write to value.read()")
        if func is _TENSOR.copy_ and type(args[0]) in _ORDINARY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        read, options = tree_map_only(cls, lambda lazy: lazy.read(), (args, kwargs))
        return func(*read, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls) and args[0].shape == args[1].shape:
            args[1].read_into(args[0])
            return args[0]
        read, options = tree_map_only(cls, lambda lazy: lazy.read(), (args, kwargs or {}))
        return func(*read, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickled(self.read, self)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.read()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype})"


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """Run `into.copy_(values)` of a tensor or a lazy one of that shape, also where torch asks no class for operators.

    That is so inside of `runtime_mode`. Raises what reading does.
    """
    if isinstance(values, LazyTensor):
        values.read_into(into)
    else:
        into.copy_(values)


def slices(offsets: Extent, shape: Extent) -> tuple[slice, ...]:
    """Return what selects a part of a tensor."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0, **options: Any) -> LazyTensor | None:
    """Return what `torch.cat` would; None if it has to read for that."""
    lazy = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
    if options or len(lazy) < len(tensors) or len({tensor.dtype for tensor in lazy}) > 1:
        return None
    pieces: list[Piece] = []
    offsets, shape = [0] * lazy[0].ndim, list(lazy[0].shape)
    for tensor in lazy:
        pieces += [piece.moved(offsets) for piece in tensor.pieces]
        offsets[dim] += tensor.shape[dim]
    shape[dim] = offsets[dim]
    return LazyTensor(pieces, tuple(shape), lazy[0].dtype)


def _bounds(shape: Extent, index: object) -> tuple[Extent, Extent] | None:
    """Return offsets and shape of what slices select; None if they are more than that."""
    given = index if isinstance(index, tuple) else (index,)
    if len(given) > len(shape) or not all(isinstance(each, slice) and each.step in (None, 1) for each in given):
        return None
    whole = (*given, *(slice(None),) * (len(shape) - len(given)))
    ends = [each.indices(size)[:2] for each, size in zip(whole, shape, strict=True)]
    return tuple(start for start, _ in ends), tuple(max(0, stop - start) for start, stop in ends)
