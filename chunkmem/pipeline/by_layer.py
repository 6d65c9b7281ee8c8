"""One block after the other, each for all micro-batches: what moves does not depend on how many there are.

Forward runs a block for all micro-batches before the next block, and backward likewise, the last micro-batch first. So
the weights of a block come to the device twice a step, and its gradient leaves it once:

    plain loop  | 0.0 1.0 2.0   2.0 1.0 0.0 | 0.1 1.1 2.1   2.1 1.1 0.1 |        b.m: block b, micro-batch m
    by layer    | 0.0 0.1   1.0 1.1   2.0 2.1   2.1 2.0   1.1 1.0   0.1 0.0 |

Gradients are those of a loop that runs all forwards and then all backwards in reverse, bit for bit. A weight that two
blocks share gets those of the later block first.

Where a plan moves nothing, the order of blocks does not matter: steps are the plain loop, and nobody hears of calls
(`chunkmem.modules.hooks`, [Note: Resident models]). Nothing is stashed, and no graph is cut. What autograd saves is no
chunk then, so there has to be room for activations twice, and a batch with other shapes than those that were heard of
runs by layer. So do blocks that share a weight, for the order of its gradients.

Decided in ADR 35.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from chunkmem.activations.call_state import CallState
from chunkmem.activations.random_sources import RandomStates, global_sources
from chunkmem.activations.recompute import recomputing
from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import ConfigError, LayoutError, StateError
from chunkmem.data.sizes import shown
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.dtype_casts import cast_floats
from chunkmem.pipeline.arguments import Item, LossItem, arguments_of, call_with
from chunkmem.pipeline.call_times import CallTimes
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.frozen import FrozenBlocks, FrozenPrefix
from chunkmem.pipeline.joined import JoinedBatch, unchanged_weights
from chunkmem.pipeline.micro_batches import MicroBatch, split
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.outputs import BlockOutput, Gradients
from chunkmem.pipeline.random_streams import MicroBatchStreams, RandomStreams, states_of
from chunkmem.pipeline.width import Pipeline
from chunkmem.runtime.values import Structure, is_flat


class _Outermost(nn.Module):
    """Its call is that of a model from outside; what runs in it is one forward."""

    def forward(self, run: Callable[[], None]) -> None:
        run()


@dataclass(frozen=True)
class _Batch:
    """What runs: its parts, by block what that has returned for each part, and which blocks are frozen."""

    parts: Sequence[MicroBatch]
    frozen: FrozenBlocks
    outputs: defaultdict[int, dict[int, BlockOutput]] = field(default_factory=lambda: defaultdict(dict))
    """By micro-batch, then by block: the block's output; frozen blocks that did not run have none."""

    @property
    def is_joined(self) -> bool:
        """Outputs are wanted, not a loss."""
        return self.parts[0].divisor is None


class ByLayerPipeline(Pipeline):
    """Blocks in one process, or on ranks that share all chunks."""

    def __init__(self, runtime: Runtime, options: PipelineOptions) -> None:
        """Run the blocks of `options` in turn.

        Raises:
            LayoutError: one has parameters that the manager does not have.
            ConfigError: there is an option for stages.
        """
        is_asked = options.schedule not in ("auto", "by-layer") or options.stages_per_rank is not None
        if is_asked and options.width is None:  # else it is for when there are stages
            raise ConfigError(
                f"schedule {shown(options.schedule)} is for stages over ranks: make the manager with a mesh that has a "
                'dimension "stage", or leave out schedule and stages_per_rank'
            )
        super().__init__(runtime, options)
        chain = [module for module in (options.first, *options.blocks) if module is not None]
        named = [module for module in (*chain, options.last) if module is not None]
        names = _names(runtime, named)
        self._items = [Item(module, name=names[id(module)]) for module in chain]
        loss = LossItem(options, casts=runtime.is_lowered)
        self._items.append(Item(loss, name=names.get(id(options.last), "loss")))
        self._statistics = DeferredStatistics(named if options.deferred_batch_norm else ())
        self._prefix = FrozenPrefix(chain, options.cache, units=runtime.sharding.units)
        self._outermost: dict[tuple[int, bool], _Outermost] = {}
        """By the first block that runs, and whether outputs are joined: the outermost module of such steps, which are a
        kind of step of their own."""
        self._hooked = set[Hashable]()
        """Forms of the micro-batches of steps that were heard of; none where blocks share a weight."""
        self._is_running = False
        self._pending: tuple[weakref.ref[JoinedBatch], _Batch] | None = None
        """What `pipe(x)` has returned, with the batch that its backward may come to."""
        self._rng = global_sources()
        self._random = RandomStreams(runtime.memory.compute.generators())

    def __repr__(self) -> str:
        how = f"micro_batches={self._options.micro_batches}, checkpoint={self._options.checkpoint!r}"
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
        runtime.require_several_backwards("pipe.step()")
        if not torch.is_grad_enabled():
            raise StateError("pipe.step() computes gradients; under torch.no_grad() call the model itself")
        with runtime.modules.step_lock.taken():
            with runtime.ranks.telling():
                self._require_over("pipe.step()")
                parts = split(inputs, target, num=self._options.micro_batches)
                batch = _Batch(parts, self._prefix.begin(parts, ids))
            with self._running(batch, "pipe.step()"), self._statistics.mini_batch(), self.times.step(batch.parts):
                self._root(batch)(lambda: self._forward(batch))
                loss = self._loss(batch)
                with runtime.backward(), runtime.sharding.units.one_backward():
                    scale = 1.0 if runtime.scaler is None else runtime.scaler.loss_scale
                    for output in batch.outputs[len(self._items) - 1].values():
                        output.begin_backward(scale)
                    self._backward(batch)
            self._drop(batch)
        self.end_step()
        return loss

    def __call__(self, inputs: Any) -> Any:
        """Run forward of a batch, and return what the blocks and `last` do for all of it, joined along dimension 0.

        With gradients enabled, a loss of it may be anything: its backward is that of the blocks, one after the other,
        and comes to `inputs` that require gradients. It comes once, before the next call of the pipeline.

        Args:
            inputs: as for `step`.

        Raises:
            StateError: as `step`; or an output has no row for each sample, or the backward of an earlier call may come.
            ConfigError: with gradients and `deferred_batch_norm`, or a cache.
            CapacityError: something does not fit.
        """
        self.require_current()
        joined, is_training = JoinedBatch(inputs), torch.is_grad_enabled()
        if is_training:
            self._runtime.require_several_backwards("pipe(x)")
            if self._options.deferred_batch_norm or self._options.cache is not None:
                asked = "deferred_batch_norm" if self._options.deferred_batch_norm else "a cache"
                raise ConfigError(f"pipe(x) with gradients and {asked}: call pipe.step(x, y)")
        with self._runtime.modules.step_lock.taken():
            with self._runtime.ranks.telling():
                self._require_over("pipe(x)")
                whole = split(joined.inputs, None, num=self._options.micro_batches)
            parts = [replace(part, divisor=None) for part in whole]
            frozen = FrozenBlocks() if joined.wants_gradients or not is_training else self._prefix.begin(parts, None)
            batch, require_same = _Batch(parts, frozen), unchanged_weights(item.unit for item in self._items)
            with self._running(batch, "pipe(x)"):
                self._root(batch)(lambda: self._forward(batch))
                last = batch.outputs[len(self._items) - 1]
                values, lengths = [last[at].kept() for at in range(len(parts))], [part.num_samples for part in parts]
                is_trained = any(output.requires_grad for output in last.values())
                backward = partial(self._backward_of, batch, require_same) if is_trained else None
                outputs = joined.outputs(values, lengths, backward)
            if is_trained:
                self._pending = weakref.ref(joined), batch
            else:
                self._drop(batch)
        return outputs

    def _backward_of(self, batch: _Batch, require_same: Callable[[], None], gradients: Sequence[Gradients]) -> None:
        """Run the backward of a batch, given those of its outputs by micro-batch."""
        self._pending, last = None, batch.outputs[len(self._items) - 1]
        with self._runtime.modules.step_lock.taken(), self._running(batch, "a backward of pipe(x)"):
            require_same()
            for number, given in enumerate(gradients):
                last[number].take(given)
            with self._runtime.ranks.telling(), self._runtime.sharding.units.one_backward():
                self._backward(batch)
            self._drop(batch)
        self.end_step()

    @contextmanager
    def _running(self, batch: _Batch, call: str) -> Iterator[None]:
        """Surround the forward or backward of a batch, of which no other one may run; free what an interrupted one has
        left."""
        if self._is_running:
            raise StateError(f"{call} inside of pipe.step() or of a backward: end the one before the next begins")
        access = self._runtime.modules.access
        self._is_running, others = True, access.num_calls
        try:
            yield
        except BaseException:
            self._runtime.controller.excuse_iteration()
            self._drop(batch)
            raise
        finally:
            self._is_running, access.num_calls = False, others

    def _require_over(self, call: str) -> None:
        """Raise a `StateError` if the backward of another call may come, and free what is left of one that may not."""
        if self._pending is not None:
            earlier, batch = self._pending[0](), self._pending[1]
            if earlier is not None and earlier.is_pending:
                raise StateError(
                    f"{call} before the backward of what pipe(x) has returned: run it first, or drop that (del out); "
                    "under torch.no_grad() pipe(x) has none"
                )
            self._drop(batch)
            self._pending = None

    @torch.no_grad()
    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Run forward of a batch, and return its loss. Arguments and errors are those of `step`."""
        self.require_current()
        batch = _Batch(split(inputs, target, num=self._options.micro_batches), FrozenBlocks())
        with self._runtime.modules.step_lock.taken():
            self._require_over("pipe.evaluate()")
            try:
                self._root(batch)(lambda: self._forward(batch))
                return self._loss(batch)
            finally:
                self._drop(batch)

    def _loss(self, batch: _Batch) -> torch.Tensor:
        return reduce(torch.add, [output.tensor for output in batch.outputs[len(self._items) - 1].values()])

    def _root(self, batch: _Batch) -> _Outermost:
        start, residence = (batch.frozen.start, batch.is_joined), self._runtime.controller.residence
        if start not in self._outermost:
            self._outermost[start] = _Outermost()
            self._runtime.memory.pager.events.has_inner_hooks.append(lambda: residence.pipeline is None)
            self._runtime.hooks.fit_outermost(self._outermost[start])
        is_other = self._prefix.cache is not None or batch.is_joined or type(self.times) is not CallTimes
        if not is_other and tuple(self._forms(batch)) in self._hooked:
            residence.pipeline = self._outermost[start]
        else:
            residence.leave()
        return self._outermost[start]

    def _drop(self, batch: _Batch) -> None:
        """Free what an interrupted step has left."""
        for output in (output for row in batch.outputs.values() for output in row.values()):
            output.drop()

    # Forward.

    def _forward(self, batch: _Batch) -> None:
        residence = self._runtime.controller.residence
        residence.pipeline = None
        if residence.is_on:
            self._forward_unheard(batch)
        else:
            self._forward_hooked(batch)

    def _forward_hooked(self, batch: _Batch) -> None:
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
        self._hooked.add(tuple(forms))

    def _forward_unheard(self, batch: _Batch) -> None:
        for number, part in enumerate(batch.parts):
            value = self._inputs(part)
            with self._statistics.micro_batch(number):
                for at in range(len(self._items)):
                    value = self._run(batch, at, number, value)
            stashed, name = self._runtime.modules.stashed, self._items[at].name
            batch.outputs[at][number] = BlockOutput(value, stashed, name=name, calls=Counter())

    def _inputs(self, part: MicroBatch) -> Any:
        return cast_floats(part.inputs, self._runtime.dtype) if self._runtime.is_lowered else part.inputs

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
                output = BlockOutput(value, modules.stashed, name=name, calls=Counter())
                del value
                batch.outputs[depth - 1][number] = output
                output.stash()

    def _forward_by_layer(self, batch: _Batch, streams: MicroBatchStreams) -> None:
        for at in self._held_in_turn(batch):
            for number in range(len(batch.parts)):
                if at < batch.frozen.depth(number):
                    continue
                with streams.of(number):
                    self._call(batch, at, number)
                if at < len(self._items) - 1:
                    batch.outputs[at][number].stash()

    def _held_in_turn(self, batch: _Batch) -> Iterator[int]:
        """Yield the numbers of the blocks that run, each while all ranks hold its unit."""
        for at in range(batch.frozen.start, len(self._items)):
            with self._runtime.sharding.units.held(self._items[at].unit):
                yield at

    def _forward_in_turn(self, batch: _Batch) -> None:
        """Run one micro-batch after the other. All ranks bring together what they run, also if one has fewer."""
        forms, number, num = self._forms(batch), 0, len(batch.parts)
        states, foreign = [states_of(self._random.generators)], RandomStates(self._rng)
        while not self._agree(f"micro-batch {number} is not there", holds=number >= num):
            for at in self._held_in_turn(batch):
                if number < num and at >= batch.frozen.depth(number):
                    self._call(batch, at, number)
            states += [states_of(self._random.generators)] if number < num else []
            number += 1
        self._random.learn(forms, states)
        if foreign.forget_undrawn():
            self._random.forget(forms)
        goes_by_layer = self._agree("the next step goes by layer", holds=self._random.begin(forms) is not None)
        if goes_by_layer and torch.is_grad_enabled():
            self._runtime.controller.excuse_iteration()

    def _forms(self, batch: _Batch) -> list[Hashable]:
        """Return what the random numbers that each micro-batch draws depend on."""
        modes = torch.is_grad_enabled(), tuple(item.module.training for item in self._items)
        return [(part.form, batch.is_joined, *modes) for part in batch.parts]

    def _agree(self, question: str, *, holds: bool) -> bool:
        return self._runtime.sharding.units.agree(f"pipe.step(): {question}", holds=holds)

    def _call(self, batch: _Batch, at: int, number: int) -> None:
        """Run a block for a micro-batch. When it is over, only autograd has what it was given."""
        part = batch.parts[number]
        given = batch.outputs[at - 1][number] if at else None
        value = self._inputs(part) if given is None else given.value()
        item, frozen, modules = self._items[at], batch.frozen, self._runtime.modules
        # Backward comes to this call alone, whatever other micro-batches have read: it is over when gradients land.
        modules.access.num_calls = Counter()
        with self._statistics.micro_batch(number), frozen.running(at, value), self.times.forward(item.own):
            result = self._run(batch, at, number, value)
        del value
        if at == frozen.num - 1:
            frozen.keep(number, result, name=item.name)
        self.times.returned(item.module, result)
        batch.outputs[at][number] = BlockOutput(result, modules.stashed, name=item.name, calls=modules.access.num_calls)
        if given is not None:
            given.end_call()

    def _run(self, batch: _Batch, at: int, number: int, value: Any) -> Any:
        """Run a block for a micro-batch, given a value; what it saves is a region's, if the call is heard of."""
        item, part, regions = self._items[at], batch.parts[number], self._runtime.modules.regions
        arguments = arguments_of(value if at < len(self._items) - 1 else (value, part.target, part.divisor))
        policy, place = self._options.policy(part), at * self._options.micro_batches + number
        is_hooked = not self._runtime.controller.residence.is_on
        if at < batch.frozen.num or not (is_hooked or regions.recomputes(policy, place)):
            return item.run(arguments)
        again: Callable[..., Any] = item.again
        given: Sequence[Any] = arguments
        if is_hooked or not is_flat(arguments):
            structure, given = Structure.of(arguments)
            again = partial(call_with, item.again, structure)
        if not is_hooked:
            with recomputing(again, given, {}, name=item.name, rng=self._rng):
                return item.again(*arguments)
        is_recomputed = regions.enter(item.name, policy, again, tuple(given), {}, start=regions.now(), number=place)
        try:
            return item(*arguments) if is_recomputed and item.again is item else item.run(arguments)
        finally:
            regions.leave()

    def _backward(self, batch: _Batch) -> None:
        """Run the backward of each block for all micro-batches, the last one first."""
        access = self._runtime.modules.access
        readers = dict[ManagedParameter, int]()
        for at in reversed(range(len(self._items))):
            if any(output.has_gradients for output in batch.outputs[at].values()):
                # Before it is known whether the unit is recomputed: that may differ between ranks.
                self._runtime.sharding.units.announce_module(self._items[at].unit)
            for number in reversed(range(len(batch.parts))):
                if number not in batch.outputs[at]:
                    continue
                output, given = batch.outputs[at].pop(number), batch.outputs[at - 1].get(number) if at else None
                access.num_calls = output.calls
                with self.times.backward([self._items[at].own]):
                    output.backward(given)
                if any(readers.setdefault(managed, at) != at for managed in output.calls):
                    self._hooked.clear()
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


def _names(runtime: Runtime, modules: list[nn.Module]) -> dict[int, str]:
    """Return what the model calls each module.

    Raises:
        LayoutError: one has parameters that the manager does not have.
    """
    known: dict[int, str] = {}
    parameters: set[int] = set()
    for model in runtime.registry.models:
        parameters.update(map(id, model.root.parameters()))
        for name, module in model.root.named_modules():
            known.setdefault(id(module), name or type(module).__name__)
    for module in modules:
        # What is not part of a model may be a wrapper of something that is.
        inner = next((known[id(each)] for each in module.modules() if id(each) in known), type(module).__name__)
        if not parameters.issuperset(map(id, module.parameters())):
            raise LayoutError(
                f"manager.pipeline(): a {type(module).__name__} has parameters of no model of this manager; build it "
                "inside manager.init(), or give its model to manager.wrap()"
            )
        known.setdefault(id(module), inner)
    return known
