"""See every read of a parameter, and keep what is being read on DEVICE.

A read, of which `ParameterReads` tells, belongs to the innermost running module, whose frame pins the chunk until it
returns. Outside of modules a lookup reads nothing yet: the parameter serves itself when an operator gets it
(`chunkmem.modules.parameter_operators`).

[Note: References] What a call leaves behind is counted: references to the chunk's memory and to the parameters it read,
at its end less at its beginning. A graph that backward will be announced for may keep them: the memory comes back for
it. All others (`self.kept = self.weight.data`, a loss hidden in a closure) are somebody's who may use the memory at any
time, so the chunk is *held*: it stays pinned on DEVICE until they are gone.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import nn

from chunkmem.data.errors import StateError
from chunkmem.data.types import Tier
from chunkmem.modules.begun import StepLedger
from chunkmem.modules.binding import BoundChunk, ManagedParameter
from chunkmem.modules.blocks import Together
from chunkmem.modules.frames import Frame, Referred
from chunkmem.modules.transforms import check_transforms
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.values import storage_id


class AccessTracker:
    """The stack of running modules, and the chunks that are held for somebody outside of them."""

    def __init__(self, pager: Pager, ledger: StepLedger, *, before_lookup: Callable[[], None]) -> None:
        """Begin with nothing; `ledger` knows who may be read, and `before_lookup` comes before what modules look up."""
        self._pager = pager
        self.ledger = ledger
        self._before_lookup = before_lookup
        self.chunks: dict[int, Chunk] = {}
        """PARAM chunk by group."""
        self.stack: list[Frame] = []
        self.graph_references: dict[int, int] = {}
        """By group: references of graphs whose backward will be announced."""
        self.num_calls: Counter[ManagedParameter] = Counter()
        """Calls since the last step that have read each, and whose backward is to come; 0: or that are recomputed."""
        self.num_steps = 0
        """Optimizer steps so far; what was awaited before the last one counts no more."""
        self._addressed: dict[Chunk, None] = {}
        """Of which somebody has an address: it is kept until the next call of a model or step."""
        self._held = pager.held
        """Pinned for somebody who keeps references; see [Note: References]."""
        self.resident: list[Chunk] = []
        """Pinned as they stay on DEVICE from step to step; see [Note: Resident models] in `chunkmem.modules.hooks`."""
        self.together: dict[ManagedParameter, Together] = {}
        """Weights of blocks: [Note: Blocks as a whole] in `chunkmem.modules.blocks`."""
        pager.holder = self
        pager.events.resident.append(self.stay)

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        for managed in parameters:
            self.chunks[managed.group] = self._pager.store.weights(managed.group)

    def look_up(self, managed: ManagedParameter) -> None:
        """Serve a lookup: inside of modules the parameter is on DEVICE when this returns. Raises what `read` does."""
        if self.stack and self.stack[-1].thread == threading.get_ident():
            self._before_lookup()
            self.read(self.stack[-1], managed)

    def read(self, frame: Frame, managed: ManagedParameter) -> None:
        """Serve a read: the parameter is on DEVICE when this returns, and stays while its reader runs.

        Raises:
            CapacityError: the chunk does not fit together with what else is being read.
            StateError: the manager is closed, or a transform of `torch.func` runs that cannot follow; or it is computed
                with on HOST, and the module that reads it computes on DEVICE, or the other way round.
        """
        if managed in frame.reads:
            return
        if self._pager.closed is not None:
            raise StateError(f"parameter {managed.name}: {self._pager.closed}")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            check_transforms(managed.name)
        if managed in self.ledger.begun:
            self.ledger.require_over(f"{frame} reads parameter {managed.name}", (managed,))
        group = managed.group
        if group not in frame.groups:
            chunk = self.chunks[group]
            if frame.module is not None and frame.tier is not chunk.compute_tier:
                raise StateError(
                    f"{frame} reads parameter {managed}, which is on {chunk.compute_tier.name} for good, and computes "
                    f"on {frame.tier.name}; call the module that owns it, or have both compute on one tier (see "
                    "manager.on_host and use_cpu_embedding)"
                )
            self._pager.pin(chunk, reader=frame)
            frame.groups[group] = managed.bound.num_references()
        managed.open()
        frame.reads[managed] = managed.num_references()

    def push(self, frame: Frame, announced: Iterable[ManagedParameter]) -> None:
        """A module begins to run; `announced` are parameters it will use without looking them up."""
        self.stack.append(frame)
        if frame.module is not None:
            self._pager.policy.entered(frame)
        for managed in announced:
            self.read(frame, managed)

    def entered_backward(self, name: str) -> None:
        """The backward of a call of a module begins; see `StepPolicy.entered`."""
        self._pager.policy.entered(f"{name} backward")

    def pop(self, module: nn.Module) -> Frame | None:
        """A module is left. Frames above its own were interrupted and are dropped; None if it has no frame."""
        for frame in self.stack:
            if frame.module is module:
                while self.stack[-1].module is not module:
                    self.release(self.stack.pop())
                return self.stack.pop()
        return None

    def hand_on(self, frame: Frame, result: Sequence[torch.Tensor]) -> dict[Referred, int]:
        """Count what a module returns of its parameters' own memory (`return self.weight[:n]`) as read by its caller.

        `result` are the tensors in what it returns.

        Call it after `pop` and before `release`: the memory has not been given up in between. Returns how many
        references are the caller's now.
        """
        handed: dict[Referred, int] = {}
        if not self.stack or not frame.reads:
            return handed
        caller = self.stack[-1]
        owners = {managed.storage_id: managed.group for managed in frame.reads}
        aliases = {id(t): (t, owners[memory]) for t in result if (memory := storage_id(t)) in owners}
        for managed in frame.reads if aliases else ():
            views = [view for view, group in aliases.values() if group == managed.group]
            if views and managed not in caller.reads:
                is_first = managed.group not in caller.groups
                self.read(caller, managed)
                views = [view for view in views if view is not managed.param]
                if is_first:
                    caller.groups[managed.group] -= len(views)
                    handed[managed.group] = len(views)
                of_it = sum(view._base is managed.param for view in views)
                caller.reads[managed] -= of_it
                handed[managed] = of_it
        return handed

    def references(self, frame: Frame, *, handed: Mapping[Referred, int]) -> dict[int, int]:
        """Return, by group, how many references a call that is over has left itself, where there are any.

        Call it between `pop` and `release`. What it has left, but for what it has `handed` on, counts as left inside of
        those of its callers that have read the same.
        """
        own: dict[Referred, int] = {}
        for managed in frame.reads:
            if managed.group not in own:
                own[managed.group] = managed.bound.num_references() - frame.groups[managed.group]
            own[managed] = managed.num_references() - frame.reads[managed]
        for further in (handed, frame.left_inside):
            for key in further:
                own[key] -= further[key]
        frame.end_node = torch._C._autograd._get_sequence_nr()
        if self.stack:
            self.stack[-1].inside.append((frame.first_node, frame.end_node))
        for caller in self.stack:
            for key in own if caller.reads else ():
                if own[key] and (key in caller.groups or key in caller.reads):
                    caller.left_inside[key] = caller.left_inside.get(key, 0) + own[key]
        left = dict[int, int]()
        for managed in frame.reads:
            group = managed.group
            left[group] = (left[group] if group in left else own[group]) + own[managed]
        return {group: left[group] for group in left if left[group] > 0}

    def release(self, frame: Frame, *, held: Collection[int] = ()) -> None:
        """A frame is over: unpin what it has read, but for `held` groups, which somebody keeps references to."""
        if frame.guard is not None:
            frame.guard.leave()
            frame.guard = None
        reads, frame.reads = frame.reads, {}
        groups, frame.groups = frame.groups, {}
        try:
            for managed in reads:
                managed.close()
        finally:
            for group in groups:
                chunk = self.chunks[group]
                if group in held and chunk not in self._held:
                    self._pager.expose(chunk)
                else:
                    self._pager.unpin(chunk)

    def is_stale(self, module: nn.Module) -> bool:
        """Tell whether the stack is left over from a call that was torn down without its hooks (KeyboardInterrupt).

        Asked outside of backward, when `module` is called that may be a root: then the bottom call is not running any
        more, or was a recomputation. Python's own stack tells.
        """
        if not self.stack:
            return False
        bottom = self.stack[0]
        if bottom.recomputing:
            return True
        running = 0
        frame = sys._getframe(1)
        while frame is not None:
            running += frame.f_code is nn.Module.__call__.__code__ and frame.f_locals.get("self") is bottom.module
            frame = frame.f_back  # type: ignore[assignment]
        return running <= int(bottom.module is module)  # the call that begins is on Python's stack, too

    def is_outermost(self, root: nn.Module) -> bool:
        """Tell whether a call of a model is an outermost one, be it that an interrupted call is left on the stack."""
        return not self.stack or self.is_stale(root)

    def relieve(self) -> bool:
        """Release chunks that nobody keeps references to any more; False if there are none."""
        has_let_go = False
        for chunk in tuple(self._held):  # finalizers that run meanwhile may use parameters, and so hold and let go
            if chunk in self._held and not self._is_kept(chunk) and chunk in self._held:
                self._let_go(chunk)
                has_let_go = True
        return has_let_go

    def stay(self, is_resident: bool) -> None:
        """Have all chunks stay on DEVICE, and their parameters be open, or no longer; see [Note: Resident models]."""
        if is_resident:
            for chunk in self.chunks.values():
                self._pager.keep(chunk, reader="a model that fits")
                cast(BoundChunk, chunk.home).stay(partial(setattr, chunk, "is_written_past", True))
                self.resident.append(chunk)
            return
        self.hold_kept(self.resident)
        with ExitStack() as stack:  # all of it, also where a user has left a parameter that cannot be kept
            while self.resident:
                chunk = self.resident.pop()
                stack.callback(self._pager.let_go, chunk)
                stack.callback(cast(BoundChunk, chunk.home).may_leave)

    def holders(self) -> tuple[str, ...]:
        """Return the names of the parameters whose chunks are held."""
        homes = (cast(BoundChunk, chunk.home) for chunk in tuple(self._held))
        kept = (m for home in homes for m in home.parameters if m.num_references() > 0)
        return tuple(managed.name for managed in kept) or tuple(chunk.label for chunk in self._held)

    def referenced(self) -> list[str]:
        """Return the labels of the weights on DEVICE whose memory somebody keeps, graphs included."""
        return [
            chunk.label
            for chunk in self.chunks.values()
            if chunk.compute_tier is Tier.DEVICE and _num_foreign(chunk) > 0
        ]

    def hold_kept(self, chunks: Iterable[Chunk]) -> None:
        """Hold those of these chunks, which the caller has pinned, that somebody keeps references to."""
        for chunk in chunks:
            if chunk not in self._held and self._is_kept(chunk):
                self._pager.pin(chunk, reader="held")
                self._pager.expose(chunk)

    def keep_address(self, chunks: Iterable[Chunk]) -> None:
        """Hold these chunks, which the caller has pinned, until the next call of a model or step."""
        self._addressed |= dict.fromkeys(chunks)
        self.hold_kept(self._addressed)

    def refresh_held(self) -> None:
        """Bring the newest values to where somebody outside looks: an update may have been made elsewhere."""
        for chunk in tuple(self._held):
            self._pager.pin(chunk, reader="held")
            self._pager.unpin(chunk)

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted call left; at a step, also what graphs of before it are waited for."""
        while self.stack:
            self.release(self.stack.pop())
        if step:
            self.graph_references.clear()
            self.num_steps += 1
            self.num_calls = Counter()
        self._addressed.clear()
        self.relieve()

    def close(self) -> None:
        """The manager is closed: nothing is held any more."""
        self.reset(step=True)
        for chunk in list(self._held):
            if chunk.is_remote:  # unpinned, its memory would go, and somebody refers to it
                del self._held[chunk]
            else:
                self._let_go(chunk)

    def _is_kept(self, chunk: Chunk) -> bool:
        return chunk in self._addressed or _num_foreign(chunk) > self.graph_references.get(chunk.id.group, 0)

    def _let_go(self, chunk: Chunk) -> None:
        self._pager.notice_writes(chunk)
        del self._held[chunk]
        self._pager.unpin(chunk)


def _num_foreign(chunk: Chunk) -> int:
    replica = chunk.replicas.get(chunk.compute_tier)
    views = () if replica is None else replica.views or ()
    return cast(BoundChunk, chunk.home).num_foreign_references(besides=len(views))
