"""Values replaced and put back by reference, views made while a model is built, and writes through a `state_dict`."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hostile.harness import EQUAL_IF_ROOM, Refused, User, script
from tests.hostile.models import WIDTH, Net, stack


@script(expect=Refused("StateError", "was given other memory"))
def perturbed_and_restored_by_reference(user: User) -> None:
    """`backup = p.data` without a copy: in plain PyTorch assigning `.data` leaves it as it was, here it would not."""
    for seed in range(2):
        backup = {}
        for name, p in user.model.blocks[0].named_parameters():
            backup[name] = p.data
            p.data = p.data + 0.05
        user.backward(user.loss(seed))
        for name, p in user.model.blocks[0].named_parameters():
            p.data = backup[name]
        user.update()


@script(expect=Refused("StateError", "was given other memory"))
def swapped_with_an_average_by_reference(user: User) -> None:
    average = [p.detach().clone() * 0.5 for p in user.model.head.parameters()]
    user.train(0)
    for i, p in enumerate(user.model.head.parameters()):
        p.data, average[i] = average[i], p.data
    with torch.no_grad():
        user.record(user.loss(7).item())
    for i, p in enumerate(user.model.head.parameters()):
        p.data, average[i] = average[i], p.data
    user.train(1)
    user.record(average)


@script(expect=Refused("StateError", "was given other memory"))
def binarised_for_the_forward(user: User) -> None:
    """BinaryConnect: signs in forward and backward, the real values for the update."""
    for seed in range(2):
        kept = []
        for block in user.model.blocks:
            kept.append(block.up.weight.data)
            block.up.weight.data = block.up.weight.data.sign()
        user.backward(user.loss(seed))
        for block, w in zip(user.model.blocks, kept, strict=True):
            block.up.weight.data = w
        user.update()


@script(expect=Refused("StateError", "has been written to since"))
def assigned_tensor_written_later(user: User) -> None:
    """`p.data = t` shares t's memory in plain PyTorch: a later write to t is one to p."""
    t = torch.full((4,), 0.25)
    user.model.head.bias.data = t
    user.train(0)
    t.fill_(0.5)
    user.train(1)
    user.record(user.model.head.bias)


@script(model=None, expect=Refused("StateError", "was written to; it is a copy"))
def average_updated_through_its_state_dict(user: User) -> None:
    """As YOLO's ModelEMA: `v *= d; v += (1 - d) * w` on the values of `ema.state_dict()`."""
    model, ema = user.build(Net), user.build(Net)
    ema.requires_grad_(False)
    opt = user.adamw(model.parameters())
    for seed in range(3):
        user.backward(user.loss(seed, model))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            weights = model.state_dict()
            for k, v in ema.state_dict().items():
                v *= 0.9
                v += 0.1 * weights[k].detach()


@script(expect=Refused("StateError", "was written to; it is a copy"))
def written_through_the_state_dict(user: User) -> None:
    user.train(0)
    with torch.no_grad():
        user.model.state_dict()["head.bias"].zero_()
    user.record(user.model.head.bias)
    user.train(1)


@script()
def written_through_a_copy_of_the_state_dict(user: User) -> None:
    user.train(0)
    state = copy.deepcopy(user.model.state_dict())
    state["head.bias"].zero_()
    user.train(1)
    user.record(state["head.bias"])


class Views(nn.Module):
    """Views of a weight made when the module is built, and used in forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        if kind == "buffer":
            self.register_buffer("view", self.linear.weight.detach())
        elif kind == "attribute":
            self.view = self.linear.weight.data
        else:
            self.view = self.linear.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        view = self.view.t() if self.kind == "graph" else self.view
        return self.linear(x) + F.linear(x, view)


@script(model=lambda: stack(Views("buffer"), nn.Tanh()), expect=Refused("LayoutError", "share memory"))
def buffer_that_shares_a_weight(user: User) -> None:
    user.train(0, 1, 2)
    user.record(user.model[1].view)


@script(
    model=lambda: stack(Views("attribute"), nn.Tanh()), expect=Refused("LayoutError", "is in use by another tensor")
)
def attribute_that_shares_a_weight(user: User) -> None:
    user.train(0, 1, 2)
    user.record(user.model[1].view)


@script(model=lambda: stack(Views("graph"), nn.Tanh()), expect=Refused("LayoutError", "is in use by another tensor"))
def transposed_weight_as_an_attribute(user: User) -> None:
    """A view with a graph: gradients reach the weight through it in every step."""
    user.train(0, 1, 2)


@script(model=None, expect=Refused("LayoutError", "is in use by another tensor"))
def view_taken_before_wrapping(user: User) -> None:
    torch.manual_seed(1)
    model = Net()
    view = model.head.weight.data[0]
    user.wrap(model)
    user.train(0)
    user.record(view)
    view.zero_()
    user.record(user.model.head.weight)


class Cycle:
    """Has itself, and so lives until Python looks for such."""

    def __init__(self, tensor: Tensor) -> None:
        self.own, self.tensor = self, tensor


@script(model=None)
def garbage_that_shares_a_weight(user: User) -> None:
    """As a hook of `weight_norm` may leave behind: nobody can read it any more."""
    torch.manual_seed(1)
    model = Net()
    Cycle(model.head.weight.data)
    user.wrap(model)
    user.train(0, 1)


@script(expect=EQUAL_IF_ROOM)
def plain_module_over_the_same_memory(user: User) -> None:
    """`nn.Parameter(p.data)`: a second parameter in the memory of the first."""
    other = nn.Linear(WIDTH, 4)
    other.weight = nn.Parameter(user.model.head.weight.data)
    for seed in range(2):
        user.step(seed)
        user.record(other.weight, other(user.batch(seed)).detach())


@script()
def memory_taken_over_by_set(user: User) -> None:
    def take() -> None:
        with torch.no_grad():
            user.model.head.bias.set_(torch.zeros(4))
        user.train(1)

    user.train(0)
    user.refused("StateError", "head.bias", take)


@script(expect=EQUAL_IF_ROOM)
def rows_unbound_and_written(user: User) -> None:
    rows = user.model.head.weight.detach().unbind(0)
    halves = user.model.stem.weight.data.chunk(2)
    user.train(0)
    rows[1].fill_(0.5)
    halves[0].mul_(0.5)
    user.train(1)
    user.record([row.sum() for row in rows], halves[1])


@script(expect=EQUAL_IF_ROOM)
def parameter_shallow_copied(user: User) -> None:
    """`copy.copy` shares the memory."""
    user.train(0)
    other = copy.copy(user.model.head.bias)
    user.train(1)
    user.record(other)
