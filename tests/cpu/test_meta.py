"""Models on the meta device: initialised chunk by chunk, to the bits of a model that is built plainly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from tests.helpers.peak_memory import IS_COUNTED, MIB, NEEDS_COUNT, increase_nbytes
from tests.helpers.ranks import RankFailure, Team
from tests.helpers.shared_training import WIDTH, Block, Net, Task, make_config
from tests.helpers.spread import spread


def manager_with(**keys: Any) -> chunkmem.ChunkManager:
    return chunkmem.ChunkManager(make_config(Task(config=keys)))


class Attended(nn.Module):
    """torch's attention writes to a child's bias, and has no `reset_parameters`; buffers; a module without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.recurrent = nn.GRU(WIDTH, 8, bidirectional=True)
        self.picture = nn.Conv2d(3, 8, 3)
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.words = nn.Embedding(5, 4, padding_idx=2)


class Owner(nn.Module):
    """Draws its own weight when its children are there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.up = nn.Linear(WIDTH, 3)
        self.parts = nn.ParameterList([torch.empty(2, 3), torch.empty(4)])
        self.register_buffer("table", torch.empty(3, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.parts[1].data.uniform_()
        self.parts[0] = nn.Parameter(torch.randn(2, 3))
        self.table.copy_(torch.randperm(3))
        nn.init.ones_(self.up.bias)
        self.up.weight.data.mul_(0.5)


class Starting(nn.Module):
    """Its constructor leaves `reset_parameters` alone, as those of containers often do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)

    def reset_parameters(self) -> None:
        self.up.reset_parameters()


class Bits(nn.Module):
    """In several dtypes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)
        self.double = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.frozen = nn.Linear(WIDTH, 3).requires_grad_(False)
        self.none = nn.Linear(WIDTH, 0)
        self.last = nn.Linear(3, 3)
        self.picture = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "attended": Attended,
    "owner": lambda: nn.Sequential(Owner(), Starting(), Owner()),
    "bits": Bits,
}
PRECISIONS = ["fp32", "bf16"]


def plain_state(name: str) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return dict(MODELS[name]().state_dict())


def build(rank: int, name: str, how: str, keys: dict[str, Any], seed: int = 5) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(seed if rank == 0 else 99)
    with manager_with(**keys) as manager:
        if how == "wrap":
            with torch.device("meta"):
                model = MODELS[name]()
            assert all(param.is_meta for param in model.parameters())
            params = list(model.parameters())
            assert manager.wrap(model) is model
        else:
            with torch.device("meta"), manager.init():
                model = MODELS[name]()
                params = list(model.parameters())
        assert all(found is param for found, param in zip(model.parameters(), params, strict=True))
        assert not any(tensor.is_meta for tensor in (*params, *model.buffers()))
        return manager.state_dict(), torch.get_rng_state()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


@spread(name=MODELS, how=["wrap", "init"], precision=PRECISIONS)
def test_the_bits_of_a_plain_model(name: str, how: str, precision: str) -> None:
    expected = plain_state(name)
    found, random_numbers = build(0, name, how, {"precision": precision})
    assert_equal(found, expected)
    assert torch.equal(random_numbers, torch.get_rng_state())


@pytest.mark.few(2)
@spread(name=MODELS, how=["init", "wrap"], precision=PRECISIONS)
def test_over_ranks(name: str, how: str, precision: str, pair: Team) -> None:
    expected = plain_state(name)
    for found, _ in pair.run(build, name, how, {"precision": precision}):
        assert_equal(found, expected)


def test_a_transformer_initialises_all_of_its_parameters_last() -> None:
    """Its encoder's layers are copies of one in plain PyTorch, and are drawn one by one here."""
    with manager_with() as manager:
        with torch.device("meta"):
            model = nn.Transformer(WIDTH, 2, 2, 1, WIDTH)
        manager.wrap(model)
        state = manager.state_dict()
    for layer in range(2):
        weight, bias = (state[f"encoder.layers.{layer}.linear1.{kind}"] for kind in ("weight", "bias"))
        assert (6 / (4 * WIDTH)) ** 0.5 < weight.abs().max() <= (6 / (2 * WIDTH)) ** 0.5  # by Xavier and Glorot
        assert bias.abs().max() <= WIDTH**-0.5
    assert not torch.equal(state["encoder.layers.0.linear1.bias"], state["encoder.layers.1.linear1.bias"])


class Gpt(nn.Module):
    """Ties the other way round than `Net`, and initialises after that."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 11)
        self.words.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.apply(init_weights)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
    elif isinstance(module, Gpt):
        module.scale.data.fill_(1.0)
    elif isinstance(module, Block):  # what is there is read
        module.norm.weight.data.add_(module.up.weight.detach().sum())


def build_gpt(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with manager_with() as manager, torch.device("meta"):
        model = Gpt()
        manager.wrap(model, param_init_fn=init_weights)
        assert model.head.weight is model.words.weight
        return manager.state_dict()


def test_param_init_fn_is_applied_last(pair: Team) -> None:
    """It sees what the constructors would have left, and ties."""
    torch.manual_seed(3)
    expected = dict(Gpt().state_dict())
    assert_equal(build_gpt(0), expected)
    for found in pair.run(build_gpt):
        assert_equal(found, expected)


def build_gpt_with(rank: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "replicated" else None
    keys: dict[str, Any] = {
        "grouped": {"client": {"opts": {"with_mem_saving_comm": False}}},
        "memory-saving": {"client": {"opts": {"with_mem_saving_comm": True}}},
        "whole": {"release_after_init": True},
    }
    config = make_config(Task(config=keys.get(kind, {})))
    with chunkmem.ChunkManager(config, mesh=mesh) as manager, torch.device("meta"):
        model = Gpt()
        if kind == "on host":
            manager.on_host(model.blocks)
        manager.wrap(model, param_init_fn=init_weights)
        return manager.state_dict()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["grouped", "memory-saving", "on host", "whole", "replicated"])
def test_in_other_surroundings(kind: str, pair: Team) -> None:
    torch.manual_seed(3)
    expected = dict(Gpt().state_dict())
    with Team(4) if kind == "replicated" else contextlib.nullcontext(pair) as ranks:
        for found in ranks.run(build_gpt_with, kind):
            assert_equal(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_go_to_disk(precision: str, tmp_path: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(60)))

    torch.manual_seed(3)
    expected = dict(build().apply(init_weights).state_dict())
    memory = {"device": "16KiB", "host": "80KiB", "disk": {"path": str(tmp_path), "capacity": "8MiB"}}
    torch.manual_seed(3)
    with manager_with(memory=memory, precision=precision) as manager:
        with torch.device("meta"):
            model = build()
        manager.wrap(model, param_init_fn=init_weights)
        report = manager.memory()
        assert report.disk is not None
        assert report.disk.now_nbytes > 100 * 1024
        assert_equal(manager.state_dict(), expected)


def test_values_that_exist_stay() -> None:
    """Here parameters are on the meta device, and others not; as with accelerate, buffers are there."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2] = nn.Linear(4, 2)
    model[1].running_var = torch.full((4,), 7.0)
    model[2].bias = nn.Parameter(torch.empty(2, device="meta"))
    kept = model[2].weight.detach().clone()
    with manager_with() as manager:
        manager.wrap(model)
        state = manager.state_dict()
    assert torch.equal(state["2.weight"], kept)
    assert state["2.bias"].abs().max() <= 0.5
    assert torch.equal(state["1.weight"], torch.ones(4))
    assert int(state["1.num_batches_tracked"]) == 0


class Excluding(nn.Module):
    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4)
        if manager is None:
            self.norm = nn.LayerNorm(4)
            self.down = nn.Linear(4, 4)
        else:
            with manager.exclude():
                self.norm = nn.LayerNorm(4)
                self.down = nn.Linear(4, 4)


def build_excluding(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    with manager_with() as manager:
        with torch.device("meta"), manager.init():
            model = Excluding(manager)
        return manager.state_dict(model)


def test_excluded_modules_are_initialised_on_every_rank(pair: Team) -> None:
    torch.manual_seed(0)
    expected = dict(Excluding(None).state_dict())
    for found in pair.run(build_excluding):
        assert_equal(found, expected)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_tiled_layer_draws_as_a_whole_one(on_meta: bool) -> None:
    torch.manual_seed(5)
    expected = dict(Net().state_dict())
    torch.manual_seed(5)
    with manager_with(with_tiling_linear=200) as manager:
        with torch.device("meta" if on_meta else "cpu"):
            model = Net()
        manager.wrap(model)
        assert any("tile" in name for name, _ in model.named_parameters())
        assert_equal(manager.state_dict(), expected)


def test_it_trains_as_a_plain_model() -> None:
    """A hook of the user's that was there before is there still."""

    def train(on_meta: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(1)
        seen: list[Tensor] = []
        with manager_with() as manager:
            with torch.device("meta" if on_meta else "cpu"):
                model = Net()
            model.blocks[0].up.weight.register_hook(lambda grad: seen.append(grad.clone()))
            manager.wrap(model)
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            for _ in range(3):
                manager.backward(model(torch.arange(6)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            assert len(seen) == 3
            return seen, manager.state_dict()

    (expected_hook, expected), (found_hook, found) = train(False), train(True)
    assert all(map(torch.equal, expected_hook, found_hook))
    assert_equal(found, expected)


# What cannot get values.


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class OwnBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight.data[1:].zero_()
        nn.init.zeros_(self.bias)


class Kept(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.mask = torch.ones(4)


class Reshaped(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight = nn.Parameter(torch.zeros(2))


class Raising(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ZeroDivisionError


FAILURES: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "no initialiser": (
        OwnNorm,
        chunkmem.LayoutError,
        r"^parameter 1.weight \(4,\) is on the meta device and has no values, and its module, a OwnNorm, has no "
        r"reset_parameters\(\) that gives it some; give the model to manager.wrap\(model, param_init_fn=...\)",
    ),
    "buffer": (OwnBuffer, chunkmem.LayoutError, r"^buffer 1.mask \(4,\) of a model on the meta device has no values"),
    "half": (
        lambda: Half(3, 4),
        chunkmem.LayoutError,
        r"^parameter 1.weight \(4, 3\) of a model on the meta device has no values, or not all, when its Half has been",
    ),
    "attribute": (Kept, chunkmem.LayoutError, r"^attribute 1.mask is a tensor on the meta device, and no parameter"),
    "other shape": (
        lambda: Reshaped(3, 4),
        chunkmem.LayoutError,
        r"^parameter 1.weight \(4, 3\) of a model on the meta device was replaced by one of \(2,\) on cpu",
    ),
    "raises": (lambda: Raising(3, 4), ZeroDivisionError, "^$"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_gets_no_values_is_named(what: str) -> None:
    """The model is as it was, and can be packed otherwise."""
    make, error, message = FAILURES[what]
    with manager_with() as manager:
        with torch.device("meta"):
            model = nn.Sequential(nn.BatchNorm1d(4), make(), nn.Linear(4, 4))
        params = list(model.parameters())
        with pytest.raises(error, match=message):
            manager.wrap(model)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert all(map(lambda one, other: one is other, params, model.parameters()))
        assert all(type(param) is nn.Parameter and param.requires_grad for param in params)
        assert type(model[0]._parameters) is dict
        assert manager.memory().device.now_nbytes == manager.memory().host.now_nbytes == 0
        if what not in ("no initialiser", "buffer"):
            return

        def initialise(module: nn.Module) -> None:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(2)

        manager.wrap(model, param_init_fn=initialise)
        assert all(bool((value == 2).all()) for value in manager.state_dict().values())
        assert all(bool((buffer == 2).all()) for buffer in model.buffers())


class LoraLinear(nn.Module):
    """As in peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    def reset_lora_parameters(self) -> None:
        nn.init.zeros_(self.lora_B["default"].weight)


LoraLinear.__module__ = "peft.tuners.lora.layer"


def test_adapters_are_not_initialised_as_layers() -> None:
    """They begin as zeros, so that the model is what it was."""
    with torch.device("meta"):
        model = nn.Sequential(LoraLinear())
    with manager_with() as manager:
        with pytest.raises(
            chunkmem.LayoutError, match=r"^parameter 0.lora_A.default.weight \(2, 4\) of an adapter is on"
        ):
            manager.wrap(model)
        manager.wrap(model, param_init_fn=init_weights)


def fail_on_one(rank: int) -> None:
    with manager_with() as manager, torch.device("meta"):
        model = Net()

        def raise_there(module: nn.Module) -> None:
            if rank == 1 and isinstance(module, Block):
                raise ZeroDivisionError

        manager.wrap(model, param_init_fn=raise_there)


def test_a_rank_that_fails_is_named(pair: Team) -> None:
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        pair.run(fail_on_one)


# What is held meanwhile.


def measure(rank: int, precision: str, how: str) -> tuple[int, int]:
    """Return by how many bytes memory grows at the most, and how many chunks have then."""
    config = {"memory": {"device": "8MiB", "host": "2GiB"}, "default_chunk_size": 1 << 20, "precision": precision}
    for width in (8, 1023):  # what is loaded once
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager, torch.device("meta"):
            shapes = [(width, width + 1), (width + 1, width)] * 20
            model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
            init = init_weights if how == "param_init_fn" else None
            increase = increase_nbytes(partial(manager.wrap, model, param_init_fn=init))
            held = manager.memory()
    return increase, held.device.now_nbytes + held.host.now_nbytes


CHUNK_NBYTES = 4 * MIB
MEASURED = {"precision": ["fp32", "bf16"], "how": ["param_init_fn", "reset_parameters"]}


@pytest.mark.few(1)
@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
@spread(**MEASURED)
def test_two_chunks_more_are_enough(precision: str, how: str) -> None:
    """160 MiB of weights, in bf16 240; a chunk has 4. In a process of its own, whose heap is small."""
    with Team(1) as alone:
        ((increase, held),) = alone.run(measure, precision, how)
    assert held > 159 * MIB
    assert increase - held <= 2 * CHUNK_NBYTES + 32 * MIB


@pytest.mark.few(1)
@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
@spread(**MEASURED)
def test_no_rank_holds_the_whole_model(precision: str, how: str) -> None:
    with Team(2) as fresh:
        for increase, held in fresh.run(measure, precision, how):
            assert held < 170 * MIB / 2 * (1 if precision == "fp32" else 1.5)
            assert increase - held <= 2 * CHUNK_NBYTES + 32 * MIB


def test_weights_that_no_tier_can_hold() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    with (
        manager_with(memory={"device": "4MiB", "host": "8MiB"}) as manager,
        pytest.raises(chunkmem.CapacityError, match="the weights take 16"),
    ):
        manager.wrap(model)
    assert all(param.is_meta for param in model.parameters())


# Loaded, and not initialised.


class Loaded(nn.Module):
    """One buffer is saved and one is not; nothing initialises one of the parameters, and the saved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = OwnNorm()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.up(x)) * self.scale.weight + self.table + self.count
        return result


def load_into(rank: int, folder: str, how: str, precision: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    plain = Loaded()
    nn.init.normal_(plain.scale.weight)
    x = torch.randn(3, WIDTH)
    with manager_with(precision=precision) as saved:
        saved.wrap(plain)
        saved.save(folder)
        state = saved.state_dict()
    with manager_with(precision=precision) as manager:
        with torch.device("meta"):
            model = Loaded()
        random_numbers = torch.get_rng_state()
        manager.wrap(model, skip_init=True)
        assert torch.equal(torch.get_rng_state(), random_numbers)
        assert torch.equal(model.table, torch.arange(4.0))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        attempts: list[Callable[[], object]] = [
            lambda: model(x),
            manager.gather().__enter__,
            lambda: manager.save(folder),
            lambda: manager.save_pretrained(folder),
            manager.state_dict,
            optimizer.step,
        ]
        if manager.runtime.ranks.size == 1:  # else nobody reads one without `gather`
            attempts.append(lambda: model.up.weight.sum())
        for attempt in attempts:
            with pytest.raises(
                chunkmem.StateError, match=r"^parameter up.weight \(4, 16\) has no values yet, nor have"
            ):
                attempt()
        if how == "load":
            manager.load(folder)
        elif how == "load_state_dict":
            manager.load_state_dict(state)
        else:
            first = {"up.weight": state["up.weight"]}
            model.load_state_dict(first, strict=False)
            with pytest.raises(chunkmem.StateError, match=r"^parameter up.bias \(4,\) has no values yet, nor have"):
                model(x)
            model.load_state_dict({key: value for key, value in state.items() if key != "count"}, strict=False)
            with pytest.raises(
                chunkmem.StateError, match=r"^buffer count \(\) has no values yet: the model was packed"
            ):
                model(x)
            model.load_state_dict(state)
        loss = model(x).float().square().sum()
        assert bool(torch.isfinite(loss))
        manager.backward(loss)
        found = manager.state_dict()
        assert torch.equal(found["count"], torch.tensor(3))
        optimizer.step()
        return {key: value for key, value in found.items() if "running" not in key and "batches" not in key}


@pytest.mark.few(2)
@spread(how=["load", "load_state_dict", "in parts"], precision=PRECISIONS, size=[1, 2])
def test_skip_init_waits_for_what_is_loaded(how: str, precision: str, size: int, pair: Team, tmp_path: Any) -> None:
    torch.manual_seed(1)
    plain = Loaded()
    nn.init.normal_(plain.scale.weight)
    expected = {key: v for key, v in plain.state_dict().items() if "running" not in key and "batches" not in key}
    args = str(tmp_path / "saved"), how, precision
    for found in pair.run(load_into, *args) if size == 2 else [load_into(0, *args)]:
        assert_equal(found, expected)


def test_a_buffer_that_is_not_saved_is_not_awaited() -> None:
    with torch.device("meta"):
        model = OwnBuffer()
    with manager_with() as manager, pytest.raises(chunkmem.LayoutError, match=r"^buffer .*mask \(4,\) of a model on"):
        manager.wrap(model, skip_init=True)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
