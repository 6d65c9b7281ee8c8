"""How often an update makes the host wait for an accelerator: once for a norm, else never. The meta device plays it.

`tests/gpu/test_waits.py` counts whole steps where there is a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.data.types import Role
from chunkmem.optim.adam_rule import _steps_on
from chunkmem.optim.class_rule import ClassRule
from chunkmem.optim.kernels import Kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.ops import global_norm, number_on
from chunkmem.optim.pending import Clipping, PendingGradients
from chunkmem.optim.rule import UpdateItem
from chunkmem.optim.speculative import NormParts

META = torch.device("meta")
SHAPES = ((7, 5), (3,), (11, 2), (1,), (64,))


class _Copies(TorchDispatchMode):
    """Counts copies between devices by the host: from or to pageable memory each waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """Record what waits for the device: `.cpu()`, which gives ones here, `.item()` and what converts to a number."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "item", "tolist", "__float__", "__int__", "__bool__", "to"):
            patch.setattr(Tensor, name, _counting(getattr(Tensor, name), name, found))
        yield found


def _counting(method: Any, name: str, found: list[str]) -> Any:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tensor.is_meta:
            if name == "to" and META in args:
                found.append("to the device")
            return method(tensor, *args, **kwargs)
        found.append(name)
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    return call


@dataclass(eq=False)
class _Managed:
    param: Tensor
    group: int
    position: int


def pending(*, is_lowered: bool) -> PendingGradients:
    """The gradients of two groups and of one excluded parameter, all on the device."""
    params = [torch.nn.Parameter(torch.empty(shape, device=META)) for shape in SHAPES]
    params[-1].grad = torch.empty_like(params[-1])
    managed: Any = [_Managed(param, at // 2, at) for at, param in enumerate(params[:-1])]
    updater: Any = SimpleNamespace(
        ahead=SimpleNamespace(norm_parts=lambda group: NormParts(), roll_back=lambda: None),
        gradient=lambda one: torch.empty_like(one.param),
        gradient_replicas=lambda one: [torch.empty_like(one.param)],
        native=NativeUpdate(lambda: Kernels(frozenset())),
    )
    ranks: Any = SimpleNamespace(are_one=True, rank=0, parts=None)
    registry = SimpleNamespace(in_order=list, counted_elsewhere=())
    host: Any = SimpleNamespace(updater=updater, is_lowered=is_lowered, scaler=None, ranks=ranks, registry=registry)
    return PendingGradients(host, params, managed)


@pytest.mark.parametrize("is_lowered", [False, True])
def test_a_norm_waits_once(is_lowered: bool) -> None:
    with waits() as found:
        assert pending(is_lowered=is_lowered).multiplier(max_norm=0.5)
    assert found == ["cpu"]


@pytest.mark.parametrize("is_lowered", [False, True])
def test_clipping_waits_for_the_norm_alone(is_lowered: bool) -> None:
    gradients = pending(is_lowered=is_lowered)
    with waits() as found, _Copies() as copies:
        gradients.clip(gradients.clipping(0.5))
    assert found == ["cpu"]
    assert copies.count == 0


def test_a_known_coefficient_is_filled_on_the_device() -> None:
    gradients = pending(is_lowered=False)
    params = gradients._params
    with waits() as found, _Copies() as copies:
        gradients.clip(Clipping(0.5, torch.ones(()), torch.full((), 0.3), params[::-1]))
    assert (found, copies.count) == ([], 0)


def test_norms_come_to_the_host_in_one_copy_and_have_the_bits_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    plain = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(param) for param in params]))
    norm = global_norm(params, lambda param: param, known={params[1]: torch.linalg.vector_norm(params[1])})
    assert torch.equal(norm, plain)


def test_numbers_of_updates_are_filled_on_a_device() -> None:
    steps = [torch.tensor(float(step)) for step in (3, 3, 4)]
    with _Copies() as copies:
        placed = _steps_on(META, steps)
    assert copies.count == 0
    assert [(step.device.type, step.dtype, step.shape) for step in placed] == [("meta", torch.float32, ())] * 3
    assert placed[0] is placed[1] is not placed[2]


@pytest.mark.parametrize("value", [3.1, 2**60 + 1, True, 1 + 2j], ids=str)
def test_a_number_keeps_its_bits(value: Any) -> None:
    """Only the CPU can show them; the device is one that is not called so."""
    number = torch.tensor(value)
    device: Any = SimpleNamespace(type="other")
    with pytest.MonkeyPatch.context() as patch:
        full = torch.full
        patch.setattr(torch, "full", lambda *args, device, **kwargs: full(*args, **kwargs))
        filled = number_on(device, number)
    assert filled is not number
    assert filled.dtype is number.dtype
    assert torch.equal(filled, number)


def test_what_a_class_keeps_is_filled_on_a_device() -> None:
    """Adam of torch with `fused` has the number of its update on the device of the weights."""
    trial: Any = SimpleNamespace(following=frozenset(), name="AdamW")
    rule = ClassRule([trial])
    record: Any = SimpleNamespace(entry={"step": torch.tensor(4.0)}, is_new=False)
    hyper: Any = SimpleNamespace(trial=trial, options={"fused": True})
    item = UpdateItem(hyper, [], [], records=[record])
    views: dict[Role, list[Tensor]] = {}
    with waits() as found, _Copies() as copies:
        entry = rule.entry_of(item, 0, views, META)
    assert entry is not None
    assert entry["step"].is_meta
    assert (found, copies.count) == ([], 0)
