"""Two models and more that look at each other: target networks, teachers, contrast, actors and critics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH, Net, Tower


@script(model=None)
def momentum_encoder(user: User) -> None:
    """MoCo: the key encoder is an average of the query encoder; both are managed."""
    query, key = user.build(Tower), user.build(Tower)
    for p, q in zip(query.parameters(), key.parameters(), strict=True):
        q.data.copy_(p.data)
        q.requires_grad = False
    opt = user.adamw(query.parameters())
    for seed in range(3):
        with torch.no_grad():
            for p, q in zip(query.parameters(), key.parameters(), strict=True):
                q.data = q.data * 0.9 + p.data * 0.1
            k = F.normalize(key(user.batch(seed)), dim=1)
        loss = F.cross_entropy(F.normalize(query(user.batch(seed)), dim=1) @ k.t() / 0.1, torch.arange(4))
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def byol(user: User) -> None:
    online, predictor, target = user.build(Tower), user.build(Tower), user.build(Tower)
    target.requires_grad_(False)
    opt = user.adamw([*online.parameters(), *predictor.parameters()])
    for seed in range(3):
        a, b = user.batch(seed), user.batch(seed + 50)
        with torch.no_grad():
            goal = F.normalize(target(b), dim=1)
        loss = 2 - 2 * (F.normalize(predictor(online(a)), dim=1) * goal).sum(1).mean()
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(online.parameters(), target.parameters(), strict=True):
                q.data.mul_(0.9).add_(p.data, alpha=0.1)
        user.record(loss.item())


@script(model=None)
def target_network_by_state_dict(user: User) -> None:
    """DQN: the target is loaded from time to time."""
    online, target = user.build(Net), user.build(Net)
    target.load_state_dict(online.state_dict())
    opt = user.adamw(online.parameters())
    for seed in range(4):
        with torch.no_grad():
            goal = target(user.batch(seed + 1)).max(1).values
        loss = F.smooth_l1_loss(online(user.batch(seed)).gather(1, torch.tensor([[0], [1], [2], [3]]))[:, 0], goal)
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        if seed % 2:
            target.load_state_dict(online.state_dict())
        user.record(loss.item())


@script(model=None)
def weights_copied_between_two_managed_models(user: User) -> None:
    first, second = user.build(Net), user.build(Net)
    opt = user.adamw(first.parameters())
    for seed in range(2):
        user.backward(user.loss(seed, first))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(first.parameters(), second.parameters(), strict=True):
                q.copy_(p)
        user.record(user.loss(seed, second).item())


@script(model=None)
def distilled_from_a_teacher(user: User) -> None:
    teacher, student = user.build(lambda: Net(4)).eval(), user.build(lambda: Net(1))
    teacher.requires_grad_(False)
    opt = user.adamw(student.parameters())
    for seed in range(3):
        with torch.no_grad():
            goal = teacher(user.batch(seed)).softmax(1)
        loss = F.kl_div(student(user.batch(seed)).log_softmax(1), goal, reduction="batchmean")
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def teacher_in_plain_pytorch(user: User) -> None:
    torch.manual_seed(2)
    teacher = Net()
    student = user.build(Net)
    opt = user.adamw(student.parameters())
    for seed in range(2):
        loss = F.mse_loss(student(user.batch(seed)), teacher(user.batch(seed)).detach())
        for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
            loss = loss + 1e-2 * F.mse_loss(p, q.detach())
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def proximal_term_to_the_global_model(user: User) -> None:
    """FedProx: local training is held near to the weights it started from; then the clients are averaged."""
    client = user.build(Net)
    start = [p.detach().clone() for p in client.parameters()]
    total = [torch.zeros_like(p) for p in start]
    opt = user.adamw(client.parameters())
    for round_ in range(2):
        with torch.no_grad():
            for p, s in zip(client.parameters(), start, strict=True):
                p.copy_(s)
        for seed in range(2):
            loss = user.loss(10 * round_ + seed, client)
            loss = loss + 0.05 * sum((p - s).pow(2).sum() for p, s in zip(client.parameters(), start, strict=True))
            user.backward(loss)
            opt.step()
            opt.zero_grad()
        for t, p in zip(total, client.parameters(), strict=True):
            t.add_(p.detach(), alpha=0.5)
    user.record(total)


@script(model=None)
def actor_and_critic(user: User) -> None:
    actor, critic = user.build(lambda: Tower(outputs=2)), user.build(lambda: Tower(WIDTH + 2, 1))
    opt_a, opt_c = user.adam(actor.parameters()), user.adam(critic.parameters())
    for seed in range(3):
        x = user.batch(seed)
        loss_c = critic(torch.cat([x, actor(x).detach()], 1)).square().mean()
        user.backward(loss_c)
        opt_c.step()
        opt_c.zero_grad()
        for p in critic.parameters():
            p.requires_grad = False
        loss_a = -critic(torch.cat([x, torch.tanh(actor(x))], 1)).mean()
        user.backward(loss_a)
        opt_a.step()
        opt_a.zero_grad()
        for p in critic.parameters():
            p.requires_grad = True
        user.record(loss_a.item(), loss_c.item())


@script(model=None)
def critics_of_which_the_worse_counts(user: User) -> None:
    """Twin critics (TD3): targets follow by averages, some parameters get no gradient from the minimum."""
    first, second, target = user.build(Tower), user.build(Tower), user.build(Tower)
    opt = user.adam([*first.parameters(), *second.parameters()])
    for seed in range(3):
        with torch.no_grad():
            goal = target(user.batch(seed + 1))
        loss = torch.min((first(user.batch(seed)) - goal).square(), (second(user.batch(seed)) - goal).square()).mean()
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        for p, t in zip(first.parameters(), target.parameters(), strict=True):
            t.data.lerp_(p.data, 0.1)
        user.record(loss.item())


@script(model=None)
def siamese(user: User) -> None:
    model = user.build(Tower)
    opt = user.adamw(model.parameters())
    for seed in range(3):
        a, b = model(user.batch(seed)), model(user.batch(seed + 50))
        loss = F.cosine_embedding_loss(a, b, torch.tensor([1.0, -1.0, 1.0, -1.0]))
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def barlow_twins_with_a_stopped_side(user: User) -> None:
    encoder, projector = user.build(Tower), user.build(Tower)
    opt = user.adamw([{"params": encoder.parameters()}, {"params": projector.parameters(), "lr": 1e-3}])
    for seed in range(3):
        z = encoder(user.batch(seed))
        p = projector(z)
        loss = -F.cosine_similarity(p, z.detach()).mean() + z.std(0).relu().mean()
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def managed_and_plain_in_one_loss(user: User) -> None:
    """An adapter in plain PyTorch with torch's own optimizer beside a managed model."""
    model = user.build(Net)
    torch.manual_seed(3)
    adapter = nn.Linear(4, 4)
    opt, plain = user.adamw(model.parameters()), torch.optim.SGD(adapter.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        loss = adapter(model(user.batch(seed))).square().mean()
        user.backward(loss)
        opt.step()
        plain.step()
        opt.zero_grad()
        plain.zero_grad()
        user.record(loss.item(), adapter.weight.norm())


@script(model=None)
def swag_samples(user: User) -> None:
    """Means and deviations of weights over the last steps; then weights drawn from them are evaluated."""
    model = user.build(Net)
    opt = user.adamw(model.parameters())
    mean = [torch.zeros_like(p) for p in model.parameters()]
    square = [torch.zeros_like(p) for p in model.parameters()]
    for n in range(4):
        user.backward(user.loss(n, model))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, m, s in zip(model.parameters(), mean, square, strict=True):
                m.mul_(n / (n + 1)).add_(p / (n + 1))
                s.mul_(n / (n + 1)).add_(p**2 / (n + 1))
    for seed in range(2):
        for p, m, s in zip(model.parameters(), mean, square, strict=True):
            p.data = m + (s - m**2).clamp(min=1e-8).sqrt() * torch.randn_like(m)
        with torch.no_grad():
            user.record(user.loss(seed, model).item())


@script(model=None)
def model_soup(user: User) -> None:
    """The mean of the weights of three runs is loaded and evaluated."""
    soup: dict[str, Tensor] = {}
    for run in range(3):
        model = user.build(Net)
        opt = user.adamw(model.parameters())
        user.backward(user.loss(run, model))
        opt.step()
        opt.zero_grad()
        for name, value in model.state_dict().items():
            soup[name] = soup.get(name, 0) + value / 3
    user.model.load_state_dict(soup)
    with torch.no_grad():
        user.record(user.loss(5).item())
