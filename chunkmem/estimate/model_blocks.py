"""The blocks of a model that was rehearsed, and what one hands on to the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkmem.estimate.model import Model
from chunkmem.estimate.question import Question
from chunkmem.plan.balance import Block
from chunkmem.report.blocks import blocks_of
from chunkmem.runtime.values import tensors_in


def model_blocks(question: Question) -> tuple[Block, ...]:
    """Return the blocks of the model asked about, with times of its hardware.

    Raises:
        TraceError: the model has no modules with parameters.
    """
    rehearsal = question.rehearsal
    blocks = blocks_of(rehearsal.trace, numels={param.name: param.slot.numel for param in rehearsal.step.parameters})
    sizes = _boundary_nbytes(question.model(question.batch), question.dtype)
    boundaries = [sizes[block.name, "in"] or sizes[before.name, "out"] for before, block in pairwise(blocks)]
    tp = question.mesh.tp  # each of so many hands on a part
    return tuple(
        replace(block, output_nbytes=nbytes // tp) for block, nbytes in zip(blocks, [*boundaries, 0], strict=True)
    )


def _boundary_nbytes(model: Model, dtype: torch.dtype) -> Counter[tuple[str, str]]:
    """Return the bytes that each module is given ("in") and returns ("out"), by its name, if it computes in `dtype`."""
    found: Counter[tuple[str, str]] = Counter()

    def count(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for key, value in ((name, "in"), (args, kwargs)), ((name, "out"), output):
            for tensor in tensors_in(value):
                found[key] += tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize

    with FakeTensorMode(), torch.no_grad():
        module = model.build()
        for name, child in module.named_modules():
            child.register_forward_hook(partial(count, name), with_kwargs=True)
        model.loss(module)
    return found
