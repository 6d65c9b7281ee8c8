"""What a user holds: models are built in it, steps go through it, and it tells what happened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from chunkmem.assembly.make import build_runtime
from chunkmem.assembly.phases import offload, onload
from chunkmem.assembly.runtime import Origin, Runtime
from chunkmem.assembly.unwrap import unwrap
from chunkmem.building import ModelBuilding
from chunkmem.checkpoints.asynchronous import Saving
from chunkmem.checkpoints.loading import load_checkpoint
from chunkmem.checkpoints.odd_files import checkpoint_path
from chunkmem.checkpoints.pretrained import save_pretrained
from chunkmem.checkpoints.saver import CheckpointSaver
from chunkmem.checkpoints.saving import state_to_save
from chunkmem.checkpoints.streaming import weight_stream
from chunkmem.config import Config
from chunkmem.contrib.async_pipeline.checks import require_options
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline
from chunkmem.contrib.elastic.pipeline import ElasticPipeline
from chunkmem.data.errors import CheckpointError, StateError
from chunkmem.data.memory import FreezeReport
from chunkmem.data.sizes import parse_nbytes
from chunkmem.freezing.freezer import freeze, unfreeze
from chunkmem.freezing.schedule import FreezeSchedule
from chunkmem.modules.gather import gathered, parameters_in
from chunkmem.modules.local_parts import named_parts, over_stages
from chunkmem.optim.converted import converted
from chunkmem.optim.ema import EMA
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.pipeline.build import make_pipeline
from chunkmem.pipeline.by_layer import ByLayerPipeline
from chunkmem.pipeline.epochs import Epochs
from chunkmem.pipeline.frozen import Cache
from chunkmem.pipeline.options import ASYNCHRONOUS, PipelineOptions, blocks_of
from chunkmem.pipeline.staged import StagedPipeline
from chunkmem.plan.machine import Machine
from chunkmem.ranks.methods import ExchangeMethod
from chunkmem.reporting import Reporting
from chunkmem.runtime.device import ComputeDevice, give_back_freed_ram
from chunkmem.runtime.disk_file import SystemCalls
from chunkmem.runtime.queues import Lanes


class ChunkManager(ModelBuilding, Reporting):
    """Owns the tiers and the chunks of one process. Several can live side by side.

    Args:
        config: see `Config`; None is all defaults.
        process_group: the ranks that train a model together; None is torch.distributed's default group, or one process.
        mesh: the ranks as a `torch.distributed.device_mesh.DeviceMesh` with the dimensions "replicate" and "shard", or
            one of them, in place of `process_group`: chunks are sharded over the one, and replicated over the other.
            A dimension "stage" has a pipeline stage on each index: `pipeline()` then packs what `init()` has built.
        exchange: a subclass of `ExchangeMethod`, to exchange chunks in a way of one's own; None: one of chunkmem's.
        device_index: which accelerator to compute on; None is the current one.
        machine: speeds that plans are made for; None measures this machine, once, and remembers.
        make_lanes: makes what copies while the device computes; None is threads, or streams on an accelerator.
        disk_calls: what DISK is read and written by; None is the system.

    Raises:
        ConfigError: the ranks do not fit together, or the folder for DISK cannot be used.
        TierIOError: DISK failed at the first bytes.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
        exchange: type[ExchangeMethod] | None = None,
        device_index: int | None = None,
        machine: Machine | None = None,
        make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
        disk_calls: SystemCalls | None = None,
    ) -> None:
        self.config = Config() if config is None else config
        origin = Origin(self.config, process_group, mesh, exchange, device_index, machine, make_lanes, disk_calls)
        self.runtime = build_runtime(origin)
        self._saver = CheckpointSaver()
        self._pipelines: WeakSet[Any] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkManager:
        """Return the manager itself: what holds it, such as a LightningModule, is copied with its models."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("a manager cannot be copied or pickled: make another from its config")

    def __enter__(self) -> ChunkManager:
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if raised is None:
                raise
            raised.add_note(str(error))

    def pipeline(
        self,
        blocks: Iterable[nn.Module],
        *,
        first: nn.Module | None = None,
        last: nn.Module | None = None,
        loss_fn: Callable[..., torch.Tensor],
        micro_batches: int,
        checkpoint: str = "auto",
        schedule: str = "auto",
        stages_per_rank: int | None = None,
        deferred_batch_norm: bool = False,
        freeze: FreezeSchedule | None = None,
        cache: Cache | None = None,
        width: str | None = None,
        versions: str | None = None,
    ) -> ByLayerPipeline | StagedPipeline | ElasticPipeline:
        """Return what trains blocks by micro-batches: `loss = pipe.step(x, y)`.

        In one process, and on ranks without stages, one block runs after the other, each for all micro-batches: what
        moves in a step does not depend on their number. Over the ranks of a mesh with a dimension "stage", each of them
        packs its own stages now, of the model that `init()` has built, and a schedule says what runs when.

        Args:
            blocks: what one returns is what the next is given; a tuple is its arguments.
            first: comes before them, and is given the input of `step`.
            last: comes after them.
            loss_fn: of what `last` returns and of the target; the mean over its samples.
            micro_batches: parts that a batch is split into; fewer if it has fewer samples.
            checkpoint: the calls of blocks that are recomputed in backward: "always"; "except_last", not those of the
                last micro-batch; "never"; "auto" has the planner choose. What is not recomputed is kept or offloaded.
            schedule: over stages "gpipe", "1f1b", "interleaved", "looped-bfs" or "async-1f1b", whose `step` updates
                weights, too; else "by-layer". "auto" chooses.
            stages_per_rank: with several, stage k is on rank k modulo the number of ranks.
            deferred_batch_norm: have the running statistics of `BatchNorm` layers be those of the whole batch, counted
                once; each micro-batch is normalised by its own all the same.
            freeze: says what `pipe.end_epoch()` freezes; an adaptive one looks at gradients in a few steps of an epoch.
            cache: keeps what frozen blocks return, from the first block on, by `pipe.step(x, y, ids=ids)`.
            width: "auto": `pipe.resize()` divides the ranks of the mesh into the number of stages that is predicted to
                be fastest, when layers were frozen; the pipeline stays the same object. None: `repartition` does.
            versions: of "async-1f1b", which weights the backward of a batch runs on when updates came since its
                forward: "stash", those of its forward, which are kept on HOST; "predict", like its forward, those that
                are predicted from momentum; "predict+gap": gradients are divided by how wrong that was, in addition.

        Raises:
            ConfigError: an option has no such value, or differs between ranks.
            LayoutError: a block is no module, or one of no model of this manager; there are fewer blocks than stages.
            StateError: the stages of the model are packed already.
            CapacityError: the weights of a stage fit no tier.
        """
        self.runtime.require_open()
        epochs = None if freeze is None else Epochs(self, freeze)
        options = PipelineOptions(
            blocks_of(blocks), first=first, last=last, loss_fn=loss_fn, micro_batches=micro_batches,
            checkpoint=checkpoint, schedule=schedule, stages_per_rank=stages_per_rank, cache=cache, width=width,
            deferred_batch_norm=deferred_batch_norm, epochs=epochs, versions=versions,
        )  # fmt: skip
        pipeline = self._make_pipeline(options)
        self._pipelines.add(pipeline)
        return pipeline

    def _make_pipeline(self, options: PipelineOptions) -> ByLayerPipeline | StagedPipeline | ElasticPipeline:
        require_options(options)
        if options.width is not None:
            return ElasticPipeline(self.runtime, options, adopt=self._adopt)
        staged = AsynchronousPipeline if options.schedule == ASYNCHRONOUS else StagedPipeline
        return make_pipeline(self.runtime, options, adopt=self._adopt, staged=staged)

    def _adopt(self, runtime: Runtime) -> None:
        """Consist of other parts from now on."""
        self.runtime = runtime

    def backward(self, loss: torch.Tensor, *, last: bool | None = None, is_scaled: bool = False, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`; in fp16, of the loss times the loss scale.

        Args:
            loss: what to differentiate; where it is not one number, `gradient=` is its gradient.
            last: whether `step()` comes next; it decides when gradients are exchanged, so with one process it changes
                nothing. None: as many backwards a step as `accumulate` declares, or as the step before had; a wrong
                guess costs traffic, never a wrong sum.
            is_scaled: the loss, or the `gradient=` of it, was multiplied by the loss scale already, as what a later
                pipeline stage sends back was: it is not multiplied again.
            kwargs: of `torch.Tensor.backward`.

        Raises:
            StateError: `loss` is no tensor, or `last=False` with an optimizer that updates inside backward.
        """
        self.runtime.require_open()
        if not isinstance(loss, torch.Tensor):
            raise StateError(f"manager.backward() takes the loss as a tensor, not a {type(loss).__name__}")
        if last is False:
            self.runtime.require_several_backwards("manager.backward(loss, last=False)")
        self.runtime.sharding.units.backwards.declare_last(last)
        if self.runtime.scaler is not None and not is_scaled:
            loss = loss.float() * self.runtime.scaler.loss_scale
        with self.runtime.backward():
            loss.backward(**kwargs)

    def mark_scaled(self) -> None:
        """Say that the gradients up to the next `step()` or `zero_grad()` come multiplied by `loss_scale`.

        For backwards that do not pass through `backward`, as those of `torch.distributed.pipelining`; only fp16 asks.
        """
        self.runtime.require_open()
        self.runtime.note_scaled()

    def accumulate(self, num_backwards: int) -> None:
        """Declare how many backwards there are before each `step()`, from now on.

        Over ranks, gradients are then reduced in the last of them; with one process it changes nothing. See `backward`.

        Raises:
            StateError: it is no number of at least 1, or above 1 with an optimizer that updates inside backward.
        """
        self.runtime.require_open()
        if not isinstance(num_backwards, int) or isinstance(num_backwards, bool) or num_backwards < 1:
            raise StateError(f"manager.accumulate() takes a number of backwards of at least 1, not {num_backwards!r}")
        if num_backwards > 1:
            self.runtime.require_several_backwards(f"manager.accumulate({num_backwards})")
        self.runtime.sharding.units.backwards.declare(num_backwards)

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        in_backward: bool | None = None,
    ) -> RuleOptimizer:
        """Return an optimizer over chunks with the parameter groups, options and states of another one.

        For scripts whose model makes its optimizer: `manager.optimizer(model.configure_optimizers(...))`. Both have the
        same groups and hooks, so learning rate schedules of the one drive the other.

        Args:
            optimizer: of torch.optim, or of any class that `chunkmem.Optimizer` takes; it is not stepped any more.
            max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
            in_backward: see `chunkmem.AdamW`; default: the configuration's `optimizer.params.in_backward`.

        Raises:
            ConfigError: its class needs all parameters at once, as LBFGS does.
            StateError: a parameter is in no model of the manager, or the optimizer's `step` was replaced.
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        return converted(optimizer, manager=self, max_grad_norm=max_grad_norm, in_backward=in_backward)

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss by: 1 but in fp16."""
        return 1.0 if self.runtime.scaler is None else self.runtime.scaler.loss_scale

    @property
    def num_skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient had overflowed; only fp16 has them."""
        return 0 if self.runtime.scaler is None else self.runtime.scaler.num_skipped

    @contextlib.contextmanager
    def gather(self, params: Any = None, *, grads: bool = False) -> Iterator[None]:
        """Make parameters ordinary tensors on the compute device inside the block, to be read and written.

        Writes are kept; over several ranks, which all call it, those of the parameter's owner are, so write the same on
        all.

        Args:
            params: a Parameter, a Module, or several; None: all of the manager's.
            grads: their gradients are ordinary tensors in `.grad` meanwhile, over several ranks their means.

        Raises:
            CapacityError: they do not fit DEVICE together.
        """
        self.runtime.require_open()
        self.runtime.modules.require_values()
        wanted = (
            self.runtime.registry.parameters
            if params is None
            else map(self.runtime.registry.lookup, parameters_in(params))
        )
        managed = dict.fromkeys(m for m in wanted if m is not None)
        self.runtime.registry.check()
        self.runtime.entry_points.gathers_open += 1
        try:
            with (
                self.runtime.together("manager.gather()"),
                gathered(
                    managed,
                    grads=grads,
                    pager=self.runtime.memory.pager,
                    access=self.runtime.modules.access,
                    gradients=self.runtime.gradients,
                    sync_masters=self.runtime.updater.sync_masters,
                    reduction=self.runtime.sharding.reduction,
                ),
            ):
                yield
        finally:
            self.runtime.entry_points.gathers_open -= 1

    def offload(self) -> None:
        """Give DEVICE back: weights, gradients and states go to HOST, or on to DISK, and freed memory to the device.

        For an inference engine or another process, between two steps. What is called next brings back what it needs,
        a step as its plan has it; `onload` does so before. Buffers and excluded modules stay where they are. Over
        ranks, all call it. Where DEVICE and HOST are one piece of RAM, it does nothing.

        Raises:
            CapacityError: HOST and DISK have no room for what only DEVICE has.
            StateError: somebody keeps the memory of weights, as the graph of a loss does before its backward; or it is
                called inside a model, a backward or `gather`.
        """
        offload(self.runtime)

    def onload(self) -> None:
        """Bring back what the next training step begins with, if there is a plan for it. Over ranks, all call it.

        Raises:
            StateError: it is called inside a model, a backward or `gather`.
        """
        onload(self.runtime)

    def join(self) -> contextlib.AbstractContextManager[None]:
        """Surround evaluation or generation that takes more calls of models on some ranks than on others.

        As torch's `Join` has it for training: at the end of the block, a rank that is done takes part in what the
        others gather until all have come there. All ranks enter it, and call models under `torch.no_grad()` alone.
        A rank that raises an error does so when the others have come. With one process, and inside of another `join`,
        it does nothing.

        Raises:
            StateError: a model is called with gradients inside, or there is a backward or a step.
            RankError: a rank is missing, or does something else that all ranks do together.
        """
        return self.runtime.entry_points.join()

    def freeze(self, modules: Any, *, prefix: int | None = None, keep_states: bool = False) -> FreezeReport:
        """Train some parameters no longer, and give back at once what training them takes: see docs/freezing.md.

        It sets `requires_grad` to False; the next step is recorded, and those after it follow a plan.
        Over ranks, all call it.

        Args:
            modules: a module, a parameter, or several.
            prefix: only the first so many of `modules`.
            keep_states: optimizer states and master weights stay, for training to be taken up where it was. Else they
                are gone: `unfreeze` begins with states of zero and, in mixed precision, with rounded weights.

        Raises:
            StateError: a step is under way, or gradients wait for theirs.
            ConfigError: `prefix` is no number of modules, or other ranks freeze something else.
        """
        return freeze(
            self.runtime,
            modules,
            prefix=prefix,
            keep_states=keep_states,
            adopt=self._adopt,
            not_packed="chunks of a manager.pipeline() are not packed again" if any(self._pipelines) else "",
        )

    def unfreeze(self, modules: Any) -> FreezeReport:
        """Train some parameters again; see `freeze`.

        Raises:
            CapacityError: there is no room for what training takes; they stay frozen.
            StateError, ConfigError: as `freeze`.
        """
        return unfreeze(self.runtime, modules)

    def state_dict(
        self, model: nn.Module | None = None, *, rank0_only: bool = False, lazy: bool = False
    ) -> dict[str, Any]:
        """Return the keys, order, shapes and dtypes of `model.state_dict()`: CPU copies, never views.

        Over ranks, all have to call it.

        Args:
            model: may be left out if the manager has one.
            rank0_only: the first rank gets it, and the others an empty dict.
            lazy: in place of copies there are tensors that are read when they are used, by `torch.save` one after the
                other: values are those of that moment. In one process; `save` is for several.

        Raises:
            StateError: `lazy` over several ranks.
        """
        self.runtime.require_open()
        self.runtime.registry.check()
        self.runtime.modules.require_values()
        if lazy:
            self.runtime.ranks.require_one("manager.state_dict(lazy=True)")
        with self.runtime.together("manager.state_dict()"):
            self.runtime.entry_points.ordinary.follow()
            state = self.runtime.modules.overrides.state_dict(self.runtime.root(model), lazily=lazy)
            if self.runtime.ranks.stages is not None:
                tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
                own = {key: value for key, value in tensors if not value.is_meta}
                parts = named_parts(self.runtime.root(model))
                state |= over_stages(own, parts, self.runtime.ranks, label="sending the weights of a stage")
        return {} if rank0_only and not self.runtime.ranks.is_first else state

    def stream_weights(self, model: nn.Module | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and CPU copies of the weights of now, one tensor in memory at a time: for inference engines.

        They are those that `save_pretrained` writes: persistent buffers are among them, and tied weights come once,
        by the name that transformers and vLLM load. Over ranks all call it, iterate together, and get all of them.

        Args:
            model: may be left out if the manager has one.

        Raises:
            StateError: when the next one is asked for, if a step or a load has changed weights since the call.
        """
        self.runtime.require_open()
        self.runtime.registry.check()
        self.runtime.modules.require_values()
        return weight_stream(self.runtime, self.runtime.root(model), "manager.stream_weights()")[1]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], model: nn.Module | None = None, strict: bool = True
    ) -> _IncompatibleKeys:
        """Load values by name; see `torch.nn.Module.load_state_dict`.

        Raises:
            CheckpointError: keys are missing or unexpected (`strict`), or shapes differ. All are named, and nothing
                has been changed.
            StateError: an asynchronous pipeline has batches under way; likewise.
        """
        self.runtime.require_open()
        self.runtime.entry_points.require_drained("manager.load_state_dict()")
        self.runtime.registry.check()
        return self.runtime.load_state_dict(state_dict, self.runtime.root(model), strict=strict)

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: RuleOptimizer | None = None,
        *,
        ema: EMA | None = None,
        model: nn.Module | None = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write a checkpoint: a directory in the format of torch.distributed.checkpoint, complete or not there.

        Every rank writes the chunks it owns, one parameter in memory at a time. A checkpoint that is there is replaced
        when the new one is complete; other files in the directory stay. It is a dict with "model", "optimizer" (states
        by the names of parameters), "ema" and "extra", which plain PyTorch can load, too.

        Args:
            path: of the directory; over ranks, one that all of them see.
            optimizer: whose states are saved; None: none are.
            ema, model: averages that are saved, if any; the model may be left out if the manager has one.
            extra: anything else, such as `{"step": 100, "scheduler": scheduler.state_dict()}`. A rank that passes
                something else than the first one gets back its own from as many ranks.
            asynchronous: return at once, and have a thread write what is there now, while training continues: who
                changes a chunk waits until its values are copied. The next `save`, `close` and the end of Python wait
                for it, and raise its error if nobody has asked for that.

        Returns:
            What tells when the checkpoint is complete: `wait()` and `done()`.

        Raises:
            CheckpointError: it cannot be written, or `path` is something else; what was there before is there still.
        """
        self.runtime.require_open()
        self.runtime.registry.check()
        self.runtime.modules.require_values()
        with self.runtime.ranks.telling():
            where = checkpoint_path(path)
        state = partial(state_to_save, self.runtime, optimizer, ema=ema, model=model, extra=extra)
        return self._saver.save(self.runtime, where, state, asynchronous=asynchronous)

    def load(
        self,
        path: str | os.PathLike[str],
        optimizer: RuleOptimizer | None = None,
        *,
        ema: EMA | None = None,
        model: nn.Module | None = None,
        strict: bool = True,
        trust: bool = False,
    ) -> dict[str, Any]:
        """Load a checkpoint that `save` or torch.distributed.checkpoint has written; return its `extra`.

        The number of ranks and stages, caps, tiles and precision may be others, but for modules in
        `exclude(reduce=False)`, of which each rank has its own. Files are looked over before anything
        is changed. Nothing that they name is run: what is neither a tensor nor a plain container needs `trust`.

        Args:
            path: of the directory.
            optimizer: whose states are loaded; None: none are.
            ema: averages that are loaded; None: none are.
            model: may be left out if the manager has one.
            strict: names of weights have to be the same.
            trust: classes and functions that the files name may be imported and called, as pickles do.

        Raises:
            CheckpointError: it is damaged, does not fit, or needs `trust`. Nothing has been changed.
            StateError: an asynchronous pipeline has batches under way; likewise.
        """
        self.runtime.require_open()
        self.runtime.entry_points.require_drained("manager.load()")
        self.runtime.registry.check()
        return load_checkpoint(
            self.runtime,
            path,
            optimizer,
            ema=ema,
            model=model,
            strict=strict,
            trust=trust,
            before_reading=self._saver.before_load,
        )

    def save_pretrained(
        self, path: str | os.PathLike[str], model: nn.Module | None = None, *, max_shard_size: str | int = "5GiB"
    ) -> None:
        """Write the weights as safetensors files, and a transformers model's configuration: for `from_pretrained`.

        Over ranks all call it, and the first one writes, one parameter in memory at a time. Other files in the
        directory stay, such as those of a tokenizer.

        Args:
            path: of the directory.
            model: may be left out if the manager has one.
            max_shard_size: of a file, in bytes or such as "500MiB".

        Raises:
            CheckpointError: it cannot be written, or a dtype has no place in such files.
            ConfigError: `max_shard_size` is no size.
        """
        self.runtime.require_open()
        self.runtime.registry.check()
        self.runtime.modules.require_values()
        with self.runtime.ranks.telling():
            where = checkpoint_path(path)
        save_pretrained(self.runtime, where, model, max_shard_nbytes=parse_nbytes(max_shard_size))

    def unwrap(self, model: nn.Module | None = None) -> nn.Module:
        """Make models ordinary PyTorch again, in place, and close the manager; return the one that was asked for.

        It is the same object, with the same Parameters: on HOST, in the dtypes that they were built in, with the
        weights of now; over ranks, which all call it, with all weights on each. Take `optimizer.state_dict()` before,
        to load it into an optimizer of torch's. All models of the manager become ordinary. HOST needs room for the
        weights in addition to what it has.

        Args:
            model: may be left out if the manager has one.

        Raises:
            StateError: gradients wait for their step, somebody keeps memory of parameters, or there are pipeline
                stages. Nothing has been changed.
        """
        self.runtime.require_open()
        root = self.runtime.root(model)
        error = self._saver.finish()
        if error is not None:
            raise error
        unwrap(self.runtime)
        self.close()
        return root

    def close(self) -> None:
        """Free every slab. The models cannot be used afterwards: take `state_dict()` before, or `unwrap` them.

        Raises:
            CheckpointError: a checkpoint that was still being written is not complete, and nobody has asked.
        """
        error = self._saver.finish()
        if self.runtime.stop("its manager is closed; take manager.state_dict() before manager.close()"):
            self.runtime.modules.unfit_ordinary(self.runtime.hooks)
            self.runtime.free()
            give_back_freed_ram()
        self.runtime.end_groups()
        if self.runtime.memory.pager.interrupts is not None:
            self.runtime.memory.pager.interrupts.close()
        if error is not None:
            raise error
