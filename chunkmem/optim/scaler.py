"""The loss scale of fp16 training: so large that small gradients do not vanish, so small that none overflows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chunkmem.config import Fp16Config
from chunkmem.data.errors import CheckpointError

_FACTOR = 2.0


class LossScaler:
    """A scale that is fixed, or halved on overflows and doubled after a while without any.

    Hysteresis: only the last of `hysteresis` overflows since the scale was last changed makes it shrink, so that one
    bad batch does not.
    """

    def __init__(self, config: Fp16Config) -> None:
        self._config = config
        self.is_dynamic = config.loss_scale == 0
        self.loss_scale = 2.0**config.initial_scale_power if self.is_dynamic else config.loss_scale
        """What losses are multiplied by."""
        self.num_skipped = 0
        """Steps that changed nothing because a gradient was infinite or NaN."""
        self.is_used = False
        """A loss was scaled since the last step."""
        self._patience = config.hysteresis
        self._num_good = 0

    def note_scaled(self) -> None:
        """A loss is scaled, or what comes in its place."""
        self.is_used = True

    def step(self, *, overflow: bool) -> None:
        """Learn from one step whether its gradients overflowed."""
        self.is_used = False
        self.num_skipped += overflow
        if not self.is_dynamic:
            return
        if overflow:
            self._num_good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.loss_scale = max(self.loss_scale / _FACTOR, self._config.min_loss_scale)
                self._patience = 1  # in a streak every further overflow counts
            return
        self._num_good += 1
        if self._num_good >= self._config.loss_scale_window:
            self.loss_scale *= _FACTOR
            self._num_good = 0
            self._patience = self._config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue the same way."""
        return {
            "scale": self.loss_scale,
            "patience": self._patience,
            "num_good": self._num_good,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            scale, patience = float(state["scale"]), int(state["patience"])
            num_good, num_skipped = int(state["num_good"]), int(state["num_skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"loss_scaler: {error!r} in {state!r}; take it from optimizer.state_dict()") from None
        if not scale > 0:
            raise CheckpointError(f"loss_scaler: a scale of {scale} is not above 0")
        self.loss_scale, self._patience, self._num_good, self.num_skipped = scale, patience, num_good, num_skipped
