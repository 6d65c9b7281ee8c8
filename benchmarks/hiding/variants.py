"""What is measured: one GPT, trained by chunkmem over a throttled link under several caps, each in its own process."""

from __future__ import annotations

import hashlib
import signal
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection

import torch

import chunkmem
from benchmarks.overhead.variants import ADAMW, GPT, NUM_BATCHES, Failure, Shape, num_params
from chunkmem.data.errors import CapacityError
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.plan.simulate import simulate
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event, Piece
from chunkmem.testing import ThrottledLanes

FULL = Shape(num_layers=4, width=512, num_heads=8, num_sequences=4, num_tokens=256)
QUICK = Shape(num_layers=4, width=128, num_heads=4, num_sequences=2, num_tokens=64)
SMALLEST = 0.0


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str
    title: str
    cap_share: float | None = None
    """The device cap as a share of the PARAM bytes; `SMALLEST`: the smallest that works; None: no cap, one tier."""
    blocking: bool = False
    """Copies are waited for as they are issued, as `with_async_move: false` does."""


NO_OFFLOAD = Variant("no-offload", "no offload (`device: null`)")
HALF = Variant("param-50", "50 % of PARAM bytes", 0.5)
BLOCKING = Variant("param-50-blocking", "50 % of PARAM bytes, copies block", 0.5, blocking=True)
# In fp32 model data is four times the PARAM bytes. The last cap holds it twice, so that what a planner keeps free for
# other things cannot push chunks out.
CAPS = (
    Variant("smallest", "the smallest that works", SMALLEST),
    HALF,
    Variant("param-100", "100 % of PARAM bytes", 1.0),
    Variant("data-50", "50 % of model data", 2.0),
    Variant("resident", "all resident", 8.0),
)
VARIANTS = (NO_OFFLOAD, BLOCKING, *CAPS)


@dataclass(frozen=True)
class Step:
    """One training step as it was measured; times in seconds."""

    loss: float
    forward_s: float
    backward_s: float
    update_s: float
    step_s: float
    stall_s: float
    moved_nbytes: tuple[int, int]
    """To DEVICE, to HOST."""
    prefetched: int
    fetched: int
    plan_misses: int


@dataclass(frozen=True)
class Summary:
    """What does not change from step to step."""

    cap_nbytes: int | None
    plan: str
    num_moments: int
    predicted_s: float
    """The step as the simulator sees it."""
    predicted_stall_s: float
    predicted_nbytes: tuple[int, int]
    peak_nbytes: int
    threads: int
    late: tuple[tuple[str, float], ...]
    """Where the last step stalled longest, with seconds."""
    weights: str
    """Digest of the weights."""


class _BlockingThrottled(ThrottledLanes):
    """A throttled link that the one who copies waits for."""

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        event = super().copy(lane, pieces, after=after, label=label)
        event.wait()
        return event


class Trainee:
    """A model under training over a link of `link_Bps` bytes a second each way."""

    def __init__(self, variant: Variant, shape: Shape, link_Bps: float) -> None:
        torch.manual_seed(0)
        self._batches = torch.randint(shape.vocabulary, (NUM_BATCHES, shape.num_sequences, shape.num_tokens + 1))
        self._blocking, self._shape, self._link_Bps = variant.blocking, shape, link_Bps
        param_nbytes = 4 * num_params(shape)
        self._cap_nbytes = None if variant.cap_share is None else round(variant.cap_share * param_nbytes)
        if variant.cap_share == SMALLEST:
            self._cap_nbytes = self._smallest_cap(param_nbytes // shape.num_layers)
        self._start()

    def _start(self) -> None:
        """Build the model under the present cap, from the same first weights each time."""
        torch.manual_seed(0)
        link_Bps = self._link_Bps
        lanes = _BlockingThrottled if self._blocking else ThrottledLanes

        def make_lanes(compute: ComputeDevice) -> ThrottledLanes:
            return lanes(link_Bps)

        # Explicit caps on both tiers make RAM behave like two; caps of the machine are taken from there.
        memory = {"device": self._cap_nbytes, "host": None if self._cap_nbytes is None else 1 << 40}
        config = chunkmem.Config.from_dict({"memory": memory})
        machine = Machine(0, 0, host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps))
        self.manager = chunkmem.ChunkManager(config, machine=machine, make_lanes=make_lanes)
        with self.manager.init():
            self.model = GPT(self._shape)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, **ADAMW)
        self._num_steps = 0

    def _smallest_cap(self, first_nbytes: int) -> int:
        """Follow what `CapacityError` names until two steps pass: the first on demand, the second by a plan."""
        self._cap_nbytes = first_nbytes
        works_nbytes = 0
        while not works_nbytes:
            self._start()
            try:
                self.train(2)
                works_nbytes = self._cap_nbytes
            except CapacityError as error:
                self._cap_nbytes = max(self._cap_nbytes + 1, error.needed_nbytes)
            self.manager.close()
        return works_nbytes

    def train(self, num_steps: int) -> list[Step]:
        """Train this many steps in a row. A step's time ends when the next one begins."""
        steps = []
        began_s = time.perf_counter()
        for _ in range(num_steps):
            step = self._step(began_s)
            began_s += step.step_s
            steps.append(step)
        return steps

    def _step(self, began_s: float) -> Step:
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        times_s = [began_s]
        loss = self.model(batch)
        times_s.append(time.perf_counter())
        self.manager.backward(loss)
        times_s.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        timeline = self.manager.timeline()
        assert timeline is not None
        times_s.append(time.perf_counter())
        forward_s, backward_s, update_s = (end_s - start_s for start_s, end_s in pairwise(times_s))
        return Step(
            loss=loss.item(),
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            step_s=times_s[-1] - times_s[0],
            stall_s=timeline.stall_s,
            moved_nbytes=(timeline.moved_nbytes[Lane.H2D], timeline.moved_nbytes[Lane.D2H]),
            prefetched=timeline.prefetched,
            fetched=timeline.fetched,
            plan_misses=timeline.plan_misses,
        )

    def summary(self) -> Summary:
        """Return what the plan promises, and how training ended."""
        plan, trace, timeline = self.manager.plan, self.manager.trace, self.manager.timeline()
        assert plan is not None
        assert trace is not None
        assert timeline is not None
        predicted = simulate(plan, trace)
        stalls: dict[str, float] = {}
        for span in timeline.spans:
            if span.is_stall:
                where = f"{trace.moments[span.moment]} {span.label}"
                stalls[where] = stalls.get(where, 0.0) + span.end_s - span.start_s
        return Summary(
            cap_nbytes=self._cap_nbytes,
            plan=plan.name,
            num_moments=len(trace.moments),
            predicted_s=predicted.step_s,
            predicted_stall_s=predicted.stall_s,
            predicted_nbytes=(predicted.moved_nbytes[Lane.H2D], predicted.moved_nbytes[Lane.D2H]),
            peak_nbytes=self.manager.memory().device.peak_nbytes,
            threads=torch.get_num_threads(),
            late=tuple(sorted(stalls.items(), key=lambda item: -item[1])[:10]),
            weights=self._digest(),
        )

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in self.manager.state_dict(self.model).items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def serve(connection: Connection, variant: Variant, shape: Shape, link_Bps: float) -> None:
    """Train `variant` in this process: call the method of `Trainee` that each message names, until the far end is gone.

    The first message, unasked, says that it is ready. A `Failure` in place of any answer is the last message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets Ctrl-C too, and ends every process.
    try:
        trainee = Trainee(variant, shape, link_Bps)
        connection.send(None)
        while True:
            name, *arguments = connection.recv()
            connection.send(getattr(trainee, name)(*arguments))
    except EOFError:
        return
    except Exception:
        connection.send(Failure(traceback.format_exc()))


def link_for(steps: Sequence[Step], *, param_nbytes: int, load: float) -> float:
    """Return the bytes a second of a link that perfect overlap would keep busy for `load` of the time it has.

    With all updates on HOST, every weight has to come back between the first update and the end of forward, and every
    gradient has to leave between the begin of backward and the last update: in less time no order of copies hides them.
    """
    forward_s, backward_s, update_s = (
        statistics.median(getattr(step, name) for step in steps) for name in ("forward_s", "backward_s", "update_s")
    )
    return param_nbytes / (load * (min(forward_s, backward_s) + update_s))
