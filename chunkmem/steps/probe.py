"""Bytes of non-model data on DEVICE: activations, temporaries, gradients under way; seen at operator boundaries."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch


class LiveStorageProbe:
    """Counts the storages that operators have made and that are still alive.

    A storage counts once, however many views it has, from the end of the operator that returned it to its release in
    C++; autograd may hold it without any Python object. Not counted: what was there before the operator (parameters,
    batches, and views of them), what an operator makes and drops within itself, what lies within a sparse tensor that
    it returns, and memory that no operator made, as in `torch.tensor` of Python numbers. A storage counts with the
    size it had when it was first seen. Under `torch.inference_mode` whole compositions are one operator: `linear`,
    `cross_entropy`. Compiled code is seen as far as it calls operators.
    """

    def __init__(self, is_chunk: Callable[[int], bool]) -> None:
        """Count nothing yet; `is_chunk` tells by a storage's `_cdata` which ones belong to chunks."""
        self._is_chunk = is_chunk
        self._stopped = False
        self._live: dict[int, _Sighting] = {}
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        """Where the references of released storages land, from any thread; a C function is all that runs then."""
        self._now_nbytes = 0
        self._peak_nbytes = 0

    def take_peak_nbytes(self) -> int:
        """Return the highest sum of live storages since the last call; 0 once stopped."""
        if self._stopped:
            return 0
        self._bury()
        peak, self._peak_nbytes = self._peak_nbytes, self._now_nbytes
        return peak

    def stop(self) -> None:
        """Forget all storages and count no more."""
        self._stopped = True
        # What the caller gave may hold a whole model.
        self._is_chunk = bool
        # References that are gone themselves call nobody back.
        self._live.clear()
        self._dead.clear()

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Count a storage no more: it is part of a chunk."""
        sighting = self._live.get(int(storage._cdata))
        if sighting is not None and sighting() is storage:
            self._now_nbytes -= sighting.nbytes
            sighting.nbytes = 0

    def count_again(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was part of a chunk, and is others' now."""
        self.leave_out(storage)
        self._count(int(storage._cdata), storage)
        self._peak_nbytes = max(self._peak_nbytes, self._now_nbytes)

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and count the storages it has made."""
        result = operator(*args, **kwargs)
        given: set[int] | None = None
        for storage in _storages(result) if not self._stopped else ():
            key = int(storage._cdata)
            sighting = self._live.get(key)
            # The address may be that of an earlier storage which died unnoticed; the Python object tells them apart.
            if sighting is not None and sighting() is storage:
                continue
            if given is None:
                given = {int(old._cdata) for old in _storages((args, kwargs))}
            # Whether an operator returns a view or a new tensor is not always in its schema: reshape may do either.
            if key not in given and not self._is_chunk(key):
                self._count(key, storage)
        self._peak_nbytes = max(self._peak_nbytes, self._now_nbytes)
        return result

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        self._bury()
        sighting = _Sighting(storage, self._dead.append)
        sighting.key, sighting.nbytes = key, storage.nbytes()
        self._live[key] = sighting
        self._now_nbytes += sighting.nbytes

    def _bury(self) -> None:
        while self._dead:
            sighting = self._dead.popleft()
            if isinstance(sighting, _Sighting):
                self._now_nbytes -= sighting.nbytes
                if self._live.get(sighting.key) is sighting:
                    del self._live[sighting.key]


class _Sighting(weakref.ref[torch.UntypedStorage]):
    """A storage that counts. torch keeps one Python object for a storage as long as the storage itself lives."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors that an operator takes or returns; some have none: sparse, wrapped, meta."""
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # parameters that serve themselves would be brought
            if value.layout is not torch.strided or value.is_meta:
                return
            try:
                storage = value.untyped_storage()
            except (NotImplementedError, RuntimeError):
                return
        yield storage
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(tuple(value.values()))
