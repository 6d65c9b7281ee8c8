"""Model families of transformers, built over ranks: each initialises its weights when all modules are attached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.libraries import manager_of
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only
from tests.integrations.test_families import FAMILIES

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [pytest.mark.full, cpu_only]

SIZES = [2, 3]
AUTO = ("llama", "gpt2", "bloom")
"""By `AutoModelForCausalLM.from_config`."""


def make(family: str) -> Any:
    model, config, options = FAMILIES[family]
    made = getattr(transformers, config)(**options)
    torch.manual_seed(5)
    if family in AUTO:
        return transformers.AutoModelForCausalLM.from_config(made)
    return getattr(transformers, model)(made)


def build(rank: int, family: str) -> tuple[dict[str, Tensor], Tensor]:
    with manager_of(1 << 20) as manager:
        with manager.init():
            model = make(family)
        return manager.state_dict(model), torch.get_rng_state()


@pytest.mark.parametrize("size", SIZES)
def test_families_have_the_weights_of_one_process(size: int) -> None:
    with Team(size) as team:
        for family in FAMILIES:
            expected = make(family).state_dict()
            drawn = torch.get_rng_state()
            for weights, drawn_too in team.run(build, family, timeout_s=240.0):
                assert weights.keys() == expected.keys(), family
                wrong = [key for key, value in expected.items() if not torch.equal(weights[key], value)]
                assert wrong == [], family
                assert torch.equal(drawn_too, drawn), family
