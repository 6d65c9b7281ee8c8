"""What is taken from a parameter once and used later: it follows the parameter, as in plain PyTorch."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.hostile.harness import EQUAL_IF_ROOM, User, script
from tests.hostile.models import LanguageModel


@script(expect=EQUAL_IF_ROOM)
def data_kept_over_steps(user: User) -> None:
    w = user.model.blocks[0].up.weight.data
    for seed in range(3):
        user.step(seed)
        user.record(w)


@script(expect=EQUAL_IF_ROOM)
def detached_kept_over_steps(user: User) -> None:
    kept = [p.detach() for p in user.model.head.parameters()]
    for seed in range(3):
        user.step(seed)
        user.record(kept)


@script(expect=EQUAL_IF_ROOM)
def numpy_kept_over_steps(user: User) -> None:
    values = user.model.stem.weight.detach().numpy()
    for seed in range(3):
        user.step(seed)
        user.record(float(values.sum()), torch.from_numpy(values.copy()))


@script(expect=EQUAL_IF_ROOM)
def numpy_written_later(user: User) -> None:
    values = user.model.head.weight.detach().numpy()
    user.train(0, 1)
    values[:] = np.arange(values.size, dtype=np.float32).reshape(values.shape) / values.size
    user.record(user.model.head.weight)
    user.train(2)


@script(expect=EQUAL_IF_ROOM)
def view_kept_over_steps(user: User) -> None:
    first_rows = user.model.blocks[1].down.weight.detach()[:2]
    transposed = user.model.blocks[1].down.weight.data.t()
    for seed in range(3):
        user.step(seed)
        user.record(first_rows, transposed)


@script(expect=EQUAL_IF_ROOM)
def view_written_between_steps(user: User) -> None:
    row = user.model.head.weight.data[0]
    for seed in range(3):
        user.step(seed)
        row.zero_()
        user.record(user.model.head.weight)


@script()
def parameter_objects_kept(user: User) -> None:
    """The Parameter itself, not its memory: kept in a list, a dict and a closure."""
    head = user.model.head.weight
    by_name = dict(user.model.named_parameters())

    def sparsity() -> float:
        return float((head.abs() < 0.05).float().mean())

    for seed in range(3):
        user.step(seed)
        user.record(sparsity(), head.norm(), by_name["blocks.0.norm.weight"])


@script()
def parameter_used_functionally_outside(user: User) -> None:
    head = user.model.head.weight
    for seed in range(3):
        loss = user.loss(seed) + F.linear(user.batch(seed + 9), head).abs().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script(expect=EQUAL_IF_ROOM)
def aliases_of_every_parameter(user: User) -> None:
    kept = [p.data for p in user.model.parameters()]
    for seed in range(2):
        user.step(seed)
        user.record([w.sum() for w in kept])


@script(expect=EQUAL_IF_ROOM)
def state_dict_taken_from_the_module(user: User) -> None:
    """In plain PyTorch its tensors follow; under chunkmem they are documented as copies: read it when it is needed."""
    for seed in range(2):
        user.step(seed)
        user.record({k: v.clone() for k, v in user.model.state_dict().items()})


@script(expect=EQUAL_IF_ROOM)
def alias_dropped_makes_room_again(user: User) -> None:
    kept = [b.up.weight.data for b in user.model.blocks]
    user.step(0)
    user.record([w.norm() for w in kept])
    del kept
    gc.collect()
    user.train(1, 2)


@script()
def shadow_started_from_data(user: User) -> None:
    """`shadow = p.data` is an alias, `shadow = 0.99 * shadow + ...` makes it a tensor of its own."""
    shadow = [p.data for p in user.params]
    for seed in range(3):
        user.step(seed)
        shadow = [0.9 * s + 0.1 * p.data for s, p in zip(shadow, user.params, strict=True)]
    user.record(shadow)


@script(expect=EQUAL_IF_ROOM)
def alias_in_an_attribute_of_the_module(user: User) -> None:
    user.model.cached = user.model.stem.weight.detach()
    for seed in range(3):
        user.step(seed)
        user.record((user.model.cached - user.model.stem.weight).abs().max())


@script(expect=EQUAL_IF_ROOM)
def alias_written_inside_of_forward(user: User) -> None:
    w = user.model.blocks[2].down.bias.data

    def halve(*_: object) -> None:
        w.mul_(0.5)

    user.model.blocks[0].register_forward_hook(halve)
    user.train(0, 1, 2)


@script(expect=EQUAL_IF_ROOM)
def output_that_is_a_parameter(user: User) -> None:
    """A function hands out weights as they are, and the caller keeps what it got."""

    def largest(model: nn.Module) -> torch.Tensor:
        return max(model.parameters(), key=lambda p: p.numel()).detach()

    kept = largest(user.model)
    user.train(0, 1)
    user.record(kept)


@script(expect=EQUAL_IF_ROOM)
def untyped_storage_kept(user: User) -> None:
    w = user.model.head.bias
    storage = w.untyped_storage()
    again = torch.empty(0).set_(storage, w.storage_offset(), w.shape)
    user.train(0, 1)
    user.record(again)


@script(expect=EQUAL_IF_ROOM)
def dlpack_kept_over_steps(user: User) -> None:
    values = np.from_dlpack(user.model.head.weight.detach())
    user.train(0, 1)
    user.record(float(values.sum()))


@script(expect=EQUAL_IF_ROOM)
def alias_in_another_dtype_view(user: User) -> None:
    bits = user.model.head.weight.detach().view(torch.int32)
    user.train(0, 1)
    user.record(bits)


@script()
def weak_references_to_parameters(user: User) -> None:
    refs = [weakref.ref(p) for p in user.model.parameters()]
    user.train(0)
    user.record([ref() is p for ref, p in zip(refs, user.model.parameters(), strict=True)])
    user.record([ref().sum() for ref in refs])


@script()
def graph_kept_over_a_step(user: User) -> None:
    """An output of an earlier step is kept for its value only."""
    kept = user.model(user.batch(5))
    user.train(0, 1)
    user.record(kept.detach(), kept.grad_fn is not None)


@script(expect=EQUAL_IF_ROOM, model=LanguageModel)
def embedding_rows_looked_up_once(user: User) -> None:
    rows = user.model.embed.weight.data[3:5]
    for seed in range(2):
        user.backward(user.model(user.tokens(seed)).square().mean())
        user.update()
        user.record(rows, user.model.head.weight[3:5])


@script(expect=EQUAL_IF_ROOM)
def swa_by_aliases(user: User) -> None:
    """Aliases taken once, averaged into a running mean: the habit of hand-written SWA."""
    sources = [p.detach() for p in user.params]
    mean = [torch.zeros_like(s) for s in sources]
    for seed in range(3):
        user.step(seed)
        for m, s in zip(mean, sources, strict=True):
            m.add_((s - m) / (seed + 1))
    user.record(mean)


@script(expect=EQUAL_IF_ROOM)
def data_assigned(user: User) -> None:
    user.model.head.weight.data = torch.full((4, 16), 0.01)
    user.train(0, 1)
    user.record(user.model.head.weight)


@script(expect=EQUAL_IF_ROOM)
def two_parameters_exchange_their_data(user: User) -> None:
    a, b = user.model.blocks[0].up.weight, user.model.blocks[1].up.weight
    user.train(0)
    a.data, b.data = b.data.clone(), a.data.clone()
    user.train(1)
