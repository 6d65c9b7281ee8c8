"""What is drawn: a model, a loop over it, and how chunkmem is configured; plain data, so that a failing case reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.helpers.hearing import WAYS

LAYERS = (
    "linear",
    "mlp",
    "norm",
    "batch_norm",
    "conv",
    "embedding",
    "tied",
    "shared",
    "dropout",
    "parameter",
    "frozen",
    "late",
    "in_place",
    "tiled",
    "host",
    "host_embedding",
    "excluded",
)
UNHEARD = ("sequential", "residual", "skip", "twice")
BLOCKS = (*UNHEARD, "checkpoint", "own_checkpoint")
ONE_BY_ONE = (
    "step",
    "evaluate",
    "freeze",
    "give_back",
    "unfreeze",
    "zero_grad",
    "drop_forward",
    "raise_in_forward",
    "save_load",
    "restart",
    "state_dict",
    "optimizer_state",
    "gather",
    "write",
    "learning_rate",
    "add_group",
    "weight_term",
)
SEVERAL = ("accumulate", "clip", "drop_batch", "read_grads", "edit_grads")
"""What needs gradients to be there between backward and step: not where updates are inside backward."""
OPTIMIZERS = ("AdamW", "SGD", "NAdam", "Lion", "Adagrad", "8-bit")


@dataclass(frozen=True)
class Layer:
    """A module by its kind; blocks have others inside."""

    kind: str
    kids: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Op:
    """What a loop does next; `pick` chooses parameters, modules and variants."""

    kind: str
    pick: int = 0


@dataclass(frozen=True)
class Setting:
    """A configuration."""

    chunk_numel: int = 5000
    room: float | None = None
    """The cap on DEVICE as a multiple of the smallest one; None: room for everything."""
    host_share: float | None = None
    """HOST is this share of what the model takes, and there is a disk; None: ample, and none."""
    late: int | None = None
    """The seed of lanes that hold copies back; None: the manager's own lanes."""
    policy: str | None = None
    overlap: bool | None = None
    asynchronous: bool = True
    margin: float = 0.8
    bare: bool = False
    """Backward starts by `loss.backward()` and not by `manager.backward(loss)`."""
    ways: tuple[str, ...] = ()
    """In which steps are heard of, one after the other and over again; none: as the manager chooses."""


@dataclass(frozen=True)
class Case:
    """A training; `settings[1]` is what it continues with after a restart."""

    layers: tuple[Layer, ...]
    ops: tuple[Op, ...]
    settings: tuple[Setting, Setting]
    optimizer: str = "AdamW"
    in_backward: bool = False
    precision: str = "fp32"
    warm: int = 0
    """Ordinary steps that come first; a plan is made after the first one."""

    @property
    def own_bits(self) -> bool:
        """Its numbers are not those of plain PyTorch: small caps are compared with room for all."""
        return self.precision != "fp32" or self.optimizer == "8-bit"


def layers(*, in_turn: bool = False) -> st.SearchStrategy[Layer]:
    """A layer, or a block of a few; `in_turn`: mostly a block, and of those only some that others hear inside of."""
    leaf = st.builds(Layer, st.sampled_from(LAYERS))
    inner = st.lists(leaf, min_size=1, max_size=3 if in_turn else 2).map(tuple)
    block = st.builds(Layer, st.sampled_from(BLOCKS + in_turn * 2 * UNHEARD), inner)
    return st.one_of(leaf, block if in_turn else leaf, block)


def settings() -> st.SearchStrategy[Setting]:
    """A configuration in which steps are heard of as the manager chooses."""
    return st.builds(
        Setting,
        chunk_numel=st.sampled_from((5000, 600, 300, 256)),
        room=st.sampled_from((None, 1.0, 1.25, 2.0)),
        host_share=st.sampled_from((None, None, 0.75, 0.5)),
        late=st.none() | st.integers(1, 5),
        policy=st.sampled_from((None, "keep", "offload", "recompute", "auto")),
        overlap=st.sampled_from((None, True, False)),
        asynchronous=st.sampled_from((True, True, False)),
        margin=st.sampled_from((0.8, 0.0)),
        bare=st.booleans(),
    )


def settings_in_turn() -> st.SearchStrategy[Setting]:
    """A configuration in which hooks come and go: where regions do not need them, and mostly with room."""
    return st.builds(
        replace,
        settings(),
        ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=6).map(tuple),
        room=st.sampled_from((None, 1.0, 2.0, 6.0)),
        host_share=st.sampled_from((None, None, None, 0.5)),
        policy=st.sampled_from((None, None, None, "recompute")),
        margin=st.sampled_from((0.8, 0.8, 0.8, 0.0)),
    )


@st.composite
def cases(draw: st.DrawFn, *, in_turn: bool = False) -> Case:
    """Any training that the documents do not refuse; `in_turn`: its hooks come and go."""
    in_backward = not in_turn and draw(st.sampled_from((False, False, False, True)))
    kinds = ONE_BY_ONE if in_backward else ONE_BY_ONE + SEVERAL
    op = st.builds(Op, st.sampled_from(kinds + in_turn * len(kinds) * ("step",)), st.integers(0, 7))
    setting = settings_in_turn() if in_turn else settings()
    return Case(
        layers=tuple(draw(st.lists(layers(in_turn=in_turn), min_size=1, max_size=5))),
        ops=tuple(draw(st.lists(op, min_size=1, max_size=16 if in_turn else 8))),
        settings=(draw(setting), draw(setting)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        in_backward=in_backward,
        precision=draw(st.sampled_from(("fp32", "fp32", "bf16"))),
        warm=draw(st.integers(0, 2)),
    )
