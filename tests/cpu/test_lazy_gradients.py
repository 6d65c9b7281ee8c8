"""`.grad` after backward: a tensor without memory that stands for a slot, and what users do to it.

Everything is compared with plain PyTorch, bit for bit, under an ample cap and under the smallest one.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.modules.lazy_gradient import LazyGradient
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.training import compute_device
from tests.helpers.twins import WIDTH, Blocks, Twin, assert_equal, config, copied, features, same

SMALL_NBYTES = 4 * 1024


def landed(num_backwards: int = 1) -> tuple[chunkmem.ChunkManager, Twin]:
    """A model whose gradients have landed, most of them on HOST."""
    manager = chunkmem.ChunkManager(config(SMALL_NBYTES))
    twin = Twin(manager, Blocks)
    for seed in range(num_backwards):
        twin.loss(features(seed)).backward()
    return manager, twin


def plain(num_backwards: int = 1) -> Twin:
    twin = Twin(None, Blocks)
    for seed in range(num_backwards):
        twin.loss(features(seed)).backward()
    return twin


# Clipping, and what else torch's own functions do to gradients.


def grads(twin: Twin) -> list[Any]:
    return [p.grad for p in twin.model.parameters() if p.grad is not None]


def weight(twin: Twin) -> Any:
    return twin.model.inner.weight.grad


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=compute_device())


def clip_norm(max_norm: float, **options: Any) -> Callable[[Twin], Tensor]:
    return lambda twin: torch.nn.utils.clip_grad_norm_(twin.model.parameters(), max_norm, **options)


CHANGES: dict[str, Callable[[Twin], Any]] = {
    "norm": clip_norm(0.05),
    "norm, not exceeded": clip_norm(1e3),
    "inf": clip_norm(0.01, norm_type=math.inf),
    "1": clip_norm(0.1, norm_type=1),
    "foreach": clip_norm(0.05, foreach=True),
    "one by one": clip_norm(0.05, foreach=False),
    "strict": clip_norm(0.05, error_if_nonfinite=True),
    "one parameter": lambda twin: torch.nn.utils.clip_grad_norm_(twin.model.head.weight, 0.01),
    "total norm": lambda twin: torch.nn.utils.get_total_norm(grads(twin)),
    "value": lambda twin: torch.nn.utils.clip_grad_value_(twin.model.parameters(), 0.003),
    "value foreach": lambda twin: torch.nn.utils.clip_grad_value_(twin.model.parameters(), 0.003, foreach=True),
    "divide": lambda twin: [grad.div_(3) for grad in grads(twin)],
    "by hand": lambda twin: [grad.data.mul_(1 / (grad.data.norm(2) + 1)) for grad in grads(twin)],
    "noise": lambda twin: [grad.add_(torch.ones_like(grad), alpha=1e-3) for grad in grads(twin)],
    "row": lambda twin: weight(twin).__setitem__(0, 0.25),
    "view": lambda twin: weight(twin).view(-1)[3:7].mul_(4),
    "transposed": lambda twin: [part.zero_() for part in weight(twin).t().chunk(4)[1:3]],
    "detached": lambda twin: weight(twin).detach().masked_fill_(torch.eye(WIDTH).to(compute_device()).bool(), 0.5),
    "copied into": lambda twin: twin.model.inner.bias.grad.copy_(weight(twin)[2]),
    "data": lambda twin: setattr(twin.model.inner.bias.grad, "data", ones(WIDTH)),
    "foreach mixed": lambda twin: torch._foreach_mul_([weight(twin), ones(3), *grads(twin)[:2]], 0.5),
    "out": lambda twin: torch.mul(ones(WIDTH), 2, out=twin.model.inner.bias.grad),
    "old zero_grad": lambda twin: [grad.detach_().zero_() for grad in grads(twin)[::2]],
    "unscale": lambda twin: torch._amp_foreach_non_finite_check_and_unscale_(grads(twin), ones() * 0, ones() * 0.5),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CHANGES)
def test_what_users_do_to_gradients_is_what_plain_torch_does(name: str) -> None:
    def scenario(twin: Twin) -> list[Any]:
        seen: list[Any] = []
        for seed in range(4):
            seen.append(twin.loss(features(seed)).item())
            twin.loss(features(seed)).backward()
            twin.loss(features(seed + 1)).backward()
            with torch.no_grad():
                seen.append(copied(CHANGES[name](twin)))
            twin.update()
        return seen

    same(Blocks, scenario)


def test_torch_clips_as_the_optimizer_does() -> None:
    norms = []
    for clip in (CHANGES["norm"], lambda twin: twin.optimizer.clip_grad_norm_(0.05)):
        manager, twin = landed()
        norms.append((clip(twin), clip(twin)))
        manager.close()
    assert_equal(*norms)


def test_values_of_gradients_are_those_of_plain_torch() -> None:
    looks: list[Callable[[Tensor], Any]] = [
        lambda g: g.clone(),
        lambda g: g + 1,
        lambda g: 2 * g,
        lambda g: g @ g.mT,
        lambda g: g.norm(),
        lambda g: g.float().pow(2).sum().sqrt(),
        lambda g: g.abs().max(),
        lambda g: torch.isfinite(g).all(),
        lambda g: (g.isnan() | g.isinf()).any().item(),
        lambda g: g.flatten()[5].item(),
        lambda g: g[0],
        lambda g: g.cpu().numpy().tolist(),
        lambda g: g.tolist(),
        lambda g: [row.sum() for row in g],
        lambda g: torch.cat([g.reshape(-1), g.view(-1)]),
        lambda g: torch.stack([g, g.clone()]),
        lambda g: g.to(torch.float64),
        lambda g: g.t().contiguous(),
        lambda g: copy.deepcopy(g),
        lambda g: pickle.loads(pickle.dumps(g)),
        lambda g: repr(g),
        lambda g: torch.equal(g, g.clone()),
        lambda g: torch.histc(g.cpu(), 5),
        lambda g: (g.shape, g.dtype, g.device.type, g.layout, g.is_sparse, g.numel(), g.stride(), g.is_leaf, len(g)),
        lambda g: (g.requires_grad, g.grad_fn, g.element_size(), g.is_contiguous(), g.dim(), g.ndim),
        lambda g: torch.zeros_like(g),
        lambda g: g.new_full((2,), 3.0),
        lambda g: g.mean(dim=0),
        lambda g: torch.where(g > 0, g, torch.zeros_like(g)),
        lambda g: torch.empty_like(g).copy_(g),
        lambda g: g.numpy(force=True).sum().item(),
    ]
    manager, twin = landed(2)
    other = plain(2)
    for name, param in twin.model.named_parameters():
        expected = other.model.get_parameter(name).grad
        assert isinstance(param.grad, LazyGradient)
        for look in looks if param.dim() == 2 else looks[:2]:
            assert_equal(look(param.grad), look(expected))
    manager.close()


def test_results_are_ordinary_and_have_no_memory_of_chunks() -> None:
    manager, twin = landed()
    param = twin.model.inner.weight
    before = param.grad.clone()
    for made in (param.grad + 0, param.grad.clone(), param.grad.to(torch.float64), torch.cat([param.grad])):
        assert type(made) is Tensor
        made.fill_(7)
    with pytest.raises(ValueError, match="read-only"):
        param.grad.cpu().numpy()[0] = 7
    assert torch.equal(param.grad, before)
    buffer = io.BytesIO()
    torch.save(param.grad, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), before)
    manager.close()


def test_gradients_stay_where_they_are_while_norms_are_taken_and_scaled() -> None:
    manager, twin = landed()
    chunks = [group.chunk for group in manager.runtime.gradients.slots.groups.values()]

    def places() -> tuple[list[list[Tier]], str]:
        memory = replace(manager.memory(), non_model_nbytes=0)  # that is what the process takes
        return [list(chunk.replicas) for chunk in chunks], str(memory)

    before = places()
    assert float(torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01)) > 0.01
    assert places() == before
    manager.close()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "address": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "shared memory": lambda g: g.share_memory_(),
    "dlpack": lambda g: torch.from_dlpack(g),
    "apply_": lambda g: g.apply_(lambda value: value),
    "resize": lambda g: g.resize_(3),
    "set": lambda g: g.set_(torch.ones(3)),
    "transposed in place": lambda g: g.t_(),
    "bits": lambda g: g.view(torch.int32),
    "subclass": lambda g: g.as_subclass(Tensor),
    "data of another shape": lambda g: setattr(g, "data", torch.ones(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_of_a_chunk_is_refused(name: str) -> None:
    manager, twin = landed()
    with pytest.raises(chunkmem.StateError, match=r"inner\.weight"):
        REFUSED[name](twin.model.inner.weight.grad)
    twin.update()
    manager.close()


def test_extensions_get_no_address() -> None:
    """What asks in C++ gets an error of torch's, and not 0."""
    manager, twin = landed()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(weight(twin))
    manager.close()


# What `.grad` is assigned counts.


def test_assignment_replaces_and_none_discards() -> None:
    def scenario(twin: Twin) -> list[Any]:
        seen = []
        for seed in range(4):
            twin.loss(features(seed)).backward()
            inner, head = twin.model.inner, twin.model.head
            inner.weight.grad = inner.weight.grad * 0.5
            inner.bias.grad = None
            head.weight.grad = torch.full_like(head.weight.grad, 0.25)
            twin.loss(features(seed + 9)).backward()
            seen.append([p.grad.clone() for p in (inner.weight, inner.bias, head.weight, head.bias)])
            inner.bias.grad += 0.5
            head.bias.grad = head.bias.grad + 0.5
            first, second = twin.model.blocks[0], twin.model.blocks[1]
            del first[0].weight.grad
            first[0].bias.grad, second[0].bias.grad = second[0].bias.grad, first[0].bias.grad
            second[2].weight.grad = second[2].weight.grad.view(-1).flip(0).view(WIDTH, WIDTH)
            twin.update()
        return seen

    same(Blocks, scenario)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("after_step", [True, False])
def test_zero_grad_of_the_model_and_of_the_optimizer(optimizer: bool, set_to_none: bool, after_step: bool) -> None:
    """A parameter without a gradient is left alone, one with a gradient of zeros is updated."""

    def zero(twin: Twin) -> None:
        (twin.optimizer if optimizer else twin.model).zero_grad(set_to_none=set_to_none)

    def scenario(twin: Twin) -> list[Any]:
        seen: list[Any] = []
        for seed in range(5):
            twin.loss(features(seed)).backward()
            if after_step:
                twin.optimizer.step()
            zero(twin)
            twin.model.blocks[0].requires_grad_(seed % 2 == 0)
            twin.loss(features(seed + 5)).backward()
            twin.model.blocks[0].requires_grad_(True)
            seen.append([None if p.grad is None else p.grad.clone() for p in twin.model.parameters()])
            twin.optimizer.step()
            zero(twin)
        return seen

    same(Blocks, scenario)


def test_a_micro_batch_dropped_by_the_model() -> None:
    def scenario(twin: Twin) -> list[float]:
        for seed in range(4):
            twin.loss(features(seed)).backward()
            twin.model.zero_grad()
            twin.model.blocks[1].requires_grad_(False)
            twin.loss(features(seed + 1)).backward()
            twin.model.blocks[1].requires_grad_(True)
            twin.update()
        return twin.steps(9)

    same(Blocks, scenario)


def test_gradients_kept_and_put_back() -> None:
    """As for a second loss whose gradients are only looked at."""

    def scenario(twin: Twin) -> list[Any]:
        seen = []
        for seed in range(3):
            twin.loss(features(seed)).backward()
            kept = [p.grad.clone() for p in twin.model.parameters()]
            twin.model.zero_grad()
            twin.loss(features(seed + 1)).backward()
            seen.append([p.grad.norm() for p in twin.model.parameters()])
            for param, grad in zip(twin.model.parameters(), kept, strict=True):
                param.grad = grad
            twin.update()
        return seen

    same(Blocks, scenario)


def test_a_buffer_of_the_users_own_stays_the_gradient() -> None:
    """Views of one flat tensor, as for an all-reduce of one's own: filled by backward, then changed as a whole."""

    def scenario(twin: Twin) -> list[Any]:
        params = list(twin.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in params), device=compute_device())
        for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad = part.view(param.shape)
        seen = []
        for seed in range(4):
            flat.zero_()
            twin.loss(features(seed)).backward()
            flat.mul_(0.5)
            seen += [flat.clone(), twin.clip(0.01), flat.clone()]
            twin.optimizer.step()
        twin.optimizer.zero_grad()
        return seen

    same(Blocks, scenario)


@pytest.mark.parametrize("hold", [True, False])
def test_gradients_from_autograd_grad_added_up_by_hand(hold: bool) -> None:
    """As schedules do that split backward in two: `.grad` is None, or what is there is added to."""

    def scenario(twin: Twin) -> list[Any]:
        params, held = list(twin.model.parameters()), []
        for seed in range(3):
            for micro in range(3):
                loss = twin.loss(features(seed + micro))
                if micro == 1:
                    loss.backward()
                    continue
                grads = list(torch.autograd.grad(loss, params))
                held += grads if hold else []
                for param in params:
                    grad = grads.pop(0)
                    param.grad = grad if param.grad is None else param.grad + grad
            held.append([p.grad.clone() for p in params])
            twin.update()
        return held[2::7]

    same(Blocks, scenario)


def test_autograd_grad_leaves_gradients_alone() -> None:
    def scenario(twin: Twin) -> list[Any]:
        params = list(twin.model.parameters())
        twin.loss(features(0)).backward()
        seen = [*torch.autograd.grad(twin.loss(features(1)), params), *(p.grad.clone() for p in params)]
        twin.loss(features(2)).backward(inputs=params[::2])
        seen += [p.grad.clone() for p in params]
        twin.update()
        return seen

    same(Blocks, scenario)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_backward_that_builds_a_graph_adds_to_what_landed() -> None:
    def scenario(twin: Twin) -> list[Any]:
        twin.loss(features(0)).backward()
        twin.loss(features(1)).backward(create_graph=True)
        seen = [p.grad.detach().clone() for p in twin.model.parameters()]
        twin.update()
        return seen

    same(Blocks, scenario)


def test_hooks_of_users_see_and_change_the_gradient() -> None:
    def scenario(twin: Twin) -> list[Any]:
        norms: list[Any] = []
        inner, head = twin.model.inner, twin.model.head
        inner.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        inner.bias.register_post_accumulate_grad_hook(lambda p: setattr(p.grad, "data", p.grad * 0.5))
        head.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clamp(-0.01, 0.01)))
        head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        for seed in range(4):
            twin.loss(features(seed)).backward()
            twin.loss(features(seed + 1)).backward()
            twin.update()
        return norms

    same(Blocks, scenario)


# After the step.


def test_a_loop_without_zero_grad_is_told_so() -> None:
    """It accumulates in plain PyTorch: what the step consumed is gone, and the sum cannot be known."""
    manager, twin = landed()
    twin.optimizer.step()
    twin.loss(features(1)).backward()
    for use in (twin.optimizer.step, lambda: twin.optimizer.clip_grad_norm_(1), lambda: CHANGES["norm"](twin)):
        with pytest.raises(chunkmem.StateError, match=r"inner\.weight was consumed.*optimizer\.zero_grad\(\)"):
            use()
    twin.optimizer.zero_grad()
    expected = Twin(None, Blocks)
    expected.steps(0)
    twin.steps(2)
    expected.steps(2)
    assert_equal(twin.left(), expected.left())
    manager.close()


def test_a_gradient_that_plain_torch_would_use_again_is_missed() -> None:
    """Without `zero_grad()` it is still there for the next step, whether or not another backward reaches it."""
    manager, twin = landed()
    twin.optimizer.step()
    twin.model.head.zero_grad()
    twin.model.requires_grad_(False)
    twin.model.head.requires_grad_(True)
    twin.loss(features(1)).backward()
    with pytest.raises(chunkmem.StateError, match=r"inner\.weight was consumed by step\(\)"):
        twin.optimizer.step()
    manager.close()


def test_two_optimizers_of_which_one_gets_gradients_it_does_not_want() -> None:
    """As where a generator is trained through its critic: the critic's are dropped by its next `zero_grad()`."""

    def scenario(twin: Twin) -> list[float]:
        twin.optimizer = twin.make("AdamW", twin.model.inner.parameters(), lr=1e-2)
        critic = twin.make("AdamW", [*twin.model.blocks.parameters(), *twin.model.head.parameters()], lr=1e-2)
        losses = []
        for seed in range(4):
            critic.zero_grad()
            twin.loss(features(seed)).backward()
            twin.loss(features(seed + 1)).backward()
            critic.step()
            twin.optimizer.zero_grad()
            loss = twin.loss(features(seed))
            loss.backward()
            twin.optimizer.step()
            losses.append(loss.item())
        return losses

    same(Blocks, scenario)


def test_values_are_gone_after_the_step() -> None:
    manager, twin = landed()
    param = twin.model.inner.weight
    grad = param.grad
    twin.optimizer.step()
    assert param.grad is grad
    assert (grad.shape, grad.dtype, torch.zeros_like(grad).sum()) == (param.shape, param.dtype, 0)
    assert "consumed by step()" in repr(grad)
    for use in (grad.norm, grad.clone, lambda: grad.mul_(2), lambda: grad + 1, grad.tolist):
        with pytest.raises(chunkmem.StateError, match=r"inner\.weight was consumed by step\(\)"):
            use()
    with pytest.raises(chunkmem.StateError, match="without a gradient"):
        twin.optimizer.step()
    twin.optimizer.zero_grad()
    assert param.grad is None
    twin.loss(features(1)).backward()
    with pytest.raises(chunkmem.StateError, match=r"gradient of inner\.weight is an earlier one.*clone\(\)"):
        grad.norm()
    param.grad = grad
    with pytest.raises(chunkmem.StateError, match="an earlier one"):
        twin.optimizer.step()
    manager.close()
    with pytest.raises(chunkmem.StateError, match="is closed"):
        twin.model.head.weight.grad.norm()


def test_a_discarded_gradient_cannot_be_put_back() -> None:
    manager, twin = landed()
    grad = twin.model.inner.weight.grad
    twin.optimizer.zero_grad()
    with pytest.raises(chunkmem.StateError, match="was discarded"):
        grad.clone()
    twin.model.inner.weight.grad = grad
    with pytest.raises(chunkmem.StateError, match="was discarded"):
        twin.optimizer.step()
    manager.close()


def test_a_consumed_gradient_can_be_overwritten() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        twin.loss(features(1)).backward()
        twin.optimizer.step()
        for param in twin.model.parameters():
            param.grad.copy_(torch.full_like(param.grad, 0.125))
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        return [*losses, *twin.steps(2)]

    same(Blocks, scenario)


# With everything else.


def test_gather_shows_real_gradients_and_restores_what_was_there() -> None:
    manager, twin = landed()
    param = twin.model.inner.weight
    grad, before = param.grad, param.grad.clone()
    with manager.gather(twin.model.inner, grads=True):
        assert type(param.grad) is Tensor
        param.grad.mul_(2)
        assert torch.equal(grad, 2 * before)
    assert param.grad is grad
    assert torch.equal(grad, 2 * before)
    audit(manager)
    manager.close()


def test_clipping_by_torch_is_no_plan_miss() -> None:
    with chunkmem.ChunkManager(config(6 * 1024)) as manager:
        twin, other = Twin(manager, Blocks), Twin(None, Blocks)
        for seed in range(6):
            for each in (twin, other):
                each.loss(features(seed)).backward()
                assert torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.02 if seed % 2 else 1e3) > 0
                each.update()
        assert manager.plan is not None
        assert_as_predicted(manager)
        assert_equal(twin.left(), other.left())


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_by_torch_with_updates_beside_backward(max_norm: float) -> None:
    """A group that was updated with gradients that are clipped afterwards is updated again."""
    keys = {"client": {"opts": {"overlap_optimizer": True}}}
    with chunkmem.ChunkManager(config(6 * 1024, **keys)) as manager:
        twin, other = Twin(manager, Blocks), Twin(None, Blocks)
        for seed in range(8):
            for each in (twin, other):
                each.loss(features(seed)).backward()
                torch.nn.utils.clip_grad_norm_(each.model.parameters(), max_norm)
                each.update()
        assert_equal(twin.left(), other.left())


def test_bf16_gradients() -> None:
    """They are seen in bf16, scaled as torch scales such tensors."""
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"precision": "bf16"})) as manager:
        with manager.init():
            model = nn.Linear(WIDTH, WIDTH)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(features()).sum())
        before = model.weight.grad.clone()
        assert before.dtype is torch.bfloat16
        model.weight.grad.mul_(0.3)
        assert torch.equal(model.weight.grad, before * 0.3)
        optimizer.step()


def test_parameters_without_elements_or_dimensions() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * self.scale + self.empty.sum()

    def scenario(twin: Twin) -> list[Any]:
        seen: list[Any] = []
        for seed in range(3):
            twin.loss(features(seed)).backward()
            seen += [twin.model.scale.grad.item(), f"{twin.model.scale.grad:.6f}", float(twin.model.scale.grad)]
            seen += [twin.model.empty.grad.shape, bool(twin.model.scale.grad)]
            seen.append(torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01))
            twin.update()
        return seen

    same(Odd, scenario)


def test_gradients_under_inference_mode() -> None:
    manager, twin = landed()
    grad, expected = weight(twin), weight(plain())
    with torch.inference_mode():
        assert_equal(grad.reshape(-1).norm(), expected.reshape(-1).norm())
        assert_equal(grad.to(torch.float64), expected.to(torch.float64))
    manager.close()
