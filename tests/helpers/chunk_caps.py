"""Caps on an accelerator that hold chunks alone."""

from __future__ import annotations

from typing import Any

import pytest

from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.tiers import Tiers


def count_chunks_alone(patch: pytest.MonkeyPatch) -> None:
    """Let caps on DEVICE count ledgers alone, from the first step on; they would cover all that torch has there.

    So a test may give a cap in chunks, whatever the model's activations and the libraries' workspaces take. Only
    managers of this process are concerned.
    """
    make = Tiers.__init__

    def make_whole(tiers: Tiers, *args: Any, **keys: Any) -> None:
        make(tiers, *args, **keys)
        tiers.device.cap_nbytes = tiers.device.limit_nbytes  # there are no activations to be careful of

    patch.setattr(Tiers, "__init__", make_whole)
    patch.setattr(NonModelMeter, "_read", lambda meter: None)
    patch.setattr(NonModelMeter, "now_nbytes", 0)
