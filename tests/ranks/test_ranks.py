"""Several ranks train one model: each goes on as it was, all from the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.last_words import read_last_words
from unbroken.rundir.rollbacks import read_rollbacks

from ..training.runs import flip, names
from .conftest import Trained, assert_as


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_a_rank_that_is_killed_costs_no_exactness_on_any(
    tmp_path: Path, rank: int, reference: Trained
) -> None:
    trained = Trained(tmp_path).go(kill=5, rank=rank)
    assert trained.code != 0
    trained.go()
    assert trained.code == 0, trained.said
    assert_as(trained, reference)


def test_a_stop_that_one_rank_is_asked_for_is_one_of_all_at_the_same_step(
    tmp_path: Path, reference: Trained
) -> None:
    trained = Trained(tmp_path).go(term=5)
    assert trained.codes == [75, 75], trained.said
    assert "stopped by signal SIGTERM on rank 1 at step 5, saved in step-00000005" in trained.said
    for rank in (0, 1):
        words = read_last_words(layout.attempt_directory(trained.run, 1), rank)
        assert words is not None
        assert (words.ending, words.step, words.checkpoint) == ("stopped", 5, "step-00000005")
    assert trained.go().code == 0, trained.said
    assert_as(trained, reference)


def test_a_loss_that_is_nan_on_one_rank_sends_all_back_to_the_same_checkpoint(
    tmp_path: Path, reference: Trained
) -> None:
    trained = Trained(tmp_path).go(nan=7, health={"warm_up_steps": 100})
    assert trained.codes == [75, 75], trained.said
    (rollback,) = read_rollbacks(trained.run)
    assert (rollback.found_step, rollback.trusted_step) == (7, 6)
    assert rollback.reason.startswith("rank 1: loss nan at step 7")
    trained.go(health={"warm_up_steps": 100})
    assert trained.code == 0, trained.said
    # The bad batch is left out on each: its step is that of the next batch, and there is one step less.
    expected = reference
    for rank in (0, 1):
        seen = [line["indices"] for _, line in sorted(trained.steps(rank).items())]
        whole = [line["indices"] for _, line in sorted(expected.steps(rank).items())]
        assert seen[:11] == [*whole[:6], *whole[7:]]
    weights = [json.loads(trained.last(rank))[0]["module.0.weight"] for rank in (0, 1)]
    assert weights[0] == weights[1]


def test_what_is_damaged_for_one_rank_is_passed_over_by_all(tmp_path: Path, reference: Trained) -> None:
    trained = Trained(tmp_path).go(kill=8)
    newest = CheckpointStore(trained.run).latest()
    assert newest.step >= 6
    path = next(path for path in newest.manifest.tensors if path.startswith("ranks/1/"))
    entry = newest.manifest.tensors[path]
    flip(trained.run / layout.CHECKPOINTS / newest.name / entry.file, entry.offset)
    assert trained.go().code == 0, trained.said
    assert f"{newest.name} was passed over: rank 1: " in trained.said
    assert_as(trained, reference)


@pytest.mark.chaos
def test_a_check_that_fails_on_one_rank_speaks_for_all(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(invalid=4, run={"keep": []})
    assert trained.code == 0, trained.said
    validations = {
        one: CheckpointStore(trained.run).get(one).manifest.validation for one in names(trained.run)
    }
    bad = {
        name: found.reason for name, found in validations.items() if found is not None and not found.passed
    }
    assert list(bad) == ["step-00000004"]
    assert bad["step-00000004"].startswith("rank 1: ")


def test_ranks_that_do_not_count_alike_are_stopped_on_all(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(twice=3)
    assert trained.code != 0
    assert (
        "at the same step, found rank 0 before the next batch, after step 3, rank 1 in step 4" in trained.said
    )
    assert trained.said.count("Traceback") >= 2


def test_a_save_that_one_rank_asks_for_is_made_by_all_after_the_next_step(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(asks=True, every=100, run={"keep": []})
    assert trained.code == 0, trained.said
    assert names(trained.run) == ["step-00000001", "step-00000012"]


def test_a_part_that_one_rank_alone_has_is_refused_on_all(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(own_part=True)
    assert trained.code != 0
    assert "expected the same parts on every rank, found that rank 1 and rank 0 differ: best" in trained.said


def test_weights_that_differ_between_ranks_are_refused_before_anything_is_saved(tmp_path: Path) -> None:
    trained = Trained(tmp_path).go(torn=True)
    assert trained.code != 0
    assert (
        "expected the same weights and the same state of optimizers on all ranks, found that " in trained.said
    )
    assert "model.0.weight" in trained.said
    assert names(trained.run) == []


def order(trained: Trained, ranks: dict[int, int]) -> list[int]:
    """Return the samples in their global order; `ranks` says by how many each step was trained."""
    seen = []
    for step, count in ranks.items():
        batches = [trained.steps(rank)[step]["indices"] for rank in range(count)]
        seen += [index for place in zip(*batches, strict=True) for index in place]
    return seen


@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [
        pytest.param(2, 1, 3, marks=pytest.mark.chaos),
        pytest.param(1, 2, 4, marks=pytest.mark.chaos),
        (2, 3, 3),
    ],
)
def test_another_number_of_ranks_goes_on_in_the_same_order(
    tmp_path: Path, before: int, after: int, stop: int
) -> None:
    trained = Trained(tmp_path).go(before, term=stop, rank=0, elastic=True)
    assert trained.code == 75, trained.said
    trained.go(after, elastic=True)
    assert trained.code == 0, trained.said
    rest = (24 - 2 * before * stop) // (2 * after)
    seen = order(trained, {step: before if step <= stop else after for step in range(1, stop + rest + 1)})
    assert seen == list(unbroken.ElasticSampler(range(24), seed=3, rank=0, world_size=1))
    if after > before:
        # A new rank draws numbers of its own.
        drawn = {json.loads(trained.last(rank))[3] for rank in range(after)}
        assert len(drawn) == after
