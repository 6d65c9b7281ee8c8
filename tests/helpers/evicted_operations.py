"""What people do with parameters, and what has to come of it while the parameter is away."""

from __future__ import annotations

import copy
import enum
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, parametrizations, vector_to_parameters

import chunkmem


class Outcome(enum.Enum):
    """What an operation on an evicted parameter comes to. In each case training goes on bit for bit."""

    SAME = "it does and gives what it would in plain PyTorch"
    REFUSED = "it raises a StateError, and changes nothing"


SAME, REFUSED = Outcome


@dataclass(frozen=True)
class Scene:
    """A trained model; under a manager, with all its parameters away."""

    model: Any
    optimizer: torch.optim.Optimizer
    manager: chunkmem.ChunkManager | None
    parameter: nn.Parameter
    """`second.weight`, 16 by 16."""
    single: nn.Parameter
    """`scale`, a single element."""


@dataclass(frozen=True)
class Op:
    """One operation."""

    name: str
    run: Callable[[Scene], Any]
    outcome: Outcome


def op(name: str, outcome: Outcome, run: Callable[[Scene], Any]) -> Op:
    return Op(name, run, outcome)


def reading(name: str, run: Callable[[Tensor], Any]) -> Op:
    """An operation on the parameter alone."""
    return op(name, SAME, lambda scene: run(scene.parameter))


def writing(name: str, run: Callable[[Tensor], Any], outcome: Outcome = SAME) -> Op:
    """A write to the parameter under `no_grad`."""

    def under_no_grad(scene: Scene) -> None:
        with torch.no_grad():
            run(scene.parameter)

    return op(name, outcome, under_no_grad)


def on_single(name: str, run: Callable[[Tensor], Any]) -> Op:
    """A write under `no_grad` to the parameter of one element."""

    def under_no_grad(scene: Scene) -> None:
        with torch.no_grad():
            run(scene.single)

    return op(f"single element: {name}", SAME, under_no_grad)


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def other(p: Tensor) -> Tensor:
    return torch.arange(256.0, device=p.device).view(16, 16)


def assign_data(p: Tensor, value: Tensor) -> None:
    p.data = value


def add_to_data(p: Tensor) -> None:
    """Python reads `.data`, adds in place, and assigns the same memory to `.data`."""
    p.data += 0.5


def write_numpy(p: Tensor) -> None:
    p.detach().numpy()[3, 4] = 1.0


def write_item(p: Tensor) -> None:
    p[3, 4] = 1.0


def write_view(p: Tensor) -> None:
    p.data.view(-1)[0] = 1.0


READS = (
    reading("sum", lambda p: p.sum()),
    reading("clone", lambda p: p.clone()),
    reading("mean and std", lambda p: (p.mean(), p.std())),
    reading("norm", lambda p: p.norm()),
    reading("linalg.norm", torch.linalg.norm),
    reading("max", lambda p: p.max()),
    reading("sort", lambda p: p.sort().values),
    reading("cumsum", lambda p: p.cumsum(0)),
    reading("histc", lambda p: p.histc()),
    reading("svd", torch.linalg.svd),
    reading("numpy", lambda p: torch.tensor(p.detach().numpy().copy())),
    reading("numpy tobytes", lambda p: b"\xc0\x7f" in p.detach().numpy().tobytes()),
    reading("dlpack", lambda p: torch.from_dlpack(p.detach()).clone()),
    reading("tolist", lambda p: p.tolist()),
    reading("item", lambda p: p[2, 3].item()),
    reading("float of an element", lambda p: float(p[0, 0])),
    reading("row", lambda p: p[1]),
    reading("slice", lambda p: p[2:5, ::2]),
    reading("index by tensor", lambda p: p[torch.tensor([0, 3], device=p.device)]),
    reading("index by mask", lambda p: p[other(p) > 100]),
    reading("view", lambda p: p.view(-1)),
    reading("reshape", lambda p: p.reshape(4, 64)),
    reading("transpose", lambda p: p.t().contiguous()),
    reading("matmul", lambda p: other(p) @ p),
    reading("linear", lambda p: F.linear(other(p), p)),
    reading("embedding", lambda p: F.embedding(torch.tensor([1, 2], device=p.device), p)),
    reading("einsum", lambda p: torch.einsum("ij,jk->ik", p, p)),
    reading("cat", lambda p: torch.cat([p, p])),
    reading("stack", lambda p: torch.stack([p, p])),
    reading("add out of place", lambda p: p + 1),
    reading("into another tensor", lambda p: torch.zeros(16, 16, device=p.device).copy_(p.detach())),
    reading("lerp of an average", lambda p: other(p).lerp_(p.detach(), 0.1)),
    reading("half", lambda p: p.half()),
    reading("double", lambda p: p.double()),
    reading("cpu", lambda p: p.cpu()),
    reading("to a copy", lambda p: p.to("cpu", copy=True)),
    reading("equal", lambda p: not torch.equal(p, other(p))),
    reading("allclose with itself", lambda p: not torch.allclose(p, p)),
    reading("isnan", lambda p: bool(p.isnan().all())),
    reading("repr", lambda p: "nan" in repr(p)),
    reading("format", lambda p: "nan" in f"{p[0, 0]:.3f}"),
    reading("print", print),
    reading("deepcopy", copy.deepcopy),
    reading("pickle", lambda p: pickle.loads(pickle.dumps(p))),
    reading("torch.save", saved),
    reading("storage", lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(p.dtype)),
    reading("to meta", lambda p: p.to("meta")),
    reading("shape and dtype", lambda p: (p.shape, p.dtype, p.numel(), p.element_size(), p.nbytes)),
    reading("grad", lambda p: p.grad),
    reading("zeros_like", torch.zeros_like),
    reading("hash and in", lambda p: p in {p}),
)
WRITES = (
    writing("copy_", lambda p: p.copy_(other(p))),
    writing("add_", lambda p: p.add_(1)),
    writing("mul_", lambda p: p.mul_(2)),
    writing("addcdiv_", lambda p: p.addcdiv_(other(p), other(p) + 1)),
    writing("clamp_", lambda p: p.clamp_(0, 1)),
    writing("foreach add", lambda p: torch._foreach_add_([p], 1.0)),
    writing("out=", lambda p: torch.mul(other(p), 2, out=p)),
    writing("normal_", lambda p: p.normal_()),
    writing("init.xavier_uniform_", nn.init.xavier_uniform_),
    writing("init.orthogonal_", nn.init.orthogonal_),
    writing("assign a row", lambda p: p.__setitem__(1, 2.0)),
    writing("data.copy_", lambda p: p.data.copy_(other(p))),
    writing("resize_", lambda p: p.resize_(4), REFUSED),
    writing("fill_", lambda p: p.fill_(1.0)),
    writing("zero_", lambda p: p.zero_()),
    writing("init.zeros_", nn.init.zeros_),
    writing("init.constant_", lambda p: nn.init.constant_(p, 0.5)),
    writing("masked_fill_", lambda p: p.masked_fill_(other(p) > 7, 0.0)),
    writing("assign an element", write_item),
    writing("detached fill_", lambda p: p.detach().fill_(1.0)),
    writing("data.fill_", lambda p: p.data.fill_(1.0)),
    writing("data.zero_", lambda p: p.data.zero_()),
    writing("data.view(-1)[0] =", write_view),
    writing("numpy element =", write_numpy),
    writing("dlpack fill_", lambda p: torch.from_dlpack(p.detach()).fill_(1.0)),
    writing("data = zeros", lambda p: assign_data(p, torch.zeros_like(p))),
    writing("data = half", lambda p: assign_data(p, p.data.half()), REFUSED),
    writing("data = its own view", lambda p: assign_data(p, p.data.view(4, 64)), REFUSED),
    writing("data = another shape", lambda p: assign_data(p, torch.zeros(3, device=p.device)), REFUSED),
    writing("data = itself", lambda p: assign_data(p, p.data)),
    writing("data +=", add_to_data),
    writing("share_memory_", lambda p: p.share_memory_(), REFUSED),
    on_single("fill_", lambda p: p.fill_(2.0)),
    on_single("copy_", lambda p: p.copy_(torch.tensor(3.0))),
    on_single("assign", lambda p: p.__setitem__((), 2.0)),
    on_single("data.fill_", lambda p: p.data.fill_(2.0)),
    on_single("add_", lambda p: p.add_(1.0)),
    on_single("clamp_", lambda p: p.clamp_(0, 1)),
)


def loaded(scene: Scene) -> Any:
    state = {key: value * 0.5 for key, value in scene.model.state_dict().items()}
    return str(scene.model.load_state_dict(state))


def set_weight(scene: Scene) -> None:
    scene.model.second.weight = nn.Parameter(torch.zeros(16, 16, device=scene.parameter.device))


def delete_weight(scene: Scene) -> None:
    del scene.model.second.weight


def backward_of_the_parameter(scene: Scene) -> Any:
    """The gradient of a sum does not depend on the values, so it is right although they read as NaN."""
    (scene.parameter * 2).sum().backward()


def manager_or_model_state(scene: Scene) -> Any:
    return scene.model.state_dict() if scene.manager is None else scene.manager.state_dict(scene.model)


def batch(scene: Scene) -> Tensor:
    return torch.ones(2, 16, device=scene.parameter.device)


def functional(scene: Scene) -> Any:
    return torch.func.functional_call(scene.model, dict(scene.model.named_parameters()), (batch(scene),)).detach()


def replaced(scene: Scene) -> Any:
    new = {name: torch.zeros_like(p) for name, p in scene.model.named_parameters()}
    return torch.func.functional_call(scene.model, new, (batch(scene),)).detach()


def vectorised(scene: Scene) -> None:
    with torch.no_grad():
        size = sum(p.numel() for p in scene.model.parameters())
        vector_to_parameters(torch.zeros(size, device=scene.parameter.device), scene.model.parameters())


MODEL = (
    op("model: state_dict", SAME, lambda s: s.model.state_dict()),
    op("model: saved state_dict", SAME, lambda s: saved(s.model.state_dict())),
    op("model: manager.state_dict", SAME, manager_or_model_state),
    op("model: load_state_dict", SAME, loaded),
    op("model: forward", SAME, lambda s: s.model(batch(s)).detach()),
    op("model: a read of the attribute", SAME, lambda s: s.model.second.weight.sum().detach()),
    op("model: functional_call", SAME, functional),
    op("model: functional_call with other tensors", SAME, replaced),
    op("model: deepcopy", REFUSED, lambda s: copy.deepcopy(s.model)),
    op("model: average of it", REFUSED, lambda s: torch.optim.swa_utils.AveragedModel(s.model)),
    op("model: pickle", REFUSED, lambda s: pickle.dumps(s.model)),
    op("model: torch.save", REFUSED, lambda s: saved(s.model)),
    op("model: half", REFUSED, lambda s: s.model.half()),
    op("model: bfloat16", REFUSED, lambda s: s.model.bfloat16()),
    op("model: to meta", REFUSED, lambda s: s.model.to("meta")),
    op("model: to_empty", REFUSED, lambda s: s.model.to_empty(device="meta")),
    op("model: share_memory", REFUSED, lambda s: s.model.share_memory()),
    op("model: float", SAME, lambda s: str(s.model.float())),
    op("model: train and eval", SAME, lambda s: str(s.model.eval().train())),
    op("model: zero_grad", SAME, lambda s: s.model.zero_grad()),
    op("model: number of parameters", SAME, lambda s: sum(p.numel() for p in s.model.parameters())),
    op("model: loop over named_parameters", SAME, lambda s: {n: p.sum() for n, p in s.model.named_parameters()}),
    op("model: parameters_to_vector", SAME, lambda s: parameters_to_vector(s.model.parameters())),
    op("model: vector_to_parameters", SAME, vectorised),
    op("model: clip_grad_norm_", SAME, lambda s: clip_grad_norm_(s.model.parameters(), 1.0).cpu()),
    op("model: replace the parameter", REFUSED, set_weight),
    op("model: delete the parameter", REFUSED, delete_weight),
    op("model: weight_norm", REFUSED, lambda s: parametrizations.weight_norm(s.model.second)),
    op("model: backward of the parameter", SAME, backward_of_the_parameter),
    op("model: requires_grad_", SAME, lambda s: str(s.model.requires_grad_(False).requires_grad_(True))),
    op("optimizer: state_dict", SAME, lambda s: s.optimizer.state_dict()["state"]),
)

OPERATIONS = (*READS, *WRITES, *MODEL)
