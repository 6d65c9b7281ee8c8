"""Autocast around a managed model: its cache of cast weights is switched off."""

from __future__ import annotations

import warnings

import torch


class AutocastCache:
    """Keeps autocast from keeping copies of managed weights. One for each manager.

    Inside `torch.autocast` torch keeps the cast copy of each weight until the outermost autocast ends: a second model
    outside the chunks, which is still used after an update in the region has changed the weights. The switch is the
    thread's, and an autocast leaves it as it found it, so a call of a model inside one has only to turn it off:

        with torch.autocast(...):   | notes the setting: on
            model(x)                | off, and what was cached is dropped
            model(y)                | still off
                                    | on again

    A checkpoint inside the model notes "off" and recomputes with that. One around the whole model may have noted "on":
    its recomputation caches, until it ends, or the autocast that its backward runs in.
    """

    def __init__(self, device_type: str, *, precision: str) -> None:
        """Look at autocast on `device_type`, where the model computes; `precision` is the configuration's."""
        self._device_type = device_type
        self._precision = precision
        self._has_warned = False

    def switch_off(self) -> None:
        """Turn the cache off until the autocast that is running ends, if one is; warn the first time it was on."""
        if not (torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled()):
            return
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        if not self._has_warned:
            self._has_warned = True
            advice = f'leave autocast out, "precision": "{self._precision}" computes in low precision already'
            if self._precision == "fp32":
                advice = 'to compute in low precision set "precision" to "bf16" or "fp16" and leave autocast out'
            warnings.warn(
                "a managed model was called inside torch.autocast, whose cache of cast weights is now off until it "
                f"ends; {advice}",
                stacklevel=2,
            )
