"""The outputs of a whole batch, with a history: their backward is that of all micro-batches.

out = pipe(x)     | block 0 of all parts | block 1 ... |        no history but one node
loss(out)              the user's, over the whole batch
loss.backward()   ... node: gradients of out, by parts | block 1 of all parts | block 0 | gradients of x
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from chunkmem.data.errors import StateError
from chunkmem.pipeline.outputs import Gradients, with_history
from chunkmem.runtime.values import Structure

Backward = Callable[[Sequence[Gradients]], None]
"""Runs the backward of a batch, given by micro-batch the gradients of all tensors that it has returned."""


def unchanged_weights(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Return what raises a `StateError` if parameters of some modules were written to since this call.

    It is for parameters between a forward and its backward: what is recomputed then needs them as they were.
    """
    params = dict.fromkeys(param for module in modules for param in module.parameters())

    def versions() -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param._version for param in params]

    before = versions()

    def require_same() -> None:
        if versions() != before:
            raise StateError(
                "weights were written to between pipe(x) and its backward, as by optimizer.step(): blocks that are "
                "recomputed would give other values; run the backward before"
            )

    return require_same


class JoinedBatch:
    """A batch whose forward has run, and whose backward has not."""

    def __init__(self, inputs: Any) -> None:
        """Take what a user gives, without its history."""
        self._structure, self._given = Structure.of(inputs)
        self._wanted = [tensor for tensor in self._given if tensor.requires_grad and torch.is_grad_enabled()]
        known = {id(tensor): tensor.detach().requires_grad_() for tensor in self._wanted}
        self._leaves = [known[id(tensor)] for tensor in self._wanted]
        self.inputs = self._structure.filled([known.get(id(each), each.detach()) for each in self._given])
        """The same, which gradients come to if the user wants them."""
        self._lengths: list[int] = []
        self._backward: Backward | None = None

    @property
    def is_pending(self) -> bool:
        """Its backward may come."""
        return self._backward is not None

    @property
    def wants_gradients(self) -> bool:
        """Gradients of inputs are asked for."""
        return bool(self._wanted)

    def outputs(self, values: Sequence[Any], lengths: Sequence[int], backward: Backward | None) -> Any:
        """Return what micro-batches of so many samples have returned, joined along their first dimension.

        Args:
            values: by micro-batch, without a history.
            lengths: samples of each.
            backward: None: no output depends on anything that is trained.

        Raises:
            StateError: something has no samples along its first dimension, or differs between micro-batches.
        """
        structures, tensors = zip(*map(Structure.of, values), strict=True)
        others = [structure.others for structure in structures]
        for row, length in zip(tensors, lengths, strict=True):
            if len(row) != len(tensors[0]) or any(not each.ndim or len(each) != length for each in row):
                shapes = ", ".join(str(list(each.shape)) for each in row) or "no tensor"
                raise StateError(
                    f"pipe(x): a micro-batch of {length} samples returns {shapes}; outputs are joined along dimension "
                    "0: return tensors with a row for each sample, or call pipe.step(x, y), which joins losses"
                )
        if any(each != others[0] for each in others):
            raise StateError(f"pipe(x): micro-batches return different values in addition to tensors: {others}")
        self._lengths, self._backward = list(lengths), backward
        joined: Sequence[torch.Tensor] = [torch.cat(column) for column in zip(*tensors, strict=True)]
        if backward is not None:
            joined = with_history(joined, self.run_backward, *self._wanted)
            self._given = self._wanted = []  # nobody needs their history any more
        return structures[0].filled(joined)

    def go_on(self) -> None:
        """Run the backward of what the inputs were made by, when that of all micro-batches has run elsewhere."""
        reached = [(x, leaf.grad) for x, leaf in zip(self._wanted, self._leaves, strict=True) if leaf.grad is not None]
        self._wanted = self._leaves = []
        if reached:
            torch.autograd.backward([x for x, _ in reached], [grad for _, grad in reached])

    def run_backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run the backward of all micro-batches; return the gradients of inputs that want them.

        Raises:
            StateError: it has run before.
        """
        if not torch.autograd._is_checkpoint_valid():
            raise StateError(
                "torch.autograd.grad() or backward(inputs=) through what pipe(x) has returned would add to the "
                "gradients of parameters, too: call loss.backward(), or differentiate the model itself"
            )
        backward, self._backward = self._backward, None
        if backward is None:
            raise StateError(
                "the backward of what pipe(x) has returned runs a second time: call pipe(x) again, or add the losses"
            )
        columns = [[None] * len(self._lengths) if g is None else g.split(self._lengths) for g in gradients]
        leaves, self._leaves, self.inputs = self._leaves, [], None
        backward(list(zip(*columns, strict=True)))
        return [leaf.grad for leaf in leaves]
