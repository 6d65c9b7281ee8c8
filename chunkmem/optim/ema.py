"""Exponential moving averages of weights, in chunks of their own that stay where they are made: no plan moves them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from chunkmem.data.errors import CheckpointError, ConfigError, StateError, TierIOError
from chunkmem.data.types import AVERAGES, MEMORY, Role
from chunkmem.modules.binding import ManagedParameter, by_group
from chunkmem.modules.lazy_tensor import copy_values
from chunkmem.modules.local_parts import shown
from chunkmem.optim.chunk_states import HeldStates
from chunkmem.optim.host import HasOptimizerHost, OptimizerHost
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.slot_source import lazy_state
from chunkmem.ranks.local_parts import LocalPart
from chunkmem.runtime.chunk import slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.failed import lost_error

_NAME = "ema"
_COUNT = "n_averaged"
_READER = "averages of weights"
_LOAD = "ema.load_state_dict()"
PREFIX = "module."
"""As `torch.optim.swa_utils.AveragedModel` names them."""
_Mix = Callable[[list[torch.Tensor], list[torch.Tensor]], object]
"""Writes to averages, given them and the weights."""


class EMA:
    """Averages of parameters: `average = decay * average + (1 - decay) * weight` at each `update()`.

    The bits are those of `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))` of `torch.optim.swa_utils` on
    a CPU. In mixed precision master weights are averaged, in fp32; without those, weights in their dtype. Averages stay
    on HOST, with a disk on DISK, and count in its cap; weights that are elsewhere are copied there, a parameter at a
    time. Over ranks each averages the chunks that it owns, and all of them make the same calls. Averages of parameters
    that no chunk holds (excluded, or added to a model after it was packed) are ordinary tensors next to them.

    Args:
        manager: of the parameters.
        decay: from 0 to 1; `ema.decay` may be changed between updates.
        params: to be averaged; None: all of the manager's models that require gradients now.

    Raises:
        ConfigError: `decay` is no such number.
        StateError: a parameter is in no model of the manager or has no floating dtype, or two have one name.
        CapacityError: there is no room for the averages next to weights, gradients and optimizer states.
    """

    def __init__(self, manager: HasOptimizerHost, decay: float, params: Iterable[torch.Tensor] | None = None) -> None:
        host = self._host = manager.runtime
        host.require_open()
        self.decay = _checked(decay)
        """Of the averages, at each update."""
        self.num_updates = 0
        """The first one takes the weights as they are, as in torch."""
        self.open_block = ""
        """`ema.swapped()` while the weights are averages."""
        self._unrounded: dict[ManagedParameter, torch.Tensor] = {}
        """While they are swapped: averages in fp32 of parameters that have no fp32 weights to be swapped with."""
        self._is_half = False
        """A call has failed when it had changed some of the averages."""
        self._is_closed = False
        wanted = self._wanted(params)
        self._find(wanted)
        if not wanted and host.ranks.stages is None:
            raise StateError("there is no parameter to average: build the model first, and unfreeze what is trained")
        with host.together("making averages"):
            host.forget_plans()  # they leave no room for these
            self.excluded = {param: {_NAME: param.detach().clone()} for param in self._ordinary.values()}
            """Averages of parameters that no chunk holds, in their dtype and on their device."""
            self._spec = StateSpec(self._free_role())
            self._make_chunks(is_blank=True)
            self._average(torch._foreach_copy_)
        host.add_holder(self)

    def _free_role(self) -> Role:
        """Return a role that no chunk has on any rank: another one where some weights are averaged twice."""
        known = {key.role for key in self._host.updater.pager.store.chunks}
        number = 1 + max((number for number in range(1, len(known) + 1) if _role(number) in known), default=0)
        for ranks in (self._host.ranks.stages, self._host.ranks):
            if ranks is not None and ranks.size > 1:
                number = int(*ranks.max_over([number], label="making averages"))
        return _role(number)

    def _make_chunks(self, *, is_blank: bool) -> None:
        """Have chunks for the groups that this rank owns: of zeros if `is_blank`, else without content so far.

        Raises:
            CapacityError: the tiers have no room for them; nothing has been made.
        """
        updater = self._host.updater
        pager, store = updater.pager, updater.pager.store
        self._tier = store.staying_tier
        self._chunks = {group: self._spec.chunk(store.weights(group)) for group in self._own}
        for chunk in self._chunks.values():
            store.add(chunk)
        try:
            updater.state_chunks.require_room({}, name="averages")
            for chunk in self._chunks.values() if is_blank else ():
                pager.create(chunk, self._tier, reader=_READER, zero=True, elastic=True, is_of_step=False)
                if self._tier not in MEMORY:
                    chunk.replicas[self._tier].write(torch.zeros(chunk.group.numel, dtype=chunk.dtype, device="cpu"))
        except BaseException:
            self._remove_chunks()
            raise

    def _remove_chunks(self) -> None:
        for chunk in self._chunks.values():
            self._host.updater.pager.store.remove(chunk)
        self._chunks = {}

    def _opened(self) -> Iterator[tuple[list[ManagedParameter], list[torch.Tensor]]]:
        """Yield parameters of each group that this rank owns with their averages, which may be written to.

        Those of DISK are a copy meanwhile. If DISK fails, it is asked again at once: there is no way back from here.

        Raises:
            TierIOError: DISK cannot be read or written twice.
        """
        store = self._host.updater.pager.store
        for group, members in self._own.items():
            chunk = self._chunks[group]
            store.before_change(chunk)
            if not chunk.ready(self._tier):
                raise lost_error(_READER, chunk)
            replica = chunk.replicas[self._tier]
            with runtime_mode():
                flat = _twice(replica.read)
                slots = store.views(chunk, self._tier) if flat is replica.flat else slot_views(chunk, flat)
            self._is_half = True
            yield members, [slots[managed.position] for managed in members]
            _twice(replica.write, flat)
            store.mark_written(chunk, self._tier)
        self._is_half = False

    def _wanted(self, params: Iterable[torch.Tensor] | None) -> set[torch.Tensor]:
        """Return what is averaged, of the parameters that this rank has."""
        registry = self._host.registry
        named = [param for _, param in self._host.named_parameters()]
        if params is None:
            return {param for param in named if param.requires_grad and not registry.is_of_other_stage(param)}
        given, known = list(params), set(named)
        for param in given:
            if param not in known:
                registry.lookup(param)
        return {param for param in given if not registry.is_of_other_stage(param)}

    def _find(self, wanted: Collection[torch.Tensor]) -> None:
        """Look up parameters that are averaged from now on.

        Raises:
            StateError: two have one name, one is in no model, or is in no chunk and has no floating dtype.
        """
        host, names = self._host, dict[str, torch.Tensor]()
        for name, param in host.named_parameters():
            if param in wanted and names.setdefault(name, param) is not param:
                raise StateError(
                    f"two models have a parameter {name}; make a chunkmem.EMA for each, with params=model.parameters()"
                )
        if unnamed := set(wanted).difference(names.values()):
            raise StateError(
                f"a parameter of shape {tuple(unnamed.pop().shape)} is in none of the manager's models, which give "
                "averages their names; build its module as part of one"
            )
        found = ((name, host.registry.find(param)) for name, param in names.items())
        self._named = {name: managed for name, managed in found if managed is not None}
        own = by_group(filter(host.owns, dict.fromkeys(self._named.values())))
        self._own = dict(sorted(own.items()))
        """By group that this rank owns, in the order of the groups."""
        self._ordinary = {name: param for name, param in names.items() if name not in self._named}
        for name, other in self._ordinary.items():
            if not (other.is_floating_point() or other.is_complex()):
                raise StateError(
                    f"parameter {name} is in {other.dtype}, of which there are no averages; give chunkmem.EMA params= "
                    "without it, or none for those that require gradients"
                )

    def __repr__(self) -> str:
        num_params = len(self._named) + len(self.excluded)
        held = f"{num_params} parameters, decay={self.decay}, {self.num_updates} updates"
        return f"EMA({held}{', closed' if self._is_closed else f' on {self._tier.name}'})"

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights as they are now: call it after `optimizer.step()`.

        Raises:
            StateError: inside `swapped()`, or the averages or the manager are closed.
        """
        self._require_usable("ema.update()")
        weight = 1 - _checked(self.decay)
        with self._host.together("ema.update()"):
            self._host.updater.ledger.require_over("ema.update()")
            if self.num_updates:
                self._average(lambda averages, weights: torch._foreach_lerp_(averages, weights, weight))
            else:
                self._average(torch._foreach_copy_)
        self.num_updates += 1

    def _average(self, mix: _Mix) -> None:
        """Have `mix` write to averages, given lists of them and of weights in their dtype, where they are."""
        for members, averages in self._opened():
            with runtime_mode():
                weights = [_twice(self._host.updater.weight, managed) for managed in members]
                mix(averages, [w.to(a.device, a.dtype) for w, a in zip(weights, averages, strict=True)])
        for param, entry in self.excluded.items():
            mix([entry[_NAME]], [param.detach()])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the averages as the weights inside, and all bits of the weights again afterwards: for evaluation.

        `manager.save_pretrained()` inside writes the averages.

        Raises:
            StateError: inside `swapped()`, or between backward and a `step()` that updates inside backward.
            TierIOError: DISK failed twice; weights and averages are to be loaded.
        """
        self._require_usable("ema.swapped()")
        self._swap()
        self.open_block = "ema.swapped()"
        try:
            yield
        finally:
            try:
                if not self._host.is_closed:
                    self._swap()
            finally:
                self.open_block = ""

    @torch.no_grad()
    def _swap(self) -> None:
        updater = self._host.updater
        with self._host.together("ema.swapped()"):
            updater.ledger.require_over("ema.swapped()")
            updater.ledger.require_sound("ema.swapped()")
            updater.ahead.forget()  # an update overlapped with backward has read what is replaced here
            with updater.ledger.updating("weights by ema.swapped()"):
                for members, averages in self._opened():
                    for managed, average in zip(members, averages, strict=True):
                        before = _twice(updater.read_weight, managed)
                        # Without master weights, as if frozen, or frozen next to others that are trained.
                        is_narrower = before.dtype is not average.dtype or managed in updater.rounded
                        if is_narrower and not self.open_block:
                            self._unrounded[managed] = average.clone()
                        _twice(updater.write_weight, managed, average)
                        with runtime_mode():
                            average.copy_(self._unrounded.pop(managed, before) if self.open_block else before)
                    updater.mark_written(members)
            self._host.send_on_host("averages")
            for param, entry in self.excluded.items():
                weight = param.detach().clone()
                param.copy_(entry[_NAME])
                entry[_NAME] = weight

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._is_closed and not self._host.is_closed:
            if self.open_block:
                raise StateError("ema.close() inside ema.swapped(): leave the block first")
            self._host.forget_plans()
            self._remove_chunks()
            self._host.drop_holder(self)
        self.excluded = {}
        self._is_closed = True

    def _require_usable(self, call: str) -> None:
        self._host.require_open()
        if self._is_closed:
            raise StateError(f"{call}: these averages are closed")
        if self.open_block:
            raise StateError(f"{call} inside ema.swapped(): the weights are averages there; leave the block first")
        if self._is_half and call != _LOAD:
            raise StateError(
                f"{call} after an error that has left some averages changed and others not: load what was saved last "
                "with manager.load(path, optimizer, ema=ema)"
            )

    # `chunkmem.optim.chunk_states.StateHolder`.

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The one of its chunks; the same on all ranks."""
        return (self._spec,)

    def held(self) -> dict[ManagedParameter, HeldStates]:
        """Return what this rank averages in chunks."""
        held = HeldStates(self._count(), {_NAME: self._spec.role}, self.state_specs)
        return {managed: held for members in self._own.values() for managed in members}

    def move_to(self, host: OptimizerHost) -> None:
        """Have the same Parameters in other chunks from now on; `take_over` tells which."""
        self._host = host
        host.add_holder(self)

    def take_over(self, held: Mapping[ManagedParameter, HeldStates]) -> None:
        """Average what any rank has averaged, of the parameters that this one has; what is in chunks comes later.

        Raises:
            CapacityError: there is no room for the averages.
        """
        self._find({*(managed.param for managed in held), *self.excluded})
        for param, entry in self.excluded.items():
            entry[_NAME] = entry[_NAME].to(param.device)
        self._make_chunks(is_blank=False)

    # Saved.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return CPU copies, under the names that `AveragedModel` gives them: it loads them with `strict=False`.

        Over ranks all call it.
        """
        self._require_usable("ema.state_dict()")
        with self._host.together("ema.state_dict()"):
            found = self._saved(lambda managed: self._host.from_owner(managed, partial(self._read, managed)))
            found = self._host.ranks.over_stages(found, label="sending the averages of a stage")
        return {_COUNT: self._count(), **self._converted(found, shown)}

    def lazy_state_dict(self) -> dict[str, torch.Tensor]:
        """Return `state_dict()` with values in chunks that are read when they are used; of this pipeline stage."""
        self._require_usable("ema.lazy_state_dict()")
        found = self._saved(partial(lazy_state, self._host, self._spec))
        return {_COUNT: self._count(), **self._converted(found, shown)}

    def _saved(self, value_of: Callable[[ManagedParameter], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return averages as they are saved, given what stands for those in chunks, and copies of others."""
        found = {f"{PREFIX}{name}": value_of(managed) for name, managed in self._named.items()}
        others = ((name, self.excluded[param][_NAME]) for name, param in self._ordinary.items())
        return found | {f"{PREFIX}{name}": value.to("cpu", copy=True) for name, value in others}

    def _converted(self, found: Mapping[str, Any], convert: Callable[[LocalPart, Any], Any]) -> dict[str, Any]:
        """Return a state with averages of local parts of DTensors converted to those of wholes, or back."""
        parts = self._host.registry.local_parts
        named = self._host.named_parameters() if parts else ()
        of_parts = ((f"{PREFIX}{name}", parts[id(param)]) for name, param in named if id(param) in parts)
        return {**found, **{key: convert(part, found[key]) for key, part in of_parts if key in found}}

    def _read(self, managed: ManagedParameter) -> torch.Tensor:
        return self._host.updater.pager.store.read_slot(self._chunks[managed.group], managed.position)

    def _count(self) -> torch.Tensor:
        return torch.tensor(self.num_updates, dtype=torch.long, device="cpu")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would.

        Raises:
            CheckpointError: an average is missing, or has another shape.
        """
        if not isinstance(state_dict, Mapping) or _COUNT not in state_dict:
            raise CheckpointError(f"a state of averages has {_COUNT}, and {PREFIX}NAME for each parameter")
        state_dict = self._converted(state_dict, LocalPart.local)
        wrong = []
        known: dict[str, ManagedParameter | torch.Tensor] = {**self._named, **self._ordinary}
        for name, averaged in known.items():
            value = state_dict.get(f"{PREFIX}{name}")
            if not isinstance(value, torch.Tensor):
                wrong.append(f"{name} is missing")
            elif value.shape != averaged.shape:
                wrong.append(f"{name} is {tuple(value.shape)} instead of {tuple(averaged.shape)}")
        if wrong:
            raise CheckpointError(f"the averages do not fit the model: {'; '.join(wrong)}; nothing was loaded")

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict()` or `AveragedModel.state_dict()` has returned; what is not averaged here is left out.

        Raises:
            CheckpointError: an average is missing, or has another shape; nothing has been changed.
        """
        self._require_usable(_LOAD)
        self.check_state_dict(state_dict)
        state_dict = self._converted(state_dict, LocalPart.local)
        values = {managed: state_dict[f"{PREFIX}{name}"] for name, managed in self._named.items()}
        with self._host.together(_LOAD):
            for members, averages in self._opened():
                with runtime_mode():
                    for managed, average in zip(members, averages, strict=True):
                        copy_values(average, values[managed])
            for name, param in self._ordinary.items():
                self.excluded[param][_NAME].copy_(state_dict[f"{PREFIX}{name}"])
        self.num_updates = int(state_dict[_COUNT])


def _twice(call: Callable[..., Any], *args: Any) -> Any:
    """Return what `call` does, called again if DISK has failed."""
    try:
        return call(*args)
    except TierIOError:
        return call(*args)


def _role(number: int) -> Role:
    return Role(_NAME if number == 1 else f"{_NAME}_{number}", AVERAGES)


def _checked(decay: object) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ConfigError(f"decay = {decay!r} has to be a number from 0 to 1, such as 0.999")
    return float(decay)
