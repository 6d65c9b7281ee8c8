"""The plan of the step after parameters were frozen, or are trained again.

[Note: The next step] Plans belong to what is trained. If steps that train just this are known, theirs is followed
again at once. Else the step is recorded, and the one after it follows a plan. Over ranks the next step shows what is
exchanged, if gathers are begun ahead, and the one after it is recorded.
"""

from __future__ import annotations

from chunkmem.assembly import Runtime
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.steps.plan_cache import Key
from chunkmem.trace.model import Trace
from chunkmem.types import Role, Tier


def expect_step(runtime: Runtime) -> None:
    """Have a plan for the next step, or have it recorded: [Note: The next step]. All ranks call it.

    Raises:
        RankError: a rank is missing.
    """
    controller, prefetch = runtime.controller, runtime.sharding.units.prefetch
    before = controller.trained
    key = controller.key_now()
    if prefetch is None:
        if not _follow_again(runtime, key):
            controller.record(key)
        return
    if key.trainable == before:
        return
    if not runtime.entry_points.knows_exchanges:
        runtime.forget_plans()
        return
    if prefetch.knows(key.trainable):  # on all ranks alike, unlike plans: one that had no batch has none
        is_known = _follow_again(runtime, key)
    else:
        controller.drop(key)
        runtime.entry_points.learn_exchanges()
        is_known = False
    if not is_known:
        controller.record(key, regions_of=Key(0, before))
    prefetch.switch(before, key.trainable)


def _follow_again(runtime: Runtime, key: Key) -> bool:
    """Follow the plan of steps that train the same, if they are known and there is as much to update as there was."""
    trained = {managed.group for managed in runtime.registry.parameters if managed.requires_grad}
    groups = {managed.group for managed in runtime.registry.parameters} - trained
    chunks = [
        chunk
        for chunk in runtime.memory.store.chunks.values()
        if chunk.id.group in groups and _is_of_update(chunk.id.role) and not (chunk.is_remote or chunk.is_kept)
    ]
    now = {chunk.id for chunk in chunks if chunk.version != NO_CONTENT and chunk.compute_tier is Tier.DEVICE}

    def is_current(trace: Trace) -> bool:
        return now == {chunk for chunk in trace.chunk_nbytes if chunk.group in groups and _is_of_update(chunk.role)}

    return runtime.controller.follow_again(key, is_current)


def _is_of_update(role: Role) -> bool:
    return role is Role.MASTER or role.is_state
