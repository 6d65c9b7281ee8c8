"""Adam and AdamW as torch optimizers whose states live in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import ConfigError, StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.ahead import Intent
from chunkmem.optim.checks import STATE_ROLES, check_number, check_options, check_state, plain_options
from chunkmem.optim.excluded import update_excluded
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.pending import PendingGradients
from chunkmem.runtime.device import runtime_mode

if TYPE_CHECKING:
    from chunkmem.manager import ChunkManager


class Adam(torch.optim.Optimizer):
    """`torch.optim.Adam` (L2 weight decay) over managed and excluded parameters, with torch's fused kernel.

    Parameter groups, LR schedulers and `state_dict()` are torch's. Gradients are consumed by `step()`.

    Args:
        params: parameters or parameter groups, as in torch.optim.
        manager: the manager that holds the parameters.
        lr, betas, eps, weight_decay: given ones win over `optimizer.params` of the configuration.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.

    Raises:
        ConfigError: an option is out of range.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        *,
        manager: ChunkManager,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        manager._require_open()
        configured = manager.config.optimizer.params_for("AdamW" if self._decoupled else "Adam")
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
        self.max_grad_norm = manager.config.gradient_clipping if max_grad_norm is None else max_grad_norm
        """0 or less: gradients are not clipped."""
        self._manager = manager
        self._updater = manager._updater
        self._complete = False
        self._steps: dict[ManagedParameter, torch.Tensor] = {}
        """0-dim float32 counts of updates, for the parameters that have states."""
        self._options_of: dict[ManagedParameter, int] = {}
        """Which parameter group each one was in at the last step."""
        defaults = {
            "lr": configured.lr if lr is None else lr,
            "betas": configured.betas if betas is None else betas,
            "eps": configured.eps if eps is None else eps,
            "weight_decay": configured.weight_decay if weight_decay is None else weight_decay,
            # The rest says to torch.optim what this optimizer does, so that a state_dict goes both ways.
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, defaults)
        self._complete = True
        self._updater.claim(self._managed(), self)

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "this optimizer cannot be copied or pickled: its states live in chunks. Take optimizer.state_dict() and "
            "load it into an optimizer made anew"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; its parameters have to be managed or excluded."""
        self._manager._require_open()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            looked_up = (self._manager._lookup(p) for p in group["params"])
            managed = [m for m in looked_up if m is not None and self._manager._owns(m)]
            self._updater.require_room([*self._managed(), *managed])
        except Exception:
            self.param_groups.pop()
            raise
        if self._complete:  # until all its groups are accepted, an older optimizer keeps its parameters
            self._updater.claim(managed, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip if asked to, update every parameter that has a gradient, and consume the gradients.

        Raises:
            StateError: there is no gradient at all, or a closure was given.
        """
        if closure is not None:
            raise StateError(
                "step(closure) is refused: gradients move while backward runs, so a second evaluation inside the step "
                "cannot be served; run forward and backward before step()"
            )
        with self._manager._step(updates=True):
            self._updater.check_owner(self._managed(), self)
            pending = self._pending()
            has_landed = self._manager._has_landed or any(p.grad is not None for p in self._excluded())
            if not pending and not has_landed:
                raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")
            if self._manager._dtype is torch.float32:
                if self.max_grad_norm > 0:  # where they are, as torch does: to the bit
                    self._gradients(pending).clip(self.max_grad_norm)
                self._update(pending, multiplier=None)
            else:
                self._step_lowered(pending)
            self._updater.ahead.end_step()

    def _step_lowered(self, pending: list[ManagedParameter]) -> None:
        """Update with the loss scale and clipping folded in, or, if gradients overflowed, consume them."""
        scaler = self._manager._scaler
        multiplier = self._gradients(pending).multiplier(self.max_grad_norm)
        if scaler is not None:
            scaler.step(overflow=multiplier is None)
        if multiplier is None:
            self._manager._skip_step()
            self._updater.gradients.discard(set(pending))
        else:
            self._update(pending, multiplier=None if multiplier == 1.0 else multiplier)

    def intent(self, group: int) -> Intent | None:
        """Return what `step()` would do with a chunk group now if nothing is clipped; None if it cannot be told yet."""
        items: dict[int, tuple[dict[str, Any], list[tuple[ManagedParameter, torch.Tensor]]]] = {}
        for managed in self._updater.gradients.landed.get(group, ()):
            index = self._options_of.get(managed)
            if index is None or index >= len(self.param_groups) or managed not in self._steps:
                return None
            item = items.setdefault(index, (plain_options(self.param_groups[index]), []))
            item[1].append((managed, self._steps[managed] + 1))
        scaler = self._manager._scaler
        multiplier = None if scaler is None or scaler.scale == 1.0 else 1.0 / scaler.scale
        return Intent(items, multiplier, needs_norm=scaler is not None or self.max_grad_norm > 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed, or set them to 0."""
        self._manager._require_open()
        super().zero_grad(set_to_none)  # those of excluded parameters, and what was assigned to `.grad`
        if set_to_none:
            self._updater.gradients.discard({m for m in self._looked_up() if m is not None})
            if self._manager._scaler is not None:
                self._manager._scaler.is_used = False
            return
        landed = self._updater.gradients.landed
        pending = [m for m in self._looked_up() if m is not None and m in landed.get(m.group, ())]
        with runtime_mode():
            for managed in pending:
                for slot in self._updater.gradient_replicas(managed):
                    slot.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim."""
        with self._manager._step(updates=False):
            return self._gradients(self._pending()).clip(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.optim.AdamW(..., fused=True)` over the same parameters would: CPU copies, never views."""
        self._manager._require_open()
        self._updater.check_owner(self._managed(), self)
        with self._states_filled_in():
            state_dict = super().state_dict()
        if self._manager._scaler is not None:
            state_dict["loss_scaler"] = self._manager._scaler.state_dict()
        for group in state_dict["param_groups"]:
            group.update({key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)})
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of its torch counterpart over the same parameters.

        Raises:
            CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of;
                nothing has been changed.
        """
        self._manager._require_open()
        self._updater.check_owner(self._managed(), self)
        check_state(state_dict, self.param_groups, name_of=self._name_of)
        if self._manager._scaler is not None and "loss_scaler" in state_dict:
            self._manager._scaler.load_state_dict(state_dict["loss_scaler"])
        taken: dict[ManagedParameter, dict[str, Any]] = {}
        # The last hook before and the first after the loading. In between torch copies each state to the device of its
        # parameter: there the managed ones would not fit.
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, state: self._take_managed(state, taken)),
            self.register_load_state_dict_post_hook(lambda _: self._adopt(taken), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _managed(self) -> list[ManagedParameter]:
        """Return the managed parameters, over ranks those that this one owns: it has their states."""
        return [m for m in self._looked_up() if m is not None and self._manager._owns(m)]

    def _looked_up(self) -> list[ManagedParameter | None]:
        return [self._manager._lookup(param) for group in self.param_groups for param in group["params"]]

    def _excluded(self) -> list[torch.Tensor]:
        return [p for g in self.param_groups for p in g["params"] if self._manager._lookup(p) is None]

    def _pending(self) -> list[ManagedParameter]:
        landed = self._updater.gradients.landed
        return [managed for managed in self._managed() if managed in landed.get(managed.group, ())]

    def _name_of(self, param: torch.Tensor, index: int) -> str:
        return managed.name if (managed := self._manager._lookup(param)) is not None else f"parameter {index}"

    def _gradients(self, pending: list[ManagedParameter]) -> PendingGradients:
        manager = self._manager
        return PendingGradients(
            (param for group in self.param_groups for param in group["params"]),
            pending,
            self._updater,
            is_lowered=manager._dtype is not torch.float32,
            scaler=manager._scaler,
            ranks=manager._ranks,
        )

    def _update(self, pending: list[ManagedParameter], *, multiplier: float | None) -> None:
        self._update_managed(pending, multiplier)
        for options in self.param_groups:
            params = [p for p in options["params"] if self._manager._lookup(p) is None and p.grad is not None]
            update_excluded(params, self.state, options, multiplier=multiplier)

    def _update_managed(self, pending: list[ManagedParameter], multiplier: float | None) -> None:
        self._prepare_states(pending)
        waiting = set(pending)
        by_group: dict[int, dict[int, tuple[dict[str, Any], list[tuple[ManagedParameter, torch.Tensor]]]]] = {}
        for index, options in enumerate(self.param_groups):
            for param in options["params"]:
                managed = self._manager._lookup(param)
                if managed is not None:
                    self._options_of[managed] = index
                    if managed in waiting:
                        item = by_group.setdefault(managed.group, {}).setdefault(index, (options, []))
                        item[1].append((managed, self._steps[managed] + 1))
        for group in in_order_of_update(list(by_group), landing=list(self._updater.gradients.landed)):
            items = by_group[group]
            self._updater.update(group, items, multiplier=multiplier)
            done = {managed: step for _, pairs in items.values() for managed, step in pairs}
            self._steps.update(done)
            self._updater.gradients.discard(done.keys())
            self._updater.mark_updated(done)

    def _prepare_states(self, params: Iterable[ManagedParameter]) -> None:
        """Make what is missing before anything is updated, so that a lack of room changes nothing."""
        new = [managed for managed in params if managed not in self._steps]
        for managed in new:
            if not managed.placeholder.is_floating_point():
                raise ConfigError(
                    f"parameter {managed.name} is {managed.placeholder.dtype}; torch's fused Adam takes reals"
                )
        self._updater.place(self._managed())
        self._updater.make_states(new)
        for managed in new:
            self._steps[managed] = torch.zeros((), dtype=torch.float32, device="cpu")

    @contextmanager
    def _states_filled_in(self) -> Iterator[None]:
        """Have a copy of the state of every parameter in `self.state`, where torch.optim looks, as long as it takes."""
        own = self.state
        self.state = defaultdict(dict)
        try:
            for param in (p for g in self.param_groups for p in g["params"]):
                managed = self._manager._lookup(param)
                if managed is None and own.get(param):
                    self.state[param] = {key: value.to("cpu", copy=True) for key, value in own[param].items()}
                elif managed is not None:
                    state = self._manager._from_owner(managed, partial(self._read_state, managed))
                    if state is not None:
                        self.state[param] = state
            yield
        finally:
            self.state = own

    def _read_state(self, managed: ManagedParameter) -> dict[str, torch.Tensor] | None:
        if managed not in self._steps:
            return None
        chunks = {role.value: self._updater.state(role, managed) for role in STATE_ROLES}
        values = {key: self._updater.read(chunk, managed) for key, chunk in chunks.items()}
        return {"step": self._steps[managed].clone(), **values}

    def _take_managed(self, state_dict: dict[str, Any], taken: dict[ManagedParameter, Any]) -> dict[str, Any]:
        """Move the states of managed parameters to `taken`, once it is certain that they can be loaded."""
        check_state(state_dict, self.param_groups, name_of=self._name_of)
        states = dict(state_dict["state"])
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for index, param in zip(saved["params"], own["params"], strict=True):
                managed = self._manager._lookup(param)
                state = states.pop(index, {}) if managed is not None else {}
                if managed is not None and self._manager._owns(managed):
                    taken[managed] = state
        self._prepare_states([managed for managed, state in taken.items() if state])
        return {**state_dict, "state": states}

    def _adopt(self, taken: Mapping[ManagedParameter, Mapping[str, Any]]) -> None:
        for managed, state in taken.items():
            self._steps.pop(managed, None)
            if state:
                for role in STATE_ROLES:
                    self._updater.write(self._updater.state(role, managed), managed, state[role.value])
                self._steps[managed] = (
                    torch.as_tensor(state["step"], dtype=torch.float32, device="cpu").reshape(()).clone()
                )
        for group in self.param_groups:
            # What was saved decides, except in AdamW: so does torch.
            group["decoupled_weight_decay"] = self._decoupled or group.get("decoupled_weight_decay", False)


class AdamW(Adam):
    """`torch.optim.AdamW` (decoupled weight decay) over managed and excluded parameters; see `Adam`."""

    _decoupled = True
