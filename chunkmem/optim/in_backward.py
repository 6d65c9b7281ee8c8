"""Updates inside backward: a chunk group is updated once its gradients are complete, and their memory is free again.

[Note: Updates in backward] With `in_backward=True` an optimizer does not wait for `step()`, so that gradients of a few
groups exist at a time. It is the update that `step()` would make, in place and for good:

    backward    | grad of block 3 | grad of block 2          | grad of block 1 |
    weights 3      -- in use -->    update   (new from here on)
    gradient 3     -------------------------> free

A group waits until each of its trainable parameters has a gradient and nothing in this backward reads its weights any
more. What is left then, because a parameter took no part in the loss, or somebody holds on to weights, is updated by
`step()`, which ends the step as always. So there is one backward for each step, and nothing can come between them that
looks at all gradients: clipping by their norm, skipping a step in fp16, accumulating.

Over ranks, a group waits until its owner has the mean, which is reduced once backward has left all units that have a
part in it. Every rank then counts its weights as new, as it cannot know whether the owner has left them to `step()`.

From its update to `step()`, a weight is newer than in plain PyTorch. Nobody may read it there: see
[Note: Begun steps] in `chunkmem.modules.begun`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from weakref import ref

from chunkmem.activations.saved_tensors import in_backward
from chunkmem.data.errors import ConfigError, StateError
from chunkmem.modules.begun import BegunStep, StepLedger
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradients import GradientBook
from chunkmem.optim.speculative import Intent
from chunkmem.ranks.units import Backwards
from chunkmem.runtime.pager import Pager


def require_possible(max_grad_norm: float, *, scaler: object | None) -> None:
    """Raise if updates inside backward are not those that `step()` would make.

    Raises:
        ConfigError: gradients are clipped, or steps may be skipped.
    """
    if max_grad_norm > 0:
        raise ConfigError(
            f"in_backward updates a group before the others have gradients, and gradients are clipped to a global norm "
            f"of {max_grad_norm}, which needs all of them: leave out max_grad_norm (gradient_clipping), or in_backward"
        )
    if scaler is not None:
        raise ConfigError(
            "in_backward updates a group before it is known whether other gradients overflow, and in fp16 such a step "
            'is skipped: make precision "bf16", or leave out in_backward'
        )


class Owner(Protocol):
    """An optimizer, as the manager knows it that has its parameters."""

    @property
    def in_backward(self) -> bool:
        """It updates inside backward."""
        ...

    def update_in_backward(self, group: int) -> None:
        """Update a chunk group all of whose gradients have landed."""
        ...

    def intent(self, group: int) -> Intent | None:
        """Return what it would do with a group if it stepped now; None if it cannot tell."""
        ...


class BackwardUpdates:
    """Has groups updated inside backward as soon as that may be."""

    def __init__(
        self,
        pager: Pager,
        gradients: GradientBook,
        ledger: StepLedger,
        *,
        owner_of: Callable[[ManagedParameter], Owner | None],
        backwards: Backwards | None,
    ) -> None:
        """Begin with no optimizer that does so.

        Args:
            pager: of the chunks.
            gradients: that land.
            ledger: of the steps that have begun.
            owner_of: returns the optimizer of a parameter, None if it has none.
            backwards: of ranks, which reduce gradients in the last one of a step; None: this process trains alone.
        """
        self._backwards = backwards
        self._elsewhere = BegunStep("", [], [])
        """Stands for the step of an optimizer whose update of a parameter may be made by another rank."""
        self._pager = pager
        self._ledger = ledger
        self._gradients = gradients
        self._owner_of = owner_of
        self.optimizers = set[ref[Owner]]()
        """Those that update inside backward."""
        pager.events.has_inner_hooks.append(lambda: bool(self.optimizers))
        self._complete: dict[int, None] = {}
        """Groups all of whose gradients have landed, and which something still reads."""
        self._unfinished: set[int] = set()
        """Groups with gradients of a backward that has kept its graph: the step updates them."""

    def begin(self, optimizer: Owner) -> None:
        """Have an optimizer update inside backward, as long as somebody has it; a step has one backward then."""
        self.optimizers.add(ref(optimizer, self.optimizers.discard))
        if self._backwards is not None:
            self._backwards.declare(1)

    def before_landing(self, managed: ManagedParameter) -> None:
        """A gradient is about to land. Raises a `StateError` if its parameter was updated since the last step."""
        if self._unfinished:
            self.begin_again(managed.group)
        if not self._ledger.is_empty:
            self._ledger.before_gradient(managed)
        self.before_mean(managed)

    def before_mean(self, managed: ManagedParameter) -> None:
        """A mean over ranks is about to count as a gradient. Raises what `before_landing` does."""
        begun = self._ledger.begun.get(managed)
        if begun is not None and managed in begun.updated:
            raise StateError(
                f"parameter {managed.name} got a second gradient, and the first one was used by its update inside "
                "backward already: call optimizer.step() after each backward, or make the optimizer without "
                "in_backward to accumulate gradients"
            )

    def landed(self, managed: ManagedParameter, graph_references: Mapping[int, int]) -> None:
        """A gradient has landed: update what is ready. `graph_references` is as for `UpdatesInBackward`."""
        if self._backwards is None:
            self.complete(managed.group, graph_references)

    def complete(self, group: int, graph_references: Mapping[int, int]) -> None:
        """A group may have all its gradients, over ranks as their means: update what is ready."""
        if not self.optimizers or not in_backward():
            return
        for managed in self._gradients.slots.groups[group].trained if self._backwards is not None else ():
            if self._is_one(self._owner_of(managed)):
                self._ledger.begun.setdefault(managed, self._elsewhere)
        self._complete[group] = None
        for group in list(self._complete):
            owner = self._owner(group)
            if owner is None:
                del self._complete[group]
            elif not graph_references.get(group) and not self._is_pinned(group):
                del self._complete[group]
                self._pager.notice_writes(self._pager.store.weights(group))  # of modules, in forward
                landed = set(self._gradients.slots.landed[group])
                owner.update_in_backward(group)
                if self._backwards is not None:  # what this rank had of the mean counts at the step, as others' does
                    self._gradients.slots.given |= landed

    def landed_for_now(self, managed: ManagedParameter) -> None:
        """A gradient has landed to which another backward over the same graph may add: `step()` updates its group."""
        self._unfinished.add(managed.group)

    def begin_again(self, group: int) -> None:
        """If none of a group's gradients is left, what lands next is updated inside backward again."""
        if group in self._unfinished and not self._gradients.slots.landed.get(group):
            self._unfinished.discard(group)

    def _owner(self, group: int) -> Owner | None:
        """Return what updates a group now; None: the step does, as something is missing, or may still change."""
        if (
            group in self._unfinished
            or not self._gradients.slots.is_complete(group)
            or self._gradients.is_touched(group)
        ):
            return None
        owners = {self._owner_of(managed) for managed in self._gradients.slots.landed[group]}
        owner = owners.pop() if len(owners) == 1 else None
        return owner if self._is_one(owner) else None

    def _is_one(self, owner: Owner | None) -> bool:
        """Tell whether an optimizer updates inside backward."""
        return owner is not None and ref(owner) in self.optimizers

    def _is_pinned(self, group: int) -> bool:
        """Tell whether something in this backward uses the weights, or is going to.

        A graph may have saved them in ways that lead to no gradient, as `weight.detach()` and `weight.data` do.
        """
        return any(replica.pins for replica in self._pager.store.weights(group).replicas.values())

    def require_none(self, call: str) -> None:
        """Raise if there is an optimizer that updates inside backward.

        Raises:
            StateError: with it, one backward is all that a step has.
        """
        if self.optimizers:
            raise StateError(
                f"{call} with an optimizer that has in_backward=True: it updates weights in the first backward of a "
                "step, and others would be computed with the new ones; make the optimizer without in_backward"
            )

    def take_over(self, params: Iterable[ManagedParameter], owner: object) -> None:
        """An optimizer is about to have `params`. One that had some of them can step no more, so it updates no more.

        Raises:
            StateError: it has updated some inside a backward that no step has followed.
        """
        taken = {managed: self._owner_of(managed) for managed in params}
        taken = {managed: former for managed, former in taken.items() if former is not owner}
        self._ledger.require_over("another optimizer for the same parameters", taken)
        for former in taken.values():
            if former is not None:
                self.optimizers.discard(ref(former))

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self._complete.clear()
