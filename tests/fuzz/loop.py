"""Run a case in plain PyTorch and in chunkmem, and compare what its loop has seen and left."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import chunkmem
from tests.fuzz.cases import Case, Setting
from tests.fuzz.networks import WIDTH, Leaf, Network, Shared, StopError
from tests.helpers.any_class import by_name
from tests.helpers.audit import audit
from tests.helpers.hearing import Hearing
from tests.helpers.twins import copied
from tests.hostile.harness import AMPLE_NBYTES, manager_for

SEED = 11
STEPS = ("step", "accumulate", "clip", "zero_grad", "weight_term")
"""After these, nothing may be pinned or unaccounted for."""
BASE = {"lr": 1e-2, "weight_decay": 0.1}


class Rooms:
    """How much each setting may take; what is needed is learned where there is room for all."""

    def __init__(self, case: Case, folder: Path, *, ample: bool) -> None:
        self.case, self.folder, self.ample = case, folder, ample
        self.device = [0, 0]
        self.total = [0, 0]
        self.more = 1.0
        """How much more there is on HOST than its share."""
        self.in_turn = True
        """Steps are heard of in the ways of the setting, if it has some. Module by module shows the smallest cap."""
        self.taken: list[list[str]] = []
        """By manager: the ways in which steps were heard of."""

    def __repr__(self) -> str:
        return "chunkmem with ample room" if self.ample else "chunkmem"

    def opened(self, index: int) -> chunkmem.ChunkManager:
        """A manager of a setting."""
        setting = self.case.settings[index]
        keys = self._keys(setting)
        device_nbytes = AMPLE_NBYTES
        if not self.ample:
            if setting.room is not None and self.device[index]:
                device_nbytes = int(setting.room * self.device[index])
            if setting.host_share is not None and self.total[index]:
                disk = {"path": str(self.folder), "capacity": AMPLE_NBYTES}
                keys["memory"] = {"host": int(self.more * setting.host_share * self.total[index]), "disk": disk}
        manager = manager_for(device_nbytes, seed=None if self.ample else setting.late, keys=tuple(keys.items()))
        if setting.ways and self.in_turn:
            self.taken.append(Hearing(manager, setting.ways).taken)
        return manager

    def _keys(self, setting: Setting) -> dict[str, Any]:
        options = {"overlap_optimizer": setting.overlap, "with_async_move": setting.asynchronous}
        return {
            "default_chunk_size": setting.chunk_numel,
            "precision": self.case.precision,
            "activations": {"policy": setting.policy},
            "client": {"opts": options, "mem_tracer": {"margin_use_ratio": setting.margin}},
            "optimizer": {"params": {"states": "8bit" if self.case.optimizer == "8-bit" else "fp32"}},
        }

    def learn(self, index: int, manager: chunkmem.ChunkManager) -> None:
        """Remember what a manager has needed."""
        seen = manager.memory()
        self.device[index] = max(self.device[index], seen.device.required_nbytes)
        self.total[index] = max(self.total[index], seen.device.peak_nbytes + seen.host.peak_nbytes)


class Loop:
    """One run of a case: in plain PyTorch (no rooms), or in chunkmem."""

    def __init__(self, case: Case, rooms: Rooms | None) -> None:
        self.case, self.rooms = case, rooms
        self.manager: chunkmem.ChunkManager | None = None
        self.setting = 0
        self.batch = 0
        self.model: Any = None
        self.optimizer: Any = None
        self.late = [""]
        self.seen: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        """Make the manager, the model and the optimizer, which has the late layers only if it has had them before."""
        torch.manual_seed(SEED)
        if self.rooms is not None:
            self.manager = self.rooms.opened(self.setting)
        shared = Shared(self.manager)
        with nullcontext() if self.manager is None else self.manager.init():
            self.model = Network(self.case.layers, shared)
        self.shared = shared
        self.optimizer = self._optimizer([{"params": group} for group in self._groups()])

    def _groups(self) -> list[list[nn.Parameter]]:
        late = {id(p) for m in self.model.modules() if isinstance(m, Leaf) and m.kind == "late" for p in m.parameters()}
        params = list(self.model.parameters())
        first = [p for p in params if id(p) not in late]
        if self.late and late:
            return [first]
        return [first, [p for p in params if id(p) in late]] if late else [first]

    def _optimizer(self, groups: list[dict[str, Any]]) -> Any:
        name, manager = self.case.optimizer, self.manager
        options: dict[str, Any] = dict(BASE)
        own = {"manager": manager, "in_backward": self.case.in_backward}
        if name in ("AdamW", "8-bit"):
            return (
                torch.optim.AdamW(groups, fused=True, **options)
                if manager is None
                else chunkmem.AdamW(groups, **options, **own)
            )
        if name == "SGD":
            options |= {"momentum": 0.9, "nesterov": True}
            return torch.optim.SGD(groups, **options) if manager is None else chunkmem.SGD(groups, **options, **own)
        kind = by_name(name).kind
        return kind(groups, **options) if manager is None else chunkmem.Optimizer(kind, groups, **options, **own)

    def run(self) -> Any:
        """All of the loop; what it has seen and left."""
        try:
            for index in range(self.case.warm):
                self._do(f"warm {index}", "step", 0)
            for index, op in enumerate(self.case.ops):
                self._do(f"{index} {op.kind}", op.kind, op.pick)
            self._do("last", "step", 0)
            return {"seen": self.seen, **copied(self.snapshot())}
        finally:
            self.close()

    def _do(self, name: str, kind: str, pick: int) -> None:
        torch.manual_seed(SEED + len(self.seen))
        try:
            self.seen[name] = copied(getattr(self, f"do_{kind}")(pick))
            if self.manager is not None and kind in STEPS:
                audit(self.manager)
        except Exception as error:
            error.add_note(f"in {name} of {'plain PyTorch' if self.rooms is None else self.rooms}")
            raise

    def close(self) -> None:
        """Close the manager, if any, and learn from it."""
        if self.manager is not None and self.rooms is not None:
            if self.rooms.ample:
                self.rooms.learn(self.setting, self.manager)
            self.manager.close()

    def snapshot(self) -> dict[str, Any]:
        """Weights, buffers, states, and options of the optimizer."""
        state = self.optimizer.state_dict()
        options = [{key: group[key] for key in ("lr", "weight_decay", "params")} for group in state["param_groups"]]
        weights = self.model.state_dict() if self.manager is None else self.manager.state_dict(self.model)
        # Torch's Adagrad makes them in its constructor, of frozen parameters too.
        states = {index: of for index, of in sorted(state["state"].items()) if of.get("step", 1) != 0}
        return {"weights": dict(weights), "states": states, "groups": options}

    # What an op is made of.

    def loss(self) -> Tensor:
        """The loss of the next batch."""
        self.batch += 1
        self.shared.turn = self.batch
        generator = torch.Generator().manual_seed(self.batch)
        x = torch.randn(3 + self.batch % 2, WIDTH, generator=generator)
        return self.model(x).float().square().mean()

    def backward(self, loss: Tensor) -> float:
        """Run backward in the way of the setting; the loss as a number."""
        if self.manager is None or self.case.settings[self.setting].bare:
            loss.backward()
        else:
            self.manager.backward(loss)
        return loss.item()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def params(self, pick: int) -> list[nn.Parameter]:
        """Some parameters."""
        params = list(self.model.parameters())
        return params[pick % len(params) :: 3]

    def module(self, pick: int) -> nn.Module:
        """Some layer."""
        return self.model.layers[pick % len(self.model.layers)]

    def trained(self) -> list[nn.Parameter]:
        """Parameters of the optimizer that have a gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    # What a loop does.

    def do_step(self, pick: int) -> Any:
        loss = self.backward(self.loss())
        self.update()
        return loss

    def do_accumulate(self, pick: int) -> Any:
        losses = [self.backward(self.loss()) for _ in range(2 + pick % 2)]
        self.update()
        return losses

    def do_clip(self, pick: int) -> Any:
        loss = self.backward(self.loss())
        if pick % 2 and self.manager is not None:
            norm = self.optimizer.clip_grad_norm_(0.1)
        else:
            norm = clip_grad_norm_(self.trained(), 0.1)
        self.update()
        return loss, norm

    def do_read_grads(self, pick: int) -> Any:
        loss = self.backward(self.loss())
        seen = [p.grad.norm() if pick % 2 else p.grad.clone() for p in self.params(pick) if p.grad is not None]
        self.update()
        return loss, seen

    def do_edit_grads(self, pick: int) -> Any:
        loss = self.backward(self.loss())
        tiles = {id(p) for m in self.model.modules() if isinstance(m, chunkmem.TiledLinear) for p in m.parameters()}
        for param in self.params(pick):
            if param.grad is None:
                continue
            if pick % 2:
                param.grad.mul_(0.5)
            elif id(param) not in tiles:  # a checkpoint has one count of updates of all tiles of a weight
                param.grad = None
        self.update()
        return loss

    def do_drop_batch(self, pick: int) -> Any:
        """Its gradients are given up."""
        loss = self.backward(self.loss())
        self.optimizer.zero_grad()
        return loss

    def do_drop_forward(self, pick: int) -> Any:
        """There is no backward."""
        return self.loss().item()

    def do_raise_in_forward(self, pick: int) -> Any:
        self.shared.fail = True
        with suppress(StopError):
            self.loss()
        self.shared.fail = False

    def do_evaluate(self, pick: int) -> Any:
        self.model.eval()
        with torch.inference_mode() if pick % 2 else torch.no_grad():
            loss = self.loss().item()
        self.model.train()
        return loss

    def do_zero_grad(self, pick: int) -> Any:
        """Where there is nothing to give up: before forward, and between forward and backward."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self.optimizer.zero_grad()
        if pick % 2:
            self.model.zero_grad()
        self.backward(loss)
        self.update()
        return loss.item()

    def do_freeze(self, pick: int) -> None:
        self.module(pick).requires_grad_(False)

    def do_give_back(self, pick: int) -> None:
        """States go too; those of what is not trained are given back as well."""
        module = self.module(pick)
        if self.manager is not None:
            self.manager.freeze(module)
            return
        for param in module.parameters():
            param.requires_grad_(False)
            self.optimizer.state.pop(param, None)

    def do_unfreeze(self, pick: int) -> None:
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for param in self.model.parameters():
            if id(param) in owned:
                param.requires_grad_(True)

    def do_learning_rate(self, pick: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.01 * pick

    def do_add_group(self, pick: int) -> None:
        """The late layers are trained from now on."""
        if not self.late:
            return
        self.late = []
        groups = self._groups()
        if len(groups) > 1:
            for param in groups[1]:
                param.requires_grad_(True)
            self.optimizer.add_param_group({"params": groups[1], "lr": 3e-3})

    def do_weight_term(self, pick: int) -> Any:
        loss = self.loss() + 1e-3 * sum(p.float().square().sum() for p in self.params(pick))
        self.backward(loss)
        self.update()
        return loss.item()

    def do_write(self, pick: int) -> None:
        with torch.no_grad():
            for param in self.params(pick):
                if pick % 2:
                    param.mul_(0.9)
                else:
                    param.data.clamp_(-0.2, 0.2)

    def do_gather(self, pick: int) -> Any:
        params = self.params(pick)[:1]  # so that it fits whatever the cap is
        with nullcontext() if self.manager is None else self.manager.gather(params), torch.no_grad():
            for param in params:
                param.mul_(0.9)
            return params[0].sum().item()

    # What is saved and loaded.

    def do_state_dict(self, pick: int) -> None:
        state = {key: value * 0.9 if value.is_floating_point() else value for key, value in self._weights().items()}
        self._load_weights(state)

    def _weights(self) -> dict[str, Tensor]:
        return copied(self.snapshot()["weights"])

    def _load_weights(self, state: dict[str, Tensor]) -> None:
        if self.manager is None:
            self.model.load_state_dict(state)
        else:
            self.manager.load_state_dict(state, self.model)

    def do_optimizer_state(self, pick: int) -> None:
        """Back into the optimizer itself, and the weights first as mixed precision asks for."""
        weights, state = self._weights(), copy.deepcopy(self.optimizer.state_dict())
        self._load_weights(weights)
        self.optimizer.load_state_dict(state)

    @contextmanager
    def _saved(self, pick: int) -> Iterator[Any]:
        """What is in force now; inside, what brings it back."""
        if self.manager is None or self.rooms is None:
            weights, state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

            def load() -> None:
                self.model.load_state_dict(weights)
                self.optimizer.load_state_dict(state)

            yield load
            return
        path = self.rooms.folder / "checkpoint"
        saving = self.manager.save(path, self.optimizer, extra={"batch": self.batch}, asynchronous=pick % 2 == 1)

        def load_files() -> None:
            saving.wait()
            assert self.manager is not None
            self.manager.load(path, self.optimizer)

        yield load_files

    def do_save_load(self, pick: int) -> Any:
        """A step in between is forgotten."""
        with self._saved(pick) as load:
            loss = self.do_step(0)
            load()
        return loss

    def do_restart(self, pick: int) -> None:
        """Go on in another manager with the other setting."""
        trained = [p.requires_grad for p in self.model.parameters()]
        with self._saved(pick) as load:
            self.close()
            self.setting = 1 - self.setting
            self.build()
            for param, was in zip(self.model.parameters(), trained, strict=True):
                param.requires_grad_(was)
            load()
