"""The plan of the step after parameters were frozen, or are trained again: known, or made from that of another step.

[Note: The next step] Plans belong to what is trained. If steps that train just this are known, theirs is followed
again at once. Else the trace of those that train a little more is edited (`chunkmem.trace.frozen`). If there is none,
or it does not tell all, the step is recorded. Over ranks all have to exchange the same: the first one's word counts.
"""

from __future__ import annotations

from chunkmem.assembly import Runtime
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.shard.prefetch import PrefetchSchedule, Schedule
from chunkmem.steps.plan_cache import Key
from chunkmem.trace.frozen import without_training
from chunkmem.trace.frozen_exchanges import Exchanges
from chunkmem.trace.model import Trace
from chunkmem.types import ChunkId, Role, Tier


def expect_step(runtime: Runtime) -> None:
    """Have a plan for the next step: [Note: The next step]. All ranks call it.

    Raises:
        RankError: a rank is missing.
    """
    prefetch = runtime.sharding.units.prefetch
    if prefetch is None:
        key = runtime.controller.key_now()
        _expect(runtime, key)
        return
    before = runtime.controller.trained
    key = runtime.controller.key_now()
    if key.trainable == before:
        return
    if not runtime.entry_points.keep_exchanges():
        runtime.forget_plans()
        return
    known = prefetch.schedule_of(key.trainable)
    schedule = _expect(runtime, key, prefetch, before)
    if known is None:
        schedule = runtime.ranks.broadcast_object(schedule, label="what is exchanged once others are trained")
        if schedule is None:
            runtime.controller.drop(key)
            runtime.controller.record(key, Key(0, before))
            runtime.entry_points.learn_exchanges()
    prefetch.switch(before, key.trainable, None if known is not None else schedule or ())


def _expect(
    runtime: Runtime, key: Key, prefetch: PrefetchSchedule | None = None, before: bytes = b""
) -> Schedule | None:
    """Expect a step of a kind; return its exchanges if it is new, and there is a step to tell them from."""
    trained = {managed.group for managed in runtime.registry.parameters if managed.requires_grad}
    frozen = [managed for managed in runtime.registry.parameters if not managed.requires_grad]
    groups = {managed.group for managed in frozen} - trained
    chunks = runtime.memory.store.chunks
    own = (chunk for chunk in chunks.values() if chunk.id.group in groups and not (chunk.is_remote or chunk.is_kept))
    kept = {chunk.id for chunk in own if chunk.version != NO_CONTENT and chunk.compute_tier is Tier.DEVICE}

    def of_training(trace: Trace) -> set[ChunkId]:
        return {key for key in trace.chunk_nbytes if key.group in groups and _is_of_update(key.role)}

    def is_current(trace: Trace) -> bool:
        return of_training(trace) == {key for key in kept if _is_of_update(key.role)}

    found = runtime.controller.source_of(key, is_current)
    if found is None:
        runtime.controller.record(key, None if prefetch is None else Key(0, before))
    if found is None or found[0] == key:
        return None
    source, trace = found
    exchanges = None
    if prefetch is not None:
        schedule = prefetch.schedule if source.trainable == before else prefetch.schedule_of(source.trainable)
        if schedule is None:
            return None
        assert runtime.sharding.shards is not None
        exchanges = Exchanges(schedule, runtime.sharding.shards.together, prefetch.is_overlapped)
    fewer = without_training(
        trace,
        params={managed.name for managed in frozen},
        groups=groups,
        emptied=of_training(trace) - kept,
        exchanges=exchanges,
        unpredictable={managed.name for managed in runtime.modules.backward.unpredictable},
    )
    if fewer.is_certain:
        runtime.controller.expect(key, fewer.trace, source)
    else:
        runtime.controller.record(key, None if prefetch is None else source)
    return None if fewer.exchanges is None else fewer.exchanges.schedule


def _is_of_update(role: Role) -> bool:
    return role is Role.MASTER or role.is_state
