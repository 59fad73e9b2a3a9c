"""Loaders and datasets of others that keep their own position: continued by their own state.

They are no dependencies: where one is not installed, its tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.training.data_runs import cut_often, seed, whole
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.own_state import shuffle_buffer
from unbroken.frameworks.torch.iterable_loader import ResumableIterableLoader
from unbroken.training.replay import ResumableIterable, resumable

STOPS = [(2,), (5,), (6,), (7,), (2, 2), (3, 5, 4)]
STOP_IDS = ["second", "last", "end", "next", "twice in one epoch", "in each epoch"]


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class OwnWay(DataLoader[Any]):
    """As loaders of streaming libraries do it: the position is in the loader, the next pass begins there."""

    done = 0
    begin_at = 0

    def __iter__(self) -> Any:
        self.done, self.begin_at = self.begin_at, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.done:
                self.done += 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = state["done"]


def own_way() -> OwnWay:
    return OwnWay(Indices(), 4)


@pytest.mark.parametrize("stops", STOPS, ids=STOP_IDS)
def test_a_loader_with_its_own_iteration_and_state_is_continued(
    tmp_path: Path, stops: tuple[int, ...]
) -> None:
    expected = whole(tmp_path / "whole", own_way, epochs=3)

    assert cut_often(tmp_path / "cut", own_way, stops, epochs=3) == expected
    assert len(expected) == 18


def test_nothing_is_said_of_a_loader_that_is_not_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole(tmp_path / "whole", own_way, epochs=2)
    assert "left early" not in capfd.readouterr().err


def test_after_one_batch_it_is_not_known_what_the_start_draws_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ledger = cut_often(tmp_path / "cut", own_way, (1,), epochs=1)

    assert len(ledger) == 6
    assert "OwnWay drew random numbers with its first item" in capfd.readouterr().err


def test_what_the_state_of_a_loader_with_workers_leaves_out_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(resumable(own_way()), ResumableIterable)
    assert capfd.readouterr().err == ""

    assert isinstance(resumable(OwnWay(Indices(), 4, num_workers=1)), ResumableIterable)
    assert "leaves out the random generators of its workers" in capfd.readouterr().err


def test_a_loader_out_of_order_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="in_order=False"):
        resumable(OwnWay(Indices(), 4, num_workers=1, in_order=False))


class StreamsByCount(IterableDataset[int]):
    """As streaming datasets do it: only the loader knows how much was consumed."""

    def __iter__(self) -> Any:
        return iter(range(9))

    def state_dict(self, samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"samples": samples, "from_beginning": from_beginning}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_dataset_that_has_to_be_told_its_position_is_refused_in_a_plain_loader() -> None:
    with pytest.raises(UnsupportedStateError, match="without arguments") as caught:
        resumable(DataLoader(StreamsByCount()))

    assert "loader that was made for it" in caught.value.hint


class TestStatefulDataLoader:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    @pytest.fixture(params=[(0, True), (0, False), (2, True)], ids=["shuffled", "in order", "in workers"])
    def build(self, request: pytest.FixtureRequest) -> Callable[[], Any]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers, shuffle = request.param
        return lambda: StatefulDataLoader(Indices(), 4, shuffle=shuffle, num_workers=workers)

    @pytest.mark.parametrize("stops", STOPS, ids=STOP_IDS)
    def test_it_is_continued_by_its_state(
        self, tmp_path: Path, build: Callable[[], Any], stops: tuple[int, ...]
    ) -> None:
        expected = whole(tmp_path / "whole", build, epochs=3)

        assert cut_often(tmp_path / "cut", build, stops, epochs=3) == expected
        assert len(expected) == 18


class TestHuggingFaceDatasets:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("datasets", reason="datasets is not installed")

    def rows(self) -> Any:
        from datasets import Dataset as Rows

        return Rows.from_dict({"index": list(range(23))}).to_iterable_dataset(num_shards=3)

    @pytest.mark.parametrize("stops", [(2,), (22,), (23,), (24,), (5, 5), (9, 20, 21)], ids=STOP_IDS)
    def test_it_is_continued_by_its_state(self, tmp_path: Path, stops: tuple[int, ...]) -> None:
        expected = whole(tmp_path / "whole", self.rows, epochs=3)

        assert cut_often(tmp_path / "cut", self.rows, stops, epochs=3) == expected
        assert len(expected) == 69

    @pytest.mark.parametrize("workers", [0, 2])
    def test_it_is_continued_behind_a_plain_loader(self, tmp_path: Path, workers: int) -> None:
        def build() -> Any:
            return DataLoader(self.rows(), 4, num_workers=workers)

        expected = whole(tmp_path / "whole", build, epochs=3)

        assert cut_often(tmp_path / "cut", build, (2, 3, 6), epochs=3) == expected

    def test_with_a_shuffle_buffer_it_is_read_again_so_that_no_row_is_lost(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def build() -> Any:
            return self.rows().shuffle(seed=3, buffer_size=8)

        expected = whole(tmp_path / "whole", build)

        assert shuffle_buffer(build()) == 8
        assert cut_often(tmp_path / "cut", build, (10, 4)) == expected
        assert "leaves out its shuffle buffer of 8 rows" in capfd.readouterr().err


def test_a_loader_over_a_stream_is_told_apart_from_one_over_indices() -> None:
    seed(0)

    assert isinstance(resumable(DataLoader(StreamOfTen(), 2)), ResumableIterableLoader)
    assert isinstance(resumable(torch.arange(3)), ResumableIterable)


class StreamOfTen(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))
