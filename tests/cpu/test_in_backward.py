"""Updates inside backward: the bits of plain PyTorch, gradients that never exist all at once, and clear errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.data.trace import Kind
from tests.helpers.spread import spread
from tests.helpers.training import compute_device
from tests.helpers.twins import AMPLE_NBYTES, CHUNK_NUMEL, Blocks, Twin, assert_equal, config, features, mlp

BF16 = {"precision": "bf16"}
EIGHT_BITS = BF16 | {"optimizer": {"params": {"states": "8bit"}}}
NO_MASTERS = BF16 | {"optimizer": {"params": {"states": "8bit", "master": "none"}}}


class Tied(Blocks):
    """Two blocks are one, and so get their gradients at two times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class HalfUsed(Blocks):
    """One block takes no part in every second step, and one never."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        left_out = {1} | ({3} if self.num_calls % 2 else set())
        x = self.inner(x)
        for at, block in enumerate(self.blocks):
            x = x if at in left_out else block(x)
        return self.head(x)


class HalfFrozen(Blocks):
    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        for block in self.blocks[::2]:
            block.requires_grad_(requires_grad=False)


class WithExcluded(Blocks):
    """Each gradient of the first layer is doubled by a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.register_hook(lambda grad: 2 * grad)


MODELS = {kind.__name__: kind for kind in (Blocks, Tied, Checkpointed, HalfUsed, HalfFrozen, WithExcluded)}


def in_backward(cap_nbytes: int, build: Callable[[], nn.Module], **keys: Any) -> chunkmem.ChunkManager:
    return chunkmem.ChunkManager(config(cap_nbytes, **keys))


@pytest.mark.few(3)
@spread(kind=MODELS, cap=("ample", "smallest"))
def test_it_has_the_numbers_of_plain_pytorch(kind: str, cap: str) -> None:
    plain = Twin(None, MODELS[kind])
    expected = plain.steps(*range(6)), plain.left()
    cap_nbytes = AMPLE_NBYTES
    for _ in range(2 if cap == "smallest" else 1):
        with chunkmem.ChunkManager(config(cap_nbytes)) as manager:
            for pool in manager.runtime.memory.store.pools.values():
                pool.poison = True
            ours = Twin(manager, MODELS[kind], in_backward=True)
            assert_equal((ours.steps(*range(6)), ours.left()), expected)
            assert ours.optimizer.in_backward
            cap_nbytes = manager.memory().device.required_nbytes


@pytest.mark.parametrize("keys", [BF16, EIGHT_BITS, NO_MASTERS], ids=["masters", "8 bits", "no masters"])
def test_mixed_precision_has_the_bits_of_updates_at_the_step(keys: dict[str, Any]) -> None:
    found = []
    for in_backward in (False, True):
        with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys)) as manager:
            ours = Twin(manager, Blocks, in_backward=in_backward)
            found.append((ours.steps(*range(5)), ours.left()))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "Muon", "Adafactor"])
def test_any_optimizer(kind: str) -> None:
    """Muon takes matrices only, so that chunks belong to two classes of one optimizer."""

    def train(manager: chunkmem.ChunkManager | None) -> list[float]:
        torch.manual_seed(3)
        model = Blocks().to(compute_device()) if manager is None else manager.wrap(Blocks())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        cls, first = getattr(torch.optim, kind), kind == "Muon"
        if manager is None:
            optimizers = [cls(matrices if first else model.parameters(), lr=1e-2)]
            optimizers += [torch.optim.AdamW(others, lr=1e-2)] if first else []
        elif first:
            pairs = [(cls, matrices), (torch.optim.AdamW, others)]
            optimizers = [chunkmem.Optimizer(pairs, manager=manager, lr=1e-2, in_backward=True)]
        else:
            optimizers = [chunkmem.Optimizer(cls, model.parameters(), manager=manager, lr=1e-2, in_backward=True)]
        losses = []
        for seed in range(5):
            loss = model(features(seed)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert train(manager) == train(None)


def test_updates_stand_in_backward_and_are_planned() -> None:
    with chunkmem.ChunkManager(config(24 << 10)) as manager:
        ours = Twin(manager, Blocks, in_backward=True)
        ours.steps(0, 1, 2, 3)
        assert manager.trace is not None
        assert manager.plan is not None
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0
        kinds = [moment.kind for moment in manager.trace.moments]
        first, last = kinds.index(Kind.UPDATE), len(kinds) - 1 - kinds[::-1].index(Kind.UPDATE)
        assert kinds[first:last].count(Kind.CREATE) > 2  # gradients that begin after the first update


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("keys", "per_parameter"),
    [({}, 12), (BF16, 12), (EIGHT_BITS, 6.03), (NO_MASTERS, 4.03)],
    ids=["fp32", "masters", "8 bits", "no masters"],
)
def test_gradients_of_two_chunks_exist_at_a_time(keys: dict[str, Any], per_parameter: float) -> None:
    """A planned step has the weights that are updated and their states, and a chunk or two of others and of gradients.

    Weights that are rounded from masters are rounded again for each use.
    """
    width = 64

    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(24))
        return nn.Sequential(*blocks)

    numel = width * width
    low_nbytes = 2 if keys else 4
    device_nbytes = 4 * low_nbytes * numel
    # On HOST: all states, and what of two groups is about to be updated, or was.
    host_nbytes = int(24 * numel * per_parameter) + 4 * low_nbytes * numel
    chosen = chunkmem.Config.from_dict(
        {"memory": {"device": device_nbytes, "host": host_nbytes}, "default_chunk_size": numel} | keys
    )
    with chunkmem.ChunkManager(chosen) as manager:
        ours = Twin(manager, build, in_backward=True)
        for seed in range(4):
            ours.step(features(seed, shape=(2, width)))
        timeline = manager.timeline()
        assert timeline is not None
        assert manager.plan is not None
        assert timeline.plan_misses == 0
        gradients = (nbytes for (_, role), nbytes in timeline.role_peak_nbytes.items() if role == "grad")
        assert sum(gradients) <= 5 * low_nbytes * numel
    with chunkmem.ChunkManager(chosen) as manager, pytest.raises(chunkmem.CapacityError, match=r"raise memory\.host"):
        Twin(manager, build)


def test_a_weight_that_somebody_holds_is_updated_by_the_step() -> None:
    plain = Twin(None, Blocks)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours = Twin(manager, Blocks, in_backward=True)
        for twin in (plain, ours):
            twin.held = twin.model.inner.weight.detach()
            twin.before = twin.held.clone()
            loss = twin.loss(features(0))
            loss.backward()
            assert torch.equal(twin.held, twin.before)  # as long as there was no step
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            assert not torch.equal(twin.held, twin.before)
        assert_equal(ours.held.clone(), plain.held.clone())
        del plain.held, ours.held
        assert_equal(ours.steps(1, 2), plain.steps(1, 2))


def test_two_optimizers_of_which_one_waits() -> None:
    """A chunk with parameters of both is updated by their steps."""

    def train(manager: chunkmem.ChunkManager | None) -> list[float]:
        twin = Twin(manager, Blocks, params=lambda model: [*model.inner.parameters(), *model.blocks[0].parameters()],
                    **({} if manager is None else {"in_backward": True}))  # fmt: skip
        rest = [*twin.model.blocks[1:].parameters(), *twin.model.head.parameters()]
        other = twin.make("AdamW", rest, lr=2e-2)
        losses = []
        for seed in range(5):
            loss = twin.loss(features(seed))
            loss.backward()
            other.step()
            twin.optimizer.step()
            other.zero_grad()
            twin.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert train(manager) == train(None)


def test_freezing_between_steps() -> None:
    plain = Twin(None, lambda: Blocks(num_blocks=6))
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours = Twin(manager, lambda: Blocks(num_blocks=6), in_backward=True)
        for twin in (plain, ours):
            twin.losses = twin.steps(0, 1, 2)
            frozen = [twin.model.inner, *twin.model.blocks[:3]]
            if twin.manager is None:
                for module in frozen:
                    module.requires_grad_(requires_grad=False)
            else:
                manager.freeze(frozen)
            twin.losses += twin.steps(3, 4, 5)
        assert_equal((ours.losses, ours.weights()), (plain.losses, plain.weights()))
        assert manager.plan is not None
        assert manager.timeline().plan_misses == 0  # type: ignore[union-attr]


def test_chunks_that_are_packed_again_are_updated_inside_backward() -> None:
    def build() -> nn.Module:
        return Blocks(num_blocks=8)

    plain = Twin(None, build)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=4 * CHUNK_NUMEL)) as manager:
        ours = Twin(manager, build, in_backward=True)
        for twin in (plain, ours):
            twin.losses = twin.steps(0, 1, 2)
            frozen = [twin.model.inner, *twin.model.blocks[::2]]
            if twin.manager is None:
                for module in frozen:
                    module.requires_grad_(requires_grad=False)
            else:
                assert manager.freeze(frozen).packed_nbytes > 0
            twin.losses += twin.steps(3, 4, 5)
        assert_equal((ours.losses, ours.weights()), (plain.losses, plain.weights()))
        assert manager.trace is not None
        kinds = [moment.kind for moment in manager.trace.moments]
        assert Kind.CREATE in kinds[kinds.index(Kind.UPDATE) :]


def test_a_checkpoint_goes_into_an_optimizer_that_waits(tmp_path: Any) -> None:
    plain = Twin(None, Blocks)
    expected = plain.steps(*range(6))
    losses = []
    for in_backward in (True, False):
        with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
            ours = Twin(manager, Blocks, in_backward=in_backward)
            if losses:
                manager.load(tmp_path / "saved", ours.optimizer)
            losses += ours.steps(*range(len(losses), len(losses) + 3))
            manager.save(tmp_path / "saved", ours.optimizer)
    assert losses == expected


# What cannot be, or would be something else than in plain PyTorch.


@pytest.fixture
def ours() -> Any:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks, in_backward=True)
        twin.steps(0, 1)
        yield twin
        gc.collect()


REFUSED: dict[str, Callable[[Any], object]] = {
    "forward": lambda ours: ours.model(features(3)),
    "evaluation": lambda ours: _evaluate(ours),
    "reading a weight": lambda ours: ours.model.inner.weight.sum().item(),
    "gather": lambda ours: ours.manager.gather(ours.model.inner.weight).__enter__(),
    "gradients": lambda ours: ours.manager.gather(ours.model.inner.weight, grads=True).__enter__(),
    "state_dict": lambda ours: ours.manager.state_dict(),
    "model's state_dict": lambda ours: ours.model.state_dict(),
    "lazy state_dict": lambda ours: [v.sum() for v in ours.manager.state_dict(lazy=True).values()],
    "optimizer's state_dict": lambda ours: ours.optimizer.state_dict(),
    "a state": lambda ours: ours.optimizer.state[ours.model.inner.weight]["exp_avg"].sum(),
    "load_state_dict": lambda ours: ours.manager.load_state_dict(ours.saved),
    "save": lambda ours: ours.manager.save(ours.path, ours.optimizer),
    "freeze": lambda ours: ours.manager.freeze(ours.model.inner),
    "zero_grad": lambda ours: ours.optimizer.zero_grad(),
    "clip_grad_norm_": lambda ours: ours.optimizer.clip_grad_norm_(1.0),
}


def _evaluate(ours: Any) -> None:
    with torch.no_grad():
        ours.model(features(3))


@pytest.mark.few(8)
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_between_backward_and_step(what: str, ours: Any, tmp_path: Any) -> None:
    """Nothing is lost: after the step, training continues as if nobody had asked."""
    plain = Twin(None, Blocks)
    plain.steps(0, 1)
    ours.path, ours.saved = tmp_path / "saved", ours.manager.state_dict()
    loss = ours.loss(features(2))
    loss.backward()
    with pytest.raises(chunkmem.StateError, match=r"optimizer\.step\(\)"):
        REFUSED[what](ours)
    ours.update()
    assert loss.item() == plain.step(features(2))
    assert_equal((ours.steps(3, 4), ours.left()), (plain.steps(3, 4), plain.left()))


def test_options_that_change_before_the_step(ours: Any) -> None:
    ours.loss(features(2)).backward()
    group = ours.optimizer.param_groups[0]
    before, group["lr"] = group["lr"], 0.5
    with pytest.raises(chunkmem.StateError, match=r"lr 0\.01.*lr 0\.5.*updated with the former"):
        ours.optimizer.step()
    group["lr"] = before
    ours.update()
    group["lr"] = 0.5  # now it may
    ours.step(features(3))


def test_gradients_that_are_discarded_before_the_step(ours: Any) -> None:
    ours.loss(features(2)).backward()
    ours.model.inner.weight.grad = None
    with pytest.raises(
        chunkmem.StateError, match=r"inner\.weight, were discarded or replaced between backward and step"
    ):
        ours.optimizer.step()
    ours.optimizer.zero_grad()
    ours.step(features(3))


def test_a_second_backward_before_the_step(ours: Any) -> None:
    first, second = ours.loss(features(2)), ours.loss(features(3))
    first.backward()
    with pytest.raises((chunkmem.StateError, RuntimeError), match=r"second gradient|inplace operation"):
        second.backward()


def test_torch_clips_nothing_in_silence(ours: Any) -> None:
    ours.loss(features(2)).backward()
    with pytest.raises(chunkmem.StateError, match="in_backward=True"):
        torch.nn.utils.clip_grad_norm_(ours.model.parameters(), 1.0)


def test_what_is_refused_from_the_start() -> None:
    for keys, options, message in (
        ({}, {"max_grad_norm": 1.0}, r"clipped to a global norm of 1\.0"),
        ({"gradient_clipping": 2.0}, {}, r"clipped to a global norm of 2\.0"),
        ({"precision": "fp16"}, {}, "in fp16 such a step is skipped"),
    ):
        with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys)) as manager:
            model = manager.wrap(Blocks())
            with pytest.raises(chunkmem.ConfigError, match=message):
                chunkmem.AdamW(model.parameters(), manager=manager, in_backward=True, **options)


def test_several_backwards_a_step_are_refused(ours: Any) -> None:
    with pytest.raises(chunkmem.StateError, match=r"manager\.accumulate\(2\)"):
        ours.manager.accumulate(2)
    ours.manager.accumulate(1)
    with pytest.raises(chunkmem.StateError, match="last=False"):
        ours.manager.backward(ours.loss(features(2)), last=False)
    pipe = ours.manager.pipeline(ours.model.blocks, loss_fn=nn.functional.mse_loss, micro_batches=2)
    with pytest.raises(chunkmem.StateError, match=r"pipe\.step\(\)"):
        pipe.step(features(2), features(3))
    ours.step(features(4))


def test_the_configuration_asks_for_it() -> None:
    chosen = config(AMPLE_NBYTES, optimizer={"type": "AdamW", "params": {"in_backward": True}})
    with chunkmem.ChunkManager(chosen) as manager:
        model = manager.wrap(mlp())
        assert chunkmem.AdamW(model.parameters(), manager=manager).in_backward
        assert not chunkmem.AdamW(model.parameters(), manager=manager, in_backward=False).in_backward
        plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
        assert manager.optimizer(plain).in_backward  # type: ignore[attr-defined]
        assert not manager.optimizer(plain, in_backward=False).in_backward  # type: ignore[attr-defined]
