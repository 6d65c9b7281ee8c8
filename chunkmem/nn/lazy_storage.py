"""What `torch.save` pickles in place of a storage: its bytes are read when they are written to the file.

torch collects all storages while it pickles, and writes them afterwards, one after the other. It takes those that are
not in RAM by calling `cpu()`: that is where a lazy one is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


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
        """Read it."""
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
