"""One call of a module whose backward may come."""

from __future__ import annotations

from chunkmem.activations.region_calls import CallRecord
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.frames import Frame
from chunkmem.modules.references import Findings


class BackwardCall:
    """One module call whose backward may come: what it read, and what of that is still waited for."""

    def __init__(
        self, frame: Frame, found: Findings, access: AccessTracker, *, region: CallRecord | None, is_hidden: bool
    ) -> None:
        """Describe a call that is over; its graph keeps what was `found`, which counts as long as the call lives."""
        self.name = frame.name
        self.reads = tuple(frame.reads)
        self.access = access
        self.unit = frame.unit
        self.references = dict(found.saved)
        self.made_in_step = access.num_steps
        for group, count in self.references.items():
            access.graph_references[group] = access.graph_references.get(group, 0) + count
        self.uncertain = found.uncertain
        """Groups that are released when references are gone."""
        self.nodes = frame.first_node, frame.end_node, tuple(frame.inside)
        """That it has made, by their numbers in autograd's order: the first one's, the last one's and one, and of
        calls inside of it the same."""
        self.counter = None if is_hidden else access.num_calls
        """Where it counts as one that is to come. None: it does not, or no longer."""
        for managed in self.reads:
            access.num_calls[managed] += self.counter is not None
        self.module = 0 if frame.module is None else id(frame.module)
        """The identity of the module; 0 for an operator."""
        self.region = region
        """The call of a region that it was part of, also where that was recomputed."""
        self.is_hidden = is_hidden
        """Its graph saves nothing itself, or saves it elsewhere: gradients have to land, too."""
        self.inputs = 0
        """Inputs whose gradients tell that frozen reads are over; 0 if those have to wait for the backward's end."""
        self.inputs_left: set[int] = set()
        self.frozen: set[int] = set()
        """Groups of which a frozen parameter was read."""
        self.open: dict[int, set[ManagedParameter]] = {}
        """Pinned groups, each with the trainable reads that wait for a gradient. Not empty while announced."""

    def used_up(self, group: int) -> None:
        """The graph has run: its references are gone."""
        count = self.references.pop(group, 0)
        if count and self.made_in_step == self.access.num_steps:
            self.access.graph_references[group] -= count

    def end(self) -> None:
        """Its graph has run, or is gone."""
        counter, self.counter = self.counter, None
        if counter is not None:
            for managed in self.reads:
                counter[managed] -= 1

    def __del__(self) -> None:
        for group in list(getattr(self, "references", ())):
            self.used_up(group)
        if getattr(self, "counter", None) is not None:
            self.end()

    def __str__(self) -> str:
        return f"{self.name} backward"
