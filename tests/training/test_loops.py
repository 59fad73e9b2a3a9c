"""Epochs and batches: a loop that was cut off goes on with the batch that would have been next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from ..some import named, some


class TestEpochsAndBatches:
    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True)

    def run_to(self, directory: Path, stop_at: int | None, loops: list[Any]) -> list[list[int]]:
        """Train two epochs over each of `loops`; leave by an exception at the batch after `stop_at`.

        The state of the step before is saved then: it was captured as the loop asked for that batch.
        """
        seen: list[list[int]] = []
        count = 0
        try:
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                for _ in run.epochs(2):
                    for loop in loops:
                        for batch in run.batches(loop):
                            if count == stop_at:
                                raise InterruptedError
                            run.step()
                            seen.append([int(value) for value in torch.as_tensor(batch[0]).flatten()])
                            count += 1
        except InterruptedError:
            pass
        return seen

    @pytest.mark.parametrize("stop_at", some(named(range(1, 30, 4)), one_in=2))
    def test_two_loaders_in_one_epoch_go_on_where_they_were(self, tmp_path: Path, stop_at: int) -> None:
        torch.manual_seed(1)
        whole = self.run_to(tmp_path / "whole", None, [self.loader(), self.loader(), self.loader()])
        torch.manual_seed(1)
        first = self.run_to(tmp_path / "cut", stop_at, [self.loader(), self.loader(), self.loader()])
        torch.manual_seed(99)
        rest = self.run_to(tmp_path / "cut", None, [self.loader(), self.loader(), self.loader()])
        assert first + rest == whole

    @pytest.mark.parametrize("stop_at", some(named(range(1, 20, 3)), one_in=2))
    def test_two_passes_over_one_loader_in_an_epoch_are_told_apart(
        self, tmp_path: Path, stop_at: int
    ) -> None:
        torch.manual_seed(1)
        loader = self.loader()
        whole = self.run_to(tmp_path / "whole", None, [loader, loader])
        torch.manual_seed(1)
        loader = self.loader()
        first = self.run_to(tmp_path / "cut", stop_at, [loader, loader])
        torch.manual_seed(99)
        loader = self.loader()
        assert first + self.run_to(tmp_path / "cut", None, [loader, loader]) == whole

    @pytest.mark.parametrize("stop_at", range(1, 10, 2))
    def test_two_loaders_side_by_side_go_on_where_they_were(self, tmp_path: Path, stop_at: int) -> None:
        def run_to(directory: Path, stop_at: int | None) -> list[tuple[list[int], list[int]]]:
            seen = []
            first, second = self.loader(), self.loader()
            try:
                with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                    for _ in run.epochs(2):
                        for (one,), (two,) in zip(run.batches(first), run.batches(second), strict=True):
                            if len(seen) == stop_at:
                                raise InterruptedError
                            seen.append((one.tolist(), two.tolist()))
                            run.step()
            except InterruptedError:
                pass
            return seen

        torch.manual_seed(1)
        loaders = self.loader(), self.loader()
        plain = [
            (one.tolist(), two.tolist()) for _ in range(2) for (one,), (two,) in zip(*loaders, strict=True)
        ]
        torch.manual_seed(1)
        first = run_to(tmp_path, stop_at)
        torch.manual_seed(99)
        assert first + run_to(tmp_path, None) == plain

    @pytest.mark.parametrize("stop_at", some(named(range(6, 20, 3)), one_in=2))
    def test_a_generator_that_two_loaders_share_is_not_set_back(self, tmp_path: Path, stop_at: int) -> None:
        def loaders() -> list[Any]:
            shared = torch.Generator().manual_seed(3)
            data = TensorDataset(torch.arange(10))
            return [DataLoader(data, batch_size=2, shuffle=True, generator=shared) for _ in range(2)]

        whole = self.run_to(tmp_path / "whole", None, loaders())
        first = self.run_to(tmp_path / "cut", stop_at, loaders())
        assert first + self.run_to(tmp_path / "cut", None, loaders()) == whole

    def test_one_object_of_batches_serves_every_epoch_and_knows_its_length(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            batches = run.batches(self.loader())
            assert len(batches) == 5
            assert [len(list(batches)) for _ in run.epochs(3)] == [5, 5, 5]

    @pytest.mark.parametrize("stop_at", [1, 3, 4, 7])
    def test_a_plain_list_of_batches_is_resumed_by_reading_it_again(
        self, tmp_path: Path, stop_at: int
    ) -> None:
        items = [[value] for value in range(4)]
        whole = self.run_to(tmp_path / "whole", None, [items])
        first = self.run_to(tmp_path / "cut", stop_at, [items])
        assert first + self.run_to(tmp_path / "cut", None, [items]) == whole

    def test_an_iterable_that_draws_from_the_process_generators_is_exact(self, tmp_path: Path) -> None:
        class Drawn:
            def __iter__(self) -> Iterator[list[int]]:
                for _ in range(5):
                    yield [int(torch.randint(1000, ()))]

        torch.manual_seed(1)
        whole = self.run_to(tmp_path / "whole", None, [Drawn()])
        torch.manual_seed(1)
        first = self.run_to(tmp_path / "cut", 3, [Drawn()])
        torch.manual_seed(99)
        assert first + self.run_to(tmp_path / "cut", None, [Drawn()]) == whole

    def test_an_iterator_that_can_be_read_once_is_refused(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UnsupportedStateError, match="which can be read once only"),
            unbroken.Run(tmp_path) as run,
        ):
            iter(run.batches(iter([1])))

    def test_a_list_that_became_shorter_is_refused(self, tmp_path: Path) -> None:
        self.run_to(tmp_path, 3, [[[1], [2], [3], [4]]])
        with pytest.raises(StateMismatchError, match="expected at least 3 items, found 2"):
            self.run_to(tmp_path, None, [[[1], [2]]])

    def test_without_epochs_a_loop_over_batches_goes_on_too(self, tmp_path: Path) -> None:
        def passes(directory: Path, stop_at: int | None) -> list[int]:
            seen: list[int] = []
            loader = self.loader()
            try:
                with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                    while run.step_count < 12:
                        for (values,) in run.batches(loader):
                            if run.step_count == stop_at:
                                raise InterruptedError
                            run.step()
                            seen += values.tolist()
            except InterruptedError:
                pass
            return seen

        torch.manual_seed(1)
        whole = passes(tmp_path / "whole", None)
        torch.manual_seed(1)
        first = passes(tmp_path / "cut", 8)
        torch.manual_seed(99)
        assert first + passes(tmp_path / "cut", None) == whole

    def test_work_at_the_end_of_an_epoch_runs_once_in_each_epoch(self, tmp_path: Path) -> None:
        ended: list[int] = []
        for _ in range(3):
            try:
                with unbroken.Run(tmp_path, save=[unbroken.EveryEpochs(1)], counters={}) as run:
                    for epoch in run.epochs(3):
                        for _ in run.batches([1, 2]):
                            run.step()
                            if (
                                epoch == len(ended)
                                and epoch
                                and run.step_count % 2 == 0
                                and epoch not in ended
                            ):
                                run._saver.wait()
                        ended.append(epoch)
                        if epoch < 2 and len(ended) == epoch + 1 and epoch == 1:
                            raise InterruptedError
            except InterruptedError:
                pass
        # Epoch 1 was cut off before its end was saved: it is done again, the others are not.
        assert ended == [0, 1, 1, 2]

    def test_more_epochs_than_before_continue_a_completed_run(self, tmp_path: Path) -> None:
        for count, expected in ((2, [0, 1]), (2, []), (4, [2, 3])):
            with unbroken.Run(tmp_path) as run:
                assert list(run.epochs(count)) == expected
