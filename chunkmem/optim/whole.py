"""Optimizer classes that see all parameters at once: ordinary tensors on HOST, which stand for those in chunks.

An update of one parameter may read others: a norm or a step size over all, a stack of
matrices. Such a class is made once, over parameters of its own on HOST, its leaves, and steps over all of them:

    step()    | copy weights and gradients | the class's step() | update group 0 | group 1 | ...
    leaves       as in the chunks            new                  read             read
    chunks       as they are                 as they are          follow, each on the tier where its plan updates it

For plans these are the updates of any optimizer, without states. What the class keeps of a parameter is what it has
made: its record has it, and HOST counts its bytes. Until the class has returned, no chunk has changed; an error in
it leaves states that nobody can complete. A closure is called by the class: weights go to the chunks before each call,
and gradients to the leaves after it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from chunkmem.data.layout import ALIGN_NBYTES
from chunkmem.data.types import ChunkKind, Role, Tier
from chunkmem.modules.begun import BegunStep
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.optim.class_calls import options_of, unhooked_step
from chunkmem.optim.class_rule import RuleOfClasses
from chunkmem.optim.entries import EntryForm, Record, TensorForm, copied_to_cpu
from chunkmem.optim.groupwise import GroupwiseStep
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.members import weight_form
from chunkmem.optim.rule import UpdateItem, slots_of
from chunkmem.optim.speculative import Intent
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.host_memory import HostMemory
from chunkmem.runtime.values import storage_id

ROLE: Final = Role("whole", ChunkKind("what an optimizer has at once", stays=True))
"""Of memory for leaves, their gradients and states."""


@dataclass(frozen=True)
class _AnyEntry(EntryForm):
    """Whatever a class keeps, as it is."""

    def problems(self, state: Mapping[str, Any], *, is_whole: bool) -> list[str]:
        return []

    def number(self, key: str, value: Any) -> Any:
        return copied_to_cpu(value)


_ANY_ENTRY: Final = _AnyEntry((), (), {}, {}, is_there=False)


class Leaves:
    """Ordinary parameters on HOST with memory for a gradient each, one for each parameter of an optimizer."""

    def __init__(self, host: OptimizerHost, *, name: str) -> None:
        """Begin without any; `name` begins messages."""
        self._host = host
        self._name = name
        self._by_param: dict[torch.Tensor, torch.nn.Parameter] = {}
        self.params: dict[torch.Tensor, torch.Tensor] = {}
        """By leaf, what it stands for."""
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        """By parameter."""
        self._memories: list[HostMemory] = []
        self._states: HostMemory | None = None
        self._states_nbytes = 0

    def __getitem__(self, param: torch.Tensor) -> torch.nn.Parameter:
        return self._by_param[param]

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """Make leaves of parameters that have none, with their weights.

        Raises:
            CapacityError: HOST has no room for them and their gradients.
        """
        forms = {param: weight_form(self._host, param) for param in params if param not in self._by_param}
        sizes = [-(-_nbytes(form) // ALIGN_NBYTES) * ALIGN_NBYTES for form in forms.values()]
        if not forms:
            return
        reader = f"{self._name}: weights and gradients of {len(forms)} parameters at once"
        memory = self._memory(max(1, 2 * sum(sizes)), reader=reader)
        self._memories.append(memory)
        with runtime_mode():
            at = 0
            for (param, form), size in zip(forms.items(), sizes, strict=True):
                leaf, grad = (_view(memory.flat[start : start + size], form) for start in (at, at + size))
                at += 2 * size
                self._by_param[param] = torch.nn.Parameter(leaf, requires_grad=False)
                self.params[self[param]] = param
                self._grads[param] = grad
        self.take_weights(forms)

    def _memory(self, nbytes: int, *, reader: str, memory: torch.Tensor | None = None) -> HostMemory:
        updater = self._host.updater
        found = HostMemory(updater.pager, ROLE, nbytes, reader=reader, memory=memory)
        updater.at_once.add(found)
        return found

    def _weight(self, param: torch.Tensor) -> torch.Tensor:
        managed = self._host.registry.find(param)
        return param.detach() if managed is None else self._host.updater.weight(managed)

    # From chunks.

    @torch.no_grad()
    def take_weights(self, params: Iterable[torch.Tensor]) -> None:
        """Copy weights to leaves: float32 master weights where there are some."""
        for param in params:
            leaf, weight = self[param], self._weight(param)
            with runtime_mode():
                leaf.copy_(weight)
            leaf.requires_grad_(param.requires_grad)

    @torch.no_grad()
    def take_gradients(self, pending: Iterable[ManagedParameter], *, multiplier: float | None) -> None:
        """Have the gradients of `pending` and of excluded parameters, times `multiplier`; others have none."""
        waiting: dict[torch.Tensor, ManagedParameter] = {managed.param: managed for managed in pending}
        for param, leaf in self._by_param.items():
            grad = None
            if param in waiting:
                grad = self._host.updater.gradient(waiting[param])
            elif self._host.registry.find(param) is None and not isinstance(param.grad, LazyGradient):
                grad = param.grad
            with runtime_mode():
                leaf.grad = None if grad is None else self._grads[param].copy_(grad)
                if grad is not None and multiplier is not None:
                    self._grads[param].mul_(multiplier)

    # To chunks.

    @torch.no_grad()
    def give_weights(self, params: Iterable[torch.Tensor]) -> bool:
        """Write those leaves to their parameters that are other values by now; tell whether there are any."""
        updater, changed = self._host.updater, list(self.changed(params))
        for param in changed:
            leaf, managed = self[param].detach(), self._host.registry.find(param)
            if managed is None:
                param.copy_(leaf)
            else:
                updater.write_weight(managed, leaf)
                updater.mark_written([managed])
        return bool(changed)

    def changed(self, params: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield those of `params` whose leaves are other values than they."""
        for param in params:
            leaf, weight = self[param].detach(), self._weight(param)
            with runtime_mode():
                is_same = torch.equal(weight.to(leaf.device), leaf)
            if not is_same:
                yield param

    @torch.no_grad()
    def give_gradients(self, pending: Iterable[ManagedParameter]) -> None:
        """Have the gradients of `pending` be those of their leaves; None discards one."""
        updater, dropped = self._host.updater, set[ManagedParameter]()
        for managed in pending:
            grad = self._by_param[managed.param].grad
            if grad is None:
                managed.grad = None
                dropped.add(managed)
                continue
            with runtime_mode():
                for replica in updater.gradient_replicas(managed):
                    replica.copy_(grad)
        updater.gradients.discard(dropped)

    def count_states(self, entries: Collection[Any]) -> None:
        """Have HOST count the tensors in the states of all leaves.

        Raises:
            CapacityError: HOST has no room for them.
        """
        tensors = [value for value in tree_leaves(list(entries)) if isinstance(value, torch.Tensor)]
        sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        nbytes = sum(sizes.values())
        has_host = self._host.updater.pager.store.pools[Tier.HOST].ledger.limit_nbytes > 0
        if nbytes == self._states_nbytes or not has_host:
            return  # where both tiers are one piece of RAM, they are as activations are: outside of its cap
        if self._states is not None:
            self._states.close()
        self._states, self._states_nbytes = None, 0
        self._host.forget_plans()
        # Bytes that are there already: of none but their number.
        memory = torch.zeros(1, dtype=torch.uint8, device="cpu").expand(nbytes)
        reader = f"{self._name}: states of {len(entries)} parameters"
        self._states, self._states_nbytes = self._memory(nbytes, reader=reader, memory=memory), nbytes


class WholeClass:
    """One optimizer of a class over leaves, with states and options that are a user's between steps."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], host: OptimizerHost, params: Any, options: Mapping[str, Any]
    ) -> None:
        """Make the optimizer, given parameters or parameter groups as in torch.optim.

        Raises:
            CapacityError: HOST has no room for weights and gradients at once.
        """
        self.name = kind.__name__
        self.leaves = Leaves(host, name=f"chunkmem.Optimizer({self.name}, whole=True)")
        store = host.updater.pager.store
        gc.collect()  # of optimizers that nobody has any more
        used = {memory.chunk.id for memory in host.updater.at_once}
        for chunk in [chunk for key, chunk in store.chunks.items() if key.role is ROLE and key not in used]:
            store.remove(chunk)
        self.inner = kind(self._of_leaves(list(params)), **options)
        self._step = unhooked_step(self.inner)

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as the class has made them, of the user's parameters."""
        groups = self.inner.param_groups
        return [{**group, "params": [self.leaves.params[leaf] for leaf in group["params"]]} for group in groups]

    def add_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Add a parameter group; return it as the class has made it, of the user's parameters."""
        self.inner.add_param_group(*self._of_leaves([group]))
        return self.groups()[-1]

    def _of_leaves(self, given: list[Any]) -> list[Any]:
        """Return parameters, with names or without, or parameter groups with leaves in the place of tensors."""
        found: list[Any] = []
        for one in given:
            if isinstance(one, Mapping):
                params = one["params"]
                listed = [params] if isinstance(params, torch.Tensor) else list(params)
                found.append({**one, "params": self._of_leaves(listed)})
            elif isinstance(one, tuple):
                found.append((one[0], *self._of_leaves([one[1]])))
            else:
                found.append(one)
        tensors = [one for one in found if isinstance(one, torch.Tensor)]
        self.leaves.add(tensors)
        return [self.leaves[one] if isinstance(one, torch.Tensor) else one for one in found]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the class step over its leaves."""
        with torch.enable_grad():
            return self._step(self.inner) if closure is None else self._step(self.inner, closure)

    def marks(self) -> list[object]:
        """Return what differs after a step that has changed options or states."""
        leaves = tree_leaves([self.inner.state, list(map(options_of, self.inner.param_groups))])
        return [(id(leaf), leaf._version) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def take(self, groups: list[dict[str, Any]], entries: Mapping[Any, Any]) -> None:
        """Have the options and states of a user's optimizer, and the weights as they are."""
        inner, params = self.inner, [param for group in groups for param in group["params"]]
        self.leaves.add(params)
        inner.param_groups += [{"params": []} for _ in groups[len(inner.param_groups) :]]
        del inner.param_groups[len(groups) :]
        for own, group in zip(inner.param_groups, groups, strict=True):
            own["params"][:] = map(self.leaves.__getitem__, group["params"])
            _take_options(own, group)
        self.leaves.take_weights(params)
        for param in params:
            inner.state.pop(self.leaves[param], None)
            if param in entries:
                inner.state[self.leaves[param]] = entries[param]

    def give_options(self, groups: list[dict[str, Any]]) -> None:
        """Have a user's parameter groups have the options that the class has changed."""
        for own, group in zip(self.inner.param_groups, groups, strict=True):
            _take_options(group, own)


class WholeRule(RuleOfClasses[None]):
    """Weights are those that a class has made of its leaves."""

    can_be_blank = False

    def __init__(self, whole: WholeClass) -> None:
        """Read leaves of `whole`."""
        self.whole = whole

    @property
    def title(self) -> str:
        return f"{self.whole.name}: "

    def required(self, group: Mapping[str, Any]) -> tuple[str, Collection[str]]:
        return self.whole.name, self.whole.inner.defaults  # those of the user's optimizer are added to by torch

    def hyper(self, group: Mapping[str, Any]) -> None:
        return None

    def form(self, hyper: None, weights: TensorForm, *, name: str) -> EntryForm:
        return _ANY_ENTRY

    def update_item_(self, views: Any, item: UpdateItem, *, multiplier: float | None) -> None:
        slots = slots_of(views, item, multiplier)
        for managed, weight in zip(item.params, slots.weights, strict=True):
            weight.copy_(self.whole.leaves[managed.param].detach())
        slots.round_()

    def update_excluded(self, params: Any, states: Any, hyper: None, *, multiplier: float | None) -> None:
        self.whole.leaves.give_weights(params)


class WholeStep(GroupwiseStep):
    """Steps of which the class is called once, before the first chunk group is updated."""

    rule: WholeRule

    @property
    def _whole(self) -> WholeClass:
        return self.rule.whole

    @property
    def _leaves(self) -> Leaves:
        return self.rule.whole.leaves

    is_stepped = False
    """The class has stepped, and chunks are to follow."""

    def hold(self, begun: BegunStep) -> None:
        begun.has_updated |= self.is_stepped  # chunks are to follow
        super().hold(begun)

    def end(self) -> None:
        super().end()
        self.is_stepped = False

    def intent(self, group: int) -> Intent | None:
        return None  # not before all gradients are there

    def call(self, closure: Callable[[], Any]) -> Any:
        """Have the class step, and call a closure whenever it likes; return what the class does."""
        is_untouched = True

        def called() -> Any:
            nonlocal is_untouched
            is_untouched &= not self._leaves.give_weights(self._members.params())
            self._leaves.give_gradients(self._landed())
            ledger = self._updater.ledger
            noted, ledger.half_updated = ledger.half_updated, "" if is_untouched else ledger.half_updated
            with torch.enable_grad():
                result = closure()
            is_untouched, ledger.half_updated = False, noted
            self._take_gradients()
            return result

        self.check_owned()
        self._take()
        self._take_gradients()
        return self._step(called)

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another method of the class, which may change weights, states and options."""
        self.check_owned()
        with self._host.together(f"optimizer.{method.__name__}()"):
            self._take()
            with self._changing():
                result = method(*args, **kwargs)
            self._give_states()
            self._leaves.give_weights(self._members.params())
        return result

    def _update(self, begun: BegunStep, left: list[ManagedParameter]) -> None:
        self.states.make(left, begun.hypers, anywhere=begun.anywhere)
        if not self.is_stepped:
            self._take()
            self._leaves.take_gradients(left, multiplier=begun.multiplier)
            self._step(None)
        self._leaves.count_states(list(self._entries().values()))
        super()._update(begun, left)
        self._updater.ledger.end(begun.known)  # of this step: what is left is read and written as a user does
        updated = {managed.param for managed in begun.updated}
        self._leaves.give_weights(p for p in self._members.params() if p not in updated)

    def _landed(self) -> list[ManagedParameter]:
        return self._members.pending(self._members.known())

    def _take_gradients(self) -> None:
        with self._host.step("a closure", updates=False):
            self._leaves.take_gradients(self._landed(), multiplier=None)

    def _take(self) -> None:
        self._updater.wait_for_updates()
        self._whole.take(self._members.groups(), self._entries())

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        with self._changing(may_repeat=closure is None):
            result = self._whole.step(closure)
        self.is_stepped = True
        self._give_states()
        return result

    @contextmanager
    def _changing(self, *, may_repeat: bool = True) -> Iterator[None]:
        """Surround a call of the class, which may be made again if it has raised something before any change."""
        before, ledger = self._whole.marks(), self._updater.ledger
        try:
            with ledger.updating(f"all parameters of {self._whole.name}"):
                yield
        except BaseException:
            if (
                may_repeat
                and self._whole.marks() == before
                and not any(True for _ in self._leaves.changed(self._members.params()))
            ):
                ledger.half_updated = ""
            raise

    def _entries(self) -> dict[Any, Any]:
        """Return the states of all parameters."""
        records = {managed.param: record.entry for managed, record in self.states.records.items()}
        return {**self._state.excluded, **{param: entry for param, entry in records.items() if entry is not None}}

    def _give_states(self) -> None:
        """Have records of what the class has made of states, and its options in the user's parameter groups."""
        self._whole.give_options(self._members.groups())
        for param in self._members.params():
            entry = self._whole.inner.state.get(self._leaves[param])
            managed = self.states.find(param)
            if managed is not None and (entry is not None or managed in self.states.records):
                self.states.records.setdefault(managed, Record()).become(Record(entry=entry, is_new=False))
                self.states.note([managed])
            elif entry is not None:
                self._state.excluded[param] = entry


def _take_options(group: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Have a parameter group have the options of another; its parameters, and the list of them, stay."""
    params = group["params"]
    group.clear()
    group.update(other)
    group["params"] = params


def _nbytes(form: TensorForm) -> int:
    return form.dtype.itemsize * int(torch.Size(form.shape).numel())


def _view(memory: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """Return zeros of a form in 1-D bytes."""
    memory.zero_()
    return memory[: _nbytes(form)].view(form.dtype).as_strided(form.shape, form.stride)
