"""What a manager does while models are built: pack them, and note how their modules are to be treated."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.config import Config
from chunkmem.data.errors import ConfigError, LayoutError, StateError
from chunkmem.data.sizes import shown
from chunkmem.data.types import ACTIVATION_POLICIES
from chunkmem.packing.built import HERE
from chunkmem.packing.initialisers import Initialisers
from chunkmem.packing.released import BuiltOverRanks
from chunkmem.packing.tiling import tile_linears


class ModelBuilding:
    """The methods of `ChunkManager` that models are built and packed with."""

    config: Config
    runtime: Runtime
    """The parts that the manager is made of; no promise is made about them."""

    @contextlib.contextmanager
    def init(self) -> Iterator[None]:
        """Pack the modules built inside into chunks when the block ends.

        Raises:
            LayoutError: a parameter cannot be packed; the modules are as they were built.
            CapacityError: the weights fit no tier; likewise.
            StateError: over ranks, the memory of a parameter was asked for after its module had been attached to its
                parent (see `release_after_init`). Whatever is raised there, the modules are lost: no rank has all
                values.
            ConfigError, RankError: not all ranks build the same.
        """
        self.runtime.require_open()
        built = HERE
        can_release = not self.runtime.ranks.wider and not self.runtime.config.release_after_init
        with self.runtime.built.collecting() as collector:
            if self.runtime.sharding.shards is not None and can_release:
                built = BuiltOverRanks(self.runtime.sharding.shards, collector)
            with self.runtime.built.random_numbers(), collector.watching(), built.watching():
                yield
                for root in collector.roots() if self.config.with_tiling_linear else ():
                    self._tile(root, self._configured_numel)
        self.runtime.built.add(collector.roots(), collector.excluded(), kept=collector.not_reduced(), built=built)

    def wrap(
        self, model: nn.Module, *, param_init_fn: Callable[[nn.Module], object] | None = None, skip_init: bool = False
    ) -> nn.Module:
        """Pack the parameters of a model that exists; return the same object. Over ranks, rank 0's values count.

        What is on the meta device is initialised meanwhile, module by module: by `reset_parameters()`, in a model of
        transformers by `_init_weights`, and then by `param_init_fn`.

        Args:
            model: to be packed.
            param_init_fn: called for each module, children first, as by `model.apply`. It writes in place; parameters
                that had values keep them.
            skip_init: initialise nothing that is going to be loaded: parameters, and buffers that a `state_dict` has.
                Until `load` or `load_state_dict` has given them values, using the model is a `StateError`.

        Raises:
            LayoutError: a tensor on the meta device has no values at the end. Otherwise what `init` does.
        """
        self._require_module(model, "wrap")
        if self.config.with_tiling_linear:
            self._tile(model, self._configured_numel)
        self.runtime.built.send(model)
        self.runtime.built.add([model], [], initialisers=Initialisers(param_init_fn, skip_init))
        return model

    def tile(self, model: nn.Module, *, max_numel: int | None = None) -> nn.Module:
        """Split wide linear layers of a model into tiles, before it is packed. Returns the same object.

        Use it inside `init()`, when the model is built, or before `wrap()`. The layers become `TiledLinear`s, with the
        values that they have. Those that cannot, since their weight is tied or they are more than an `nn.Linear`, stay
        as they are, and a warning names them.

        Args:
            model: what is going to be packed.
            max_numel: elements of a tile at most; None: a quarter of the widest layer's weight.

        Raises:
            LayoutError: `model` is no module, or `max_numel` no number of elements, or too small.
            StateError: the model is managed already.
        """
        self._require_module(model, "tile")
        self._tile(model, max_numel)
        return model

    @property
    def _configured_numel(self) -> int | None:
        configured = self.config.with_tiling_linear
        return None if isinstance(configured, bool) else configured

    def _tile(self, model: nn.Module, max_numel: int | None) -> None:
        collector = self.runtime.built.collector
        left = tile_linears(model, max_numel=max_numel, excluded=collector.excluded() if collector else ())
        if left and self.runtime.ranks.rank == 0:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
            warnings.warn(f"linear layers left untiled, whose chunks stay as large: {reasons}", stacklevel=3)

    @contextlib.contextmanager
    def exclude(self, reduce: bool = True) -> Iterator[None]:
        """Leave the modules built inside ordinary PyTorch on the compute device. Use it inside `init()`.

        Args:
            reduce: ranks have the same modules, whose gradients `step()` averages. False: each has its own, such as
                experts that you place yourself. With one process it changes nothing.

        Raises:
            StateError: outside of `init()`.
        """
        if self.runtime.built.collector is None:
            raise StateError("manager.exclude() belongs inside manager.init()")
        with self.runtime.built.collector.excluding(reduce=reduce):
            yield

    def compile(self, module: nn.Module, **options: Any) -> nn.Module:
        """Have `torch.compile` make the code of a module. Returns the same object.

        What is compiled as a whole has all of its weights on DEVICE while it runs, so a model is compiled block by
        block: the children of its ModuleLists and Sequentials, and other modules that have children. Blocks of one
        class are compiled once. `module.compile()` and `torch.compile(module)` do the same, before packing and after.

        Args:
            module: a block, or a model; may be called before it is packed, or after.
            options: of `torch.compile`: `backend`, `mode`, `dynamic`, `fullgraph`.

        Raises:
            ConfigError: the options have addresses or values of weights kept (CUDA graphs, freezing).
            LayoutError: it is no module.
            StateError: it cannot be one graph: a module inside computes on HOST, or is a unit or region of its own.
        """
        self._require_module(module, "compile")
        self.runtime.modules.compiled.compile(module, options)
        return module

    def unit(self, module: nn.Module) -> nn.Module:
        """Make a module one unit of exchange between ranks; call it before it is packed. Returns the same object.

        Ranks all-gather the weights of a unit together, before its forward and its backward. By default, units are the
        outermost children of ModuleLists and Sequentials. With one process it changes nothing.

        Raises:
            LayoutError: it is no module.
        """
        self._require_module(module, "unit")
        self.runtime.modules.policies.ask(module, is_unit=True)
        return module

    def region(self, module: nn.Module, *, policy: str = "auto") -> nn.Module:
        """Manage what autograd saves in calls of a module, before that is packed. Returns the same object.

        Args:
            module: whose calls are managed as a whole, those of modules inside of it included.
            policy: as `activations.policy` of the configuration, for this module.

        Raises:
            ConfigError: there is no such policy.
        """
        self._require_module(module, "region")
        if policy not in tuple(ACTIVATION_POLICIES):
            raise ConfigError(f"policy is {shown(policy)}; give one of {', '.join(ACTIVATION_POLICIES)}")
        self.runtime.modules.policies.ask(module, activations=policy)
        return module

    def on_host(self, module: nn.Module) -> nn.Module:
        """Have a module compute on HOST, where weights, gradients and optimizer states stay. Returns the same object.

        For a wide embedding: ids go to HOST and rows come back, and DEVICE never holds it. Call it before the module is
        packed. Where DEVICE and HOST are one piece of RAM, nothing changes.

        Raises:
            LayoutError: it has no parameters.
            StateError: it is packed already.
        """
        self._require_module(module, "on_host")
        self.runtime.modules.host.ask(module)
        return module

    def _require_module(self, module: object, method: str) -> None:
        self.runtime.require_open()
        if not isinstance(module, nn.Module):
            raise LayoutError(f"manager.{method}() takes a torch.nn.Module, not a {type(module).__name__}")
