"""Models that are changed, shared, exported or rebuilt after they have been packed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.hostile.harness import Refused, User, script
from tests.hostile.models import WIDTH, ConvNet, LanguageModel, Net


@script()
def shallow_copy_of_a_module(user: User) -> None:
    """`copy.copy` shares the parameters: what it computes is what the original does."""
    user.train(0)
    other = copy.copy(user.model.head)
    user.record(other(user.batch(1)).detach())
    user.train(1)


@script()
def modules_in_another_container(user: User) -> None:
    """Packed modules put together again in a new one."""
    user.train(0)
    model = user.model
    again = nn.Sequential(model.stem, *model.blocks, model.head)
    for seed in range(2):
        loss = again(user.batch(seed)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item(), len(list(again.parameters())))


@script()
def a_part_of_a_model_used_alone(user: User) -> None:
    features = nn.Sequential(*list(user.model.children())[:1], user.model.blocks[0])
    opt = user.adamw(features.parameters())
    for seed in range(3):
        user.backward(features(user.batch(seed)).square().mean())
        opt.step()
        opt.zero_grad()
    user.record(features[0].weight.norm())


@script()
def order_of_blocks_changed(user: User) -> None:
    user.train(0)
    blocks = list(user.model.blocks)
    user.model.blocks = nn.ModuleList(blocks[::-1])
    user.step(1)
    user.model.blocks = nn.ModuleList(blocks)
    user.train(2)


@script()
def weights_tied_after_packing(user: User) -> None:
    def tie() -> None:
        user.model.blocks[0].up.weight = user.model.blocks[1].up.weight

    user.train(0)
    user.refused("StateError", "weight", tie)
    user.train(1)


@script(model=LanguageModel)
def weights_untied_after_packing(user: User) -> None:
    def untie() -> None:
        user.model.head.weight = nn.Parameter(user.model.embed.weight.detach().clone())

    user.refused("StateError", "weight", untie)
    user.record(user.model.head.weight is user.model.embed.weight)


@script()
def weight_norm_after_packing(user: User) -> None:
    user.train(0)
    user.refused("StateError", "weight", lambda: parametrizations.weight_norm(user.model.head))
    user.train(1)


@script()
def parametrization_after_packing(user: User) -> None:
    class Half(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 0.5

    user.train(0)
    user.refused(
        "StateError", "weight", lambda: parametrize.register_parametrization(user.model.head, "weight", Half())
    )
    user.train(1)


@script()
def pruned_by_torch_after_packing(user: User) -> None:
    user.train(0)
    user.refused("StateError", "weight", lambda: prune.l1_unstructured(user.model.head, "weight", 0.3))
    user.train(1)


@script(model=lambda: prune_head(Net()))
def pruned_by_torch_before_packing(user: User) -> None:
    """The pruned weight is a plain attribute that a hook computes in each forward."""
    user.train(0, 1, 2)
    user.record(user.model.head.weight_orig.norm(), user.model.head.weight_mask)


def prune_head(model: Net) -> nn.Module:
    prune.l1_unstructured(model.head, "weight", 0.3)
    return model


@script()
def a_parameter_registered_later(user: User) -> None:
    """A new parameter of a packed module is not managed; the optimizer says so."""
    user.train(0)
    gain = nn.Parameter(torch.ones(4))
    user.refused("StateError", "managed", lambda: user.adamw([*user.params, gain]))
    user.train(1)


@script()
def a_module_added_later_in_plain_pytorch(user: User) -> None:
    """A probe on top, which torch's own optimizer trains."""
    user.train(0)
    probe = nn.Linear(4, 2)
    opt = torch.optim.SGD(probe.parameters(), lr=0.1)
    for seed in range(2):
        with torch.no_grad():
            features = user.model(user.batch(seed))
        loss = probe(features).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        user.record(loss.item())
    user.train(1)


@script()
def buffer_of_a_detached_weight(user: User) -> None:
    """An anchor registered as a buffer: `detach().clone()`."""
    user.train(0)
    start = user.model.head.weight.detach().clone()
    for seed in range(2):
        loss = user.loss(seed) + (user.model.head.weight - start).square().sum()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def loaded_by_assignment(user: User) -> None:
    """`assign=True`, as after a build on meta, before there is an optimizer."""
    state = {k: v * 0.9 for k, v in user.model.state_dict().items()}
    user.model.load_state_dict(state, assign=True)
    user.train(0, 1)


@script()
def swapped_with_another_tensor(user: User) -> None:
    def swap() -> None:
        torch.utils.swap_tensors(user.model.head.weight, nn.Parameter(torch.zeros(4, WIDTH)))
        user.model(user.batch()).sum().backward()

    user.train(0)
    user.record(user.model.head.weight)
    user.refused("StateError", "weight", swap)


@script()
def emptied_and_initialised_again(user: User) -> None:
    def init(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    user.model.to_empty(device="cpu")
    user.model.apply(init)
    user.train(0, 1)


@script()
def memory_shared_with_other_processes(user: User) -> None:
    user.train(0)
    user.refused("StateError", "refused", lambda: user.model.share_memory())
    user.train(1)


@script(model=ConvNet)
def channels_last(user: User) -> None:
    def convert() -> None:
        user.model.to(memory_format=torch.channels_last)
        user.model(user.batch(0, 2, 3, 5, 5))

    user.refused("StateError", "format|device", convert)


@script()
def traced_symbolically(user: User) -> None:
    """`torch.fx` builds another module around the same parameters."""
    user.train(0)
    traced = torch.fx.symbolic_trace(user.model)
    for seed in range(2):
        loss = traced(user.batch(seed)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def exported_by_jit_trace(user: User) -> None:
    """A traced function keeps the parameters themselves."""
    user.train(0)
    user.refused("StateError", "jit.trace", lambda: torch.jit.trace(user.model, user.batch(1)))
    user.train(1)


@script()
def one_module_moved_out(user: User) -> None:
    user.train(0)
    user.refused("StateError", "manager|device|dtype", lambda: user.model.head.double())
    user.record(copy.deepcopy(user.model.head).weight)
    user.train(1)


def _two_heads() -> nn.Module:
    model = Net()
    model.second = nn.Linear(WIDTH, 4)
    model.second.weight = model.head.weight
    return model


@script(model=_two_heads)
def two_heads_of_one_weight(user: User) -> None:
    for seed in range(3):
        x = user.model.stem(user.batch(seed))
        loss = user.model.head(x).square().mean() + user.model.second(x).abs().mean()
        user.backward(loss)
        user.opt.step()
        user.opt.zero_grad()
        user.record(loss.item(), user.model.second.weight.norm())


class Odd(nn.Module):
    """Parameters out of the ordinary: empty, of one element, integers, and a stride that is not the usual one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(()))
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.one + (x @ self.turned) + self.steps + self.none.sum()


@script(model=Odd)
def odd_parameters(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        user.record(user.model.one.item(), user.model.steps.tolist(), list(user.model.none.shape))
        user.record(user.model.turned.norm())


@script(model=lambda: Net().double())
def a_model_in_double(user: User) -> None:
    for seed in range(2):
        loss = user.model(user.batch(seed).double()).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item(), user.model.head.weight.dtype)


@script(model=None, expect=Refused("LayoutError", "[Ll]azy|uninitialized"))
def lazy_modules(user: User) -> None:
    model: Any = user.build(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(4)))
    model(user.batch())


@script(model=None, expect=Refused("StateError", "meta device.*param_init_fn"))
def built_on_meta(user: User) -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Net()

    model = user.build(build).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    user.train(0)
