"""Modules that torch.compile runs: a compiled call is surrounded, and nothing of chunkmem is inside of it.

torch's compiler follows the code of a module and keeps what it finds: hooks would break its graphs, and it reads
parameters past what brings them. So a compiled module is a unit, whose weights are pinned as a whole: see
`CompiledCall` and ADR 43.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import ConfigError, StateError
from chunkmem.data.module_policy import ModulePolicies
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.fitted import FittedModules, on_children
from chunkmem.modules.tiled import TiledLinear
from chunkmem.runtime.step_events import StepEvents

Call = Callable[..., Any]
MakeCall = Callable[[Call], Call]
_LISTS = (nn.ModuleList, nn.Sequential)
_OPAQUE = (
    *(f"chunkmem.{name}" for name in ("data", "plan", "ranks", "runtime", "steps")),
    "chunkmem.assembly.entry_points",
    *(f"chunkmem.activations.{name}" for name in ("regions", "saved_tensors")),
    *(f"chunkmem.modules.{name}" for name in ("access", "backward", "binding", "frames")),
    *(f"chunkmem.modules.{name}" for name in ("parameter_operators", "parameter_reads", "references", "transforms")),
)
"""What serves a parameter that compiled code reads, and that is not in its unit."""


class CompiledCall:
    """What a compiled module is called by: its hooks around the compiled code, as torch calls those of a module.

        block(x)      CompiledCall   reads all weights | torch's compiled code of the block | lets go of them
        backward                     all of them until their gradients have landed: the graph is one node

    Modules inside have no hooks but the user's, and mappings of lookups are plain dicts: what is compiled is what plain
    PyTorch compiles. Used elsewhere, their parameters serve themselves.
    """

    def __init__(self, module: nn.Module, compiled: Call) -> None:
        """Call `compiled`, which torch.compile has made of the module, without hooks so far."""
        self._module = module
        self.compiled = compiled
        self._before: list[Call] = []
        self._after: list[Call] = []

    def surround(self, before: Call, after: Call, *, is_first: bool = False) -> None:
        """Add hooks, as `register_forward_pre_hook` and `register_forward_hook` do.

        Args:
            before: called with the module, arguments and keyword arguments; returns both of these, or None.
            after: called with the module, arguments and result, which is None where something was raised; returns a
                result, or None.
            is_first: `before` comes before those that are there.
        """
        self._before.insert(0 if is_first else len(self._before), before)
        self._after.append(after)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, result, left = self._module, None, iter(self._after)
        try:
            for before in self._before:
                given = before(module, args, kwargs)
                if given is not None:
                    args, kwargs = given
            result = self.compiled(*args, **kwargs)
            for after in left:
                changed = after(module, args, result)
                if changed is not None:
                    result = changed
        except Exception:
            for after in left:
                after(module, args, None)
            raise
        return result


Enclose = Callable[[nn.Module, CompiledCall], None]
"""Has a compiled call be what is fitted with hooks in place of a module, and nothing inside of it."""


class HiddenGradients:
    """Gradients that torch's compiler does not get to see: it cannot follow a `.grad` without memory."""

    def __init__(self, access: AccessTracker) -> None:
        """Hide none; `access` knows what this thread reads."""
        self._access = access
        self._hidden: list[tuple[ManagedParameter, torch.Tensor]] = []

    def hide(self) -> None:
        """Hide those of what this thread reads."""
        here = threading.get_ident()
        reads = {managed for frame in self._access.stack if frame.thread == here for managed in frame.reads}
        self._hidden = [(managed, managed.grad) for managed in reads if managed.grad is not None]
        for managed, _ in self._hidden:
            managed.grad = None

    def show(self) -> None:
        """Show them again."""
        for managed, grad in self._hidden:
            managed.grad = grad
        self._hidden = []


class CompiledModules:
    """Knows which modules are compiled: by `manager.compile`, `module.compile` or `torch.compile`, in any order."""

    def __init__(self, events: StepEvents, asked: ModulePolicies, *, is_accelerator: bool, is_rehearsal: bool) -> None:
        """Begin with none.

        Args:
            events: tell who wants to know that a module of a packed model has been compiled.
            asked: what users have asked for modules that are not packed yet.
            is_accelerator: weights change their addresses, which recorded CUDA graphs keep.
            is_rehearsal: nothing is compiled: modules are surrounded as if they were.
        """
        self._is_accelerator = is_accelerator
        self._is_rehearsal = is_rehearsal
        self.fitted = FittedModules()
        """What was fitted so far."""
        self._calls: weakref.WeakKeyDictionary[nn.Module, CompiledCall] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """All modules of models that were packed."""
        self._listed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Those below a list of blocks: each is compiled as it is."""
        self._asked = asked
        self._encloses: tuple[Enclose, ...] = ()
        self._handle = on_children(self, CompiledModules.notice)
        self._events = events
        events.has_inner_hooks.append(lambda: bool(self._calls))

    def fit(self, root: nn.Module, *encloses: Enclose) -> None:
        """Take over what is compiled, or is to be, under a model that was packed: call by call, by what `encloses`."""
        self._encloses = encloses
        for module in list(root.modules()):
            self._known.add(module)
            if isinstance(module, _LISTS):
                self._listed.update(set(module.modules()) - {module})
        for module in list(root.modules()):
            if type(module).compile is nn.Module.compile and "compile" not in vars(module):
                self.fitted.set(module, "compile", partial(_compile_in_place, weakref.ref(self), weakref.ref(module)))
            if is_optimized(module):
                self._take_over(module)
            elif (options := self._asked.of(module).compile_options) is not None:
                self._asked.ask(module, compile_options=None)
                self._compile(module, partial(torch.compile, **options))
            elif module not in self._calls and module._compiled_call_impl is not None:
                self._take_call(module)

    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Have a module compiled with options of `torch.compile`; a whole model block by block.

        Raises:
            StateError: it cannot be one graph: it computes on HOST, or a module in it is managed on its own.
        """
        if not self._known.isdisjoint(module.modules()):
            self._compile(module, partial(torch.compile, **options))
        else:
            self._asked.ask(module, compile_options=dict(options))

    def compile_in_place(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Do what `module.compile(**options)` does in plain PyTorch: some modules run as they are, those of torch."""
        if self._units_of(module) != [module]:
            self.compile(module, options)
        elif not any(below in self._calls for below in module.modules()):
            type(module).compile(module, **options)
            self._take_call(module)

    def close(self) -> None:
        """Hear of what is compiled no more. Idempotent."""
        self._handle.remove()

    def notice(self, parent: nn.Module, child: nn.Module) -> None:
        """A module is becoming the child of another one: of what `torch.compile(model)` returns, maybe."""
        if is_optimized(parent) and not self._known.isdisjoint(child.modules()):
            # Called when torch has finished making `parent`, but for what it is going to call.
            vars(parent)["_initialize"] = partial(self._initialize, weakref.ref(parent))

    def _initialize(self, made: weakref.ref[nn.Module]) -> None:
        module: Any = made()
        del vars(module)["_initialize"]
        type(module)._initialize(module)
        self._take_over(module)

    def _take_over(self, optimized: Any) -> None:
        """Compile what is in a module of `torch.compile(model)`, which is only passed through from now on."""
        context = optimized.dynamo_ctx
        if not isinstance(context, sys.modules["torch._dynamo.eval_frame"].OptimizeContext):
            return  # what is not to be compiled
        self._compile(optimized._orig_mod, context)
        self.fitted.set(optimized, "forward", partial(_pass_through, weakref.ref(optimized)))

    def _take_call(self, module: nn.Module) -> None:
        """Surround a module that `module.compile()` has compiled before it was packed."""
        units = self._units_of(module)
        if units == [module]:
            self._enclose(module, module._compiled_call_impl)  # type: ignore[arg-type]
            return
        context = _context_of(module._compiled_call_impl)
        self.fitted.set(module, "_compiled_call_impl", None)
        self._compile(module, context)

    def _compile(self, module: nn.Module, make: MakeCall) -> None:
        for unit in self._units_of(module):
            if not any(below in self._calls for below in unit.modules()):
                self._enclose(unit, make(_code_of(unit)))

    def _enclose(self, unit: nn.Module, compiled: Call) -> None:
        self._check_addresses(unit, compiled)
        for tell in self._events.compiled:
            tell()
        _hide_from_compiler()
        call = CompiledCall(unit, unit._call_impl if self._is_rehearsal else compiled)
        for enclose in self._encloses:
            enclose(unit, call)
        self._calls[unit] = call
        vars(unit)["_compiled_call_impl"] = compiled  # it stays that when everything else is undone
        self.fitted.set(unit, "_compiled_call_impl", call)

    def _check_addresses(self, unit: nn.Module, compiled: Call) -> None:
        config = getattr(compiled, "get_compiler_config", lambda: None)() or {}
        name = type(unit).__name__
        if self._is_accelerator and config.get("triton.cudagraphs"):
            raise ConfigError(
                f"{name} is compiled with CUDA graphs, which keep the addresses of weights, and those come and go; "
                'leave out mode="reduce-overhead", or take mode="max-autotune-no-cudagraphs"'
            )
        if config.get("freezing"):
            raise ConfigError(f"{name} is compiled with freezing, which keeps values of weights; leave that out")

    def _units_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that are compiled as a whole: of a model its blocks, and other modules that have some."""
        if module in self._listed or self._known.isdisjoint(module.modules()):
            return [module]
        return list(_units_under(module)) or [module]


def _compile_in_place(
    made: weakref.ref[CompiledModules], fitted: weakref.ref[nn.Module], *args: Any, **options: Any
) -> None:
    """Stand in for `nn.Module.compile`."""
    compiled, module = made(), fitted()
    assert module is not None
    if args:
        raise TypeError("options of torch.compile are keyword arguments")
    if compiled is None:  # a module without parameters may live longer than the models that have it
        type(module).compile(module, **options)
    else:
        compiled.compile_in_place(module, options)


def is_optimized(module: nn.Module) -> bool:
    """Tell whether a module is what `torch.compile` has returned."""
    torch_compiler = sys.modules.get("torch._dynamo.eval_frame")
    return torch_compiler is not None and isinstance(module, torch_compiler.OptimizedModule)


def _units_under(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the children of outermost lists, and modules with children that have no list in them."""
    if is_optimized(module) or next(module.parameters(), None) is None:
        return
    if isinstance(module, _LISTS):
        yield from (child for child in module if not is_optimized(child) and any(True for _ in child.parameters()))
    elif isinstance(module, TiledLinear):
        return
    elif any(isinstance(below, _LISTS) for below in module.modules()):
        for child in module.children():
            yield from _units_under(child)
    elif next(module.children(), None) is not None:
        yield module


def _hide_from_compiler() -> None:
    """Have the compiler follow no code that serves parameters: it runs as it is, as torch's own does."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for name in _OPAQUE if rules is not None else ():
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        if spec.origin.removesuffix("__init__.py") not in rules.SKIP_DIRS:  # type: ignore[union-attr]
            rules.add(name)  # type: ignore[union-attr]


def _code_of(unit: nn.Module) -> Call:
    """Return what is compiled: modules of torch have no code that the compiler begins with by itself."""
    if not type(unit).forward.__module__.startswith("torch."):
        return unit._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return unit._call_impl(*args, **kwargs)

    return call


def _pass_through(made: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Stand in for the forward of `torch.compile(model)`."""
    module: Any = made()
    return module._orig_mod(*args, **kwargs)


def _context_of(compiled: Any) -> MakeCall:
    """Return what torch.compile has made a call by, which makes others with the same options.

    Raises:
        StateError: it is not to be found.
    """
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(compiled, "__closure__", None) or (), strict=False))
    context: MakeCall | None = cells["self"].cell_contents if "self" in cells else None
    if context is None:
        raise StateError(
            "a model was compiled as one graph by model.compile() before it was packed, which would hold all of its "
            "weights; leave that out, and call manager.compile(model) after it was packed"
        )
    return context
