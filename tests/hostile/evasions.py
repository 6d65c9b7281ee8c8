"""Ways to a parameter's values that pass by Python's overloads of operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH, Net


class Scalars(nn.Module):
    """Blocks with scalars, and an index that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i)) for i in range(4))
        self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, self.order] * self.gains[0] * self.gains[1] + self.gains[2] - self.gains[3]


@script(model=Scalars)
def scalars_into_one_tensor(user: User) -> None:
    for seed in range(2):
        user.step(seed)
        user.record(torch.tensor(list(user.model.gains)), torch.tensor([[g, 2 * g] for g in user.model.gains]))
        user.record(torch.as_tensor(user.model.gains[0]), torch.stack(list(user.model.gains)))


@script(model=Scalars)
def scalars_as_numbers(user: User) -> None:
    user.train(0, 1)
    g = user.model.gains
    user.record(float(g[0]), int(g[1]), bool(g[2]), math.exp(g[3]), f"{g[0].item():.3f}", round(float(g[2]), 3))
    user.record(float(np.float32(g[0].detach())), [v.item() for v in g], max(g[0], g[1]) is g[1], sorted(map(float, g)))
    user.record(float(np.array([float(v) for v in g]).sum()), sum(g).detach())


@script(model=Scalars)
def scalars_as_arguments(user: User) -> None:
    user.train(0)
    g = [gain for gain in user.model.gains]  # noqa: C416
    x = user.batch(1)
    with torch.no_grad():
        user.record(torch.full((2,), float(g[0])), x.clamp(max=g[1]), torch.pow(x.abs(), g[2]), x.addcmul(x, g[3]))
        user.record(torch.empty(3).fill_(g[0]), torch.linspace(0, float(g[1]), 3), x * g[2], x.lerp(x * 2, g[3]))
        user.record(F.prelu(x, g[0].view(1)), x.ge(g[1]), torch.where(x > g[2], x, g[3]))


@script(model=Scalars)
def indices_that_are_a_parameter(user: User) -> None:
    user.train(0)
    order, x = user.model.order, user.batch(1)
    user.record(
        x[order], x[order, 0], x[:, order], x[:2][:, order], x.index_select(0, order), x[order[0]], x[int(order[1])]
    )
    user.record([int(i) for i in order], order.tolist(), torch.zeros(int(order[2])), list(range(order[3])))


@script()
def assigned_into_other_tensors(user: User) -> None:
    user.train(0)
    table = torch.zeros(3, 4, WIDTH)
    with torch.no_grad():
        table[0] = user.model.head.weight
        table[1, :, :] = user.model.head.weight
        table[2][:, 0] = user.model.head.bias
        table[torch.tensor([2]), :, 1] = user.model.head.bias
    user.record(table)


@torch.jit.script
def scripted(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t())  # one operator: what is fused changes from call to call


@script()
def scripted_function_given_a_parameter(user: User) -> None:
    """TorchScript passes by torch's own functions: what it is given has to be there."""
    user.train(0)
    for seed in range(2):
        with torch.no_grad(), user.gathered(user.model.blocks[1].up):
            user.record(scripted(user.batch(seed), user.model.blocks[1].up.weight))
        user.record(scripted(user.batch(seed), user.model.head.weight.detach()))
        user.train(seed)


class UsesScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + scripted(x, self.net.stem.weight).mean()


@script(model=UsesScripted)
def scripted_function_inside_of_a_module(user: User) -> None:
    user.train(0, 1, 2)


@script()
def compiled_function_given_a_parameter(user: User) -> None:
    def penalty(w: Tensor) -> Tensor:
        return (w * w).sum() + w.abs().mean()

    compiled = torch.compile(penalty, backend="eager")
    for seed in range(2):
        loss = user.loss(seed) + 1e-2 * compiled(user.model.stem.weight)
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def models_stacked_for_an_ensemble(user: User) -> None:
    user.train(0)
    params, _ = stack_module_state([user.model.blocks[0], user.model.blocks[1]])
    user.record({name: value.detach().clone() for name, value in params.items()})
    user.train(1)


@script()
def checkpoint_given_a_parameter(user: User) -> None:
    for seed in range(2):
        x = user.model.stem(user.batch(seed))
        for reentrant in (False, True):
            w = user.model.blocks[0].down.weight
            x = checkpoint(lambda t, w: torch.tanh(t @ w[:, :WIDTH]), x, w, use_reentrant=reentrant)
        loss = user.model.head(x).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def flops_counted(user: User) -> None:
    _ = user.opt
    for seed in range(2):
        with FlopCounterMode(display=False) as counter:
            loss = user.loss(seed)
            user.backward(loss)
        user.update()
        user.record(loss.item(), counter.get_total_flops())


@script()
def profiled(user: User) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        user.train(0, 1)


@script()
def default_device_set(user: User) -> None:
    """A mode that sees every function."""
    user.train(0)
    with torch.device("cpu"):
        user.step(1)
        user.record(user.model.head.weight.norm(), torch.zeros_like(user.model.head.bias))
    user.train(2)


class Log(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@script()
def watched_by_a_mode_of_the_users(user: User) -> None:
    with Log() as log:
        user.train(0, 1)
        user.record(user.model.head.weight.norm())
    user.record("linear" in log.names)


@script()
def types_and_identities(user: User) -> None:
    user.train(0)
    p = user.model.stem.weight
    user.record(isinstance(p, nn.Parameter), isinstance(p, Tensor), torch.is_tensor(p), type(p).__name__)
    user.record(p in set(user.params), {p: 1}[user.model.stem.weight], user.params.index(p), hash(p) == id(p))
    user.record(
        p.is_leaf, p.requires_grad, p.grad_fn is None, str(p.device), str(p.dtype), p.stride(), p.is_contiguous()
    )


@script()
def exact_type(user: User) -> None:
    user.train(0)
    user.record([isinstance(p, nn.Parameter) for p in user.params])


@script()
def attributes_of_parameters(user: User) -> None:
    """As Megatron marks them: no decay, its own learning rate."""
    for name, p in user.model.named_parameters():
        p.no_decay = name.endswith("bias") or "norm" in name  # type: ignore[attr-defined]
    user.train(0)
    groups: dict[bool, list[nn.Parameter]] = {}
    for p in user.params:
        groups.setdefault(p.no_decay, []).append(p)  # type: ignore[attr-defined]
    user.record({str(key): len(group) for key, group in groups.items()})


@script()
def flattened_by_the_utilities_of_torch(user: User) -> None:
    user.train(0)
    weights = [p.data for p in user.model.head.parameters()]
    flat = torch._utils._flatten_dense_tensors(weights)
    user.record(flat)
    for w, new in zip(weights, torch._utils._unflatten_dense_tensors(flat * 0.5, weights), strict=True):
        w.copy_(new)
    user.train(1)


@script()
def numpy_functions_on_parameters(user: User) -> None:
    user.train(0)
    w = user.model.head.weight.detach()
    user.record(float(np.mean(np.asarray(w))), float(np.linalg.norm(w)), torch.from_numpy(np.array(w)))
    user.record(torch.from_numpy(np.concatenate([p.detach().numpy().ravel() for p in user.params])))
