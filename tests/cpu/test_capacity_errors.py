"""What does not fit: who needed it, both numbers, the smallest cap; and training goes on with what does fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Tier
from tests.helpers.audit import audit, audit_ledgers
from tests.helpers.spread import spread
from tests.helpers.training import (
    HOST_NBYTES,
    VARIANTS,
    Chunked,
    Outcome,
    Trainer,
    assert_same,
    footprint,
    train_plain,
)
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features, mlp
from tests.helpers.zoo import ZOO, ZooModel

KIB = 1024
pytestmark = cpu_only


class WithLarge(Blocks):
    """Beside layers of one chunk, one with a weight of four."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x: Tensor, *, large: bool = False) -> Tensor:
        return super().forward(x) + (self.large(x).mean(dim=1, keepdim=True) if large else 0)


def evaluate(twin: Twin) -> None:
    with torch.no_grad():
        twin.model(features(1), large=True)


def forward(twin: Twin) -> None:
    twin.loss(features(1), large=True)


def backward(twin: Twin) -> None:
    loss = twin.loss(features(1), large=True)
    try:
        twin.backward(loss)
    except RuntimeError as error:
        pytest.fail(str(error))


def whole_step(twin: Twin) -> None:
    twin.step(features(1), large=True)


def gather(twin: Twin) -> None:
    with twin.manager.gather(twin.model.large):
        pass


def gather_gradients(twin: Twin) -> None:
    with twin.manager.gather(grads=True):
        pass


def outside(twin: Twin) -> None:
    twin.model.large.weight.sum()


CASES: dict[Callable[[Twin], None], tuple[int, str, int]] = {
    evaluate: (3, r"^large forward: 4.00 KiB more needed on DEVICE for param chunk \d \(large.weight\), only", 4),
    forward: (3, r"^large forward: 4.00 KiB more needed on DEVICE for param chunk \d \(large.weight\), only", 4),
    backward: (6, r"^large.weight gradient: 4.00 KiB more needed on DEVICE for grad chunk \d \(large.weight\)", 8),
    whole_step: (7, r"^large.weight gradient: 4.00 KiB more needed on DEVICE for grad chunk \d \(large.weight\)", 8),
    gather: (3, r"^gather: 1 chunks need 4.00 KiB on DEVICE and the cap is 3.00 KiB; gather fewer parameters", 4),
    gather_gradients: (5, r"^gather: 9 chunks need 12.00 KiB on DEVICE and the cap is 5.00 KiB; gather fewer", 12),
    outside: (3, r"^sum outside of modules: 4.00 KiB more needed on DEVICE for param chunk \d \(large.weight\)", 4),
}


@pytest.mark.parametrize("use", CASES, ids=lambda use: use.__name__)
def test_training_goes_on_without_what_does_not_fit(use: Callable[[Twin], None]) -> None:
    """After `zero_grad()` the same manager trains the rest, bit for bit."""
    cap_kib, message, needed_kib = CASES[use]
    plain = Twin(None, WithLarge)
    losses = plain.steps(0, 1, 2)
    with chunkmem.ChunkManager(config(cap_kib * KIB)) as manager:
        twin = Twin(manager, WithLarge)
        assert twin.steps(0) == losses[:1]
        for seed in (1, 2):
            with pytest.raises(chunkmem.CapacityError, match=message) as raised:
                use(twin)
            error = raised.value
            assert (error.needed_nbytes, error.cap_nbytes) == (needed_kib * KIB, cap_kib * KIB)
            assert "\n" not in str(error)
            audit_ledgers(manager.runtime.memory.store)
            twin.optimizer.zero_grad()
            assert twin.steps(seed) == losses[seed : seed + 1]
        assert_equal(twin.left(), plain.left())


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Blocks,
    "a large one": lambda: Blocks(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))),
    "recurrent": lambda: Unpacked(nn.LSTM(WIDTH, WIDTH, num_layers=2)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0),
}


class Unpacked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.after = inner, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(x)[0])


def refusal(twin: Twin) -> chunkmem.CapacityError | None:
    try:
        twin.steps(0, 1)
    except chunkmem.CapacityError as error:
        return error
    return None


@pytest.mark.parametrize("name", BUILDS)
def test_the_cap_an_error_asks_for_is_the_one_that_works(name: str) -> None:
    """Raising it to what each error names ends, never above what a training with ample room reports."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        Twin(manager, BUILDS[name]).steps(0, 1)
        required = manager.memory().device.required_nbytes
    cap, asked = KIB, []
    while True:
        with chunkmem.ChunkManager(config(cap)) as manager:
            twin = Twin(manager, BUILDS[name])
            error = refusal(twin)
        if error is None:
            break
        assert error.cap_nbytes == cap < error.needed_nbytes <= required
        assert f"{error.needed_nbytes} bytes" in str(error)
        cap = error.needed_nbytes
        asked.append(cap)
    assert cap == required == asked[-1]
    plain = Twin(None, BUILDS[name])
    plain.steps(0, 1)
    with chunkmem.ChunkManager(config(cap)) as manager:
        twin = Twin(manager, BUILDS[name])
        twin.steps(0, 1)
        assert_equal(twin.left(), plain.left())


@pytest.mark.few(2)
@spread(tier=("device", "host"), case=ZOO)
def test_the_cap_that_is_certain_to_do_does_the_first_time(case: ZooModel, tier: str) -> None:
    """It took up to eight rounds of raising the cap to what one access needed."""
    variant = VARIANTS[0]
    ample = {"device": footprint(case, variant).required_nbytes, "host": HOST_NBYTES}

    def train(nbytes: int) -> Outcome:
        caps = {"memory": ample | {tier: nbytes}, "default_chunk_size": case.chunk_numel}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(caps)) as manager:
            return Trainer(case, variant, Chunked(manager)).run()

    with pytest.raises(chunkmem.CapacityError) as raised:
        train(case.slab_nbytes)
    error = raised.value
    assert error.enough_nbytes is not None
    assert f"({error.enough_nbytes} bytes) is certain to do" in str(error)
    assert f"({error.needed_nbytes} bytes)" in str(error)
    assert_same(train(error.enough_nbytes), train_plain(case, variant))


def host(kib: int) -> dict[str, Any]:
    return {"memory": {"device": 4 * KIB, "host": kib * KIB}}


def test_states_that_fit_nowhere_are_refused_when_the_optimizer_is_made() -> None:
    """8 chunks in 4 roles are 32, one more is to exchange them; DEVICE has 4. With the cap it asks for, it trains."""
    message = (
        r"^optimizer: weights, gradients and states of 8 chunk groups take 33.00 KiB, and DEVICE and HOST together may "
        r"hold 32.00 KiB; raise memory.host from 28.00 KiB to at least 29.00 KiB \(29696 bytes\)$"
    )
    with chunkmem.ChunkManager(config(0, **host(28))) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.CapacityError, match=message) as raised:
            chunkmem.AdamW(model.parameters(), manager=manager)
        assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (29 * KIB, 28 * KIB)
        chunkmem.AdamW(model.inner.parameters(), manager=manager)
        model(features(0)).sum().backward()
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1, 2)
    with chunkmem.ChunkManager(config(0, **host(29))) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0, 1, 2) == losses
        assert_equal(twin.left(), plain.left())


def test_states_of_several_optimizers_count_together() -> None:
    with chunkmem.ChunkManager(config(0, **host(28))) as manager:
        model = manager.wrap(Blocks())
        first = chunkmem.AdamW(model.blocks.parameters(), manager=manager)
        with pytest.raises(chunkmem.CapacityError, match=r"^optimizer: .* of 8 chunk groups"):
            chunkmem.AdamW([*model.inner.parameters(), *model.head.parameters()], manager=manager)
        model(features(0)).sum().backward()
        first.step()


def test_a_step_whose_states_find_no_room_changes_nothing() -> None:
    """A second model has taken it after the optimizer was made."""
    with chunkmem.ChunkManager(config(0, **host(29))) as manager:
        twin = Twin(manager, Blocks)
        twin.loss(features(0)).backward()
        manager.wrap(nn.ParameterList(torch.ones(256) for _ in range(12)))
        before = twin.manager.state_dict(twin.model)
        for _ in range(2):
            with pytest.raises(chunkmem.CapacityError, match=r"^optimizer states: 1.00 KiB more needed on "):
                twin.optimizer.step()
            assert_equal(dict(manager.state_dict(twin.model)), dict(before))
            audit(manager)
        assert float(twin.clip(1e9)) > 0


def test_what_is_kept_of_calls_may_grow_and_the_error_says_so() -> None:
    """It called a cap enough for every step, and a larger batch, as other ranks may have, needed more."""
    told = []
    for num in (4, 6):
        with chunkmem.ChunkManager(
            config(16 * KIB, default_chunk_size=5000, activations={"policy": "keep"})
        ) as manager:
            twin = Twin(manager, Blocks)
            with pytest.raises(
                chunkmem.CapacityError, match="certain to do for all chunks, unless activations"
            ) as raised:
                twin.backward(twin.model(features(1, shape=(num, WIDTH))).sum())
        told.append(raised.value.enough_nbytes)
    assert told[0] < told[1]


@pytest.mark.parametrize("refused", [Tier.HOST, Tier.DEVICE])
def test_an_update_that_one_tier_has_no_room_for_is_made_on_the_other(refused: Tier) -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(5):
        plain(features(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        pager, asked = manager.runtime.memory.pager, list[Tier]()
        hold_all = pager._hold_all

        def hold(chunks: Any, tier: Tier, reader: object) -> None:
            asked.append(tier)
            if tier is refused:
                raise chunkmem.CapacityError("no room", needed_nbytes=2, cap_nbytes=1)
            hold_all(chunks, tier, reader)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pager, "_hold_all", hold)
            patch.setattr(pager.policy.__class__, "update_tier", lambda *_: refused)
            for step in range(5):
                manager.backward(model(features(step)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert refused in asked
        assert len(set(asked)) == 2
        for name, value in manager.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name
