"""What is between two blocks for one micro-batch: in forward tensors that one returns, in backward their gradients.

Autograd's graph is cut there, so that the backward of one block can run for all micro-batches before the next one does.
What a block is given has no history but a node that takes the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from chunkmem.activations.stashed import Stashed, StashedTensors
from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.runtime.values import Structure, tensors_in

Gradients = Sequence[torch.Tensor | None]


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[Gradients], Gradients | None],
        tensors: Sequence[torch.Tensor],
        _anchor: torch.Tensor,
        *_given: torch.Tensor,
    ) -> Any:
        ctx.take = take
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out in tensors if not (out.is_floating_point() or out.is_complex())))
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, None, *(ctx.take(gradients) or ())


def with_history(
    tensors: Sequence[torch.Tensor], take: Callable[[Gradients], Gradients | None], *given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return tensors, which have no history, with one that is a single node.

    Args:
        tensors: of which nobody else knows.
        take: is called with their gradients in backward, once; returns those of `given`.
        given: where backward continues; it does nowhere if there are none.
    """
    found: tuple[torch.Tensor, ...] = _Cut.apply(take, tensors, torch.empty(0, requires_grad=True), *given)  # type: ignore[no-untyped-call]
    return found


def begin_history(tensors: list[torch.Tensor], wanted: Sequence[int], take: Callable[[Gradients], None]) -> None:
    """Begin a history for some tensors of a list, which have none and of which nobody else knows.

    Args:
        tensors: the list.
        wanted: their places in it.
        take: is given their gradients in backward, once; None where there is none.
    """
    if wanted:
        for at, tensor in zip(wanted, with_history([tensors[at] for at in wanted], take), strict=True):
            tensors[at] = tensor


class BlockOutput:
    """What a block has returned for a micro-batch. The next block is given it once."""

    def __init__(self, value: Any, stashing: StashedTensors, *, name: str, calls: Counter[ManagedParameter]) -> None:
        """Take what the block of that name has returned, of which the caller is to keep nothing.

        Args:
            value: what it has returned.
            parking: for tensors that nobody needs for a while.
            name: of the block.
            calls: that its backward comes to; see `AccessTracker.num_calls`.

        Raises:
            StateError: it has tensors in objects that cannot be taken apart.
        """
        self._stashing = stashing
        self._name = name
        self.calls = calls
        self._structure, tensors = Structure.of(value)
        for leaf in self._structure.others:
            if next(tensors_in(leaf), None) is not None:
                raise StateError(
                    f"{name} returns a {type(leaf).__name__} with tensors inside, where the next block is another step "
                    "of autograd; return tensors, or tuples, lists and dicts of them"
                )
        self._wanted = [at for at, tensor in enumerate(tensors) if tensor.requires_grad]
        """Indices of the tensors that require gradients."""
        self._edges = [get_gradient_edge(tensors[at]) for at in self._wanted]
        self._content: list[torch.Tensor] = [tensor.detach() for tensor in tensors]
        self._stashed: Stashed | None = None
        self._gradients: list[torch.Tensor | None] = []
        """Gradients of the tensors at `_wanted`, from the next block's backward."""
        self._stashed_gradients: Stashed | None = None
        self._is_next_running = False
        """The backward of the block that was given the tensors runs."""

    @property
    def tensor(self) -> torch.Tensor:
        """The only tensor that the block has returned, without its history."""
        (tensor,) = self._content
        return tensor

    @property
    def requires_grad(self) -> bool:
        """Something of it does."""
        return bool(self._wanted)

    def kept(self) -> Any:
        """Return the value without its history; it is not kept here."""
        tensors, self._content = self._content, []
        return self._structure.filled(tensors)

    def take(self, gradients: Gradients) -> None:
        """Take those for the gradients of its tensors, of the last block. Raises what `park` does."""
        self._gradients = [gradients[at] for at in self._wanted]
        self.park_gradients()

    def stash(self) -> None:
        """Nobody needs the tensors until the next block is given them.

        Raises:
            CapacityError: they fit no tier.
        """
        self._stashed = self._stashing.stash(self._content, name=self._name, what="output")

    def value(self) -> Any:
        """Return what the next block is given, on the device until `end_call`.

        Raises:
            CapacityError: it does not fit.
        """
        tensors = self._content if self._stashed is None else self._stashed.bring()
        self._content = []
        begin_history(tensors, self._wanted, self._take_gradients)
        return self._structure.filled(tensors)

    def end_call(self) -> None:
        """The next block has returned."""
        stashed, self._stashed = self._stashed, None
        if stashed is not None:
            stashed.end()

    def _take_gradients(self, gradients: Gradients) -> None:
        """The backward of the next block has come to what it was given.

        Raises:
            StateError: it is the backward of another one.
        """
        if not self._is_next_running:
            raise StateError(
                f"a gradient comes to what {self._name} has returned from elsewhere than the next block: a block has "
                "kept a tensor, such as a loss of its own, that another one or loss_fn uses, whose history ends with "
                "the block. Return it with the block's output, and pass it on"
            )
        self._gradients = list(gradients)

    def park_gradients(self) -> None:
        """Nobody needs the gradients until the backward of the block. Raises what `park` does."""
        pairs = [(edge, g) for edge, g in zip(self._edges, self._gradients, strict=False) if g is not None]
        self._edges, given, self._gradients = [edge for edge, _ in pairs], [g for _, g in pairs], []
        pairs.clear()
        if given:
            self._stashed_gradients = self._stashing.stash(given, name=self._name, what="gradient")

    def begin_backward(self, scale: float) -> None:
        """Take that for the gradient of the only tensor, which is the loss.

        Raises:
            StateError: it does not depend on anything that is trained.
        """
        if not self._edges:
            raise StateError(
                "the loss depends on no parameter that requires gradients: unfreeze one, or do not call pipe.step()"
            )
        self._stashed_gradients = self._stashing.keep([torch.full_like(self.tensor, scale)])

    @property
    def has_gradients(self) -> bool:
        """Gradients have come to what the block has returned."""
        return self._stashed_gradients is not None

    def backward(self, given: BlockOutput | None) -> None:
        """Run the backward of the block, if gradients have come to what it has returned.

        Args:
            given: what the block was given, if that is another one's output.

        Raises:
            CapacityError: something does not fit.
            StateError: gradients come to what another block was given.
        """
        stashed, self._stashed_gradients = self._stashed_gradients, None
        if stashed is None:
            return
        if given is not None:
            given._is_next_running = True
        try:
            gradients = stashed.bring()
            torch.autograd.backward(self._edges, gradients)
        finally:
            if given is not None:
                given._is_next_running = False
            self._edges = []
            gradients = []
            stashed.end()

    def drop(self) -> None:
        """What is here is not needed any more."""
        for stashed in (self._stashed, self._stashed_gradients):
            if stashed is not None:
                stashed.end()
        self._edges, self._content, self._gradients = [], [], []
