"""Catch, in steps that are recorded, operators that touch chunk memory nobody declared to be reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.declared_reads import DeclaredReads
from chunkmem.runtime.values import storage_id


def declare(reads: DeclaredReads, parameters: Iterable[ManagedParameter], chunks: Mapping[int, Chunk]) -> None:
    """Have the storages of parameters and of their placeholders be known, also when they become others."""
    for managed in parameters:
        placeholder = int(managed.placeholder.untyped_storage()._cdata)
        name = f"parameter {managed.name}"
        reads.add(managed.storage_id, chunks[managed.group], placeholder=placeholder, name=name)
        managed.bound.on_other_storage = reads.replace


class AccessGuard(TorchDispatchMode):
    """Raises when an operator gets a tensor in chunk memory that is not pinned.

    Under a smaller cap that memory would have been elsewhere: the numbers would be wrong, or the process would die.
    `undeclared` maps the identity of a storage to the name of what lies in it, or None if it may be used; `note_write`
    hears of storages that are written to. `run` calls the operator, for a probe that counts memory.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: else torch would run it eagerly, to other bits, while this looks on."""
        return True

    def __init__(
        self,
        undeclared: Callable[[int], str | None],
        moment: Callable[[], str],
        *,
        note_write: Callable[[int], None] = lambda storage_id: None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undeclared = undeclared
        self._note_write = note_write
        self._run = run
        self._moment = moment
        self._disarmed = False

    def leave(self) -> None:
        """Stop checking, whether the code under it ended in order or was interrupted."""
        self._disarmed = True
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._disarmed and not only_makes_a_view(func):
            for tensor in tensors_of((*args, *(kwargs or {}).values())):
                self._check(tensor, func)
            for tensor in written_by(func, args, kwargs or {}):
                self._note_write(storage_id(tensor))
        with torch._C.DisableTorchFunctionSubclass():  # what comes here has been served
            if self._run is not None and not self._disarmed:
                return self._run(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        memory = storage_id(tensor)
        name = self._undeclared(memory) if memory and tensor.numel() else None
        if name is not None:
            raise StateError(
                f"{self._moment()}: operator {func} uses {name}, {tuple(tensor.shape)}, which no running module has "
                "read as an attribute; read it as module.name where it is used, or put the code into a module's forward"
            )


def tensors_of(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operator, and in lists that are arguments."""
    for value in arguments:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to."""
    if isinstance(func, HigherOrderOperator) or not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_of([args[position] if position < len(args) else kwargs.get(argument.name)])


def makes_one_like(func: Any) -> bool:
    """Tell whether an operator makes a tensor like the one it is given, and uses no value of that."""
    name: str = func._schema.name
    return name.startswith("aten::new_") or (name.startswith("aten::") and name.endswith("_like"))


def only_makes_a_view(func: Any) -> bool:
    """Tell whether an operator hands memory on without touching it, as views and detaches do."""
    if isinstance(func, HigherOrderOperator):  # a compiled checkpoint keeps random numbers by one
        return False
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
