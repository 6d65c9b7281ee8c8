"""Recompute a call in backward instead of keeping its activations: torch's checkpoint, right where torch's is not.

torch's non-reentrant `checkpoint` runs the call again when backward needs what it saved. Here, the second run also
begins with the state of the first and leaves no trace: see [Note: A call is repeated] in `chunkmem.nn.call_state`.
Nothing in this file knows of chunks; modules under a manager are recomputed as any others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from chunkmem.errors import ConfigError
from chunkmem.nn.call_state import CallState, copies_of, is_state
from chunkmem.nn.random_sources import RandomSource, RandomStates
from chunkmem.nn.values import Structure

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Call:
    """Calls a function with the tensors that it is given in place of slots."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Structure,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        *,
        is_later: bool,
        on_copies: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        """Call `function`; `is_later`: for a later time, as somebody else makes the first call."""
        self._on_copies = on_copies
        self._function, self._arguments, self._keys = function, arguments, keys
        self._inputs = copies_of({index: tensor for index, tensor in enumerate(tensors) if is_state(tensor)})
        """Running statistics may be arguments, too."""
        self._num_runs = int(is_later)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        given = list(tensors)
        if self._num_runs:
            copies = copies_of(self._inputs)
            self._on_copies(copies.values())
            for index, copy in copies.items():
                given[index] = copy
        self._num_runs += 1
        positional, *values = self._arguments.filled(given)
        return self._function(*positional, **dict(zip(self._keys, values, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """How calls are run that are recomputed in backward. It has no state: one serves any number of calls.

    Attributes:
        rng: sources of random numbers to be repeated besides torch's.
        context_fn: as for `torch.utils.checkpoint.checkpoint`; None: none.
        preserve_rng_state: repeat torch's random numbers.
        determinism_check: as for `torch.utils.checkpoint.checkpoint`.
        early_stop: stop a recomputation as soon as everything that was saved is there again.
        on_copies: called, before a call runs again, with the arguments that are copied for it: small tensors without
            gradient.
        has_copy: tells, after a call, whether it may have written to an argument: running again, it is given a copy.
    """

    rng: tuple[RandomSource, ...] = ()
    context_fn: Callable[[], Contexts] | None = None
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True
    on_copies: Callable[[Iterable[torch.Tensor]], None] = lambda copies: None
    has_copy: Callable[[torch.Tensor], bool] = lambda tensor: False

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        module: nn.Module | None = None,
        name: str | None = None,
    ) -> Any:
        """Call `function` so that it is called again in backward, and return its result.

        Args:
            function: what to call: a module, a method, a function.
            args: positional arguments.
            kwargs: keyword arguments.
            module: one whose state the call changes, if `function` does not lead to it.
            name: what errors call it; None: the function's name.

        Raises:
            StateError: the call wrote in place to a tensor that it was given.
        """
        kwargs = {} if kwargs is None else kwargs
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        label = _name_of(function if module is None else module) if name is None else name
        call, tensors, contexts = self._prepared(function, args, kwargs, module=module, label=label, is_later=False)
        return torch.utils.checkpoint.checkpoint(
            call,
            *tensors,
            use_reentrant=False,
            context_fn=contexts,
            preserve_rng_state=self.preserve_rng_state,
            determinism_check=self.determinism_check,
            early_stop=self.early_stop,
        )

    def around(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str
    ) -> Generator[None, None, None]:
        """Return a generator that surrounds a call of a module which hooks tell of.

        What the module does from the first `next` to the second is done again in backward, by another call of it.
        """
        call, tensors, contexts = self._prepared(module, args, kwargs, module=None, label=name, is_later=True)
        generator: Generator[None, None, None] = torch.utils.checkpoint._checkpoint_without_reentrant_generator(
            call, self.preserve_rng_state, contexts, self.determinism_check, False, self.early_stop, *tensors
        )
        return generator

    def _prepared(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        module: nn.Module | None,
        label: str,
        is_later: bool,
    ) -> tuple[_Call, list[torch.Tensor], Callable[[], Contexts]]:
        """Return a function of tensors to call in place of `function`, those tensors, and its contexts."""
        named = [(f"argument {index}", value) for index, value in enumerate(args)]
        named += [(f"argument {key}", value) for key, value in kwargs.items()]
        if module is not None:
            named.append((type(module).__name__, module))
        # What is in lists and dicts is no input. A tensor comes once: a call may ask whether two arguments are one.
        arguments, tensors = Structure.of(
            (tuple(args), *kwargs.values()), is_leaf=lambda value: not isinstance(value, tuple)
        )
        # Positional tensors are what torch saves, under the hooks around this call, and compares the versions of.
        call = _Call(function, arguments, tuple(kwargs), tensors, is_later=is_later, on_copies=self.on_copies)
        return call, tensors, partial(self._contexts, function, named, label)

    def _contexts(self, function: Callable[..., Any], named: list[tuple[str, object]], label: str) -> Contexts:
        """Return the contexts of the first run and of all others."""
        state = CallState(function, named)
        states = RandomStates((*self.rng, *state.generators.values()))
        named.clear()  # the arguments are kept by torch alone
        first, again = self.context_fn() if self.context_fn is not None else (None, None)
        return _first_run(state, first, label, self.has_copy), _LaterRun(state, states, again, label)


@contextlib.contextmanager
def _first_run(
    state: CallState,
    inner: AbstractContextManager[Any] | None,
    label: str,
    has_copy: Callable[[torch.Tensor], bool],
) -> Iterator[None]:
    with inner or contextlib.nullcontext():
        yield
    state.settle(label, has_copy=has_copy)


class _LaterRun(AbstractContextManager[None]):
    """A recomputation; there may be several of one call, one inside of another too."""

    def __init__(
        self, state: CallState, states: RandomStates, inner: AbstractContextManager[Any] | None, label: str
    ) -> None:
        self._state, self._states, self._inner, self._label = state, states, inner, label
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._state.restored(self._label))
            stack.enter_context(self._states.restored())
            if self._inner is not None:
                stack.enter_context(self._inner)
            self._open.append(stack.pop_all())

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
    recomputation = Recomputation(
        rng=tuple(rng),
        context_fn=context_fn,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
    )
    return recomputation.run(function, args, kwargs)


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
    recomputation = Recomputation(rng=tuple(rng))
    start = 0
    for segment in range(segments):
        stop = start + shorter + (segment < num_longer)
        call = partial(_run_in_order, functions[start:stop])
        given = values if type(values) is tuple else (values,)
        if segment < segments - 1:
            values = recomputation.run(call, given, name=f"segment {segment} (blocks {start} to {stop - 1})")
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
