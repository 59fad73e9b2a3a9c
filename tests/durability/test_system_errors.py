"""Any system call of a save, a prune, a quarantine or a sweep fails with any error."""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import RetentionPlan
from unbroken.errors import StorageDeniedError, StorageError, StorageFullError
from unbroken.testing.faults import fails, system_calls

from .stores import ACTIONS, check_listed, check_next_start, copy_of, make_template, unsynced

# Without those that say something about the files themselves: ENOENT, EEXIST, ENOTDIR, EISDIR.
ERRORS = [
    *("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM"),
    *("ETIMEDOUT", "ENAMETOOLONG", "EINTR", "EBUSY", "ENODEV", "ENXIO", "EINVAL", "EOPNOTSUPP", "EFBIG"),
    *("ELOOP", "EMLINK", "EXDEV", "ENOTCONN", "ESHUTDOWN", "EUCLEAN", "EREMOTEIO", "EPROTO", "EOVERFLOW"),
    *("EAGAIN", "EFAULT", "ENOLCK", "EHOSTDOWN"),
]
FULL = {"ENOSPC", "EDQUOT"}
DENIED = {"EROFS", "EACCES", "EPERM"}
OPERATION = re.compile(
    r"(write|stage|sync|link|move|read|size|list|delete|sweep) (checkpoints|quarantine)"
    r"|look at the space of /"
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


def number_of_calls(name: str, template: Path, place: Path) -> int:
    store = copy_of(template, place, with_rubbish=name == "sweep")
    with system_calls() as made:
        ACTIONS[name].act(store)
    assert ACTIONS[name].is_done(store)
    return len(made)


def check_one_failure(name: str, template: Path, place: Path, at: int, error: str, times: int = 1) -> bool:
    """Fail, look, recover; return whether the failure was told."""
    action = ACTIONS[name]
    store = copy_of(template, place, with_rubbish=name == "sweep")
    number = getattr(errno, error)
    caught: StorageError | None = None
    with system_calls(unsynced(fails(at, number, times=times))):
        try:
            found = action.act(store)
        except StorageError as failed:
            caught = failed
    if caught is not None:
        check_words(caught, error)
        if action.cleans_up and times == 1:
            assert set(os.listdir(place / "checkpoints")) == set(store.names())
        is_told = True
    elif isinstance(found, RetentionPlan):
        # A checkpoint that cannot be read is kept, with the reason.
        is_told = any(os.strerror(number) in reason for reason in found.kept.values())
        assert is_told or action.is_done(store)
    else:
        # Not always an error: without direct I/O, links and the like it goes on in another way.
        assert action.is_done(store)
        is_told = False
    check_listed(store, action.spared)
    with system_calls(unsynced(lambda call: call.make())):
        check_next_start(store, place)
    return is_told


def check_words(caught: StorageError, error: str) -> None:
    assert OPERATION.match(caught.message), caught.message
    assert os.strerror(getattr(errno, error)) in caught.message
    assert caught.hint
    assert isinstance(caught, StorageFullError) == (error in FULL)
    assert isinstance(caught, StorageDeniedError) == (error in DENIED)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_failed_call_is_told_harms_no_checkpoint_and_leaves_nothing_in_the_way(
    template: Path, tmp_path: Path, name: str
) -> None:
    errors = itertools.cycle(ERRORS)
    count = number_of_calls(name, template, tmp_path / "run")
    told = [check_one_failure(name, template, tmp_path / "run", at, next(errors)) for at in range(count)]
    assert told.count(True) > count / 2


@pytest.mark.parametrize("name", ACTIONS)
def test_a_disk_that_keeps_failing_harms_no_checkpoint_and_its_first_error_is_told(
    template: Path, tmp_path: Path, name: str
) -> None:
    errors = itertools.cycle(["EIO", "ENOSPC", "EROFS", "ESTALE", "EMFILE"])
    for at in range(0, number_of_calls(name, template, tmp_path / "run"), 3):
        assert check_one_failure(name, template, tmp_path / "run", at, next(errors), times=10**6)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ACTIONS)
def test_every_call_with_every_error(template: Path, tmp_path: Path, name: str) -> None:
    for at in range(number_of_calls(name, template, tmp_path / "run")):
        for error, times in itertools.product(ERRORS, (1, 10**6)):
            check_one_failure(name, template, tmp_path / "run", at, error, times)
