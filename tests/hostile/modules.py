"""Modules that do odd things with their parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.hostile.harness import User, script
from tests.hostile.models import VOCAB, WIDTH, LanguageModel, Net, stack


class Custom(nn.Module):
    """A weight, and what forward does with it."""

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.ones(WIDTH))


def train(user: User, seeds: int = 3) -> None:
    user.train(*range(seeds))


@script(model=lambda: stack(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Custom0()))
def weight_norm(user: User) -> None:
    train(user)
    user.record(user.model[1].weight.norm(dim=1))


class Custom0(Custom):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale


@script(model=lambda: stack(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), Custom0()))
def spectral_norm(user: User) -> None:
    train(user)
    user.record(torch.linalg.matrix_norm(user.model[1].weight, 2))


@script(model=lambda: stack(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), Custom0()))
def orthogonal_parametrization(user: User) -> None:
    train(user, 2)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def _symmetric() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return stack(layer, Custom0())


@script(model=_symmetric)
def parametrization_cached(user: User) -> None:
    for seed in range(3):
        with parametrize.cached():
            x = user.batch(seed)
            loss = (user.model(x) - user.model(-x)).square().mean()
            user.backward(loss)
        user.update()
        user.record(loss.item())


class Detached(Custom):
    """The same weight twice in one expression: as a constant, and live."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight) * self.scale


@script(model=lambda: stack(Detached(), Detached()))
def weight_used_detached_and_live(user: User) -> None:
    train(user)


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return F.linear(x, (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5), self.bias)


@script(model=lambda: stack(Standardised(WIDTH, WIDTH), Standardised(WIDTH, WIDTH)))
def weight_standardisation(user: User) -> None:
    train(user)


class SharedByProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @property
    def tied(self) -> Tensor:
        return self.first.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(self.first(x)), self.tied)


@script(model=SharedByProperty)
def weights_shared_by_a_property(user: User) -> None:
    train(user)
    user.record(user.model.tied.sum())


@script(model=lambda: nn.ModuleDict({"rnn": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), "head": nn.Linear(WIDTH, 4)}))
def lstm_by_hand(user: User) -> None:
    for seed in range(3):
        out, (h, _) = user.model["rnn"](user.batch(seed, 2, 5, WIDTH))
        loss = user.model["head"](out).square().mean() + h.square().mean()
        user.backward(loss)
        user.update()
        user.model["rnn"].flatten_parameters()
        user.record(loss.item(), [w.norm() for w in user.model["rnn"].all_weights[0]])


@script(model=lambda: nn.ModuleDict({"cell": nn.GRUCell(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 4)}))
def cells_over_time_with_carried_state(user: User) -> None:
    """Truncated backpropagation: the state is detached from step to step."""
    h = torch.zeros(2, WIDTH)
    for seed in range(3):
        loss = torch.zeros(())
        for t in range(4):
            h = user.model["cell"](user.batch(10 * seed + t, 2, WIDTH), h)
            loss = loss + user.model["head"](h).square().mean()
        user.backward(loss)
        user.update()
        h = h.detach()
        user.record(loss.item())


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode="sum")
        self.embed_rest = nn.Embedding(VOCAB, WIDTH, padding_idx=0, max_norm=1.0)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens) + self.embed_rest(tokens).mean(1))


@script(model=Bags)
def bags_and_renormalised_embeddings(user: User) -> None:
    """`max_norm` writes into the weight inside of forward."""
    for seed in range(3):
        loss = user.model(user.tokens(seed)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item(), user.model.embed_rest.weight.norm(dim=1))


@script(model=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True))
def attention_in_training_and_evaluation(user: User) -> None:
    """In evaluation torch takes a fast path that reads the weights of its children by itself."""
    for seed in range(3):
        user.backward(user.model(user.batch(seed, 2, 5, WIDTH)).square().mean())
        user.update()
        user.model.eval()
        with torch.no_grad():
            user.record(user.model(user.batch(seed, 2, 5, WIDTH)))
        user.model.train()


@script(model=LanguageModel)
def tied_embedding_used_functionally(user: User) -> None:
    for seed in range(3):
        x = F.embedding(user.tokens(seed), user.model.embed.weight) + user.model.position[:6]
        for block in user.model.blocks:
            x = block(x)
        loss = F.linear(x, user.model.embed.weight).logsumexp(-1).mean()
        user.backward(loss)
        user.opt.step()
        user.opt.zero_grad()
        user.record(loss.item())


@script(model=lambda: Net(4))
def layers_dropped(user: User) -> None:
    """LayerDrop: each step skips other blocks."""
    model = user.model
    for seed in range(4):
        x = model.stem(user.batch(seed))
        for i, block in enumerate(model.blocks):
            if (seed + i) % 3:
                x = block(x)
        loss = model.head(x).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())
