"""Whether gathers between ranks are begun ahead: both ways are planned, and the slowest rank decides.

All ranks go through the same states, one a step, since every one of them comes to the end of each step.

1. The first step shows what is exchanged, and when. After it the links are measured.
2. If regions may be recomputed or not, a step that recomputes all is recorded, and the first rank that had all of it
   chooses.
3. One is recorded that gathers when it needs to. From its trace that of the same step with exchanges that overlap
   computing is derived (`chunkmem.trace.ahead`), and plans for the two are compared by how long computing stalls, as
   simulated: the largest over ranks counts. If gathering ahead stalls for no longer, and its plan fits both tiers on
   all ranks, the next step gathers ahead, and is recorded.

A step in which torch's compiler has worked on any rank is repeated: what it took is no part of computing.

When other parameters are trained meanwhile, what was learnt counts: links, and what comes in which order, are those of
the same units.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from chunkmem.comm.ranks import Ranks
from chunkmem.shard.prefetch import PrefetchSchedule
from chunkmem.steps.controller import StepController

_LABEL = "choosing whether to gather ahead"


class AheadTrial:
    """Leads through the trial, step by step."""

    def __init__(
        self,
        prefetch: PrefetchSchedule,
        controller: StepController,
        ranks: Ranks,
        *,
        measure: Callable[[tuple[int, ...]], None],
    ) -> None:
        """Begin before the first step.

        Args:
            prefetch: which gathers ahead, or not.
            controller: which records and plans.
            ranks: which have to agree.
            measure: is called once, by all ranks, with groups that they gather together.
        """
        self._prefetch = prefetch
        self._controller = controller
        self._ranks = ranks
        self._measure = measure
        self.is_over = False
        """The way to exchange has been chosen."""
        self.restart()

    def restart(self) -> None:
        """Begin again before the first step: there is more to exchange."""
        self._prefetch.is_wanted = self._controller.may_record = self.is_over = False
        self._prefetch.forget()
        self._states: deque[Callable[[], None]] = deque((self._learned, self._chosen, self._recorded))

    @property
    def has_learned(self) -> bool:
        """What is known counts for steps that train other parameters, too."""
        return self.is_over or self._controller.may_record

    def learn_again(self) -> None:
        """What the next step exchanges is not known: record the one after it, if gathers are begun ahead in that."""
        if self._prefetch.is_overlapped:
            self._controller.may_record = False
            self._states.appendleft(self._may_record)

    def end_step(self, *, had_batch: bool) -> None:
        """A step is over, on all ranks. One that is not like others, as all skipped it or one has gone on with it after
        an error, does not count.

        Args:
            had_batch: this rank had one; else what its controller knows is of an earlier step.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        if self._prefetch.was_empty or not self._states:
            return
        here = had_batch and self._controller.is_excused, had_batch and self._controller.now.has_compiled
        is_excused, has_compiled = self._ranks.max_over(tuple(map(float, here)), label=_LABEL)
        state = self._states[0]
        if is_excused or (has_compiled and state not in (self._learned, self._may_record)):
            if had_batch:
                self._controller.excuse_iteration()
        else:
            self._states.popleft()
            state()

    def _learned(self) -> None:
        self._measure(self._prefetch.largest())
        self._may_record()

    def _may_record(self) -> None:
        self._controller.may_record = True

    def _chosen(self) -> None:
        source = self._prefetch.complete
        chosen: frozenset[int] | None = None
        if self._ranks.rank == source and self._controller.is_choosing_regions:
            chosen = self._controller.choose_regions()
        # A rank that has had no batch so far does not know whether there is anything to choose.
        kept = self._ranks.broadcast_object(chosen, label="choosing which regions are recomputed", source=source)
        if kept is not None:
            self._controller.keep_regions(kept)
        if not kept:  # the step that was recorded is like those to come
            self._states.popleft()()

    def _recorded(self) -> None:
        self.is_over = True
        if not self._prefetch.has_room:
            return
        # A rank that does not know, as it had no batch, agrees with the others.
        lazy_s, ahead_s = self._ranks.max_over(self._controller.known.stalls() or (0.0, 0.0), label=_LABEL)
        if ahead_s <= lazy_s and ahead_s < math.inf:
            self._prefetch.is_wanted = True
            self._controller.known.record_again()
