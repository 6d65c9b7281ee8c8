"""What the ranks of a pipeline were given of a batch: inputs are needed on the first stage, targets on the last."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.data.errors import ConfigError, StateError
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.values import tensors_in


@dataclass(frozen=True)
class GivenBatch:
    """What one rank says of its batch."""

    parts: str
    """How the batch is split, as text; empty: this rank was given none."""
    num_samples: int
    inputs: str
    """Digest of the inputs; empty: there are none."""
    target: str
    """Digest of the target; empty: there is none."""
    ids: str
    """Digest of the samples' ids, for a cache; empty: there are none."""
    knows_forms: bool
    """Shapes between stages were derived from those of the inputs."""
    refused: str
    """Why the rank cannot run it; empty: it can."""


def compare(
    parts: Sequence[MicroBatch], ids: Any, *, knows_forms: bool, refused: str, ranks: Ranks
) -> tuple[int, bool]:
    """Compare what all ranks of a pipeline were given; all of them call it, and raise the same.

    Args:
        parts: micro-batches of this rank; none where it was given nothing.
        ids: of the samples, for a cache.
        knows_forms, refused: see `GivenBatch`.
        ranks: of the pipeline.

    Returns:
        The number of samples, and whether all ranks know what stages give to each other.

    Raises:
        ConfigError: ranks were given different batches.
        StateError: the first rank has no inputs, or the last one no target and another one has; or a rank refuses.
        RankError: a rank is missing.
    """
    inputs, target = (_digests([getattr(part, name) for part in parts]) for name in ("inputs", "target"))
    said = repr(ids.tolist() if isinstance(ids, torch.Tensor) else ids)
    sizes = [part.num_samples for part in parts]
    shown = f"{len(parts)} micro-batches of {sizes}" if parts else ""
    own = GivenBatch(shown, sum(sizes), inputs, target, _digest(said), knows_forms, refused)
    every, _ = ranks.values_of_all(own, label="comparing the batch of the pipeline")
    for rank, each in enumerate(every):
        if each.refused:
            raise StateError(f"{each.refused} (rank {ranks.name(rank)})")
    for what in ("parts", "inputs", "target", "ids"):
        found = {rank: said for rank, each in enumerate(every) if (said := getattr(each, what))}
        if len(set(found.values())) > 1:
            named = ", ".join(f"{said} on rank {ranks.name(rank)}" for rank, said in found.items())
            raise ConfigError(
                f"the batch of the pipeline differs between ranks: {what}: {named}; give all ranks of a pipeline the "
                "same batch, or None where a stage is neither the first nor the last"
            )
    if not every[0].inputs:
        raise StateError(
            f"pipe.step(): rank {ranks.name(0)}, which has the first stage, was given no inputs; they are needed there"
        )
    if not every[-1].target and any(each.target for each in every):
        raise StateError(
            f"pipe.step(): rank {ranks.name(len(every) - 1)}, which has the last stage, was given no target, and "
            "another rank was; the loss is computed there"
        )
    return every[0].num_samples, all(each.knows_forms for each in every)


def digest_of(parts: Sequence[MicroBatch]) -> int:
    """Return what tells batches apart, 48 bits of shapes and of sums of what is in RAM."""
    return int(_digests([(part.inputs, part.target) for part in parts]), 16)


def _digests(values: Sequence[Any]) -> str:
    """Return a digest of the tensors in some values; empty if these are None."""
    found = [
        f"{tuple(tensor.shape)} {tensor.dtype} "
        + (float(tensor.detach().double().sum()).hex() if tensor.device.type == "cpu" else "")
        for value in values
        for tensor in tensors_in(value)
    ]
    return _digest(repr(found)) if any(value is not None for value in values) else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
