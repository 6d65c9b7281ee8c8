"""Names of moments in a profile of torch's."""

from __future__ import annotations

import torch


class MomentNames:
    """The moment that runs is a range of the profile, while there is one."""

    def __init__(self) -> None:
        self.shown: torch.profiler.record_function | None = None
        """The range of the moment that runs."""

    def show(self, label: str) -> None:
        """A moment begins."""
        if self.shown is not None:
            self.end()
        if torch.autograd.profiler._is_profiler_enabled:
            self.shown = torch.profiler.record_function(f"chunkmem {label}")
            self.shown.__enter__()

    def end(self) -> None:
        """No moment runs."""
        if self.shown is not None:
            self.shown.__exit__(None, None, None)
            self.shown = None
