"""What a managed model is fitted with: reads that report, and hooks where modules begin and end.

[Note: Resident models] Where a plan moves nothing, since all chunks of the manager are on DEVICE from step to step,
there is nothing to hear of calls inside of a model. So hooks inside of models, reports of reads and hooks on gradients
are taken away, every chunk of weights is pinned, every Parameter is an ordinary one, and autograd leaves gradients in
`.grad`, where the step finds them: a step is plain PyTorch's but for a look at its beginning and the update. They come
back before anything else: a step of another kind, other models, parameters that are frozen, a checkpoint meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from chunkmem.activations.regions import RegionActivations
from chunkmem.activations.saved_tensors import ChunkHooks, in_backward
from chunkmem.data.errors import StateError
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.data.types import Tier
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.backward import BackwardTracker
from chunkmem.modules.binding import ManagedParameter, trained
from chunkmem.modules.blocks import FittedModule, Together, WholeBlock, blocks_of
from chunkmem.modules.compiled import CompiledCall
from chunkmem.modules.fitted import FittedModules, Paused
from chunkmem.modules.frames import Frame
from chunkmem.modules.guard import AccessGuard
from chunkmem.modules.parameter_reads import IN_UNIT, NotPicklable, ParameterReads, QuietReads
from chunkmem.ranks.units import Unit, Units
from chunkmem.runtime.step_events import StepEvents
from chunkmem.runtime.step_lock import StepLock
from chunkmem.runtime.values import tensors_in


class RootCalls(Protocol):
    """Hears of calls of models that come from outside."""

    def begin_root(self, root: nn.Module) -> None:
        """A model is about to be called."""
        ...

    def make_guard(self) -> AccessGuard | None:
        """Return a guard for the call, if one is wanted."""
        ...

    def note_error(self, error: BaseException) -> None:
        """The call has raised something."""
        ...


class _SharedHook:
    """A hook on a module that models of others may have, too (`def __init__(self, act=nn.ReLU())`).

    It does nothing in calls of theirs, and keeps no manager alive: such a module may live as long as Python.
    """

    def __init__(self, hooks: ModuleHooks, call: Callable[..., None], fitted: FittedModule) -> None:
        self._hooks = weakref.ref(hooks)
        self._call = call
        self._fitted = fitted

    def __call__(self, *args: Any) -> None:
        hooks = self._hooks()
        if hooks is not None and hooks.is_running:
            self._call(hooks, self._fitted, *args)


class ModuleHooks(NotPicklable):
    """Turns calls of modules into pushes and pops of frames.

    Every fitted module refers to it, those without parameters of their own too.
    """

    def __init__(
        self,
        access: AccessTracker,
        backward: BackwardTracker,
        *,
        policies: ModulePolicies,
        units: Units,
        regions: RegionActivations,
        step_lock: StepLock,
        saved: ChunkHooks,
        calls: RootCalls,
        events: StepEvents,
    ) -> None:
        """Make hooks.

        Args:
            access: reads of parameters.
            backward: what comes after the calls.
            policies: what users have asked for modules.
            units: of exchange.
            regions: what they save.
            turn: of this thread.
            saved: keeps chunk memory from a user's saved-tensor hooks.
            calls: hears of outermost calls.
            events: tell what to hear of.
        """
        events.resident.append(self._stay)
        events.by_block.append(self._hook_by_block)
        events.num_in_blocks.append(self._num_in_blocks)
        self._step_lock = step_lock
        self._access = access
        self._backward = backward
        self._policies = policies
        self._units = units
        self._regions = regions
        self._saved = saved
        self._calls = calls
        self._handled: BaseException | None = None
        """What the caller of the outermost call was handling when it began."""
        self.fitted = FittedModules()
        """What was fitted so far."""
        self._about: WeakKeyDictionary[nn.Module, FittedModule] = WeakKeyDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._paused: WeakKeyDictionary[nn.Module, Paused] = WeakKeyDictionary()
        """Modules that nothing is heard of now; see [Note: Resident models]."""
        self._callers: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
        """In steps that were recorded: the modules that called each, by identity; 0: none did."""
        self._blocks: dict[FittedModule, WholeBlock] = {}
        """Those that are heard of as a whole."""
        self._in_blocks: WeakKeyDictionary[nn.Module, Paused] = WeakKeyDictionary()
        """Modules in them that nothing is heard of."""
        self.spent_s = 0.0
        """In hooks; what a step begins with is not counted."""

    @property
    def is_running(self) -> bool:
        """This thread is in a call of a managed model, or in a backward, which may recompute one."""
        innermost = self._access.stack[-1:]
        return in_backward() or (bool(innermost) and innermost[0].thread == threading.get_ident())

    def fit(
        self, root: nn.Module, by_id: Mapping[int, ManagedParameter], *, on_host: Collection[nn.Module] = ()
    ) -> dict[nn.Module, dict[str, ManagedParameter]]:
        """Fit every module under the root that is not fitted yet; return the managed parameters of each by name.

        `by_id` maps the identities of Parameters to what is known of them; `on_host` are modules that compute there.
        """
        owned: dict[nn.Module, dict[str, ManagedParameter]] = {}
        chunks = self._access.chunks
        exchanged = {k: m.group for k, m in by_id.items() if chunks[m.group].is_exchanged}
        units = self._units.of(root, exchanged, lambda module: self._policies.of(module).is_unit)
        regions = self._regions.policies.of(root)
        self._roots.add(root)
        for name, module in root.named_modules():
            if module in self.fitted:
                continue
            own = {key: by_id[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in by_id}
            fitted = FittedModule(
                name or type(module).__name__,
                tuple(own.values()),
                tuple(_held_elsewhere(module, by_id)),
                not any(True for _ in module.children()),
                units.get(module),
                regions.get(module),
                Tier.HOST if module in on_host else Tier.DEVICE,
                is_shareable=module is not root and next(module.parameters(), None) is None,
            )
            if own:
                vars(module)["_parameters"] = ParameterReads(module._parameters, own, self._access.look_up)
                owned[module] = own
            self._about[module] = fitted
            # Of a region first: others may change what the module is given, and do so again when it is recomputed.
            self.fitted.surround(module, *self._calls_of(fitted), is_first=fitted.region is not None)
        return owned

    def _calls_of(self, fitted: FittedModule) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what is called when a module begins, and when it ends."""
        if fitted.is_shareable:
            return _SharedHook(self, ModuleHooks._enter, fitted), _SharedHook(self, ModuleHooks._leave, fitted)
        return partial(self._enter, fitted), partial(self._leave, fitted)

    def _stay(self, is_resident: bool) -> None:
        """Hear of no call inside of a model, and of no read there, or again: see [Note: Resident models]."""
        if is_resident:
            self._remove_hooks_of((module for module in self.fitted if module not in self._roots), self._paused)
        else:
            self._restore_hooks_of(self._paused)

    def _remove_hooks_of(self, modules: Iterable[nn.Module], paused: MutableMapping[nn.Module, Paused]) -> None:
        for module in modules:
            if module in self._in_blocks or module not in self.fitted:
                continue
            paused[module] = self.fitted.pause(module)
            if isinstance(module._parameters, ParameterReads):
                module._parameters.__class__ = QuietReads

    def _restore_hooks_of(self, paused: MutableMapping[nn.Module, Paused]) -> None:
        for module, hooks in paused.items():
            self.fitted.resume(hooks)
            if isinstance(module._parameters, ParameterReads):
                module._parameters.__class__ = ParameterReads
        paused.clear()

    def _hook_by_block(self, is_on: bool) -> None:
        """Hear of blocks as a whole, or of each module in them again; see [Note: Blocks as a whole]."""
        self._restore_hooks_of(self._in_blocks)
        self._blocks.clear()
        self._access.together.clear()
        if is_on:
            for block in self._find_blocks():
                self._blocks[self._about[block.module]] = block
                token, num_together = object(), Counter(managed.group for managed in block.parameters)
                for managed in block.parameters:
                    self._access.together[managed] = Together(token, num_together[managed.group])
                self._remove_hooks_of(block.inside, self._in_blocks)

    def _num_in_blocks(self) -> int:
        """Return how many modules nothing would be heard of, if blocks were heard of as a whole."""
        return sum(len(block.inside) for block in self._find_blocks())

    def _find_blocks(self) -> list[WholeBlock]:
        found = (block for root in self._roots for block in blocks_of(root, self._about, self._callers))
        return [block for block in found if self._roots.isdisjoint(block.inside)]

    def enclose(self, unit: nn.Module, call: CompiledCall) -> None:
        """Have a compiled call read all that its module may, and no module inside of it; see `CompiledModules`.

        Raises:
            StateError: a module inside is managed on its own.
        """
        about = [(module, self._about[module]) for module in unit.modules() if module in self._about]
        whole = self._about[unit]
        for module, fitted in about:
            _check_is_part(whole, fitted, is_unit=module is unit)
        inside = tuple(dict.fromkeys(managed for _, fitted in about for managed in (*fitted.own, *fitted.unseen)))
        for module, _ in about:
            self.fitted.strip(module)
            if isinstance(module._parameters, ParameterReads):
                vars(module)["_parameters"] = dict(module._parameters)
                self.fitted.set(module, IN_UNIT, True)
        fitted = replace(whole, own=inside, unseen=inside)
        call.surround(*self._calls_of(fitted), is_first=fitted.region is not None)

    def fit_outermost(self, module: nn.Module) -> None:
        """Have calls of a module that has no parameters of its own, a pipeline's, count as those of a model."""
        fitted = FittedModule("pipeline", (), (), is_leaf=False, unit=None, region=None, tier=Tier.DEVICE)
        self._roots.add(module)
        self.fitted.surround(module, *self._calls_of(fitted))

    def unfit(self) -> None:
        """Lookups are heard of no more, and nothing is paused: then `fitted` can be undone."""
        self._hook_by_block(False)
        for module in self.fitted:
            if isinstance(module._parameters, ParameterReads):
                vars(module)["_parameters"] = dict(module._parameters)

    def _enter(self, fitted: FittedModule, module: nn.Module, args: Any, kwargs: Any) -> None:
        _check_runs_itself(fitted.name)  # first: the compiler cannot follow the rest
        began_s = time.perf_counter()
        if not self._open(fitted, module, args, kwargs):
            self.spent_s += time.perf_counter() - began_s

    def _open(self, fitted: FittedModule, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """A call begins; tell whether it comes from outside of the model."""
        access = self._access
        recomputing = in_backward()
        took_lock = self._step_lock.take_in_hook() if recomputing else self._step_lock.take()
        stack = access.stack
        is_stale = False
        if stack and not recomputing and (module in self._roots or stack[0].recomputing or stack[0].module is module):
            is_stale = access.is_stale(module)  # it may be an outermost call although others seem to run
        is_root = not recomputing and (not stack or is_stale)
        if is_root:
            self._handled = sys.exception()
            try:
                self._calls.begin_root(module)
            except BaseException:
                self._step_lock.give_back()
                raise
        frame = Frame(fitted.name, module, recomputing=recomputing)
        frame.tier = fitted.tier
        frame.took_lock = took_lock or is_stale  # what is left over has not given it back
        if fitted.is_leaf and len(trained(fitted.own)) < len(fitted.own):
            frame.inputs = [(t, t._version) for t in tensors_in((args, kwargs)) if t.requires_grad]
        frame.containers = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, dict))]
        if frame.containers:
            frame.given = {id(tensor): tensor for tensor in tensors_in(frame.containers)}
        start = 0 if fitted.region is None else self._regions.now()
        if fitted.unit is not None:
            self._enter_unit(fitted.unit, frame)
        self._saved.replace()
        # A transform of torch.func has weights of its own there; what it reads of ours serves itself, or is refused.
        block = None if torch._C._functorch.peek_interpreter_stack() else self._blocks.get(fitted)
        access.push(frame, fitted.unseen if block is None else block.parameters)
        if fitted.region is not None and not recomputing:
            come_to = None if fitted.unit is None else partial(self._units.come_to, fitted.unit)
            self._regions.enter(fitted.name, fitted.region, module, args, kwargs, start=start, come_to=come_to)
        if is_root:
            frame.guard = self._calls.make_guard()
            if frame.guard is not None:
                frame.guard.__enter__()  # type: ignore[no-untyped-call]
        return is_root

    def _enter_unit(self, unit: Unit, frame: Frame) -> None:
        frame.unit = unit
        if frame.recomputing:
            self._units.recompute(unit)
        elif not self._access.stack or self._access.stack[-1].unit is not unit:
            self._units.enter(unit)
            frame.opened = unit

    def _leave(self, fitted: FittedModule, module: nn.Module, _args: Any, result: Any) -> None:
        began_s = time.perf_counter()
        try:
            self._close(fitted, module, result)
            self.spent_s += time.perf_counter() - began_s
        finally:
            # torch calls the hook while it handles what the module has raised.
            error = sys.exception() if result is None and not self._access.stack and not in_backward() else None
            if error is not None and error is not self._handled:
                self._calls.note_error(error)
            if not self._access.stack:
                self._handled = None  # an exception keeps alive what its frames refer to

    def _close(self, fitted: FittedModule, module: nn.Module, result: Any) -> None:
        frame = self._access.pop(module)
        if frame is None:
            return
        held: Collection[int] = ()
        try:
            if frame.reads:
                held = self._backward.watch(frame, result)
            else:
                self._access.references(frame, handed={})
            if frame.opened is not None and not frame.opened.is_read:
                self._backward.watch_unit(frame.opened, result)
            if self._regions.now() > 0:  # of a recorded step
                caller = self._access.stack[-1].module if self._access.stack else None
                self._callers.setdefault(module, set()).add(0 if caller is None else id(caller))
                if not frame.recomputing:
                    self._note_backward(frame.name, frame.first_node, result)
        finally:
            try:
                # Only now: until then, hooks tell where tensors of this call are saved.
                if fitted.region is not None and not frame.recomputing:
                    self._regions.leave()
                self._access.release(frame, held=held)
            finally:  # also where the user has left a parameter that cannot be kept
                if frame.took_lock:
                    self._step_lock.give_back()
        if frame.opened is not None:
            self._units.leave(frame.opened)
        if not self._access.stack and not frame.recomputing:
            with self._step_lock.taken():
                self._regions.pack_last()

    def _note_backward(self, name: str, first_node: int, result: Any) -> None:
        """In a recorded step, say when the backward of a call begins: with the gradient of what it has made."""
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= first_node:
                tensor.register_hook(lambda _grad: self._access.entered_backward(name))


def _check_is_part(whole: FittedModule, fitted: FittedModule, *, is_unit: bool) -> None:
    """Raise if a module cannot be a part of a compiled one.

    Raises:
        StateError: it computes on HOST, or is a unit of exchange or a region of its own.
    """
    what = None
    if fitted.tier is Tier.HOST:
        what = "computes on HOST, which the compiler cannot be told: leave it out"
    elif fitted.unit is not whole.unit:
        what = "is exchanged between ranks as a unit of its own"
    elif fitted.region is not None and not is_unit:
        what = "is a region, whose activations are managed on their own"
    if what is not None:
        raise StateError(
            f"{whole.name} cannot be compiled as one graph: {fitted.name} in it {what}; call manager.compile() with "
            "the modules that can"
        )


def _check_runs_itself(name: str) -> None:
    """Raise if what runs a module looks at its code or its parameters in place of calling it.

    Raises:
        StateError: it is `torch.jit.trace`, or a function compiled by `torch.compile`.
    """
    if torch._C._get_tracing_state() is not None:
        raise StateError(
            f"{name}: torch.jit.trace keeps the parameters themselves, whose memory comes and goes; trace "
            "copy.deepcopy(model), an ordinary model"
        )
    # The first while the compiler follows this code, the second when it has given up and the code runs.
    if torch.compiler.is_dynamo_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        raise StateError(
            f"{name} is managed and runs inside of torch.compile, which takes the parameters past what brings them to "
            "the device; compile the model by manager.compile(model), and call it from what is not compiled, or inside "
            "of a compiled function by call = torch.compiler.disable(lambda *args: model(*args)), where its graph "
            "breaks. Functions of tensors that it calls can be compiled"
        )


def _held_elsewhere(module: nn.Module, by_id: Mapping[int, ManagedParameter]) -> Iterator[ManagedParameter]:
    """Find managed parameters a module refers to from its own attributes, directly or in a list, tuple or dict."""
    for key, value in vars(module).items():
        if key in ("_parameters", "_modules", "_buffers"):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for item in items:
            if isinstance(item, nn.Parameter) and id(item) in by_id:
                yield by_id[id(item)]
