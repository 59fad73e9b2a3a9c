"""A run that goes back leaves bad batches out, and is then as if they had never been in its data."""

from __future__ import annotations

import multiprocessing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from unbroken import Health
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.testing.runs import compare_checkpoints

from .rolled_back import BATCHES, SAMPLES, SIZE, events, final_parts, history, spoilt_once, train, train_on


def kinds(ordinary: set[str], *others: str) -> list[object]:
    return [*sorted(ordinary), *(pytest.param(kind, marks=pytest.mark.chaos) for kind in others)]


@pytest.mark.parametrize(
    "kind", kinds({"shuffled", "keyed"}, "iterable", "shuffled-2", "shuffled-2p", "keyed-2", "stream")
)
def test_a_bad_batch_is_got_past_as_if_it_had_never_been_in_the_data(kind: str, tmp_path: Path) -> None:
    found, reference = tmp_path / "found", tmp_path / "reference"
    seen = train(reference, kind, left_out={0: {4}}, epochs=1)
    bad = min({*range(SAMPLES)} - {*chain(*seen)})
    train(found, kind, bad=[bad], epochs=1)
    assert history(found) == history(reference)
    assert final_parts(found) == final_parts(reference)
    (back,) = events(found, "rolled-back")
    assert (back["step"], back["found_step"], back["trusted_step"], back["in_process"]) == (3, 5, 4, True)
    assert back["windows"] == [{"epoch": 0, "pass_index": 0, "first": 4, "last": 4}]
    (left_out,) = events(found, "skipped")
    assert (left_out["first"], left_out["last"]) == (4, 4)
    has_indices = not kind.startswith(("iterable", "stream"))
    assert (bad in left_out["samples"][0]) if has_indices else left_out["samples"] is None
    assert multiprocessing.active_children() == [], "workers of the iterator before are left"


@pytest.mark.parametrize(
    "kind", kinds({"stream"}, "shuffled", "shuffled-2", "shuffled-2p", "keyed-2", "iterable", "stream-2")
)
def test_going_back_here_is_the_same_as_in_another_process(kind: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    train(here, kind, bad=[17], epochs=1)
    # What the script may let differ makes a restore depend on objects that were built anew.
    assert train_on(there, kind, bad=[17], epochs=1, allow=["model.nothing"]) == 1
    assert [event["in_process"] for event in events(here, "rolled-back")] == [True]
    assert [event["in_process"] for event in events(there, "rolled-back")] == [False]
    assert history(here) == history(there)
    first, second = CheckpointStore(here).latest(), CheckpointStore(there).latest()
    assert compare_checkpoints(first, second)[1] == []


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(at, marks=pytest.mark.chaos) for at in (1, BATCHES - 1))]
)
def test_what_is_bad_in_each_epoch_is_left_out_in_each_wherever_it_is(number: int, tmp_path: Path) -> None:
    found, reference = tmp_path / "found", tmp_path / "reference"
    train_on(found, "ordered", bad=[number * SIZE])
    train(reference, "ordered", left_out={0: {number}, 1: {number}})
    assert history(found) == history(reference)
    assert final_parts(found) == final_parts(reference)


# The loss that is given is that of the last batch of a step, and so does not show what the first one did.
@pytest.mark.parametrize("number", [4, pytest.param(5, marks=pytest.mark.chaos)])
def test_a_step_of_several_batches_is_left_out_whole(number: int, tmp_path: Path) -> None:
    found, reference = tmp_path / "found", tmp_path / "reference"
    train(found, "ordered", bad=[number * SIZE], per_step=2, save_every=1, epochs=1)
    train(reference, "ordered", left_out={0: {4, 5}}, per_step=2, save_every=1, epochs=1)
    assert history(found) == history(reference)
    assert final_parts(found) == final_parts(reference)
    assert [(one.first, one.last) for one in read_rollbacks(found)[0].windows] == [(4, 5)]


@pytest.mark.chaos
def test_learning_rates_are_lower_for_some_steps_in_whichever_process(tmp_path: Path) -> None:
    here, there, plain = tmp_path / "here", tmp_path / "there", tmp_path / "plain"
    options: dict[str, Any] = {"bad": [17], "epochs": 1}
    train(plain, "ordered", **options)
    options["health"] = Health(rate_factor=0.5, rate_steps=2)
    train(here, "ordered", **options)
    train_on(there, "ordered", allow=["model.nothing"], **options)
    # Bad in step 5, back to 3: steps 4 and 5 are those of lower rates, and step 4 begins with the same state.
    assert [step for step in history(here) if history(here)[step] != history(plain)[step]] == [5, 6, 7]
    assert history(here) == history(there)


def test_what_is_saved_after_going_back_is_whole_though_it_shared_files_with_what_was_given_up(
    tmp_path: Path,
) -> None:
    frozen = nn.Linear(600, 500).requires_grad_(requires_grad=False)
    train(tmp_path, epochs=1, save_every=1, trouble=spoilt_once(), frozen=frozen)
    store = CheckpointStore(tmp_path)
    assert all(store.get(name).verify().is_intact for name in store.names())
    (given_up,) = (tmp_path / "quarantine").glob("*/step-00000005")
    inodes = {path.stat().st_ino for path in given_up.iterdir()}
    kept = (tmp_path / "checkpoints/step-00000004").iterdir()
    assert inodes & {path.stat().st_ino for path in kept}, "nothing was shared: this test shows nothing"
