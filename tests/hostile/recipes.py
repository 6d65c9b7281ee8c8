"""Whole training loops, with several habits at once."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.hostile.harness import Refused, User, script
from tests.hostile.models import VOCAB, WIDTH, LanguageModel, Net, Tower


@script(model=LanguageModel)
def language_model(user: User) -> None:
    """nanoGPT's loop: warm-up, accumulation, clipping, decay groups, evaluation, a checkpoint."""
    model = user.model
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    opt = user.adamw([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.95))
    for it in range(4):
        for group in opt.param_groups:
            group["lr"] = 1e-2 * min(1.0, (it + 1) / 2)
        if it == 2:
            model.eval()
            with torch.no_grad():
                user.record([cross_entropy(user, 90 + i).item() for i in range(2)])
            model.train()
            saved = copy.deepcopy({"model": user.state_dict(), "optimizer": opt.state_dict()})
        for micro in range(3):
            loss = cross_entropy(user, 10 * it + micro) / 3
            user.backward(loss)
            user.record(loss.item())
        user.record(clip_grad_norm_(model.parameters(), 1.0))
        opt.step()
        opt.zero_grad(set_to_none=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])


def cross_entropy(user: User, seed: int) -> Tensor:
    tokens = user.tokens(seed)
    return F.cross_entropy(user.model(tokens)[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


@script(model=lambda: Tower(WIDTH + 1))
def diffusion_with_an_average(user: User) -> None:
    average = {n: p.detach().clone() for n, p in user.model.named_parameters()}
    for seed in range(3):
        x, noise, t = user.batch(seed), user.batch(seed + 50), torch.linspace(0.1, 0.9, 4).unsqueeze(1)
        noisy = t.sqrt() * x + (1 - t).sqrt() * noise
        loss = F.mse_loss(user.model(torch.cat([noisy, t], 1)), noise)
        user.backward(loss)
        clip_grad_norm_(user.model.parameters(), 1.0)
        user.update()
        with torch.no_grad():
            for n, p in user.model.named_parameters():
                average[n].lerp_(p, 0.01)
        user.record(loss.item())
    backup = {n: p.detach().clone() for n, p in user.model.named_parameters()}
    with torch.no_grad():
        for n, p in user.model.named_parameters():
            p.copy_(average[n])
        user.record(user.model(torch.cat([user.batch(9), torch.zeros(4, 1)], 1)))
        for n, p in user.model.named_parameters():
            p.copy_(backup[n])


@script(model=None)
def policy_optimisation(user: User) -> None:
    """PPO: rollouts without gradients, some epochs on them, an early stop by the KL divergence."""
    actor, critic = user.build(Net), user.build(lambda: Tower(outputs=1))
    opt = user.adam([{"params": actor.parameters()}, {"params": critic.parameters(), "lr": 1e-3}], eps=1e-5)
    for rollout in range(2):
        x = user.batch(rollout, 8, WIDTH)
        with torch.no_grad():
            old = Categorical(logits=actor(x))
            actions = old.sample()
            values = critic(x)[:, 0]
        returns = x[:, 0] + actions.float() * 0.1
        for _ in range(3):
            new = Categorical(logits=actor(x))
            ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
            gain = (returns - values) * ratio
            clipped = (returns - values) * ratio.clamp(0.8, 1.2)
            loss = -torch.min(gain, clipped).mean() + 0.5 * F.mse_loss(critic(x)[:, 0], returns)
            loss = loss - 0.01 * new.entropy().mean()
            opt.zero_grad()
            user.backward(loss)
            clip_grad_norm_(actor.parameters(), 0.5)
            clip_grad_norm_(critic.parameters(), 0.5)
            opt.step()
            kl = torch.distributions.kl_divergence(old, Categorical(logits=actor(x))).mean().item()
            user.record(loss.item(), kl)
            if kl > 0.05:
                break


@script(model=None)
def variational_autoencoder(user: User) -> None:
    encoder, decoder = user.build(lambda: Tower(WIDTH, 8)), user.build(lambda: Tower(4, WIDTH))
    opt = user.adamw([*encoder.parameters(), *decoder.parameters()])
    for seed in range(3):
        x = user.batch(seed)
        mean, log_var = encoder(x).chunk(2, 1)
        z = mean + torch.randn(4, 4) * (log_var / 2).exp()
        loss = F.mse_loss(decoder(z), x) - 0.01 * (1 + log_var - mean**2 - log_var.exp()).mean()
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())
    decoder.eval()
    with torch.no_grad():
        user.record(decoder(torch.randn(3, 4)))


@script(model=None)
def critic_with_gradient_penalty(user: User) -> None:
    """WGAN-GP: five critic steps a generator step, penalties at points between."""
    generator, critic = user.build(Tower), user.build(lambda: Tower(outputs=1))
    opt_g, opt_c = user.adam(generator.parameters(), betas=(0.5, 0.9)), user.adam(critic.parameters(), betas=(0.5, 0.9))
    for it in range(2):
        for inner in range(2):
            real = user.batch(10 * it + inner)
            with torch.no_grad():
                fake = generator(user.batch(50 + inner))
            mix = (torch.rand(4, 1) * (real - fake) + fake).requires_grad_()
            (g,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (g.norm(dim=1) - 1).square().mean()
            opt_c.zero_grad()
            user.backward(loss)
            opt_c.step()
            user.record(loss.item())
        critic.requires_grad_(False)
        loss = -critic(generator(user.batch(80))).mean()
        opt_g.zero_grad()
        user.backward(loss)
        opt_g.step()
        critic.requires_grad_(True)
        user.record(loss.item())


@script()
def fine_tuning_with_unfreezing(user: User) -> None:
    """Pretrained values, a new head, layers unfrozen one by one, pulled towards where they started."""
    start = {n: p.detach().clone() for n, p in user.model.named_parameters()}
    user.model.head.reset_parameters()
    user.model.requires_grad_(False)
    user.model.head.requires_grad_(True)
    opt = user.adamw(user.model.parameters())
    for seed in range(4):
        if seed:
            user.model.blocks[3 - seed].requires_grad_(True)
        pull = sum(
            (p - start[n]).square().sum()
            for n, p in user.model.named_parameters()
            if p.requires_grad and not n.startswith("head")
        )
        loss = user.loss(seed) + 0.1 * pull
        user.backward(loss)
        user.record(loss.item(), [n for n, p in user.model.named_parameters() if p.grad is not None])
        opt.step()
        opt.zero_grad()


@script()
def mixed_batches_with_averaging(user: User) -> None:
    """Mixup, label noise, a running mean of the weights from the second half on."""
    mean: dict[str, Tensor] = {}
    for it in range(4):
        a, b = user.batch(it), user.batch(it + 20)
        lam = 0.3 + 0.1 * it
        out = user.model(lam * a + (1 - lam) * b)
        target = torch.arange(4)
        loss = lam * F.cross_entropy(out, target) + (1 - lam) * F.cross_entropy(out, target.flip(0))
        user.backward(loss)
        user.update()
        if it >= 2:
            for n, p in user.model.named_parameters():
                old = mean.get(n, torch.zeros_like(p))
                mean[n] = old + (p.detach() - old) / (it - 1)
        user.record(loss.item())
    user.model.load_state_dict({**user.model.state_dict(), **mean})
    with torch.no_grad():
        user.record(user.loss(30).item())


@script()
def learning_rate_found(user: User) -> None:
    """The learning rate rises until the loss explodes; then weights and states are put back."""
    weights, states = copy.deepcopy(user.model.state_dict()), copy.deepcopy(user.opt.state_dict())
    best = math.inf
    for it in range(6):
        for group in user.opt.param_groups:
            group["lr"] = 1e-4 * 10**it
        best = min(best, user.step(it))
    user.model.load_state_dict(weights)
    user.opt.load_state_dict(states)
    user.train(0)
    user.record(best)


@script()
def memory_of_gradients_for_continual_learning(user: User) -> None:
    """A-GEM: the gradient of an old batch constrains that of the new one."""
    for seed in range(3):
        user.backward(user.loss(99))
        old = torch.cat([p.grad.flatten() for p in user.params])
        user.opt.zero_grad()
        user.backward(user.loss(seed))
        new = torch.cat([p.grad.flatten() for p in user.params])
        dot = torch.dot(new, old)
        if dot < 0:
            new = new - dot / old.square().sum() * old
        offset = 0
        for p in user.params:
            p.grad.copy_(new[offset : offset + p.numel()].view_as(p))
            offset += p.numel()
        user.update()
        user.record(dot)


@script()
def curvature_from_hooks(user: User) -> None:
    """K-FAC's factors: inputs by forward hooks, gradients of outputs by backward hooks."""
    factors: dict[str, list[Tensor]] = {}
    for name, module in user.model.named_modules():
        if isinstance(module, nn.Linear):
            seen = factors.setdefault(name, [])
            module.register_forward_pre_hook(lambda m, args, s=seen: s.append((args[0].t() @ args[0]).detach()))
            module.register_full_backward_hook(lambda m, gi, go, s=seen: s.append((go[0].t() @ go[0]).detach()))
    user.train(0, 1)
    user.record(factors)


class Lion(torch.optim.Optimizer):
    """An optimizer as users write them: by `p.grad` and in place."""

    def __init__(self, params: object, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.add_((0.9 * state["m"] + 0.1 * p.grad).sign(), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 0.01)


@script(expect=Refused("StateError", "chunkmem"))
def an_optimizer_of_the_users_own(user: User) -> None:
    opt = Lion(user.model.parameters())
    for seed in range(2):
        opt.zero_grad()
        user.loss(seed).backward()
        opt.step()


@script(expect=Refused("StateError", "chunkmem"))
def quasi_newton_of_torch(user: User) -> None:
    opt = torch.optim.LBFGS(user.model.parameters(), max_iter=2)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = user.loss(0)
        loss.backward()
        return loss

    opt.step(closure)


@script(model=lambda: Net(4))
def grown_progressively(user: User) -> None:
    """Each phase uses one more block; those not used yet have no gradients and no states."""
    model = user.model
    for depth in range(1, 5):
        x = model.stem(user.batch(depth))
        for block in model.blocks[:depth]:
            x = block(x)
        loss = model.head(x).square().mean()
        user.backward(loss)
        clip_grad_norm_(model.parameters(), 0.5)
        user.update()
        user.record(loss.item(), len(user.opt.state_dict()["state"]))


@script()
def gradient_free_search_between_steps(user: User) -> None:
    """A scale of the head is searched by forward passes alone, the best one is kept."""
    for seed in range(2):
        user.step(seed)
        head = user.model.head.weight
        original, losses = head.detach().clone(), []
        for scale in (0.5, 1.0, 2.0):
            with torch.no_grad():
                head.copy_(original * scale)
                losses.append(user.loss(seed + 10).item())
        best = (0.5, 1.0, 2.0)[losses.index(min(losses))]
        head.data.copy_(original).mul_(best)
        user.record(losses, best)
