"""`TiledLinear` in chunks: bit for bit the same tiles in plain PyTorch, at caps that fall with the tile."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem import TiledLinear
from chunkmem.packing.tiling import tile_linears
from tests.cpu.test_precision import config as low_config
from tests.helpers.any_class import ClassTwin
from tests.helpers.lanes import adversarial
from tests.helpers.low_precision import LowPlain
from tests.helpers.spread import spread
from tests.helpers.training import (
    Chunked,
    Trainer,
    Variant,
    assert_same,
    capped,
    footprint,
    train_chunked,
    train_plain,
)
from tests.helpers.twins import CHUNK_NUMEL, WIDTH, Blocks, Twin, assert_equal, config, copied, cpu_only, features, same
from tests.helpers.zoo import ZOO, ZooModel

STEPS = 10
CHUNK_NBYTES = 4 * CHUNK_NUMEL


def build_tiled(case: ZooModel, max_numel: int) -> nn.Module:
    model = case.build()
    tile_linears(model, max_numel=max_numel)
    assert any(isinstance(module, TiledLinear) for module in model.modules())
    return model


TILED = {
    case.name: replace(
        case, name=f"tiled {case.name}", build=functools.partial(build_tiled, case, 500), chunk_numel=1024
    )
    for case in ZOO
    if case.name in ("gpt", "vit", "reused")
}
WAYS = {"plain": Variant("plain"), "checkpoint": Variant("checkpoint", early_stop=True)}


@pytest.mark.few(1)
@spread(name=TILED, way=WAYS)
def test_ten_steps_are_those_of_the_same_tiles_in_plain_pytorch(name: str, way: str) -> None:
    """With ample room and at the smallest cap, every step on its plan."""
    case, variant = TILED[name], WAYS[way]
    expected = train_plain(case, variant, STEPS)
    sizes = footprint(case, variant)
    for device_nbytes in (8 * sizes.param_nbytes, sizes.required_nbytes):
        assert_same(train_chunked(case, variant, STEPS, capped(case, device_nbytes)), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_late_copies_do_not_show(seed: int) -> None:
    case, variant = TILED["gpt"], WAYS["plain"]
    device_nbytes = footprint(case, variant).required_nbytes
    with chunkmem.ChunkManager(capped(case, device_nbytes), make_lanes=adversarial(seed)) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        assert_same(Trainer(case, variant, Chunked(manager)).run(STEPS), train_plain(case, variant, STEPS))


class LowTiled(LowPlain):
    """Its master weights by the names of the untiled layers."""

    def __init__(self, case: ZooModel) -> None:
        super().__init__(torch.bfloat16)
        self.case = case

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        whole = self.case.build()
        masters = {name: self.masters[param] for name, param in model.named_parameters(remove_duplicate=False)}
        whole.load_state_dict(masters | dict(model.named_buffers()))
        return whole.state_dict()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt", "reused"])
def test_bf16(name: str) -> None:
    case, variant = TILED[name], WAYS["plain"]
    expected = Trainer(case, variant, LowTiled(case)).run(STEPS)
    device_nbytes = 32 << 20
    for _ in range(2):
        with chunkmem.ChunkManager(low_config(case, device_nbytes)) as manager:
            assert_same(Trainer(case, variant, Chunked(manager)).run(STEPS), expected)
            device_nbytes = manager.memory().device.required_nbytes


# The smallest cap.

WIDE = 8 * WIDTH


class Wide(nn.Module):
    """A feed-forward block of which each weight is eight chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE, bias=False)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x)))
        return result


def wide(num_tiles: int) -> nn.Module:
    model = Wide()
    tile_linears(model, max_numel=WIDTH * WIDE // num_tiles)
    return model


@cpu_only
@pytest.mark.parametrize("num_tiles", [1, 2, 4, 8])
def test_the_smallest_cap_is_a_tile_and_its_gradient(num_tiles: int) -> None:
    required_nbytes = same(functools.partial(wide, num_tiles), lambda twin: twin.steps(*range(STEPS)))
    assert required_nbytes == 2 * 8 * CHUNK_NBYTES // num_tiles


@cpu_only
@pytest.mark.parametrize(("splits", "nbytes"), [(1, 2**20), (2, 2**18), (4, 2**16)])
def test_the_smallest_cap_of_a_wide_layer(splits: int, nbytes: int) -> None:
    """1 MiB, 256 KiB and 64 KiB in 1, 4 and 16 tiles: a quarter of a layer's side is a sixteenth of its weight."""

    def build() -> nn.Module:
        layers = [TiledLinear(256, 512, False, in_splits=splits, out_splits=splits), nn.Tanh()]
        return nn.Sequential(*layers, TiledLinear(512, 256, False, in_splits=splits, out_splits=splits))

    def scenario(twin: Twin) -> list[float]:
        return [twin.step(features(seed, shape=(2, 256))) for seed in range(3)]

    ample = chunkmem.Config.from_dict({"memory": {"device": 2**24, "host": 2**26}, "default_chunk_size": 2**13})
    plain = Twin(None, build)
    expected = copied(scenario(plain)), plain.left()
    for each in (ample, replace(ample, memory=replace(ample.memory, device=nbytes))):
        with chunkmem.ChunkManager(each) as manager:
            twin = Twin(manager, build)
            assert_equal((copied(scenario(twin)), twin.left()), expected)
            assert manager.memory().device.required_nbytes == nbytes
    with chunkmem.ChunkManager(replace(ample, memory=replace(ample.memory, device=nbytes - 1))) as manager:
        twin = Twin(manager, build)
        with pytest.raises(chunkmem.CapacityError):
            scenario(twin)


# What a user reads, writes, saves and loads.


class Tiled(Blocks):
    """Chunks of narrow layers around a tiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(TiledLinear(WIDTH, WIDTH, in_splits=2, out_splits=3))


class Untiled(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(WIDTH, WIDTH))


SMALL_NBYTES = 4 * CHUNK_NBYTES
SAVED: dict[str, Callable[[Twin], Any]] = {
    "manager": lambda twin: twin.manager and twin.manager.state_dict(),
    "model": lambda twin: twin.model.state_dict(),
    "model, variables": lambda twin: twin.model.state_dict(keep_vars=True),
}


@pytest.mark.parametrize("how", SAVED)
def test_the_state_is_that_of_the_untiled_model(how: str) -> None:
    expected = Twin(None, Untiled).model.state_dict()
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        state = SAVED[how](Twin(manager, Tiled))
        assert type(state) is type(expected)
        assert_equal(state, expected)
        assert state._metadata == expected._metadata


def load(twin: Twin, state: Mapping[str, Any], **options: Any) -> Any:
    owner = twin.model if twin.manager is None else twin.manager
    return owner.load_state_dict(state, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["manager", "model", "assign"])
def test_loading_an_untiled_state_between_steps(how: str) -> None:
    state = copied({key: value + 0.5 for key, value in Twin(None, Untiled).model.state_dict().items()})

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0, 1)
        if how == "manager":
            keys = load(twin, state)
        else:
            keys = twin.model.load_state_dict(state, assign=how == "assign" and twin.manager is not None)
        return [losses, tuple(map(list, keys)), twin.weights(), twin.steps(2)]

    same(Tiled, scenario)


def test_what_does_not_fit_is_refused_by_the_name_of_the_whole() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Tiled)
        before = twin.weights()
        name = "blocks.3.weight"
        cases: list[tuple[dict[str, Any], str]] = [
            ({key: value for key, value in before.items() if key != name}, f"missing {name};"),
            (before | {name: torch.ones(3, 3)}, rf"{name} is \(3, 3\) instead of \(16, 16\);"),
            (before | {name: 1.0}, f"{name} is a float, not a tensor;"),
        ]
        for state, message in cases:
            with pytest.raises(chunkmem.CheckpointError, match=message):
                manager.load_state_dict(state)
        part = {key: value + 1 for key, value in before.items() if key.startswith("blocks.3.")}
        keys = manager.load_state_dict(part, strict=False)
        assert set(keys.missing_keys) == set(before) - set(part)
        assert_equal(twin.weights(), before | part)


def test_expected_names_need_no_values() -> None:
    """To ask a managed model for them joined tiles, so that each had to come to DEVICE."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Tiled)
        state = twin.weights()
        moved = manager.memory().moved
        expected = manager.runtime.modules.overrides.expected_state(twin.model)
        assert {key: value.shape for key, value in expected.items()} == {k: v.shape for k, v in state.items()}
        assert manager.memory().moved == moved


def test_gathered_tiles() -> None:
    with chunkmem.ChunkManager(config(8 * CHUNK_NBYTES)) as manager:
        layer = Twin(manager, Tiled).model.blocks[3]
        with manager.gather(layer), torch.no_grad():
            for tile in layer.parameters():
                tile.fill_(2.0)
        assert all(bool((value == 2).all()) for value in layer.state_dict().values())


def test_to_gather_the_whole_names_the_tiles() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        layer = Twin(manager, functools.partial(wide, 2)).model.up
        for whole in (layer.weight, layer.weight.data, [layer.weight]):
            with (
                pytest.raises(
                    chunkmem.StateError, match=r"in 2 parameters, tile_0_0\.\w+, tile_1_0\.\w+: gather the layer"
                ),
                manager.gather(whole),
            ):
                pass


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizer_state_as_that_of_the_untiled_model(precision: str) -> None:
    """Joined, it is that of torch's optimizer over the untiled model; split again, it resumes over tiles."""
    keys = {} if precision == "fp32" else {"precision": precision}
    with chunkmem.ChunkManager(config(SMALL_NBYTES, **keys)) as manager:
        twin = Twin(manager, Tiled)
        twin.steps(0, 1)
        tiled, untiled = twin.optimizer.state_dict(), chunkmem.untile_optimizer_state(twin.model, twin.optimizer)
        back = chunkmem.tile_optimizer_state(twin.model, twin.optimizer, untiled)
        assert_equal(dict(sorted(back["state"].items())), dict(sorted(tiled["state"].items())))
        assert [group["params"] for group in back["param_groups"]] == [g["params"] for g in tiled["param_groups"]]
        twin.optimizer.load_state_dict(back)
    plain = Twin(None, Untiled)
    plain.step(features(0))
    shapes = plain.optimizer.state_dict()
    assert [g["params"] for g in untiled["param_groups"]] == [g["params"] for g in shapes["param_groups"]]
    assert untiled["state"].keys() == shapes["state"].keys()
    for index, own in shapes["state"].items():
        assert {key: value.shape for key, value in untiled["state"][index].items()} == {
            key: value.shape for key, value in own.items()
        }
    plain.optimizer.load_state_dict(untiled)
    plain.step(features(1))
    untiled["param_groups"][0]["params"].pop()
    with pytest.raises(chunkmem.CheckpointError, match="parameter groups of"):
        chunkmem.tile_optimizer_state(twin.model, twin.optimizer, untiled)


@pytest.mark.parametrize("how", ["made", "converted", "any class", "added"])
def test_tiles_of_a_weight_in_several_groups_are_refused_at_once(how: str) -> None:
    """Training went well, and at the end of the epoch no checkpoint could be written, for a reason without a name."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        model = Twin(manager, Tiled).model
        layer = next(module for module in model.modules() if isinstance(module, chunkmem.TiledLinear))
        name = next(key for key, module in model.named_modules() if module is layer)
        tiles = {id(tile) for tile in layer.tiles()["weight"][1:]}
        params = list(model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if id(param) not in tiles]},
            {"params": [param for param in params if id(param) in tiles], "lr": 1e-4},
        ]

        def add() -> None:
            optimizer = chunkmem.AdamW(groups[0]["params"], manager=manager)
            try:
                optimizer.add_param_group(groups[1])
            finally:
                assert len(optimizer.param_groups) == 1

        make: dict[str, Callable[[], Any]] = {
            "made": lambda: chunkmem.AdamW(groups, manager=manager),
            "converted": lambda: manager.optimizer(torch.optim.Adam(groups)),
            "any class": lambda: chunkmem.Optimizer(torch.optim.RMSprop, groups, manager=manager),
            "added": add,
        }
        with pytest.raises(chunkmem.ConfigError, match=rf"tiles of {name}\.weight are in parameter groups 0 and 1"):
            make[how]()
        groups[0]["params"] = [param for param in params if param.ndim > 1]
        groups[1]["params"] = [param for param in params if param.ndim == 1]
        chunkmem.AdamW(groups, manager=manager)


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_tiles_of_a_weight_that_were_updated_unequally_are_not_saved_as_one(name: str, tmp_path: Path) -> None:
    """A run that went on from such a checkpoint had other numbers: all tiles had the count of the first one."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Tiled, kind=name)
        twin.step(features(0))
        twin.loss(features(1)).backward()
        layer = twin.model.blocks[-1]
        next(iter(layer.tiles()["weight"])).grad = None
        twin.update()
        key = "step" if name == "AdamW" else "num_updates"
        says = rf"blocks\.3\.weight is in tiles, whose {key} is 1(\.0)? and 2(\.0)?, .* gradients of all its tiles"
        with pytest.raises(chunkmem.CheckpointError, match=says):
            manager.save(tmp_path / "saved", twin.optimizer)
        twin.optimizer.load_state_dict(twin.optimizer.state_dict())  # it is of tiles


def test_the_optimizer_state_is_of_tiles() -> None:
    """It resumes in chunks and in plain PyTorch, over the same tiles."""
    plain = Twin(None, Tiled)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Tiled)
        assert twin.steps(0, 1) == plain.steps(0, 1)
        weights, states = twin.weights(), twin.optimizer.state_dict()
    resumed = Twin(None, Tiled)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(states)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        again = Twin(manager, Tiled)
        manager.load_state_dict(weights)
        again.optimizer.load_state_dict(states)
        expected = plain.steps(2, 3)
        assert again.steps(2, 3) == resumed.steps(2, 3) == expected
        assert_equal(again.left(), plain.left())


# The whole weight, asked for by other modules.


class Asks(nn.Module):
    """Looks at a layer's dtype before each call, as T5 does; or computes with its weight."""

    def __init__(self, num_tiles: int, *, reads: bool = False) -> None:
        super().__init__()
        self.inner = wide(num_tiles)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.inner.up, self.inner.down
        x = x.to(up.weight.dtype)
        hidden = torch.relu(nn.functional.linear(x, up.weight) if self.reads else up(x))
        result: Tensor = down(hidden.to(down.weight.dtype))
        return result


@cpu_only
def test_to_ask_for_a_dtype_brings_no_tile() -> None:
    assert same(lambda: Asks(8), lambda twin: twin.steps(0, 1, 2)) == 2 * CHUNK_NBYTES


@cpu_only
def test_a_weight_that_is_read_whole_is_there_as_a_whole() -> None:
    tiled, untiled = (same(lambda num=num: Asks(num, reads=True), lambda twin: twin.steps(0, 1, 2)) for num in (8, 1))
    assert 8 * CHUNK_NBYTES < tiled <= untiled


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torchs_own_layers() -> None:
    """In evaluation, they look at weights to choose a path; attention reads a weight of a subclass of nn.Linear."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDE, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2)
        left = tile_linears(model, max_numel=200)
        assert set(left.values()) == {"it is a NonDynamicallyQuantizableLinear"}
        return model

    def scenario(twin: Twin) -> list[Any]:
        x = features(shape=(2, 3, WIDTH))
        losses = [twin.step(x), twin.step(x)]
        twin.model.eval()
        with torch.no_grad():
            losses.append(twin.loss(x).item())
        twin.model.train()
        return [*losses, twin.step(x)]

    same(build, scenario)


@cpu_only
def test_t5() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": WIDTH, "d_kv": 8, "num_heads": 2, "d_ff": 4 * WIDTH, "vocab_size": 40, "num_layers": 2}
    settings = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)

    def build() -> nn.Module:
        model = transformers.T5ForConditionalGeneration(settings)
        assert tile_linears(model, max_numel=CHUNK_NUMEL).keys() <= {"lm_head"}
        assert isinstance(model.decoder.block[0].layer[2].DenseReluDense.wo, TiledLinear)
        return model

    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed in range(3):
            tokens = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(seed))
            loss = twin.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            twin.update()
            losses.append(loss.item())
        return losses

    same(build, scenario)
    untiled = transformers.T5ForConditionalGeneration(settings)
    untiled.load_state_dict(build().state_dict())


# `manager.tile()`, and its key of the configuration.


def with_head(model: nn.Module | None = None) -> Any:
    model = Wide() if model is None else model
    model.head = nn.Linear(WIDTH, 3)
    return model


def test_a_model_is_tiled_inside_init_or_before_wrap() -> None:
    torch.manual_seed(5)
    plain = with_head()
    expected, drawn = copied(dict(plain.state_dict())), torch.rand(2)
    for wraps in (False, True):
        with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
            torch.manual_seed(5)
            if wraps:
                model = manager.tile(with_head(), max_numel=CHUNK_NUMEL)
                manager.wrap(model)
            else:
                with manager.init():
                    model = with_head()
                    assert manager.tile(model, max_numel=CHUNK_NUMEL) is model
            assert torch.equal(torch.rand(2), drawn)
            assert (model.up.in_splits, model.up.out_splits) == (1, 8)
            assert (model.down.in_splits, model.down.out_splits) == (8, 1)
            assert type(model.head) is nn.Linear
            assert_equal(manager.state_dict(model), expected)
            assert len(manager.runtime.registry.models) == 1


@pytest.mark.parametrize("value", [True, WIDTH * WIDE // 4])
def test_the_key_of_the_configuration(value: object) -> None:
    keys = {"memory": {"device": 8 * CHUNK_NBYTES, "host": 8 << 20}, "default_chunk_size": CHUNK_NUMEL}
    settings = chunkmem.Config.from_dict({**keys, "with_tiling_linear": value})
    for wraps in (False, True):
        torch.manual_seed(5)
        expected = copied(dict(with_head().state_dict()))
        torch.manual_seed(5)
        engine, optimizer = chunkmem.initialize_engine(with_head() if wraps else with_head, 0, settings)
        assert isinstance(engine.module.up, TiledLinear)
        assert engine.module.up.out_splits == engine.module.down.in_splits == 4
        assert type(engine.module.head) is nn.Linear
        assert_equal(engine.state_dict(), expected)
        engine.backward(engine(features()).square().mean())
        optimizer.step()
        engine.manager.close()


def test_what_is_no_wide_layer_of_its_own_is_left_alone_and_named() -> None:
    class Own(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WIDE, WIDTH)
            self.head = nn.Linear(WIDTH, WIDE, bias=False)
            self.head.weight = self.words.weight
            self.own = Own(WIDTH, WIDE)
            self.hooked, self.replaced, self.listed, self.viewed, self.fine, self.grad, self.buffered = (
                nn.Linear(WIDTH, WIDE) for _ in range(7)
            )
            self.hooked.register_forward_hook(lambda *_: None)
            self.replaced.forward = lambda x: x
            self.list = [self.listed.weight]
            self.view = self.viewed.weight.detach()[:2]
            self.grad.weight.register_hook(lambda grad: grad)
            self.buffered.register_buffer("scale", torch.ones(1))
            self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDE))
            self.old = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDE))
            self.small = Own(2, 2)

    model = Model()
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with pytest.warns(UserWarning, match="^linear layers left untiled") as caught:
            assert manager.tile(model, max_numel=100) is model
        (told,) = [str(warning.message) for warning in caught]
        for words in (
            "head: its weight is tied: words.weight, head.weight",
            "own: it is a Own",
            "hooked: it has hooks",
            "replaced: its forward was replaced",
            "listed: its weight is held elsewhere, too (dict, list)",
            "viewed: its weight shares its memory with another tensor",
            "grad: its weight has hooks",
            "buffered: it has other parameters, buffers or modules than nn.Linear",
            "normed: it is a ParametrizedLinear",
            "old: it has hooks",
        ):
            assert words in told
        assert "small" not in told
        assert [name for name, module in model.named_modules() if isinstance(module, TiledLinear)] == ["fine"]
        assert model.head.weight is model.words.weight


def test_everybody_who_refers_to_the_layer_has_the_tiled_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDE)
            self.layer.note = "kept"
            self.layer.bias.requires_grad_(False)
            self.layer.weight.no_decay = True
            self.layer.eval()
            self.layers = [self.layer]
            self.again = self.layer

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layers[0](x)
            return result

    def build() -> nn.Module:
        model = Model()
        tile_linears(model, max_numel=CHUNK_NUMEL)
        return model

    layer = build().layers[0]
    assert isinstance(layer, TiledLinear)
    assert (layer.note, layer.training, layer.tile_0_0.training) == ("kept", False, False)
    assert {name.partition(".")[2]: p.requires_grad for name, p in layer.named_parameters()} == {
        "weight": True,
        "bias": False,
    }
    assert all(param.no_decay for name, param in layer.named_parameters() if "weight" in name)
    same(build, lambda twin: twin.steps(*range(3)))


def test_a_linear_that_is_the_model() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with manager.init():
            model = manager.tile(nn.Linear(WIDTH, WIDE), max_numel=CHUNK_NUMEL)
        assert isinstance(model, TiledLinear)
        assert len(manager.runtime.registry.models) == 1
        assert manager.state_dict()["weight"].shape == (WIDE, WIDTH)


def test_a_tied_weight_outside_of_what_is_tiled() -> None:
    words = nn.Embedding(WIDE, WIDTH)
    head = nn.Linear(WIDTH, WIDE)
    head.weight = words.weight
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with pytest.warns(UserWarning, match="Linear: its weight is held elsewhere, too"):
            manager.tile(head, max_numel=CHUNK_NUMEL)
        assert type(head) is nn.Linear


def test_excluded_modules_stay_as_they_are() -> None:
    with chunkmem.ChunkManager(config(32 * CHUNK_NBYTES)) as manager:
        with manager.init():
            model = nn.Sequential(nn.Linear(WIDTH, WIDE))
            with manager.exclude():
                model.append(nn.Linear(WIDE, WIDTH))
            manager.tile(model, max_numel=CHUNK_NUMEL)
        assert [type(module) for module in model] == [TiledLinear, nn.Linear]


@pytest.mark.parametrize("max_numel", [0, -1, 2.0, True, "4", 2**0.5])
def test_a_size_that_is_none(max_numel: Any) -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with pytest.raises(
            chunkmem.LayoutError, match=r"^max_numel is .*; it is a number of elements, at least 1, or No"
        ):
            manager.tile(Wide(), max_numel=max_numel)
        with pytest.raises(chunkmem.LayoutError, match=r"^manager.tile\(\) takes a torch.nn.Module, not a list$"):
            manager.tile([], max_numel=3)  # type: ignore[arg-type]


def test_more_tiles_than_anybody_wants() -> None:
    """A million modules would be made without a word."""
    model = with_head(nn.Sequential(nn.Linear(1024, 1024)))
    message = (
        r"^max_numel is 1, but 0 has 1048576 elements: make it at least 256, since each tile is a module of its own$"
    )
    with pytest.raises(chunkmem.LayoutError, match=message):
        tile_linears(model, max_numel=1)
    assert not any(isinstance(module, TiledLinear) for module in model.modules())


def test_holders_that_cannot_be_asked_for() -> None:
    """gc.freeze() hides them: a head tied to an embedding elsewhere would have been untied."""
    words, head = nn.Embedding(WIDE, WIDTH), nn.Linear(WIDTH, WIDE)
    head.weight = words.weight
    gc.freeze()
    try:
        left = tile_linears(head, max_numel=CHUNK_NUMEL)
    finally:
        gc.unfreeze()
    assert left == {"Linear": "who holds its weight cannot be told after gc.freeze()"}
    assert type(head) is nn.Linear


def test_a_packed_model_is_not_tiled() -> None:
    with chunkmem.ChunkManager(config(32 * CHUNK_NBYTES)) as manager:
        model = manager.wrap(Wide())
        with pytest.raises(chunkmem.StateError, match=r"^module Wide is managed already|^module up is managed already"):
            manager.tile(model, max_numel=CHUNK_NUMEL)
    with pytest.raises(chunkmem.StateError, match="closed"):
        manager.tile(Wide())


@pytest.mark.parametrize(
    ("sizes", "max_numel", "splits"),
    [
        ((64, 256), 4096, (1, 4)),  # PatrickStar's intermediate layer
        ((256, 64), 4096, (4, 1)),  # and its output
        ((64, 64), 4096, (1, 1)),
        ((64, 64), 4095, (1, 2)),
        ((64, 64), 1024, (2, 2)),
        ((1, 7), 1, (1, 7)),
        ((3, 3), 1, (3, 3)),
        ((0, 5), 1, (1, 1)),
    ],
)
def test_the_longer_side_is_split(sizes: tuple[int, int], max_numel: int, splits: tuple[int, int]) -> None:
    from chunkmem.packing.tiling import splits_for

    assert splits_for(*sizes, max_numel=max_numel) == splits
