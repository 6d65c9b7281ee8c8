"""Models on the meta device: packed by the shapes of their parameters, then initialised module by module.

[Note: Meta models] The layout of all chunks needs shapes and dtypes only. So chunks are made first, without values, and
parameters move into them as if they had some. Then initialisers run, one call at a time, on ordinary tensors in RAM of
the parameters that they look up, in the dtype that was built; their values go to the slots that this rank owns, and the
tensors are freed. All ranks run all of it, and so draw the same random numbers.

Tensors that no chunk holds, buffers and parameters of excluded modules, get memory at once, on every rank. Whatever
has no value at the end, or half of one, is an error: until it has been written to, it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from chunkmem.comm.agreement import Operation
from chunkmem.comm.exchange import Shard
from chunkmem.errors import LayoutError
from chunkmem.layout.spec import Layout, digest
from chunkmem.nn.awaited import AwaitedValues
from chunkmem.nn.binding import ManagedParameter, blank, move_to
from chunkmem.nn.built import Built
from chunkmem.nn.elsewhere import hook_again
from chunkmem.nn.initialisers import Initialisers, initialisations, tie_again, without_initialiser
from chunkmem.nn.lent import ParameterLender, blank_like, has_gaps
from chunkmem.nn.parameter_reads import is_managed
from chunkmem.runtime.device import runtime_mode
from chunkmem.shard.shards import ShardStore

_NEXT_STEP = (
    "give the model to manager.wrap(model, param_init_fn=...), which is called for each module, children first, or "
    "build it on the CPU inside manager.init()"
)


def has_meta_tensors(roots: Iterable[nn.Module]) -> bool:
    """Tell whether a parameter or a buffer of a model that is not managed yet is on the meta device."""
    return any(next(_meta_tensors(root), None) is not None for root in roots)


def is_saved(module: nn.Module, key: str) -> bool:
    """Tell whether a module's state has a parameter or buffer."""
    return key not in module._non_persistent_buffers_set


def _meta_tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (name in the model, module, name in it, tensor)."""
    for path, module in root.named_modules():
        # To look a managed parameter up would be to read it.
        managed = is_managed(module)
        for key, tensor in [*(() if managed else module._parameters.items()), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                yield f"{path}.{key}".removeprefix("."), module, key, tensor


class BuiltOnMeta(Built):
    """Values of models, some of whose tensors have none: [Note: Meta models]."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        built: Built,
        shards: ShardStore | None,
        *,
        read: Callable[[ManagedParameter], torch.Tensor],
        write: Callable[[ManagedParameter, torch.Tensor], None],
        initialisers: Initialisers,
    ) -> None:
        """Look for tensors without values.

        Args:
            roots: the models.
            built: where the values of the others are.
            shards: which rank owns what; None with one rank.
            read: returns a CPU copy of a parameter's values, which this rank has.
            write: sets them, if this rank is to have them.
            initialisers: what the user wants.
        """
        for root in roots:
            tie_again(root)
        self._roots = roots
        self._built = built
        self._shards = shards
        self._read, self._write = read, write
        self._initialisers = initialisers
        found = [each for root in roots for each in _meta_tensors(root)]
        self._params = {id(tensor): (name, tensor) for name, _, _, tensor in found if isinstance(tensor, nn.Parameter)}
        self._buffers = [(name, module, key) for name, module, key, t in found if not isinstance(t, nn.Parameter)]
        self._holders = {module for _, module, _, _ in found}
        self._with_unsaved = {module for _, module, key, _ in found if not is_saved(module, key)}
        self._awaited: list[tuple[str, nn.Module, str]] = []
        """Buffers and parameters of excluded modules that are going to be loaded."""
        self._ordinary: list[tuple[str, nn.Parameter]] = []
        """Parameters of excluded modules."""
        self._blank_buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a buffer that was on the meta device: it, and what has taken its place."""

    def check(self, excluded: Collection[nn.Module]) -> None:
        """Raise a `LayoutError`, too, if nothing can give a tensor values, or only wrong ones."""
        self._built.check(excluded)
        for root in self._roots if self._initialisers == Initialisers() else ():
            _check_adapters(root)
        left = {
            m for root in self._roots if self._initialisers.param_init_fn is None for m in without_initialiser(root)
        }
        for root in self._roots:
            for name, module, key, tensor in _meta_tensors(root):
                if module in left and not (self._initialisers.skip_init and is_saved(module, key)):
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise LayoutError(
                        f"{kind} {name} {tuple(tensor.shape)} is on the meta device and has no values, and its module, "
                        f"a {type(module).__name__}, has no reset_parameters() that gives it some; {_NEXT_STEP}"
                    )
        ordinary = {id(param) for module in excluded for param in module.parameters(recurse=False)}
        self._ordinary = [pair for key, pair in self._params.items() if key in ordinary]

    def agree(self, layout: Layout) -> None:
        self._built.agree(layout)
        if self._shards is not None:
            self._shards.ranks.agree("the layout of the chunks", digest([layout]))

    def largest(self, value: int) -> int:
        if self._shards is None:
            return value
        return int(self._shards.ranks.max_over((float(value),), label="packing: comparing what is free")[0])

    def owns(self, group: int) -> bool:
        return self._shards is None or self._shards.owns(group)

    def is_released(self, param: nn.Parameter) -> bool:
        return self._built.is_released(param)

    def comes_later(self, param: nn.Parameter) -> bool:
        return id(param) in self._params

    def stride(self, param: nn.Parameter) -> tuple[int, ...]:
        return self._built.stride(param)

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        if self.comes_later(param):
            return blank(param.dtype, torch.device("cpu"))
        return self._built.take(param, group, name=name)

    def give_back(self, managed: ManagedParameter) -> bool:
        if not self.comes_later(managed.param):
            return False
        with runtime_mode():
            _to_meta(managed.param)
        return True

    def complete(self, parameters: Sequence[ManagedParameter]) -> None:
        try:
            self._initialise({id(managed.param): managed for managed in parameters})
        except BaseException:
            for _, param in self._ordinary:
                _to_meta(param)
            for _, module, key in self._buffers:
                module._buffers[key] = self._blank_buffers[id(module._buffers[key])][0]
            raise

    def tell(self, awaited: AwaitedValues, parameters: Sequence[ManagedParameter]) -> None:
        """Say what is going to be loaded, and what was initialised, everything being where it stays.

        Args:
            awaited: hears of what is going to be loaded.
            parameters: were packed.
        """
        for managed in parameters:
            managed.is_drawn = self.comes_later(managed.param) and not self._initialisers.skip_init
        if self._initialisers.skip_init:
            found = [(name, module._buffers.get(key), module, key) for name, module, key in self._awaited]
            tensors = [(name, module._parameters[key] if b is None else b) for name, b, module, key in found]
            params = [managed for managed in parameters if self.comes_later(managed.param)]
            awaited.expect(params, [(name, tensor) for name, tensor in tensors if tensor is not None])

    def _initialise(self, managed: dict[int, ManagedParameter]) -> None:
        for key in self._params.keys() & managed.keys():
            hook_again(managed[key].param)
        # Whatever device the user has around it: initialisers make tensors, too.
        with torch.no_grad(), torch.device("cpu"):
            self._make_ordinary()
            for root in self._roots:
                lender = ParameterLender(
                    root,
                    managed,
                    self._params.keys() & managed.keys(),
                    read=self._from_owner,
                    write=self._write,
                    keeps=not self._initialisers.skip_init,
                )
                with lender.lending():
                    for call in initialisations(root, self._initialisers.param_init_fn, holders=self._holders):
                        if not self._initialisers.skip_init or call.module in self._with_unsaved:
                            lender.run(call)
                self._check_all(root, lender.incomplete)

    def _from_owner(self, managed: ManagedParameter) -> torch.Tensor:
        """Return the values of a parameter, as it was built. All ranks call it.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        shards = self._shards
        if shards is None:
            return self._read(managed).to(managed.built_dtype)
        label = f"initialising: reading {managed.name}"
        shards.ranks.begin(Operation(label))
        if shards.owns(managed.group):
            flat = self._read(managed).to(managed.built_dtype).reshape(-1)
        else:
            flat = torch.empty(managed.shape.numel(), dtype=managed.built_dtype)
        with runtime_mode():
            shards.exchange.gather([Shard(managed.group, shards.owner(managed.group), flat)], label=label).wait()
        return flat.view(managed.shape)

    def _make_ordinary(self) -> None:
        """Give memory to what no chunk holds."""
        for _, param in self._ordinary:
            move_to(param, blank_like(param))
            hook_again(param)
        for _, module, key in self._buffers:
            buffer = module._buffers[key]
            assert buffer is not None
            known = self._blank_buffers.setdefault(id(buffer), (buffer, blank_like(buffer)))
            module._buffers[key] = known[1]
        self._blank_buffers |= {id(values): (buffer, values) for buffer, values in self._blank_buffers.values()}

    def _check_all(self, root: nn.Module, incomplete: Collection[int]) -> None:
        """Raise a `LayoutError` if something has no values yet, or not all."""
        ordinary = {id(param) for _, param in self._ordinary}
        for path, module in root.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                is_left = id(tensor) in incomplete
                if id(tensor) in ordinary or id(tensor) in self._blank_buffers:
                    is_left = has_gaps(tensor.detach(), has_moved=tensor._version > 1)
                if is_left and self._initialisers.skip_init and is_saved(module, key):
                    self._awaited.append((f"{path}.{key}".removeprefix("."), module, key))
                    continue
                if is_left or (tensor.is_meta and id(tensor) not in self._params):  # else another stage's
                    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                    raise LayoutError(
                        f"{kind} {path}.{key} {tuple(tensor.shape)} of a model on the meta device has no values, or "
                        f"not all, when its {type(module).__name__} has been initialised; {_NEXT_STEP}"
                    )
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise LayoutError(
                        f"attribute {path}.{key} is a tensor on the meta device, and no parameter and no buffer: it "
                        "can get no values; make it a buffer, or build the model on the CPU inside manager.init()"
                    )


def _check_adapters(root: nn.Module) -> None:
    """Raise a `LayoutError` for layers of peft: their modules would initialise themselves otherwise than peft does."""
    for path, module in root.named_modules():
        if type(module).__module__.startswith("peft.") and callable(getattr(module, "reset_lora_parameters", None)):
            for name, _, _, tensor in _meta_tensors(module):
                if "lora_" in name:
                    raise LayoutError(
                        f"parameter {path}.{name} {tuple(tensor.shape)} of an adapter is on the meta device, and peft "
                        f"itself gives it its values when it makes it: make it on the CPU, or {_NEXT_STEP}"
                    )


def _to_meta(param: nn.Parameter) -> None:
    move_to(param, torch.empty_like(param, device="meta"))
    hook_again(param)
