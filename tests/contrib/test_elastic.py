"""Pipelines that halve when layers are frozen train on as from a checkpoint that another width has loaded."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.assembly import inventory
from tests.helpers.elastic import (
    CRAWLING_BPS,
    FAST_BPS,
    MIDDLE_BPS,
    NUM_STEPS,
    SLOW_BPS,
    Elastic,
    Ended,
    Run,
    by_checkpoints,
    different,
    elastic,
    fixed,
    in_epochs,
    killed,
    taken_up,
)
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.staged_training import Net, StagedTask, loss_of

PREFIX = ((0, 1, 2),)
ALTERNATE = ((0, 2),)


@spread(
    frozen=[PREFIX, ALTERNATE],
    precision=["fp32", "bf16"],
    model=["plain", "tied"],
    schedule=["1f1b", "looped-bfs"],
)
@pytest.mark.full
def test_two_stages_become_two_data_parallel_ranks(
    pair: Team, frozen: tuple[tuple[int, ...], ...], precision: str, model: str, schedule: str, tmp_path: Path
) -> None:
    run = Elastic((2, 1), frozen, precision, model, schedule)
    found = pair.run(elastic, run)
    assert [each.shapes for each in found] == [[(2, 1), (1, 2)]] * 2
    assert found[0].reasons == found[1].reasons
    assert found[0].reasons[0].startswith("1 x 2, a step of")
    assert different(found, pair.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@pytest.mark.parametrize(
    ("frozen", "precision"),
    [
        pytest.param(((0, 1), (0, 1, 2)), "fp32", id="prefix", marks=pytest.mark.full),
        pytest.param(((0, 2), (0, 2)), "bf16", id="every second block", marks=pytest.mark.full),
    ],
)
def test_four_ranks_halve_twice(
    four: Team, frozen: tuple[tuple[int, ...], ...], precision: str, tmp_path: Path
) -> None:
    """4 x 1 becomes 2 x 2, at a speed that leaves two stages, and 1 x 4 when exchanges cost nothing."""
    middle_Bps = MIDDLE_BPS if precision == "fp32" else 0.6 * MIDDLE_BPS
    run = Elastic((4, 1), frozen, precision, speeds=(middle_Bps, FAST_BPS))
    found = four.run(elastic, run)
    assert [each.shapes for each in found] == [[(4, 1), (2, 2), (1, 4)]] * 4, found[0].reasons
    assert different(found, four.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@pytest.mark.full
@spread(precision=["fp32", "bf16"], model=["plain", "tied"])
@pytest.mark.few(1)
def test_stages_are_cut_again_where_exchanges_are_slow(pair: Team, precision: str, model: str, tmp_path: Path) -> None:
    """Two frozen blocks of four have no backward: the two stages stay, and the first one gets three blocks."""
    run = Elastic((2, 1), ((0, 1),), precision, model, speeds=(SLOW_BPS,))
    found = pair.run(elastic, run)
    assert [each.shapes for each in found] == [[(2, 1), (2, 1)]] * 2
    assert found[0].reasons[0].startswith("2 x 1 of 3, 1 blocks, a step of")
    assert [each.num_modules for each in found] == [1 + 3, 1 + 1]
    assert different(found, pair.run(by_checkpoints, run, found[0].shapes, str(tmp_path))) == []


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_cache_stays_when_stages_become_data_parallel_ranks(pair: Team, precision: str) -> None:
    run = Elastic((2, 1), (), precision)
    found, uncached = pair.run(in_epochs, run, 1 << 20), pair.run(in_epochs, run, 0)
    for one, other in zip(found, uncached, strict=True):
        assert one[:2] == other[:2]
        assert one[0] == [2, 2, 1, 1]
        assert one[2] == NUM_STEPS * run.batch  # half of two epochs on each rank
    assert sum(one[3] for one in found) == NUM_STEPS * run.batch, "no sample is computed again after that"


@pytest.mark.parametrize(
    ("point", "bad"),
    [
        ("moving", 1),
        *(
            pytest.param(point, bad, marks=pytest.mark.full)
            for point, bad in itertools.product(("before", "undone", "moving", "at the end"), (0, 1))
            if (point, bad) != ("moving", 1)
        ),
    ],
)
def test_a_rank_that_is_killed_is_named_and_the_run_is_taken_up(point: str, bad: int, tmp_path: Path) -> None:
    run = Elastic((2, 1), PREFIX)
    with Team(2) as team:
        said = team.run(killed, run, str(tmp_path), point, bad, lost=[bad])
        assert f"rank {bad}" in said[1 - bad]
        found = team.run(taken_up, run, str(tmp_path))
        assert different(found, team.run(elastic, run)) == []


def run_the_document(rank: int, code: str) -> list[tuple[int, int]]:
    """Run a document's code on this rank; return stages and width after each epoch."""
    found: list[tuple[int, int]] = []

    def note(epoch: int, num_stages: int, width: int, reason: str) -> None:
        assert reason
        found.append((num_stages, width))

    torch.manual_seed(0)
    with fixed(FAST_BPS):
        exec(code, {"print": note})
    return found


@pytest.mark.full
def test_the_code_of_the_document(pair: Team) -> None:
    text = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if 'width="auto"' in each)
    assert pair.run(run_the_document, code) == [[(1, 2)] * 3] * 2


def refuse(rank: int) -> list[str]:
    """Call what cannot be done; return why nothing changed before the first step, and where a batch is not divided."""
    one = Run(Elastic((2, 1), PREFIX), (2, 1))
    said, pipe, manager = [], one.pipe, one.manager
    with manager:
        x, y = one.run.batches(0)[0]
        assert not pipe.resize()
        said.append(pipe.reason)
        pipe.step(x, y)
        with fixed(FAST_BPS), pytest.raises(chunkmem.StateError, match="gradient that waits for its step"):
            pipe.resize()
        one.optimizer.zero_grad()
        assert (pipe.num_stages, pipe.width, pipe.place, pipe.schedule) == (2, 1, 0, "1f1b")
        for odd in (x[:15], x[:16]):
            pipe.step(odd, y[: len(odd)])
            one.optimizer.zero_grad()
            with fixed(FAST_BPS):
                pipe.resize()
            said.append(pipe.reason)
        assert (pipe.num_stages, pipe.width, pipe.place, pipe.schedule) == (1, 2, rank, "by-layer")
        assert torch.equal(pipe.share(x), x[8 * rank :][:8])
        shared = pipe.share({"x": x, "scale": 2.0}, (y,))
        assert torch.equal(shared[0]["x"], x[8 * rank :][:8])
        assert shared[0]["scale"] == 2.0
        assert torch.equal(shared[1][0], y[8 * rank :][:8])
        with pytest.raises(chunkmem.StateError, match=r"pipe\.share\(\): 15 samples cannot be divided by 2"):
            pipe.share(x[:15])
        assert pipe.repartition(stages=2) is pipe
        pipe.step(x, y)
        assert (pipe.num_stages, pipe.schedule) == (2, "1f1b")
        assert pipe.evaluate(x, y).item() > 0
    with pytest.raises(chunkmem.StateError, match="closed"):
        pipe.resize()
    return said


def test_what_is_refused(pair: Team) -> None:
    first, second = pair.run(refuse)
    assert first == second
    assert first[0] == "nothing is known of block 0 yet: call pipe.step() before pipe.resize()"
    assert first[1].startswith("2 x 1 stays")
    assert "1 x 2 is not possible: a global batch of 15 samples cannot be divided by 2 ranks" in first[1]
    assert first[2].startswith("1 x 2, a step of")


def refuse_other_managers(rank: int, folder: str) -> None:
    config = StagedTask().make_config()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    values = config.to_dict()
    values["memory"]["disk"] = {"path": folder, "capacity": 1 << 20}
    for given, options, said in (
        (chunkmem.ChunkManager(config), {"width": "auto"}, 'width="auto" divides the ranks of a mesh'),
        (chunkmem.ChunkManager(config, mesh=mesh), {"width": 2}, 'width is 2; give "auto", or leave it out'),
        (
            chunkmem.ChunkManager(config, mesh=mesh),
            {"width": "auto", "schedule": "async-1f1b", "versions": "stash"},
            "batches are under way between its steps",
        ),
        (chunkmem.ChunkManager(chunkmem.Config.from_dict(values), mesh=mesh), {"width": "auto"}, r"with memory\.disk"),
    ):
        with given as manager:
            with manager.init():
                model = Net()
            with pytest.raises(chunkmem.ConfigError, match=said):
                manager.pipeline(
                    model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2, **options
                )


def test_which_managers_cannot_have_another_width(pair: Team, tmp_path: Path) -> None:
    pair.run(refuse_other_managers, str(tmp_path))


def lack_room(rank: int, run: Elastic) -> tuple[str, Ended]:
    """Resize where chunks would need a TiB more while they move; then train on."""
    one = Run(run, run.sizes)
    with one.manager:
        one.steps(0)
        one.freeze(1)
        with fixed(FAST_BPS), patch.object(inventory, "extra_nbytes", return_value=1 << 40):
            assert not one.pipe.resize()
        one.steps(1)
        return one.pipe.reason, one.ended([run.sizes] * 2, [])


def test_without_room_to_move_the_stages_stay(pair: Team, tmp_path: Path) -> None:
    run = Elastic((2, 1), PREFIX)
    found = pair.run(lack_room, run)
    expected = pair.run(by_checkpoints, run, [(2, 1), (2, 1)], str(tmp_path))
    assert different([ended for _, ended in found], expected) == []
    for reason, _ in found:
        assert reason.startswith("2 x 1 stays, as 1 x 2 is not possible: repartition: while chunks move, this rank")


def measure(rank: int, run: Elastic) -> tuple[str, Ended]:
    """Freeze and resize by measured times, whatever they say."""
    one = Run(run, run.sizes)
    with one.manager:
        assert f"ElasticPipeline(StagedPipeline(stage {rank} of 2, micro_batches=" in repr(one.pipe)
        one.steps(0)
        one.freeze(1)
        one.pipe.resize()
        shapes = [run.sizes, (one.pipe.num_stages, one.pipe.width)]
        one.steps(1)
        return one.pipe.reason, one.ended(shapes, [])


def test_measured_times(pair: Team, tmp_path: Path) -> None:
    """All ranks choose alike, and whatever it is, the numbers are the same."""
    run = Elastic((2, 1), PREFIX)
    (said, first), (said_too, second) = pair.run(measure, run)
    assert said == said_too
    assert said.startswith(("1 x 2, a step of", "2 x 1"))
    assert " 0 ms" not in said, "times were measured"
    assert different([first, second], pair.run(by_checkpoints, run, first.shapes, str(tmp_path))) == []


def learn(rank: int, run: Elastic) -> list[int]:
    """Resize where data parallelism is predicted to be the faster one, and takes longer than that."""
    one = Run(run, run.sizes)
    with one.manager:
        found = []
        for _ in range(3):
            one.steps(0)
            with fixed(FAST_BPS, {2: 0.120, 1: 0.200}):
                one.pipe.resize()
            found.append(one.pipe.num_stages)
        return found


def test_a_width_that_was_slower_than_predicted_is_given_up(pair: Team) -> None:
    """Four blocks of 48 ms: 1F1B takes 5 slots of 24 ms; by layer is predicted to take 96 ms, and takes 200."""
    assert pair.run(learn, Elastic((2, 1), ())) == [[1, 2, 2]] * 2


def go_and_return(rank: int, run: Elastic) -> Ended:
    """Freeze by a schedule of the pipeline, until one block is left; then train all of it again."""
    one = Run(run, run.sizes, freeze=True)
    shapes, reasons = [], []
    with one.manager:
        for phase, speed_Bps in enumerate((FAST_BPS, FAST_BPS, CRAWLING_BPS)):
            one.steps(phase)
            with fixed(speed_Bps):
                if phase < 2:
                    assert one.pipe.end_epoch().num_params > 0
                else:
                    one.manager.unfreeze(one.model)
                    one.pipe.resize()
                shapes.append((one.pipe.num_stages, one.pipe.width))
                reasons.append(one.pipe.reason)
                assert not one.pipe.resize()
            assert "inf" not in one.pipe.reason, "what runs now can be predicted"
        one.steps(3)
        return one.ended(shapes, reasons)


def there_and_back(rank: int, run: Elastic) -> Ended:
    """Do the same by hand."""
    one = Run(run, run.sizes)
    with one.manager:
        for phase, (blocks, stages) in enumerate([(2, 1), (3, None), (None, 2)]):
            one.steps(phase)
            if blocks is None:
                one.manager.unfreeze(one.model)
            else:
                one.manager.freeze([one.model.words, *one.model.blocks[:blocks]])
            if stages is not None:
                one.pipe.repartition(stages=stages)
        one.steps(3)
        return one.ended([], [])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_an_epoch_ends_and_stages_come_back(pair: Team, precision: str) -> None:
    """Where exchanges are slow, the stages that were given up come back when all blocks are trained again."""
    run = Elastic((2, 1), ((), (), ()), precision, schedule="auto")
    found = pair.run(go_and_return, run)
    assert [each.shapes for each in found] == [[(1, 2), (1, 2), (2, 1)]] * 2
    assert found[0].reasons[2].startswith("2 x 1, a step of")
    assert different(found, pair.run(there_and_back, run)) == []


def change_replicas(rank: int, run: Elastic, by_hand: bool) -> tuple[int, Ended]:
    """Divide 2 stages of 2 replicas; return the place of this rank, and what it ends with."""
    one = Run(run, run.sizes)
    with one.manager:
        one.steps(0)
        one.freeze(1)
        if by_hand:
            one.pipe.repartition(stages=1)
        else:
            with fixed(FAST_BPS):
                assert one.pipe.resize()
        one.steps(1)
        return one.pipe.place, one.ended([(one.pipe.num_stages, one.pipe.width)], [])


@pytest.mark.full
def test_replicas(four: Team) -> None:
    run = Elastic((2, 2, 1), PREFIX, "bf16")
    found, expected = four.run(change_replicas, run, False), four.run(change_replicas, run, True)
    assert sorted(place for place, _ in found) == [0, 1, 2, 3]
    assert [ended.shapes for _, ended in found] == [[(1, 4)]] * 4
    assert different([ended for _, ended in found], [ended for _, ended in expected]) == []


def stay_alone(rank: int) -> str:
    one = Run(Elastic((1, 1), PREFIX), (1, 1))
    with one.manager:
        one.steps(0)
        one.freeze(1)
        assert not one.pipe.resize()
        assert (one.pipe.num_stages, one.pipe.width, one.pipe.place) == (1, 1, 0)
        return one.pipe.reason


def test_one_rank_stays_what_it_is() -> None:
    with Team(1) as team:
        assert team.run(stay_alone)[0].startswith("1 x 1 stays, a step of")
