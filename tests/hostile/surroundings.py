"""What is around a model: autocast, threads, data loaders, other ways to reach a parameter and to start backward."""

from __future__ import annotations

import gc
import operator
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from tests.hostile.harness import EQUAL_IF_ROOM, User, script
from tests.hostile.models import WIDTH


@script()
def autocast_around_forward(user: User) -> None:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = user.model(user.batch(seed)).square().mean()
        user.backward(loss.float())
        user.update()
        user.record(loss.item())


@script()
def autocast_with_a_weight_in_the_loss(user: User) -> None:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = user.model(user.batch(seed))
            loss = out.square().mean() + (user.model.head.weight @ user.model.stem.weight).abs().mean()
        user.backward(loss.float())
        user.update()
        user.record(loss.item())


@script()
def batches_from_a_loader(user: User) -> None:
    """With worker processes, forked from this one."""
    data = TensorDataset(user.batch(0, 12, WIDTH))
    for (x,) in DataLoader(data, batch_size=4, num_workers=1):
        loss = user.model(x).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def trained_in_a_thread(user: User) -> None:
    """Built in the main thread, trained in another."""
    _ = user.opt
    thread = threading.Thread(target=lambda: user.train(0, 1, 2))
    thread.start()
    thread.join()


@script(expect=EQUAL_IF_ROOM)
def evaluated_by_several_threads(user: User) -> None:
    """Forward passes of the same model at the same time."""
    user.train(0)

    def evaluate(seed: int) -> float:
        with torch.no_grad():
            return user.loss(seed).item()

    with ThreadPoolExecutor(3) as pool:
        user.record(list(pool.map(evaluate, range(12))))
    user.train(1)


@script(expect=EQUAL_IF_ROOM)
def watched_by_a_logging_thread(user: User) -> None:
    """A thread reads norms while the main thread trains: no values to compare, but no crash, and the same training."""
    stop, faults = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            for p in user.params:
                try:
                    p.detach().norm().item()
                except BaseException as error:
                    faults.append(type(error).__name__)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        user.train(0, 1, 2)
    finally:
        stop.set()
        thread.join()
    user.record([fault for fault in faults if fault not in ("StateError", "CapacityError")])


@script()
def reached_by_other_ways(user: User) -> None:
    """Through `_parameters`, `__dict__`, `vars`, `get_parameter`, `attrgetter`."""
    user.train(0)
    model = user.model
    ways = [
        model.head._parameters["weight"],
        model.head.__dict__["_parameters"]["weight"],
        vars(model.head)["_parameters"]["weight"],
        model.get_parameter("head.weight"),
        operator.attrgetter("head.weight")(model),
        dict(model.head.named_parameters())["weight"],
        next(iter(model.head._parameters.values())),
        next(model.head.parameters()),
    ]
    user.record([w.norm() for w in ways], [w is ways[0] for w in ways])


@script()
def backward_of_several_roots(user: User) -> None:
    for seed in range(2):
        out = user.model(user.batch(seed))
        torch.autograd.backward([out[:, 0].sum(), out[:, 1].mean()])
        user.update()


@script()
def backward_into_some_parameters(user: User) -> None:
    """`inputs=`: only the head gets gradients."""
    for seed in range(2):
        loss = user.loss(seed)
        loss.backward(inputs=list(user.model.head.parameters()))
        user.record([n for n, p in user.model.named_parameters() if p.grad is not None])
        user.update()


@script()
def backward_into_an_input(user: User) -> None:
    user.train(0)
    x = user.batch(1).requires_grad_()
    user.model(x).square().mean().backward(inputs=[x])
    user.record(x.grad, all(p.grad is None for p in user.params))
    user.train(2)


@script()
def hook_on_several_gradients(user: User) -> None:
    seen: list[float] = []

    def log(grads: tuple[Tensor | None, ...]) -> None:
        seen.append(sum(float(g.norm()) for g in grads if g is not None))

    handle = register_multi_grad_hook(list(user.model.head.parameters()), log)
    user.train(0, 1)
    handle.remove()
    user.record(seen)


@script()
def hook_on_an_activation(user: User) -> None:
    for seed in range(2):
        x = user.model.stem(user.batch(seed))
        x.retain_grad()
        loss = user.model.head(torch.tanh(x)).square().mean()
        user.backward(loss)
        user.record(x.grad)
        user.update()


@script()
def total_norm_of_torch(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        norm = get_total_norm([p.grad for p in user.params])
        torch.nn.utils.clip_grads_with_norm_(user.params, 0.1, norm)
        user.record(norm)
        user.update()


@script()
def garbage_collected_all_the_time(user: User) -> None:
    for seed in range(3):
        loss = user.loss(seed)
        gc.collect()
        user.backward(loss)
        gc.collect()
        user.update()
        gc.collect()


@script()
def loss_never_backed_up(user: User) -> None:
    """Graphs that are dropped: their parameters are free again."""
    for seed in range(6):
        loss = user.loss(seed)
        if seed % 3 == 2:
            user.backward(loss)
            user.update()
        user.record(loss.item())


@script()
def many_graphs_at_once(user: User) -> None:
    losses = [user.loss(seed) for seed in range(6)]
    user.backward(sum(losses))
    user.update()
    user.record([loss.item() for loss in losses])


@script()
def other_batch_sizes(user: User) -> None:
    for seed, size in enumerate((4, 1, 7, 2, 16)):
        loss = user.model(user.batch(seed, size, WIDTH)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def an_empty_batch(user: User) -> None:
    user.train(0)
    loss = user.model(user.batch(1, 0, WIDTH)).square().sum()
    user.backward(loss)
    user.update()
    user.record(loss.item())
    user.train(1)


@script()
def inference_mode_between_steps(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        with torch.inference_mode():
            user.record(user.model(user.batch(seed + 9)), user.model.head.weight.norm().item())


@script()
def training_under_set_grad_enabled(user: User) -> None:
    for seed in range(4):
        with torch.set_grad_enabled(seed % 2 == 0):
            loss = user.loss(seed)
        if loss.requires_grad:
            user.backward(loss)
            user.update()
        user.record(loss.item(), loss.requires_grad)


@script()
def gradients_allowed_inside_of_no_grad(user: User) -> None:
    with torch.no_grad():
        norms = [p.norm().item() for p in user.params]
        with torch.enable_grad():
            user.train(0, 1)
        user.record(norms, [p.norm().item() for p in user.params])


@script()
def default_dtype_changed(user: User) -> None:
    user.train(0)
    torch.set_default_dtype(torch.float64)
    try:
        user.record(user.model.head.weight.mean(), torch.tensor(1.0).dtype)
        user.backward(user.model(user.batch(1).float()).square().mean())
        user.update()
    finally:
        torch.set_default_dtype(torch.float32)


@script()
def deterministic_algorithms(user: User) -> None:
    """Uninitialised memory is filled: what is read before it is written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        user.train(0, 1, 2)
    finally:
        torch.use_deterministic_algorithms(False)


@script()
def random_state_untouched(user: User) -> None:
    """Dropout and noise of the user's come from the same numbers."""
    for seed in range(3):
        user.step(seed)
        user.record(torch.rand(2), torch.nn.functional.dropout(torch.ones(8), 0.5))
