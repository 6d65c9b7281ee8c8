"""The way back to a plan that was left, and the room for shadow buffers on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chunkmem.errors import PlanError
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.facts import PlanFacts
from chunkmem.plan.model import Action
from chunkmem.plan.semantics import Residency
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.tiers import Tiers
from chunkmem.runtime.transition import actions_to
from chunkmem.trace.model import Mode, Trace
from chunkmem.types import ChunkId, Tier


class WayBack:
    """From any residency to one of a plan's."""

    def __init__(self, facts: PlanFacts, trace: Trace, pager: Pager, tiers: Tiers) -> None:
        """The arguments are those of `PlanExecutor`, and the facts of its plan."""
        self._facts = facts
        self._trace = trace
        self._pager = pager
        self._tiers = tiers
        self.obstacle = ""
        """Why there was no way when one was last asked for."""

    def actions(self, wanted: Residency, peaks: Mapping[Tier, int]) -> list[Action] | None:
        """Return how to get to a residency, given what the plan takes of each tier at most; None: there is no way.

        Shadow buffers are the first to give way, those that are there and those that the plan would have.
        """
        host, shadow_nbytes = peaks[Tier.HOST], self._facts.shadow_nbytes
        # The plan's peak includes the shadow buffers. What is reserved of it already is no room that a way could take.
        reserved_nbytes = min(host, self._tiers.host.now.get(SHADOW, 0))
        for host_nbytes in dict.fromkeys((host - reserved_nbytes, host - shadow_nbytes)):
            try:
                return actions_to(
                    wanted,
                    self._pager,
                    own=self._trace.chunk_nbytes,
                    peak_nbytes={**peaks, Tier.HOST: host_nbytes},
                    keep_duplicates=self._trace.mode is Mode.EVAL,
                )
            except PlanError as error:
                self.obstacle = str(error)
            self._pager.speculative.reserve({})
        return None

    def reserve_shadow_buffers(self, own: Iterable[ChunkId]) -> None:
        """Reserve what the plan has, as far as HOST has room for it and for all chunks that are not its `own`."""
        host, resident = self._tiers.host, self._pager.store.resident[Tier.HOST]
        own_nbytes = sum(resident[chunk].nbytes for chunk in own if chunk in resident)
        others_nbytes = max(0, host.chunk_nbytes - host.now.get(SHADOW, 0) - own_nbytes)
        chunks_nbytes = self._facts.peak_nbytes[Tier.HOST] - self._facts.shadow_nbytes
        self._pager.speculative.reserve(self._facts.shadow_counts(host.limit_nbytes - chunks_nbytes - others_nbytes))
