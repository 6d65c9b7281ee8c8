"""Names of moments in a profile of torch's."""

from __future__ import annotations

import torch


class MomentNames:
    """The moment that runs is a range of the profile, while there is one."""

    def __init__(self) -> None:
        self._open: torch.profiler.record_function | None = None

    def show(self, label: str) -> None:
        """A moment begins."""
        if self._open is not None:
            self.end()
        if torch.autograd.profiler._is_profiler_enabled:
            self._open = torch.profiler.record_function(f"chunkmem {label}")
            self._open.__enter__()

    def end(self) -> None:
        """No moment runs."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
