"""Running statistics of batch normalisation over a whole mini-batch that is computed as micro-batches.

Each micro-batch is normalised by its own mean and variance, as without this, so outputs and gradients keep their bits.
Only what a layer learns for evaluation differs: its running mean and variance become those of `nn.BatchNorm` called
once on the whole mini-batch, and `num_batches_tracked` counts mini-batches.

Layers are not replaced, so their class, their `state_dict` and subclasses with a forward of their own stay as they are.
During one call, a layer has other tensors for running statistics, and a momentum of 1: torch's kernel leaves the mean
of the micro-batch there, rounded. Deviations from it are small, so their mean and variance have all digits, and are
merged in float64 (Chan, Golub and LeVeque 1979); E[x²] - E[x]² has none left where the mean is large. Hooks do that,
and are there during a mini-batch only.

The pipeline says which micro-batch it computes, and when a mini-batch begins and ends; nothing is guessed from counts,
so fewer micro-batches than usual are right, too. A call that belongs to no micro-batch, or that backward makes, is a
recomputation: it counts for nothing, by chunkmem or by torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from chunkmem.data.errors import ConfigError

_RUNNING, _COUNT = ("running_mean", "running_var"), "num_batches_tracked"


@dataclass
class _Values:
    """The values that one call of a layer was given, over the micro-batches so far, by channel."""

    count: int
    """Number of elements in each channel."""
    mean: torch.Tensor
    squares: torch.Tensor
    """Sum of squared deviations from the mean."""

    def add(self, other: _Values) -> None:
        """Take in those of another micro-batch."""
        count, delta = self.count + other.count, other.mean - self.mean
        self.mean += delta * (other.count / count)
        self.squares += other.squares + delta.square() * (self.count * other.count / count)
        self.count = count


class DeferredStatistics:
    """Collects the statistics of `BatchNorm` layers over the micro-batches of each mini-batch.

    The pipeline says which micro-batch is computed:

        with statistics.mini_batch():
            for index, inputs in enumerate(micro_batches):
                with statistics.micro_batch(index):
                    model(inputs)
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        """Collect those of layers in these modules.

        Raises:
            ConfigError: a layer is a `SyncBatchNorm`.
        """
        self._roots = tuple(roots)
        for name, module in (found for root in self._roots for found in root.named_modules()):
            if isinstance(module, nn.SyncBatchNorm):
                raise ConfigError(
                    f"deferred_batch_norm: {name or 'a block'} is a SyncBatchNorm, which exchanges its statistics in "
                    "each micro-batch to normalise by those of all ranks, and keeps them to itself; use BatchNorm "
                    "layers, or leave out deferred_batch_norm"
                )
        self._micro_batch: int | None = None
        self._own: dict[_BatchNorm, tuple[dict[str, torch.Tensor | None], float | None]] = {}
        """Of layers whose call is running: their buffers and momentum, in place of which they have others."""
        self._num_calls: Counter[tuple[_BatchNorm, int]] = Counter()
        """Number of calls by (layer, micro-batch)."""
        self._values: defaultdict[_BatchNorm, list[_Values]] = defaultdict(list)
        """One item for each call in a micro-batch: a shared layer has several."""

    @contextlib.contextmanager
    def mini_batch(self) -> Iterator[None]:
        """Update running statistics when the body, forward and backward of a mini-batch, is over.

        After an exception they stay as they were.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            for module in dict.fromkeys(module for root in self._roots for module in root.modules()):
                if isinstance(module, _BatchNorm):
                    begin = module.register_forward_pre_hook(self._begin_call)
                    end = module.register_forward_hook(self._end_call, with_kwargs=True, always_call=True)
                    stack.callback(begin.remove)
                    stack.callback(end.remove)
            yield
            for layer, calls in self._values.items():
                for values in calls:
                    _update(layer, values)

    @contextlib.contextmanager
    def micro_batch(self, index: int) -> Iterator[None]:
        """Collect what layers are given within: it belongs to that micro-batch of the mini-batch under way, if any."""
        before, self._micro_batch = self._micro_batch, index
        try:
            yield
        finally:
            self._micro_batch = before

    def _begin_call(self, layer: _BatchNorm, _args: Any) -> None:
        if layer.training and layer.running_mean is not None:
            own = {name: layer._buffers[name] for name in (*_RUNNING, _COUNT)}
            self._own[layer] = own, layer.momentum
            for name in _RUNNING:
                # Zeros: the kernel multiplies what it finds by 1 - momentum = 0, which leaves NaN as it is.
                layer._buffers[name] = torch.zeros_like(own[name])  # type: ignore[arg-type]
            layer._buffers[_COUNT] = None
            layer.momentum = 1.0

    def _give_back(self, layer: _BatchNorm) -> None:
        own, layer.momentum = self._own.pop(layer)
        layer._buffers.update(own)

    def _end_call(self, layer: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if layer not in self._own:
            return
        mean = layer.running_mean
        self._give_back(layer)
        is_recomputation = self._micro_batch is None or torch._C._current_graph_task_id() != -1
        if is_recomputation or output is None:  # None: the call raised something
            return
        assert mean is not None
        assert self._micro_batch is not None
        values = _values_of(args[0] if args else kwargs["input"], mean)
        number = self._num_calls[layer, self._micro_batch]
        self._num_calls[layer, self._micro_batch] += 1
        before = self._values[layer]
        if number == len(before):
            before.append(values)
        else:
            before[number].add(values)

    def _forget(self) -> None:
        # An interrupt from the keyboard skips hooks.
        for layer in list(self._own):
            self._give_back(layer)
        self._values.clear()
        self._num_calls.clear()


@torch.no_grad()
def _values_of(inputs: torch.Tensor, mean: torch.Tensor) -> _Values:
    """Return the values that a layer was given, shape (samples, channels, ...), from about their mean."""
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    others = [dim for dim in range(inputs.dim()) if dim != 1]
    variance, rest = torch.var_mean(inputs - mean.float().view(shape), others)
    count = inputs.numel() // inputs.shape[1]
    return _Values(count, mean.double() + rest.double(), variance.double() * (count - 1))


@torch.no_grad()
def _update(layer: _BatchNorm, values: _Values) -> None:
    """Do what one call of a layer with all these values does to its running statistics."""
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    pairs = (layer.running_mean, values.mean), (layer.running_var, values.squares / (values.count - 1))
    for running, found in pairs:
        assert running is not None
        running.copy_(running.double().lerp(found, factor or 0.0))
