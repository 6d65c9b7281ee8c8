"""Master weights in an optimizer's state: what a model's `state_dict`, in the dtypes that were built, has to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from chunkmem.data.errors import CheckpointError
from chunkmem.data.types import Role
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.slot_source import SlotSource
from chunkmem.optim.update import GroupUpdater
from chunkmem.ranks.ranks import Ranks

MASTER_KEY: Final = "master_weights"
"""Where a `state_dict` of an optimizer has them, by the index of the parameter."""


def masters_to_save(
    rows: Iterable[tuple[int, ManagedParameter]], host: OptimizerHost, *, lazily: bool
) -> dict[int, torch.Tensor]:
    """Return CPU copies of the weights that are wider than what was built, by index.

    Args:
        rows: (index, parameter); all ranks give the same.
        host: has the weights.
        lazily: return `LazyTensor`s.
    """
    found: dict[int, torch.Tensor] = {}
    for index, managed in rows:
        if managed.built_dtype.itemsize >= torch.float32.itemsize:
            continue

        def is_wider(managed: ManagedParameter = managed) -> bool:
            return host.updater.weight_chunk(managed).dtype.itemsize > managed.built_dtype.itemsize

        if host.from_owner(managed, is_wider):
            weights = SlotSource(managed, Role.MASTER, torch.float32, updater=host.updater, owners=host)
            value = weights.tensor(tuple(managed.shape))
            found[index] = value if lazily else value.read()
    return found


def check_masters(masters: Mapping[ManagedParameter, object], updater: GroupUpdater, ranks: Ranks) -> None:
    """Check that saved master weights round to the weights there are. All ranks call it, each with its own parameters.

    Raises:
        CheckpointError: they do not, on this rank or another.
    """
    wrong = [
        f"{managed.name} {problem}"
        for managed, saved in masters.items()
        if (problem := _misfit(updater.read_weight(managed), saved, managed.built_dtype))
    ]
    (is_any_wrong,) = ranks.max_over((float(bool(wrong)),), label="comparing master weights")
    if is_any_wrong:
        raise CheckpointError(
            "the state has master weights that do not round to the weights of the model "
            f"({'; '.join(wrong) or 'on another rank'}); nothing was loaded. Load the weights that were saved with it "
            "first, with manager.load_state_dict(); or, to train on from the weights there are, remove "
            f'"{MASTER_KEY}" from the state'
        )


def _misfit(own: torch.Tensor, saved: object, dtype: torch.dtype) -> str:
    """Say why saved weights do not round to `own` ones in `dtype`; nothing if they do."""
    if not isinstance(saved, torch.Tensor):
        return f"is of type {type(saved).__name__}, not a tensor"
    if saved.shape != own.shape:
        return f"is {tuple(saved.shape)} instead of {tuple(own.shape)}"
    own, saved = own.to(dtype), saved.to("cpu", dtype)
    num = int((own.ne(saved) & ~(own.isnan() & saved.isnan())).sum())
    return f"differs in {num} of {own.numel()} elements" if num else ""
