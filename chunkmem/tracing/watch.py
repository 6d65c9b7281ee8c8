"""The probes of one recorded step, begun and ended together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chunkmem.runtime.tiers import Tiers
from chunkmem.tracing.probe import AllocatorProbe, LiveStorageProbe, NonModelProbe
from chunkmem.tracing.sampler import SamplingThread, reader_for


class Watch:
    """Bytes of non-model data on DEVICE: at operator boundaries, and by a sampling thread if one is wanted."""

    def __init__(self, tiers: Tiers, *, is_chunk: Callable[[int], bool], sample: bool) -> None:
        """Begin to watch.

        Args:
            tiers: whose chunks do not count.
            is_chunk: tells whether a storage, by its `_cdata`, is chunk memory.
            sample: run a thread, too.
        """
        self._probe: NonModelProbe
        if tiers.meter is not None:
            self._probe = AllocatorProbe(tiers.meter)
        else:
            self._probe = LiveStorageProbe(is_chunk)
        self._meter = tiers.meter
        self._begin_nbytes = 0 if self._meter is None else self._meter.now_nbytes
        self._sampler: SamplingThread | None = None
        self._base_nbytes = 0
        self._sampled_nbytes = 0
        """What the thread had seen last when it was ended."""
        self._sampling_interval_s = 0.0
        """The longest interval that it had by then."""
        if sample:
            read_nbytes = reader_for(tiers.compute)
            self._base_nbytes = read_nbytes()
            self._sampler = SamplingThread(read_nbytes)
            self._sampler.start()

    @property
    def run_operator(self) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None:
        """Calls an operator and counts its memory; None where the allocator counts by itself."""
        return self._probe.run if isinstance(self._probe, LiveStorageProbe) else None

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Count a storage no more that becomes part of a chunk; the allocator's count is less what chunks have."""
        if isinstance(self._probe, LiveStorageProbe):
            self._probe.leave_out(storage)

    def count_again(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is no part of a chunk any more; the allocator's count has it already."""
        if isinstance(self._probe, LiveStorageProbe):
            self._probe.count_again(storage)

    @property
    def sampling_interval_s(self) -> float:
        """Longest time between two looks of the sampling thread, in seconds; 0 if none ran. Stays after `stop`."""
        return self._sampling_interval_s if self._sampler is None else self._sampler.longest_interval_s

    def take_peaks(self) -> tuple[int, int]:
        """Return the highest bytes since the last call: at operator boundaries, and as sampled above the start."""
        sampled, self._sampled_nbytes = self._sampled_nbytes, 0
        if self._sampler is not None:
            sampled = max(0, self._sampler.take_peak_nbytes() - self._base_nbytes)
        return self._probe.take_peak_nbytes(), sampled

    def left_nbytes(self) -> int:
        """Return the non-model bytes on an accelerator that were not there at the start: what each later step finds."""
        return 0 if self._meter is None else max(0, self._meter.now_nbytes - self._begin_nbytes)

    def end_sampling(self) -> None:
        """End the thread, if there is one; what it has seen is in the next `take_peaks`."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            self._sampled_nbytes = max(0, sampler.take_peak_nbytes() - self._base_nbytes)
            self._sampling_interval_s = sampler.longest_interval_s
            sampler.stop()

    def stop(self) -> None:
        """End the thread, if there is one, and count no more. May be called again."""
        self._probe.stop()
        self.end_sampling()
