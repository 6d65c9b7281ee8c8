"""`chunkmem estimate`: before anything is built, does it fit, and how fast will a step be."""

from __future__ import annotations

import argparse
import gc
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, counted
from chunkmem.cli.machine import (
    add_caps_below,
    add_count,
    add_size,
    add_speed,
    add_training_arguments,
    caps_below,
    parse_speed,
)
from chunkmem.cli.stages import pipeline_answer, refuse_with
from chunkmem.data.errors import CapacityError, ConfigError, LayoutError
from chunkmem.data.types import ACTIVATION_POLICIES, Tier
from chunkmem.estimate.hardware import HARDWARE, Hardware
from chunkmem.estimate.mesh import RankMesh
from chunkmem.runtime.quiet import silenced

if TYPE_CHECKING:
    from chunkmem.estimate.question import Question
    from chunkmem.estimate.rehearse import Rehearsal

NAME = "estimate"
SUMMARY = "before anything is built: does it fit, and how fast will a step be"
DESCRIPTION = """\
Run one training step of a model without memory and without a GPU, plan it, and say whether it fits, which limit binds,
the smallest change that makes it fit, and how long a step will take.

  chunkmem estimate gpt:7b --device 24GiB --host 128GiB --precision bf16 --batch 4
  chunkmem estimate path/to/config.json --hardware h200 --checkpointing
  chunkmem estimate mypackage.train:make --device 8GiB --activations auto --optimizer muon
  chunkmem estimate gpt:70b --precision bf16 --checkpointing --device 72GiB --host 128GiB --disk 1TiB --disk-speed 6GB/s
  chunkmem estimate gpt:70b --precision bf16 --checkpointing --world 128 --nnodes 16 --nics 4 --nic-speed 100Gb/s
  chunkmem estimate gpt:7b --stages 4 --micro-batches 16 --batch 32 --precision bf16
  chunkmem estimate gpt --largest --device 24GiB --host 120GiB --precision bf16 --checkpointing

MODEL is a GPT (gpt:7b, gpt:9.4b, or width x layers: gpt:4096x45), a config.json of transformers, or module:function: a
function that returns (model, step), where step(model) is the loss or step is what the model is called with to return
it. It is given those of `batch`, `seq` and `layers` that it takes. Caps are those of one rank. Speeds come from
--hardware unless given; they are assumptions, so times are ranges: see docs/estimates.md.

With --largest, MODEL is gpt, whose width and layers are searched, or a config.json or module:function, whose layers
are.

With --mesh, --batch is that of each of the replicate x shard ranks, and tp divides it and MODEL over ranks, with
sequence parallelism. With --mesh auto, it is that of all --world ranks, or of --nnodes machines (default: one each).

With --stages, MODEL is cut into stages of a pipeline over N devices, and the schedule with the shortest step is
chosen."""

_DEVICE_SHARE = 0.8
"""`overall_gpu_mem_ratio`, where no cap is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="gpt:7b, gpt:9.4b, gpt:4096x45, a config.json, or module:function")
    add("--largest", action="store_true", help="find the largest MODEL that fits; needs --host")
    add_size(parser, "--device", help="cap on DEVICE, such as 80GiB; default: 80 %% of the accelerator")
    add_training_arguments(parser, seq=2048, chunk_size="searched")
    parser.set_defaults(batch=None)
    add_caps_below(parser)
    add(
        "--disk-speed",
        metavar="SPEED",
        type=_disk_speeds,
        help="bytes a second of DISK: 6GB/s, or 6GB/s,4GB/s for reading, writing",
    )
    add("--no-master-weights", action="store_true", help="update weights in the low precision: master_weights false")
    add("--states", choices=("fp32", "8bit"), default="fp32", help="optimizer.params.states (default: fp32)")
    add("--in-backward", action="store_true", help="update inside backward: optimizer.params.in_backward")
    add("--master", choices=("fp32", "none"), default="fp32", help="optimizer.params.master (default: fp32)")
    add("--checkpointing", action="store_true", help="recompute each block in backward, by torch's checkpoint")
    add(
        "--activations",
        choices=[*ACTIVATION_POLICIES],
        help="activations.policy: what becomes of each block's activations",
    )
    add("--cpu-embedding", action="store_true", help="embeddings compute on HOST: use_cpu_embedding")
    add_count(parser, "--world", "N", default=1, help="ranks, each with its own batch (default: 1)")
    add_count(parser, "--replicas", "R", default=1, help="of the weights, each sharded over N / R of the ranks")
    add(
        "--mesh",
        metavar="MESH",
        help="instead of these and --stages: replicate=2,shard=8,tp=4,stage=4; auto: the fastest one of --world ranks",
    )
    add("--reduce-dtype", choices=("fp32", "bf16"), default="fp32", help="distributed.reduce_dtype (default: fp32)")
    add_count(parser, "--stages", "N", help="a pipeline over N devices, of as many stages or more")
    add_count(parser, "--micro-batches", "M", help="of the batch, for --stages (default: 4 for each stage)")
    add("--picture", type=Path, metavar="FILE.png", help="draw the schedules of --stages")
    add("--accumulate", action="store_true", help="manager.accumulate(1) is called: the first step needs less of HOST")
    add_count(parser, "--tile", "NUMEL", help="with_tiling_linear: split larger weights of linear layers")
    add("--hardware", choices=[*HARDWARE], default="h100", help="whose speeds to assume (default: h100)")
    add_speed(parser, "--link", help="bytes a second between HOST and DEVICE, each way, such as 25GB/s")
    add_speed(parser, "--host-memory", help="bytes a second of HOST's memory, such as 100GB/s")
    add_count(parser, "--nnodes", "N", help="machines that the ranks are on (default: of 8; gh200: 4, gb200: 72)")
    add_count(parser, "--nics", "K", help="network cards of a machine (default: those usual for --hardware)")
    add_speed(parser, "--nic-speed", help="of a network card, such as 400Gb/s (default: that usual for --hardware)")
    add_speed(parser, "--network", help="instead: busbw of nccl-tests, in bytes a second, such as 50GB/s")
    add("--tflops", type=_positive, metavar="X", help="10^12 operations a second that large matrix products reach")


def run(options: argparse.Namespace) -> CommandResult:
    """Answer whether it fits.

    Raises:
        ChunkmemError: the model cannot be built, or its step depends on values.
    """
    mesh, is_auto = _mesh(options), options.mesh == "auto"
    has_stages = options.stages or mesh.stage > 1
    if has_stages:
        refuse_with("--stages", {"--largest": options.largest, "--world": options.world > 1} | caps_below(options))
    elif options.micro_batches or options.picture:
        name = "--micro-batches" if options.micro_batches else "--picture"
        raise ConfigError(f"{name} is about a pipeline; give --stages, too")
    options.batch = options.batch or (mesh.num_ranks if is_auto else 1)
    # What has been imported stays: looking through all of it again and again takes a sixth of a rehearsal.
    gc.freeze()
    with silenced("torch._subclasses.fake_tensor"):
        question = _question(options, mesh)
        if has_stages:
            return _pipeline(question, options)
        if is_auto:
            return _fastest(question)
        return _largest(question, options) if options.largest else _answer(question)


def _mesh(options: argparse.Namespace) -> RankMesh:
    """Return the mesh that is given, or what `--world`, `--replicas` and `--stages` stand for; of "auto", all ranks."""
    world, replicas = options.world, options.replicas
    if options.mesh == "auto":
        names = ("largest", "stages", "micro_batches", "picture", "tile", "in_backward")
        given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        refuse_with("--mesh auto", {"--replicas": replicas > 1} | given | caps_below(options))
        if world == 1 and options.nnodes:
            world = options.nnodes * HARDWARE[options.hardware].ranks_a_machine
        if world == 1:
            raise ConfigError("--mesh auto chooses for a cluster; give --world, its ranks, or --nnodes, its machines")
        return RankMesh(shard=world)
    if options.mesh is None:
        if world % replicas or world == replicas > 1:
            raise ConfigError(
                f"{counted(world, 'rank')} (--world) and {counted(replicas, 'replica')} (--replicas): each replica is "
                f"sharded over equally many, two or more; give a multiple, such as {2 * replicas} ranks"
            )
        return RankMesh(replicas, world // replicas, stage=options.stages or 1)
    given = {"--world": world > 1, "--replicas": replicas > 1, "--stages": options.stages}
    refuse_with("--mesh", given)
    return RankMesh.parse(options.mesh)


def _fastest(question: Question) -> CommandResult:
    from tqdm import tqdm

    from chunkmem.cli.mesh_answer import mesh_answer
    from chunkmem.estimate.meshes import fastest_meshes

    with tqdm(desc="meshes", disable=None, leave=False) as bar:

        def note(mesh: RankMesh) -> None:
            bar.set_postfix_str(str(mesh))
            bar.update()

        return mesh_answer(question, fastest_meshes(question, note=note))


def _answer(question: Question) -> CommandResult:
    from tqdm import tqdm

    from chunkmem.cli.estimate_answer import no, without_plan, yes
    from chunkmem.estimate.changes import smallest_changes
    from chunkmem.estimate.forked import in_fork
    from chunkmem.estimate.question import device_need, find, find_chosen, made_once, rehearsed, trains_on_demand

    other = replace(question, checkpointing=not question.checkpointing, activations=None)
    with tqdm(desc="rehearsing", unit=" steps", disable=None, leave=False) as bar:
        other_nbytes = in_fork(lambda: _activation_nbytes(other))

        def counted(asked: Question) -> Rehearsal:
            bar.update()
            return rehearsed(asked)

        question = replace(question, rehearse=made_once(counted))
        try:
            finding = find(question)
        except CapacityError as error:
            if error.tier is not Tier.DEVICE and trains_on_demand(question):
                return without_plan(question, other_nbytes(), error)
            changes = smallest_changes(question)
            return no(question, other_nbytes(), error, changes)
        return yes(find_chosen(finding), other_nbytes(), device_need(question))


def _question(options: argparse.Namespace, mesh: RankMesh) -> Question:
    from chunkmem.estimate.models import resolve_model
    from chunkmem.estimate.optimizers import BUILT_IN, class_named
    from chunkmem.estimate.question import Question

    if options.optimizer not in BUILT_IN:
        class_named(options.optimizer)
        if options.states != "fp32" or options.master != "fp32":
            raise ConfigError(
                f"--states and --master are about chunkmem's AdamW and Adam, and --optimizer is {options.optimizer}; "
                "leave them out"
            )
    if options.in_backward and (mesh.world > 1 or options.precision == "fp16"):
        raise ConfigError(
            "--in-backward is estimated for one process, in fp32 or bf16 (in fp16 a step may be skipped); leave it out"
        )
    if options.tile and mesh.tp > 1:
        raise ConfigError("--tile splits whole weights, and tp of --mesh leaves parts of them; leave one of them out")
    if options.activations and options.checkpointing:
        raise ConfigError("--checkpointing and --activations are two ways to recompute blocks; leave one of them out")
    hardware = _hardware(options, mesh.num_ranks)
    for option, nbytes in caps_below(options).items():
        if nbytes and options.host is None:
            raise ConfigError(f"{option} is below HOST, and takes what that has no room for; give --host, too")
    if not options.largest:
        resolve_model(options.model, batch=1, seq=options.seq)  # what is wrong is said before anything takes time
    same = {field.name: getattr(options, field.name) for field in fields(Question) if hasattr(options, field.name)}
    given: dict[str, Any] = {
        "model": lambda batch: resolve_model(options.model, batch=batch, seq=options.seq),
        "mesh": mesh,
        "hardware": hardware,
        "device_nbytes": options.device or int(_DEVICE_SHARE * hardware.device_nbytes),
        "host_nbytes": options.host,
        "master": "weights" if options.no_master_weights and options.master == "fp32" else options.master,
        "is_accumulating": options.accumulate,
        "chunk_numel": options.chunk_size,
        "tile_numel": options.tile,
    }
    return Question(**same | given)


def _hardware(options: argparse.Namespace, num_ranks: int) -> Hardware:
    """Return the hardware that was named, with what is said of it instead."""
    hardware = HARDWARE[options.hardware]
    given = {"host_memory_Bps": options.host_memory, "nics": options.nics, "nic_Bps": options.nic_speed}
    said: dict[str, Any] = {name: value for name, value in given.items() if value}
    if options.nnodes:
        if options.network:
            raise ConfigError("--network is the speed of all ranks, over however many --nnodes; leave one of them out")
        given_by = "--mesh" if options.mesh else "--world or --stages"
        said["ranks_a_machine"], rest = divmod(num_ranks, options.nnodes)
        if rest:
            raise ConfigError(
                f"{counted(num_ranks, 'rank')} ({given_by}) on {counted(options.nnodes, 'machine')} "
                f"(--nnodes): each has equally many; give a multiple, such as {num_ranks - rest + options.nnodes} ranks"
            )
    elif options.nics or options.nic_speed:
        raise ConfigError("--nics and --nic-speed are about the network between machines; give --nnodes, too")
    if options.network:
        said |= {"peer_Bps": options.network, "ranks_a_machine": num_ranks}
    if options.link:
        said |= {"link_Bps": options.link, "duplex_Bps": options.link * hardware.duplex_Bps / hardware.link_Bps}
    if options.tflops:
        said["flop_per_s"] = said["fp32_flop_per_s"] = 1e12 * options.tflops
    if options.disk_speed:
        if not options.disk_nbytes:
            raise ConfigError("--disk-speed is about DISK; give --disk, too")
        said["disk_read_Bps"], said["disk_write_Bps"] = options.disk_speed
    return replace(hardware, **said)


def _disk_speeds(text: str) -> tuple[float, float]:
    read, *write = text.split(",")
    if len(write) > 1:
        raise ConfigError(f"--disk-speed is {text!r}; give one speed, or two: 6GB/s,4GB/s")
    read_Bps = parse_speed("--disk-speed", read)
    return read_Bps, parse_speed("--disk-speed", write[0]) if write else read_Bps


def _largest(question: Question, options: argparse.Namespace) -> CommandResult:
    from tqdm import tqdm

    from chunkmem.cli.estimate_answer import answer
    from chunkmem.estimate.families import Family
    from chunkmem.estimate.largest import Fitting, TooLarge, largest

    family = Family(options.model, options.seq)
    if options.host is None:
        raise ConfigError("--largest needs --host: if HOST may take as much as it likes, no model is the largest")
    with tqdm(desc="largest", unit=" tries", disable=None, leave=False) as bar:

        def note(tried: Fitting | TooLarge) -> None:
            bar.set_postfix_str(f"{tried.layers} layers {'fit' if isinstance(tried, Fitting) else 'do not fit'}")
            bar.update()

        return answer(largest(family, question, note=note))


def _pipeline(question: Question, options: argparse.Namespace) -> CommandResult:
    return pipeline_answer(
        question.rehearsed_as(replace(question, mesh=RankMesh(tp=question.mesh.tp))),
        has_mesh=options.mesh is not None,
        num_micro_batches=options.micro_batches,
        picture=options.picture,
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _activation_nbytes(question: Question) -> int | None:
    """Return what activations take at most; None for a model without blocks that could be recomputed."""
    try:
        return question.rehearsal.activation_nbytes
    except LayoutError:
        return None
