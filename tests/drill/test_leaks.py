"""`unbroken drill` with real training: exact is proven, and what was planted is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from .forking import SCRIPTS, TUTORIAL, drill, forked, snippets

LEAKS = SCRIPTS / "leaks.py"


@pytest.mark.chaos
def test_a_training_with_all_its_state_in_parts_is_proven(socket: Path, tmp_path: Path) -> None:
    found = drill(forked(socket, LEAKS, "none"), tmp_path, "--steps", "14", "--at", "4", "--at", "9:in-step")
    assert found["verdict"] == "proven", found["headline"]
    assert found["steps"] == 14
    assert found["restored"] == 2
    assert found["unkept"] == {}


# What is not kept; by whom it is known after a resume; what the headline says of it.
PROVED = [
    ("numpy", ["found/__main__.noise"], "the NumPy generator `found/__main__.noise` is in no part"),
    ("closure", ["found/__main__.shake<generator>"], "is in no part of the run"),
    ("warmup", ["found/__main__.warmup.count"], "learning rate 0.008 became 0.002"),
    ("ema", ["found/__main__.updates"], "the number `found/__main__.updates` is in no part"),
    ("counter", ["found/__main__.seen"], "the number `found/__main__.seen` is in no part"),
    ("window", ["found/__main__.seen"], "batch content differs"),
    ("dict-order", ["found/__main__.weights"], "is in no part of the run"),
    ("skip", ["found/__main__.skip"], "batch content differs"),
    ("rounded", ["found/__main__.average.values"], "what the state_dict of the part `average` had kept"),
]
# What the script does after the restore cannot be put back before: it is told by what it changed.
TOLD = [
    ("python-seed", "`rng/python` is seeded again, or drawn from, in that step"),
    ("stepped", "the learning rate 0.01 became 0.009 in that step"),
    ("rate", "the learning rate 0.01 became 0.005 in that step"),
    ("moments", "the optimizer or its moments were changed"),
    ("worker-seed", "cause: the data"),
    ("buffer", "model.1.mean: a non-persistent buffer that changes and is not kept"),
    ("plain-loop", "its loop does not use run.batches"),
]
# What the run refuses by itself.
REFUSED = [
    ("scheduler", "not kept: optimizer: a learning rate scheduler of it"),
    ("sampler-epoch", "the sampler's order depends on state that is not kept"),
]
QUICK = {"moments"}


@pytest.mark.chaos
def test_the_tutorial_finds_the_mistake_of_its_script_and_proves_that_it_is_gone(
    socket: Path, tmp_path: Path
) -> None:
    broken, mended, _ = snippets(TUTORIAL)
    found = {}
    for name, text in (("broken", broken), ("mended", mended)):
        script, place = tmp_path / f"{name}.py", tmp_path / name
        script.write_text(text)
        place.mkdir()
        found[name] = drill(forked(socket, script), place, "--steps", "8", "--at", "4")
    assert found["broken"]["headline"].partition("; ")[2] in TUTORIAL.read_text()
    assert found["mended"]["verdict"] == "proven"


def leaks(table: list[Any]) -> list[Any]:
    """The rows of a table; those that are not quick belong to the long runs."""
    return [
        pytest.param(*row, id=row[0], marks=() if row[0] in QUICK else pytest.mark.chaos) for row in table
    ]


@pytest.mark.parametrize(("leak", "causes", "words"), leaks(PROVED))
def test_a_leak_is_named_and_proved_by_putting_it_back(
    socket: Path, tmp_path: Path, leak: str, causes: list[str], words: str
) -> None:
    steps = (
        ("--steps", "11", "--at", "4", "--at", "9") if leak == "dict-order" else ("--steps", "8", "--at", "4")
    )
    found = drill(forked(socket, LEAKS, leak), tmp_path, *steps)
    assert found["verdict"] == "not-exact"
    assert found["causes"] == causes
    assert found["repeatable"] is True
    assert words in found["headline"]


@pytest.mark.parametrize(("leak", "words"), leaks(TOLD))
def test_a_leak_that_comes_after_the_restore_is_told_by_what_it_changed(
    socket: Path, tmp_path: Path, leak: str, words: str
) -> None:
    found = drill(forked(socket, LEAKS, leak), tmp_path, "--steps", "8", "--at", "4")
    assert found["verdict"] == "not-exact"
    assert found["causes"] == []
    assert words in found["headline"]


@pytest.mark.parametrize(("leak", "words"), leaks(REFUSED))
def test_a_leak_that_the_run_refuses_is_reported_in_its_words(
    socket: Path, tmp_path: Path, leak: str, words: str
) -> None:
    found = drill(forked(socket, LEAKS, leak), tmp_path, "--steps", "14", "--at", "9")
    assert found["verdict"] == "failed"
    assert words in found["output"]


@pytest.mark.chaos
def test_the_order_of_a_set_is_not_the_resume_and_is_named(tmp_path: Path) -> None:
    found = drill([sys.executable, str(LEAKS), "set-order"], tmp_path, "--steps", "8")
    assert found["verdict"] == "undecided"
    assert found["hash_order"] is True


@pytest.mark.chaos
def test_by_default_seven_kills_of_all_kinds_prove_an_exact_training(socket: Path, tmp_path: Path) -> None:
    found = drill(forked(socket, LEAKS, "none"), tmp_path)
    assert found["verdict"] == "proven", found["headline"]
    assert sum(process["killed"] for process in found["processes"]) == 7
