"""`initialize_engine`, PatrickStar's way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, SEED, Blocks, Twin, assert_equal, config, features

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
    "rank": ({"local_rank": 7}, r"^there is no accelerator 7"),
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
