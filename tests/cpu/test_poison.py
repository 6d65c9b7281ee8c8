"""Freed memory is filled with NaN on both tiers: whoever reads what it should not would show it in the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import chunkmem
from chunkmem.data.types import Tier
from tests.helpers.training import VARIANTS, Chunked, Trainer, assert_same, capped, footprint, train_plain
from tests.helpers.zoo import ZOO

CASES = {case.name: case for case in ZOO}
VARIANT = {variant.name: variant for variant in VARIANTS}


class Poisoned:
    """Turns poisoning on in both pools of a manager and counts the slabs filled."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        self.slabs = dict.fromkeys(manager.runtime.memory.store.pools, 0)
        for tier, pool in manager.runtime.memory.store.pools.items():
            pool.poison = True
            self._count(tier, pool)

    def _count(self, tier: Tier, pool: Any) -> None:
        free = pool.free

        def counting(role: str, slab: Any) -> None:
            is_read = any(not event.done() for event in slab.events)  # a copy may still be taking what was there
            free(role, slab)
            if not is_read:
                assert slab.flat(torch.float32).isnan().all()
                self.slabs[tier] += 1

        pool.free = counting


def refuse_nan(model: nn.Module) -> None:
    """Fail at the first module whose output, or the gradient of it, has a NaN."""

    def refuse(module: nn.Module, tensor: Tensor, what: str) -> None:
        assert not tensor.isnan().any(), f"NaN in the {what} of {type(module).__name__}"

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                refuse(module, leaf, "output")
                if leaf.requires_grad:
                    leaf.register_hook(lambda grad: refuse(module, grad, "gradient"))

    for module in model.modules():
        module.register_forward_hook(after)


@pytest.mark.few(1)
@pytest.mark.parametrize("cached", [pytest.param(0, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("gpt", "plain"),
        ("gpt", "micro_batches"),
        ("gpt", "checkpoint"),
        ("cnn", "evaluation"),
        ("gru", "plain"),
        ("t5", "half_frozen"),
        ("moe", "plain"),
    ],
)
def test_training_never_reads_freed_memory(name: str, variant: str, cached: int) -> None:
    """At the smallest DEVICE cap, and with a HOST that holds the rest and a few chunks of the largest size more."""
    case = CASES[name], VARIANT[variant]
    sizes = footprint(*case)
    settings = capped(case[0], sizes.required_nbytes).to_dict()
    settings["memory"]["host"] = 4 * sizes.param_nbytes - sizes.required_nbytes + 12 * case[0].slab_nbytes
    settings["client"]["opts"]["mem_cache_capacity"] = cached
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        poisoned = Poisoned(manager)
        trainer = Trainer(*case, Chunked(manager))
        refuse_nan(trainer.model)
        assert_same(trainer.run(), train_plain(*case))
        assert min(poisoned.slabs.values()) > 10
