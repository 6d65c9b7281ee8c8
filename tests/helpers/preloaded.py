"""Imports, once, what takes seconds in every process of `tests.helpers.ranks`; they are forked from one that has it."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest  # noqa: F401 - the files of tests import it
import torch
import torch.distributed
from torch import nn

import chunkmem
import chunkmem.assembly.make
import chunkmem.optim.adam
import tests.helpers.audit
import tests.helpers.shared_training
import tests.helpers.staged_training
import tests.helpers.twins  # noqa: F401
from chunkmem.runtime.build import cpu_recipe
from chunkmem.steps import planning

WORK_IN_TRAINING = planning.WORK_A_STEP
WORK_A_STEP = 1
"""Of a planner, in its units: one candidate.

With what it is in training, each of the first steps would try all candidates there are for models this small: that was
a quarter of the time of all tests, and the plans that steps followed were of the same kinds. A full run does so.
"""

ALLOCATIONS = 10_000
"""Objects more than before that have Python collect the youngest garbage, and after ten of those the older, and so on.

With the 700 of Python, hundreds of times all objects of a test were visited: a tenth of the time of all tests.
"""


def _do_nothing(*_: object, **__: Any) -> None:
    pass


# What users find in the package is imported when it is first used.
for name in chunkmem.__all__:
    getattr(chunkmem, name)
# The kernels are looked for with what torch builds extensions with.
cpu_recipe()
# torch.manual_seed() has accelerators seeded when they are first used, and formats a stack of Python for each kind, in
# case that fails. That takes a hundred times as long as to seed, for nothing if this torch was built for CPUs alone.
if torch.accelerator.current_accelerator(check_available=False) is None:
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind._lazy_call = _do_nothing  # type: ignore[assignment]
if "TESTS_ARE_FULL" not in os.environ:
    planning.WORK_A_STEP = WORK_A_STEP
# A rank has one thread. Setting it starts none, and there must be none in a process that is forked.
torch.set_num_threads(1)
gc.set_threshold(ALLOCATIONS)
# Imports most of torch.
torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
# A collection would visit everything that was imported; after a fork, it would copy all of the pages, too.
gc.collect()
gc.freeze()
