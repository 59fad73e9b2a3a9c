"""The position is in samples: batches of another size go on with the next sample of the same order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import unbroken
from unbroken.errors import StateMismatchError

from ..some import some

SAMPLES = 26
DATA = TensorDataset(torch.arange(SAMPLES))


class CutOffError(Exception):
    pass


class Pairs(BatchSampler):
    """A batch sampler of the user's, whose order may depend on anything."""


def attempt(
    directory: Path, loader: DataLoader[Any], *, stop: int | None = None, epochs: int = 2
) -> list[list[list[int]]]:
    """Train until the checkpoint of step `stop` is written; return the batches by epoch."""
    torch.manual_seed(0)
    seen: list[list[list[int]]] = [[] for _ in range(epochs)]
    saves = [unbroken.EverySteps(1)]
    with contextlib.suppress(CutOffError), unbroken.Run(directory, save=saves, background=False) as run:
        for epoch in run.epochs(epochs):
            for (batch,) in run.batches(loader):
                if run.step_count == stop:
                    raise CutOffError
                seen[epoch].append(batch.tolist())
                run.step()
    return seen


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def shuffled(size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, size, **{"shuffle": "sampler" not in options, **options})


CHANGES = {"soon": (3, 4, 5), "at once": (1, 8, 3), "to all at once": (5, 2, 26), "late": (7, 4, 9)}
WORKERS: dict[str, dict[str, Any]] = {"no worker": {}, "one worker": {"num_workers": 1}}


@pytest.mark.parametrize(("change", "options"), some(CHANGES, WORKERS, one_in=2))
def test_every_sample_comes_once_in_the_order_of_the_run(
    tmp_path: Path, change: tuple[int, int, int], options: dict[str, Any]
) -> None:
    stop, before, after = change
    whole = attempt(tmp_path / "whole", shuffled(before, **options))

    seen = attempt(tmp_path / "run", shuffled(before, **options), stop=stop)
    rest = attempt(tmp_path / "run", shuffled(after, **options))

    assert [flat(batches) for batches in map(list.__add__, seen, rest)] == [flat(epoch) for epoch in whole]
    consumed = len(flat(seen[0]))
    assert [len(batch) for batch in rest[0]] == list(sizes(SAMPLES - consumed, after))
    assert [len(batch) for batch in rest[1]] == list(sizes(SAMPLES, after))


def sizes(samples: int, size: int) -> Iterator[int]:
    while samples > 0:
        yield min(size, samples)
        samples -= size


def test_the_size_may_change_again_and_again(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole", shuffled(4))
    seen: list[list[list[int]]] = [[], []]

    for size, stop in ((4, 2), (3, 4), (5, 5), (2, 9), (6, None)):
        seen = list(map(list.__add__, seen, attempt(tmp_path / "run", shuffled(size), stop=stop)))

    assert [flat(batches) for batches in seen] == [flat(epoch) for epoch in whole]
    assert [len(batch) for batch in seen[0]] == [4, 4, 3, 3, 5, 2, 2, 2, 1]


def test_what_changed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(tmp_path, shuffled(4), stop=2)
    capsys.readouterr()
    attempt(tmp_path, shuffled(6))

    said = capsys.readouterr().err
    assert "batch_size: checkpoint has 4, found 6: training goes on with the next sample" in said


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Of 26 samples 16 are consumed; batches of 3 leave one of the other 10.
        ({"drop_last": True}, {"drop_last": True}, 9),
        ({"drop_last": True}, {}, 10),
        ({}, {"drop_last": True}, 9),
    ],
    ids=["both", "before", "after"],
)
def test_the_last_batch_is_dropped_as_the_loader_says_now(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], expected: int
) -> None:
    seen = attempt(tmp_path, shuffled(8, **before), stop=2)
    rest = attempt(tmp_path, shuffled(3, **after))

    assert len(flat(seen[0])) == 16
    assert len(flat(rest[0])) == expected
    assert not set(flat(seen[0])) & set(flat(rest[0]))


@pytest.mark.parametrize("stop", [3, 4], ids=["at the last batch", "in the next epoch"])
def test_an_epoch_whose_rest_was_dropped_has_ended(tmp_path: Path, stop: int) -> None:
    whole = attempt(tmp_path / "whole", shuffled(8, drop_last=True))

    seen = attempt(tmp_path / "run", shuffled(8, drop_last=True), stop=stop)
    rest = attempt(tmp_path / "run", shuffled(1, drop_last=True))

    # Two samples are left, which batches of 8 drop, wherever exactly the run was cut off.
    assert flat(seen[0] + rest[0]) == flat(whole[0])
    assert len(flat(seen[1] + rest[1])) == SAMPLES


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(DATA, replacement=True, num_samples=40),
        lambda: WeightedRandomSampler(torch.linspace(1, 2, SAMPLES).tolist(), 40),
        lambda: unbroken.ElasticSampler(DATA, seed=1),
    ],
    ids=["with replacement", "weighted", "elastic"],
)
def test_other_samplers_keep_their_order_too(tmp_path: Path, sampler: Any) -> None:
    whole = attempt(tmp_path / "whole", shuffled(4, sampler=sampler()))
    seen = attempt(tmp_path / "run", shuffled(4, sampler=sampler()), stop=3)
    rest = attempt(tmp_path / "run", shuffled(7, sampler=sampler()))

    assert [flat(batches) for batches in map(list.__add__, seen, rest)] == [flat(epoch) for epoch in whole]


def test_a_batch_sampler_of_the_user_is_refused_with_another_size(tmp_path: Path) -> None:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=Pairs(RandomSampler(DATA), size, drop_last=False))

    attempt(tmp_path, loader(4), stop=2)

    with pytest.raises(StateMismatchError, match="batch_size: checkpoint has 4, found 2"):
        attempt(tmp_path, loader(2))


def test_another_number_of_batches_for_a_step_changes_nothing_of_the_data(tmp_path: Path) -> None:
    def train(directory: Path, window: int, stop: int | None) -> list[int]:
        torch.manual_seed(0)
        seen: list[int] = []
        saves = [unbroken.EverySteps(1)]
        with contextlib.suppress(CutOffError), unbroken.Run(directory, save=saves, background=False) as run:
            for _ in run.epochs(1):
                for number, (batch,) in enumerate(run.batches(shuffled(2)), 1):
                    if run.step_count == stop:
                        raise CutOffError
                    seen += batch.tolist()
                    if number % window == 0:
                        run.step()
        return seen

    whole = train(tmp_path / "whole", 1, None)

    assert train(tmp_path / "run", 2, 3) + train(tmp_path / "run", 3, None) == whole


DATASETS = {
    "a tensor with other values": (
        TensorDataset(torch.arange(SAMPLES)),
        TensorDataset(-torch.arange(SAMPLES)),
    ),
    "other names": ([f"/data/{n}.png" for n in range(SAMPLES)], [f"/data/{n}.jpg" for n in range(SAMPLES)]),
    "another length": (range(SAMPLES), range(SAMPLES + 1)),
    "another class": (list(range(SAMPLES)), range(SAMPLES)),
    "another part": (
        torch.utils.data.Subset(range(99), range(0, 52, 2)),  # type: ignore[arg-type]
        torch.utils.data.Subset(range(99), range(1, 53, 2)),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_other_data_is_refused_inside_an_epoch_and_says_what_it_expected(tmp_path: Path, kind: str) -> None:
    def loader(data: Any) -> DataLoader[Any]:
        return DataLoader(data, 4, shuffle=True, collate_fn=lambda samples: (torch.zeros(len(samples)),))

    one, other = DATASETS[kind]
    attempt(tmp_path, loader(one), stop=2)

    with pytest.raises(StateMismatchError, match=r"loader: dataset.*: checkpoint has .*, found") as caught:
        attempt(tmp_path, loader(other))
    assert "unbroken_fingerprint" in caught.value.hint
    attempt(tmp_path, loader(one))


class Files(torch.utils.data.Dataset[Any]):
    """A list of files below a root, augmented at random; keeps a ledger and counts."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.root = root
        self.samples = [(f"{root}/train/{name}", 0) for name in names]
        self.reads: list[int] = []
        self.cache: list[Any] = [None] * len(names)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self.reads.append(index)
        self.cache[index] = torch.rand(())
        return (torch.tensor(index) + 0 * self.cache[index].long(),)


def test_the_same_files_elsewhere_pass_and_nothing_is_read_to_tell(tmp_path: Path) -> None:
    names = [f"{number:03}.png" for number in range(SAMPLES)]
    one, moved, renamed = Files("/disk1", names), Files("/disk2/x", names), Files("/disk1", names[::-1])
    attempt(tmp_path, shuffled_files(one), stop=2)

    with pytest.raises(StateMismatchError, match=r"dataset\.samples"):
        attempt(tmp_path, shuffled_files(renamed))
    rest = attempt(tmp_path, shuffled_files(moved), epochs=1)

    assert renamed.reads == []
    assert sorted(one.reads[:8] + moved.reads) == list(range(SAMPLES))
    assert len(flat(rest[0])) == SAMPLES - 8


def shuffled_files(data: Files) -> DataLoader[Any]:
    return DataLoader(data, 4, shuffle=True)


def test_a_data_set_may_say_itself_what_tells_it_apart(tmp_path: Path) -> None:
    def loader(fingerprint: object) -> DataLoader[Any]:
        data = TensorDataset(torch.rand(SAMPLES))
        data.unbroken_fingerprint = fingerprint  # type: ignore[attr-defined]
        return DataLoader(data, 4, shuffle=True)

    for number, fingerprint in enumerate(["version 3", False]):
        attempt(tmp_path / str(number), loader(fingerprint), stop=2)
        with pytest.raises(StateMismatchError, match="dataset: checkpoint has "):
            attempt(tmp_path / str(number), loader("version 4"))
        attempt(tmp_path / str(number), loader(fingerprint))
