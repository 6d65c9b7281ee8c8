"""One block after the other, each for all micro-batches: what moves does not depend on how many there are.

[Note: By layer] Forward runs a block for all micro-batches before the next block, and backward likewise, the last
micro-batch first. So the weights of a block come to the device twice a step, and its gradient leaves it once:

    plain loop  | 0.0 1.0 2.0   2.0 1.0 0.0 | 0.1 1.1 2.1   2.1 1.1 0.1 |        b.m: block b, micro-batch m
    by layer    | 0.0 0.1   1.0 1.1   2.0 2.1   2.1 2.0   1.1 1.0   0.1 0.0 |

Gradients are those of a loop that runs all forwards and then all backwards in reverse, bit for bit. A weight that two
blocks share gets those of the later block first.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.errors import StateError
from chunkmem.nn.borders import cast_floats
from chunkmem.nn.call_state import CallState
from chunkmem.pipeline.arguments import Given, OfTensors, OnCopies, arguments_of
from chunkmem.pipeline.checkpoints import policy_of
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.frozen import Cache, FrozenBlocks, FrozenPrefix
from chunkmem.pipeline.micro_batches import MicroBatch, split
from chunkmem.pipeline.outputs import BlockOutput
from chunkmem.pipeline.random_streams import MicroBatchStreams, RandomStreams, foreign_states, states_of
from chunkmem.pipeline.width import OfWidth


@dataclass(frozen=True)
class Item:
    """A block, or what comes before or after the blocks."""

    name: str
    module: nn.Module

    @property
    def unit(self) -> nn.Module:
        """What is exchanged between ranks before it runs."""
        own = self.module.module if isinstance(self.module, LossItem) else self.module
        return self.module if own is None else own


class _Outermost(nn.Module):
    """Its call is that of a model from outside; what runs in it is one forward."""

    def forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        return run()


class LossItem(nn.Module):
    """What comes after the blocks, and the loss."""

    def __init__(self, module: nn.Module | None, loss_fn: Callable[..., torch.Tensor], *, casts: bool) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self._casts = casts

    def forward(self, given: Any, target: Any, divisor: float) -> torch.Tensor:
        output = given if self.module is None else self.module(*arguments_of(given))
        if self._casts:
            output = cast_floats(output, torch.float32)
        loss = self.loss_fn(output) if target is None else self.loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise StateError(f"loss_fn returned {what}; it has to return the mean loss of its samples as one number")
        return loss / divisor


@dataclass(frozen=True)
class _Batch:
    """What runs: its parts, by block what that has returned for each part, and which blocks are frozen."""

    parts: Sequence[MicroBatch]
    outputs: Sequence[dict[int, BlockOutput]]
    """By number of the part; blocks that are not run for it have none."""
    frozen: FrozenBlocks


class ByLayerPipeline(OfWidth):
    """Blocks in one process, or on ranks that share all chunks; see [Note: By layer]."""

    def __init__(
        self,
        runtime: Runtime,
        items: Sequence[Item],
        *,
        micro_batches: int,
        checkpoint: str,
        statistics: DeferredStatistics,
        cache: Cache | None = None,
    ) -> None:
        """Run `items` in turn, of which the last is a `LossItem`.

        Args:
            runtime: of the manager that has their parameters.
            items: what to run.
            micro_batches: parts of a batch.
            checkpoint: which of their calls are recomputed: see `ChunkManager.pipeline`.
            statistics: of layers whose running statistics are to be those of whole batches.
            cache: of what frozen blocks return; None: they run in each step.
        """
        self._runtime = runtime
        self._items = tuple(items)
        self._on_copies = [OnCopies(item.module, name=item.name) for item in items]
        self._num = micro_batches
        self._checkpoint = checkpoint
        self._statistics = statistics
        self._prefix = FrozenPrefix([item.module for item in items[:-1]], cache)
        self._outermost: dict[int, _Outermost] = {}
        """By the first block that runs: steps that begin with different ones are of different kinds."""
        self._is_running = False
        self._random = RandomStreams(runtime.memory.compute.generators())

    def __repr__(self) -> str:
        how = f"micro_batches={self._num}, checkpoint={self._checkpoint!r}"
        return f"ByLayerPipeline(blocks: {len(self._items) - 1}, {how})"

    def step(self, inputs: Any, target: Any = None, *, ids: Any = None) -> torch.Tensor:
        """Run forward and backward of a batch, and return its loss, without history.

        Args:
            inputs: what the first block is given: a tensor, a tuple (its arguments), or a dict of tensors. All tensors
                are split along their first dimension.
            target: the second argument of `loss_fn`, split likewise; None: it is called with the output alone.
            ids: with a cache, of each sample, the same in each epoch: a list, or a 1-D tensor of integers.

        Raises:
            StateError: there is nothing to split, or a block returns what cannot be passed on; nothing was accumulated.
                Or a frozen block, or a sample, cannot be cached: see `FrozenCache`.
            ConfigError: there is not one of `ids` for each sample.
            CapacityError: something does not fit.
        """
        self.require_current()
        runtime = self._runtime
        runtime.require_open()
        runtime.updater.in_backward.require_none("pipe.step()")
        if not torch.is_grad_enabled():
            raise StateError("pipe.step() computes gradients; under torch.no_grad() call the model itself")
        access = runtime.modules.access
        with runtime.modules.turn.taken():
            if self._is_running:
                raise StateError("pipe.step() inside of pipe.step(): end the one before the next begins")
            with runtime.ranks.telling():
                parts = split(inputs, target, num=self._num)
                batch = self._batch(parts, self._prefix.begin(parts, ids, units=runtime.sharding.units))
            self._is_running, others = True, access.num_calls
            try:
                with self._statistics.mini_batch(), self.timed(batch.parts):
                    loss: torch.Tensor = self._root(batch)(lambda: self._forward(batch))
                    with runtime.backward(), runtime.sharding.units.one_backward():
                        self._backward(batch)
            except BaseException:
                runtime.controller.excuse_iteration()
                raise
            finally:
                self._is_running, access.num_calls = False, others
                self._drop(batch)
        if self.epochs is not None:
            self.epochs.stepped()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Run forward of a batch, and return its loss. Arguments and errors are those of `step`."""
        self.require_current()
        self._runtime.require_open()
        batch = self._batch(split(inputs, target, num=self._num), FrozenBlocks())
        with self._runtime.modules.turn.taken():
            try:
                loss: torch.Tensor = self._root(batch)(lambda: self._forward(batch))
            finally:
                self._drop(batch)
        return loss

    def _batch(self, parts: Sequence[MicroBatch], frozen: FrozenBlocks) -> _Batch:
        return _Batch(parts, [{} for _ in self._items], frozen)

    def _root(self, batch: _Batch) -> _Outermost:
        start = batch.frozen.start
        if start not in self._outermost:
            self._outermost[start] = _Outermost()
            self._runtime.hooks.fit_outermost(self._outermost[start], name="pipeline")
        return self._outermost[start]

    def _drop(self, batch: _Batch) -> None:
        """Free what an interrupted step has left."""
        for output in (output for row in batch.outputs for output in row.values()):
            output.drop()

    # Forward.

    def _forward(self, batch: _Batch) -> torch.Tensor:
        self._read_cached(batch)
        forms = self._forms(batch)
        streams = self._random.begin(forms)
        is_known = self._agree("random numbers are known", holds=streams is not None)
        if streams is None or not is_known:
            self._forward_in_turn(batch)
        else:
            before = self._noted()
            self._forward_by_layer(batch, streams)
            wrong = streams.end()
            if wrong is not None:
                self._random.forget(forms)
                raise _drawn_otherwise(wrong, changed=["a block"] if before is None else before.put_back())
        losses = [output.tensor for output in batch.outputs[-1].values()]
        loss = losses[0].clone()
        for each in losses[1:]:
            loss += each
        return loss

    def _noted(self) -> CallState | None:
        """Write down what forward may change, to be put back if it has to be repeated; None: that cannot be done."""
        try:
            return CallState(None, [(item.name, item.module) for item in self._items], copies_large=False)
        except StateError:  # of a scripted block
            return None

    def _read_cached(self, batch: _Batch) -> None:
        """Have what the cache has, before anything takes its place there."""
        modules, device = self._runtime.modules, self._runtime.device
        for number in range(len(batch.parts)):
            if depth := batch.frozen.depth(number):
                name, value = self._items[depth - 1].name, batch.frozen.read(number, device)
                output = BlockOutput(value, modules.parked, name=name, calls=Counter())
                del value
                batch.outputs[depth - 1][number] = output
                output.park()

    def _forward_by_layer(self, batch: _Batch, streams: MicroBatchStreams) -> None:
        for at, item in enumerate(self._items[batch.frozen.start :], start=batch.frozen.start):
            with self._runtime.sharding.units.held(item.unit):
                for number in range(len(batch.parts)):
                    if at < batch.frozen.depth(number):
                        continue
                    with streams.of(number):
                        self._call(batch, at, number)
                    if at < len(self._items) - 1:
                        batch.outputs[at][number].park()

    def _forward_in_turn(self, batch: _Batch) -> None:
        """Run one micro-batch after the other. All ranks bring together what they run, also if one has fewer."""
        forms, number, num = self._forms(batch), 0, len(batch.parts)
        states, foreign = [states_of(self._random.generators)], foreign_states()
        while not self._agree(f"micro-batch {number} is not there", holds=number >= num):
            for at, item in enumerate(self._items[batch.frozen.start :], start=batch.frozen.start):
                with self._runtime.sharding.units.held(item.unit):
                    if number < num and at >= batch.frozen.depth(number):
                        self._call(batch, at, number)
            states += [states_of(self._random.generators)] if number < num else []
            number += 1
        self._random.learn(forms, states)
        if foreign_states() != foreign:
            self._random.forget(forms)
        goes_by_layer = self._agree("the next step goes by layer", holds=self._random.are_known(forms))
        if goes_by_layer and torch.is_grad_enabled():
            self._runtime.controller.excuse_iteration()

    def _forms(self, batch: _Batch) -> list[Hashable]:
        """Return what the random numbers that each micro-batch draws depend on."""
        modes = torch.is_grad_enabled(), tuple(item.module.training for item in self._items)
        return [(part.form, *modes) for part in batch.parts]

    def _agree(self, question: str, *, holds: bool) -> bool:
        return self._runtime.sharding.units.agree(f"pipe.step(): {question}", holds=holds)

    def _call(self, batch: _Batch, at: int, number: int) -> None:
        """Run a block for a micro-batch. When it is over, only autograd has what it was given."""
        part = batch.parts[number]
        given = batch.outputs[at - 1][number] if at else None
        value = self._first_value(part) if given is None else given.value()
        arguments = (value, part.target, part.divisor) if at == len(self._items) - 1 else arguments_of(value)
        del value
        policy, modules = policy_of(self._checkpoint, number, len(batch.parts)), self._runtime.modules
        # Backward comes to this call alone, whatever other micro-batches have read: it is over when gradients land.
        modules.access.num_calls = Counter()
        name, frozen = self._items[at].name, batch.frozen
        with self._statistics.micro_batch(number), frozen.running(at, arguments), self._timed_call(at):
            if at < frozen.num:
                result = self._run_once(at, arguments)
            else:
                result = self._run(at, policy, arguments, number=at * self._num + number)
        frozen.returned(at, number, result, name=name)
        if self.times is not None:
            self.times.returned(self._items[at].module, result)
        batch.outputs[at][number] = BlockOutput(result, modules.parked, name=name, calls=modules.access.num_calls)
        if given is not None:
            given.end_call()

    def _timed_as(self, at: int) -> nn.Module | None:
        """Return the module that an item's times count to; None: the loss alone."""
        module = self._items[at].module
        return module.module if isinstance(module, LossItem) else module

    def _timed_call(self, at: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.times is None else self.times.forward(self._timed_as(at))

    def _first_value(self, part: MicroBatch) -> Any:
        return cast_floats(part.inputs, self._runtime.dtype) if self._runtime.is_lowered else part.inputs

    def _run(self, at: int, policy: str, arguments: tuple[Any, ...], *, number: int) -> Any:
        item, on_copies, regions = self._items[at], self._on_copies[at], self._runtime.modules.regions
        again = OfTensors(on_copies.again, arguments)
        is_recomputed = regions.enter(
            item.name, policy, again, again.take_tensors(), {}, start=regions.now(), number=number
        )
        try:
            if is_recomputed and again.module is on_copies:
                return on_copies(*arguments)
            return self._run_once(at, arguments)
        finally:
            regions.leave()

    def _run_once(self, at: int, arguments: tuple[Any, ...]) -> Any:
        """Call a block that is not recomputed."""
        item, on_copies = self._items[at], self._on_copies[at]
        given = Given(arguments)
        result = item.module(*arguments)
        on_copies.writes = given.is_written(item.name) or bool(on_copies.writes)
        return result

    def _backward(self, batch: _Batch) -> None:
        """Run the backward of each block for all micro-batches, the last one first."""
        access, scaler = self._runtime.modules.access, self._runtime.scaler
        for output in batch.outputs[-1].values():
            output.begin_backward(1.0 if scaler is None else scaler.loss_scale)
        for at in reversed(range(len(self._items))):
            if any(output.has_gradients for output in batch.outputs[at].values()):
                # Before it is known whether the unit is recomputed: that may differ between ranks.
                self._runtime.sharding.units.announce_module(self._items[at].unit)
            for number in reversed(range(len(batch.parts))):
                if number not in batch.outputs[at]:
                    continue
                output, given = batch.outputs[at].pop(number), batch.outputs[at - 1].get(number) if at else None
                access.num_calls = output.calls
                with contextlib.nullcontext() if self.times is None else self.times.backward([self._timed_as(at)]):
                    output.backward(given)
                if given is not None:
                    given.park_gradients()


def _drawn_otherwise(number: int, *, changed: Sequence[str]) -> StateError:
    """Return the error for a micro-batch that has drawn more or fewer random numbers than those before it.

    Args:
        number: of the micro-batch.
        changed: what forward has written to and nobody can put back; buffers, attributes and generators are.
    """
    told = (
        f"micro-batch {number} has drawn another amount of random numbers than those before it, so the next ones have "
        "drawn other numbers than in a plain loop; no gradient was computed"
    )
    if changed:
        return StateError(
            f"{told}, but {changed[0]} was written to, and is not as it was: load what was saved last. Blocks that "
            "draw other amounts from the first step on run in the order of a plain loop"
        )
    return StateError(
        f"{told}, and buffers are as they were. Call pipe.step() again: from now on, forward runs in the order of a "
        "plain loop for batches like this one"
    )
