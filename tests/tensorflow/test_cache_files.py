"""A cache in a file that a killed process was writing: it is gone on with, or said what is in the way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import UsageError
from unbroken.frameworks.tensorflow.dataset_iterators import ResumableIterator
from unbroken.frameworks.tensorflow.datasets import ResumableDataset

from .. import quiet_tensorflow  # noqa: F401
from .pipelines import numbers


def cached(directory: Path) -> Any:
    return numbers().cache(str(directory / "cache")).prefetch(2)


def of_iterator(directory: Path) -> ResumableIterator:
    return ResumableIterator(iter(cached(directory)))


def of_dataset(directory: Path) -> ResumableDataset:
    return ResumableDataset(cached(directory))


def killed(directory: Path, make: Any) -> tuple[Path, dict[str, Any]]:
    """Return what a process has left that was killed while it wrote, and its state of some batches before."""
    writing = directory / "writing"
    writing.mkdir()
    reader = make(writing)
    batches = reader.iterate()
    assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
    state = reader.state()
    next(batches)
    reader.state()
    next(batches)
    left = Path(shutil.copytree(writing, directory / "left"))
    return left, state


@pytest.mark.parametrize("make", [of_dataset, of_iterator])
def test_a_cache_that_a_killed_process_was_writing_is_gone_on_with(tmp_path: Path, make: Any) -> None:
    left, state = killed(tmp_path, make)
    resumed = make(left)
    resumed.restore(state)
    assert [int(number) for number in resumed.iterate(inside_epoch=True)] == [*range(3, 10)]
    assert (left / "cache.index").exists()


def test_a_pass_that_follows_writes_it_anew(tmp_path: Path) -> None:
    left, state = killed(tmp_path, of_dataset)
    resumed = of_dataset(left)
    resumed.restore(state)
    assert [int(number) for number in resumed.iterate()] == [*range(10)]


def test_files_of_a_process_that_nobody_resumes_are_named_with_what_to_do(tmp_path: Path) -> None:
    left, _ = killed(tmp_path, of_dataset)
    with pytest.raises(UsageError) as refused:
        [*of_dataset(left).iterate()]
    assert "left/cache_0.lockfile" in refused.value.message
    assert "delete these files" in str(refused.value.hint)
