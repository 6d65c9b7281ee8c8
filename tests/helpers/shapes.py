"""Parameter lists of well-known models, in construction order: names and shapes, nothing to download or to build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from chunkmem.data.layout import TensorSpec

Named = tuple[str, tuple[int, ...]]
Model = tuple[TensorSpec, ...]


def linear(name: str, fan_in: int, fan_out: int) -> Iterator[Named]:
    """Yield the weight and the bias of a linear layer."""
    yield f"{name}.weight", (fan_out, fan_in)
    yield f"{name}.bias", (fan_out,)


def norm(name: str, width: int) -> Iterator[Named]:
    """Yield scale and shift of a layer norm or a batch norm."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def as_specs(named: Iterator[Named], *, dtype: str = "float32", itemsize: int = 4) -> Model:
    """Give every named shape one dtype."""
    return tuple(TensorSpec(name, shape, dtype, itemsize) for name, shape in named)


def _gpt(layers: int, width: int, vocab: int, context: int) -> Iterator[Named]:
    yield "wte.weight", (vocab, width)
    yield "wpe.weight", (context, width)
    for i in range(layers):
        yield from norm(f"h.{i}.ln_1", width)
        yield from linear(f"h.{i}.attn.c_attn", width, 3 * width)
        yield from linear(f"h.{i}.attn.c_proj", width, width)
        yield from norm(f"h.{i}.ln_2", width)
        yield from linear(f"h.{i}.mlp.c_fc", width, 4 * width)
        yield from linear(f"h.{i}.mlp.c_proj", 4 * width, width)
    yield from norm("ln_f", width)


def gpt(layers: int, width: int, *, vocab: int = 50257, context: int = 1024) -> Model:
    """List a GPT-2 with a tied head."""
    return as_specs(_gpt(layers, width, vocab, context))


def _llama(layers: int, width: int, ffn: int, kv_width: int, vocab: int, experts: int) -> Iterator[Named]:
    yield "embed_tokens.weight", (vocab, width)
    for i in range(layers):
        at = f"layers.{i}"
        for proj, fan_out in (("q", width), ("k", kv_width), ("v", kv_width), ("o", width)):
            yield f"{at}.self_attn.{proj}_proj.weight", (fan_out, width)
        if experts:
            yield f"{at}.moe.gate.weight", (experts, width)
        for mlp in [f"{at}.moe.experts.{j}" for j in range(experts)] or [f"{at}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (ffn, width)
            yield f"{mlp}.up_proj.weight", (ffn, width)
            yield f"{mlp}.down_proj.weight", (width, ffn)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)


def llama(
    layers: int, width: int, ffn: int, *, kv_width: int | None = None, vocab: int = 32000, experts: int = 0
) -> Model:
    """List a Llama with an untied head; with `experts`, a Mixtral."""
    return as_specs(_llama(layers, width, ffn, kv_width or width, vocab, experts))


def _bert(layers: int, width: int, vocab: int, context: int) -> Iterator[Named]:
    yield "embeddings.word_embeddings.weight", (vocab, width)
    yield "embeddings.position_embeddings.weight", (context, width)
    yield "embeddings.token_type_embeddings.weight", (2, width)
    yield from norm("embeddings.LayerNorm", width)
    for i in range(layers):
        at = f"encoder.layer.{i}"
        for proj in ("query", "key", "value"):
            yield from linear(f"{at}.attention.self.{proj}", width, width)
        yield from linear(f"{at}.attention.output.dense", width, width)
        yield from norm(f"{at}.attention.output.LayerNorm", width)
        yield from linear(f"{at}.intermediate.dense", width, 4 * width)
        yield from linear(f"{at}.output.dense", 4 * width, width)
        yield from norm(f"{at}.output.LayerNorm", width)
    yield from linear("pooler.dense", width, width)


def bert(layers: int, width: int) -> Model:
    """List a BERT encoder with its pooler."""
    return as_specs(_bert(layers, width, vocab=30522, context=512))


def _t5_attention(at: str, width: int, heads: int, *, relative: bool) -> Iterator[Named]:
    for proj in "qkvo":
        yield f"{at}.{proj}.weight", (width, width)
    if relative:
        yield f"{at}.relative_attention_bias.weight", (32, heads)
    yield f"{at}.layer_norm.weight", (width,)


def _t5(layers: int, width: int, ffn: int, heads: int, vocab: int) -> Iterator[Named]:
    yield "shared.weight", (vocab, width)
    for stack in ("encoder", "decoder"):
        for i in range(layers):
            at = f"{stack}.block.{i}"
            yield from _t5_attention(f"{at}.self", width, heads, relative=i == 0)
            if stack == "decoder":
                yield from _t5_attention(f"{at}.cross", width, heads, relative=False)
            yield f"{at}.ffn.wi.weight", (ffn, width)
            yield f"{at}.ffn.wo.weight", (width, ffn)
            yield f"{at}.ffn.layer_norm.weight", (width,)
        yield f"{stack}.final_layer_norm.weight", (width,)


def t5(layers: int, width: int, ffn: int, heads: int) -> Model:
    """List a T5 of the first version: one embedding shared by encoder, decoder and head."""
    return as_specs(_t5(layers, width, ffn, heads, vocab=32128))


def _vit(layers: int, width: int, patch: int, tokens: int, classes: int) -> Iterator[Named]:
    yield "cls_token", (1, 1, width)
    yield "pos_embed", (1, tokens, width)
    yield "patch_embed.proj.weight", (width, 3, patch, patch)
    yield "patch_embed.proj.bias", (width,)
    for i in range(layers):
        yield from norm(f"blocks.{i}.norm1", width)
        yield from linear(f"blocks.{i}.attn.qkv", width, 3 * width)
        yield from linear(f"blocks.{i}.attn.proj", width, width)
        yield from norm(f"blocks.{i}.norm2", width)
        yield from linear(f"blocks.{i}.mlp.fc1", width, 4 * width)
        yield from linear(f"blocks.{i}.mlp.fc2", 4 * width, width)
    yield from norm("norm", width)
    yield from linear("head", width, classes)


def vit(layers: int, width: int) -> Model:
    """List a ViT with 16 x 16 patches of 224 x 224 images."""
    return as_specs(_vit(layers, width, patch=16, tokens=197, classes=1000))


def _resnet(blocks: tuple[int, ...]) -> Iterator[Named]:
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    fan_in = 64
    for stage, count in enumerate(blocks):
        mid = 64 << stage
        for i in range(count):
            at = f"layer{stage + 1}.{i}"
            for j, (into, out, side) in enumerate([(fan_in, mid, 1), (mid, mid, 3), (mid, 4 * mid, 1)], start=1):
                yield f"{at}.conv{j}.weight", (out, into, side, side)
                yield from norm(f"{at}.bn{j}", out)
            if i == 0:
                yield f"{at}.downsample.0.weight", (4 * mid, fan_in, 1, 1)
                yield from norm(f"{at}.downsample.1", 4 * mid)
            fan_in = 4 * mid
    yield from linear("fc", fan_in, 1000)


def resnet(*blocks: int) -> Model:
    """List a bottleneck ResNet with so many blocks in each stage."""
    return as_specs(_resnet(blocks))


MODELS: Mapping[str, Callable[[], Model]] = {
    "GPT 25M": lambda: gpt(8, 512, vocab=256, context=256),
    "GPT-2 small": lambda: gpt(12, 768),
    "GPT-2 medium": lambda: gpt(24, 1024),
    "GPT-2 xl": lambda: gpt(48, 1600),
    "Llama 100M": lambda: llama(12, 768, 2048),
    "Llama 7B": lambda: llama(32, 4096, 11008),
    "BERT base": lambda: bert(12, 768),
    "T5 base": lambda: t5(12, 768, 3072, 12),
    "ViT-B/16": lambda: vit(12, 768),
    "ResNet-50": lambda: resnet(3, 4, 6, 3),
    "MoE 110M": lambda: llama(6, 512, 1024, kv_width=128, experts=8),
    "Mixtral 8x7B": lambda: llama(32, 4096, 14336, kv_width=1024, experts=8),
}
"""The models that the tests and the padding benchmark pack, by name."""
