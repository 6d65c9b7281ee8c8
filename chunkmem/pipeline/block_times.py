"""How long the blocks of a pipeline compute, in its last steps.

[Note: Block times] Of the calls of a block for the micro-batches of a step the median counts: the first one may wait
for its weights. Backward is timed as schedules call it, for all blocks of a stage together, and divided over these in
proportion to their forward. A block passes it on if something before it is trained, which takes about as long as
forward, and has gradients of its own if it is trained itself, which takes as long again. So times of steps in which
other blocks were frozen are scaled.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from torch import nn

from chunkmem.nn.values import tensors_in
from chunkmem.runtime.timestamps import Clock, Interval

_NUM_STEPS = 3
"""Of which the median counts."""
_PER_FORWARD = (0.0, 1.0, 2.0)
"""Time of backward by what it computes of a block: gradients of nothing, of its inputs or its weights, of both."""


@dataclass
class _Step:
    """What was timed in one."""

    num_samples: int
    num_parts: int
    kinds: tuple[int, ...]
    """By block: what backward computes, as an index of `_PER_FORWARD`."""
    forward: dict[int, list[Interval]] = field(default_factory=dict)
    """By module."""
    backward: dict[tuple[int, ...], list[Interval]] = field(default_factory=dict)
    """By modules that were timed together."""
    returned_nbytes: dict[int, int] = field(default_factory=dict)
    """By block, of all micro-batches."""


@dataclass(frozen=True)
class SampleCost:
    """What a block takes for one sample."""

    forward_s: float
    backward_s: float
    output_nbytes: int


class BlockTimes:
    """Timestamps around calls of blocks, read when somebody asks."""

    def __init__(self, chain: Sequence[Sequence[nn.Module]], clock: Clock) -> None:
        """Time nothing yet.

        Args:
            chain: the modules of each block, in the order of forward.
            clock: of what the device computes.
        """
        self._chain = [list(modules) for modules in chain]
        self._block = {id(module): at for at, modules in enumerate(self._chain) for module in modules}
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=_NUM_STEPS)
        self._now: _Step | None = None

    def begin(self, *, num_samples: int, num_parts: int) -> None:
        """A step begins.

        Args:
            num_samples: of its batch.
            num_parts: micro-batches of it.
        """
        self._now = _Step(num_samples, num_parts, self.kinds())

    def end(self) -> None:
        """The step is over, and counts."""
        if self._now is not None:
            self._steps.append(self._now)
        self._now = None

    @property
    def num_samples(self) -> int:
        """Of the last step's batch; 0: there was none."""
        return self._steps[-1].num_samples if self._steps else 0

    @contextlib.contextmanager
    def forward(self, module: nn.Module | None) -> Iterator[None]:
        """Time a call for one micro-batch; None: the loss, which counts to the last block."""
        if self._now is None:
            yield
            return
        start = self._clock.timestamp()
        yield
        key = -1 if module is None else id(module)
        self._now.forward.setdefault(key, []).append(Interval(start, self._clock.timestamp()))

    @contextlib.contextmanager
    def backward(self, modules: Sequence[nn.Module | None]) -> Iterator[None]:
        """Time the backward of these modules for one micro-batch; None is the loss."""
        if self._now is None:
            yield
            return
        start = self._clock.timestamp()
        yield
        key = tuple(id(module) for module in modules)
        self._now.backward.setdefault(key, []).append(Interval(start, self._clock.timestamp()))

    def returned(self, module: nn.Module, value: Any) -> None:
        """Note what a module returns for a micro-batch."""
        at = self._block.get(id(module), -1)
        if self._now is not None and at >= 0 and module is self._chain[at][-1]:
            nbytes = sum(tensor.nbytes for tensor in tensors_in(value))
            self._now.returned_nbytes[at] = self._now.returned_nbytes.get(at, 0) + nbytes

    def kinds(self) -> tuple[int, ...]:
        """Return by block what backward computes as things are: an index of `_PER_FORWARD`."""
        found, passes = [], False
        for modules in self._chain:
            is_trained = any(param.requires_grad for module in modules for param in module.parameters())
            found.append(int(is_trained) + int(passes))
            passes = passes or is_trained
        return tuple(found)

    def per_sample(self) -> Mapping[int, SampleCost]:
        """Return by block, of those that this rank has run, what one sample takes as things are now."""
        same = [step for step in self._steps if step.kinds == self._steps[-1].kinds]
        found = [self._of(step) for step in same]
        return {
            block: SampleCost(
                median_low(step[block][0] for step in found),
                median_low(step[block][1] for step in found),
                same[-1].returned_nbytes.get(block, 0) // same[-1].num_samples,
            )
            for block in (found[-1] if found else ())
            if all(block in step for step in found)
        }

    def _of(self, step: _Step) -> dict[int, tuple[float, float]]:
        """Return the times of one step."""
        scale = step.num_parts / step.num_samples
        per_module = {key: _median_s(calls) for key, calls in step.forward.items()}
        forward: dict[int, float] = {}
        for key, seconds in per_module.items():
            at = self._block.get(key, len(self._chain) - 1)
            forward[at] = forward.get(at, 0.0) + scale * seconds
        backward = dict.fromkeys(forward, 0.0)
        for keys, calls in step.backward.items():
            blocks = sorted({self._block.get(key, len(self._chain) - 1) for key in keys} & forward.keys())
            weights = [forward[at] * _PER_FORWARD[step.kinds[at]] for at in blocks]
            for at, weight in zip(blocks, weights, strict=True):
                backward[at] += scale * _median_s(calls) * weight / (sum(weights) or 1.0)
        return {at: (forward[at], self._as_now(at, forward[at], backward[at], step)) for at in forward}

    def _as_now(self, block: int, forward_s: float, backward_s: float, step: _Step) -> float:
        then, now = _PER_FORWARD[step.kinds[block]], _PER_FORWARD[self.kinds()[block]]
        return backward_s * now / then if then and backward_s else forward_s * now


def _median_s(calls: Sequence[Interval]) -> float:
    return median_low(call.duration_s for call in calls)
