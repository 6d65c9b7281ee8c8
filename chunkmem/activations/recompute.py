"""Recompute a call in backward instead of keeping its activations: torch's checkpoint, right where torch's is not.

torch's non-reentrant `checkpoint` runs the call again when backward needs what it saved. Here, the second run also
begins with the state of the first and leaves no trace: see [Note: A call is repeated] in
`chunkmem.activations.call_state`. Nothing in this file knows of chunks; modules under a manager are recomputed as any
others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from chunkmem.activations.call_state import CallState, copies_of, is_state
from chunkmem.activations.random_sources import RandomSource, RandomStates
from chunkmem.data.errors import ConfigError
from chunkmem.runtime.values import Structure

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
MakeContext = Callable[[], AbstractContextManager[Any]]


def _call_again(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_copies: Callable[[Iterable[torch.Tensor]], None],
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a function of tensors that makes a call again, and those tensors: it keeps none of them itself."""
    # What is in lists and dicts is no input. A tensor comes once: a call may ask whether two arguments are one.
    arguments, tensors = Structure.of((*args, *kwargs.values()), is_leaf=lambda value: not isinstance(value, tuple))
    keys, num = tuple(kwargs), len(args)
    inputs = copies_of({index: tensor for index, tensor in enumerate(tensors) if is_state(tensor)})  # statistics, too

    def call_again(*given: torch.Tensor) -> Any:
        copies = copies_of(inputs)
        on_copies(copies.values())
        values = arguments.filled([copies.get(index, tensor) for index, tensor in enumerate(given)])
        return function(*values[:num], **dict(zip(keys, values[num:], strict=True)))

    return call_again, tensors


def recomputed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    rng: Sequence[RandomSource] = (),
    contexts: Callable[[], tuple[AbstractContextManager[Any], MakeContext]] = lambda: (nullcontext(), nullcontext),
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    on_copies: Callable[[Iterable[torch.Tensor]], None] = lambda copies: None,
    has_copy: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> Generator[None, None, None]:
    """Return a generator that surrounds a call, from the first `next` to the second: it is made again in backward.

    Args:
        function: a module, a method, a function, that somebody calls.
        args, kwargs: with these.
        name: what errors call it.
        rng: sources of random numbers to be repeated besides torch's.
        contexts: returns what surrounds the call now, and what makes a context of each further one.
        preserve_rng_state, determinism_check, early_stop: as for `checkpoint`.
        on_copies: called, before the call is made again, with the arguments that are copied for it: small tensors
            without gradient.
        has_copy: tells, after the call, whether it may have written to an argument: made again, it is given a copy.
    """
    named = [(f"argument {key}", value) for key, value in (*enumerate(args), *kwargs.items())]
    call_again, tensors = _call_again(function, args, kwargs, on_copies)

    def surrounding() -> Contexts:
        """Return the contexts of the first run and of all others."""
        state = CallState(function, named)
        states = RandomStates((*rng, *state.generators.values()))
        named.clear()  # the arguments are kept by torch alone
        first, again = contexts()

        return (
            _first_run(first, state, states, name=name, has_copy=has_copy),
            _EachTime(partial(_further_run, state, states, again, name=name)),
        )

    # Positional tensors are what torch saves, under the hooks around the call, and compares the versions of.
    generator: Generator[None, None, None] = torch.utils.checkpoint._checkpoint_without_reentrant_generator(
        call_again, preserve_rng_state, surrounding, determinism_check, False, early_stop, *tensors
    )
    return generator


@contextlib.contextmanager
def _first_run(
    first: AbstractContextManager[Any],
    state: CallState,
    states: RandomStates,
    *,
    name: str,
    has_copy: Callable[[torch.Tensor], bool],
) -> Iterator[None]:
    with first:
        yield
    state.forget_unwritten(name, has_copy=has_copy)
    states.forget_undrawn()


@contextlib.contextmanager
def _further_run(state: CallState, states: RandomStates, again: MakeContext, *, name: str) -> Iterator[None]:
    with state.restored(name), states.restored(), again():
        yield


recomputing = contextlib.contextmanager(recomputed)
"""The same as a context manager."""


def _run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, **options: Any
) -> Any:
    """Call `function`, with `options` of `recomputed`, and return its result."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with recomputing(function, args, kwargs, name=name, **options):
        return function(*args, **kwargs)


class _EachTime(AbstractContextManager[None]):
    """Another context each time: a call may be recomputed several times, one inside of another too."""

    def __init__(self, make: MakeContext) -> None:
        self._make = make
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._open.append(made)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    rng: Sequence[RandomSource] = (),
    context_fn: Callable[[], Contexts] | None = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function`, and call it again in backward rather than keep what autograd saves of it.

    As `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, and the result is that of a call without
    checkpoint to the bit: buffers (running statistics, spectral norm), attributes, lists, dicts and caches that the
    call changes are changed once.

    Args:
        function: a module, a method, a closure, a `functools.partial`. What it changes is found through arguments,
            attributes, closures, and global names of modules.
        args: arguments; so are `kwargs`.
        rng: sources of random numbers to be repeated besides torch's: ``"python"``, ``"numpy"``, generators.
        context_fn: as in torch, for instance for selective checkpointing.
        preserve_rng_state: repeat torch's random numbers.
        determinism_check: as in torch.
        early_stop: stop a recomputation as soon as everything that was saved is there again.
        use_reentrant: False; there is for code written for torch's function.

    Raises:
        ConfigError: `use_reentrant` is True.
        StateError: `function` wrote in place to a tensor that it was given.
    """
    if use_reentrant:
        raise ConfigError(
            "chunkmem.checkpoint is non-reentrant: leave out use_reentrant, or use torch.utils.checkpoint"
        )

    def contexts() -> tuple[AbstractContextManager[Any], MakeContext]:
        first, again = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
        return first, lambda: again

    return _run(
        function,
        args,
        kwargs,
        name=_name_of(function),
        rng=rng,
        contexts=contexts,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
    )


def checkpoint_sequential(
    blocks: Iterable[Callable[..., Any]], segments: int, *inputs: Any, rng: Sequence[RandomSource] = ()
) -> Any:
    """Call blocks one after the other, recomputing all but the last of `segments` segments of them in backward.

    A block's result is the next one's argument; a tuple's items are its arguments. They may be anything: tensors with
    or without gradient, None, numbers.

    Args:
        blocks: modules or functions, in order; also an `nn.Sequential`.
        segments: into how many parts to divide the blocks, from 1 to their number; the first ones are longer where they
            cannot be equal. The last one keeps its activations, as torch's does: its backward comes first.
        inputs: arguments of the first block.
        rng: as for `checkpoint`.

    Returns:
        What the last block returns; the inputs if there is none.

    Raises:
        ConfigError: there are not so many blocks.
        StateError: a block wrote in place to an input of its segment.
    """
    functions = tuple(blocks)
    if not 1 <= segments <= max(1, len(functions)):
        raise ConfigError(f"segments: {segments}, for {len(functions)} blocks; give 1 to {len(functions)}")
    shorter, num_longer = divmod(len(functions), segments)
    values: Any = inputs if len(inputs) != 1 else inputs[0]
    start = 0
    for segment in range(segments):
        stop = start + shorter + (segment < num_longer)
        call = partial(_run_in_order, functions[start:stop])
        given = values if type(values) is tuple else (values,)
        if segment < segments - 1:
            values = _run(call, given, {}, name=f"segment {segment} (blocks {start} to {stop - 1})", rng=rng)
        else:
            values = call(*given)
        start = stop
    return values


def _run_in_order(functions: Sequence[Callable[..., Any]], *values: Any) -> Any:
    result: Any = values if len(values) != 1 else values[0]
    for function in functions:
        result = function(*result) if type(result) is tuple else function(result)
    return result


def _name_of(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module) or isinstance(owner, nn.Module):
        return type(function if isinstance(function, nn.Module) else owner).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))
