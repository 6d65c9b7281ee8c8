"""The models of a manager: built, packed, and divided into pipeline stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from chunkmem.assembly.entry_points import EntryPoints
from chunkmem.assembly.parts import Modules, Sharding
from chunkmem.data.errors import StateError
from chunkmem.data.layout import digest
from chunkmem.modules.hooks import ModuleHooks
from chunkmem.modules.ordinary import same_random_numbers, send_parameters
from chunkmem.packing.built import HERE, Built
from chunkmem.packing.collect import Collector
from chunkmem.packing.initialisers import Initialisers
from chunkmem.packing.meta import BuiltOnMeta, has_meta_tensors
from chunkmem.packing.other_stages import OtherStages, Unpacked
from chunkmem.packing.packer import move_ordinary_tensors
from chunkmem.packing.released import BuiltOverRanks
from chunkmem.packing.tensor_parallel import TensorParallel
from chunkmem.ranks.ranks import Ranks


@dataclass(eq=False)
class BuiltModels:
    """What was built with a manager, and is packed by its parts."""

    sharding: Sharding
    modules: Modules
    entry_points: EntryPoints
    hooks: ModuleHooks
    device: torch.device
    dtype: torch.dtype
    """That modules compute in."""
    collector: Collector | None = None
    """Of the models under construction."""
    unpacked: Unpacked | None = None
    """What was built, until it is known which stage has what; None without pipeline stages."""

    def __post_init__(self) -> None:
        self._ranks = self.sharding.ranks
        self.added: list[Unpacked] = []
        """All that was built."""
        self.elsewhere = OtherStages()
        """What other stages have."""
        self.tensor_parallel = TensorParallel(self._ranks, self.modules.registry)

    def add(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module] = (),
        built: Built = HERE,
        initialisers: Initialisers | None = None,
    ) -> None:
        """Pack; gradients of `kept` modules, which are excluded, are not averaged over ranks.

        With pipeline stages, that is put off until `add_stages`. `initialisers`: of what is on the meta device.

        Raises:
            StateError: with pipeline stages, there is a model already.
        """
        unpacked = Unpacked(tuple(roots), tuple(excluded), tuple(kept), built, initialisers or Initialisers())
        with self.tensor_parallel.taking_apart(roots, excluded, is_released=isinstance(built, BuiltOverRanks)):
            if self._ranks.stages is None:
                self._pack(unpacked, roots, excluded, kept=kept)
            elif self.unpacked is not None:
                raise StateError("a manager with pipeline stages has one model; build all of it in one manager.init()")
            else:
                self.unpacked = unpacked
        self.added.append(unpacked)

    def kept(self) -> list[nn.Module]:
        """Return the modules that are each rank's own: excluded, and their gradients are not averaged."""
        return [module for added in self.added for module in added.kept]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[Collector]:
        """Collect the modules that are built in this block.

        Raises:
            StateError: it is inside of another one.
        """
        if self.collector is not None:
            raise StateError(
                "manager.init() inside manager.init(): build all modules in one block, or in blocks in turn"
            )
        self.collector = Collector()
        try:
            yield self.collector
        finally:
            self.collector = None

    def check_stages(self, stages: Iterable[nn.Module]) -> None:
        """Check that the model that was built can be packed as these stages.

        Raises:
            StateError: there is no model, or its stages are packed already.
            LayoutError: a parameter of the model is in no stage.
        """
        if self.unpacked is None or self.unpacked.is_packed:
            raise StateError(
                "manager.pipeline() packs the model that was built in manager.init(), once: build it before"
            )
        self.unpacked.check(stages)

    def add_stages(self, stages: Mapping[int, nn.Module]) -> None:
        """Pack the stages of this rank, and let go of the memory of all other parameters.

        Args:
            stages: all stages of the pipeline by number; those of this rank are `number % number of ranks`.

        Raises:
            LayoutError: a parameter cannot be packed.
            CapacityError: the weights fit no tier.
        """
        ranks, unpacked = self._ranks.stages, self.unpacked
        assert ranks is not None
        assert unpacked is not None
        own = [stage for number, stage in stages.items() if number % ranks.size == ranks.rank]
        modules = {module for stage in own for module in stage.modules()}
        excluded = [module for module in unpacked.excluded if module in modules]
        unpacked.note_packed()
        kept = [module for module in unpacked.kept if module in modules]
        self._pack(unpacked, own, excluded, kept=kept)
        for number, stage in stages.items():
            where = f"stage {number}, which rank {ranks.name(number % ranks.size)} has"
            self.modules.registry.add_of_other_stages(self.elsewhere.leave(stage, modules, where=where))
        self.modules.registry.place([param for root in unpacked.roots for param in root.parameters()])
        for root in unpacked.roots:
            self.modules.copies.fit(root)

    def _pack(
        self,
        unpacked: Unpacked,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        kept: Sequence[nn.Module],
    ) -> None:
        """Pack `roots`, which are all of what was built, or stages of it."""
        self.entry_points.forget_steps()
        built, models = unpacked.built, unpacked.roots
        if not built.is_put_off and has_meta_tensors(models):
            overrides, shards = self.modules.overrides, self.sharding.shards
            built = BuiltOnMeta(models, built, shards, overrides, unpacked.initialisers)
        with self.random_numbers() if isinstance(built, BuiltOnMeta) else contextlib.nullcontext():
            added = self.modules.packer.add(roots, excluded, built)
        for packed in added:
            self.tensor_parallel.count(packed.parameters)
        reduced = [module for module in excluded if module not in kept]
        self.sharding.ordinary.parameters += [param for module in reduced for param in module.parameters(recurse=False)]
        if self.sharding.shards is not None:
            self._ranks.agree("the layout of the chunks", digest(packed.layout for packed in added))
            for packed in added:
                self.sharding.shards.drop_unowned(group.id for group in packed.layout.groups)
            if not built.is_put_off:
                self.sharding.shards.send_on_host(reader="packing")
            self.entry_points.ordinary.add(roots, excluded, kept=kept)
        self.modules.fit(roots, added, self.hooks, dtype=self.dtype)
        for module in (*roots, *excluded):
            move_ordinary_tensors(module, excluded, self.device, on_host=self.modules.packer.on_host)
        if isinstance(built, BuiltOnMeta):
            built.tell(
                self.modules.overrides.uninitialized, [managed for packed in added for managed in packed.parameters]
            )

    def send(self, model: nn.Module) -> None:
        """Have all ranks train rank 0's parameters of a model that each has built; see `send_parameters`."""
        known = self.modules.registry
        with self.tensor_parallel.taking_apart([model]):
            for ranks in several_ranks(self._ranks):
                built = [param for param in model.parameters() if known.find(param) is None]
                own = [param for param in built if id(param) in known.each_ranks]
                send_parameters([param for param in built if id(param) not in known.each_ranks], ranks)
                if own and ranks.replicate is not None:
                    with contextlib.closing(ranks.column()) as column:
                        send_parameters(own, column)

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Surround the building of a model."""
        with contextlib.ExitStack() as stack:
            for ranks in several_ranks(self._ranks):
                stack.enter_context(same_random_numbers(ranks))
            yield


def several_ranks(ranks: Ranks) -> list[Ranks]:
    """Return the ranks of this rank's pipeline, and those of its stage, where there are several."""
    return [each for each in (ranks.stages, ranks) if each is not None and each.size > 1]
