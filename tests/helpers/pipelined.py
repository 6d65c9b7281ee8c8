"""Chains of blocks, and the steps of a pipeline over them written out in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from tests.helpers import zoo_modules
from tests.helpers.zoo_transformers import LENGTH, VOCAB, WIDTH, BertBlock, Block, MoEBlock, mlp

BATCH = 8


class Chain(nn.Module):
    """What a pipeline runs, as one model."""

    def __init__(self, first: nn.Module | None, blocks: Sequence[nn.Module], last: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first
        self.blocks = nn.ModuleList(blocks)
        self.last = last

    def items(self) -> list[nn.Module]:
        """All that runs, in order."""
        ends = (self.first, *self.blocks, self.last)
        return [module for module in ends if module is not None]

    def forward(self, *given: Any) -> Any:
        value: Any = given
        for module in self.items():
            value = module(*value) if type(value) is tuple else module(value)
        return value


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))


class Head(nn.Module):
    def __init__(self, classes: int = VOCAB) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class TiedHead(nn.Module):
    """Its weight is the embedding's."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.weight = tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)


class ClassHead(nn.Module):
    def __init__(self, width: int = WIDTH, *, index: int | None = 0) -> None:
        super().__init__()
        self.head, self.index = nn.Linear(width, 10), index

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=(2, 3)) if self.index is None else x[:, self.index])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def inplace_mlp() -> nn.Sequential:
    """Begins with an operator that writes to what it is given."""
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH)
    )  # fmt: skip


class AddInPlace(nn.Module):
    """Adds to the tensor it is given, and returns that tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.shift)


class Down(nn.Module):
    """Halves the resolution; what it was given is passed on as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = F.relu(self.norm(self.conv(state["x"])))
        return {"x": F.max_pool2d(x, 2), "skips": (*state["skips"], x)}


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        *skips, skip = state["skips"]
        x = torch.cat([F.interpolate(state["x"], scale_factor=2), skip], dim=1)
        return {"x": F.relu(self.conv(x)), "skips": tuple(skips)}


class UNetStem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)

    def forward(self, images: Tensor) -> dict[str, Any]:
        return {"x": self.conv(images), "skips": ()}


class UNetHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = ClassHead(width, index=None)

    def forward(self, state: dict[str, Any]) -> Tensor:
        assert state["skips"] == ()
        return self.head(state["x"])


class DenseLayer(nn.Module):
    """Given everything that was computed before it: a tuple, hence its arguments."""

    def __init__(self, num_inputs: int, width: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(num_inputs * width), nn.Conv2d(num_inputs * width, width, 3, padding=1)

    def forward(self, *features: Tensor) -> tuple[Tensor, ...]:
        return (*features, self.conv(F.relu(self.norm(torch.cat(features, dim=1)))))


class DenseHead(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.head = ClassHead(4 * width, index=None)

    def forward(self, *features: Tensor) -> Tensor:
        return self.head(torch.cat(features, dim=1))


class MaskedEmbed(nn.Module):
    """The mask is computed from the input, needs no gradient, and is passed on by each block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(tokens), tokens == 0


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = BertBlock()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x, mask), mask


class MaskedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(x).masked_fill(mask[..., None], 0.0)


class Translation(nn.Module):
    """The encoder's input together with the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"memory": self.shared(source), "x": self.shared(target)}


class Encode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.1)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"memory": self.block(state["memory"])}


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(causal=True, cross=True)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"x": self.block(state["x"], state["memory"])}


class TranslationHead(nn.Module):
    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.weight = shared.weight

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        return F.linear(state["x"], self.weight)


def tokens(seed: int, num: int = BATCH) -> tuple[Any, Tensor]:
    """Tokens and their successors, both `(num, LENGTH)`."""
    text = torch.randint(VOCAB, (num, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def pairs(seed: int, num: int = BATCH) -> tuple[Any, Tensor]:
    """A sentence, what is known of its translation, and the next tokens."""
    (source, _), (target, successors) = tokens(seed, num), tokens(seed + 1000, num)
    return (source, target), successors


def images(seed: int, num: int = BATCH) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, 16, 16, generator=generator), torch.randint(10, (num,), generator=generator)


def features(seed: int, num: int = BATCH) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator), torch.randint(10, (num,), generator=generator)


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def gpt() -> Chain:
    return Chain(Embed(), [Block(causal=True, dropout=0.1) for _ in range(3)], Head())


def vit() -> Chain:
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True, norm_first=True) for _ in range(3)]
    return Chain(Patches(), layers, ClassHead())


def cnn() -> Chain:
    return Chain(
        nn.Conv2d(3, 16, 3, padding=1), [zoo_modules.ConvBlock(16) for _ in range(3)], ClassHead(16, index=None)
    )


def inplace() -> Chain:
    return Chain(nn.Linear(WIDTH, WIDTH), [inplace_mlp(), AddInPlace(), inplace_mlp()], nn.Linear(WIDTH, 10))


def unet(width: int = 8, depth: int = 4) -> Chain:
    blocks = [*(Down(width) for _ in range(depth)), *(Up(width) for _ in range(depth))]
    return Chain(UNetStem(width), blocks, UNetHead(width))


def dense() -> Chain:
    return Chain(nn.Conv2d(3, 8, 3, padding=1), [DenseLayer(number) for number in (1, 2, 3)], DenseHead())


def moe() -> Chain:
    return Chain(nn.Embedding(VOCAB, WIDTH), [MoEBlock() for _ in range(2)], Head())


def sliced() -> Chain:
    return Chain(nn.Linear(WIDTH, WIDTH), [zoo_modules.SlicedBlock() for _ in range(3)], nn.Linear(WIDTH, 10))


def masked() -> Chain:
    return Chain(MaskedEmbed(), [MaskedBlock() for _ in range(2)], MaskedHead())


def twice() -> Chain:
    shared = Residual()
    return Chain(nn.Linear(WIDTH, WIDTH), [shared, Residual(), shared], nn.Linear(WIDTH, 10))


def tied() -> Chain:
    embed = Embed()
    return Chain(embed, [Block(causal=True, dropout=0.1) for _ in range(2)], TiedHead(embed.tokens))


def translation() -> Chain:
    first = Translation()
    return Chain(first, [Encode(), Encode(), Decode(), Decode()], TranslationHead(first.shared))


def frozen_block() -> Chain:
    chain = gpt()
    chain.blocks[1].requires_grad_(False)
    return chain


def frozen_first() -> Chain:
    chain = gpt()
    chain.first.requires_grad_(False)
    return chain


@dataclass(frozen=True)
class ChainModel:
    """A chain and how it is fed."""

    name: str
    build: Callable[[], Chain]
    batch: Callable[..., tuple[Any, Tensor]]
    """Input and target of so many samples, a function of the seed and of that number."""
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
    chunk_numel: int = 2048
    shares_weights: bool = False
    """Blocks have some in common, whose gradients add up in the order of the blocks."""
    repeats: bool = True
    """All steps make the same accesses."""


CHAINS = {
    case.name: case
    for case in (
        ChainModel("gpt", gpt, tokens, next_token, 3072),
        ChainModel("vit", vit, images),
        ChainModel("cnn", cnn, images, chunk_numel=1024),
        ChainModel("inplace", inplace, features),
        ChainModel("unet", unet, images, chunk_numel=1280),
        ChainModel("dense", dense, images, chunk_numel=1792),
        ChainModel("moe", moe, tokens, next_token, 4096, repeats=False),
        ChainModel("sliced", sliced, features, chunk_numel=4096),
        ChainModel("masked", masked, tokens, next_token, 4096),
        ChainModel("twice", twice, features, chunk_numel=4096, shares_weights=True),
        ChainModel("tied", tied, tokens, next_token, 3072, shares_weights=True),
        ChainModel("translation", translation, pairs, next_token, 4096, shares_weights=True),
        ChainModel("frozen_block", frozen_block, tokens, next_token, 3072),
        ChainModel("frozen_first", frozen_first, tokens, next_token, 3072),
    )
}


@dataclass(frozen=True)
class Part:
    """A micro-batch."""

    inputs: Any
    target: Any
    divisor: float


def parted(tensor: Tensor, num: int) -> tuple[Tensor, ...]:
    """Split as `tensor.chunk` does, or as `tensor_split` where that has fewer parts than samples would make."""
    found = tensor.chunk(num)
    num = min(num, len(tensor))
    return found if len(found) == num else tensor.tensor_split(num)


def parts_of(inputs: Any, target: Any, num: int) -> list[Part]:
    """Split a batch into micro-batches."""
    targets = parted(target, num)
    found = []
    for number, own in enumerate(targets):
        given = tree_map_only(Tensor, lambda tensor, number=number: parted(tensor, num)[number], inputs)
        found.append(Part(given, own, len(target) / len(own)))
    return found


Backward = Callable[[Tensor], None]


def loop_step(
    model: Callable[..., Any], loss_fn: Callable[..., Tensor], inputs: Any, target: Any, *, num: int,
    backward: Backward = lambda loss: loss.backward(),
) -> Tensor:  # fmt: skip
    """Accumulate gradients: all forwards, then all backwards, the last one first. Return the loss of the batch."""
    losses = []
    for part in parts_of(inputs, target, num):
        given = part.inputs if type(part.inputs) is tuple else (part.inputs,)
        losses.append(loss_fn(model(*given), part.target) / part.divisor)
    total = _sum_of(losses)
    for loss in reversed(losses):
        backward(loss)
    return total


def layers_step(chain: Chain, loss_fn: Callable[..., Tensor], inputs: Any, target: Any, *, num: int) -> Tensor:
    """The same, where backward goes block by block: gradients of what blocks share add up in that order."""
    rows: list[list[tuple[list[Tensor], list[Tensor]]]] = [[] for _ in chain.items()]
    losses = []
    for part in parts_of(inputs, target, num):
        value = part.inputs
        for at, module in enumerate(chain.items()):
            given: list[Tensor] = []
            value = _cut(value, given) if at else value
            value = module(*value) if type(value) is tuple else module(value)
            if at == len(rows) - 1:
                value = loss_fn(value, part.target) / part.divisor
                losses.append(value)
            rows[at].append((given, [t for t in _tensors(value) if t.requires_grad]))
    total = _sum_of(losses)
    for at in reversed(range(len(rows))):
        for number in reversed(range(len(losses))):
            outputs = rows[at][number][1]
            grads = [None] * len(outputs) if at == len(rows) - 1 else [t.grad for t in rows[at + 1][number][0]]
            pairs_left = [(t, g) for t, g in zip(outputs, grads, strict=True) if g is not None or at == len(rows) - 1]
            if pairs_left:
                torch.autograd.backward([t for t, _ in pairs_left], [g for _, g in pairs_left])
    return total


def _cut(value: Any, given: list[Tensor]) -> Any:
    """Begin a history in each tensor that has one; the same tensor twice is one."""
    known: dict[int, Tensor] = {}

    def cut(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                given.append(known[id(tensor)])
        return known[id(tensor)]

    return tree_map_only(Tensor, cut, value)


def _tensors(value: Any) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    tree_map_only(Tensor, lambda tensor: found.setdefault(id(tensor), tensor), value)
    return list(found.values())


def _sum_of(losses: list[Tensor]) -> Tensor:
    total = losses[0].detach().clone()
    for loss in losses[1:]:
        total += loss.detach()
    return total
