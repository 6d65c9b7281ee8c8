"""Models packed: which parameters, how they are laid out, and in which dtypes; all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from chunkmem.data.layout import ALIGN_NBYTES, Layout, MasterCopy
from chunkmem.data.layout_pack import choose_slab_nbytes, pack
from chunkmem.modules.parameter_reads import own_parameters
from chunkmem.modules.registry import ModelRegistry, PackedModel
from chunkmem.packing.built import Built
from chunkmem.packing.packable import check_separate, named_parameters_of
from chunkmem.packing.packer import Packer, tensor_specs
from chunkmem.packing.precision import AS_BUILT, Precision, precision_of

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters of one root module, with their names."""


@dataclass(eq=False)
class ModelPacker:
    """Packs models, and has the registry know them."""

    registry: ModelRegistry
    packer: Packer
    choose_on_host: Callable[[Sequence[nn.Module], Collection[nn.Module]], frozenset[nn.Module]]
    """Returns the modules under roots, of which some are excluded, that compute on HOST."""
    chunk_numel: int | None
    """None: the slab size is searched on the first model."""
    device_cap_nbytes: int
    dtype: torch.dtype
    """What modules compute in."""
    master_weights: bool
    """Updates are in float32; see `precision_of`."""
    num_ranks: int
    """That share the chunks: slabs are small enough that each rank gets about as many bytes."""
    slab_nbytes: int | None = None
    """Of the model that was added last; None before the first."""
    precision: Precision = AS_BUILT
    """Of what was added last."""
    on_host: frozenset[nn.Module] = frozenset()
    """Modules that compute on HOST, of what was added last."""

    def add(self, roots: Sequence[nn.Module], excluded: Sequence[nn.Module], built: Built) -> list[PackedModel]:
        """Pack the parameters under `roots`; `precision` is theirs then. All are checked before the first is touched.

        Raises:
            LayoutError, StateError, CapacityError: see `named_parameters_of` and `Packer.pack`.
        """
        on_host = self.choose_on_host(roots, excluded)
        built.check(excluded)
        managed = {id(each.param) for each in self.registry.parameters}
        known = set(managed)
        named: list[Named] = []
        for root in roots:
            # What another model holds too, packed before or above, has its slot already.
            named.append(named_parameters_of(root, excluded=excluded, built=built, known=known))
            known.update(id(param) for _, param in named[-1])
        if built.has_memory:
            check_separate(roots, packed=known)
        precision = self._precision(roots, excluded, built.masters, packed=managed)
        packable = [
            (root, found)
            for root, found in zip(roots, named, strict=True)
            if any(id(p) in known for p in root.parameters())
        ]
        same_nbytes = self.slab_nbytes if self.chunk_numel is None else None
        layouts = self._layouts(
            [found for _, found in packable],
            precision,
            own_parameters(on_host),
            slab_nbytes=same_nbytes if built.slab_nbytes is None else built.slab_nbytes,
            num_ranks=self.num_ranks,
            first_group=sum(len(model.layout.groups) for model in self.registry.models),
        )
        added = self._pack([(*each, layout) for each, layout in zip(packable, layouts, strict=True)], built)
        if any(named):
            self.slab_nbytes = layouts[0].slab_nbytes
        self.precision, self.on_host = precision, on_host
        self.registry.add(added, roots, excluded)
        return added

    def preview(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        *,
        num_ranks: int,
        slab_nbytes: int | None = None,
        masters: Mapping[int, MasterCopy] = MappingProxyType({}),
    ) -> list[tuple[Layout, list[nn.Parameter]]]:
        """Return the layouts that models which are packed would have if they were packed again; nothing is changed.

        Args:
            roots: parts of them.
            excluded: modules under `roots` that stay ordinary.
            num_ranks: that share the chunks then.
            slab_nbytes, masters: see `Built`.

        Returns:
            The layout of each root, and its parameters.
        """
        on_host = self.choose_on_host(roots, excluded)
        known = own_parameters(excluded)
        named: list[Named] = []
        for root in roots:
            named.append([(name, param) for name, param in root.named_parameters() if id(param) not in known])
            known.update(id(param) for _, param in named[-1])
        # What is frozen was built in another dtype, maybe, than it has in its chunk.
        frozen = (
            m for m in self.registry.parameters if not m.requires_grad and m.built_dtype is not m.placeholder.dtype
        )
        packed = {id(m.param): MasterCopy.PACKED for m in frozen}
        precision = self._precision(roots, excluded, {**packed, **masters})
        away = own_parameters(on_host)
        layouts = self._layouts(named, precision, away, slab_nbytes=slab_nbytes, num_ranks=num_ranks, first_group=0)
        return [(layout, [param for _, param in pairs]) for layout, pairs in zip(layouts, named, strict=True)]

    def _precision(
        self,
        roots: Sequence[nn.Module],
        excluded: Sequence[nn.Module],
        masters: Mapping[int, MasterCopy],
        *,
        packed: Collection[int] = (),
    ) -> Precision:
        """Return the precision of models in which these parameters, if they are in a low dtype, have such `masters`."""
        found = precision_of(roots, self.dtype, master_weights=self.master_weights, excluded=excluded, packed=packed)
        known = {key: master for key, master in masters.items() if key in found.masters}
        return replace(found, masters={**found.masters, **known})

    def _layouts(
        self,
        named: Sequence[Named],
        precision: Precision,
        on_host: Collection[int],
        *,
        slab_nbytes: int | None,
        num_ranks: int,
        first_group: int,
    ) -> list[Layout]:
        """Lay out the parameters of each root; `slab_nbytes` None: as is best for what is computed with on DEVICE."""
        pairs = [pair for found in named for pair in found]
        if slab_nbytes is None and pairs:
            on_device = [(name, param) for name, param in pairs if id(param) not in on_host]
            slab_nbytes = choose_slab_nbytes(
                tensor_specs(on_device or pairs, precision),
                chunk_numel=self.chunk_numel,
                device_cap_nbytes=self.device_cap_nbytes,
                num_ranks=num_ranks,
            )
        layouts: list[Layout] = []
        for found in named:
            specs = tensor_specs(found, precision, on_host=on_host, each_ranks=self.registry.each_ranks)
            layouts.append(
                pack(specs, slab_nbytes=slab_nbytes or ALIGN_NBYTES, first_group=first_group, num_ranks=num_ranks)
            )
            first_group += len(layouts[-1].groups)
        return layouts

    def _pack(self, models: Iterable[tuple[nn.Module, Named, Layout]], built: Built) -> list[PackedModel]:
        """Pack all models or, if one cannot be, none."""
        added: list[PackedModel] = []
        try:
            for root, named, layout in models:
                added.append(PackedModel(root, layout, self.packer.pack(named, layout, built)))
            built.complete([managed for packed in added for managed in packed.parameters])
        except BaseException:
            for packed in added:
                self.packer.unpack(packed.layout, built)
            raise
        return added
