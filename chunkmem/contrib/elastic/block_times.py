"""How long the blocks of a pipeline compute, in its last steps.

Of the calls of a block for the micro-batches of a step the median counts: the first one may wait
for its weights. Backward is timed as schedules call it, for all blocks of a stage together, and divided over these in
proportion to their forward. A block passes it on if something before it is trained, which takes about as long as
forward, and has gradients of its own if it is trained itself, which takes as long again. So times of steps in which
other blocks were frozen are scaled.

Of a call, what hooks take does not depend on how many samples the micro-batch has. Where the host computes, that is
known, and told apart. Backward has hooks, too, inside of autograd, and is taken to spend as long in them as forward.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from statistics import median_low
from typing import Any

from torch import nn

from chunkmem.pipeline.call_times import CallTimes
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.runtime.timestamps import Clock, Interval
from chunkmem.runtime.values import tensors_in

_NUM_STEPS = 3
"""Of which the median counts."""
_PER_FORWARD = (0.0, 1.0, 2.0)
"""Time of backward by what it computes of a block: gradients of nothing, of its inputs or its weights, of both."""


@dataclass
class _Step:
    """What was timed in one."""

    num_samples: int
    num_parts: int
    trained: tuple[int, ...]
    """By block: elements that are trained."""
    division: int
    """How often the ranks had been divided."""
    width: int
    """Data-parallel ranks, each with so many samples."""
    forward: dict[nn.Module | None, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    """By module; None: the loss."""
    backward: dict[tuple[nn.Module | None, ...], list[Interval]] = field(default_factory=lambda: defaultdict(list))
    """By modules that were timed together."""
    returned_nbytes: Counter[int] = field(default_factory=Counter)
    """By block, of all micro-batches."""
    hooks_s: dict[nn.Module | None, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By module: of each call, the time in hooks."""
    whole: Interval | None = None
    """All of it, but for the update."""
    updates: list[Interval] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[int, ...]:
        """By block: see `kinds_of`."""
        return kinds_of(self.trained)


@dataclass(frozen=True)
class SampleCost:
    """What a block takes for one sample."""

    forward_s: float
    backward_s: float
    output_nbytes: int
    call_s: float = 0.0
    """In addition: of each call for a micro-batch, forward or backward, however many samples that has."""


@dataclass(frozen=True)
class LastSteps:
    """Steps that were like each other, on this rank."""

    step_s: float
    """The shortest, without updates: what others do on the machine is no part of it."""
    update_s: float
    """Likewise, all updates after a step together."""
    trained: tuple[int, ...]
    """See `BlockTimes.trained`, at the time."""


class BlockTimes(CallTimes):
    """Timestamps around calls of blocks, read when somebody asks."""

    def __init__(self, chain: Sequence[Sequence[nn.Module]], clock: Clock) -> None:
        """Time nothing yet.

        Args:
            chain: the modules of each block, in the order of forward.
            clock: of what the device computes.
        """
        self._chain = chain
        self._block: dict[nn.Module | None, int] = {
            module: at for at, modules in enumerate(self._chain) for module in modules
        }
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=_NUM_STEPS)
        self._now: _Step | None = None
        self._in_hooks_s: Callable[[], float] = _no_time
        self._width = 1
        self._num_divisions = 0

    def divided(self, *, in_hooks_s: Callable[[], float] | None = None, width: int = 1) -> None:
        """From now on other ranks run the blocks: times are not mixed with those of steps before.

        Args:
            in_hooks_s: returns the time in hooks of the modules so far, if the host computes; None: what they take is
                part of computing.
            width: data-parallel ranks, each of which has its part of a batch.
        """
        self._in_hooks_s, self._width = in_hooks_s or _no_time, width
        self._num_divisions += 1

    @contextlib.contextmanager
    def step(self, parts: Sequence[MicroBatch]) -> Iterator[None]:
        """Surround a step over these micro-batches; of one that raises, no times count."""
        num_samples = sum(part.num_samples for part in parts)
        now = self._now = _Step(num_samples, len(parts), self.trained(), self._num_divisions, self._width)
        try:
            yield
            self._steps.append(now)
        finally:
            self._now = None

    def took(self, whole: Interval) -> None:
        """The last step took so long, with what comes before and after its calls."""
        if self._steps:
            self._steps[-1].whole = whole

    def updated(self, intervals: Iterable[Interval]) -> None:
        """After the last step, weights were updated."""
        if self._steps:
            self._steps[-1].updates += intervals

    def last(self) -> LastSteps | None:
        """Return what is known of the last steps; None: there are not enough that were like each other."""
        same = [step for step in self._same() if step.division == self._num_divisions and step.whole is not None]
        if len(same) < _NUM_STEPS:
            return None
        return LastSteps(
            min(map(_whole_s, same)),
            min(sum(update.duration_s for update in step.updates) for step in same),
            same[-1].trained,
        )

    @property
    def num_samples(self) -> int:
        """Of the last step's batch, that of all data-parallel ranks together; 0: there was none."""
        return self._steps[-1].num_samples * self._steps[-1].width if self._steps else 0

    @contextlib.contextmanager
    def forward(self, module: nn.Module | None) -> Iterator[None]:
        """Time a call for one micro-batch; None: the loss, which counts to the last block."""
        if self._now is None:
            yield
            return
        start, spent_s = self._clock.timestamp(), self._in_hooks_s()
        yield
        self._now.forward[module].append(Interval(start, self._clock.timestamp()))
        self._now.hooks_s[module].append(self._in_hooks_s() - spent_s)

    @contextlib.contextmanager
    def backward(self, modules: Sequence[nn.Module | None]) -> Iterator[None]:
        """Time the backward of these modules for one micro-batch; None is the loss."""
        if self._now is None:
            yield
            return
        start = self._clock.timestamp()
        yield
        self._now.backward[tuple(modules)].append(Interval(start, self._clock.timestamp()))

    def returned(self, module: nn.Module, value: Any) -> None:
        """Note what a module returns for a micro-batch."""
        at = self._block.get(module)
        if self._now is not None and at is not None and module is self._chain[at][-1]:
            self._now.returned_nbytes[at] += sum(tensor.nbytes for tensor in tensors_in(value))

    def trained(self) -> tuple[int, ...]:
        """Return by block the elements that are trained as things are now."""
        return tuple(
            sum(param.numel() for param in nn.ModuleList(modules).parameters() if param.requires_grad)
            for modules in self._chain
        )

    def _same(self) -> list[_Step]:
        """Return the last steps, those that are like the last one."""
        return [
            step
            for step in self._steps
            if (step.kinds, step.division) == (self._steps[-1].kinds, self._steps[-1].division)
        ]

    def per_sample(self, *, then: bool = False) -> Mapping[int, SampleCost]:
        """Return by block, of those that this rank has run, what one sample takes as things are now; or as they were.

        Args:
            then: as they were in the one of the last steps that `last` tells the time of.
        """
        same = self._same()
        if then and all(step.whole is not None for step in same):
            same = sorted(same, key=_whole_s)[:1]
        found = [self._of(step, step.kinds if then else kinds_of(self.trained())) for step in same]
        return {
            block: SampleCost(
                median_low(step[block][0] for step in found),
                median_low(step[block][1] for step in found),
                same[-1].returned_nbytes[block] // same[-1].num_samples,
                median_low(step[block][2] for step in found),
            )
            for block in (found[-1] if found else ())
            if all(block in step for step in found)
        }

    def _of(self, step: _Step, kinds: Sequence[int]) -> dict[int, tuple[float, float, float]]:
        """Return by block the times of one step for a sample, forward and backward, and in hooks of a call."""
        scale = step.num_parts / step.num_samples
        forward: dict[int, float] = {}
        calls: dict[int, float] = {}
        for key, intervals in step.forward.items():
            at, seconds = self._block.get(key, len(self._chain) - 1), _median_s(intervals)
            call_s = min(seconds, median_low(step.hooks_s[key]))
            forward[at] = forward.get(at, 0.0) + scale * (seconds - call_s)
            calls[at] = calls.get(at, 0.0) + call_s
        backward = dict.fromkeys(forward, 0.0)
        for keys, intervals in step.backward.items():
            blocks = sorted({self._block.get(key, len(self._chain) - 1) for key in keys} & forward.keys())
            weights = [forward[at] * _PER_FORWARD[step.kinds[at]] for at in blocks]
            in_hooks_s = sum(calls[at] for at, weight in zip(blocks, weights, strict=True) if weight)
            seconds = max(0.0, _median_s(intervals) - in_hooks_s)
            for at, weight in zip(blocks, weights, strict=True):
                backward[at] += scale * seconds * weight / (sum(weights) or 1.0)
        return {
            at: (forward[at], _scaled(forward[at], backward[at], step.kinds[at], kinds[at]), calls[at])
            for at in forward
        }


def kinds_of(trained: Sequence[int]) -> tuple[int, ...]:
    """Return by block what backward computes where so many elements are trained: an index of `_PER_FORWARD`."""
    before = accumulate(trained, initial=0)
    return tuple((own > 0) + (others > 0) for own, others in zip(trained, before, strict=False))


def _no_time() -> float:
    return 0.0


def _scaled(forward_s: float, backward_s: float, kind_then: int, kind_now: int) -> float:
    """Return the time of backward of a block that was, or is, frozen."""
    then, now = _PER_FORWARD[kind_then], _PER_FORWARD[kind_now]
    return backward_s * now / then if then and backward_s else forward_s * now


def _whole_s(step: _Step) -> float:
    return inf if step.whole is None else step.whole.duration_s


def _median_s(calls: Sequence[Interval]) -> float:
    return median_low(call.duration_s for call in calls)
