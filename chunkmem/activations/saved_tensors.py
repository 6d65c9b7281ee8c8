"""A user's saved-tensor hooks (`save_on_cpu` among them) get activations, and never chunk memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from chunkmem.data.errors import StateError
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.declared_reads import DeclaredReads
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.values import storage_id

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
_READER = "a saved tensor"
_autograd = torch._C._autograd


class SavedReference(NamedTuple):
    """A tensor in chunk memory; `version` is autograd's when it was saved."""

    tensor: torch.Tensor
    chunk: Chunk
    version: int


class OwnHooks:
    """Whose methods are hooks of chunkmem's, by which those are told from a user's."""

    hides = False
    """What they keep of a tensor does not lead to its memory."""


class HooksOfOthers(OwnHooks):
    """Ours, in place of those of a user, or of a checkpoint."""

    def __init__(self, chunks: ChunkHooks, pack: Pack, unpack: Unpack, *, hides: bool) -> None:
        """Stand for `pack` and `unpack`; `hides`: they are a checkpoint's."""
        self.chunks = chunks
        self.inner = pack
        self._unpack = unpack
        self.hides = hides

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to keep of a tensor."""
        reference = None if self.hides else self.chunks.reference(tensor)
        return self.inner(tensor) if reference is None else reference

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor."""
        if isinstance(packed, SavedReference):
            return self.chunks.read(packed)
        tensor = self._unpack(packed)
        return self.chunks.usable(tensor) if self.hides else tensor


class ChunkHooks:
    """Puts hooks of ours in place of a user's, and keeps chunk memory for them.

    torch asks the hooks on top of its stack alone what to keep of a tensor that autograd saves. Where a user's are on
    top when a module begins, or looks a parameter up, or an operator gets one, ours take their place until the user's
    `with` ends. They keep a tensor in chunk memory as another tensor at the same place, whose memory goes and comes
    back with the chunk, and hand all others to the user's:

        with save_on_cpu():          user's
            model(x)                 ours
                F.linear(x, weight)  ours: x to the user's, weight stays where it is
            y.exp()                  ours: y to the user's

    Those of torch's checkpoint keep nothing, and count what is saved, so they get all of it. What they give back is
    looked at: a term of the loss that no module returns (`losses.append(self.layer.weight.square().sum())`) has nobody
    announce its backward, and would use the memory of a weight that nobody keeps there.
    """

    def __init__(self, declared: DeclaredReads, pager: Pager, step_lock: StepLock) -> None:
        self._declared = declared
        self._pager = pager
        self._step_lock = step_lock
        self._has_users = False
        """Hooks of users have been replaced, those of checkpoints aside."""
        pager.events.has_inner_hooks.append(lambda: self._has_users)

    def replace(self) -> None:
        """Put ours in place of a user's, if those are on top of the stack."""
        top = _autograd._top_saved_tensors_default_hooks(False)
        if top is None:
            return
        pack = top[0]
        while isinstance(owner := getattr(pack, "__self__", None), HooksOfOthers):
            if owner.chunks is self:
                return
            pack = owner.inner  # of another manager, over these
        is_torchs = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
        # Those around its forward: around its recomputation are others, which stay.
        of_checkpoint = is_torchs and pack.__qualname__.startswith("_checkpoint_hook.")
        if isinstance(owner, OwnHooks) or is_torchs is not of_checkpoint:
            return
        if not _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return  # as in transforms of torch.func
        self._has_users = self._has_users or not of_checkpoint
        hooks = HooksOfOthers(self, *top, hides=of_checkpoint)
        _autograd._pop_saved_tensors_default_hooks()
        _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)

    def is_chunk(self, storage: int) -> bool:
        """Tell whether parameters live in a storage, by its identity."""
        return self._declared.is_chunk(storage)

    def reference(self, tensor: torch.Tensor) -> SavedReference | None:
        """Return another tensor in the same chunk memory, which lasts as long as the chunk; None if it is in none."""
        chunk = self._declared.chunk_in(storage_id(tensor))
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
        return self.usable(tensor)

    def usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that autograd has saved, or a copy of it if nobody keeps its chunk on DEVICE."""
        memory = storage_id(tensor)
        chunk = self._declared.chunk_in(memory)
        if chunk is None or self._declared.undeclared(memory) is None:
            return tensor
        with self._step_lock.taken(in_hook=True):
            self._pager.pin(chunk, reader=_READER)
            try:
                return tensor.clone()
            finally:
                self._pager.unpin(chunk)


def hides_saved_tensors() -> bool:
    """Tell whether what autograd saves now is kept where its graph does not show it: by hooks that are not ours."""
    top = _autograd._top_saved_tensors_default_hooks(False)
    if top is None:
        return False
    owner = getattr(top[0], "__self__", None)
    return not isinstance(owner, OwnHooks) or owner.hides


def in_backward() -> bool:
    """Tell whether autograd is running a backward in this thread; a forward inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1
