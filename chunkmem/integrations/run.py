"""What `chunkmem run` does to torch while an unchanged script trains: its models in chunks, its optimizers ours.

A model is known when something is made to train it: a torch optimizer over its parameters, or before that a
`DistributedDataParallel` around it. Trainer, accelerate and Lightning come to one of the two, as a plain loop does, so
none of them is changed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from types import FrameType
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import multiprocessing, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from chunkmem.config import Config
from chunkmem.data.errors import ChunkmemError, StateError
from chunkmem.data.schema import read_json
from chunkmem.integrations.auto import check_options, check_precision, filled
from chunkmem.manager import ChunkManager
from chunkmem.optim.converted import become, converted
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.runtime.device import ComputeDevice

_RECORD_S: Final = 5.0
_LAUNCHER: Final = ".strategies.launchers.subprocess_script._SubprocessScriptLauncher"


class Refused(SystemExit):
    """Ends a script that does what cannot be taken over; no `except Exception` of its own lets it train plainly."""


class TakeOver:
    """Packs the models that a script trains, once it is known which, and has chunkmem's optimizers train them.

    Args:
        config: a configuration as plain data, or the path of one in JSON; "auto" is what the script says.
        starts_ranks: other ranks that Lightning starts do the same.
        record: a directory that steps are recorded in while the script trains.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str],
        *,
        starts_ranks: bool = False,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        self.manager: ChunkManager | None = None
        """None: the script has trained nothing yet."""
        self._values = config if isinstance(config, Mapping) else read_json(config)
        self._starts_ranks = starts_ranks
        self._record, self._recorded_s = record, -inf
        self._is_making = False
        """An optimizer is being made: those that it makes inside are its own affair."""
        self._moves = PostponedMoves(lambda model: any(map(self._knows, model.parameters())))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over what is made inside."""
        wrap_ranks = DistributedDataParallel.__init__
        torch.optim.Optimizer.__new__ = _making(self._made)  # type: ignore[method-assign]
        DistributedDataParallel.__init__ = _packing_first(self._pack, wrap_ranks)  # type: ignore[method-assign]
        _start_ranks_by(_refuse_ranks)
        try:
            with self._moves.watching():
                yield
        finally:
            # Without the first one, Python's own would refuse arguments from then on.
            torch.optim.Optimizer.__new__ = lambda kind, *_, **__: object.__new__(kind)  # type: ignore[method-assign]
            DistributedDataParallel.__init__ = wrap_ranks  # type: ignore[method-assign]
            _start_ranks_by(start_processes)

    @contextmanager
    def inside_library(self) -> Iterator[None]:
        """Take over what is made inside by a library that was told to; what cannot be is an error of the call."""
        try:
            with self.watching():
                yield
        except Refused as refused:
            raise refused.__cause__ or refused from None

    def _made(self, optimizer: torch.optim.Optimizer, make: Callable[[], None]) -> None:
        """Make an optimizer, and have it become one of chunkmem's if modules hold what it updates."""
        if self._is_making:
            make()
            return
        self._is_making = True
        try:
            make()
            with _one_line(type(optimizer).__name__):
                if (manager := self._pack_trained(optimizer)) is not None:
                    become(optimizer, manager=manager, by_class=_computes_by_class(optimizer, manager.config))
                    if self._record is not None and manager.runtime.ranks.is_first:
                        optimizer.register_step_post_hook(partial(self._stepped, manager, self._record))
        finally:
            self._is_making = False

    def _stepped(self, manager: ChunkManager, directory: str | os.PathLike[str], *_: object) -> None:
        """Record the step before, now and then."""
        is_due = time.monotonic() - self._recorded_s >= _RECORD_S
        if is_due and manager.plan is not None and manager.timeline() is not None:
            manager.record(directory)
            self._recorded_s = time.monotonic()

    def converted(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Pack the models that an optimizer updates; return one of chunkmem's with its groups, states and hooks."""
        with _one_line(type(optimizer).__name__):
            manager = self._pack_trained(optimizer)
            if manager is None or isinstance(optimizer, RuleOptimizer):
                return optimizer
            by_class = _computes_by_class(optimizer, manager.config)
            return converted(optimizer, manager=manager, max_grad_norm=None, by_class=by_class)

    def _pack_trained(self, optimizer: torch.optim.Optimizer) -> ChunkManager | None:
        """Pack the models that an optimizer updates; return their manager, None if no module holds what it updates."""
        if "param_groups" not in vars(optimizer):
            return None  # it wraps another one
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for root in _roots([param for param in params if not self._knows(param)]):
            self._pack(root)
        if not any(map(self._knows, params)):
            return None
        check_options(self._values, optimizer.param_groups)
        return self.manager

    def _pack(self, root: nn.Module) -> None:
        """Pack a model, unless it is."""
        if self.manager is None:
            self.manager = self._make_manager()
        if not all(map(self._knows, root.parameters())):
            _refuse_sharded(root)
            if (precision := self.manager.config.precision) != "fp32":
                _refuse_autocast(root, precision)
            self._moves.forget(root)
            self.manager.wrap(root)

    def _knows(self, param: torch.Tensor) -> bool:
        return self.manager is not None and self.manager.runtime.registry.is_known(param)

    def _make_manager(self) -> ChunkManager:
        for lightning in () if self._starts_ranks else ("lightning.pytorch", "pytorch_lightning"):
            if getattr(_caller(f"{lightning}{_LAUNCHER}"), "procs", ()):
                raise StateError(
                    "Lightning has started other ranks itself, in plain Python: `chunkmem run --nproc N` starts all"
                )
        trainer = _caller("transformers.trainer.Trainer")
        config = Config.from_dict(filled(self._values, None if trainer is None else trainer.args))
        said = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        accelerate = {} if said is None else said._shared_state
        check_precision(
            config.precision, accelerate.get("_mixed_precision", "no"), "accelerate (--bf16 or --fp16 of Trainer)"
        )
        manager = ChunkManager(config)
        if trainer is not None:
            from chunkmem.integrations.transformers import ChunkmemCallback

            ChunkmemCallback(manager, names=()).add_to(trainer)
        return manager


class PostponedMoves:
    """Has `model.to(accelerator)` wait until the model is called: one that is packed before never has to fit there.

    Args:
        is_packed: tells whether a model is in chunks, which knows what to answer.
        at_once: types of devices that models move to as they are told.
    """

    def __init__(self, is_packed: Callable[[nn.Module], bool], *, at_once: Collection[str] = ("cpu", "meta")) -> None:
        self._is_packed = is_packed
        self._at_once = at_once
        self._to: Any = nn.Module.to
        self._cuda, self._cpu = nn.Module.cuda, nn.Module.cpu
        self._waiting: WeakKeyDictionary[nn.Module, Callable[[], object]] = WeakKeyDictionary()
        """Modules, with what moves the model that each is in."""
        self._calls: RemovableHandle | None = None
        """Of a look at the calls of all modules, while some wait."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Postpone moves that are asked for inside; a packed model stays in its chunks."""
        nn.Module.to = lambda module, *args, **kwargs: self._asked(module, args, kwargs)  # type: ignore
        nn.Module.cuda = lambda module, device=None: self._asked(  # type: ignore
            module, (torch.device("cuda" if device is None else device),), {}
        )
        # Lightning asks for it after training.
        nn.Module.cpu = lambda module: module if self._is_packed(module) else self._asked(module, ("cpu",), {})  # type: ignore
        try:
            yield
        finally:
            nn.Module.to, nn.Module.cuda, nn.Module.cpu = self._to, self._cuda, self._cpu  # type: ignore
            self._waiting.clear()
            self._look()

    def _asked(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or self._is_packed(module):
            return self._to(module, *args, **kwargs)
        if device.type in self._at_once:
            self.forget(module)
            return self._to(module, *args, **kwargs)
        asked = weakref.ref(module)
        for inner in module.modules():
            self._waiting[inner] = lambda: self._do(asked(), device)
        self._look()
        if layout is not None:
            self._to(module, memory_format=layout)
        return module if dtype is None else self._to(module, dtype)

    def _do(self, module: nn.Module | None, device: torch.device) -> None:
        if module is not None:
            self.forget(module)
            self._to(module, device)

    def _called(self, module: nn.Module, _: object) -> None:
        if module in self._waiting:
            self._waiting[module]()

    def forget(self, module: nn.Module) -> None:
        """Have a model stay where it is: somebody else moves it."""
        for inner in module.modules():
            self._waiting.pop(inner, None)
        self._look()

    def _look(self) -> None:
        if self._waiting and self._calls is None:
            self._calls = register_module_forward_pre_hook(self._called)
        elif not self._waiting and self._calls is not None:
            self._calls.remove()
            self._calls = None


def _making(made: Callable[..., None]) -> Callable[..., Any]:
    """Return an `Optimizer.__new__` whose objects tell `made` when they are initialised.

    An object is of a class of its own until then: it is the only one whose `__init__` is another.
    """

    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if issubclass(kind, RuleOptimizer) or asks.startswith("chunkmem.") or not (args or kwargs):
            return object.__new__(kind)  # chunkmem tries classes out

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            self.__class__ = kind
            made(self, lambda: kind.__init__(self, *args, **kwargs))

        return object.__new__(type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__}))

    return new


def _packing_first(pack: Callable[[nn.Module], None], init: Callable[..., None]) -> Callable[..., None]:
    def packed(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with _one_line("DistributedDataParallel"):
            pack(module)
        init(self, module, *args, **kwargs)

    return packed


def _computes_by_class(optimizer: torch.optim.Optimizer, config: Config) -> bool:
    """Tell whether the numbers are those of torch's default code, and not of its fused kernels, which ours repeat."""
    params = config.optimizer.params
    return params.states == "fp32" and not all(group.get("fused") for group in optimizer.param_groups)


def _refuse_autocast(root: nn.Module, precision: str) -> None:
    """Look at the first call of a model in low precision, which autocast around it contradicts."""

    def check(*_: object) -> None:
        handle.remove()
        device = ComputeDevice.default().device.type
        if torch.is_autocast_enabled(device):
            with _one_line(type(root).__name__):
                check_precision(precision, str(torch.get_autocast_dtype(device)), "torch.autocast around the model")

    handle = root.register_forward_pre_hook(check)


def _start_ranks_by(start: Callable[..., Any]) -> None:
    """Have `torch.multiprocessing.spawn` and what else starts ranks start them by this."""
    for module in (multiprocessing, sys.modules[start_processes.__module__]):
        vars(module)["start_processes"] = start


def _refuse_ranks(*_: Any, **__: Any) -> NoReturn:
    raise Refused(
        "the script starts ranks itself, by torch.multiprocessing, which would train in plain PyTorch: have each "
        "process train as a rank of its own, and `chunkmem run --nproc N` start them"
    )


def _refuse_sharded(root: nn.Module) -> None:
    """Raise for a model that is in FSDP's shards."""
    kinds = [kind for module in root.modules() for kind in type(module).__mro__]
    if any(kind.__module__.startswith("torch.distributed.fsdp") for kind in kinds):
        raise StateError(
            f"{type(root).__name__} is sharded by FSDP, and chunkmem shards models itself: leave out fully_shard() or "
            "FullyShardedDataParallel (of Trainer --fsdp, of accelerate fsdp_plugin)"
        )


def _roots(params: list[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules that hold any of these parameters, the largest first."""
    if not params:
        return []
    gc.collect()
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    wanted = set(map(id, params))
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in vars(module).get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    # What is managed has a mapping of its own, and is packed.
    holds = [m for m in modules if type(vars(m).get("_parameters")) is dict]
    found = [module for module in holds if any(id(param) in wanted for param in module._parameters.values())]
    seen: dict[int, nn.Module] = {}
    while found:
        module = found.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            found += parents.get(id(module), [])
    roots = [module for module in seen.values() if id(module) not in parents]
    return sorted(roots, key=lambda root: -sum(param.numel() for param in root.parameters()))


def _caller(kind: str) -> Any | None:
    """Return the object of a class, given as its module and name, a method of which is further up the stack, if any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if any(f"{base.__module__}.{base.__name__}" == kind for base in type(found).__mro__):
            return found
        frame = frame.f_back
    return None


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Have what cannot be taken over end the script with a line."""
    try:
        yield
    except ChunkmemError as error:
        raise Refused(f"{what} cannot be taken over: {' '.join(str(error).split())}") from error
