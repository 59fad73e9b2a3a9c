"""The process dies in any system call of a save, a prune, a quarantine or a sweep, cleaning up included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.testing.faults import Killed, SystemCall, dies, system_calls

from .stores import (
    ACTIONS,
    ONE,
    SHARING,
    THREE,
    TWO,
    check_listed,
    check_next_start,
    copy_of,
    make_template,
    unsynced,
)

CHANGING = {"mkdir", "fallocate", "pwrite", "rename", "link", "unlink", "rmdir"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


def killed_everywhere(name: str, template: Path, place: Path) -> Iterator[CheckpointStore]:
    """Yield the store as each death leaves it: instead of a call (a write: half done), or right after it."""
    action = ACTIONS[name]
    with system_calls() as calls:
        action.act(copy_of(template, place, with_rubbish=name == "sweep"))
    points = [call.number for call in calls if changes_something(call)]
    assert len(points) >= 6
    for at in points:
        for after_effect in (False, True):
            store = copy_of(template, place, with_rubbish=name == "sweep")
            with system_calls(unsynced(dies(at, after_effect=after_effect))), pytest.raises(Killed):
                action.act(store)
            yield CheckpointStore(place)


def changes_something(call: SystemCall) -> bool:
    """Between two of these it makes no difference when the process dies."""
    return call.name in CHANGING or (call.name == "open" and bool(call.arguments[1] & os.O_CREAT))


@pytest.mark.parametrize("name", ACTIONS)
def test_a_death_harms_no_checkpoint_and_the_next_start_cleans_up_and_saves(
    template: Path, tmp_path: Path, name: str
) -> None:
    seen = set()
    for store in killed_everywhere(name, template, tmp_path / "run"):
        seen.add(tuple(store.names()))
        check_listed(store, ACTIONS[name].spared)
        with system_calls(unsynced(lambda call: call.make())):
            check_next_start(store, tmp_path / "run")
    before = (ONE, TWO)
    after = {
        "save": (ONE, TWO, THREE),
        "save sharing a shard": (ONE, TWO, SHARING),
        "prune": (TWO,),
        "quarantine": (TWO,),
        "sweep": before,
    }
    assert seen == {before, after[name]}


def test_a_quarantine_that_dies_leaves_the_whole_checkpoint_in_one_of_the_two_places(
    template: Path, tmp_path: Path
) -> None:
    for store in killed_everywhere("quarantine", template, tmp_path / "run"):
        aside = tmp_path / "run" / "quarantine" / ONE
        is_aside = (aside / ONE).exists()
        assert is_aside != (ONE in store.names())
        if is_aside:
            assert (aside / "reason.json").stat().st_size > 0
            assert sorted(os.listdir(aside / ONE)) == sorted(os.listdir(template / "checkpoints" / ONE))


def test_a_start_that_dies_while_it_cleans_up_is_followed_by_one_that_does(
    template: Path, tmp_path: Path
) -> None:
    """However often: each start dies one call later."""
    store = copy_of(template, tmp_path / "run", with_rubbish=True)
    for at in range(100):
        with suppress(Killed), system_calls(dies(at)):
            store.sweep()
            break
    assert os.listdir(tmp_path / "run" / "checkpoints") != []
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == store.names() == [ONE, TWO]
