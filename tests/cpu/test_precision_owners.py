"""Floating buffers in bf16 and fp16: beside children, in the model itself, and beside a weight that is tied.

Every model is written twice: as a user would write it, trained by chunkmem, and with all casts written out by hand,
trained in plain PyTorch with master weights. The two have to agree to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import chunkmem
from chunkmem.data.errors import LayoutError
from chunkmem.estimate.rehearse import Setting, rehearse
from chunkmem.optim.scaler import LossScaler
from tests.cpu.test_estimate_truth import as_model
from tests.cpu.test_precision import AMPLE_NBYTES, FP16, chunked, config
from tests.helpers.low_precision import LowPlain
from tests.helpers.spread import spread
from tests.helpers.training import STEPS, VARIANTS, Chunked, Trainer, Variant, assert_same
from tests.helpers.zoo import ZooModel

VOCAB, WIDTH, LENGTH, HEADS = 40, 32, 12, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Masked(nn.Module):
    """Causal attention with its mask as a floating buffer beside its projections (nanoGPT has it so)."""

    def __init__(self, *, adds: bool, recomputes: bool = False) -> None:
        super().__init__()
        self.adds, self.recomputes = adds, recomputes
        self.qkv, self.out, self.softmax = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=-1)
        below = torch.tril(torch.ones(LENGTH, LENGTH))
        self.register_buffer("mask", (1 - below) * torch.finfo(torch.float32).min if adds else below)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.recomputes else self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)
        scores = scores + self.mask if self.adds else scores.masked_fill(self.mask == 0, float("-inf"))
        return self.out((self.softmax(scores) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embedding, blocks, head; `positions` in the model itself, or a parameter `gain` of its own beside them."""

    checkpointing = False

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], *, table: bool, gain: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embed": embed, "blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(WIDTH)})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if table:
            self.register_buffer("table", torch.randn(LENGTH, WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH)) if gain else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.parts["embed"](tokens)
        if hasattr(self, "table"):
            x = x + self.table[: tokens.shape[1]]
        if self.gain is not None:
            x = x * self.gain
        for block in self.parts["blocks"]:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.parts["norm"](x))


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: multiplied by a buffer."""

    def __init__(self) -> None:
        super().__init__(VOCAB, WIDTH)
        self.register_buffer("embed_scale", torch.tensor(WIDTH**0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embed_scale.to(self.weight.dtype)


class BufferedNorm(nn.Module):
    """RMSNorm whose epsilon is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("eps", torch.full((1,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


# The same with the casts written out; `low` is bf16 or fp16.


def masked(module: Masked, x: Tensor, low: torch.dtype) -> Tensor:
    x = x.float()
    qkv = module.qkv(x.to(low)).float()
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH / HEADS)
    scores = scores + module.mask if module.adds else scores.masked_fill(module.mask == 0, float("-inf"))
    mixed = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
    return module.out(mixed.to(low)).float().to(low)


def block(module: Block, x: Tensor, low: torch.dtype) -> Tensor:
    normed = module.norm1(x)
    x = x + (
        masked(module.attention, normed, low) if isinstance(module.attention, Masked) else module.attention(normed)
    )
    normed = module.norm2(x.float()).to(low) if isinstance(module.norm2, BufferedNorm) else module.norm2(x)
    return x + module.mlp(normed)


def model(module: Model, tokens: Tensor, *, low: torch.dtype) -> Tensor:
    own = torch.float32 if hasattr(module, "table") else low
    x = module.parts["embed"](tokens).to(low).to(own)  # a scaled embedding is in float32, what it returns is not
    if isinstance(module.parts["embed"], ScaledEmbedding):
        x = module.parts["embed"](tokens).to(own)
    if hasattr(module, "table"):
        x = x + module.table[: tokens.shape[1]]
    if module.gain is not None:
        x = x * module.gain
    for each in module.parts["blocks"]:
        x = block(each, x.to(low), low).to(own)
    x = module.parts["norm"](x.to(low)).to(own)
    return module.head(x.to(module.head.weight.dtype)).to(own).float()


class ByHand(LowPlain):
    """Plain PyTorch, all casts written out; `kept` names what stays in float32."""

    def __init__(self, dtype: torch.dtype, scaler: LossScaler | None, kept: tuple[str, ...]) -> None:
        super().__init__(dtype, scaler)
        self.kept = kept

    def ready(self, built: nn.Module) -> nn.Module:
        for name, param in built.named_parameters():
            self.built[param] = param.dtype
            if name in self.kept:
                self.masters[param] = param
            else:
                self.masters[param] = nn.Parameter(param.detach().clone())
                param.data = param.data.to(self.dtype)
        built.forward = functools.partial(model, built, low=self.dtype)
        return built


def plain_blocks() -> list[nn.Module]:
    return [Block(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]


def masked_blocks(*, adds: bool, recomputes: bool = False) -> Callable[[], list[nn.Module]]:
    return lambda: [Block(Masked(adds=adds, recomputes=recomputes)) for _ in range(3)]


def normed_blocks() -> list[nn.Module]:
    blocks = [Block(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    for each in blocks:
        each.norm2 = BufferedNorm()
    return blocks


def scaled_and_tied(blocks: list[nn.Module], **options: bool) -> Model:
    built = Model(ScaledEmbedding(), blocks, **options)
    built.head.weight = built.parts["embed"].weight
    return built


def embedded(blocks: list[nn.Module], **options: bool) -> Model:
    return Model(nn.Embedding(VOCAB, WIDTH), blocks, **options)


def batch(seed: int) -> tuple[Tensor, ...]:
    text = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss(module: nn.Module, tokens: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(module(tokens[0]).flatten(0, 1), tokens[1].flatten())


def case(name: str, build: Callable[[], nn.Module]) -> ZooModel:
    return ZooModel(name, build, batch, loss, 3072)


@dataclass(frozen=True)
class Case:
    model: ZooModel
    kept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.model.name


NORMS = tuple(f"parts.blocks.{index}.norm2.weight" for index in range(3))
TIED = ("parts.embed.weight",)
CASES = (
    Case(case("mask_compared", lambda: embedded(masked_blocks(adds=False)(), table=False))),
    Case(case("mask_added", lambda: embedded(masked_blocks(adds=True)(), table=False))),
    Case(case("mask_recomputed", lambda: embedded(masked_blocks(adds=True, recomputes=True)(), table=False))),
    Case(case("table", lambda: embedded(plain_blocks(), table=True))),
    Case(case("table_and_gain", lambda: embedded(plain_blocks(), table=True, gain=True)), ("gain",)),
    Case(case("norm", lambda: embedded(normed_blocks(), table=False)), NORMS),
    Case(case("tied", lambda: scaled_and_tied(plain_blocks(), table=False)), TIED),
    Case(
        case("all", lambda: scaled_and_tied(masked_blocks(adds=True, recomputes=True)(), table=True, gain=True)),
        ("gain", *TIED),
    ),
)
ORDINARY, CHECKPOINT = (variant for variant in VARIANTS if variant.name in ("plain", "checkpoint"))


@functools.cache
def by_hand(case: Case, precision: str) -> Any:
    scaler = LossScaler(chunkmem.Config.from_dict({"fp16": FP16}).fp16) if precision == "fp16" else None
    return Trainer(case.model, ORDINARY, ByHand(DTYPES[precision], scaler, case.kept)).run(STEPS)


@pytest.mark.few(1)
@spread(case=CASES, precision=("bf16", "fp16"), variant=(ORDINARY, CHECKPOINT))
def test_floating_buffers_and_children_train_as_with_casts_by_hand(
    case: Case, precision: str, variant: Variant
) -> None:
    outcome, required_nbytes = chunked(case.model, variant, AMPLE_NBYTES, precision)
    assert_same(outcome, by_hand(case, precision))
    tight, _ = chunked(case.model, variant, required_nbytes, precision)
    assert_same(tight, by_hand(case, precision))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.name)
def test_the_estimate_has_the_same_moments_and_bytes(case: Case) -> None:
    with chunkmem.ChunkManager(config(case.model, AMPLE_NBYTES)) as manager:
        trainer = Trainer(case.model, ORDINARY, Chunked(manager))
        trainer.step()
        trainer.evaluate()
        trace = manager.trace
    assert trace is not None
    setting = Setting(precision="bf16", chunk_numel=2 * case.model.chunk_numel)
    assert rehearse(as_model(case.model, ORDINARY), setting).trace.digest == trace.digest


# Who calls whom


def manager_of(precision: str = "bf16", **keys: Any) -> chunkmem.ChunkManager:
    memory = {"device": 1 << 20, "host": 8 << 20}
    return chunkmem.ChunkManager(chunkmem.Config.from_dict({"precision": precision, "memory": memory} | keys))


def dtypes_seen(module: nn.Module) -> list[tuple[torch.dtype, torch.dtype]]:
    """Of each call from now on: what the module is given, and what it returns."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    module.register_forward_hook(lambda _m, args, result: seen.append((args[0].dtype, result.dtype)))
    return seen


class Buffered(nn.Module):
    """Calls what it is given between additions of a buffer."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.inner:
            x = each(x + self.offset)
        return x


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_module_that_two_parents_share_returns_what_each_computes_in(recomputes: bool) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8)
            self.buffered, self.ordinary = Buffered(self.shared), nn.Sequential(self.shared, nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            if recomputes:
                return self.ordinary(checkpoint(self.buffered, x, use_reentrant=False))
            return self.ordinary(self.buffered(x))

    manager = manager_of()
    with manager.init():
        built = Shared()
    seen = dtypes_seen(built.shared)
    with set_checkpoint_early_stop(False):  # a recomputation calls the hook too
        manager.backward(built(torch.randn(2, 8)).sum())
    low, full = torch.bfloat16, torch.float32
    assert seen == [(low, full), (low, low)] + [(low, full)] * recomputes
    manager.close()


def test_a_module_below_another_can_be_called_by_the_model_itself() -> None:
    class Reaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.register_buffer("offset", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.tower[0](x + self.offset) + self.offset, torch.eye(8)) + self.tower(x)

    manager = manager_of()
    with manager.init():
        built = Reaching()
    seen = dtypes_seen(built.tower[0])
    manager.backward(built(torch.randn(2, 8)).sum())
    assert seen == [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
    manager.close()


def test_modules_without_floats_compute_in_what_they_are_given() -> None:
    """A mask of the least float32 would be -inf in bf16, and a row that is all masked NaN."""
    manager = manager_of()
    with manager.init():
        built = Buffered(nn.Softmax(dim=-1), nn.Linear(8, 8), nn.Identity())
    seen = [dtypes_seen(each) for each in built.inner]
    built(torch.randn(2, 8))
    low, full = torch.bfloat16, torch.float32
    assert [each for (each,) in seen] == [(full, full), (low, full), (full, full)]
    manager.close()


def test_a_list_to_put_outputs_into_is_the_callers_own() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
            found.append(self.linear(x))
            return found[-1]

    manager = manager_of()
    with manager.init():
        built = Collecting()
    found: list[Tensor] = []
    assert torch.equal(built(torch.randn(2, 8), found), found[0].float())
    manager.close()


def test_a_call_that_was_interrupted_is_no_caller() -> None:
    manager = manager_of()
    with manager.init():
        built = Buffered(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    x, deepest = torch.randn(2, 8), built.inner[0][1]
    expected = built(x)

    for error in (KeyboardInterrupt, ValueError):

        def interrupt(*_args: object, error: type[BaseException] = error) -> None:
            raise error

        handle = deepest.register_forward_pre_hook(interrupt)
        with pytest.raises(error):
            built(x)
        handle.remove()
        result = built(x)
        assert result.dtype is torch.float32
        assert torch.equal(result, expected)
    manager.close()


# Weights that several models or modules hold


def test_models_built_together_may_tie_a_weight_that_one_needs_in_float32() -> None:
    manager = manager_of()
    with manager.init():
        first, second = nn.Linear(8, 8), Buffered(nn.Linear(8, 8))
        second.own = first.weight
    assert first.weight.dtype is second.own.dtype is torch.float32
    assert first.bias.dtype is torch.float32, "one module computes in one dtype"
    assert second.inner[0].weight.dtype is torch.bfloat16
    manager.backward(first(torch.randn(2, 8)).sum() + second(torch.randn(2, 8)).sum())
    manager.close()


def test_a_weight_packed_in_a_low_dtype_cannot_become_float32_later() -> None:
    manager = manager_of()
    with manager.init():
        first = nn.Linear(8, 8)
    second = Buffered(nn.Linear(8, 8))
    second.own = first.weight
    with pytest.raises(LayoutError, match=r"own of module Buffered stays in torch.bfloat16.*one manager.init"):
        manager.wrap(second)
    assert second.inner[0].weight.dtype is torch.float32, "nothing was packed"
    manager.close()


def test_a_weight_excluded_in_another_low_dtype_cannot_be_tied() -> None:
    manager = manager_of("fp16")
    with (
        pytest.raises(LayoutError, match=r"weight of module 1 stays in torch.bfloat16.*Linear computes in torch.float"),
        manager.init(),
    ):
        with manager.exclude():
            embed = nn.Embedding(16, 8, dtype=torch.bfloat16)
        head = nn.Linear(8, 16, bias=False)
        head.weight = embed.weight
        model = nn.Sequential(embed, head)
    assert model[1].weight.dtype is torch.bfloat16
    manager.close()


def test_a_weight_packed_in_float32_keeps_its_later_owners_there() -> None:
    manager = manager_of()
    with manager.init():
        first = Buffered()
        first.own = nn.Parameter(torch.randn(8, 8))
    second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    second[0].weight = first.own
    manager.wrap(second)
    assert [p.dtype for p in second.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    manager.backward(second(torch.randn(2, 8)).sum())
    manager.close()


def test_a_weight_tied_to_an_excluded_module_stays_in_float32_at_all_owners() -> None:
    manager = manager_of()
    with manager.init():
        with manager.exclude():
            embed = nn.Embedding(16, 8)
        head = nn.Linear(8, 16, bias=False)
        head.weight = embed.weight
        built = nn.Sequential(embed, nn.Linear(8, 8), head)
    assert built(torch.arange(4)).dtype is torch.float32
    assert head.weight.dtype is torch.float32
    manager.close()


def test_an_excluded_module_that_was_built_low_stays_so() -> None:
    manager = manager_of("fp16")
    with manager.init():
        with manager.exclude():
            tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        built = nn.Sequential(nn.Linear(8, 8), tower, nn.Linear(8, 8))
    seen = dtypes_seen(tower[1])
    assert built(torch.randn(2, 8)).dtype is torch.float32
    assert seen[0][0] is torch.bfloat16
    manager.close()


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.bfloat16), ("bf16", torch.float16)])
def test_batch_statistics_built_in_the_other_low_dtype_are_met_in_it(precision: str, dtype: torch.dtype) -> None:
    """torch normalizes a batch in float32 or in one low dtype, not with statistics of the other."""
    manager = manager_of(precision)
    with manager.init():
        built = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(dtype)
    seen = dtypes_seen(built[1])
    optimizer = chunkmem.AdamW(built.parameters(), manager=manager)
    before = manager.state_dict()
    for _ in range(3):
        manager.backward(built(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    low = DTYPES[precision]
    assert seen[0] == (dtype, low)
    assert [param.dtype for param in built.parameters()] == [low] * 2 + [dtype] * 2 + [low] * 2
    after = manager.state_dict()
    assert {key: value.dtype for key, value in after.items()} == {key: value.dtype for key, value in before.items()}
    assert not any(torch.equal(value, before[key]) for key, value in after.items())
    manager.close()


class MaskedMultihead(nn.MultiheadAttention):
    """torch's own attention reads the weights of its output projection, which it never calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, attn_mask=self.mask, need_weights=False)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_has_no_low_copy_meets_float32(dtype: torch.dtype) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8, dtype=dtype), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear((x.to(dtype) * self.scale).real.float())

    torch.manual_seed(0)
    manager = manager_of()
    with manager.init():
        built = nn.Sequential(nn.Linear(8, 8), Wide(), nn.Linear(8, 8))
    assert built[1].scale.dtype is dtype
    assert built(torch.randn(2, 8)).dtype is torch.float32
    manager.close()


def test_attention_of_torch_with_a_mask_of_its_own() -> None:
    manager = manager_of()
    with manager.init():
        built = nn.Sequential(nn.Linear(WIDTH, WIDTH), MaskedMultihead(), nn.Linear(WIDTH, WIDTH))
    manager.backward(built(torch.randn(2, LENGTH, WIDTH)).sum())
    assert built[1].out_proj.weight.dtype is torch.float32
    manager.close()
