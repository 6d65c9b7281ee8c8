"""Imports, once, what takes seconds in every process of `tests.helpers.ranks`; they are forked from one that has it."""

from __future__ import annotations

import gc

import torch
import torch.distributed
from torch import nn

import chunkmem.machinery
import chunkmem.optim.adam  # noqa: F401

# A rank has one thread. Setting it starts none, and there must be none in a process that is forked.
torch.set_num_threads(1)
# Imports most of torch.
torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
# A collection would visit everything that was imported; after a fork, it would copy all of the pages, too.
gc.collect()
gc.freeze()
