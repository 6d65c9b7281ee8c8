"""The kinds of steps that a training loop, or its evaluations, are made of: a trace and a plan for each of a few.

Steps of one kind have the same key: the model they begin with, and which parameters are trainable. The first step with
a new key is recorded. Those of one key may still differ, and then:

1. A step leaves out moments of its plan: it follows that all the same, see [Note: Left out] in
   `chunkmem.runtime.plan_executor`. If four in a row leave out the same, the next one is recorded, for a plan without
   it.
2. It does what another known trace of its key has: it goes over to the plan for that.
3. It does what no trace has: it misses its plan. After two such steps, then four, eight and so on, up to three in a
   row are recorded until one of them is new. A record that has much in common with a known trace is merged with it,
   so that one plan serves all ways to leave out layers or experts.

Which of several plans a step begins with is what followed, the last time, on the two steps before.

Decided in ADR 16.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Mode, Trace
from chunkmem.plan.cursor import Said
from chunkmem.plan.merge import merge
from chunkmem.steps.cached_plan import CachedPlan, Outcome
from chunkmem.steps.plan_log import LOG

_MAX_KINDS = 16
_NUM_AT_ONCE = 4
"""Keys whose first step is recorded. Later ones have to come twice: with layers frozen at random, most never do."""
_MAX_FAILED_RECORDS = 3
_NUM_TRIES = 3
"""Steps recorded to meet one that is not known yet: about as long after the last one as that came after another."""
_NUM_ALIKE = 4
"""Number of consecutive steps that leave out the same moments, so that it is no chance."""
_LOOKED_BACK = 12
"""Number of last steps of which half may miss their plans before the user is warned."""
_LOOKED_BACK_FOR_KEYS = 32
_FORGIVEN = 16
"""Steps in a row that follow a plan, after which those that did not are no reason to record."""
_PATIENCE = 2
"""Number of steps that miss their plans before some are recorded; doubled each time."""


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a step before its first event."""

    root: int = 0
    """Identity of the model that is called first."""
    trainable: bytes = b""
    """Encodes which parameters require gradients."""


class PlanCache:
    """The plans of one mode, of which the least recently used goes when there are too many."""

    def __init__(self, mode: Mode, make_entry: Callable[[], CachedPlan], *, is_lone: bool) -> None:
        """Begin with none.

        Args:
            mode: training or evaluation.
            make_entry: makes an empty one.
            is_lone: there is one rank. Else all steps with a key are of one kind, as the ranks exchange the same in
                each.
        """
        self._mode = mode
        self._make_entry = make_entry
        self._is_lone = is_lone
        self._patience = _PATIENCE
        """Steps that may miss their plans before others are recorded; what `forget` forgets does not change it."""
        self.why_recorded = ""
        """Reason, for logs, why `wants_record` last asked for a recording."""
        self._of: dict[CachedPlan, Key | None] = {}
        """The least recently used first; None: of any key, from an earlier run."""
        self.forget()

    def forget(self) -> None:
        """Forget everything."""
        self.stop()
        self._of = {}
        self._before: tuple[CachedPlan, ...] = ()
        """Followed, or recorded, in the last steps."""
        self._followed_by: dict[tuple[CachedPlan, ...], CachedPlan] = {}
        """By the last one or two steps: the step that followed them the last time."""
        self._tries = 0
        """Steps that are still to be recorded to find one that is not known."""
        self._num_to_pass = 0
        """Steps before those."""
        self._num_missed = 0
        """Number of steps that missed their plans, less those forgiven."""
        self._num_since_miss = 0
        self._left_out: Sequence[tuple[int, int]] = ()
        """Ranges of moments that the last step left out."""
        self._num_alike = 0
        """Steps in a row that left out just that."""
        self._unknown: deque[Key] = deque(maxlen=_LOOKED_BACK_FOR_KEYS)
        """Keys of steps that came without being recorded, or are announced: the next one is recorded."""
        self._num_failed = 0
        self._outcomes: deque[Outcome] = deque(maxlen=_LOOKED_BACK)
        """Outcomes of the last steps."""
        self._has_warned = False
        self._needs_plans = True
        self.by_block: dict[Key, bool] = {}
        """Of keys that it was decided for: steps with this key hear of blocks as a whole."""

    def stop(self, *, besides: CachedPlan | None = None) -> None:
        """Follow no other plan any further, until the next iteration begins."""
        for entry in self._of:
            if entry is not besides:
                entry.stop()

    @property
    def last(self) -> CachedPlan | None:
        """Of the last step that was recorded or followed a plan."""
        return self._before[-1] if self._before else None

    @property
    def traces(self) -> list[Trace]:
        """Of all kinds of steps."""
        return [entry.trace for entry in self._of if entry.trace is not None]

    def adopt(self, trace: Trace) -> None:
        """Take a trace of an earlier run, for the first kind of step that comes."""
        self.forget()
        entry = self._make_entry()
        entry.adopt(trace)
        self._of[entry], self._before = None, (entry,)

    def key_of(self, entry: CachedPlan) -> Key:
        """Return the key of an entry, an empty one if it is of any key."""
        return self._of[entry] or Key()

    def of(self, key: Key) -> CachedPlan | None:
        """Return what was used last for steps with this key."""
        found = [entry for entry, other in self._of.items() if other == key]
        return found[-1] if found else None

    def record(self, key: Key) -> None:
        """The next step with this key is to be recorded, unless something is known of it."""
        self._unknown.append(key)

    def is_by_block(self, key: Key) -> bool:
        """Tell whether steps with this key hear of blocks as a whole, as was decided, or as a trace of them has it."""
        return self.by_block.get(key, any(entry.is_by_block for entry in self._known(key)))

    def hook_by_block(self, key: Key, is_on: bool) -> None:
        """Record steps with this key again, with blocks as a whole or module by module, and so from then on.

        What is known of them is kept until then.
        """
        self.by_block[key] = is_on
        self.record(key)

    # Before a step.

    def choose(self, key: Key) -> CachedPlan | None:
        """Return what a step with this key is most likely to do; None if nothing is known of it, or need be."""
        if not self._needs_plans:
            return None
        known = list(self._known(key))
        if not known and self._is_lone:
            known = [entry for entry, other in self._of.items() if other is not None and other.root == key.root]
        for before in (self._before[-2:], self._before[-1:]):
            expected = self._followed_by.get(before)
            if expected in known:
                return expected
        return known[-1] if known else None

    def needless(self, key: Key) -> CachedPlan | None:
        """Return what is known of steps with this key if no plan is followed, as none has to move anything."""
        return None if self._needs_plans else self.of(key)

    def wants_record(self, key: Key) -> bool:
        """Tell whether a step with this key is to be recorded."""
        if self._num_failed >= _MAX_FAILED_RECORDS or not self._needs_plans:
            return False
        if not self._of:
            self.why_recorded = "nothing is known of such steps"
            return True
        if self._tries:
            self._num_to_pass -= 1
            is_narrower = self._num_alike >= _NUM_ALIKE
            self.why_recorded = "steps leave out the same again and again" if is_narrower else "steps missed plans"
            return self._num_to_pass < 0
        if any(self._known(key)):
            return False
        self.why_recorded = "it begins with another model, or other parameters are trainable"
        if len(self._of) < _NUM_AT_ONCE or not self._is_lone or key in self._unknown:
            return True
        self._unknown.append(key)
        return False

    def better(self, entry: CachedPlan, came: Sequence[Said], *, left_out: int | None) -> CachedPlan | None:
        """Return another one that fits a step better, which has followed `entry` so far.

        Args:
            entry: the one that the step follows.
            came: its events; the last is not the one that `entry` has there.
            left_out: how many moments of `entry` it would leave out; None: they do not fit it.
        """
        best, fewest = None, left_out
        for other in self._known(self._of[entry]):
            number = None if other is entry else other.num_left_out(came)
            if number is not None and (fewest is None or number < fewest):
                best, fewest = other, number
        return best

    # After it.

    def recorded(self, key: Key, record: Callable[[], Trace]) -> None:
        """A step has been recorded; `record` returns its trace."""
        try:
            trace = record()
        except TraceError as error:
            # It was torn down in the middle, and the next one is whole. Or every step is like this.
            self._num_failed += 1
            if self._num_failed >= _MAX_FAILED_RECORDS:
                self._warn(f"of {_MAX_FAILED_RECORDS} steps that were recorded none can be planned: {error}")
            return
        self._num_failed, self._tries = 0, max(0, self._tries - 1)
        for entry in reversed(list(self._known(key)) if self._is_lone else []):
            assert entry.trace is not None
            if entry.is_by_block is not trace.by_block:
                continue
            merged = merge(entry.trace, trace)
            if merged is None or (merged.is_longer and not entry.take_if_planned(merged.trace)):
                continue
            if self._num_alike >= _NUM_ALIKE and len(trace.moments) < len(entry.trace.moments):
                continue
            if merged.is_longer:
                self._tries, self._patience = 0, _PATIENCE  # it was worth it, and may be again
            self.used(entry)
            return
        self._add(key, trace)

    def _add(self, key: Key, trace: Trace) -> None:
        self._tries = self._num_alike = 0
        if not self._is_lone:  # the ranks exchange the same in each step of a kind
            self.drop(key)
        self._drop_other_than(trace, key)
        entry = self._make_entry()
        entry.take(trace)
        self._of[entry] = key
        while len(self._of) > _MAX_KINDS:
            self._let_go(next(iter(self._of)))
        self.used(entry)

    def drop(self, key: Key) -> None:
        """Forget what steps with this key do: from now on they do something else."""
        self.by_block.pop(key, None)
        for entry in list(self._known(key)):
            self._let_go(entry)

    def _drop_other_than(self, trace: Trace, key: Key) -> None:
        """Forget what steps with this key did before blocks were heard of as they are now."""
        for entry, other in list(self._of.items()):
            if other == key and entry.is_by_block is not trace.by_block:
                self._let_go(entry)

    def _let_go(self, entry: CachedPlan) -> None:
        entry.stop()
        del self._of[entry]
        self._before = tuple(other for other in self._before if other is not entry)
        self._followed_by = {
            before: after for before, after in self._followed_by.items() if entry not in (*before, after)
        }

    def used(self, entry: CachedPlan, key: Key | None = None) -> None:
        """A step has followed `entry`, or was recorded for it."""
        self._num_since_miss += 1
        known = self._of.pop(entry)
        self._of[entry] = key if known is None else known
        for before in (self._before[-2:], self._before[-1:]):
            if before:
                self._followed_by[before] = entry
        self._before = (*self._before[-1:], entry)

    def learn(self, entry: CachedPlan) -> None:
        """A step is over that has followed `entry`: is there something to be recorded?"""
        outcome = entry.learn()
        self._outcomes.append(outcome)
        left_out = entry.left_out if outcome is Outcome.LEFT_OUT else ()
        self._num_alike = bool(left_out) + (self._num_alike if left_out == self._left_out else 0)
        self._left_out = left_out
        if self._num_alike == _NUM_ALIKE:
            self._tries, self._num_to_pass = 1, 0
        if outcome not in (Outcome.MISSED, Outcome.NEEDLESS):
            if self._num_since_miss >= (_FORGIVEN if self._is_lone else 1):
                self._num_missed = 0
            return
        self._num_missed += 1
        if self._num_missed >= self._patience:
            self._num_missed, self._patience = 0, 2 * self._patience
            if self._is_lone:
                self._tries, self._num_to_pass = _NUM_TRIES, max(0, self._num_since_miss - 2)
            else:
                self._let_go(entry)
        self._num_since_miss = 0
        self._tell(entry)

    def needs_plans(self) -> None:
        """A step that was served on demand, as none had to be planned, had to move something."""
        if not self._needs_plans:
            self._needs_plans = True
            self._outcomes.clear()

    def _tell(self, entry: CachedPlan) -> None:
        num_needless = self._outcomes.count(Outcome.NEEDLESS)
        num_missed = num_needless + self._outcomes.count(Outcome.MISSED)
        if num_missed < _LOOKED_BACK // 2 or entry.plan_executor is None:
            return
        if self._is_lone and num_missed == num_needless:
            # All fits, so that serving on demand moves nothing, while records and plans take time and are not followed.
            self._needs_plans, self._tries = False, 0
            LOG.info(
                "%s steps: served on demand from now on, as they miss their plans and move nothing", self._mode.value
            )
            return
        self._warn(
            f"{num_missed} of the last {len(self._outcomes)} {self._mode.value} steps missed their "
            "plans, as none of them did what one before had done: the last time, "
            f"{entry.plan_executor.first_plan_miss}. "
            "What comes after that is served on demand, which is slower; the numbers are the same. Have modules "
            "called in one order in all steps; they may be left out"
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)

    def _known(self, key: Key | None) -> Iterator[CachedPlan]:
        """Return those that steps with this key may be like, the least recently used first."""
        found = (entry for entry, other in self._of.items() if other is None or key is None or other == key)
        if key is None or key not in self.by_block:
            return found
        return (entry for entry in found if entry.is_by_block is self.by_block[key])
