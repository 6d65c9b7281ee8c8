"""Looking at parameters: logging, hashing, printing, counting, exporting."""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import torch
from torch import nn

from tests.hostile.harness import EQUAL_IF_ROOM, User, script
from tests.hostile.models import ConvNet, LanguageModel


@script()
def norms_logged_every_step(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        user.record({name: p.norm().item() for name, p in user.model.named_parameters()})


@script()
def histograms(user: User) -> None:
    for seed in range(2):
        user.step(seed)
        user.record([torch.histc(p.detach(), bins=10, min=-1, max=1) for p in user.params])


@script()
def numpy_statistics(user: User) -> None:
    user.train(0, 1)
    for p in user.params:
        values = p.detach().cpu().numpy()
        user.record([float(values.mean()), float(values.std()), float(np.percentile(values, 90))])


@script()
def update_to_weight_ratio(user: User) -> None:
    for seed in range(3):
        before = [p.detach().clone() for p in user.params]
        user.step(seed)
        user.record(
            [((p - b).norm() / b.norm().clamp(min=1e-6)).item() for p, b in zip(user.params, before, strict=True)]
        )


@script()
def counts_by_requires_grad(user: User) -> None:
    user.model.stem.requires_grad_(False)
    user.record(sum(p.numel() for p in user.params), sum(p.numel() for p in user.params if p.requires_grad))
    user.record([list(p.shape) for p in user.params], sum(p.numel() * p.element_size() for p in user.params))


@script()
def printed(user: User) -> None:
    user.train(0)
    user.record(repr(user.model.head.bias), str(user.model.blocks[0].norm.weight.data), repr(user.model))


@script()
def formatted_in_a_message(user: User) -> None:
    user.train(0)
    user.record(f"first weight {user.model.stem.weight[0, 0]:.4f}, bias {float(user.model.head.bias[0]):.4f}")


@script()
def to_lists_and_items(user: User) -> None:
    user.train(0)
    user.record(user.model.head.bias.tolist(), user.model.stem.weight[1, 2].item(), list(user.model.head.bias.shape))


@script()
def hashed(user: User) -> None:
    digest = hashlib.sha256()
    user.train(0, 1)
    for _, p in sorted(user.model.named_parameters()):
        digest.update(p.detach().contiguous().numpy().tobytes())
    user.record(digest.hexdigest())


@script()
def checked_for_nan(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        user.record(any(torch.isnan(p).any().item() for p in user.params))
        user.record(all(bool(torch.isfinite(p).all()) for p in user.params))


@script()
def compared_with_the_start(user: User) -> None:
    start = {k: v.clone() for k, v in user.model.state_dict().items()}
    user.train(0)
    user.record([torch.equal(start[n], p) for n, p in user.model.named_parameters()])
    user.record([torch.allclose(start[n], p, atol=1e-1) for n, p in user.model.named_parameters()])


@script()
def values_deep_copied(user: User) -> None:
    user.train(0)
    copies = [copy.deepcopy(p.data) for p in user.params]
    user.train(1)
    user.record(copies)


@script()
def parameter_deep_copied(user: User) -> None:
    user.train(0)
    other = copy.deepcopy(user.model.head.weight)
    user.record(other, other.requires_grad, isinstance(other, nn.Parameter))
    user.train(1)


@script(model=LanguageModel)
def nearest_embeddings(user: User) -> None:
    _ = user.opt
    user.backward(user.model(user.tokens()).square().mean())
    user.update()
    table = torch.nn.functional.normalize(user.model.embed.weight.detach(), dim=1)
    user.record((table @ table.t()).topk(3, dim=1).indices)


@script()
def singular_values(user: User) -> None:
    user.train(0)
    user.record([torch.linalg.svdvals(p.detach()) for p in user.params if p.ndim == 2])


@script(model=ConvNet)
def kernels_as_an_image(user: User) -> None:
    kernels = user.model.stem.weight.detach()
    low, high = kernels.min(), kernels.max()
    user.record(((kernels - low) / (high - low) * 255).byte())


@script()
def slices_joins_and_stacks(user: User) -> None:
    user.train(0)
    w = user.model.stem.weight
    user.record(w[:4, ::2], w.t().contiguous(), torch.cat([w, user.model.blocks[0].up.weight]), w.reshape(-1)[:5])
    user.record(torch.stack([b.norm.weight for b in user.model.blocks]))


@script()
def distance_between_two_layers(user: User) -> None:
    user.train(0)
    a, b = user.model.blocks[0].up.weight, user.model.blocks[2].up.weight
    user.record(
        (a - b).norm(), torch.dist(a, b), torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)
    )


@script()
def converted_to_other_dtypes(user: User) -> None:
    user.train(0)
    w = user.model.blocks[1].down.weight
    user.record(w.half(), w.double().sum(), w.to(torch.bfloat16), w.detach().int(), w.type(torch.float64).mean())


@script()
def exported_by_dlpack(user: User) -> None:
    user.train(0)
    user.record(torch.from_dlpack(user.model.head.weight.detach()).clone())
    user.record(torch.from_numpy(np.from_dlpack(user.model.head.weight.detach())).clone())


@script()
def addresses(user: User) -> None:
    """Tied weights are found by address; none is null."""
    user.train(0)
    user.record(all(p.data_ptr() != 0 for p in user.params), len({p.data_ptr() for p in user.params}))


@script(model=LanguageModel)
def tied_weights_found_by_address(user: User) -> None:
    by_address: dict[int, list[str]] = {}
    for name, p in user.model.named_parameters(remove_duplicate=False):
        by_address.setdefault(p.data_ptr(), []).append(name)
    user.record(sorted(by_address.values()))


@script()
def operators_called_directly(user: User) -> None:
    user.train(0)
    w, b = user.model.head.weight, user.model.head.bias
    x = user.batch(3)
    with torch.no_grad():
        user.record(torch.ops.aten.linear.default(x, w, b), torch.ops.aten.addmm.default(b, x, w.t()))
        user.record(torch._C._nn.linear(x, w, b), torch.einsum("oi,bi->bo", w, x))


@script()
def written_with_out(user: User) -> None:
    user.train(0)
    total = torch.zeros(16, 16)
    with torch.no_grad():
        torch.add(total, user.model.stem.weight, out=total)
        torch.mul(user.model.stem.weight, 0.5, out=user.model.stem.weight)
    user.record(total)
    user.train(1)


@script()
def read_while_frozen(user: User) -> None:
    user.model.requires_grad_(False)
    user.model.head.requires_grad_(True)
    opt = user.adamw(user.model.head.parameters())
    for seed in range(2):
        loss = user.loss(seed)
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item(), user.model.stem.weight.norm(), user.model.head.weight.norm())


@script()
def read_in_evaluation(user: User) -> None:
    user.train(0)
    user.model.eval()
    with torch.inference_mode():
        user.record(user.loss(5).item(), user.model.stem.weight.sum().item())
    user.model.train()
    user.train(1)


@script(expect=EQUAL_IF_ROOM)
def all_read_in_one_expression(user: User) -> None:
    user.train(0)
    user.record(torch.cat([p.detach().flatten() for p in user.params]))
    user.train(1)


@script()
def extremes_over_all(user: User) -> None:
    user.train(0)
    user.record(max(p.abs().max().item() for p in user.params), min(p.min().item() for p in user.params))
    user.record(torch.stack([p.detach().abs().mean() for p in user.params]).mean())


@script()
def saved_and_loaded_by_torch(user: User) -> None:
    import io

    user.train(0)
    buffer = io.BytesIO()
    torch.save({"model": user.model.state_dict(), "epoch": 1}, buffer)
    user.train(1)
    buffer.seek(0)
    user.model.load_state_dict(torch.load(buffer)["model"])
    user.train(2)


@script()
def state_dict_edited_and_loaded(user: User) -> None:
    user.train(0)
    state = user.model.state_dict()
    state["head.weight"] = torch.zeros_like(state["head.weight"])
    del state["stem.bias"]
    result = user.model.load_state_dict(state, strict=False)
    user.record(list(result.missing_keys), list(result.unexpected_keys))
    user.train(1)
