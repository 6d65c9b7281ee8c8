"""Master weights of models built in bf16, fp16 or a mixture: as if each were a float32 copy of what was built."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import CapacityError, CheckpointError
from chunkmem.data.types import Role
from chunkmem.estimate.rehearse import Setting, rehearse
from chunkmem.optim.scaler import LossScaler
from tests.cpu.test_estimate_truth import as_model
from tests.cpu.test_precision import AMPLE_NBYTES, FP16, chunked, config
from tests.helpers.audit import audit
from tests.helpers.low_precision import LowPlain
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.training import STEPS, VARIANTS, Chunked, Outcome, Trainer, Variant, assert_same
from tests.helpers.zoo import ZOO, ZooModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GPT, CNN = (next(case for case in ZOO if case.name == name) for name in ("gpt", "cnn"))


def in_bf16(model: nn.Module) -> nn.Module:
    return _converted(model, [torch.bfloat16])


def in_fp16(model: nn.Module) -> nn.Module:
    return _converted(model, [torch.float16])


def mixed(model: nn.Module) -> nn.Module:
    """Parameters in turns, as what was built; integer buffers and others are what they were."""
    return _converted(model, [torch.float32, torch.bfloat16, torch.float16])


def bf16_but_statistics(model: nn.Module) -> nn.Module:
    """Batch statistics stay in float32, as do the modules that have them."""
    return _converted(model, [torch.bfloat16])


def _converted(model: nn.Module, dtypes: list[torch.dtype]) -> nn.Module:
    for index, param in enumerate(model.parameters()):
        param.data = param.data.to(dtypes[index % len(dtypes)])
    return model


def built(case: ZooModel, convert: Callable[[nn.Module], nn.Module]) -> ZooModel:
    name = f"{case.name}_{convert.__name__}"
    return ZooModel(name, lambda: convert(case.build()), case.batch, case.loss, case.chunk_numel)


CASES = (built(GPT, in_bf16), built(GPT, in_fp16), built(GPT, mixed), built(CNN, bf16_but_statistics))
VARIANTS_HERE = [variant for variant in VARIANTS if variant.name in ("plain", "half_frozen", "scheduler")]


@functools.cache
def plain(case: ZooModel, variant: Variant, precision: str) -> Outcome:
    scaler = LossScaler(chunkmem.Config.from_dict({"fp16": FP16}).fp16) if precision == "fp16" else None
    return Trainer(case, variant, LowPlain(DTYPES[precision], scaler)).run(STEPS)


def without_masters(outcome: Outcome) -> Outcome:
    """What torch's optimizers have, too."""
    state = {key: value for key, value in outcome.optimizer.items() if key != "master_weights"}
    return Outcome(outcome.losses, outcome.weights, outcome.buffers, state)


@pytest.mark.few(1)
@spread(case=CASES, precision=("bf16", "fp16"), variant=VARIANTS_HERE)
def test_what_was_built_in_any_dtype_trains_as_with_float32_copies(
    case: ZooModel, precision: str, variant: Variant
) -> None:
    expected = plain(case, variant, precision)
    outcome, required_nbytes = chunked(case, variant, AMPLE_NBYTES, precision)
    assert_same(without_masters(outcome), expected)
    tight, _ = chunked(case, variant, required_nbytes, precision)
    assert_same(without_masters(tight), expected)
    dtypes = {name: value.dtype for name, value in case.build().state_dict().items()}
    assert {name: value.dtype for name, value in outcome.weights.items()} == dtypes


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_counts_the_same_bytes(case: ZooModel) -> None:
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES)) as manager:
        trainer = Trainer(case, VARIANTS_HERE[0], Chunked(manager))
        trainer.step()
        trainer.evaluate()
        trace = manager.trace
    assert trace is not None
    predicted = rehearse(as_model(case, VARIANTS_HERE[0]), Setting(precision="bf16", chunk_numel=2 * case.chunk_numel))
    assert predicted.trace.chunk_nbytes == trace.chunk_nbytes
    assert predicted.trace.digest == trace.digest


# What is kept, and what comes back


class Small:
    """Layers built in a dtype, some frozen, and their optimizer."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, frozen: Iterable[int] = (), **keys: Any) -> None:
        memory = {"device": 64 << 10, "host": 8 << 20}
        settings = {"precision": "bf16", "memory": memory, "default_chunk_size": 1056}
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(settings | keys))
        torch.manual_seed(0)
        with self.manager.init():
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).to(dtype)
            for index in frozen:
                self.model[index].requires_grad_(False)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)

    def step(self, seed: int) -> float:
        loss = self.model(batch(seed)).square().mean()
        self.manager.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        return loss.item()

    def nbytes(self, role: Role) -> int:
        """Bytes of the chunks of a role that have content."""
        chunks = self.manager.runtime.memory.store.chunks.values()
        return sum(chunk.nbytes for chunk in chunks if chunk.id.role == role and chunk.newest_tier() is not None)


def batch(seed: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[key].dtype and torch.equal(value, right[key]) for key, value in left.items()
    )


def test_small_updates_of_a_model_built_in_bf16_are_not_lost() -> None:
    """A step of 2e-5 is a sixth of what bf16 numbers at 0.05 round to: rounded each time, nothing ever changes."""
    changed = {}
    for master_weights in (True, False):
        small = Small(master_weights=master_weights)
        small.optimizer.param_groups[0].update(lr=2e-5, weight_decay=0.0)
        with small.manager.gather(), torch.no_grad():
            for param in small.model.parameters():
                param.fill_(0.05)
        before = small.manager.state_dict()
        for seed in range(20):
            small.step(seed)
        after = small.manager.state_dict()
        assert {value.dtype for value in after.values()} == {torch.bfloat16}
        changed[master_weights] = sum(int(value.ne(before[key]).sum()) for key, value in after.items())
        nbytes = small.nbytes(Role.PARAM)
        expected = 2 * nbytes if master_weights else 0
        assert (small.nbytes(Role.MASTER), small.nbytes(Role("exp_avg"))) == (expected, max(expected, nbytes))
        small.manager.close()
    assert changed[True] > 3000
    assert changed[False] == 0


@pytest.mark.few(4)
@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("host", [False, True])
def test_without_master_weights_updates_are_those_of_torch_in_bf16(
    dtype: torch.dtype, max_norm: float, *, host: bool
) -> None:
    """On purpose: 8 bytes a parameter. What was built in float32 is rounded once, when it is packed."""
    hybrid = {"optimizer": {"params": {"use_hybrid_adam": not host}}}
    memory = {"device": (16 if host else 64) << 10, "host": 8 << 20}
    small = Small(dtype, master_weights=False, gradient_clipping=max_norm, memory=memory, **hybrid)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for seed in range(6):
        loss = plain(batch(seed).bfloat16()).float().square().mean()
        loss.backward()
        if max_norm:
            grads = [param.grad for param in plain.parameters() if param.grad is not None]
            norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
            for grad in grads:  # torch._foreach_mul_ would round the factor
                grad.mul_(min(1.0, max_norm / (float(norm.float()) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        assert small.step(seed) == loss.item()
    assert same(small.manager.state_dict(), {key: value.to(dtype) for key, value in plain.state_dict().items()})
    assert "master_weights" not in small.optimizer.state_dict()
    small.manager.close()


def resumed(first: Small, path: Any, **keys: Any) -> Small:
    """Train on from what was saved to a file."""
    torch.save((first.manager.state_dict(), first.optimizer.state_dict()), path)
    weights, states = torch.load(path)
    second = Small(**keys)
    second.manager.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    return second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_resumed_training_goes_on_to_the_bit(dtype: torch.dtype, tmp_path: Any) -> None:
    first = Small(dtype)
    for seed in range(3):
        first.step(seed)
    second = resumed(first, tmp_path / "saved.pt", dtype=dtype)
    assert [second.step(seed) for seed in range(3, 7)] == [first.step(seed) for seed in range(3, 7)]
    assert same(second.manager.state_dict(), first.manager.state_dict())
    masters = [each.optimizer.state_dict().get("master_weights", {}) for each in (first, second)]
    assert same(*masters)
    assert len(masters[0]) == (0 if dtype is torch.float32 else 8), "float32 weights are in the model's own state"


def test_master_weights_of_other_weights_are_refused_and_nothing_is_loaded() -> None:
    """In the other order the weights, which were rounded, would take the place of the master weights without a word."""
    first, second = Small(), Small()
    for seed in range(3):
        first.step(seed)
    weights, states = second.manager.state_dict(), first.optimizer.state_dict()
    with pytest.raises(
        CheckpointError, match=r"0\.0\.weight differs in \d+ of 1024 elements.*manager\.load_state_dict"
    ):
        second.optimizer.load_state_dict(states)
    assert same(second.manager.state_dict(), weights)
    assert second.optimizer.state_dict()["state"] == {}
    del states["master_weights"]
    second.optimizer.load_state_dict(states)
    assert same(second.manager.state_dict(), weights)


@pytest.mark.parametrize(
    ("wrong", "told"), [(3, "is of type int, not a tensor"), (torch.zeros(2), r"is \(2,\) instead")]
)
def test_master_weights_that_are_none_are_refused(wrong: object, told: str) -> None:
    small = Small()
    small.step(0)
    states = small.optimizer.state_dict()
    states["master_weights"][0] = wrong
    with pytest.raises(CheckpointError, match=told):
        small.optimizer.load_state_dict(states)


def test_torch_loads_the_state_and_what_it_gives_back_is_loaded() -> None:
    small = Small()
    for seed in range(3):
        small.step(seed)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).bfloat16()
    plain.load_state_dict(small.manager.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    optimizer.load_state_dict(small.optimizer.state_dict())
    plain(batch(3).bfloat16()).square().mean().backward()
    optimizer.step()
    small.manager.load_state_dict(plain.state_dict())
    small.optimizer.load_state_dict(optimizer.state_dict())
    assert same(small.manager.state_dict(), plain.state_dict())
    small.step(4)


def test_float32_weights_loaded_into_a_model_built_in_bf16_keep_their_bits_in_the_master_copy() -> None:
    small = Small()
    weights = {key: torch.randn(value.shape) for key, value in small.manager.state_dict().items()}
    small.manager.load_state_dict(weights)
    assert same(dict(enumerate(weights.values())), small.optimizer.state_dict()["master_weights"])  # type: ignore[arg-type]
    assert same(small.manager.state_dict(), {key: value.bfloat16() for key, value in weights.items()})


# Frozen parameters


def test_what_is_frozen_and_exact_has_no_master_copy_and_no_states() -> None:
    """Two of four layers are frozen: adapters over a checkpoint in bf16 would not fit otherwise."""
    small = Small(frozen=(0, 1))
    before = small.manager.state_dict()
    for seed in range(3):
        small.step(seed)
    assert small.nbytes(Role.MASTER) == small.nbytes(Role("exp_avg")) == small.nbytes(Role.PARAM)
    after = small.manager.state_dict()
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed == {key for key in before if key[0] in "23"}


def test_a_frozen_model_needs_no_room_for_master_copies_and_states() -> None:
    """A gradient, states and a master copy of 200 KiB of frozen weights would take 14 times as much."""
    memory = {"device": 128 << 10, "host": 256 << 10}

    def built(*, freezes: bool) -> None:
        with chunkmem.ChunkManager(
            chunkmem.Config.from_dict({"precision": "bf16", "memory": memory, "default_chunk_size": 4096})
        ) as manager:
            with manager.init():
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))).bfloat16()
                if freezes:
                    model[:-1].requires_grad_(False)
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            for _ in range(3):
                manager.backward(model(torch.randn(4, 64)).sum())
                optimizer.step()
                optimizer.zero_grad()

    built(freezes=True)
    with pytest.raises(CapacityError):
        built(freezes=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_frozen_in_another_dtype_keeps_its_values(dtype: torch.dtype) -> None:
    small = Small(dtype, frozen=(0, 1))
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).to(dtype)
    small.step(0)
    frozen = {key: value for key, value in small.manager.state_dict().items() if key[0] in "01"}
    assert same(frozen, {key: plain.state_dict()[key] for key in frozen})


@pytest.mark.parametrize("writes", [False, True])
def test_a_parameter_that_is_unfrozen_is_trained_as_if_it_had_never_been_frozen(*, writes: bool) -> None:
    """Its master copy is made before its first update, of the weights as they are then."""
    outcomes = []
    for frozen in ((0, 1), ()):  # frozen when packed, or just after it
        small = Small(frozen=frozen)
        small.model[:2].requires_grad_(False)
        losses = [small.step(seed) for seed in range(3)]
        if writes:
            with small.manager.gather(small.model[0]), torch.no_grad():
                small.model[0][0].weight.mul_(0.5)
        small.model[0].requires_grad_(True)
        losses += [small.step(seed) for seed in range(3, 8)]
        outcomes.append((losses, small.manager.state_dict(), small.optimizer.state_dict()["master_weights"]))
        small.manager.close()
    (losses, weights, masters), (expected_losses, expected_weights, expected_masters) = outcomes
    assert losses == expected_losses
    assert same(weights, expected_weights)
    assert all(torch.equal(value, expected_masters[index]) for index, value in masters.items())
    assert set(masters) == {0, 1, 4, 5, 6, 7}


# Beside updates, while packing, over ranks


@pytest.mark.parametrize("master_weights", [True, False])
def test_updates_beside_backward_are_of_float32_weights_only(*, master_weights: bool) -> None:
    """Of weights without a master copy they failed in the kernels, group by group, each with a warning."""
    keys = {"optimizer": {"params": {"use_hybrid_adam": False}}, "client": {"opts": {"undo_log_ratio": 0.2}}}
    small = Small(master_weights=master_weights, memory={"device": 16 << 10, "host": 8 << 20}, **keys)
    for seed in range(4):
        small.step(seed)
    small.manager.backward(small.model(batch(4)).square().mean())
    updater = small.manager.runtime.updater
    updater.ahead.reserve({chunk.nbytes: 8 for chunk in small.manager.runtime.memory.store.chunks.values()})
    begun = [updater.ahead.begin(group, ()) for group in range(4)]
    assert any(begun) == master_weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.optimizer.step()
    small.manager.close()


def test_packing_asks_for_room_for_master_copies_of_what_was_built_in_bf16() -> None:
    memory = {"device": 4096, "host": 40_000}
    keys = {"precision": "bf16", "memory": memory, "default_chunk_size": 1024}
    for freezes in (True, False):
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(keys)) as manager:
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(10))).bfloat16()
            model.requires_grad_(not freezes)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            if freezes:
                manager.wrap(model)  # 2 bytes a parameter
                continue
            with pytest.raises(CapacityError, match=r"the weights take 60\.00 KiB in chunks"):
                manager.wrap(model)  # 6 bytes
            assert same(dict(model.state_dict()), before)


def test_what_cannot_be_packed_is_given_back_as_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"precision": "bf16", "default_chunk_size": 1024})) as manager:
        model = mixed(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(9))))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        place, calls = manager.runtime.memory.pager.place, 0

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 8:
                raise CapacityError("full", needed_nbytes=1, cap_nbytes=0)
            return place(*args, **kwargs)

        monkeypatch.setattr(manager.runtime.memory.pager, "place", fail)
        with pytest.raises(CapacityError, match="full"):
            manager.wrap(model)
        assert same(dict(model.state_dict()), before)


def over_ranks(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Train, save, resume, train on, and unfreeze; return weights and master weights, and what a wrong order says."""

    def built() -> tuple[chunkmem.ChunkManager, nn.Sequential, chunkmem.AdamW]:
        memory = {"device": 256 << 10, "host": 8 << 20}
        keys = {"precision": "bf16", "memory": memory, "default_chunk_size": 1056}
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(keys))
        torch.manual_seed(0)
        with manager.init():
            dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, dtype=dtype), nn.Tanh()) for dtype in dtypes))
            model[0].requires_grad_(False)
        return manager, model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)

    def step(seed: int) -> None:
        manager.backward(model(batch(seed)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    manager, model, optimizer = built()
    for seed in range(3):
        step(seed)
    weights, states = manager.state_dict(), optimizer.state_dict()
    manager.close()
    manager, model, optimizer = built()
    messages = []
    try:
        optimizer.load_state_dict(states)
    except CheckpointError as error:
        messages.append(str(error))
    manager.load_state_dict(weights)
    optimizer.load_state_dict(states)
    model[0].requires_grad_(True)
    for seed in range(3, 6):
        step(seed)
    result = manager.state_dict(), optimizer.state_dict()["master_weights"], messages
    manager.close()
    return result


def test_ranks_train_and_resume_what_was_built_in_several_dtypes_as_one_process() -> None:
    torch.set_num_threads(1)
    expected_weights, expected_masters, (message,) = over_ranks(0)
    assert "remove" in message
    with Team(2) as team:
        for weights, masters, messages in team.run(over_ranks):
            assert same(weights, expected_weights)
            assert same(masters, expected_masters)
            assert len(messages) == 1
