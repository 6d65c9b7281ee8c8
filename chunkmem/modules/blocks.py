"""Blocks whose weights lie in a chunk or two: they are heard of as a whole.

[Note: Blocks as a whole] Where a plan is followed and memory is not short, a block of many small modules is one call,
and not one for each module in it, if all its weights are in one chunk, or in two: they come and go together anyway.
They are pinned and open from its beginning to its end, and no module inside of it has hooks or reports reads. In
backward their gradients wait in `.grad` until all of a chunk are there, and land in one copy:

    module by module   | norm | q | k | v | attention | out |     a pin, and a read of each weight, for each
    as a whole         | block                            |       one pin
    backward           .grad of out, v, k, q, norm, then one copy into the GRAD chunk

The chunk is on DEVICE for longer than its reads are, and gradients are there twice for a while, so a plan by blocks
needs more room. The smallest caps are served module by module, and so are the first step of a kind, and kinds in which
others call modules of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from chunkmem.data.types import Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.parameter_reads import ParameterReads
from chunkmem.ranks.units import Unit


@dataclass(frozen=True, eq=False)
class FittedModule:
    """What the hooks know of one module."""

    name: str
    own: tuple[ManagedParameter, ...]
    """Managed parameters registered on it."""
    unseen: tuple[ManagedParameter, ...]
    """Managed parameters it also holds elsewhere (an RNN's flat weight list), whose uses are no lookups."""
    is_leaf: bool
    unit: Unit | None
    """The unit of exchange it belongs to; None with one rank."""
    region: str | None
    """The policy for what autograd saves in its calls; None: it is no region."""
    tier: Tier
    """Where it computes."""
    is_shareable: bool = False
    """It has no parameters, nor has what is in it: models that are not managed may have it, too."""


_MOST_CHUNKS = 2
"""That the weights of a block are in."""
_MOST_NUMEL = 1 << 20
"""Weights a module, on average: larger ones compute for longer than it takes to hear of them."""


@dataclass(frozen=True, eq=False)
class WholeBlock:
    """A module that is heard of as a whole."""

    module: nn.Module
    parameters: tuple[ManagedParameter, ...]
    inside: tuple[nn.Module, ...]
    """The modules in it, without itself."""


class Together(NamedTuple):
    """Of a weight that a block reads together with all its others."""

    block: object
    """The same for all weights of the block, and for no others."""
    num_in_group: int
    """Weights of the block in the same group, whose gradients land together."""


def blocks_of(
    root: nn.Module, about: Mapping[nn.Module, FittedModule], callers: Mapping[nn.Module, Collection[int]]
) -> list[WholeBlock]:
    """Return the outermost modules under a root that can be heard of as a whole.

    Args:
        root: a model that was packed.
        about: its fitted modules; others in it hear of nothing anyway.
        callers: by module, the identities of those that have called it; 0: none, it was called from outside.
    """
    parents = defaultdict[int, set[int]](set)
    for module in root.modules():
        for child in module.children():
            parents[id(child)].add(id(module))

    def find(module: nn.Module) -> Iterator[WholeBlock]:
        block = _block(module, about, callers, parents)
        if block is not None:
            yield block
        else:
            for child in module.children():
                yield from find(child)

    return list(find(root))


def _block(
    module: nn.Module,
    about: Mapping[nn.Module, FittedModule],
    callers: Mapping[nn.Module, Collection[int]],
    parents: Mapping[int, Collection[int]],
) -> WholeBlock | None:
    """Return a module as a block; None if it has to be heard of module by module, or has only one with weights."""
    modules = list(module.modules())
    known = [about[each] for each in modules if each in about]
    parameters = tuple(dict.fromkeys(managed for fitted in known for managed in fitted.own))
    num_readers = sum(bool(fitted.own) for fitted in known)
    if module not in about or num_readers < 2:
        return None
    num_chunks = len({managed.group for managed in parameters})
    is_small = sum(managed.param.numel() for managed in parameters) <= _MOST_NUMEL * num_readers
    if num_chunks > _MOST_CHUNKS or not is_small or not all(managed.requires_grad for managed in parameters):
        return None
    if any(fitted.tier is not Tier.DEVICE for fitted in known):
        return None
    members, inside = {id(each) for each in modules}, tuple(modules[1:])
    for each in inside:
        fitted = about.get(each)
        if fitted is not None and fitted.region is not None:
            return None
        is_ours_alone = isinstance(each._parameters, ParameterReads) and members.issuperset(parents[id(each)])
        if fitted is not None and fitted.own and not is_ours_alone:
            return None
        if next(each.parameters(), None) is not None and not members.issuperset(callers.get(each, ())):
            return None
    return WholeBlock(module, parameters, inside)
