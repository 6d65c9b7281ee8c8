"""Freeze and unfreeze parameters between two steps; what training them takes is given back at once (ADR 44).

    gradient            gone
    optimizer states    gone, or kept if asked
    master copy         gone with the states: from then on its weights are what was computed with, rounded
    weights             stay; nothing writes to them, so they are copied up and never down

Chunks go as a whole, when the last of their parameters is frozen. A state of a parameter in a chunk that stays is
forgotten all the same, and its master weight is rounded: training it again begins with the same numbers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import CapacityError, ConfigError, StateError
from chunkmem.data.memory import FreezeReport
from chunkmem.data.trace import Trace
from chunkmem.freezing.packing_again import PackingAgain, has_states, training_nbytes
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gather import parameters_in
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.steps.plan_cache import Key


def expect_step(runtime: Runtime) -> None:
    """Have a plan for the next step, or have it recorded. All ranks call it.

    Plans belong to what is trained. If steps that train just this are known, theirs is followed again at once. Else the
    step is recorded, and the one after it follows a plan. Over ranks the next step shows what is exchanged, if gathers
    are begun ahead, and the one after it is recorded.

    Raises:
        RankError: a rank is missing.
    """
    known, prefetch = runtime.controller.known, runtime.sharding.units.prefetch
    before = known.trained
    key = known.key_now()
    if prefetch is None:
        if not _follow_again(runtime, key):
            known.record(key)
        return
    if key.trainable == before:
        return
    first_steps = runtime.entry_points.first_steps
    if first_steps is None or not first_steps.has_learned:
        runtime.forget_plans()
        return
    if prefetch.knows(key.trainable):  # on all ranks alike, unlike plans: one that had no batch has none
        is_known = _follow_again(runtime, key)
    else:
        known.drop(key)
        first_steps.learn_again()
        is_known = False
    if not is_known:
        known.record(key, regions_of=Key(0, before))
    prefetch.switch(before, key.trainable)


def _follow_again(runtime: Runtime, key: Key) -> bool:
    """Follow the plan of steps that train the same, if they are known and there is as much to update as there was."""
    trained = {managed.group for managed in runtime.registry.parameters if managed.requires_grad}
    groups = {managed.group for managed in runtime.registry.parameters} - trained
    chunks = [
        chunk
        for chunk in runtime.memory.store.chunks.values()
        if chunk.id.group in groups and chunk.id.role.kind.is_of_update and not (chunk.is_remote or chunk.stays)
    ]
    now = {chunk.id for chunk in chunks if chunk.version != NO_CONTENT}

    def is_current(trace: Trace) -> bool:
        return now == {chunk for chunk in trace.chunk_nbytes if chunk.group in groups and chunk.role.kind.is_of_update}

    return runtime.controller.known.follow_again(key, is_current)


def freeze(
    runtime: Runtime,
    what: object,
    *,
    prefix: int | None,
    keep_states: bool,
    adopt: Callable[[Runtime], None],
    not_packed: str = "",
) -> FreezeReport:
    """See `ChunkManager.freeze`.

    Args:
        runtime: the parts of the manager.
        what: modules or parameters.
        prefix, keep_states: as there.
        adopt: has the manager take other parts over, where chunks are packed again.
        not_packed: why they must not be; "" if they may.
    """
    named = _params(what, prefix, "freeze")
    trained = [param for param in named if param.requires_grad]
    # What was frozen before, by hand or with its states, may still have states to give back.
    params = trained if keep_states else named
    runtime.require_open()
    with runtime.together("manager.freeze()"):  # what is refused on one rank is told to the others
        _require_between_steps(runtime, "freeze")
        _agree(runtime, params, f"frozen, keep_states={keep_states}")
        runtime.controller.learn_from_last()
        managed = [found for param in params if (found := runtime.registry.lookup(param)) is not None]
        for param in params:
            param.requires_grad_(False)
            param.grad = None  # what the last step has used: an optimizer would use it again
        before_nbytes = training_nbytes(runtime)
        if keep_states:
            runtime.updater.kept.update(managed)
            runtime.updater.rounded.difference_update(managed)
        else:
            _give_up_states(runtime, params, managed)
        freed_nbytes = before_nbytes - training_nbytes(runtime)
        again = None if keep_states else PackingAgain(runtime)
        if again is None or not again.is_worth_it():
            again, not_packed = None, ""
        else:
            not_packed = not_packed or again.reason_against()
        if again is None or not_packed:
            expect_step(runtime)
    packed_nbytes = 0
    if again is not None and not not_packed:
        unpacked_nbytes = training_nbytes(runtime)
        runtime, not_packed = _pack(runtime, again, adopt)
        packed_nbytes = 0 if not_packed else unpacked_nbytes - training_nbytes(runtime)
    left_nbytes = 0
    if not keep_states:
        left_nbytes = _left_nbytes(runtime, [found for p in params if (found := runtime.registry.find(p)) is not None])
    num_params = sum(param.numel() for param in trained)
    return FreezeReport(num_params, freed_nbytes + packed_nbytes, left_nbytes, packed_nbytes, not_packed)


def _pack(runtime: Runtime, again: PackingAgain, adopt: Callable[[Runtime], None]) -> tuple[Runtime, str]:
    """Return parts over new chunks; or the same ones, and why there is no room for others."""
    try:
        after = again.run()
    except CapacityError as error:
        with runtime.together("manager.freeze()"):
            expect_step(runtime)
        return runtime, str(error)
    adopt(after)
    return after, ""


def _give_up_states(runtime: Runtime, params: Sequence[nn.Parameter], managed: Collection[ManagedParameter]) -> None:
    """Give back the memory of the states of `params`, and of the master weights of those that are `managed`."""
    updater = runtime.updater
    updater.kept.difference_update(managed)
    _forget_states(runtime, params)
    for group in sorted(_frozen_groups(runtime, {each.group for each in managed})):
        updater.give_up(group)
    for each in managed:
        updater.round_master(each)
    updater.rounded.update(managed)


def unfreeze(runtime: Runtime, what: object) -> FreezeReport:
    """See `ChunkManager.unfreeze`."""
    params = [param for param in _params(what, None, "unfreeze") if not param.requires_grad]
    runtime.require_open()
    with runtime.together("manager.unfreeze()"):
        _require_between_steps(runtime, "unfreeze")
        _agree(runtime, params, "unfrozen")
        runtime.controller.learn_from_last()
        for param in params:
            param.requires_grad_(True)
        managed = [found for param in params if (found := runtime.registry.lookup(param)) is not None]
        new = [each for each in managed if not has_states(runtime, each)]
        try:
            runtime.updater.begin_again(new)  # so that a lack of room is known now
        except CapacityError:
            for param in params:
                param.requires_grad_(False)
            for group in _frozen_groups(runtime, {each.group for each in managed}):
                runtime.updater.give_up(group)
            raise
        runtime.updater.kept.difference_update(managed)
        runtime.updater.rounded.difference_update(managed)
        expect_step(runtime)
    return FreezeReport(sum(param.numel() for param in params))


def _params(what: object, prefix: int | None, call: str) -> list[nn.Parameter]:
    """Return the parameters that are meant, each once."""
    if isinstance(what, str) or not isinstance(what, nn.Module | torch.Tensor | Iterable):
        raise ConfigError(f"manager.{call}() takes modules or parameters, one or several, not a {type(what).__name__}")
    if prefix is not None:
        if not isinstance(prefix, int) or isinstance(prefix, bool) or prefix < 0:
            raise ConfigError(f"manager.{call}(): prefix is {prefix!r}; give a number of modules, 0 or more")
        if isinstance(what, nn.Module | torch.Tensor | str) and not isinstance(what, nn.ModuleList | nn.Sequential):
            raise ConfigError(f"manager.{call}(): prefix counts modules in a list; {type(what).__name__} is none")
        modules = list(what) if isinstance(what, Iterable) else []
        if prefix > len(modules):
            raise ConfigError(f"manager.{call}(): prefix is {prefix}, and there are {len(modules)} modules")
        what = modules[:prefix]
    return [param for param in dict.fromkeys(parameters_in(what)) if isinstance(param, nn.Parameter)]


def _require_between_steps(runtime: Runtime, call: str) -> None:
    """Raise a StateError if a step is under way."""
    runtime.registry.check()
    runtime.modules.require_values()
    if runtime.entry_points.phase or runtime.entry_points.gathers_open:
        where = runtime.entry_points.phase or "manager.gather()"
        raise StateError(f"manager.{call}() inside of {where}: call it between two steps")
    if block := runtime.open_block:
        raise StateError(f"manager.{call}() inside {block}: leave the block first")
    runtime.entry_points.require_drained(f"manager.{call}()")
    runtime.gradients.sync_with_grad(runtime.registry.parameters)
    if runtime.gradients.slots.any_given(runtime.registry.parameters):
        raise StateError(
            f"manager.{call}(): there are gradients that wait for their step; call optimizer.step() or "
            "optimizer.zero_grad() before it: what is trained changes between two steps, not between micro-batches"
        )


def _agree(runtime: Runtime, params: Sequence[nn.Parameter], said: str) -> None:
    """Have all ranks freeze the same.

    Raises:
        ConfigError: they do not.
    """
    if runtime.is_shared:
        names = [getattr(runtime.registry.lookup(param), "name", f"excluded {tuple(param.shape)}") for param in params]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
        first = f"{names[0]} to {names[-1]}" if names else "nothing"
        runtime.ranks.agree(f"what is {said}", f"{len(names)} parameters, {first}, digest {digest}")


def _forget_states(runtime: Runtime, params: Sequence[nn.Parameter]) -> None:
    for optimizer in runtime.optimizers:
        own = {param for group in optimizer.param_groups for param in group["params"]}
        for param in params:
            if param in own and param in optimizer.state:
                del optimizer.state[param]


def _is_kept(runtime: Runtime, managed: ManagedParameter) -> bool:
    """Tell whether training a parameter is to be taken up where it was."""
    return managed.requires_grad or managed in runtime.updater.kept or has_states(runtime, managed)


def _frozen_groups(runtime: Runtime, groups: Collection[int]) -> set[int]:
    """Return those of the groups that nothing trains any more, and that this rank has the states of.

    Where another parameter of a group was frozen with its states, or by hand, they stay with those of the whole group.
    """
    by_group: dict[int, list[ManagedParameter]] = defaultdict(list)
    for managed in runtime.registry.parameters:
        if managed.group in groups:
            by_group[managed.group].append(managed)
    return {
        group
        for group, members in by_group.items()
        if group in runtime.updater.state_chunks and not any(_is_kept(runtime, managed) for managed in members)
    }


def _left_nbytes(runtime: Runtime, frozen: Iterable[ManagedParameter]) -> int:
    """Return the bytes of optimizer states and master weights that parameters still have on this rank."""
    found = 0
    for managed in frozen:
        chunks = (
            runtime.updater.state_chunks.chunks(managed.group) if managed.group in runtime.updater.state_chunks else []
        )
        for chunk in chunks:
            if chunk.id.role.kind.is_of_update and chunk.version != NO_CONTENT and not chunk.is_remote:
                found += chunk.nbytes * managed.slot.numel // chunk.group.numel
    return found
