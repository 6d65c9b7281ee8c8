"""Recomputed calls of managed models: losses, weights, states and buffers of plain PyTorch without recomputing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.activations.call_state import CallState
from chunkmem.data.types import Tier
from tests.helpers.audit import assert_as_predicted, audit

Run = Callable[..., Any]
NUM_STEPS = 5


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def nested(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return chunkmem.checkpoint(lambda *values: chunkmem.checkpoint(function, *values, **kwargs), *args)


class Model(nn.Module):
    """Runs its blocks by `run`, one by one, or in two segments."""

    run: Run = staticmethod(plainly)
    segments = 0

    def body(self, blocks: nn.ModuleList, x: Tensor) -> Any:
        if self.segments:
            return chunkmem.checkpoint_sequential(blocks, self.segments, x)
        for block in blocks:
            x = self.run(block, x)
        return x


class CNN(Model):
    """BatchNorm, InstanceNorm with running statistics, an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if index == 0 else 8, 8, 3, padding=1),
                nn.BatchNorm2d(8, momentum=None if index == 1 else 0.1),
                nn.ReLU(inplace=True),
                nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            )
            for index in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.blocks, x).mean((2, 3)))
        return y


class GPT(Model):
    """Dropout, a tied head, a position table and a mask as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.register_buffer("positions", torch.arange(7), persistent=False)
        self.place = nn.Embedding(7, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.blocks, self.words(ids) + self.place(self.positions)))
        return y


class Spectral(Model):
    """Both kinds of spectral norm, weight norm, and a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(3))
        self.head = nn.Linear(12, 5)

    @staticmethod
    def _block() -> nn.Module:
        parametrized = torch.nn.utils.parametrizations
        return nn.Sequential(
            parametrized.spectral_norm(nn.Linear(12, 12)), nn.Tanh(), parametrized.weight_norm(nn.Linear(12, 12))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.blocks, x))
        return y


class LSTM(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recurrent() for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.blocks, x).mean(1))
        return y


class Recurrent(nn.Module):
    """Two layers with dropout between them; how often it was called is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 12, num_layers=2, dropout=0.3, batch_first=True)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.lstm(x)[0] / self.num_calls
        return y


class Llama(Model):
    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=11, max_position_embeddings=16, **sizes))

    def forward(self, ids: Tensor) -> Tensor:
        if self.run is not plainly:
            self.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=self.run)
        y: Tensor = self.model(ids).logits
        return y


MODELS: dict[str, type[Model]] = {"cnn": CNN, "gpt": GPT, "spectral": Spectral, "lstm": LSTM, "llama": Llama}


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    if name in ("gpt", "llama"):
        ids = torch.randint(0, 11, (3, 7), generator=draw)
        return ids, ids.roll(1, 1)
    shape = {"cnn": (4, 3, 6, 6), "spectral": (6, 12), "lstm": (3, 5, 12)}[name]
    return torch.randn(shape, generator=draw), torch.randint(0, 5, shape[:1], generator=draw)


def losses_of(name: str, model: nn.Module, optimizer: Any, *, after_backward: Callable[[], None]) -> list[float]:
    torch.manual_seed(3)
    found = []
    for step in range(NUM_STEPS):
        inputs, targets = batch_of(name, step)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def plain(name: str) -> tuple[list[float], dict[str, Tensor], dict[int, Any]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    losses = losses_of(name, model, optimizer, after_backward=lambda: None)
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def managed(name: str, run: Run, segments: int, device_nbytes: int) -> tuple[list[float], Any, Any, int]:
    config = {"default_chunk_size": 1024, "memory": {"device": device_nbytes, "host": 64 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[name]()
        model.run, model.segments = run, segments
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01)

        def nothing_is_held() -> None:
            manager.runtime.modules.access.relieve()  # as where room is needed: weight norm leaves references a while
            chunks = manager.runtime.memory.store.chunks.values()
            staying = manager.runtime.modules.access.resident
            pinned = [chunk for chunk in chunks for replica in chunk.replicas.values() for _ in range(replica.pins)]
            assert sorted(chunk.label for chunk in pinned) == sorted(chunk.label for chunk in staying)

        losses = losses_of(name, model, optimizer, after_backward=nothing_is_held)
        audit(manager)
        required = manager.memory().device.required_nbytes
        return losses, manager.state_dict(), optimizer.state_dict()["state"], required


WAYS: dict[str, tuple[Run, int]] = {
    "one by one": (chunkmem.checkpoint, 0),
    "nested": (nested, 0),
    "segments": (plainly, 2),
    "to the end": (partial(chunkmem.checkpoint, early_stop=False), 0),
}


def cases() -> list[Any]:
    found = []
    for name in MODELS:
        marks = [] if name != "llama" or importlib.util.find_spec("transformers") else [pytest.mark.skip]
        for way in WAYS:
            if (name, way) not in {("llama", "segments"), ("llama", "nested")}:
                found.append(pytest.param(name, way, marks=marks, id=f"{name}-{way}"))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "way"), cases())
def test_training_is_plain_pytorch_without_recomputation(name: str, way: str) -> None:
    losses, weights, states = plain(name)
    run, segments = WAYS[way]
    device_nbytes = 32 << 20
    for _ in ("all", "smallest"):
        found_losses, found, found_states, required = managed(name, run, segments, device_nbytes)
        assert found_losses == losses
        assert found.keys() == weights.keys()
        assert [key for key, value in weights.items() if not torch.equal(value, found[key])] == []
        for index, state in states.items():
            assert all(torch.equal(value, found_states[index][key]) for key, value in state.items()), index
        device_nbytes = required


def test_an_error_in_a_recomputation_is_retried_cleanly() -> None:
    """Under a manager: nothing stays pinned, and the step is done again with the same result."""
    outcomes = []
    for fails in (False, True):
        config = {"default_chunk_size": 1024, "memory": {"device": 32 << 10, "host": 64 << 20}}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
            torch.manual_seed(0)
            with manager.init():
                model = CNN()
            model.run = chunkmem.checkpoint
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01)
            for step in range(4):
                if fails and step == 2:
                    state = {key: value.clone() for key, value in model.named_buffers()}
                    handle = model.blocks[1][1].register_forward_pre_hook(fail_in_backward)
                    with pytest.raises(ArithmeticError, match="injected"):
                        F.cross_entropy(model(batch_of("cnn", step)[0]), batch_of("cnn", step)[1]).backward()
                    handle.remove()
                    optimizer.zero_grad()
                    assert set(buffers_after(model, state)) == {1}  # the first run counts, as in plain PyTorch
                    with torch.no_grad():
                        for key, value in model.named_buffers():
                            value.copy_(state[key])
                F.cross_entropy(model(batch_of("cnn", step)[0]), batch_of("cnn", step)[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            chunks = manager.runtime.memory.store.chunks.values()
            num_staying = len(manager.runtime.modules.access.resident)
            assert sum(r.pins for chunk in chunks for r in chunk.replicas.values()) == num_staying
            outcomes.append(manager.state_dict())
    assert all(torch.equal(value, outcomes[1][key]) for key, value in outcomes[0].items())


def buffers_after(model: nn.Module, before: dict[str, Tensor]) -> list[int]:
    return [int(value - before[key]) for key, value in model.named_buffers() if key.endswith("1.num_batches_tracked")]


def fail_in_backward(*_: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise ArithmeticError("injected")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_a_cache_of_transformers_is_as_without_recomputing() -> None:
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=11, max_position_embeddings=16, attn_implementation="eager", **sizes)
    found = []
    for run in (plainly, chunkmem.checkpoint):
        torch.manual_seed(0)
        attentions = nn.ModuleList(LlamaAttention(config, index) for index in range(2))
        rotary = LlamaRotaryEmbedding(config)
        cache = DynamicCache(config=config)
        x = torch.randn(2, 3, 16, requires_grad=True)
        y = x
        for start in (0, 3):
            places = rotary(y, torch.arange(start, start + 3)[None])
            for attention in attentions:
                y = y + run(attention, y, places, None, past_key_values=cache)[0]
        y.square().sum().backward()
        found.append([x.grad, *[p.grad for p in attentions.parameters()], cache.layers[0].keys, cache.layers[1].values])
        assert cache.get_seq_length() == 6
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_the_smallest_cap_holds_and_steps_are_as_predicted() -> None:
    _, _, _, required = managed("gpt", chunkmem.checkpoint, 0, 32 << 20)
    config = {"default_chunk_size": 1024, "memory": {"device": required, "host": 64 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = GPT()
        model.run = chunkmem.checkpoint
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01)
        losses_of("gpt", model, optimizer, after_backward=lambda: None)
        assert manager.runtime.memory.store.pools[Tier.DEVICE].ledger.peak_nbytes <= required
        assert_as_predicted(manager)


def test_what_a_managed_module_has_in_place_of_methods_is_no_state_of_a_call() -> None:
    plain = CNN().blocks[0]
    with chunkmem.ChunkManager() as manager:
        model = CNN()
        manager.wrap(model)
        managed = model.blocks[0]
        reached = [len(CallState(block, ())._containers) for block in (plain, managed)]
    assert reached[0] == reached[1]
