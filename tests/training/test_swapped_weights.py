"""Averaged weights that stand in the model for an evaluation never get into a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import UsageError


@contextmanager
def zeros_in(model: nn.Module) -> Iterator[None]:
    kept = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    yield
    model.load_state_dict(kept)


def saved_weights(directory: Path) -> list[bool]:
    """For each checkpoint, whether it has weights other than zeros."""
    store = CheckpointStore(directory)
    return [
        any(store.get(name).load_tensors(["model/weight"])["model/weight"].data.tobytes())
        for name in store.names()
    ]


@pytest.mark.parametrize("with_batches", [True, False], ids=["in a loop over batches", "outside of one"])
def test_what_becomes_due_inside_is_saved_after_it(tmp_path: Path, with_batches: bool) -> None:
    model = nn.Linear(3, 3)
    with unbroken.Run(tmp_path, model=model, save=[], keep=[unbroken.KeepBest(9, "accuracy")]) as run:
        for epoch in run.epochs(2):
            for _ in run.batches([1, 2], name="training"):
                run.step()
            with run.without_saves(), zeros_in(model):
                for _ in run.batches([1, 2, 3], name="evaluation") if with_batches else [1, 2, 3]:
                    run.record(accuracy=epoch / 10)
                    run.save()
                assert len(saved_weights(tmp_path)) <= epoch
    assert saved_weights(tmp_path) == [True] * len(saved_weights(tmp_path))
    assert len(saved_weights(tmp_path)) >= 2
    assert torch.any(model.weight != 0)


def test_blocks_may_be_nested_and_end_by_an_error(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with unbroken.Run(tmp_path, model=model, save=[]) as run:
        run.step()
        with pytest.raises(ZeroDivisionError), run.without_saves(), run.without_saves():
            run.save()
            raise ZeroDivisionError
        assert saved_weights(tmp_path) == []
        run.save()
    assert len(saved_weights(tmp_path)) == 1


def test_it_belongs_inside_the_run(tmp_path: Path) -> None:
    run = unbroken.Run(tmp_path)
    with pytest.raises(UsageError), run.without_saves():
        pass
