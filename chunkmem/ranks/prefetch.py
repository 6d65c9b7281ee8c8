"""The exchanges of a step, one after the other: the next gather begun ahead, the last reduction ended later.

Steps repeat. While a unit computes, the gather that came next in the step before is begun, over a reduction if there is
one between, and with it those after it of units that stay. It is if all ranks have room for two units at a time. A rank
that finds no room for it after all says so before it begins, and then no rank does. If something else comes, all ranks
see that alike, let what was begun arrive, and begin nothing ahead until the next step.

Then, too, a reduction is waited for when the next one begins, or backward is over.

Decided in ADRs 13 and 71.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from chunkmem.data.errors import CapacityError, RankError
from chunkmem.ranks.shards import ShardStore

Groups = tuple[int, ...]
Schedule = list[Groups]
"""Gathers in order, each of some groups."""


class Reduces(Protocol):
    """Gives owners the means of gradients."""

    def is_trained(self, group: int) -> bool: ...

    def reduce_groups(self, groups: Groups) -> None: ...

    def begin(self, groups: Groups) -> None: ...

    def finish(self) -> None: ...

    def join(self, lists: Sequence[Groups]) -> None: ...

    def state(self) -> bytes: ...


_BUCKET_NBYTES = 25 << 20
"""Of gradients that are reduced together: as many as `DistributedDataParallel` has by default."""
_AHEAD = "gathering ahead"
_ORDER = "the order of exchanges in the step"


class PrefetchSchedule:
    """The exchanges of this step, and of the one before, which says what to prefetch."""

    def __init__(self, shards: ShardStore, reduction: Reduces) -> None:
        self._shards = shards
        self._reduction = reduction
        self._log: Schedule = []
        """What was gathered since the last step."""
        self._schedule: Schedule = []
        """What was gathered in the step before."""
        self._ahead: list[Groups] = []
        """What is gathered ahead, and held, in the order in which it is wanted."""
        self._waiting: Groups = ()
        """Groups that are reduced with the next ones."""
        self.has_room = False
        """All ranks have room for two units at a time: exchanges overlap with computing."""
        self.staying: frozenset[Groups] = frozenset()
        """What all ranks have room to hold from forward to backward."""
        self.was_empty = True
        """Nothing was exchanged in the step before: no rank had a batch."""
        self.complete = 0
        """The first rank that had all of the last step, and did not only take part in what others exchanged."""
        self._is_alike = False
        """This step has been like the one before so far."""
        self._num_backwards = 0
        """Number of backwards in the step before."""
        self._is_shown = False
        """A step has shown the schedule, and had as many backwards as the one before it: reductions wait for the last
        one, whose number steps learn from that."""
        self._of_others: dict[bytes, tuple[Schedule, bool, frozenset[Groups]]] = {}
        """By what was trained: the gathers of such a step, whether there was room for two units, and which stay."""

    def knows(self, trained: bytes) -> bool:
        """Tell whether there were steps that trained this."""
        return trained in self._of_others

    def switch(self, before: bytes, after: bytes) -> None:
        """Other parameters are trained from the next step on; all ranks call it alike.

        Args:
            before: what was trained.
            after: what is; what was exchanged in the last step that trained it comes next, if there was one.
        """
        self.drop_ahead()
        if self._is_shown:
            self._of_others[before] = self._schedule, self.has_room, self.staying
        self._is_shown = after in self._of_others
        unknown: tuple[Schedule, bool, frozenset[Groups]] = [], self.has_room, frozenset()
        self._schedule, self.has_room, self.staying = self._of_others.get(after, unknown)
        self._is_alike = True

    def forget(self) -> None:
        """There are other chunks than in the steps before: what they exchanged, and had room for, counts no more."""
        self._of_others = {}
        self._schedule, self.staying = [], frozenset()

    def gather(self, groups: Groups, *, reader: object, is_part: bool, can: bool = True) -> bool:
        """Bring groups, which the caller holds, together from their owners, if all ranks can; `is_part` of a step.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        if not groups:
            return can
        if not is_part or self._ahead[:1] != [groups]:
            self.drop_ahead()
            following = self._following() if is_part else []
            if len(following) > 1 and following[0] == groups and groups in self.staying:
                self._begin_ahead(following, str(reader), can=can)
        if self._ahead[:1] == [groups]:
            self._shards.release_spare(self._ahead.pop(0))
        if not self._shards.gather(groups, reader=reader, can=can):
            return False
        if is_part:
            self._log.append(groups)
            at = len(self._log)
            self._is_alike = self._is_alike and self._schedule[at - 1 : at] == [groups]
            self._look_ahead(f"{reader}, gathering ahead")
        return True

    def hold(self, groups: Groups, *, reader: object, can: bool) -> bool:
        """Hold groups of a step in addition to others, and gather them, if all ranks have room; else change nothing.

        Raises what `gather` does.
        """
        if can:
            try:
                self._shards.hold(groups, reader=reader)
            except CapacityError:
                can = False
        is_held = self.gather(groups, reader=reader, is_part=True, can=can)
        if can and not is_held:
            self._shards.release(groups)
        return is_held

    def reduce(self, found: Iterable[int], *, is_over: bool) -> None:
        """Give owners the means of gradients of groups, those of which nothing is trained left out.

        Where units stay there is room for all gradients, and small ones are reduced together with those after them:
        until `is_over`, as no more follow in this backward. Raises what `gather` does.
        """
        trained = tuple(sorted(filter(self._reduction.is_trained, found)))
        groups = tuple(sorted({*self._waiting, *trained}))
        if self.staying and not is_over and self._shards.nbytes(groups) < _BUCKET_NBYTES:
            self._waiting = groups
        elif groups:
            self._waiting = ()
            self.finish_reduction()
            reduce = self._reduction.begin if self.has_room else self._reduction.reduce_groups
            reduce(groups)
        if trained:
            self._look_ahead(_AHEAD)

    def finish_reduction(self) -> None:
        """Wait for the reduction that is under way. Raises what `gather` does."""
        self._reduction.finish()

    def replay_without_batch(self, label: str, *, num_backwards: int) -> None:
        """Wait for the other ranks, taking part in what they exchange until they come here, too.

        Args:
            label: where they wait.
            num_backwards: since the last step, on this rank.

        Raises:
            CapacityError: what they exchange does not fit DEVICE.
            RankError: a rank is missing, or somewhere else.
        """
        self.drop_ahead()
        wait = partial(self._shards.ranks.connection.wait_for_others, label, count=num_backwards)
        while (asked := wait(state=self._reduction.state())) is not None:
            what, lists = asked
            self._reduction.join(lists) if what == "reduce" else self._shards.join_gather(lists)

    def end_step(self, *, always: Sequence[int], num_backwards: int) -> int:
        """The step is over; return how many backwards it had on a rank that had all of it.

        Args:
            always: groups that are held all the time.
            num_backwards: on this rank.

        Raises what `gather` does.
        """
        self.drop_ahead()
        complete, most = self._shards.ranks.connection.end_step()
        num_backwards = max(num_backwards, most)
        self.complete = 0 if complete is None else complete
        if complete is not None:  # ranks that only took part do not know the order of units
            self._log = self._shards.ranks.broadcast_object(self._log, source=complete, label=_ORDER)
        self.was_empty = not self._log
        if self._log:
            self._is_shown, self._num_backwards = num_backwards == self._num_backwards, num_backwards
            is_new = list(dict.fromkeys(self._log)) != list(dict.fromkeys(self._schedule))
            self._schedule = self._log
            if is_new:
                self._find_room(always)
        self._log, self._is_alike = [], True
        return num_backwards

    def _find_room(self, always: Sequence[int]) -> None:
        """Learn what all ranks have room for in steps with this schedule."""
        is_short = not self._shards.fits_beside(self._schedule, always=always)
        numbers = float(is_short), float(-self._shards.spare_nbytes())
        any_is_short, minus_least = self._shards.ranks.max_over(numbers, label="room for the weights of units")
        units = list(dict.fromkeys(self._schedule))
        num_staying = self._shards.num_that_stay(units, spare_nbytes=int(-minus_least))
        self.has_room, self.staying = not any_is_short, frozenset(units[len(units) - num_staying :])

    def together(self) -> Groups:
        """Return groups that steps to come gather at once: of units that stay, as many as fill a bucket of gradients,
        else the unit with most groups; none if there was no gather."""
        found: Groups = ()
        for groups in dict.fromkeys(self._schedule) if self.has_room else ():
            if groups in self.staying and self._shards.nbytes(found) < _BUCKET_NBYTES:
                found += tuple(group for group in groups if group not in found)
        return found or max(self._schedule, key=len, default=())

    def reset(self) -> None:
        """Drop what an interrupted step has begun. If that failed, the next exchange raises."""
        self._waiting = ()
        with contextlib.suppress(RankError):
            self.drop_ahead()
        with contextlib.suppress(RankError):
            self.finish_reduction()

    def _look_ahead(self, reader: str) -> None:
        if not self._ahead and (following := self._following()):
            self._begin_ahead(following, reader, can=True)

    def _following(self) -> list[Groups]:
        """Return what is thought to be gathered next: one unit, and those after it that stay, each once."""
        found: list[Groups] = []
        for groups in self._schedule[len(self._log) :] if self._is_alike and self.has_room else ():
            if found and (groups in found or groups not in self.staying):
                break
            found.append(groups)
        return found

    def _begin_ahead(self, lists: Sequence[Groups], reader: str, *, can: bool) -> None:
        """Begin to gather lists of groups, and hold them, if all ranks can; else do with less from now on."""
        held: list[Groups] = []
        is_begun = False
        try:
            with contextlib.suppress(CapacityError):  # it was an estimate that there is room
                for groups in lists:
                    self._shards.hold(groups, reader=reader)
                    self._shards.hold_spare(groups)
                    held.append(groups)
            wanted = [group for groups in lists for group in groups]
            is_begun = self._shards.send(wanted, reader=reader, can=can and held == lists)
        finally:
            if is_begun:
                self._ahead = held
            else:
                for groups in held:
                    self._shards.release_spare(groups)
        if not is_begun and len(lists) > 1:
            self.staying = frozenset()
        elif not is_begun:
            self.has_room = False

    def drop_ahead(self) -> None:
        """Let what was gathered ahead arrive, and release it. Raises what `gather` does."""
        ahead, self._ahead = self._ahead, []
        if ahead:
            self._is_alike = False
            try:
                self._shards.arrive((group for groups in ahead for group in groups), reader=_AHEAD)
            finally:
                for groups in ahead:
                    self._shards.release_spare(groups)
