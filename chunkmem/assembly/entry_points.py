"""What happens where control enters: a model is called from outside, an optimizer steps, all ranks make a call."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from chunkmem.activations.saved_tensors import in_backward
from chunkmem.assembly.parts import Memory, Modules, Sharding
from chunkmem.data.errors import RankError, StateError
from chunkmem.modules.autocast import AutocastCache
from chunkmem.modules.compiled import HiddenGradients
from chunkmem.modules.guard import AccessGuard
from chunkmem.modules.ordinary import OrdinaryTensors
from chunkmem.optim.scaler import LossScaler
from chunkmem.runtime.tiers import Tiers
from chunkmem.runtime.timestamps import Interval
from chunkmem.steps.compiles import CompileWatch
from chunkmem.steps.controller import StepController
from chunkmem.steps.first_steps import FirstSteps

_NUM_UPDATES = 16


@dataclass(eq=False)
class EntryPoints:
    """Surrounds calls from outside; of those of models, the hooks of modules tell."""

    memory: Memory
    sharding: Sharding
    modules: Modules
    tiers: Tiers
    controller: StepController
    first_steps: FirstSteps | None
    """What ranks learn of their exchanges; None with one rank."""
    scaler: LossScaler | None
    autocast: AutocastCache
    after_first_step: Callable[[], None] | None
    """Called once; None: it has been."""
    gathers_open: int = 0
    batches_under_way: int = 0
    """Of an asynchronous pipeline: their graphs are older than the last step."""

    def __post_init__(self) -> None:
        self.ordinary = OrdinaryTensors(self.sharding.ranks)
        self._stepping = False
        self.updates: deque[Interval] = deque(maxlen=_NUM_UPDATES)
        """When the last ones were made; who reads them empties it."""
        self._updated: frozenset[int] = frozenset()
        """Groups that the step updates, on whichever rank."""
        self._hidden = HiddenGradients(self.modules.access)
        self._compiles = CompileWatch(self._compiler_begins, self._hidden.show)
        events = self.memory.pager.events
        events.used.append(self.begin_outside)
        events.reducing.append(partial(self.step, updates=False))
        events.compiled.append(self.forget_steps)

    @property
    def phase(self) -> str:
        """What runs: "step", "backward", "forward", or nothing."""
        if self._stepping:
            return "step"
        if in_backward():
            return "backward"
        return "forward" if self.modules.access.stack else ""

    def require_drained(self, call: str) -> None:
        """Raise a `StateError` if an asynchronous pipeline has batches under way, which `call` would be wrong for."""
        if self.batches_under_way:
            raise StateError(
                f"{call} with {self.batches_under_way} batches under way, whose gradients are those of what is trained "
                "now; call pipe.flush() on all ranks first"
            )

    def begin_root(self, root: nn.Module) -> None:
        """A model is called from outside: drop what an interrupted call left, and look the parameters over."""
        self.memory.require_open()
        if self.after_first_step is not None:
            self.sharding.ranks.require_whole()  # there may be others by now
        self._compiles.begin()
        modules, units = self.modules, self.sharding.units
        modules.access.ledger.require_none_failed(f"a call of {type(root).__name__}")
        self.autocast.switch_off()
        modules.access.reset(step=False)
        modules.backward.reset(step=False)
        modules.step_lock.end_hooks()
        units.reset(step=False)
        grad_enabled = torch.is_grad_enabled()
        units.begin_root(grad_enabled=grad_enabled)
        self._state_frozen()
        if self.sharding.reduction is not None:
            modules.gradients.discard_unset()  # before what comes now is added to it, or reduced with it
        self.controller.begin_root(id(root), grad_enabled=grad_enabled, before_iteration=self._leave_to_autograd)
        if self.controller.residence.is_on:
            return
        modules.registry.check()
        modules.overrides.check_copies()
        modules.require_values()
        modules.gradient_hooks.watch(modules.registry.parameters)

    def _compiler_begins(self) -> None:
        """torch's compiler works: what it takes is no computing, and it cannot follow a `.grad` without memory."""
        self.controller.note_compiled()
        self._hidden.hide()

    def close(self) -> None:
        """Nobody enters any more."""
        self._compiles.end()

    def begin_outside(self, first: int) -> None:
        """A parameter is used outside of models, in what backward may come to: a step may begin with it."""
        self.modules.require_values()
        if self.controller.is_between_steps:
            self.controller.begin_root(
                first, grad_enabled=True, before_iteration=self._leave_to_autograd, is_model=False
            )

    def _leave_to_autograd(self) -> None:
        """Another step begins: what the one before has left is no part of it."""
        self.modules.regions.give_up()
        self.modules.gradients.discard_unset()

    def make_guard(self) -> AccessGuard | None:
        """Steps that are recorded run under a check, as does the first; it would cost too much in every one."""
        inputs = self.modules.regions.inputs
        # torch's formulas of norms for forward-mode AD take another way under such a mode, to other last bits.
        if torch.autograd.forward_ad._current_level >= 0:
            return None
        if not self.controller.is_recording and not inputs.in_first_step:
            return None
        watch, declared = self.controller.watch, self.modules.declared
        run = None if watch is None else watch.run_operator

        def note_write(memory: int) -> None:
            declared.note_write(memory)
            inputs.note_write(memory)

        return AccessGuard(declared.undeclared, lambda: self.phase, note_write=note_write, run=run)

    def note_error(self, error: BaseException) -> None:
        """A model has raised something: the other ranks are told."""
        self.sharding.ranks.note_error(error)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Surround evaluations that are not alike on all ranks; see `ChunkManager.join`."""
        self.memory.require_open()
        units, ranks = self.sharding.units, self.sharding.ranks
        if units.prefetch is None or units.is_joined:
            yield
            return
        units.let_go()
        is_in_step, units.is_in_step, units.is_joined = units.is_in_step, False, True
        raised: Exception | None = None
        try:
            with ranks.telling():
                try:
                    yield
                except RankError:
                    raise
                except Exception as error:  # the others go on, and this rank with them
                    raised = error
                self._answer("manager.join()", raised)
                if raised is not None:
                    raise raised
        finally:
            units.is_in_step, units.is_joined = is_in_step, False

    def _answer(self, call: str, raised: Exception | None) -> None:
        """Take part in what other ranks gather until all are here, also after what this one has `raised`."""
        with self.modules.step_lock.taken():
            self.controller.learn_from_last()
            try:
                self.sharding.units.replay_without_batch(call)
            except Exception as error:
                self.sharding.ranks.connection.leave(call, error)
                raise error from raised

    @contextlib.contextmanager
    def step(self, options: str, *, updates: bool, goes_on: bool = False) -> Iterator[None]:
        """Surround `step()` and clipping: backward is over, and what users wrote counts.

        All ranks come here with the same `options`, such as learning rates: each of them updates its own chunks.
        A step that `goes_on` after an error has its gradients, and other ranks do not wait for it any more.
        """
        self.memory.require_open()
        label = f"{'optimizer.step()' if updates else 'clipping of gradients'} with {options}"
        if self.modules.gradients.values.shared is not None:
            label += self.modules.gradients.values.shared.in_words()
        with self.modules.step_lock.taken(), self.sharding.ranks.telling():
            began = self.memory.store.clock.timestamp()
            is_left = updates and not goes_on and self.controller.residence.is_on
            self._look_over(is_left=is_left)
            self._stepping = True
            try:
                if not goes_on:
                    self._sync_gradients(label, is_left=is_left, is_step=updates)
                yield
                self.modules.access.refresh_held()
                if updates:
                    self._end_step()
                    self.updates.append(Interval(began, self.memory.store.clock.timestamp()))
            except BaseException:
                self.controller.excuse_running()  # no other step has these events
                self.controller.residence.leave()  # hooks tell what may not come before it is continued
                raise
            finally:
                self._stepping = False
            if updates and self.after_first_step is not None:
                after_first_step, self.after_first_step = self.after_first_step, None
                after_first_step()

    def declare_last(self, is_last: bool) -> None:
        """Say, as `DistributedDataParallel` does, whether the next backward is the last one before the step."""
        self.sharding.units.backwards.declare_last(is_last)
        self.sharding.ordinary.declare_last(is_last)

    def forget_steps(self) -> None:
        """There is more to train than was recorded, and to exchange: begin again."""
        self.controller.forget()
        if self.first_steps is not None:
            self.first_steps.restart()

    def _look_over(self, *, is_left: bool) -> None:
        """Drop what was interrupted; take up what users have written, unless `sync_left` is going to."""
        if self.gathers_open:
            raise StateError("optimizer.step() inside manager.gather(): leave the block first, its writes count then")
        if self.sharding.units.is_joined:
            raise StateError("optimizer.step() inside manager.join(): leave the block first")
        modules, pager = self.modules, self.memory.pager
        modules.access.reset(step=True)
        modules.backward.reset(step=True)
        self.sharding.units.reset(step=True)
        modules.registry.check()
        modules.overrides.check()
        modules.overrides.check_copies()
        modules.require_values()
        for chunk in () if is_left else modules.access.chunks.values():
            pager.notice_writes(chunk)
        # Of a recorded step, too: optimizer states are about to be made.
        if self.controller.watch is not None or self.controller.known.plan is None:
            self.tiers.leave_room_for_activations()

    def _sync_gradients(self, label: str, *, is_left: bool, is_step: bool) -> None:
        """Have the gradients as `.grad` says, over ranks as their means with their owners.

        With `is_left`, autograd has left them there, and no hook has told of any.
        """
        gradients, reduction = self.modules.gradients, self.sharding.reduction
        if is_left:
            gradients.sync_left()
        else:
            gradients.sync_with_grad(self.modules.registry.parameters)
        if reduction is not None:
            self._state_frozen()
            parameters = self.modules.registry.parameters
            if self.scaler is not None and not gradients.slots.any_landed(parameters):
                self.scaler.note_scaled()  # what this rank adds is 0 at any scale
            self.sharding.units.replay_without_batch(label)
            reduction.reduce(parameters, is_step=is_step)
            self.sharding.ordinary.reduce()
            self._updated = frozenset(managed.group for managed in gradients.slots.anywhere)

    def _end_step(self) -> None:
        if self.sharding.shards is not None:
            self.sharding.shards.send_on_host(self._updated, reader="updated weights on HOST")
        if self.modules.gradients.values.shared is not None:
            self.modules.gradients.values.shared.end_step()
        self.ordinary.follow()
        self.controller.end_step()
        had_batch = self.sharding.units.is_in_step
        self.sharding.units.end_step()
        if self.first_steps is not None:
            self.first_steps.end_step(had_batch=had_batch)

    def _state_frozen(self) -> None:
        """Have the ranks compare which parameters are frozen."""
        if self.sharding.shards is not None:
            frozen = (managed for managed in self.modules.registry.parameters if not managed.requires_grad)
            self.sharding.ranks.connection.know(frozenset(f"parameter {managed} is frozen" for managed in frozen))


def collect_abandoned(is_alone: Callable[[], bool]) -> None:
    """Free what managers hold that nobody can reach any more, if there are any.

    A notebook cell that is run again rebinds the names of a model and its manager, which refer to each other.
    Python looks for such cycles by the number of new objects, whatever memory they hold: too late for these. So it
    is told to look when a manager is made, for that of the run before the last one, and after the first step, when
    the names of the last run are rebound, too.
    """
    if not is_alone():
        gc.collect()
