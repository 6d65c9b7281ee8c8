"""What ranks learn together in their first steps: what is exchanged, and whether there are plans for that.

All ranks go through the same states, one a step, since every one of them comes to the end of each step.

1. The first step shows what is exchanged, and when. After it the links are measured.
2. If regions may be recomputed or not, a step that recomputes all is recorded, and the first rank that had all of it
   chooses.
3. One is recorded, whose exchanges overlap with computing if DEVICE has room for that on all ranks. If a rank finds
   no plan for it, as HOST has no room, the next step gathers when it needs to, and is recorded.

A step in which torch's compiler has worked on any rank is repeated: what it took is no part of computing.

When other parameters are trained meanwhile, what was learnt counts: links, and what comes in which order, are those of
the same units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chunkmem.ranks.prefetch import PrefetchSchedule
from chunkmem.ranks.ranks import Ranks
from chunkmem.steps.controller import StepController

_LABEL = "learning what is exchanged"


class FirstSteps:
    """Leads through the first steps, one by one."""

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
            prefetch: the schedule of exchanges.
            controller: which records and plans.
            ranks: which have to agree.
            measure: is called once, by all ranks, with groups that they gather at once.
        """
        self._prefetch = prefetch
        self._controller = controller
        self._ranks = ranks
        self._measure = measure
        self.is_over = False
        """What is exchanged is known, and has been recorded."""
        self.restart()

    def restart(self) -> None:
        """Begin again before the first step: there is more to exchange."""
        self._controller.may_record = self.is_over = False
        self._prefetch.forget()
        self._states: deque[Callable[[], None]] = deque((self._learned, self._chosen, self._recorded))

    @property
    def has_learned(self) -> bool:
        """What is known counts for steps that train other parameters, too."""
        return self.is_over or self._controller.may_record

    def learn_again(self) -> None:
        """What the next step exchanges is not known: record the one after it, if gathers are begun ahead in that."""
        if self._prefetch.has_room:
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
        self._measure(self._prefetch.together())
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
        (is_hopeless,) = self._ranks.any_over([not self._controller.known.can_plan()], label=_LABEL)
        if is_hopeless:
            self._prefetch.has_room = False
            self._controller.known.record_again()
