"""Find who in autograd's graph keeps the memory of chunks: what nodes have saved, and what will have run before it.

Where gradients do not tell, references to that memory are counted instead: of a call that is recomputed, a graph whose
saved tensors nobody sees, over ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from operator import methodcaller
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from chunkmem.activations.saved_tensors import SavedReference
from chunkmem.modules.binding import BoundChunk, ManagedParameter, trained
from chunkmem.modules.frames import Frame
from chunkmem.ranks.local_parts import is_dtensor
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.values import storage_id

_INPUT = -1
"""Stands for the inputs of a call among the groups that a node leads to."""
_LIST = (list, tuple)


@dataclass(frozen=True)
class Findings:
    """What the graph of a call keeps."""

    saved: Mapping[int, int]
    """By group: references that nodes of its graph hold."""
    uncertain: frozenset[int]
    """Groups of which a node keeps memory that does not lead to what backward waits for.

    Backward releases a call's chunks when the gradients of the parameters it read have landed. That is late enough if
    every node that has saved memory of the chunk leads to one of those parameters: then it has run before. In
    `F.linear(f(x, w.detach()), w)`, `f` leads to `x` only. The nodes of such a call are pinned one by one
    (`chunkmem.modules.nodes`), or, where that cannot be, backward counts references besides.
    """


class GraphSearch:
    """Searches the graphs of calls, once for all that look the same."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[object, Findings]] = weakref.WeakKeyDictionary()
        self._fields: dict[type, tuple[str, ...]] = {}
        """By type of node: the attributes that show what it has saved, without running anybody's hooks for it."""

    def find(self, frame: Frame, left: Mapping[int, int], outputs: Collection[torch.Tensor]) -> Findings:
        """Return what the graph that leads to `outputs` keeps of the groups that a call has read.

        Args:
            frame: the call; it is over.
            left: by group, how many references it has left itself.
            outputs: what it made, as far as we see; each has a `grad_fn`.
        """
        if frame.module is None:
            return self._search(frame, outputs)
        known = self._known.setdefault(frame.module, {})
        trains = frozenset(trained(frame.reads))
        made = tuple(type(t.grad_fn) for t in outputs)
        looks = (tuple(left.items()), frame.end_node - frame.first_node, trains, made, len(frame.inputs))
        found = known.get(looks)
        if found is None:
            found = known[looks] = self._search(frame, outputs)
        return found

    def saved_in(self, node: Any, groups: Mapping[int, int], params: Mapping[int, ManagedParameter]) -> Collection[int]:
        """Return the groups whose memory a node has saved.

        Args:
            node: of autograd's graph.
            groups: by the identity of their storage.
            params: the parameters that may be saved themselves, by identity.
        """
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            return self._saved_in(node, groups, params, {})

    def is_checkpointed(self, node: Any) -> bool:
        """Tell whether a checkpoint keeps what a node has saved: it may be memory of anything that was read in it."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            return any(type(packed).__module__ == "torch.utils.checkpoint" for packed in self._packed_in(node))

    def _search(self, frame: Frame, outputs: Collection[torch.Tensor]) -> Findings:
        # To show what it has saved, a node runs operators, which no mode of the user's has to see.
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
            groups = {managed.storage_id: managed.group for managed in frame.reads}
            params = {id(managed.param): managed for managed in frame.reads}
            inputs = {id(tensor) if tensor.grad_fn is None else tensor.grad_fn for tensor, _ in frame.inputs}
            nodes = nodes_between([tensor.grad_fn for tensor in outputs], frame.first_node)
            leads: dict[Any, set[int]] = {}
            saved = dict.fromkeys(frame.groups, 0)
            uncertain: set[int] = set()
            counted: dict[int, torch.Tensor] = {}
            for node in nodes:  # what a node leads to comes before it
                ends = leads[node] = set()
                for following, _ in node.next_functions:
                    if following is not None:
                        ends |= leads[following] if following in leads else _end(following, params, inputs)
                if is_inside(node, frame.inside):
                    continue
                for group, count in self._saved_in(node, groups, params, counted).items():
                    saved[group] += count
                    if group not in ends and _INPUT not in ends:
                        uncertain.add(group)
            return Findings({group: count for group, count in saved.items() if count}, frozenset(uncertain))

    def _saved_in(
        self,
        node: Any,
        groups: Mapping[int, int],
        params: Mapping[int, ManagedParameter],
        counted: dict[int, torch.Tensor],
    ) -> Counter[int]:
        """Return the references that a node holds, by group; tensors in `counted` hold theirs once for all nodes."""
        found = Counter[int]()
        for tensor in self._tensors_of(node):
            if id(tensor) in params:
                found[params[id(tensor)].group] += 1
                continue
            group = groups.get(storage_id(tensor))
            if group is None:
                continue
            found.setdefault(group, 0)
            if id(tensor) in counted:
                continue
            counted[id(tensor)] = tensor
            found[group] += 1
            base = tensor._base
            if base is not None and id(base) in params:
                found[params[id(base)].group] += 1
            elif base is not None and id(base) not in counted and storage_id(base) in groups:
                counted[id(base)] = base
                found[group] += 1
        return found

    def _tensors_of(self, node: Any) -> Iterator[torch.Tensor]:
        for packed in self._packed_in(node):
            tensor = packed.tensor if isinstance(packed, SavedReference) else packed
            if is_dtensor(tensor):
                yield from (each._local_tensor for each in (tensor, tensor._base) if each is not None)
            elif isinstance(tensor, torch.Tensor):
                yield tensor

    def _packed_in(self, node: Any) -> Iterator[Any]:
        """Yield what is kept of the tensors that a node has saved."""
        fields = self._fields.get(type(node))
        if fields is None:
            names = (name for name in dir(type(node)) if name.startswith("_raw_saved_"))
            fields = self._fields[type(node)] = tuple(names)
        for field in fields:
            try:
                value = getattr(node, field)
            except RuntimeError:  # it has been freed, or cannot be shown: then it is not found
                continue
            for saved in value if isinstance(value, _LIST) else (value,):
                if saved is not None:
                    yield saved.data


def _end(node: Any, params: Mapping[int, ManagedParameter], inputs: Collection[object]) -> set[int]:
    """Return what an edge out of a call's own graph leads to: a group whose gradient is waited for, or an input."""
    if node in inputs:
        return {_INPUT}
    if not _is_end(node):
        return set()
    leaf = node.variable
    if id(leaf) in params:
        return {params[id(leaf)].group}
    return {_INPUT} if id(leaf) in inputs else set()


def nodes_between(starts: Iterable[Any], first: int, stop: float = inf) -> list[Any]:
    """Return the nodes among `starts`, and in what they lead to, whose numbers are in [first, stop); oldest first.

    Numbers count the nodes that one thread makes. Accumulations of gradients are left out.
    """
    found: dict[Any, None] = {}
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node is None or node in found or _is_end(node) or not first <= node._sequence_nr() < stop:
            continue
        found[node] = None
        pending += [following for following, _ in node.next_functions]
    return sorted(found, key=methodcaller("_sequence_nr"))


def is_inside(node: Any, calls: Iterable[tuple[int, int]]) -> bool:
    """Tell whether one of these calls has made a node; for the numbers see `nodes_between`."""
    number = node._sequence_nr()
    return any(first <= number < stop for first, stop in calls)


def _is_end(node: Any) -> bool:
    """Tell whether a node accumulates a gradient; a Python function may have anything as an attribute."""
    return not isinstance(node, BackwardCFunction) and hasattr(node, "variable")


_BEFORE = 0
"""Stands for what was there before any module was recomputed."""


class ReferenceCounts:
    """Counts by running backward, which is named by the id of autograd's graph task."""

    def __init__(self, chunks: Mapping[int, Chunk], *, is_rehearsal: bool) -> None:
        """Begin with none.

        Args:
            chunks: PARAM chunk by group.
            is_rehearsal: nothing is counted for recomputed calls: views of fake tensors cannot be told apart.
        """
        self._chunks = chunks
        self._is_rehearsal = is_rehearsal
        self._levels: dict[int, dict[int, int]] = {}
        """By backward and group: the references that are left when all calls announced so far have been through."""
        self._recomputed_in: dict[int, dict[int, Counter[int]]] = {}
        """By backward and group: references left by recomputed calls, by the identity of their module."""

    def lower(self, task: int, group: int, *, by: int) -> None:
        """Expect so many references of a group to go, besides those that are expected to go already."""
        levels = self._levels.setdefault(task, {})
        levels[group] = (levels[group] if group in levels else self._num(group)) - by

    def is_through(self, group: int) -> bool:
        """Tell whether all references of a group are gone that the running backward expects to go."""
        level = self._levels.get(torch._C._current_graph_task_id(), {}).get(group)
        return level is None or self._num(group) <= level

    def recomputed(self, frame: Frame, left: Mapping[int, int]) -> None:
        """A call inside of backward has left references, in tensors that somebody saves for its graph."""
        recomputed = self._recomputed_in.setdefault(torch._C._current_graph_task_id(), {})
        for group, count in left.items():
            if group not in recomputed:
                recomputed[group] = Counter({_BEFORE: self._num(group) - count})
            recomputed[group][id(frame.module)] += count

    def has_used_up(self, module: int, group: int) -> bool:
        """Tell whether the references that a module left when it was recomputed are gone; others' may be there.

        Args:
            module: its identity.
            group: whose chunk they are of.
        """
        recomputed = self._recomputed_in.get(torch._C._current_graph_task_id(), {}).get(group)
        if recomputed is None or module not in recomputed or self._is_rehearsal:
            return True
        if self._num(group) > recomputed.total() - recomputed[module]:
            return False
        del recomputed[module]
        return True

    def end_backward(self, task: int) -> None:
        """A backward is over."""
        self._levels.pop(task, None)
        self._recomputed_in.pop(task, None)

    def clear(self) -> None:
        """No backward runs."""
        self._levels.clear()
        self._recomputed_in.clear()

    def _num(self, group: int) -> int:
        return cast(BoundChunk, self._chunks[group].home).num_foreign_references(besides=0)
