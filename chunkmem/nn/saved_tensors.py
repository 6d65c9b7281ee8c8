"""A user's saved-tensor hooks (`save_on_cpu` among them) get activations, and never chunk memory.

[Note: Hooks over hooks] torch asks the hooks on top of its stack alone what to keep of a tensor that autograd saves. So
where a user's are on top when a module begins, ours are pushed over them until it ends. They keep a tensor in chunk
memory as another tensor at the same place, whose memory goes and comes back with the chunk, and hand all others to the
user's:

    with save_on_cpu():          user's
        model(x)                 user's, ours
            F.linear(x, weight)  ours: x to the user's, weight stays where it is

Those of torch's checkpoint are left alone: they keep nothing, and count what is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from chunkmem.errors import StateError
from chunkmem.nn.guard import DeclaredReads
from chunkmem.nn.turn import Turn
from chunkmem.nn.values import storage_id
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import Chunk
from chunkmem.types import Tier

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
_READER = "a saved tensor"


class SavedReference(NamedTuple):
    """A tensor in chunk memory; `version` is autograd's when it was saved."""

    tensor: torch.Tensor
    chunk: Chunk
    version: int


class OwnHooks:
    """Whose methods are hooks of chunkmem's, by which those are told from a user's."""

    hides = False
    """What they keep of a tensor does not lead to its memory."""


class PushedHooks(OwnHooks):
    """Ours over those of a user, for one call."""

    def __init__(self, chunks: ChunkHooks, pack: Pack, unpack: Unpack) -> None:
        """Push them over `pack` and `unpack`."""
        self._chunks = chunks
        self._pack = pack
        self._unpack = unpack
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to keep of a tensor."""
        reference = self._chunks.reference(tensor)
        return self._pack(tensor) if reference is None else reference

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor."""
        return self._chunks.read(packed) if isinstance(packed, SavedReference) else self._unpack(packed)

    def leave(self) -> None:
        """The call is over, or was torn down. Then leaving the user's `with` has popped ours in place of the user's."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and (getattr(top[0], "__self__", None) is self or top[0] is self._pack):
            self._hooks.__exit__()


class ChunkHooks:
    """Pushes such hooks, and keeps chunk memory for them."""

    def __init__(self, declared: DeclaredReads, pager: Pager, turn: Turn) -> None:
        self._declared = declared
        self._pager = pager
        self._turn = turn

    def push(self) -> PushedHooks | None:
        """Push ours if a user's are on top; the caller has to `leave` them."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return PushedHooks(self, *top) if top is not None and _is_foreign(top[0]) else None

    def is_chunk(self, storage: int) -> bool:
        """Tell whether parameters live in a storage, by its identity."""
        return self._declared.is_chunk(storage)

    def reference(self, tensor: torch.Tensor) -> SavedReference | None:
        """Return another tensor in the same chunk memory, which lasts as long as the chunk; None if it is in none."""
        memory = storage_id(tensor)
        chunk = None if memory is None else self._declared.chunk_in(memory)
        if chunk is None:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return SavedReference(tensor.detach(), chunk, tensor._version)

    def read(self, reference: SavedReference) -> torch.Tensor:
        """Return such a tensor for autograd to use; a copy if nobody keeps its chunk on DEVICE.

        Raises:
            StateError: the weights have changed since.
        """
        tensor, chunk, version = reference
        if tensor._version != version:
            raise StateError(
                f"{chunk.label}: a tensor of shape {tuple(tensor.shape)} that autograd saved for backward was modified "
                f"in place since, as by optimizer.step() (version {tensor._version}, saved at {version}); run backward "
                "before it"
            )
        memory = storage_id(tensor)
        if memory is None or self._declared.undeclared(memory) is None:
            return tensor
        took_turn = self._turn.take_in_hook()
        try:
            self._pager.pin(chunk, Tier.DEVICE, reader=_READER)
            try:
                return tensor.clone()
            finally:
                self._pager.unpin(chunk, Tier.DEVICE)
        finally:
            if took_turn:
                self._turn.give_back()


def has_foreign_hooks() -> bool:
    """Tell whether hooks of a user are on top of the stack."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and _is_foreign(top[0])


def hides_saved_tensors() -> bool:
    """Tell whether what autograd saves now is kept where its graph does not show it: by hooks that are not ours."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is None:
        return False
    owner = getattr(top[0], "__self__", None)
    return not isinstance(owner, OwnHooks) or owner.hides


def _is_foreign(pack: Any) -> bool:
    is_ours = isinstance(getattr(pack, "__self__", None), OwnHooks)
    return not is_ours and getattr(pack, "__module__", None) != "torch.utils.checkpoint"
