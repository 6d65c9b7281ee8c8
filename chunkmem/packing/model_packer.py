"""Models packed: which parameters, how they are laid out, and in which dtypes; all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from chunkmem.layout.pack import choose_slab_nbytes, pack
from chunkmem.layout.spec import ALIGN_NBYTES, Layout, MasterCopy
from chunkmem.nn.registry import ModelRegistry, PackedModel
from chunkmem.packing.built import HERE, Built
from chunkmem.packing.packable import check_separate, check_unmanaged, named_parameters_of
from chunkmem.packing.packer import Packer, tensor_specs
from chunkmem.packing.precision import AS_BUILT, Precision, precision_of


class ModelPacker:
    """Packs models, and has the registry know them."""

    def __init__(
        self,
        registry: ModelRegistry,
        packer: Packer,
        *,
        choose_on_host: Callable[[Sequence[nn.Module], Collection[nn.Module]], frozenset[nn.Module]],
        chunk_numel: int | None,
        device_cap_nbytes: int,
        dtype: torch.dtype = torch.float32,
        master_weights: bool = True,
        num_ranks: int = 1,
    ) -> None:
        """Pack nothing yet; `chunk_numel` None searches the slab size on the first model.

        `dtype` is what modules compute in, and `master_weights` whether updates are in float32; see `precision_of`.
        `num_ranks` share the chunks: slabs are small enough that each rank gets about as many bytes. `choose_on_host`
        returns the modules under roots, of which some are excluded, that compute on HOST.
        """
        self._registry = registry
        self._choose_on_host = choose_on_host
        self._num_ranks = num_ranks
        self._dtype = dtype
        self._master_weights = master_weights
        self._packer = packer
        self._chunk_numel = chunk_numel
        self._device_cap_nbytes = device_cap_nbytes
        self.slab_nbytes: int | None = None
        """Of the model that was added last; None before the first."""
        self.precision = AS_BUILT
        """Of what was added last."""
        self.on_host: frozenset[nn.Module] = frozenset()
        """Modules that compute on HOST, of what was added last."""

    def add(self, roots: Sequence[nn.Module], excluded: Sequence[nn.Module], built: Built = HERE) -> list[PackedModel]:
        """Pack the parameters under `roots`; `precision` is theirs then. All are checked before the first is touched.

        Raises:
            LayoutError, StateError, CapacityError: see `named_parameters_of` and `Packer.pack`.
        """
        on_host = self._choose_on_host(roots, excluded)
        built.check(excluded)
        managed = {id(each.param) for each in self._registry.parameters}
        known = set(managed)
        named: list[list[tuple[str, nn.Parameter]]] = []
        for root in roots:
            # What another model holds too, packed before or above, has its slot already.
            own = named_parameters_of(root, excluded=excluded, built=built)
            found = [(n, p) for n, p in own if id(p) not in known]
            check_unmanaged(found)
            known.update(id(param) for _, param in found)
            named.append(found)
        if built.has_memory:
            check_separate(roots, packed=known)
        precision = precision_of(
            roots, self._dtype, master_weights=self._master_weights, excluded=excluded, packed=managed
        )
        precision = _with_masters(precision, built.masters)
        slab_nbytes = self.slab_nbytes if built.slab_nbytes is None else built.slab_nbytes
        if any(named) and (slab_nbytes is None or (self._chunk_numel is not None and built.slab_nbytes is None)):
            slab_nbytes = self._choose_slab_nbytes(named, precision, on_host, num_ranks=self._num_ranks)
        packable = {
            root: pairs
            for root, pairs in zip(roots, named, strict=True)
            if any(id(p) in known for p in root.parameters())
        }
        added = self._pack(packable, slab_nbytes or ALIGN_NBYTES, precision, built, on_host=_parameters_of(on_host))
        self.slab_nbytes, self.precision, self.on_host = slab_nbytes, precision, on_host
        self._registry.add(added, roots, excluded)
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
        on_host = self._choose_on_host(roots, excluded)
        known = {id(param) for module in excluded for param in module.parameters(recurse=False)}
        named: list[list[tuple[str, nn.Parameter]]] = []
        for root in roots:
            named.append([(name, param) for name, param in root.named_parameters() if id(param) not in known])
            known.update(id(param) for _, param in named[-1])
        found = precision_of(roots, self._dtype, master_weights=self._master_weights, excluded=excluded)
        # What is frozen was built in another dtype, maybe, than it has in its chunk.
        frozen = (
            m for m in self._registry.parameters if not m.requires_grad and m.built_dtype is not m.placeholder.dtype
        )
        packed = {id(m.param): MasterCopy.PACKED for m in frozen}
        precision = _with_masters(found, {**packed, **masters})
        if slab_nbytes is None and any(named):
            slab_nbytes = self._choose_slab_nbytes(named, precision, on_host, num_ranks=num_ranks)
        layouts: list[tuple[Layout, list[nn.Parameter]]] = []
        for pairs in named:
            specs = tensor_specs(pairs, precision, on_host=_parameters_of(on_host))
            first = sum(len(layout.groups) for layout, _ in layouts)
            layout = pack(specs, slab_nbytes=slab_nbytes or ALIGN_NBYTES, first_group=first)
            layouts.append((layout, [param for _, param in pairs]))
        return layouts

    def _pack(
        self,
        named: Mapping[nn.Module, Sequence[tuple[str, nn.Parameter]]],
        slab_nbytes: int,
        precision: Precision,
        built: Built,
        *,
        on_host: Collection[int],
    ) -> list[PackedModel]:
        """Pack all roots or, if one cannot be, none."""
        added: list[PackedModel] = []
        first = sum(len(model.layout.groups) for model in self._registry.models)
        try:
            for root, pairs in named.items():
                packed = self._packer.pack(
                    root,
                    pairs,
                    slab_nbytes=slab_nbytes,
                    first_group=first,
                    precision=precision,
                    on_host=on_host,
                    built=built,
                )
                first += len(packed.layout.groups)
                added.append(packed)
            built.complete([managed for packed in added for managed in packed.parameters])
        except BaseException:
            for packed in added:
                self._packer.unpack(packed.layout, built)
            raise
        return added

    def _choose_slab_nbytes(
        self,
        named: Iterable[Sequence[tuple[str, nn.Parameter]]],
        precision: Precision,
        on_host: Iterable[nn.Module],
        *,
        num_ranks: int,
    ) -> int:
        away = _parameters_of(on_host)
        pairs = [pair for pairs in named for pair in pairs]
        on_device = [(name, param) for name, param in pairs if id(param) not in away]
        return choose_slab_nbytes(
            tensor_specs(on_device or pairs, precision),
            chunk_numel=self._chunk_numel,
            device_cap_nbytes=self._device_cap_nbytes,
            num_ranks=num_ranks,
        )


def _with_masters(precision: Precision, masters: Mapping[int, MasterCopy]) -> Precision:
    """Return a precision in which these parameters, if they are in a low dtype, have such master weights."""
    known = {key: master for key, master in masters.items() if key in precision.masters}
    return replace(precision, masters={**precision.masters, **known})


def _parameters_of(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the modules' own parameters."""
    return {id(param) for module in modules for param in module._parameters.values() if param is not None}
