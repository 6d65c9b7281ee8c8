"""Models built, wrapped, and put together, alike on all ranks or not."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.models import WIDTH, Block, ConvNet, LanguageModel, Net
from tests.hostile_ranks.harness import ALIKE, Either, Equal, Refused, User, script
from tests.hostile_ranks.models import AppliedAtTheEnd, InitializedAtTheEnd, init_weights


@script(model=InitializedAtTheEnd)
def initialized_at_the_end_of_the_constructor(user: User) -> None:
    user.train(0, 1)


@script(model=AppliedAtTheEnd)
def applied_at_the_end_of_the_constructor(user: User) -> None:
    user.train(0, 1)


@script(model=lambda: Net().apply(init_weights))
def applied_inside_of_init(user: User) -> None:
    user.train(0, 1)


class BuiltFirst(nn.Module):
    """Each weight is initialized before its module is attached."""

    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(3):
            layer = nn.Linear(WIDTH, WIDTH)
            nn.init.orthogonal_(layer.weight)
            layers.append(layer)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@script(model=BuiltFirst)
def initialized_before_it_is_attached(user: User) -> None:
    user.train(0, 1)


@script(model=AppliedAtTheEnd, release_after_init=True)
def applied_where_every_rank_holds_all(user: User) -> None:
    user.train(0, 1)


@script(
    model=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True), 2),
    expect=Either("StateError", "release_after_init"),
)
def copied_in_the_constructor(user: User) -> None:
    _ = user.opt
    for step in range(2):
        user.backward(user.model(user.batch(step, 2, 4, WIDTH)).square().mean())
        user.update()


@script(model=None, expect=ALIKE)
def built_from_other_seeds(user: User) -> None:
    """Each weight is that of one of the ranks, and the same on all."""
    user.build(Net, seed=user.rank)
    user.train(0, 1)


@script(model=None)
def wrapped_from_other_seeds(user: User) -> None:
    """Where rank 0 alone has loaded a checkpoint, the others train what it has, as by DistributedDataParallel."""
    torch.manual_seed(0 if user.manager is None else user.rank)
    user.wrap(Net())
    user.train(0, 1)


@script(model=None)
def wrapped(user: User) -> None:
    torch.manual_seed(3)
    user.wrap(Net().apply(init_weights))
    user.train(0, 1, 2)


@script(model=None, expect=Refused("ConfigError", "the layout of the chunks differs between ranks"))
def wrapped_with_another_depth(user: User) -> None:
    user.wrap(Net(depth=2 + user.rank))
    user.train(0)


@script(model=None, expect=Refused("ConfigError", "differs between ranks"))
def built_with_another_depth(user: User) -> None:
    user.build(lambda: Net(depth=2 + user.rank))
    user.train(0)


@script(model=None, expect=Refused("ConfigError", "differs between ranks"))
def built_with_another_width(user: User) -> None:
    user.build(lambda: nn.Sequential(nn.Linear(WIDTH, 8 + user.rank), nn.Linear(8 + user.rank, 4)))
    user.train(0)


@script(model=None, expect=Refused("ConfigError", "differs between ranks"))
def built_in_another_order(user: User) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        names = ("first", "second") if user.rank == 0 else ("second", "first")
        for name in names:
            model.add_module(name, Block() if name == "first" else nn.Linear(WIDTH, WIDTH))
        return model

    user.build(build)


@script(model=None, expect=Refused("ConfigError|RankError|StateError", "rank 0"))
def excluded_on_one_rank(user: User) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        if user.rank == 0:
            with user.excluding():
                model.append(nn.Linear(WIDTH, 4))
        else:
            model.append(nn.Linear(WIDTH, 4))
        return model

    user.build(build)
    user.train(0)


@script(model=None)
def excluded_on_all_ranks(user: User) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        with user.excluding():
            model.append(nn.Linear(WIDTH, 8))
        model.append(nn.Linear(8, 4))
        return model

    user.build(build)
    user.train(0, 1, 2)


@script(model=None, expect=Refused("ConfigError|RankError|StateError", "rank 0"))
def units_marked_on_one_rank(user: User) -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second")})
        if user.rank == 0:
            user.unit(model["first"])
        return model

    user.build(build)
    for step in range(2):
        x = user.batch(step)
        user.backward(user.model["second"](user.model["first"](x)).square().mean())
        user.update()


@script(model=None)
def units_marked_on_all_ranks(user: User) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({name: user.unit(nn.Linear(WIDTH, WIDTH)) for name in ("first", "second")})

    user.build(build)
    _ = user.opt
    for step in range(3):
        x = user.batch(step)
        user.backward(user.model["second"](torch.tanh(user.model["first"](x))).square().mean())
        user.update()


@script(model=LanguageModel)
def tied_weights(user: User) -> None:
    _ = user.opt
    for step in range(3):
        loss = user.model(user.tokens(step)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script(model=ConvNet, expect=ALIKE)
def running_statistics(user: User) -> None:
    """Those of rank 0 count; in plain PyTorch each rank has its own."""
    _ = user.opt
    for step in range(3):
        user.backward(user.model(user.batch(step, 4, 3, 5, 5)).square().mean())
        user.update()
    user.model.eval()
    with torch.no_grad():
        user.record(user.model(user.batch(9, 4, 3, 5, 5)))


@script(expect=Equal(tolerance=1e-5))
def clipped_on_all_ranks(user: User) -> None:
    """The last bits of a norm depend on how many ranks add it up."""
    for step in range(3):
        user.backward(user.loss(step) * 10)
        user.record(user.clip(0.5))
        user.update()


@script(expect=Equal(tolerance=1e-5), gradient_clipping=0.05)
def clipped_by_the_configuration(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step))
        if user.manager is None:
            user.clip(0.05)
        user.update()


@script(expect=ALIKE, precision="bf16")
def trained_in_bf16(user: User) -> None:
    user.train(0, 1, 2)


@script(expect=Refused("ConfigError", "differs between ranks"), model=None)
def another_configuration_on_one_rank(user: User) -> None:
    import chunkmem

    chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": (1 << 20) + user.rank}}))


@script()
def schedules(user: User) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(user.opt, T_max=4)
    for step in range(4):
        user.step(step)
        schedule.step()
        user.record(schedule.get_last_lr())


@script()
def closures(user: User) -> None:
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            user.opt.zero_grad()
            loss = user.loss(step)
            user.backward(loss)
            return loss

        user.record(user.opt.step(closure).item())
