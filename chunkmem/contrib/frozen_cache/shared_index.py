"""Which sample's value is at which place, in memory that several processes have, under a lock that they share.

All numbers are of 8 bytes, and 0 is nobody: places count from 1. Those on HOST come first, those on DISK after them.

    header    one page: sizes, the ends of lists, the form of a value
    records   one for each place: key, what its value is of, neighbours in the lists it is in
    buckets   first record of those whose keys have the same remainder

A place is in its bucket's list and in the list of its tier, from the least recently used on; or it is free, in a list
of those; or it was never used. A process that ends in the middle of a change leaves the mark `CHANGING`: the next one
that comes forgets everything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import torch

from chunkmem.contrib.frozen_cache.kept import Kept, ValueForm
from chunkmem.contrib.frozen_cache.shared_memory import SharedFile

HEADER_NBYTES = 4096
_FORM_AT, _FORM_NBYTES = 1024, 2048
_CHANGING, _GENERATION, _HOST_ROOM, _DISK_ROOM, _NUM_BUCKETS, _FORM_LENGTH, _VALUE_NBYTES = range(7)
_FRESH, _FREE, _OLDEST, _NEWEST, _COUNT = 8, 10, 12, 14, 16
"""Of HOST, and one further on of DISK: places that were ever used, the first free one, ends of a list, its length."""
_RECORD = 10
_KEY, _TAG, _CRC, _DEPTH, _RANK, _NEXT, _OLDER, _NEWER = 0, 2, 4, 5, 6, 7, 8, 9
HOST, DISK = 0, 1


class SharedIndex:
    """The index of a shared cache. The caller holds the lock, alone if the call changes something."""

    def __init__(self, file: SharedFile) -> None:
        """Use `file`, of at least `HEADER_NBYTES`."""
        self._file = file
        self._generation = -1
        self._form: ValueForm | None = None
        self._map()

    def _map(self) -> None:
        self._numbers = memoryview(self._file.map()).cast("q")
        self._generation = self._numbers[_GENERATION]
        self._first_record = HEADER_NBYTES // 8 - _RECORD  # places count from 1
        self._first_bucket = HEADER_NBYTES // 8 + self._num_places * _RECORD
        length = self._numbers[_FORM_LENGTH]
        raw = self._numbers.cast("B")[_FORM_AT : _FORM_AT + length].tobytes()
        self._form = None
        if length:
            shape, dtype = json.loads(raw)
            self._form = ValueForm(torch.Size(shape), getattr(torch, dtype))

    @property
    def _num_places(self) -> int:
        return self._numbers[_HOST_ROOM] + self._numbers[_DISK_ROOM]

    @property
    def is_whole(self) -> bool:
        """No process has ended in the middle of a change."""
        return not self._numbers[_CHANGING]

    def begin(self) -> None:
        """Look at what other processes have made of it."""
        if self._numbers[_GENERATION] != self._generation:
            self._map()

    def mark(self, *, is_changing: bool) -> None:
        """Say that a change begins, or is complete."""
        self._numbers[_CHANGING] = is_changing

    @property
    def form(self) -> ValueForm | None:
        """Of all values; None: there is none yet."""
        return self._form

    def count(self, tier: int) -> int:
        """Return how many values are on a tier."""
        return self._numbers[_COUNT + tier]

    def clear(self, form: ValueForm | None, host_room: int, disk_room: int) -> None:
        """Forget everything; values to come have this form, and there are so many places for them."""
        generation = self._numbers[_GENERATION] + 1
        num_buckets = max(1, host_room + disk_room)
        nbytes = HEADER_NBYTES + 8 * (_RECORD * (host_room + disk_room) + num_buckets)
        self._file.resize(HEADER_NBYTES)
        self._file.resize(nbytes)
        numbers = self._numbers
        said = b"" if form is None else json.dumps([list(form.shape), str(form.dtype).removeprefix("torch.")]).encode()
        numbers.cast("B")[_FORM_AT : _FORM_AT + len(said)] = said
        for at, value in (
            (_HOST_ROOM, host_room),
            (_DISK_ROOM, disk_room),
            (_NUM_BUCKETS, num_buckets),
            (_FORM_LENGTH, len(said)),
            (_VALUE_NBYTES, 0 if form is None else form.nbytes),
            *((at + tier, 0) for at in (_FRESH, _FREE, _OLDEST, _NEWEST, _COUNT) for tier in (HOST, DISK)),
        ):
            numbers[at] = value
        numbers[_GENERATION] = generation
        self._map()

    # Records.

    def find(self, key: bytes) -> int:
        """Return the place of a value; 0: it is not there."""
        if self._form is None:
            return 0
        first, second = struct.unpack("qq", key)
        at = self._numbers[self._bucket(first)]
        while at:
            record = self._record(at)
            if self._numbers[record] == first and self._numbers[record + 1] == second:
                return at
            at = self._numbers[record + _NEXT]
        return 0

    def kept(self, place: int) -> Kept:
        """Return what the value at a place is of."""
        record = self._record(place)
        tag = struct.pack("qq", *self._numbers[record + _TAG : record + _TAG + 2])
        depth, crc, rank = (self._numbers[record + at] for at in (_DEPTH, _CRC, _RANK))
        return Kept(depth, crc, tag, rank)

    def tier(self, place: int) -> int:
        """Return the tier of a place."""
        return HOST if place <= self._numbers[_HOST_ROOM] else DISK

    def number(self, place: int) -> int:
        """Return the number of a place on its tier, from 0."""
        return place - 1 - (self._numbers[_HOST_ROOM] if self.tier(place) == DISK else 0)

    def oldest(self, tier: int) -> int:
        """Return the place on a tier whose value was used least recently; 0: there is none."""
        return self._numbers[_OLDEST + tier]

    def take(self, tier: int) -> int:
        """Return a place on a tier that has no value; 0: there is none. It is in no list until `put` or `give`."""
        at = self._numbers[_FREE + tier]
        if at:
            self._numbers[_FREE + tier] = self._numbers[self._record(at) + _NEXT]
            return at
        fresh, room = self._numbers[_FRESH + tier], self._numbers[_HOST_ROOM + tier]
        if fresh == room:
            return 0
        self._numbers[_FRESH + tier] = fresh + 1
        return fresh + 1 + (self._numbers[_HOST_ROOM] if tier == DISK else 0)

    def give(self, place: int) -> None:
        """Take such a place back."""
        tier = self.tier(place)
        self._numbers[self._record(place) + _NEXT] = self._numbers[_FREE + tier]
        self._numbers[_FREE + tier] = place

    def put(self, place: int, key: bytes, kept: Kept) -> None:
        """Say whose value a place has, which is the one used last."""
        record = self._record(place)
        self._numbers[record + _KEY], self._numbers[record + _KEY + 1] = struct.unpack("qq", key)
        self.describe(place, kept)
        bucket = self._bucket(self._numbers[record])
        self._numbers[record + _NEXT] = self._numbers[bucket]
        self._numbers[bucket] = place
        self._append(place)

    def describe(self, place: int, kept: Kept) -> None:
        """Say what the value at a place is of."""
        record = self._record(place)
        self._numbers[record + _TAG], self._numbers[record + _TAG + 1] = struct.unpack("qq", kept.tag)
        for at, value in ((_CRC, kept.crc), (_DEPTH, kept.depth), (_RANK, kept.rank)):
            self._numbers[record + at] = value

    def remove(self, place: int) -> bytes:
        """Forget the value at a place, which is in no list afterwards; return its key."""
        record = self._record(place)
        key = struct.pack("qq", *self._numbers[record + _KEY : record + _KEY + 2])
        before = self._bucket(self._numbers[record])
        while self._numbers[before] != place:
            before = self._record(self._numbers[before]) + _NEXT
        self._numbers[before] = self._numbers[record + _NEXT]
        self._cut(place)
        return key

    def use(self, places: Sequence[int]) -> None:
        """Values were used now, in this order."""
        for place in places:
            self._cut(place)
            self._append(place)

    def _append(self, place: int) -> None:
        record, tier = self._record(place), self.tier(place)
        newest = self._numbers[_NEWEST + tier]
        self._numbers[record + _OLDER], self._numbers[record + _NEWER] = newest, 0
        self._numbers[self._record(newest) + _NEWER if newest else _OLDEST + tier] = place
        self._numbers[_NEWEST + tier] = place
        self._numbers[_COUNT + tier] += 1

    def _cut(self, place: int) -> None:
        record, tier = self._record(place), self.tier(place)
        older, newer = self._numbers[record + _OLDER], self._numbers[record + _NEWER]
        self._numbers[self._record(older) + _NEWER if older else _OLDEST + tier] = newer
        self._numbers[self._record(newer) + _OLDER if newer else _NEWEST + tier] = older
        self._numbers[_COUNT + tier] -= 1

    def _record(self, place: int) -> int:
        return self._first_record + place * _RECORD

    def _bucket(self, first: int) -> int:
        return self._first_bucket + first % self._numbers[_NUM_BUCKETS]
