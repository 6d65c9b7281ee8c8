"""Adam and AdamW as torch optimizers whose states live in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import CheckpointError, ConfigError, StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.ops import AdamTensors, FusedAdam, fused_adam_, global_norm
from chunkmem.optim.update import STATE_ROLES
from chunkmem.runtime.device import runtime_mode

if TYPE_CHECKING:
    from chunkmem.manager import ChunkManager

_STATE_KEYS = tuple(role.value for role in STATE_ROLES)
_REFUSED = ("amsgrad", "maximize")


class Adam(torch.optim.Optimizer):
    """`torch.optim.Adam` (L2 weight decay) over managed and excluded parameters, with torch's fused kernel.

    Parameter groups, LR schedulers and `state_dict()` are torch's. Gradients are consumed by `step()`.

    Args:
        params: parameters or parameter groups, as in torch.optim.
        manager: the manager that holds the parameters.
        lr, betas, eps, weight_decay: given ones win over `optimizer.params` of the configuration.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.

    Raises:
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    _kernel: FusedAdam = staticmethod(torch._fused_adam_)
    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        *,
        manager: ChunkManager,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        configured = manager.config.optimizer.params_for("AdamW" if self._decoupled else "Adam")
        clip = manager.config.gradient_clipping if max_grad_norm is None else max_grad_norm
        self.max_grad_norm = clip if clip > 0 else None
        self._manager = manager
        self._updater = manager._updater
        self._steps: dict[ManagedParameter, torch.Tensor] = {}
        """0-dim float32 counts of updates, for the parameters that have states."""
        defaults = {
            "lr": configured.lr if lr is None else lr,
            "betas": tuple(configured.betas) if betas is None else tuple(betas),
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; its parameters have to be managed or excluded."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            managed = [m for p in group["params"] if (m := self._manager._lookup(p)) is not None]
            self._updater.require_room([*self._managed(), *managed])
        except Exception:
            self.param_groups.pop()
            raise
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
        self._manager._begin_step()
        self._updater.check_owner(self._managed(), self)
        pending = [m for m in self._managed() if m in self._updater.gradients.landed.get(m.group, ())]
        ordinary = [p for p in self._excluded() if p.grad is not None]
        if not pending and not ordinary:
            raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")
        if self.max_grad_norm is not None:
            self._clip(self.max_grad_norm)
        self._update_managed(pending)
        self._update_excluded()
        self._manager._end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed."""
        self._updater.gradients.discard(set(self._managed()))
        for param in self._excluded():
            param.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim."""
        self._manager._begin_step()
        return self._clip(max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what `torch.optim.AdamW(..., fused=True)` over the same parameters would: CPU copies, never views."""
        with self._materialised():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of its torch counterpart over the same parameters.

        Raises:
            CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of;
                nothing has been changed.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        for managed in self._managed():
            state = self.state.pop(managed.param, None)
            self._steps.pop(managed, None)
            if state:
                self._adopt(managed, state)

    def _managed(self) -> list[ManagedParameter]:
        return [m for g in self.param_groups for p in g["params"] if (m := self._manager._lookup(p)) is not None]

    def _excluded(self) -> list[torch.Tensor]:
        return [p for g in self.param_groups for p in g["params"] if self._manager._lookup(p) is None]

    def _clip(self, max_norm: float) -> torch.Tensor:
        landed = self._updater.gradients.landed
        grads: list[torch.Tensor] = []
        groups = set()
        for group in self.param_groups:
            for param in group["params"]:
                managed = self._manager._lookup(param)
                if managed is None and param.grad is not None:
                    grads.append(param.grad)
                elif managed is not None and managed in landed.get(managed.group, ()):
                    grads.append(self._updater.gradient(managed))
                    groups.add(managed.group)
        if not grads:
            raise StateError("no gradient to clip: call manager.backward(loss) or loss.backward() before it")
        with runtime_mode():
            norm = global_norm(grads)
            coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
            for grad in grads:
                grad.mul_(coefficient.to(grad.device))
        self._updater.gradients_written(groups)
        return norm

    def _update_managed(self, pending: list[ManagedParameter]) -> None:
        self._prepare_states(pending)
        waiting = set(pending)
        by_group: dict[int, dict[int, tuple[dict[str, Any], list[tuple[ManagedParameter, torch.Tensor]]]]] = {}
        for index, options in enumerate(self.param_groups):
            for param in options["params"]:
                managed = self._manager._lookup(param)
                if managed is not None and managed in waiting:
                    item = by_group.setdefault(managed.group, {}).setdefault(index, (options, []))
                    item[1].append((managed, self._steps[managed] + 1))
        for group, items in sorted(by_group.items()):
            self._updater.update(group, items, kernel=type(self)._kernel)
            done = {managed: step for _, pairs in items.values() for managed, step in pairs}
            self._steps.update(done)
            self._updater.gradients.discard(done.keys())
            self._updater.mark_updated(done)

    def _prepare_states(self, params: Iterable[ManagedParameter]) -> None:
        """Make what is missing before anything is updated, so that a lack of room changes nothing."""
        new = [managed for managed in params if managed not in self._steps]
        for managed in new:
            if managed.param.is_complex():
                raise ConfigError(f"parameter {managed.name} is {managed.param.dtype}; torch's fused Adam takes reals")
        self._updater.place(self._managed())
        self._updater.make_states(new)
        for managed in new:
            self._steps[managed] = torch.zeros((), dtype=torch.float32)

    def _update_excluded(self) -> None:
        for options in self.param_groups:
            params = [p for p in options["params"] if self._manager._lookup(p) is None and p.grad is not None]
            for param in params:
                if not self.state[param]:
                    step = torch.zeros((), dtype=torch.float32, device=param.device)
                    zeros = {key: torch.zeros_like(param, memory_format=torch.preserve_format) for key in _STATE_KEYS}
                    self.state[param] = {"step": step, **zeros}
            states = [self.state[p] for p in params]
            for state in states:
                state["step"] += 1
            columns = [[state[key] for state in states] for key in (*_STATE_KEYS, "step")]
            if params:
                fused_adam_(type(self)._kernel, AdamTensors(params, [p.grad for p in params], *columns), options)

    def _materialised(self) -> _Materialised:
        return _Materialised(self)

    def _adopt(self, managed: ManagedParameter, state: dict[str, Any]) -> None:
        """Move a loaded state into its chunks."""
        self._prepare_states([managed])
        for role in STATE_ROLES:
            self._updater.write(self._updater.state(role, managed), managed, state[role.value])
        self._steps[managed] = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu").clone()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if groups is None or "state" not in state_dict:
            raise CheckpointError("not an optimizer state: it needs the keys 'state' and 'param_groups'")
        ours = [len(g["params"]) for g in self.param_groups]
        theirs = [len(g["params"]) for g in groups]
        if ours != theirs:
            raise CheckpointError(f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}")
        for option in _REFUSED:
            if any(g.get(option) for g in groups):
                raise CheckpointError(f"the state was made with {option}=True, which chunkmem's Adam does not have")
        pairs = zip(
            (index for g in groups for index in g["params"]),
            (p for g in self.param_groups for p in g["params"]),
            strict=True,
        )
        wrong = []
        for index, param in pairs:
            state = state_dict["state"].get(index, {})
            managed = self._manager._lookup(param)
            name = managed.name if managed is not None else f"parameter {index}"
            for key in _STATE_KEYS if state else ():
                if key not in state or tuple(state[key].shape) != tuple(param.shape):
                    found = tuple(state[key].shape) if key in state else "nothing"
                    wrong.append(f"{name} {key}: {found} instead of {tuple(param.shape)}")
        if wrong:
            raise CheckpointError(f"the state does not fit the parameters ({'; '.join(wrong)}); nothing was loaded")


class AdamW(Adam):
    """`torch.optim.AdamW` (decoupled weight decay); see `Adam`."""

    _kernel: FusedAdam = staticmethod(torch._fused_adamw_)
    _decoupled = True


class _Materialised:
    """For the time of a `with` block, `optimizer.state` holds CPU copies of the managed parameters' states too."""

    def __init__(self, optimizer: Adam) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        optimizer = self._optimizer
        for managed, step in optimizer._steps.items():
            states = {
                role.value: optimizer._updater.read(optimizer._updater.state(role, managed), managed)
                for role in STATE_ROLES
            }
            optimizer.state[managed.param] = {"step": step.clone(), **states}

    def __exit__(self, *_: object) -> None:
        for managed in self._optimizer._steps:
            self._optimizer.state.pop(managed.param, None)


def _check_options(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for name, value, allowed in (
        ("lr", group["lr"], group["lr"] >= 0),
        ("eps", group["eps"], group["eps"] >= 0),
        ("betas[0]", beta1, 0 <= beta1 < 1),
        ("betas[1]", beta2, 0 <= beta2 < 1),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not allowed:
            raise ConfigError(f"{name} = {value} is out of range (>= 0; betas in [0, 1))")
    for option in _REFUSED:
        if group[option]:
            raise ConfigError(f"{option}=True is not available; use torch.optim over an unmanaged model for it")
