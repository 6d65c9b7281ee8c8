"""Steps of optimizers that have begun and are not over: what they have done so far, and what is refused until then.

[Note: Begun steps] A step updates one chunk group after the other, and any of them may raise an error: a disk fails, or
HOST is full. What has been updated then cannot be undone, and nobody but the step knows what is left:

    step()         | update 0 | update 1 | 2: TierIOError       |           step() again: | update 2 | update 3 | over
    BegunStep      |      {0} |   {0, 1} |                {0, 1}, and by which options, multiplier, ...
    who reads weights of 0 to 3, discards gradients, saves      |  StateError

So a step notes what it has decided and done, and `step()` continues from there. Until then no weight of its optimizer
is read, as some are of before the step and others of after it, and `zero_grad()` is refused: it could complete the
step, but who repeats the batch after an error would train on it twice. The same holds from an update inside backward
to its step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter


@dataclass(eq=False)
class BegunStep:
    """What an optimizer has updated since its last step, inside backward or in a `step()` that is not over."""

    options: str
    """In words."""
    hypers: list[Hashable]
    """By parameter group, as its rule has read them."""
    known: list[ManagedParameter]
    """All that the optimizer has, on whichever rank."""
    updated: dict[ManagedParameter, None] = field(default_factory=dict)
    is_stepping: bool = False
    """`step()` has changed something, and continues if it is called again."""
    has_updated: bool = False
    """Some weights are new, or may be: if `step()` fails now, nobody may read any until it is over."""
    closure: Callable[[], Any] | None = None
    """That `step()` has called, and does not call again."""
    result: Any = None
    """What the closure has returned."""
    pending: list[ManagedParameter] = field(default_factory=list)
    """What `step()` updates on this rank; `updated` is part of it from then on."""
    anywhere: list[ManagedParameter] = field(default_factory=list)
    """What it updates on any rank."""
    is_scaled: bool = False
    """The norm of the gradients is known, and they have been clipped, or will be by `multiplier`."""
    multiplier: float | None = None
    """Of gradients."""
    overflows: bool = False
    """The step changes nothing."""
    excluded: list[tuple[list[torch.Tensor], Hashable]] = field(default_factory=list)
    """Parameters outside of chunks that are left to update, with their options."""

    def require_options(self, options: str) -> None:
        """Raise if `step()` would have updated otherwise.

        Raises:
            StateError: options were changed after backward.
        """
        if options != self.options:
            raise StateError(
                f"the optimizer's options were changed between backward and step(), from {self.options} to {options}; "
                f"{len(self.updated)} parameters have been updated with the former inside backward. Change them after "
                "step(), or make the optimizer without in_backward"
            )

    def require_consumed(self, is_consumed: Callable[[ManagedParameter], bool]) -> None:
        """Raise if `step()` would have seen other gradients than those that `is_consumed` tells of.

        Raises:
            StateError: some were discarded or replaced after backward.
        """
        changed = [managed for managed in self.updated if not is_consumed(managed)]
        if changed:
            raise StateError(
                f"the gradients of {len(changed)} parameters, among them {changed[0].name}, were discarded or replaced "
                "between backward and step(), and had been used by updates inside backward already: call zero_grad() "
                "after step(), or make the optimizer without in_backward"
            )

    def require_closure(self, closure: Callable[[], Any]) -> None:
        """Raise a `StateError` if a step that continues after an error is given another closure than it began with."""
        if (self.is_stepping or self.closure is not None) and closure != self.closure:
            raise StateError(
                "optimizer.step(closure) after an error in optimizer.step() is given another closure, which would not "
                "be called: call optimizer.step() without one first, which takes the gradients that are there"
            )

    def require_new(self, call: str) -> None:
        """Raise a `StateError` if `step()` has failed, and is to be continued."""
        if self.is_stepping:
            raise StateError(
                f"{call} after an error in optimizer.step(), which had changed some of the gradients: call "
                "optimizer.step() again, which updates the others, or optimizer.zero_grad()"
            )

    def left(self, has_gradient: Callable[[ManagedParameter], bool]) -> list[ManagedParameter]:
        """Return what is to be updated yet; `has_gradient` tells whether there are values of one that has landed.

        Raises:
            StateError: a gradient has gone since the step began.
        """
        left = [managed for managed in self.pending if managed not in self.updated]
        gone = [managed for managed in left if self.is_stepping and not has_gradient(managed)]
        if gone and not self.overflows:
            raise StateError(
                f"optimizer.step() cannot go on after an error: the gradient of parameter {gone[0].name} has been "
                f"discarded since, or was lost with a copy that failed, and {len(self.updated)} of {len(self.pending)} "
                "parameters are updated; load what was saved last with manager.load(path, optimizer)"
            )
        return left


class StepLedger:
    """The steps of all optimizers that have begun and are not over; see [Note: Begun steps]."""

    def __init__(self) -> None:
        """Begin with none."""
        self.begun: dict[ManagedParameter, BegunStep] = {}
        """By parameter that has been updated, or waits for a `step()` that continues: nobody may read it."""
        self.half_scaled: dict[ManagedParameter, str] = {}
        """By parameter: the call that has failed while it changed gradients, and is to be repeated before more come."""
        self.half_updated = ""
        """What was being updated when that failed."""

    @property
    def is_empty(self) -> bool:
        """No step has begun that is not over."""
        return not (self.begun or self.half_scaled)

    def end(self, params: Collection[ManagedParameter]) -> None:
        """The steps of `params` are over."""
        for noted in (self.begun, self.half_scaled):
            for managed in params if noted else ():
                if managed in noted:
                    del noted[managed]

    @contextmanager
    def updating(self, what: str) -> Iterator[None]:
        """Surround what updates weights and states in place."""
        self.half_updated = what
        yield  # an error in it leaves neither the old values nor the new ones, and that is noted for good
        self.half_updated = ""

    def require_sound(self, call: str) -> None:
        """Raise a `StateError` if an update has failed in its middle: `call` cannot go on."""
        if self.half_updated:
            raise StateError(
                f"{call}: an update of {self.half_updated} has failed in its middle, and left values that are neither "
                "those before it nor those after; load what was saved last with manager.load(path, optimizer)"
            )

    def require_over(self, call: str, params: Collection[ManagedParameter] | None = None) -> None:
        """Raise if the step of some of `params`, by default of all, has begun and is not over.

        Raises:
            StateError: plain PyTorch would have the values of before the step, or of after it.
        """
        found = self.begun if params is None else [managed for managed in params if managed in self.begun]
        for managed in found:
            begun = self.begun[managed]
            if not begun.is_stepping:
                raise StateError(
                    f"{call} between backward and optimizer.step(): {len(found)} parameters, among them "
                    f"{managed.name}, were updated inside backward, and have other values here than in plain PyTorch; "
                    "call optimizer.step() first, load what was saved last if that backward has failed, or make the "
                    "optimizer without in_backward"
                )
            self.require_sound(call)
            raise StateError(
                f"{call} after an error in optimizer.step(), which has updated {len(begun.updated)} of "
                f"{len(begun.pending)} parameters so far (it is the step of {managed.name}, too): call "
                "optimizer.step() again, which updates the others, or load what was saved last with "
                "manager.load(path, optimizer)"
            )

    def require_none_failed(self, call: str) -> None:
        """Raise a `StateError` if a `step()` has failed and is to be continued: `call` begins what comes after it."""
        if self.begun:
            self.require_over(call, [managed for managed, begun in self.begun.items() if begun.is_stepping])

    def before_gradient(self, managed: ManagedParameter) -> None:
        """Backward is about to add to a gradient.

        Raises:
            StateError: a call has failed that continues with what there was.
        """
        if managed in self.half_scaled:
            call = self.half_scaled[managed]
            raise StateError(
                f"parameter {managed.name} got a gradient after an error in {call}, which had changed some of those "
                f"before it: call {call} again, which updates the others, or optimizer.zero_grad()"
            )
        if managed in self.begun and self.begun[managed].is_stepping:
            self.require_over(f"a backward with a gradient of parameter {managed.name}", (managed,))

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Surround what replaces all weights and states: if it succeeds, no step is continued."""
        begun, half_updated = dict(self.begun), self.half_updated
        self.begun.clear()
        self.half_updated = ""
        try:
            yield
        except BaseException:
            self.begun.update(begun)
            self.half_updated = half_updated
            raise


def options_in_words(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return what an update depends on in addition to gradients and states, given the parameter groups."""
    found = []
    for group in groups:
        words = (f"{name} {_plain(value)}" for name, value in group.items() if name != "params")
        found.append(f"{len(group['params'])} parameters, {', '.join(words)}")
    return "; ".join(found)


def _plain(value: object) -> object:
    """Return an option with the numbers that tensors have now."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else tuple(value.shape)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
