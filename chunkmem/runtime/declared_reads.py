"""Which chunk's memory a storage has, and whether it may be used now."""

from __future__ import annotations

from chunkmem.runtime.chunk import Chunk


class DeclaredReads:
    """Tells by a storage's identity whether its memory may be used now."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunk] = {}
        self._away: dict[int, str] = {}

    def add(self, storage_id: int, chunk: Chunk, *, placeholder: int, name: str) -> None:
        """Take in the storages of a parameter and of its placeholder."""
        self._chunks[storage_id] = chunk
        self._away[placeholder] = name

    def replace(self, before: int, now: int) -> None:
        """A parameter has another storage."""
        # The identity of a storage that is gone may soon be that of a tensor of the user.
        self._chunks[now] = self._chunks.pop(before)

    def is_chunk(self, storage_id: int) -> bool:
        """Tell whether parameters live in a storage."""
        return storage_id in self._chunks or storage_id in self._away

    def chunk_in(self, storage_id: int) -> Chunk | None:
        """Return the chunk whose memory a storage has; None if it has none, as a placeholder has not."""
        return self._chunks.get(storage_id)

    def undeclared(self, storage_id: int) -> str | None:
        """Return the name of what lies in a storage nobody declared to be reading; None if it may be used."""
        chunk = self._chunks.get(storage_id)
        if chunk is None:
            return self._away.get(storage_id)
        replica = chunk.replicas.get(chunk.compute_tier)
        return None if replica is not None and replica.pins > 0 else chunk.label

    def note_write(self, storage_id: int) -> None:
        """An operator writes to a storage. What a module does once past autograd's counters, it may do in each step."""
        chunk = self._chunks.get(storage_id)
        if chunk is not None:
            chunk.is_written_past = True
