"""Units of exchange: modules whose weights come together from their owners as a whole, before they are used.

Every rank gathers and reduces the same in the same order, whatever is read inside of a unit on which rank. Forward
gathers a unit when a call enters it. Backward gathers it when the gradients of its outputs begin to arrive, and again
if another unit's came in between. It leaves a unit for good when it has come to it as often as forward did: to one that
is called twice, or that has others inside, more than once. When it has left all units that a group has a part in, or is
over, the group is reduced, if no micro-batch is thought to follow. So what is exchanged depends on the order of units
alone, which is the same on all ranks, and not on what a rank still has.

A unit whose forward is recomputed in backward is gathered for that, and held until backward has come to it, too, so
that it is not gathered again. Units of a segment that is recomputed as a whole are held together if that leaves room
for what comes with them on all ranks. Else each replaces the one before:

    forward                     A B C
    backward                          C, then recompute A B C, then     C B A
    gathered, all fit           A B C    C              A B                      (C is held all the time)
    gathered, one at a time     A B C    C              A B C             B A

Where all ranks have room for it beside everything else that they have, a unit stays: it is held from its first call in
a step until the last backward has left it, so a step gathers it once. The last units of forward come first: backward
needs them soonest. If one rank finds no room for another unit after all, all of them release those that stay, and
gather as above (ADR 69).

A rank that comes to the end of its step before the others, since it has had no batch, fewer micro-batches or no
backward, takes part in what they exchange until they come, too; its gradients count as zeros.

Decided in ADR 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from chunkmem.data.errors import CapacityError, StateError
from chunkmem.ranks.prefetch import PrefetchSchedule, Reduces
from chunkmem.ranks.shards import ShardStore


@dataclass(eq=False)
class Unit:
    """A module and its weights, but for those of units inside of it."""

    name: str
    groups: tuple[int, ...] = ()
    is_root: bool = False
    """The unit of all modules in no other unit; backward may return to it at any time."""
    depth: int = field(default=0, init=False)
    """Number of the unit's calls that run."""
    is_read: bool = field(default=True, init=False)
    """A call in it has read some of its weights since it was entered, and tells when backward comes."""
    is_alone: bool = field(default=False, init=False)
    """DEVICE has no room for it in addition to units that were recomputed with it; the same on all ranks."""

    def __str__(self) -> str:
        return f"unit {self.name}"


class Backwards:
    """Which backward is the last one before the step: as it was said, or as the steps before tell."""

    def __init__(self) -> None:
        self.num = 0
        """Begun since the last step."""
        self.is_last = False
        """No other backward is thought to follow the running one before the step."""
        self._expected: int | None = None
        """Backwards a step: declared, or as many as the step before had; None: not known."""
        self._is_declared = False
        self._is_next_last: bool | None = None

    @property
    def are_all(self) -> bool:
        """Whether no backward is thought to come before the step, after those that have begun."""
        return self.is_last or (self._expected is not None and self.num >= self._expected)

    def declare_last(self, is_last: bool | None) -> None:
        """Say whether the next one is the last; None: as the steps before tell."""
        self._is_next_last = is_last

    def declare(self, num: int) -> None:
        """Expect so many before each step from now on."""
        self._expected, self._is_declared = num, True

    def expect_as(self, other: Backwards) -> None:
        """Expect as many as there, if that was declared."""
        if other._is_declared:
            self._expected, self._is_declared = other._expected, True

    def begin(self, agree: Callable[[bool], bool]) -> None:
        """One begins; `agree` tells whether what was declared for it was declared on all ranks."""
        self.num += 1
        is_last, self._is_next_last = self._is_next_last, None
        self.is_last = self.num == self._expected if is_last is None else agree(is_last)

    def end_step(self, num: int) -> None:
        """A step is over that had `num` on a rank that had all of it."""
        if num and not self._is_declared:
            self._expected = num
        self.num = 0


class Units:
    """Which units are open. With one rank there are none, and nothing is done."""

    def __init__(self, shards: ShardStore | None, reduction: Reduces | None) -> None:
        """Begin with none; `reduction` reduces groups whose gradients are complete, on all ranks alike."""
        self.prefetch = None if shards is None or reduction is None else PrefetchSchedule(shards, reduction)
        """The schedule of exchanges; None with one rank."""
        self._shards = shards
        self.backwards = Backwards()
        self._users: dict[int, set[Unit]] = {}
        """By group: the units that have parameters in it."""
        self._unit_of: WeakKeyDictionary[nn.Module, Unit] = WeakKeyDictionary()
        self._running: list[Unit] = []
        """Held by calls."""
        self._backward: dict[Unit, None] = {}
        """Held by a backward."""
        self._staying: dict[Unit, None] = {}
        """Held though nothing runs in them, since more of the step will."""
        self._last: Unit | None = None
        """The one that backward is in."""
        self._is_backward = False
        self._is_extended = False
        """The running backward is one of several that count as one."""
        self._recomputed: dict[Unit, int] = {}
        """How often forward came to each again, less how often backward has come to it since; last at the end."""
        self._visited: dict[Unit, int] = {}
        """By unit: how often the running backward has reached it."""
        self._runs: dict[Unit, int] = {}
        """How often forward has come to each, by a call or back from one, since the last backward."""
        self._reduced: set[int] = set()
        """Groups that it has reduced."""
        self.is_in_step = False
        """A model has been called with gradients since the last step: what is called now is no evaluation."""
        self.is_joined = False
        """Ranks call models without gradients, each as often as it wants."""

    @property
    def any_stay(self) -> bool:
        """Whether units are held in steps though nothing runs in them."""
        return self.prefetch is not None and bool(self.prefetch.staying)

    def of(
        self, root: nn.Module, group_of: Mapping[int, int], is_asked: Callable[[nn.Module], bool]
    ) -> dict[nn.Module, Unit]:
        """Return the unit that each module under `root` belongs to: children of lists, others, or the root.

        Args:
            root: a model that was packed.
            group_of: by the identity of each managed Parameter, the group that it is in.
            is_asked: tells whether a user wants a module to be a unit.
        """
        if self._shards is None:
            return {}
        found: dict[nn.Module, Unit] = {}
        members: dict[Unit, dict[int, None]] = {}

        def visit(module: nn.Module, name: str, unit: Unit, *, splits: bool) -> None:
            if module in found:
                return
            found[module] = unit
            for param in module._parameters.values():
                if param is not None and id(param) in group_of:
                    members.setdefault(unit, {})[group_of[id(param)]] = None
            is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
            for key, child in module._modules.items():
                if child is None:
                    continue
                path = f"{name}.{key}" if name else key
                begins = is_asked(child) or (is_list and splits)
                visit(child, path, Unit(path) if begins else unit, splits=splits and not begins)

        visit(root, "", Unit(type(root).__name__, is_root=True), splits=True)
        for unit, groups in members.items():
            unit.groups = tuple(sorted(groups))
        self.add(members)
        self._unit_of.update(found)
        return found

    def add(self, units: Iterable[Unit]) -> None:
        """Take in units whose groups are known."""
        for unit in units:
            for group in unit.groups:
                self._users.setdefault(group, set()).add(unit)

    def enter(self, unit: Unit) -> None:
        """A call of a module begins that belongs to another unit than its caller.

        Raises:
            CapacityError: its weights do not fit DEVICE.
            RankError: a rank is missing, or somewhere else.
        """
        assert self._shards is not None
        if unit.depth == 0:
            self._hold(unit, unit)
            unit.depth = 1
            unit.is_read = unit.is_root or not unit.groups
            self._running.append(unit)
            self._run_in(unit)
            self._gather(unit, unit)
        else:
            unit.depth += 1

    def agree(self, question: str, *, holds: bool) -> bool:
        """Tell whether something holds on all ranks that have a batch; each of them asks, in the same words.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        return holds if self._shards is None else self._shards.agree(question, holds=holds)

    def announce_module(self, module: nn.Module) -> None:
        """Backward continues in the unit of a module. Raises what `enter` does."""
        self.announce(self._unit_of.get(module))

    @contextmanager
    def held(self, module: nn.Module) -> Iterator[None]:
        """Have the unit of a module here for several calls of it, that all ranks make. Raises what `enter` does."""
        unit = self._unit_of.get(module)
        if unit is not None:
            self.enter(unit)
        yield
        if unit is not None:
            self.leave(unit)

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """Have all backwards inside count as one: what they have been in is reduced when they have left it."""
        self._is_extended = True
        try:
            yield
        finally:
            self._is_extended = False
        self.end_backward()

    def leave(self, unit: Unit) -> None:
        """That call is over."""
        unit.depth -= 1
        if unit.depth == 0:
            self._running.remove(unit)
            self._leave(unit)
            if self._running:
                self._run_in(self._running[-1])

    def _run_in(self, unit: Unit) -> None:
        """Forward has come to a unit."""
        if self.is_in_step and not self._is_backward:
            self._runs[unit] = self._runs.get(unit, 0) + 1

    def come_to(self, unit: Unit) -> None:
        """Backward comes to a call in a unit that runs again first, as it may not on other ranks.

        So the unit comes by the same exchange as if the call had been kept. In the root there is nothing to come to: a
        call of several units begins with its own. Raises what `enter` does.
        """
        if not unit.is_root:
            self.announce(unit)

    def announce(self, unit: Unit | None) -> None:
        """Backward continues in a unit. Raises what `enter` does."""
        if unit is None or self._shards is None or (unit is self._last and unit in self._backward):
            return
        self._begin_backward()
        if unit is not self._last:
            self._visited[unit] = self._visited.get(unit, 0) + 1
            self._last = unit
            self._come_to(unit)
        self._keep(unit, *self._recomputed)
        self._reduce_left()
        reader = f"{unit} backward"
        if unit not in self._backward:
            self._hold(unit, reader)
            self._backward[unit] = None
        self._gather(unit, reader)

    def recompute(self, unit: Unit) -> None:
        """The forward of a unit runs again in a backward. Raises what `enter` does."""
        if self._shards is None or (unit in self._backward and unit is next(reversed(self._recomputed), None)):
            return
        self._begin_backward()
        if unit is not self._last:
            self._recomputed[unit] = self._recomputed.pop(unit, 0) + 1
        if unit in self._backward:
            return
        reader = f"{unit} recomputation"
        if unit in self._staying:
            self._hold(unit, reader)
            self._gather(unit, reader)
        elif not self._gather_beside(unit, reader):
            self._keep(unit)
            self._hold(unit, reader)
            self._gather(unit, reader)
        self._backward[unit] = None

    def _come_to(self, unit: Unit) -> None:
        """Backward has come to a unit: what was recomputed with others, and not reached, is not waited for."""
        count = self._recomputed.pop(unit, 0)
        if count > 1:
            self._recomputed[unit] = count - 1
        elif not count and not unit.is_root:
            self._recomputed.clear()

    def _gather_beside(self, unit: Unit, reader: str) -> bool:
        """Hold and gather a unit in addition to those that backward holds; tell whether all ranks have room for that.

        If not, nothing has changed.
        """
        assert self._shards is not None
        assert self.prefetch is not None
        if unit.is_alone or not self._backward:
            return False
        lists = [other.groups for other in (unit, *self._backward)]
        can = self._shards.fits_together(lists, always=self._root_groups())
        unit.is_alone = not self.prefetch.hold(unit.groups, reader=reader, can=can)
        return not unit.is_alone

    def end_backward(self) -> None:
        """No backward runs any more."""
        if self._is_extended:
            return
        if self._is_backward:
            self._release_backward()
            self._reduce_left(is_over=True)
            assert self.prefetch is not None
            self.prefetch.finish_reduction()
            if self.backwards.are_all:
                self._release_staying()
        self._close_backward()

    def begin_root(self, *, grad_enabled: bool) -> None:
        """A model is called from outside."""
        if self.is_joined and grad_enabled:
            raise StateError("manager.join(): a model is called with gradients inside; call it under torch.no_grad()")
        self.is_in_step = self.is_in_step or grad_enabled

    def replay_without_batch(self, label: str) -> None:
        """Wait for the other ranks, and take part in what they do until then. Raises what `enter` does."""
        if self.prefetch is not None:
            self.prefetch.replay_without_batch(label, num_backwards=self.backwards.num)

    def end_step(self) -> None:
        """The optimizer has stepped, on all ranks."""
        if self.prefetch is None:
            return
        num = self.prefetch.end_step(always=self._root_groups(), num_backwards=self.backwards.num)
        self.backwards.end_step(num)
        self.is_in_step = False

    def reset(self, *, step: bool) -> None:
        """Drop what interrupted calls left open, if they did; before the optimizer steps also what stays until then."""
        is_interrupted = bool(self._running) or self._is_backward
        if self.prefetch is not None and is_interrupted:
            self.prefetch.reset()
        self._close_backward()
        running, self._running = self._running, []
        for unit in running:
            unit.depth = 0
            self._release(unit)
        if step or is_interrupted:
            self._release_staying()

    def let_go(self) -> None:
        """Release what is held though nothing runs in it: units that stay, and the one that was gathered ahead."""
        if self.prefetch is not None:
            self.prefetch.drop_ahead()
        self._release_staying()

    def close(self) -> None:
        """Wait for what is under way."""
        if self.prefetch is not None:
            self.prefetch.reset()
        self.reset(step=True)

    def _begin_backward(self) -> None:
        if self._is_backward:
            return
        if self.is_joined:
            raise StateError("manager.join(): a backward runs inside; leave the block first")
        self._is_backward = True
        self.backwards.begin(lambda is_last: self.agree("the last backward before the step", holds=is_last))
        self._reduced = set()

    def _is_left(self, unit: Unit) -> bool:
        """Backward has been in it, and is not thought to come back."""
        is_done = self._visited.get(unit, 0) >= self._runs.get(unit, 1)
        return is_done and unit is not self._last and not unit.is_root

    def _reduce_left(self, *, is_over: bool = False) -> None:
        """Reduce what only units that backward has left have a part in; when it is over, all that it has been in."""
        if not self.backwards.is_last:
            return
        visited = {group for unit in self._visited for group in unit.groups} - self._reduced
        ready = {group for group in visited if is_over or all(map(self._is_left, self._users[group]))}
        if ready or is_over:
            self._reduced |= ready
            assert self.prefetch is not None
            self.prefetch.reduce(ready, is_over=is_over)

    def _stays(self, unit: Unit) -> bool:
        """A call or a backward leaves a unit: tell whether it goes on being held for what follows in the step."""
        is_over = not self.is_in_step or self.backwards.are_all or unit in self._staying
        return not is_over and self.prefetch is not None and unit.groups in self.prefetch.staying

    def _leave(self, unit: Unit) -> None:
        """Nothing runs in a unit for now."""
        assert self._shards is not None
        if self._stays(unit):
            self._shards.hold_spare(unit.groups)
            self._staying[unit] = None
        else:
            self._release(unit)

    def _hold(self, unit: Unit, reader: object) -> None:
        """Hold a unit that is about to be gathered, or go on holding what has stayed. Raises `CapacityError`."""
        assert self._shards is not None
        if unit in self._staying:
            del self._staying[unit]
            self._shards.hold_in_use(unit.groups)
            return
        try:
            self._shards.hold(unit.groups, reader=unit)
        except CapacityError:
            if not self._staying:
                raise
            self._try_gather(unit, reader, can=False)
            self._let_none_stay()
            self._shards.hold(unit.groups, reader=unit)

    def _gather(self, unit: Unit, reader: object) -> None:
        """Bring a unit together that is held on all ranks, once all of them have room for it."""
        if not self._try_gather(unit, reader, can=True):
            self._let_none_stay()
            self._try_gather(unit, reader, can=True)

    def _try_gather(self, unit: Unit, reader: object, *, can: bool) -> bool:
        assert self.prefetch is not None
        is_part = self.is_in_step or self._is_backward
        return self.prefetch.gather(unit.groups, reader=reader, is_part=is_part, can=can)

    def _let_none_stay(self) -> None:
        """A rank has no room for a unit beside those that stay: none does from now on. All ranks come here alike."""
        assert self.prefetch is not None
        self.prefetch.staying = frozenset()
        self._release_staying()

    def _release_staying(self) -> None:
        staying, self._staying = self._staying, {}
        for unit in staying:
            assert self._shards is not None
            self._shards.release_spare(unit.groups)

    def _close_backward(self) -> None:
        self._last, self.backwards.is_last, self._is_backward = None, False, False
        self._visited.clear()
        self._recomputed.clear()
        self._runs.clear()
        self._release_backward()

    def _keep(self, *units: Unit) -> None:
        """Release what backward holds, but for `units`."""
        for other in [other for other in self._backward if other not in units]:
            del self._backward[other]
            self._leave(other)

    def _release_backward(self) -> None:
        open_units, self._backward = self._backward, {}
        for unit in open_units:
            self._leave(unit)

    def _root_groups(self) -> list[int]:
        return sorted(group for group, users in self._users.items() if any(unit.is_root for unit in users))

    def _release(self, unit: Unit) -> None:
        assert self._shards is not None
        self._shards.release(unit.groups)
