"""`initialize_engine`, PatrickStar's way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.twins import AMPLE_NBYTES, SEED, Blocks, Twin, assert_equal, config, features, without_accelerator

SMALL_NBYTES = 4 * 1024


def test_the_engine() -> None:
    """A function that makes the model, and a dict or a `Config`."""
    plain = Twin(None, Blocks, kind="Adam", lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    losses = plain.steps(0, 1)
    values = config(SMALL_NBYTES).to_dict()
    values["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.0}}
    for given in (values, chunkmem.Config.from_dict(values)):
        torch.manual_seed(SEED)
        engine, optimizer = chunkmem.initialize_engine(model_func=Blocks, local_rank=0, config=given)
        assert type(optimizer) is chunkmem.Adam
        seen = []
        for seed in range(2):
            loss = engine(features(seed)).square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        assert seen == losses
        assert_equal(dict(engine.state_dict()), dict(plain.model.state_dict()))
        engine.load_state_dict(engine.state_dict())
        assert engine.eval().module.training is False
        assert engine.train().module.training is True
        audit(engine.manager)
        engine.manager.close()


ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"model_func": 3}, r"^model_func is a int; it has to be a function that makes the model$"),
    "no model": ({"model_func": lambda: None}, r"^model_func returned a NoneType; it has to make a torch.nn.Module$"),
    "rank": (
        {"local_rank": 77},
        r"^there is no accelerator 77: \d+ are visible to this process$"
        if torch.accelerator.is_available()
        else r"^local_rank is 77, and 1 ranks train on this machine; count from 0$",
    ),
    "negative rank": ({"local_rank": -1}, r"^local_rank is -1; it has to be the index of an accelerator, from 0$"),
    "rank in words": ({"local_rank": "0"}, r"^local_rank is '0'; it has to be the index of an accelerator, from 0$"),
    "key": ({"config": {"zero": 3}}, r"^zero, set to 3, is not a known key"),
    "no file": ({"config": "/nowhere/chunkmem.json"}, r"^/nowhere/chunkmem.json cannot be read: No such file"),
    "no config": ({"config": 3}, r"^3 is not the path of a JSON file$"),
}


@pytest.mark.parametrize("what", ENGINES)
def test_an_engine_that_cannot_be_made(what: str) -> None:
    given, message = ENGINES[what]
    model = Blocks()
    with pytest.raises(chunkmem.ConfigError, match=message):
        chunkmem.initialize_engine(**{"model_func": model, "local_rank": 0, "config": config(AMPLE_NBYTES), **given})
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_an_engine_of_a_model_that_exists_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chunkmem.json"
    path.write_text('{"memory": {"device": "4KiB", "host": "1MiB"}, "default_chunk_size": 256}')
    model = Blocks()
    engine, optimizer = chunkmem.initialize_engine(model, 0, path)
    assert engine.module is model
    assert type(optimizer) is chunkmem.AdamW
    engine.backward(engine(features(0)).sum())
    optimizer.step()
    audit(engine.manager)


def pretraining(rank: int) -> tuple[list[float], float]:
    """The calls of PatrickStar's pretraining script, with the values that its command line makes."""
    config = {
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
        },
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 12.0,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "default_chunk_size": 1024,
        "release_after_init": False,
        "use_fake_dist": False,
        "use_cpu_embedding": True,
        "client": {
            "mem_tracer": {
                "use_async_mem_monitor": False,
                "warmup_gpu_chunk_mem_ratio": 0.1,
                "overall_gpu_mem_ratio": 0.9,
                "overall_cpu_mem_ratio": 0.9,
                "margin_use_ratio": 0.8,
                "use_fake_dist": False,
                "with_static_partition": False,
            },
            "opts": {"with_mem_saving_comm": False, "with_mem_cache": False, "with_async_move": False},
        },
    }
    torch.manual_seed(SEED)
    model, optimizer = chunkmem.initialize_engine(model_func=Blocks, local_rank=rank, config=config)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(features(step)).square().mean()
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.loss_scaler is not None
    scale = optimizer.loss_scaler.loss_scale
    model.manager.close()
    return losses, scale


def test_the_calls_of_a_pretraining_script_on_each_rank(pair: Team) -> None:
    assert pair.run(pretraining) == [(pretraining(0)[0], 2.0**12)] * 2


def test_an_engine_is_a_module() -> None:
    engine, optimizer = chunkmem.initialize_engine(Blocks, 0, config(SMALL_NBYTES))
    assert [name for name, _ in engine.named_parameters()] == [f"module.{key}" for key in engine.state_dict()]
    assert sum(param.numel() for param in engine.parameters()) == sum(param.numel() for param in Blocks().parameters())
    assert engine.module in list(engine.modules())
    assert (engine.training, engine.eval().training, engine.train().module.training) == (True, False, True)
    engine.backward(engine(features(0)).square().mean())
    engine.zero_grad()
    assert all(param.grad is None for param in engine.parameters())
    assert optimizer.loss_scaler is None
    with pytest.raises(chunkmem.StateError, match="leave assign out"):
        engine.load_state_dict(engine.state_dict(), assign=True)
    audit(engine.manager)
    engine.manager.close()


@without_accelerator
@pytest.mark.parametrize("key", [{"with_static_partition": True}, {"warmup_gpu_chunk_mem_ratio": 0.4}])
def test_a_share_that_has_no_effect_is_told(key: dict[str, Any]) -> None:
    """RAM that plays an accelerator holds chunks alone, so that no share of it is set apart."""
    chosen = config(SMALL_NBYTES, client={"mem_tracer": key})
    with pytest.warns(UserWarning, match=rf"client.mem_tracer.{next(iter(key))} has no effect without an accelerator"):
        chunkmem.ChunkManager(chosen).close()
