"""What every optimizer over chunks is: torch's, over the parts that look parameters up, step, save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_map

from chunkmem.data.errors import StateError
from chunkmem.modules.begun import BegunStep, options_in_words
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.local_parts import shown
from chunkmem.optim.checks import check_number, flag, number
from chunkmem.optim.chunk_states import HeldStates
from chunkmem.optim.groupwise import GroupwiseStep
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.in_backward import require_possible
from chunkmem.optim.masters import MASTER_KEY
from chunkmem.optim.members import GroupMembers
from chunkmem.optim.rule import StateSpec, UpdateRule
from chunkmem.optim.saved import SavedStates
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.state import OptimizerState
from chunkmem.optim.tiles import require_together
from chunkmem.optim.whole import WholeRule, WholeStep
from chunkmem.ranks.local_parts import LocalPart


class RuleOptimizer(torch.optim.Optimizer):
    """A torch optimizer over managed and excluded parameters, which an `UpdateRule` updates."""

    open_block = ""
    default_states: ClassVar[tuple[StateSpec, ...]]
    """What a class keeps with its default options, where nothing else decides that: `chunkmem estimate` counts it."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        rule: UpdateRule[Any],
        host: OptimizerHost,
        max_grad_norm: float | None,
        in_backward: bool | None = None,
    ) -> None:
        """Claim parameters.

        Args:
            params: parameters or parameter groups, as in torch.optim.
            defaults: of the options of parameter groups.
            rule: the update.
            host: of the manager that holds the parameters.
            max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
            in_backward: update groups inside backward; default: the configuration's `optimizer.params.in_backward`.

        Raises:
            ConfigError: an option is out of range, or cannot be had inside backward.
            StateError: a parameter is in no model of the manager.
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        host.require_open()
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
        self.max_grad_norm = host.config.gradient_clipping if max_grad_norm is None else max_grad_norm
        in_backward = flag(
            "in_backward", host.config.optimizer.params.in_backward if in_backward is None else in_backward
        )
        if in_backward:
            require_possible(self.max_grad_norm, scaler=host.scaler)
        self.param_groups: list[dict[str, Any]] = []
        self._state = OptimizerState(lambda: (param for group in self.param_groups for param in group["params"]))
        self._make_parts(host, rule, in_backward=in_backward)
        self._is_made = False
        super().__init__(params, defaults)
        self._is_made = True
        host.add_holder(self)
        self.updates.begin()

    def _make_parts(self, host: OptimizerHost, rule: UpdateRule[Any], *, in_backward: bool) -> None:
        self._host = host
        self._members = GroupMembers(self, host)
        steps = WholeStep if isinstance(rule, WholeRule) else GroupwiseStep
        self.updates = steps(host, self._members, rule, state=self._state, in_backward=in_backward)
        """What the manager knows of this optimizer."""
        self._saved = SavedStates(host, self._members, self.updates, self._state)

    def move_to(self, host: OptimizerHost) -> None:
        """Have the same Parameters in other chunks from now on, which `host` has; there are no states in them yet.

        Raises:
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        self._make_parts(host, self.updates.rule, in_backward=self.in_backward)
        host.add_holder(self)
        self.updates.require_room()
        self.updates.begin()

    @property
    def max_grad_norm(self) -> float:
        """The norm to clip to in `step()`; 0 or less: gradients are not clipped."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._max_grad_norm = number("max_grad_norm", value)

    @property
    def in_backward(self) -> bool:
        """Groups are updated inside backward; see [Note: Updates in backward] in `chunkmem.optim.in_backward`."""
        return self.updates.in_backward

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Scales losses in fp16, by its `loss_scale`; None in other precisions."""
        return self._host.scaler

    # `StateHolder`: chunks are packed again.

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """All states that it may keep of a parameter."""
        return self.updates.rule.all_states

    @property
    def excluded(self) -> MutableMapping[Any, Any]:
        """States of parameters that no chunk holds, by parameter and name."""
        return self.state.excluded

    def held(self) -> Mapping[ManagedParameter, HeldStates]:
        """Return the parameters whose states this rank has, and what these are."""
        return self.updates.states.held()

    def take_over(self, held: Mapping[ManagedParameter, HeldStates]) -> None:
        """Have the states of parameters that `held` has returned on other ranks; see `ChunkStates.take_over`."""
        self.updates.states.take_over(held)

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "this optimizer cannot be copied or pickled: its states live in chunks. Take optimizer.state_dict() and "
            "load it into a new optimizer"
        )

    def __repr__(self) -> str:
        groups, rule = self.param_groups, self.updates.rule
        count = f"{len(groups)} group" if len(groups) == 1 else f"{len(groups)} groups"
        shown = [f"{sum(len(group['params']) for group in groups)} parameters in {count}"]
        for name in rule.options or (("lr",) if all("lr" in group for group in groups) else ()):
            values = [_plain(group[name]) for group in groups]
            shown.append(f"{name}={values[0]!r}" if all(value == values[0] for value in values) else f"{name}={values}")
        return f"{type(self).__name__}({rule.title}{', '.join(shown)})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; its parameters have to be in models of the manager."""
        self._host.require_open()
        super().add_param_group(param_group)
        try:
            self._host.adopt(self.param_groups[-1]["params"])
            self.updates.rule.check(self.param_groups[-1])
            require_together((model.root for model in self._host.registry.models), self.param_groups)
            self.updates.require_room()
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_made:  # until all its groups are accepted, an older optimizer keeps its parameters
            self.updates.claim(self.param_groups[-1:])

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip if asked to, update every parameter that has a gradient, and consume the gradients.

        Args:
            closure: called once before that, with gradients enabled, as torch's AdamW does: it runs forward and
                backward.

        Returns:
            What `closure` returns; None without one.

        Raises:
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable. Over
                ranks nothing is updated then: all of them may have left out their batch. Or, with `in_backward`,
                options or gradients have changed since they were used.

        After any other error, `step()` again continues where it was, with the options that it began with; the closure
        is not called again, and another one is refused.
        """
        self._host.require_open()
        scaler, updates, updater = self._host.scaler, self.updates, self._host.updater
        updater.ledger.require_sound("optimizer.step()")
        begun = updates.begun
        if begun is not None and closure is not None:
            begun.require_closure(closure)
        if begun is None or not begun.is_stepping:
            updates.require_clipped("optimizer.step()")
            for group in self.param_groups:
                updates.rule.hyper(group)  # what it refuses is refused before anything is done
            if closure is None and self._saved.is_asked_for():
                return self._saved.make_blank()
            begun = self._begin(closure)
        try:
            with self._host.step(begun.options, updates=True, goes_on=begun.is_stepping):
                self._update(begun)
            if scaler is not None and begun.is_scaled:
                scaler.step(overflow=begun.overflows)
        except BaseException:
            updates.hold(begun)
            raise
        updates.end()
        return begun.result

    def _update(self, begun: BegunStep) -> None:
        """Update what has a gradient. Raises what `step` does."""
        updates = self.updates
        updates.check_owned(begun.known)
        if begun.is_stepping or updates.has_gradients(begun):
            updates.run(begun)
        elif begun.updated:
            self._host.updater.ahead.end_step()
        elif self._members.is_trainable() and not self._host.is_shared:
            updates.end()
            raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")

    def _begin(self, closure: Callable[[], Any] | None) -> BegunStep:
        """Return a step that has changed nothing so far, or what backward has updated. Raises what `step` does."""
        updates = self.updates
        called = updates.begun if updates.begun is not None and updates.begun.closure is not None else None
        result = None if called is None else called.result
        if closure is not None and called is None:
            result = self._call(closure)
        options, begun = options_in_words(self.param_groups), updates.begun
        if begun is None or not begun.updated:
            begun = updates.new_begun(options)
        else:
            begun.require_options(options)
            try:
                begun.require_consumed(self._host.updater.gradients.is_consumed)
            except StateError:
                updates.end()
                raise
        begun.closure, begun.result = closure if called is None else called.closure, result
        if begun.closure is not None:  # its gradients are there: called again, it would add to them
            updates.begun = begun
        return begun

    def _call(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed, or set them to 0.

        Raises:
            StateError: some have been used inside backward, or by a `step()` that has failed: `step()` has to come
                first.
        """
        self._host.require_open()
        updater = self._host.updater
        if self.updates.begun is not None:
            updater.ledger.require_over("zero_grad()", self._members.known())
        with torch._C.DisableTorchFunctionSubclass():  # parameters are not asked for values
            super().zero_grad(set_to_none)  # with lazy gradients, zeros reach the chunks
        if set_to_none:
            if updater.gradients.has_any:
                updater.gradients.discard(set(self._members.known()))
            if self._host.scaler is not None:
                self._host.scaler.is_used = False
        self.updates.end_if_begun()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim.

        Raises:
            ConfigError: `max_norm` is no number.
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable.
        """
        return self.updates.clip(number("max_norm", max_norm))

    # States.

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """States by parameter, as in torch.optim; those of managed parameters are copies, see `OptimizerState`."""
        return self._state

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        if value is not self._state:
            entries = list(value.items())
            self._state.clear()
            self._state.update(entries)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of `load_state_dict`: of excluded parameters alone, as those of managed ones were taken out.
        self._state.excluded = state["state"]
        super().__setstate__({key: value for key, value in state.items() if key != "state"})

    def state_dict(self, *, lazy: bool = False) -> dict[str, Any]:
        """Return what the optimizer of torch over the same parameters would: CPU copies, never views.

        Under the key "master_weights" it also has, by the index of a parameter, float32 weights of those built in bf16
        or fp16: the model's `state_dict` has them as they were built. torch leaves that key out.

        Args:
            lazy: see `ChunkManager.state_dict`.

        Raises:
            StateError: `lazy` over several ranks.
        """
        self._host.require_open()
        ranks = self._host.ranks
        if lazy:
            ranks.require_one("optimizer.state_dict(lazy=True)")
            return self.lazy_state_dict()
        with self._host.together("optimizer.state_dict()"):
            state_dict = self._save(lazily=False)  # other ranks' meshes mean nothing here: wholes are made of all
            for key in ("state", MASTER_KEY):
                found = ranks.over_stages(state_dict.get(key, {}), label=f"sending the {key} of a stage")
                if found or key in state_dict:
                    state_dict[key] = dict(sorted(found.items()))
            return self._of_wholes(state_dict, shown)

    def lazy_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` with `LazyTensor`s for the states of managed parameters, and for master weights.

        With pipeline stages it has those of this one. Over ranks, all call it.
        """
        self._host.require_open()
        with self._host.together("optimizer.lazy_state_dict()"):
            return self._of_wholes(self._save(lazily=True), shown)

    def _save(self, *, lazily: bool) -> dict[str, Any]:
        self.updates.check_owned()
        self.updates.states.even_out()
        own = self._state
        self._state = own.copies(lazily=lazily)  # type: ignore[assignment]  # what torch packs
        try:
            state_dict = super().state_dict()
        finally:
            self._state = own
        return self._saved.complete(state_dict, lazily=lazily)

    def _of_wholes(self, state_dict: dict[str, Any], convert: Callable[[LocalPart, Any], Any]) -> dict[str, Any]:
        """Return a state with what it has for local parts of DTensors converted to what is of the whole, or back."""
        parts = self._host.registry.local_parts
        if not parts or not isinstance(state_dict, Mapping):
            return state_dict
        params = enumerate(param for group in self.param_groups for param in group["params"])
        found = {index: parts[id(param)] for index, param in params if id(param) in parts}
        converted = dict(state_dict)
        for key in (key for key in ("state", MASTER_KEY) if key in state_dict):
            values = state_dict[key]
            own = {at: tree_map(partial(convert, part), values[at]) for at, part in found.items() if at in values}
            converted[key] = {**values, **own}
        return converted

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of its torch counterpart over the same parameters.

        Its "master_weights", if there are any, become those of the model: load the model's weights first.

        Raises:
            CheckpointError: groups or shapes differ, it was made with an option there is no counterpart of, or its
                master weights are of other weights than the model has; nothing has been changed.
        """
        self._host.require_open()
        with self._host.together("optimizer.load_state_dict()"):
            self._saved.load(self, self._of_wholes(state_dict, LocalPart.local))

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would; nothing is changed, and master weights are not looked at.

        Raises:
            CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
        """
        self._saved.check(self._of_wholes(state_dict, LocalPart.local))


def _plain(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
