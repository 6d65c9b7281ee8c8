"""What is done with a model when it is trained: exported, written as ONNX, averaged, quantised, with both ways back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.twins import cpu_only

pytestmark = [pytest.mark.full, cpu_only]
CONFIG = {"default_chunk_size": 2304, "memory": {"device": "48KiB"}}
X = torch.linspace(-1, 1, 8 * 32).reshape(8, 32)


def make() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(3)), nn.Linear(32, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.fixture(params=["copy", "unwrap"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model that was trained in chunks and is ordinary again, and one that plain PyTorch trained."""
    plain = make()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(CONFIG)) as manager:
        model = manager.wrap(make())
        train(model, chunkmem.AdamW(model.parameters(), manager=manager))
        return copy.deepcopy(model) if request.param == "copy" else manager.unwrap(model), plain


def as_it_is(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model


def exported(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.export.export(model, (X,)).module()


def averaged(model: nn.Module) -> Callable[[Tensor], Tensor]:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average


def quantised(model: nn.Module) -> Callable[[Tensor], Tensor]:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def traced(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.jit.trace(model, (X,))


@pytest.mark.parametrize("use", [as_it_is, exported, averaged, quantised, traced])
def test_what_is_made_of_it_computes_the_same(
    use: Callable[[nn.Module], Callable[[Tensor], Tensor]], pair: tuple[nn.Module, nn.Module]
) -> None:
    with torch.no_grad():
        found, expected = (use(model)(X) for model in pair)
    assert torch.equal(found, expected)


def test_onnx(pair: tuple[nn.Module, nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model, plain = pair
    torch.onnx.export(model, (X,), tmp_path / "model.onnx", dynamo=True)
    (found,) = reference.ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"input": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), plain(X).detach())
