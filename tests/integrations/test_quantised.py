"""Frozen bases of fewer bits, with adapters: those of bitsandbytes' 4 bits move, the others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from tests.helpers.libraries import AMPLE_NBYTES, Side, llama, manager_of, same
from tests.helpers.twins import cpu_only
from tests.integrations.test_peft import lora, train

peft = pytest.importorskip("peft", minversion="0.21")

pytestmark = [pytest.mark.full, cpu_only, pytest.mark.filterwarnings("ignore::FutureWarning")]


def with_linears(make: Any) -> Any:
    """A frozen model whose linear layers in blocks `make` has replaced."""
    model = llama().requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "proj" in name:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, make(layer))
    return model


def in_4_bits(layer: nn.Linear) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def in_8_bits(layer: nn.Linear) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_first", [True, False], ids=["adapter, wrap", "wrap, adapter"])
def test_a_base_in_4_bits_moves(is_first: bool) -> None:
    """Its bytes are a parameter like others, and what says how to read them stays with it."""
    pytest.importorskip("bitsandbytes", minversion="0.50")

    def scenario(side: Side) -> Any:
        base = with_linears(in_4_bits)
        base = base if is_first else side.ready(base)
        torch.manual_seed(6)
        model = peft.get_peft_model(base, lora())
        model = side.ready(model) if is_first else model
        seen = train(model, side.adamw(model.parameters()))
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return {"seen": seen, "weights": trained}

    same(scenario)


def test_a_base_in_8_bits_of_bitsandbytes_is_refused_by_name() -> None:
    """It keeps a second tensor over the memory of each weight: the error spoke of views and state_dicts."""
    pytest.importorskip("bitsandbytes", minversion="0.50")
    with manager_of(AMPLE_NBYTES) as manager:
        model = with_linears(in_8_bits)
        message = r"parameter model\.layers\.0\.self_attn\.q_proj\.weight is a Int8Params of bitsandbytes.*4 bits"
        with pytest.raises(chunkmem.LayoutError, match=message):
            manager.wrap(model)


def test_a_base_in_8_bits_of_torchao_is_refused_by_name() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    with manager_of(AMPLE_NBYTES) as manager:
        model = llama()
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        with pytest.raises(chunkmem.LayoutError, match=r"parameter .* is a Int8Tensor .*only plain dense tensors"):
            manager.wrap(model)
