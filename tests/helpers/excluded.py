"""Models of which some modules are built in `manager.exclude()`, whatever builds them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

from torch import nn

import chunkmem


@contextmanager
def partly_excluded(manager: chunkmem.ChunkManager) -> Iterator[None]:
    """`manager.init()` in which some modules of every model are built in `manager.exclude()`."""
    made = itertools.count()

    def outside(make: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        is_in = isinstance(module, nn.Linear) and next(made) % 2 == 0
        with nullcontext() if is_in else manager.exclude():
            make(module, *args, **kwargs)

    kinds = (nn.Linear, nn.LayerNorm)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "__init__", partialmethod(partial(outside, kind.__init__))))
        stack.enter_context(manager.init())
        yield
