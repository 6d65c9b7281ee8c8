"""The zoo: small models and how they are fed, for training the same thing in plain PyTorch and in chunkmem.

Every model is an ordinary `nn.Module` that knows nothing of chunks. All are fp32 with 50-400 KB of parameters, so that
a cap of a few chunks is felt, and one training step takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import zoo_modules as modules
from tests.helpers import zoo_transformers as transformers
from tests.helpers.zoo_transformers import LENGTH, VOCAB, WIDTH

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class ZooModel:
    """One kind of model and how it is fed."""

    name: str
    build: Callable[[], nn.Module]
    """Draws its weights from torch's global generator, on the CPU."""
    batch: Callable[[int], Batch]
    """Tensors of one micro-batch on the CPU; a function of the seed alone."""
    loss: Callable[[Any, Batch], Tensor]
    """Runs the model on one micro-batch; a scalar."""
    chunk_numel: int
    """`default_chunk_size`, in elements, such that the model takes 10 to 25 slabs a role."""
    has_blocks: bool = True
    """Whether the model runs its blocks through `Stack.run`, so that they can be checkpointed."""

    @property
    def slab_nbytes(self) -> int:
        return 4 * self.chunk_numel


def _tokens(seed: int, *, batch: int = 4) -> Batch:
    """Tokens and their successors, both `(batch, LENGTH)`."""
    text = torch.randint(VOCAB, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def _masked_tokens(seed: int) -> Batch:
    """Tokens, a padding mask that is True on 0 to 3 last positions of each row, and targets."""
    tokens, targets = _tokens(seed)
    padding = torch.arange(LENGTH) >= LENGTH - torch.arange(4)[:, None]
    return tokens, padding, targets


def _images(seed: int, *, size: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, size, size, generator=generator), torch.randint(10, (4,), generator=generator)


def _features(seed: int, *, shape: tuple[int, ...] = (8, 16)) -> Batch:
    """Features of `shape` and a class for each row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    *inputs, targets = batch
    return F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())


def _translate(model: nn.Module, batch: Batch) -> Tensor:
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def _classify_keywords(model: nn.Module, batch: Batch) -> Tensor:
    features, classes = batch
    out = model(features=features)
    return F.cross_entropy(out["logits"], classes) + 0.01 * out["penalty"]


def _prototypes(model: Any, batch: Batch) -> Tensor:
    """Two tasks weighted by learnt variances (Kendall et al. 2018)."""
    features, classes = batch
    x = model(features)
    distances = torch.cdist(x, model.prototypes)
    losses = torch.stack([F.cross_entropy(-distances, classes), (x - model.prototypes[classes]).square().mean()])
    return (losses * (-model.log_sigma).exp() + model.log_sigma).sum()


def _reconstruct(model: Any, batch: Batch) -> Tensor:
    x = features = batch[0]
    for block in (*model.encoder, *model.decoder):
        x = model.run(block, x)
    return F.mse_loss(x, features)


ZOO = (
    ZooModel("gpt", transformers.GPT, _tokens, _next_token, 3072),
    ZooModel("bert", transformers.Bert, _masked_tokens, _next_token, 4096),
    ZooModel("vit", transformers.ViT, lambda seed: _images(seed, size=16), _classify, 2048),
    ZooModel("cnn", modules.CNN, lambda seed: _images(seed, size=8), _classify, 1024),
    ZooModel("lstm", lambda: modules.Recurrent(nn.LSTM, dropout=0.1), _tokens, _next_token, 2048, has_blocks=False),
    ZooModel(
        "gru", lambda: modules.Recurrent(nn.GRU, bidirectional=True), _tokens, _next_token, 4096, has_blocks=False
    ),
    ZooModel("t5", transformers.T5, _tokens, _translate, 4096),
    ZooModel("moe", transformers.MoE, lambda seed: _tokens(seed, batch=1), _next_token, 4096),
    ZooModel("keyword", modules.Keyword, _features, _classify_keywords, 3072),
    ZooModel("loose", modules.LooseParameters, _features, _prototypes, 2048),
    ZooModel("direct", modules.Autoencoder, _features, _reconstruct, 2048),
    ZooModel("inplace", modules.Inplace, _features, _classify, 3072),
    ZooModel("sliced", modules.Sliced, _features, _classify, 1536),
    ZooModel("reused", modules.Reused, lambda seed: _features(seed, shape=(4, 6, WIDTH)), _classify, 3072),
)
