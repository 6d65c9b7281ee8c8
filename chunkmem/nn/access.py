"""See every read of a parameter, and keep what is being read on DEVICE.

[Note: Reads] Modules read parameters of other modules (attention reads its output projection, a head reads the
embedding), so hooks on owners miss reads. Instead each module's `_parameters` is a mapping that reports lookups:
`module.weight` passes through it, `module.parameters()` and `state_dict()` do not. A read belongs to the innermost
running module, whose frame pins the chunk until it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NoReturn

import torch
from torch import nn

from chunkmem.errors import StateError
from chunkmem.nn.binding import BoundChunk, ManagedParameter
from chunkmem.nn.guard import AccessGuard
from chunkmem.nn.units import Unit
from chunkmem.nn.values import storage_id, tensors_in
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.store import Chunk
from chunkmem.types import Tier


def in_backward() -> bool:
    """Tell whether autograd is running a backward in this thread; a forward inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def not_copyable() -> StateError:
    """Return the error for `deepcopy`, `pickle` and `torch.save` of a managed module."""
    return StateError(
        "a managed model cannot be copied or pickled: its parameters live in chunks. Take manager.state_dict() and "
        "load it into a model built anew"
    )


def _is_looked_up_to_name_it() -> bool:
    """Tell whether `torch.distributed.checkpoint` asks for a parameter, whose values it does not use."""
    # Below are `read`, `ParameterReads.__getitem__` and `nn.Module.__getattr__`.
    return sys._getframe(4).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


class ParameterReads(dict[str, nn.Parameter | None]):
    """A module's `_parameters`, reporting reads and refusing replacements of managed parameters."""

    __slots__ = ("_managed", "_on_read")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        managed: Mapping[str, ManagedParameter],
        on_read: Callable[[ManagedParameter], None],
    ) -> None:
        super().__init__(parameters)
        self._managed = managed
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        managed = self._managed.get(name)
        if managed is not None:
            self._on_read(managed)
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        managed = self._managed.get(name)
        if managed is not None and value is not managed.param:
            raise StateError(
                f"parameter {managed.name} was packed into a chunk and cannot be replaced; write to it in place inside "
                "manager.gather(), or load values with manager.load_state_dict()"
            )
        for other in self._managed.values() if managed is None and value is not None else ():
            if other.param is value:
                raise StateError(
                    f"parameter {other.name} was packed into a chunk and cannot get the name {name} too; do that "
                    "before manager.wrap() or inside manager.init()"
                )
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._managed:
            raise StateError(f"parameter {self._managed[name].name} was packed into a chunk and cannot be removed")
        dict.__delitem__(self, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copyable()


class Frame:
    """One running call of a module: what it has read, and so what it pins."""

    __slots__ = (
        "containers", "given", "groups", "guard", "inputs", "module", "name", "opened", "reads", "recomputing", "unit"
    )  # fmt: skip

    def __init__(self, name: str, module: nn.Module | None = None, *, recomputing: bool = False) -> None:
        self.name = name
        self.module = module
        self.recomputing = recomputing
        self.reads: dict[ManagedParameter, None] = {}
        self.groups: dict[int, None] = {}
        self.unit: Unit | None = None
        """The unit of exchange that the module belongs to; None with one rank."""
        self.opened: Unit | None = None
        """The same if it was entered by this call."""
        self.guard: AccessGuard | None = None
        """The check that runs while this frame does."""
        self.inputs: list[tuple[torch.Tensor, int]] = []
        """(input that requires grad, its version at entry); noted where a frozen read ends with its gradient."""
        self.containers: list[object] = []
        """Lists and dicts it was given: it may put outputs into them."""
        self.given: dict[int, torch.Tensor] = {}
        """The tensors that were in them at entry, by id."""

    def __str__(self) -> str:
        return f"{self.name} {'recomputation' if self.recomputing else 'forward'}" if self.module else self.name


class AccessTracker:
    """The stack of running modules, and the reads outside of any."""

    def __init__(self, executor: DemandExecutor) -> None:
        self._executor = executor
        self.chunks: dict[int, Chunk] = {}
        """PARAM chunk by group."""
        self.stack: list[Frame] = []
        # A read outside of any module that may become part of a graph: autograd keeps the parameter's memory, and
        # nothing tells when its backward is over, so it stays pinned until the step.
        self._outside_graph = Frame("<outside any module>")
        self._outside_no_grad = Frame("<outside any module>")
        self._outside_backward = Frame("<outside any module, in backward>")
        executor.relieve = self._relieve

    @property
    def pinning(self) -> tuple[Frame, ...]:
        """Frames that pin something now."""
        outside = (self._outside_graph, self._outside_no_grad, self._outside_backward)
        return tuple(frame for frame in (*outside, *self.stack) if frame.groups)

    def read(self, managed: ManagedParameter) -> None:
        """Serve a read: the parameter is on DEVICE when this returns, and stays while its reader runs.

        Raises:
            CapacityError: it does not fit beside what else is being read.
            StateError: the manager is closed.
        """
        if not self.stack and _is_looked_up_to_name_it():
            return
        frame = self.stack[-1] if self.stack else self._outside()
        if managed in frame.reads:
            return
        if self._executor.closed is not None:
            raise StateError(f"parameter {managed.name}: {self._executor.closed}")
        if managed.group not in frame.groups:
            self._executor.pin(self.chunks[managed.group], Tier.DEVICE, reader=frame)
            frame.groups[managed.group] = None
        frame.reads[managed] = None

    def push(self, frame: Frame, announced: Iterable[ManagedParameter]) -> None:
        """A module begins to run; `announced` are parameters it will use without looking them up."""
        self.stack.append(frame)
        for managed in announced:
            self.read(managed)

    def pop(self, module: nn.Module) -> Frame | None:
        """A module is left. Frames above its own were interrupted and are dropped; None if it has no frame."""
        if not any(frame.module is module for frame in reversed(self.stack)):
            return None
        while self.stack[-1].module is not module:
            self.release(self.stack.pop())
        return self.stack.pop()

    def hand_on(self, frame: Frame, result: object) -> None:
        """Count what a module returns of its parameters' own memory (`return self.weight[:n]`) as read by its caller.

        Call it after `pop` and before `release`: the memory has not been given up in between.
        """
        owners = {managed.bound.storage_id: managed for managed in frame.reads}
        for tensor in tensors_in(result):
            managed = owners.get(storage_id(tensor) or 0)
            if managed is not None:
                for other in frame.reads:
                    if other.group == managed.group:
                        self.read(other)

    def release(self, frame: Frame) -> None:
        """A frame is over: unpin what it has read."""
        if frame.guard is not None:
            frame.guard.leave()
            frame.guard = None
        for group in frame.groups:
            self._executor.unpin(self.chunks[group], Tier.DEVICE)
        frame.groups.clear()
        frame.reads.clear()

    def is_stale(self, module: nn.Module) -> bool:
        """Tell whether the stack is left over from a call that was torn down without its hooks (KeyboardInterrupt).

        Only then does the bottom module begin again although its earlier call is not running any more; a module that
        calls itself is. Python's own stack tells the two apart.
        """
        if not self.stack or self.stack[0].module is not module:
            return False
        running = 0
        frame = sys._getframe(1)
        while frame is not None:
            running += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
            frame = frame.f_back  # type: ignore[assignment]
        return running <= 1

    def end_backward(self) -> None:
        """A backward is over: so are the reads it made outside of modules."""
        self.release(self._outside_backward)

    def let_go(self, groups: Set[int]) -> None:
        """Unpin what was read outside of any module in these groups, unless something holds on to it."""
        for frame in (self._outside_no_grad, self._outside_graph):
            for group in frame.groups.keys() & groups:
                self._drop(group, frame)

    def reset(self, *, step: bool) -> None:
        """Drop what an interrupted call left; at a step, also the reads that waited for it."""
        while self.stack:
            self.release(self.stack.pop())
        self.release(self._outside_no_grad)
        self.release(self._outside_backward)
        if step:
            self.release(self._outside_graph)

    def _relieve(self) -> bool:
        """Unpin the oldest read outside of any module: of a loop over all modules, say, that only looked at shapes."""
        outside = (self._outside_no_grad, self._outside_graph)
        return any(self._drop(group, frame) for frame in outside for group in list(frame.groups))

    def _drop(self, group: int, frame: Frame) -> bool:
        """Unpin a group that was read outside of any module; False if something holds on to it."""
        chunk = self.chunks[group]
        assert isinstance(chunk.home, BoundChunk)
        if chunk.home.is_held(besides=len(chunk.replicas[Tier.DEVICE].views or ())):
            return False
        for managed in [managed for managed in frame.reads if managed.group == group]:
            del frame.reads[managed]
        del frame.groups[group]
        self._executor.unpin(chunk, Tier.DEVICE)
        return True

    def _outside(self) -> Frame:
        if in_backward():
            return self._outside_backward
        return self._outside_graph if torch.is_grad_enabled() else self._outside_no_grad
