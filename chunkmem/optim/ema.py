"""Exponential moving averages of weights, in chunks of their own; see [Note: Averages] in `chunkmem.optim.averages`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from chunkmem.errors import CheckpointError, ConfigError, StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.lazy_tensor import copy_values
from chunkmem.optim.host import HasRuntime
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.slot_source import SlotSource
from chunkmem.runtime.device import runtime_mode

_COUNT = "n_averaged"
_PREFIX = "module."
"""As `torch.optim.swa_utils.AveragedModel` names them."""


class EMA:
    """Averages of managed parameters: `average = decay * average + (1 - decay) * weight` at each `update()`.

    The bits are those of `AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))` of `torch.optim.swa_utils` on
    a CPU. In mixed precision master weights are averaged, in fp32; without those, weights in their dtype. Averages stay
    on HOST, with a disk on DISK, and count in its cap; weights that are elsewhere are copied there, a parameter at a
    time. Over ranks each averages the chunks that it owns, and all of them make the same calls.

    Args:
        manager: of the parameters.
        decay: from 0 to 1; `ema.decay` may be changed between updates.
        params: to be averaged; None: all managed ones that require gradients now.

    Raises:
        ConfigError: `decay` is no such number.
        StateError: a parameter is not managed, or two have one name.
        CapacityError: there is no room for the averages next to weights, gradients and optimizer states.
    """

    def __init__(self, manager: HasRuntime, decay: float, params: Iterable[torch.Tensor] | None = None) -> None:
        host = self._host = manager.runtime
        host.require_open()
        self.decay = _checked(decay)
        """Of the averages, at each update."""
        self.num_updates = 0
        """The first one takes the weights as they are, as in torch."""
        self._is_swapped = False
        self._unrounded: dict[ManagedParameter, torch.Tensor] = {}
        """While they are swapped: averages in fp32 of parameters that have no fp32 weights to be swapped with."""
        self._is_closed = False
        self._named = self._named_parameters(params)
        self._own: dict[int, list[ManagedParameter]] = {}
        """By group that this rank owns, in the order of the groups."""
        self._name_of = {managed: name for name, managed in self._named.items()}
        for managed in sorted(dict.fromkeys(self._named.values()), key=lambda managed: managed.group):
            if host.owns(managed):
                self._own.setdefault(managed.group, []).append(managed)
        with host.together("making averages"):
            host.forget_plans()  # they leave no room for these
            self._chunks = host.updater.make_averages(self._own)
            self._average(partial(torch._foreach_copy_))

    def _named_parameters(self, params: Iterable[torch.Tensor] | None) -> dict[str, ManagedParameter]:
        registry = self._host.registry
        if params is None:
            wanted = {managed for managed in registry.parameters if managed.requires_grad}
        else:
            given = {param: registry.lookup(param) for param in params}
            wanted = {managed for managed in given.values() if managed is not None}
            for param, managed in given.items():
                if managed is None and not registry.is_elsewhere(param):
                    raise StateError(
                        f"a parameter of shape {tuple(param.shape)} is of an excluded module: chunkmem.EMA averages "
                        "managed ones; average it by torch.optim.swa_utils.AveragedModel(module)"
                    )
        named: dict[str, ManagedParameter] = {}
        for name, param in self._host.named_parameters():
            if (managed := registry.find(param)) not in wanted or managed is None:
                continue
            if named.setdefault(name, managed) is not managed:
                raise StateError(
                    f"two models have a parameter {name}; make a chunkmem.EMA for each, with params=model.parameters()"
                )
        if not named and self._host.ranks.stages is None:
            raise StateError("there is no parameter to average: build the model first, and unfreeze what is trained")
        return named

    def __repr__(self) -> str:
        held = f"{len(self._named)} parameters, decay={self.decay}, {self.num_updates} updates"
        return f"EMA({held}{', closed' if self._is_closed else f' on {self._chunks.tier.name}'})"

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights as they are now: call it after `optimizer.step()`.

        Raises:
            StateError: inside `swapped()`, or the averages or the manager are closed.
        """
        self._require_usable("ema.update()")
        weight = 1 - _checked(self.decay)
        with self._host.together("ema.update()"):
            if self.num_updates:
                self._average(lambda averages, weights: torch._foreach_lerp_(averages, weights, weight))
            else:
                self._average(torch._foreach_copy_)
        self.num_updates += 1

    def _average(self, mix: Any) -> None:
        """Have `mix` write to averages, given lists of them and of weights in their dtype, where they are."""
        for group, members in self._own.items():
            with self._chunks.opened(group, writes=True) as slots, runtime_mode():
                averages = [slots[managed.position] for managed in members]
                weights = [self._host.updater.weight(managed) for managed in members]
                mix(averages, [w.to(a.device, a.dtype) for w, a in zip(weights, averages, strict=True)])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Have the averages as the weights inside, and all bits of the weights again afterwards: for evaluation.

        `manager.save_pretrained()` inside writes the averages.

        Raises:
            StateError: inside `swapped()`.
        """
        self._require_usable("ema.swapped()")
        self._swap()
        self._is_swapped = True
        try:
            yield
        finally:
            if not self._host.is_closed:
                self._swap()
            self._is_swapped = False

    @torch.no_grad()
    def _swap(self) -> None:
        updater = self._host.updater
        with self._host.together("ema.swapped()"):
            updater.ahead.forget()  # an update overlapped with backward has read what is replaced here
            for group, members in self._own.items():
                with self._chunks.opened(group, writes=True) as slots:
                    for managed in members:
                        before, average = updater.read_weight(managed), slots[managed.position]
                        is_narrower = before.dtype is not average.dtype  # without master weights, as if frozen
                        if is_narrower and not self._is_swapped:
                            self._unrounded[managed] = average.clone()
                        updater.write_weight(managed, average)
                        with runtime_mode():
                            average.copy_(self._unrounded.pop(managed, before) if self._is_swapped else before)
                updater.mark_updated(members)
            self._host.send_on_host("averages")

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if not self._is_closed and not self._host.is_closed:
            if self._is_swapped:
                raise StateError("ema.close() inside ema.swapped(): leave the block first")
            self._host.forget_plans()
            self._chunks.close()
        self._is_closed = True

    def _require_usable(self, call: str) -> None:
        self._host.require_open()
        if self._is_closed:
            raise StateError(f"{call}: these averages are closed")
        if self._is_swapped:
            raise StateError(f"{call} inside ema.swapped(): the weights are averages there; leave the block first")

    # Saved.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return CPU copies, under the names that `AveragedModel` gives them: it loads them with `strict=False`.

        Over ranks all call it.
        """
        self._require_usable("ema.state_dict()")
        with self._host.together("ema.state_dict()"):
            found = {
                f"{_PREFIX}{name}": self._host.from_owner(managed, partial(self._read, managed))
                for name, managed in self._named.items()
            }
            found = self._host.ranks.over_stages(found, label="sending the averages of a stage")
        return {_COUNT: self._count(), **found}

    def lazy_state_dict(self) -> dict[str, torch.Tensor]:
        """Return `state_dict()` with values that are read when they are used; of this pipeline stage."""
        self._require_usable("ema.lazy_state_dict()")
        spec, updater = StateSpec(self._chunks.role), self._host.updater
        found = {_COUNT: self._count()}
        for name, managed in self._named.items():
            source = SlotSource(
                managed,
                self._chunks.role,
                updater.state_dtype(spec, managed),
                find=partial(self._chunks.of, managed.group),
                read=partial(self._read, managed),
                owns=self._host.owns,
                from_owner=self._host.from_owner,
            )
            found[f"{_PREFIX}{name}"] = source.tensor(tuple(managed.shape))
        return found

    def _count(self) -> torch.Tensor:
        return torch.tensor(self.num_updates, dtype=torch.long, device="cpu")

    def _read(self, managed: ManagedParameter) -> torch.Tensor:
        return self._chunks.read(managed.group, managed.position)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would.

        Raises:
            CheckpointError: an average is missing, or has another shape.
        """
        if not isinstance(state_dict, Mapping) or _COUNT not in state_dict:
            raise CheckpointError(f"a state of averages has {_COUNT}, and {_PREFIX}NAME for each parameter")
        wrong = []
        for name, managed in self._named.items():
            value = state_dict.get(f"{_PREFIX}{name}")
            if not isinstance(value, torch.Tensor):
                wrong.append(f"{name} is missing")
            elif value.shape != managed.shape:
                wrong.append(f"{name} is {tuple(value.shape)} instead of {tuple(managed.shape)}")
        if wrong:
            raise CheckpointError(f"the averages do not fit the model: {'; '.join(wrong)}; nothing was loaded")

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict()` or `AveragedModel.state_dict()` has returned; what is not averaged here is left out.

        Raises:
            CheckpointError: an average is missing, or has another shape; nothing has been changed.
        """
        self._require_usable("ema.load_state_dict()")
        self.check_state_dict(state_dict)
        with self._host.together("ema.load_state_dict()"):
            for group, members in self._own.items():
                with self._chunks.opened(group, writes=True) as slots, runtime_mode():
                    for managed in members:
                        copy_values(slots[managed.position], state_dict[f"{_PREFIX}{self._name_of[managed]}"])
        self.num_updates = int(state_dict[_COUNT])


def _checked(decay: object) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ConfigError(f"decay = {decay!r} has to be a number from 0 to 1, such as 0.999")
    return float(decay)
