"""Models of transformers that are built on the meta device: initialised as `post_init` does, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.libraries import LLAMA, manager_of
from tests.helpers.peak_memory import IS_COUNTED, MIB, NEEDS_COUNT, anonymous_increase_nbytes, increase_nbytes
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


# Memory.

LARGE = LLAMA | {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 4, "num_attention_heads": 8}
"""193 MiB of weights, of which one has 11."""
SIZES: dict[str, Any] = {"small": LLAMA, "large": LARGE}
CHUNK_NBYTES = 16 * MIB


def measure(rank: int, how: str, folder: Path) -> tuple[int, int]:
    """Return by how many bytes memory grows at the most, and how many chunks have then."""
    import transformers

    keys: dict[str, Any] = {"default_chunk_size": CHUNK_NBYTES // 4, "memory": {"device": "64MiB", "host": "1GiB"}}
    kept: list[Any] = []

    def wrap(manager: chunkmem.ChunkManager, size: str) -> None:
        config = transformers.LlamaConfig(**SIZES[size])
        with CONTEXTS[how]():
            model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)
        kept.append(manager.wrap(model))

    def load(manager: chunkmem.ChunkManager, size: str) -> None:
        with manager.init():
            kept.append(transformers.LlamaForCausalLM.from_pretrained(folder / size))

    run, count = (load, anonymous_increase_nbytes) if how == "from_pretrained" else (wrap, increase_nbytes)
    for size in SIZES:  # the small one first: what is loaded once
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(keys)) as manager:
            increase = count(partial(run, manager, size))
            held = manager.memory()
    return increase, held.device.now_nbytes + held.host.now_nbytes


@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", [*CONTEXTS, "from_pretrained"])
def test_no_more_than_chunks_and_a_few_weights(how: str, size: int, tmp_path: Path) -> None:
    if how == "from_pretrained":
        for name, options in SIZES.items():
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).save_pretrained(tmp_path / name)
    with Team(size) as fresh:
        for increase, held in fresh.run(measure, how, tmp_path, timeout_s=120.0):
            assert held < 200 * MIB / size + 2 * CHUNK_NBYTES
            assert increase - held <= 2 * CHUNK_NBYTES
