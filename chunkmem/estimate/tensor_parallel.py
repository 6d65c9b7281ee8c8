"""A model as one tensor-parallel rank has it: local parts of weights, and of activations between blocks.

[Note: Sequence parallelism]
Between blocks, each of `tp` ranks has 1 / tp of the positions of a sample, and so do norms. What reads a weight that is
divided by its rows ("colwise") gathers all positions first; what one that is divided by its columns ("rowwise") has
made is summed, and scattered by position. So a block has 2 all-gathers and 2 reduce-scatters in forward, and as many in
backward; computing waits for them. Gathered activations live as long as autograd keeps them. The loss is computed on a
part of the vocabulary (sums over it, of one number a position, are not counted).

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.model import blocks_in

GATHER = "gather"
"""In a `tp_plan`: what the module returns is gathered, as the output layer is no module."""
_HEAD = "colwise_gather_output"
_OF_VOCABULARY = (_HEAD, "embedding_rowwise")
_ROWS = ("colwise", *_OF_VOCABULARY)
"""Ways in which a rank has some rows of a weight; by "rowwise", it has some columns."""
_Exchanged = Callable[[Tensor], Tensor]
_POSITIONS = -2
"""The dimension of activations that is divided."""


def make_local(module: nn.Module, tp: int, *, exchange: Callable[[int], None]) -> None:
    """Leave a model what one of `tp` ranks has of it.

    Its `tp_plan` says how weights are divided, by names with ``*`` for a number, as those of transformers do:
    "colwise", "rowwise", "embedding_rowwise", and "colwise_gather_output" of the output layer. `exchange` is told of
    each all-gather and reduce-scatter, by the bytes of the whole tensor.

    Raises:
        ConfigError: the model has no plan, or one of another kind, or its heads or weights cannot be divided by `tp`.
    """
    plan: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    named = {name: re.sub(r"\b\d+\b", "*", name) for name, _ in module.named_modules()}
    if unmet := set(plan) - set(named.values()):
        raise ConfigError(f"tp={tp}: {min(unmet)} of tp_plan is no module of a {type(module).__name__}")
    styles = {name: plan[key] for name, key in named.items() if key in plan}
    if not styles:
        raise ConfigError(
            f"tp={tp}: a {type(module).__name__} does not say how its weights are divided; give it a tp_plan, as "
            'models of transformers have: {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        )
    _require_heads(module, tp)
    stream, blocks, divided = _Stream(tp, exchange), blocks_in(module), dict[nn.Parameter, nn.Parameter]()
    gathering, scattering = dict[nn.Module, None](), dict[nn.Module, None]()
    for name, style in styles.items():
        layer, parent = module.get_submodule(name), module.get_submodule(name.rpartition(".")[0])
        # A whole attention or MLP computes on all positions, unless its layers are the block's own.
        whole = layer if style == _HEAD or parent in blocks else parent
        if style == GATHER:
            layer.register_forward_hook(stream.end)
            continue
        if style in ("colwise", _HEAD):
            gathering[whole] = None
        elif style == "rowwise":
            scattering[whole] = None
        elif style not in _ROWS:
            raise ConfigError(f"tp={tp}: {name} is divided as {style!r}, which is not estimated")
        _divide(name, layer, tp, style, divided)
    for reader in gathering:
        reader.register_forward_pre_hook(stream.gathered, with_kwargs=True)
    for writer in scattering:
        writer.register_forward_hook(stream.scattered)
    if blocks:
        blocks[0].register_forward_pre_hook(stream.begin)


def _require_heads(module: nn.Module, tp: int) -> None:
    config: Any = getattr(module, "config", module)
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, what, None)) and count % tp:
            raise ConfigError(f"tp={tp}: {type(module).__name__} has {count} {what}, which do not divide by it")
    if words := getattr(config, "vocab_size", None):  # the loss is that of a part of the vocabulary
        config.vocab_size = -(-words // tp)


def _divide(name: str, layer: nn.Module, tp: int, style: str, divided: dict[nn.Parameter, nn.Parameter]) -> None:
    """Leave a layer the first part of its weights, of a vocabulary the largest one; tied weights stay tied."""
    for own, param in list(layer.named_parameters(recurse=False)):
        if param.dim() == 1 and style not in _ROWS:
            continue  # a bias is added to the sum
        if param not in divided:
            dim = 0 if style in _ROWS else 1
            size = param.shape[dim]
            if size % tp and style not in _OF_VOCABULARY:
                raise ConfigError(f"tp={tp}: {name}.{own} of shape {tuple(param.shape)} does not divide by it")
            part = param.detach().narrow(dim, 0, -(-size // tp)).clone()
            divided[param] = nn.Parameter(part, requires_grad=param.requires_grad)
        setattr(layer, own, divided[param])


@dataclass(frozen=True)
class _Stream:
    """The activations between blocks. Its methods are hooks of modules."""

    tp: int
    exchange: Callable[[int], None]

    def begin(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sum what the embedding has found, and scatter it."""
        return (self._scatter(args[0]), *args[1:])

    def end(self, _module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        return self._gather(result)

    def gathered(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the first argument."""
        if args:
            return (self._gather(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, kwargs | {first: self._gather(kwargs[first])}

    def scattered(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        """Sum and scatter what is returned first."""
        return (self._scatter(result[0]), *result[1:]) if isinstance(result, tuple) else self._scatter(result)

    def _gather(self, part: Tensor) -> Tensor:
        whole: Tensor = _Exchange.apply(part, self.all_gather, self.reduce_scatter)  # type: ignore[no-untyped-call]
        return whole

    def _scatter(self, whole: Tensor) -> Tensor:
        if whole.dim() < 2 or whole.shape[_POSITIONS] % self.tp:
            raise ConfigError(
                f"tp={self.tp}: activations of shape {tuple(whole.shape)} have positions that do not divide by it; "
                f"give a --seq that is a multiple of {self.tp}"
            )
        part: Tensor = _Exchange.apply(whole, self.reduce_scatter, self.all_gather)  # type: ignore[no-untyped-call]
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return a tensor of `tp` times as many positions."""
        whole = torch.cat([part] * self.tp, _POSITIONS)
        self.exchange(whole.nbytes)
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Return a tensor of a part of the positions."""
        self.exchange(whole.nbytes)
        return whole.narrow(_POSITIONS, 0, whole.shape[_POSITIONS] // self.tp).clone()


class _Exchange(torch.autograd.Function):
    """One exchange in forward, and the one that undoes it in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Exchanged, back: _Exchanged) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None
