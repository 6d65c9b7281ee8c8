"""Weights that are initialised, changed and read after their module was attached, while several ranks build a model."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import chunkmem
from chunkmem.packing.released import BuiltOverRanks
from chunkmem.packing.released_memory import Released
from tests.helpers.ranks import Team
from tests.helpers.scales import Scales
from tests.helpers.shared_training import WIDTH, WORDS, Block, Net, Task, make_config

SIZES = [2, pytest.param(3, marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 3)}
    yield found
    for team in found.values():
        team.close()


def manager_with(**keys: Any) -> chunkmem.ChunkManager:
    return chunkmem.ChunkManager(make_config(Task(config=keys)))


# Initialised as models do it: each rank has what it draws, and nothing is exchanged.


class Gpt(nn.Module):
    """As nanoGPT: everything by `apply`, and the projections again."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(WORDS, WIDTH), "h": nn.ModuleList(Projected() for _ in range(3))}
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(param, mean=0.0, std=0.02 / math.sqrt(2 * 3))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        for part in self.c_attn.weight.chunk(3):  # in place, on views
            nn.init.xavier_uniform_(part)
        self.c_attn.bias.data[WIDTH : 2 * WIDTH].zero_()
        self.c_proj.weight.data.div_(math.sqrt(2))


class Initialised(nn.Module):
    """A weight for each function of torch.nn.init."""

    def __init__(self) -> None:
        super().__init__()
        init = nn.init
        flat: list[Callable[[Tensor], Any]] = [
            *(init.uniform_, init.normal_, init.trunc_normal_, init.ones_, init.zeros_, init.eye_, init.orthogonal_),
            *(init.xavier_uniform_, init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_),
            lambda weight: init.sparse_(weight, 0.3),
            lambda weight: init.constant_(weight, 0.5),
            lambda weight: init.trunc_normal_(weight, std=0.5, a=1, b=2),  # which draws by another method
            lambda weight: init.kaiming_normal_(weight.T, mode="fan_out"),
        ]
        self.linears = nn.ModuleList(nn.Linear(WIDTH, 7, bias=False) for _ in flat)
        for linear, function in zip(self.linears, flat, strict=True):
            function(linear.weight)
        self.picture = nn.Conv2d(6, 8, 3)
        init.dirac_(self.picture.weight, groups=2)


class Padded(nn.Module):
    """Rows of embeddings, in the ways of several libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.more = nn.ModuleList([nn.Embedding(WORDS, WIDTH, padding_idx=1) for _ in range(2)])
        nn.init.normal_(self.words.weight)
        with torch.no_grad():
            self.words.weight[3].fill_(0)
        self.more[0].weight.data.normal_(mean=0.0, std=0.02)
        self.more[0].weight.data[1].zero_()
        self.more[1].weight.data[torch.tensor([0, 1])] = 0.25
        self.more[1].weight.data[2:5].uniform_(-1, 1)
        self.more[1].weight.data.mul_(0.5).clamp_(-1, 1).add_(torch.ones(WIDTH))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, num_layers=2)
        self.gru = nn.GRU(6, 4, bidirectional=True)
        for name, param in (*self.lstm.named_parameters(), *self.gru.named_parameters()):
            if "weight_hh" in name:
                nn.init.orthogonal_(param)
            elif "bias" in name:
                param.data.fill_(0)
                count = param.numel()
                param.data[count // 4 : count // 2].fill_(1)
        self.lstm.flatten_parameters()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same = nn.MultiheadAttention(WIDTH, 2)
        self.other = nn.MultiheadAttention(WIDTH, 2, kdim=6, vdim=5, add_bias_kv=True)
        for attention in (self.same, self.other):
            attention._reset_parameters()
        nn.init.xavier_uniform_(self.same.in_proj_weight[:WIDTH])


class Loaded(Net):
    """Ordinary tensors go into weights."""

    def __init__(self) -> None:
        super().__init__()
        state = {key: torch.randn(value.shape) for key, value in self.state_dict().items()}
        self.load_state_dict(state)
        with torch.no_grad():
            torch.add(torch.ones(WIDTH), 1, out=self.blocks[3].norm.bias)
            self.words.weight.copy_(torch.zeros_like(self.words.weight))
        self.blocks[1].norm.weight.data = torch.rand(WIDTH)
        self.blocks[1].down.weight.data = self.blocks[1].down.weight.data.t()


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "initialised": Initialised,
    "padded": Padded,
    "recurrent": Recurrent,
    "attention": Attention,
    "loaded": Loaded,
}

# Values that leave a weight: its holder sends them.


class Cloned(nn.Module):
    """torch copies the layer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32), 3, enable_nested_tensor=False)
        self.blocks = nn.ModuleList([Block()])
        self.blocks.extend(copy.deepcopy(self.blocks[0]) for _ in range(3))
        self.shadow = copy.deepcopy(self.blocks).requires_grad_(False)
        for param in self.encoder.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.second)
        nn.utils.parametrizations.orthogonal(self.third)


class Computed(Net):
    """Weights made of weights, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        one, other = self.blocks[0], self.blocks[1]
        with torch.no_grad():
            other.up.weight.copy_(one.up.weight)
            other.down.weight.copy_(one.up.weight.t())
            other.norm.load_state_dict(one.norm.state_dict())
            one.up.weight.div_(one.up.weight.norm() + one.down.weight.norm())
            one.down.weight.mul_(other.down.weight).sub_(one.down.weight.mean())
            self.blocks[2].up.weight[:WIDTH] = torch.linalg.qr(self.words.weight.t() @ self.words.weight)[0]
            self.blocks[2].down.weight[one.down.weight > 0] = 0
            nn.init.trunc_normal_(self.blocks[3].up.weight[:5], std=0.02)  # which looks at what it draws, in a view
            self.blocks[3].up.bias.fill_(self.blocks[3].up.weight[0, 0].item() + self.words.weight.tolist()[0][0])
        self.blocks[2].norm.weight.data = self.blocks[2].norm.weight.data * 0.5
        self.register_buffer("average", self.words.weight.detach().clone())
        self.extra = nn.Parameter(self.blocks[0].up.weight.detach() + 1)
        self.double()
        self.output = self.blocks[0](torch.ones(2, WIDTH, dtype=torch.float64)).detach()
        self.register_buffer("seen", self.output * torch.rand(1).item())


COMPUTED: dict[str, Callable[[], nn.Module]] = {"cloned": Cloned, "parametrised": Parametrised, "computed": Computed}
MODELS = WRITTEN | COMPUTED


def build(rank: int, name: str, precision: str) -> tuple[dict[str, Tensor], Tensor, int]:
    """Return the weights, the state of the random numbers afterwards, and how often weights were exchanged."""
    fetch, count = BuiltOverRanks._fetch, [0]

    def counted(built: BuiltOverRanks, released: Released, storage: torch.UntypedStorage) -> None:
        count[0] += 1
        fetch(built, released, storage)

    with pytest.MonkeyPatch.context() as patch, manager_with(precision=precision) as manager:
        patch.setattr(BuiltOverRanks, "_fetch", counted)
        torch.manual_seed(3)
        with manager.init():
            model = MODELS[name]()
        return manager.state_dict(model), torch.get_rng_state(), count[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_weights_have_the_bits_of_one_process(teams: dict[int, Team], size: int, name: str, precision: str) -> None:
    torch.manual_seed(3)
    expected = MODELS[name]().state_dict()
    drawn = torch.get_rng_state()
    for weights, drawn_too, num_fetched in teams[size].run(build, name, precision):
        assert weights.keys() == expected.keys()
        assert [key for key, value in expected.items() if not torch.equal(weights[key], value)] == []
        assert torch.equal(drawn_too, drawn)
        assert (num_fetched > 0) == (name in COMPUTED)


# What a rank holds.


class Deep(nn.Module):
    """Initialised last, by all that takes memory: weights that are drawn, changed in place, read, and converted."""

    def __init__(self, *, is_converted: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        for param in self.parameters():
            nn.init.normal_(param)
            param.data[0].zero_()
        for param in reversed(list(self.parameters())):
            param.data[0].fill_(param.data.norm())
        if is_converted:
            self.double().float()


def weigh(rank: int, is_converted: bool) -> tuple[int, int, int]:
    """Return the bytes that a rank has at the most until all is built, when all is packed, and at the most."""
    with manager_with() as manager:
        scales = Scales(manager)
        with scales.watching(), manager.init():
            model = Deep(is_converted=is_converted)
            built_peak_nbytes = scales.peak_nbytes
        assert len(list(model.parameters())) == 1 + 6 * 6
        return built_peak_nbytes, scales.chunks_nbytes(), scales.peak_nbytes


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_one_weight_more_while_they_are_initialised(teams: dict[int, Team], size: int) -> None:
    """The bound: what it holds + one weight, of all that the embedding is the largest of."""
    model = Deep(is_converted=False)
    whole_nbytes, largest_nbytes = sum(param.nbytes for param in model.parameters()), model.words.weight.nbytes
    held_nbytes = whole_nbytes / size + largest_nbytes
    for built_peak_nbytes, packed_nbytes, peak_nbytes in teams[size].run(weigh, False):
        assert built_peak_nbytes <= held_nbytes + largest_nbytes
        assert peak_nbytes <= held_nbytes + packed_nbytes + largest_nbytes


def test_a_rank_has_two_weights_more_while_they_are_converted(teams: dict[int, Team]) -> None:
    """In float64, twice the bytes: the one that is read, its copy, and the one before, which has a name until then."""
    model = Deep(is_converted=False)
    whole_nbytes, largest_nbytes = sum(param.nbytes for param in model.parameters()), model.words.weight.nbytes
    for built_peak_nbytes, _, _ in teams[2].run(weigh, True):
        assert built_peak_nbytes <= 2 * (whole_nbytes / 2 + largest_nbytes) + 2 * 2 * largest_nbytes


# Errors.


HANDED_OUT: dict[str, Callable[[nn.Parameter], object]] = {
    "numpy": lambda param: param.detach().numpy(),
    "__array__": lambda param: param.detach().__array__(),
    "data_ptr": lambda param: param.data_ptr(),
    "untyped_storage": lambda param: torch.save(param, io.BytesIO()),
}


def hand_out(rank: int) -> dict[str, str]:
    said = {}
    with manager_with() as manager, manager.init():
        model = Net()
        for name, function in HANDED_OUT.items():
            with pytest.raises(chunkmem.StateError) as caught:
                function(model.blocks[1].up.weight)
            said[name] = str(caught.value)
            del caught  # with the view in its traceback
    return said


def test_memory_that_goes_is_not_handed_out(teams: dict[int, Team]) -> None:
    first, second = teams[2].run(hand_out)
    assert first == second
    for name, words in first.items():
        assert words == (
            f"{name} of parameter blocks.1.up.weight in Net, (32, 16), hands out memory that one rank only holds since "
            "its module was attached; use a clone(), or set release_after_init to true"
        )


def read_on_one(rank: int) -> None:
    with manager_with() as manager, manager.init():
        model = Net()
        if rank == 1:
            model.words.weight.norm()


def test_a_rank_that_reads_alone_stops_all(teams: dict[int, Team]) -> None:
    first, second = teams[2].errors(read_on_one)
    assert first == second
    assert first.startswith("chunkmem.data.errors.RankError: the ranks are in different places: rank 0 in ")
    assert "rank 1 in 'comparing what is computed from weights while the model is built" in first


def fail_and_read(rank: int) -> Tensor:
    torch.manual_seed(0)
    with manager_with() as manager, manager.init():
        model = Net()
        with pytest.raises(RuntimeError, match="std"):
            model.words.weight.data.normal_(std=-1)
        model.register_buffer("read", model.words.weight.detach() * 1)
    result: Tensor = model.read
    return result


def test_an_operator_that_fails_leaves_the_values(teams: dict[int, Team]) -> None:
    torch.manual_seed(0)
    expected = Net().words.weight
    assert all(torch.equal(read, expected) for read in teams[2].run(fail_and_read))


class Unfinished(Net):
    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        seen += [*self.parameters(), self.words.weight.data[1:], self.blocks[0].up.weight.detach().t()]
        nn.init.normal_(self.blocks[0].up.weight)
        raise ZeroDivisionError


def look_at_what_is_left(rank: int) -> None:
    """Tensors without memory would end the process here."""
    seen: list[Tensor] = []
    with manager_with() as manager:
        with pytest.raises(ZeroDivisionError), manager.init():
            Unfinished(seen)
        for tensor in seen:
            assert torch.zeros_like(tensor).add(tensor).shape == tensor.shape


def test_no_tensor_is_left_without_memory_when_building_fails(teams: dict[int, Team]) -> None:
    teams[2].run(look_at_what_is_left)


class Kept(Net):
    """Something else has the memory of weights: an excluded module, a view of one that is gone."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        super().__init__()
        self.row = self.head.weight.data[0]
        self.words.weight = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.head.weight = self.words.weight
        with manager.exclude():
            self.probe = nn.Linear(WIDTH, 11, bias=False)
        self.probe.weight = self.blocks[1].up.weight


def keep(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    with manager_with() as manager:
        with manager.init():
            model = Kept(manager)
        probe: Tensor = model.probe.weight
        return model.row.clone(), probe.detach().clone()


def test_what_else_has_the_memory_keeps_the_values_on_every_rank(teams: dict[int, Team]) -> None:
    torch.manual_seed(0)
    plain = Net()
    for row, weight in teams[2].run(keep):
        assert torch.equal(row, plain.words.weight[0])
        assert torch.equal(weight, plain.blocks[1].up.weight)
