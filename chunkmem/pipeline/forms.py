"""Which tensors go from stage to stage: found out by running the model under fake tensors, which have no values.

A real run would count in batch norms, draw random numbers, and read memory that nobody has written to.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_structure

from chunkmem.data.errors import StateError
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.runtime.quiet import silenced


@dataclass(frozen=True)
class MessageForm:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for one."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BoundaryForm:
    """What a stage gives to the next one: tensors, in tuples, lists and dicts, among other values."""

    name: str
    value: Any
    """The stage's output, with `MessageForm` in place of tensors."""

    @property
    def tensors(self) -> list[MessageForm]:
        """Those that are sent."""
        return [leaf for leaf in tree_leaves(self.value) if isinstance(leaf, MessageForm)]

    def flattened(self, value: Any) -> list[torch.Tensor]:
        """Return the tensors of a value, in the dtypes in which they are sent.

        Raises:
            StateError: there are others than under fake tensors.
        """
        leaves, spec = tree_flatten(value)
        tensors, expected = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], self.tensors
        found = [(t.shape, t.requires_grad) for t in tensors]
        is_alike = spec == tree_structure(self.value) and len(tensors) == len(expected)
        pairs = zip(found, expected, strict=False)
        if not is_alike or any(shape != form.shape or has > form.requires_grad for (shape, has), form in pairs):
            raise StateError(
                f"{self.name} is {found}, and {expected} was found out; it must depend on the shapes alone"
            )
        return [tensor.to(form.dtype) for tensor, form in zip(tensors, expected, strict=True)]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value that has these tensors."""
        rest = iter(tensors)
        return tree_map(lambda leaf: next(rest) if isinstance(leaf, MessageForm) else leaf, self.value)


class BoundaryForms:
    """Knows what goes from stage to stage, for micro-batches of any form."""

    def __init__(self, stages: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        """Copy the stages, without the values of their tensors, before they are packed.

        Args:
            stages: all of the pipeline.
            dtype: that the model computes in, and in which floats are sent.
        """
        self._dtype = dtype
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._trainable: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._known: dict[Hashable, dict[int, BoundaryForm] | str] = {}
        """By form of a micro-batch: what goes out of each stage but the last, or why that cannot be told."""
        memo: dict[int, Any] = {}
        together = nn.ModuleList(stages)
        with self._mode:
            for param in together.parameters():
                fake = nn.Parameter(torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad)
                memo[id(param)] = fake
                self._trainable.append((param, fake))
            for buffer in together.buffers():
                memo[id(buffer)] = torch.empty_like(buffer, device="cpu")
        self._stages = copy.deepcopy(together, memo)

    def of(self, parts: Sequence[MicroBatch]) -> list[dict[int, BoundaryForm]] | str:
        """Return by micro-batch what goes out of each stage but the last, or why that cannot be told of one."""
        known = []
        for part in parts:
            key = part.form, tuple(real.requires_grad for real, _ in self._trainable)
            if key not in self._known:
                for real, fake in self._trainable:
                    fake.requires_grad_(real.requires_grad)
                self._known[key] = self._run(part.inputs)
            found = self._known[key]
            if isinstance(found, str):
                return found
            known.append(found)
        return known

    def _run(self, inputs: Any) -> dict[int, BoundaryForm] | str:
        found = {}
        try:
            # What cannot run so is said ahead: torch need not log it.
            quiet = silenced("torch._subclasses.fake_tensor")
            with quiet, torch.random.fork_rng(devices=()), self._mode, torch.enable_grad():
                value = tree_map_only(torch.Tensor, partial(torch.empty_like, device="cpu"), inputs)
                for number, stage in enumerate(self._stages[:-1]):
                    value = stage(value)
                    found[number] = form_of(value, number, dtype=self._dtype)
        except StateError as error:
            return str(error)
        except Exception as error:  # whatever a block raises that is given no values
            return (
                f"what the stages of the pipeline give to each other cannot be told from the shapes of a micro-batch: "
                f"{type(error).__name__}: {error}"
            )
        return found


def form_of(value: Any, number: int, *, dtype: torch.dtype) -> BoundaryForm:
    """Return what a stage gives to the next one, without values.

    Args:
        value: that it gives.
        number: of the stage.
        dtype: that the model computes in, and in which floats are sent.

    Raises:
        StateError: it is no tensors in tuples, lists and dicts.
    """
    name = f"what stage {number} gives to stage {number + 1}"
    return BoundaryForm(name, tree_map(lambda leaf: _leaf(leaf, name, dtype), value))


def _leaf(leaf: Any, name: str, dtype: torch.dtype) -> Any:
    if isinstance(leaf, torch.Tensor):
        return MessageForm(leaf.shape, dtype if leaf.dtype is torch.float32 else leaf.dtype, leaf.requires_grad)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise StateError(f"{name} has a {type(leaf).__name__}; stages give each other tensors, in tuples, lists and dicts")
