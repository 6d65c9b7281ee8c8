"""Models of transformers that are built on the meta device: initialised as `post_init` does, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.libraries import LLAMA, manager_of
from tests.helpers.ranks import Team
from tests.helpers.twins import assert_equal, cpu_only
from tests.integrations.test_families import FAMILIES

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]
AMPLE_NBYTES = 1 << 24


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as found:
        yield found


@contextmanager
def empty_weights() -> Iterator[None]:
    """What `accelerate.init_empty_weights()` does: parameters go to the meta device when they are registered."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "register_parameter", register_empty)
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {"meta": lambda: torch.device("meta"), "empty weights": empty_weights}


def make(family: str, dtype: torch.dtype) -> Any:
    import transformers

    model, config, options = FAMILIES[family]
    return getattr(transformers, model)._from_config(getattr(transformers, config)(**options), dtype=dtype)


def build(rank: int, family: str, context: str, dtype: torch.dtype, precision: str = "fp32") -> dict[str, Tensor]:
    torch.manual_seed(5 + rank)
    with manager_of(AMPLE_NBYTES, precision=precision) as manager:
        with CONTEXTS[context]():
            model = make(family, dtype)
        # Others are drawn from the same numbers as those that a plain model gets.
        torch.manual_seed(5 + rank)
        assert all(param.is_meta for param in model.parameters())
        manager.wrap(model)
        return manager.state_dict()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_from_config(family: str, context: str, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    model = make(family, dtype)
    assert_equal(build(0, family, context, dtype), dict(model.state_dict()))


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_are_not_saved(family: str) -> None:
    """Such as the frequencies of rotary embeddings."""
    expected = buffers_of(make(family, torch.float32))
    with manager_of(AMPLE_NBYTES) as manager:
        with torch.device("meta"):
            model = make(family, torch.float32)
        manager.wrap(model)
        assert_equal(buffers_of(model), expected)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_over_ranks(family: str, context: str, team: Team) -> None:
    torch.manual_seed(5)
    expected = dict(make(family, torch.float32).state_dict())
    for found in team.run(build, family, context, torch.float32, "bf16", timeout_s=120.0):
        assert_equal(found, expected)


def test_the_automatic_classes() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    torch.manual_seed(5)
    expected = dict(transformers.AutoModelForCausalLM.from_config(config).state_dict())
    with manager_of(AMPLE_NBYTES) as manager:
        torch.manual_seed(5)
        with manager.init(), torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert next(model.parameters()).dtype is torch.float32
        assert_equal(manager.state_dict(), expected)
