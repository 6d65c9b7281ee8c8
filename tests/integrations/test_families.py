"""Model families of transformers: each reads its weights in a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.helpers.libraries import LLAMA, VOCAB, Side, same, tokens
from tests.helpers.twins import cpu_only

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]

HEADS = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA = LLAMA | {"head_dim": 8, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", HEADS | {"intermediate_size": 64, "max_position_embeddings": 32}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | EXPERTS),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", LLAMA | EXPERTS | {"head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", LLAMA | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        HEADS | {"ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", HEADS | {"intermediate_size": 64}),
}


def builder_of(family: str, dtype: torch.dtype) -> Callable[[], Any]:
    model, config, options = FAMILIES[family]

    def build() -> Any:
        torch.manual_seed(5)
        return getattr(transformers, model)(getattr(transformers, config)(**options)).to(dtype)

    return build


def train(side: Side, family: str, dtype: torch.dtype, *, steps: int) -> Any:
    model = side.ready(builder_of(family, dtype)())
    optimizer = side.adamw(model.parameters())
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        batch = tokens(2, seed=step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        seen += [loss.item(), clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, "weights": dict(model.state_dict())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_in_plain_pytorch(family: str, dtype: torch.dtype) -> None:
    """Built in fp32, and in bf16 as `from_pretrained` builds: dropout, tied weights, experts, clipping."""
    same(lambda side: train(side, family, dtype, steps=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["keep", "offload", "recompute", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_does_with_managed_activations(family: str, policy: str, dtype: torch.dtype) -> None:
    same(lambda side: train(side, family, dtype, steps=5), activations={"policy": policy})
