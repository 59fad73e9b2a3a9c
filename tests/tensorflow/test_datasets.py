"""What a run promises for tf.data, and what it says where it cannot."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import stateful_random_ops

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError
from unbroken.frameworks.tensorflow import datasets
from unbroken.frameworks.tensorflow.dataset_iterators import ResumableIterator
from unbroken.frameworks.tensorflow.datasets import ResumableDataset
from unbroken.frameworks.tensorflow.pipeline import Pipeline
from unbroken.rundir.journal import read_events
from unbroken.rundir.layout import events_file

from .. import quiet_tensorflow  # noqa: F401
from .pipelines import ELEMENT, PIPELINES, Dataset, add_one, consumed, counted, drawn, iterated, numbers


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("unbroken: batches")]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            lambda: numbers().shuffle(5, seed=1).batch(3),
            "batch.batch_size: the checkpoint has '2', found '3'",
        ),
        (
            lambda: numbers().shuffle(6, seed=1).batch(2),
            "shuffle.buffer_size: the checkpoint has '5', found '6'",
        ),
        (
            lambda: numbers(12).shuffle(5, seed=1).batch(2),
            "dataset.range.stop: the checkpoint has '10', found '12'",
        ),
        (lambda: numbers().batch(2), "pipeline: the checkpoint has 'dataset.range -> shuffle -> batch'"),
    ],
    ids=["batch", "buffer", "length", "stages"],
)
def test_another_pipeline_is_refused_with_every_difference(
    tmp_path: Path, other: Callable[[], Any], difference: str
) -> None:
    consumed(tmp_path, PIPELINES["shuffled"](), stop_at=2)
    before = [*(tmp_path / "checkpoints").iterdir()]

    with pytest.raises(StateMismatchError) as refused:
        consumed(tmp_path, other())

    assert difference in refused.value.message
    assert [*(tmp_path / "checkpoints").iterdir()] == before


def test_data_in_memory_are_told_apart_by_their_rows_and_code_by_its_operations(tmp_path: Path) -> None:
    def of(values: Any, change: Any) -> Any:
        return Dataset.from_tensor_slices(values).map(change).batch(2)

    values = np.arange(40.0).reshape(10, 4)
    consumed(tmp_path, of(values, add_one), stop_at=2)
    other = values.copy()
    other[-1, 0] = 7
    with pytest.raises(StateMismatchError, match=r"dataset.tensor_slice.tensors\[0\]: .*; map.function\[0\]"):
        consumed(tmp_path, of(other, tf.sin))
    rest = consumed(tmp_path, of(values, add_one))
    assert len(rest) == 13


def test_a_shuffle_without_a_seed_is_said_and_goes_on_to_the_end_of_its_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = consumed(tmp_path, numbers().shuffle(10).batch(2), epochs=1, stop_at=2)
    (line,) = said(capsys)
    assert "shuffle has no seed" in line
    rest = consumed(tmp_path, numbers().shuffle(10).batch(2), epochs=1)
    assert sorted(number for _, batch in first + rest for number in batch) == [*range(10)]


def test_a_pipeline_without_an_order_is_told_before_its_first_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tf.data.Options()
    options.deterministic = False
    second = numbers(6).concatenate(numbers(12, 6).shuffle(6, seed=1))
    with unbroken.Run(tmp_path) as run:
        for _ in run.epochs(1):
            run.batches(numbers().with_options(options)).__iter__()
            run.batches(numbers(6).shuffle(6, seed=1).concatenate(numbers(12, 6))).__iter__()
            run.batches(second).__iter__()
    lines = said(capsys)
    assert len(lines) == 2
    assert "deterministic=False" in lines[0]
    assert "shuffle comes second in concatenate" in lines[1]


@pytest.mark.parametrize("of", [lambda one: {"a": one, "b": numbers()}, lambda one: (numbers(), (one,))])
def test_what_is_zipped_is_looked_at_whatever_structure_it_is_in(of: Callable[[Any], Any]) -> None:
    assert Pipeline(Dataset.zip(of(numbers().shuffle(5, seed=1)))).lives_on
    (said_of_it,) = Pipeline(Dataset.zip(of(numbers().shuffle(5)))).hazards()
    assert "shuffle has no seed" in said_of_it


def test_what_has_no_state_is_said_when_training_begins_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> Any:
        return Dataset.from_generator(counted, output_signature=ELEMENT).batch(2)

    first = consumed(tmp_path, build(), epochs=2, stop_at=3)
    (line,) = said(capsys)
    assert "flat_map calls Python" in line
    assert "reads its consumed batches again" in line
    assert first + consumed(tmp_path, build(), epochs=2) == iterated(build(), epochs=2)


def test_a_generator_that_functions_of_the_pipeline_hold_goes_on_with_it(tmp_path: Path) -> None:
    first = consumed(tmp_path, drawn(), stop_at=7)
    assert first + consumed(tmp_path, drawn()) == iterated(drawn())


def test_random_operations_that_nobody_can_repeat_are_named_with_what_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unseeded(number: Any) -> Any:
        return tf.cast(number, tf.float32) + tf.random.uniform(())

    consumed(tmp_path, numbers().map(unseeded).batch(2), epochs=1)
    lines = said(capsys)
    assert "RandomUniform is stateful" in lines[0]
    assert "RandomUniform in map without a seed" in lines[1]
    assert "tf.random.stateless_uniform" in lines[1]


def test_fewer_data_than_were_consumed_are_refused(tmp_path: Path) -> None:
    def build(count: int) -> Any:
        return Dataset.from_generator(lambda: iter(range(count)), output_signature=ELEMENT).batch(2)

    consumed(tmp_path, build(10), stop_at=4)
    with pytest.raises(StateMismatchError, match="at least 4 batches"):
        consumed(tmp_path, build(4))


def test_an_iterator_that_the_script_keeps_goes_on_from_epoch_to_epoch(tmp_path: Path) -> None:
    def build(*, of_numpy: bool) -> Any:
        dataset = numbers(6).shuffle(6, seed=1).repeat().batch(2)
        return dataset.as_numpy_iterator() if of_numpy else iter(dataset)

    whole = [
        batch for _, batch in iterated(numbers(6).shuffle(6, seed=1).repeat().batch(2), epochs=1, most=12)
    ]
    found: list[Any] = []
    for of_numpy, stop_at in ((False, 6), (True, -1)):
        iterator = build(of_numpy=of_numpy)
        found += consumed(tmp_path, iterator, epochs=3, stop_at=stop_at, most=4)
    assert found == [(number // 4, batch) for number, batch in enumerate(whole)]


def test_what_the_script_draws_from_its_own_iterator_is_not_given_again() -> None:
    mine = iter(numbers())
    reader = ResumableIterator(mine)
    batches = reader.iterate()
    assert [int(next(batches)), int(next(mine))] == [0, 1]
    resumed = ResumableIterator(iter(numbers()))
    resumed.restore(reader.state())
    assert int(next(resumed.iterate(inside_epoch=True))) == 2


def test_that_reading_and_training_draw_in_turn_is_said_in_the_first_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = stateful_random_ops.global_generator
    tf.random.set_global_generator(tf.random.Generator.from_seed(1))
    try:
        drawn = numbers().map(lambda number: tf.random.get_global_generator().uniform(()))
        for _ in ResumableDataset(drawn).iterate():
            tf.random.get_global_generator().uniform(())
    finally:
        stateful_random_ops.global_generator = before
    assert [line for line in said(capsys) if "and so does training in between" in line]


def test_an_iterator_without_a_state_is_refused_before_a_batch_is_taken(tmp_path: Path) -> None:
    iterator = iter(Dataset.from_generator(counted, output_signature=ELEMENT))
    with pytest.raises(UnsupportedStateError, match="flat_map calls Python") as refused:
        consumed(tmp_path, iterator)
    assert "pass the dataset itself" in refused.value.hint
    assert int(next(iterator)) == 0


def test_a_distributed_dataset_is_refused_with_what_to_do(tmp_path: Path) -> None:
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with pytest.raises(UnsupportedStateError) as refused:
        consumed(tmp_path, strategy.experimental_distribute_dataset(numbers().batch(2)))
    assert "pass the dataset that it was made of" in refused.value.hint


def test_the_share_of_large_buffers_is_said_once_when_training_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "_LARGE_BYTES", 100_000)
    rows = np.random.default_rng(0).normal(size=(60, 1000)).astype(np.float32)
    consumed(tmp_path, Dataset.from_tensor_slices(rows).shuffle(50, seed=1).batch(8), epochs=2)
    (line,) = said(capsys)
    assert "takes 0 MB of each checkpoint" in line


def test_a_cache_in_a_file_that_was_not_complete_is_completed(tmp_path: Path) -> None:
    def build(name: str) -> Any:
        return numbers().shuffle(10, seed=1).cache(str(tmp_path / name)).batch(2)

    first = consumed(tmp_path / "run", build("cache"), stop_at=2)
    assert first + consumed(tmp_path / "run", build("cache")) == iterated(build("reference"))


@pytest.mark.chaos
def test_several_datasets_of_one_epoch_go_on_side_by_side(tmp_path: Path) -> None:
    def attempt(directory: Path, stop_at: int) -> list[Any]:
        train, check = numbers().shuffle(10, seed=1).batch(3), numbers(4).shuffle(4, seed=2)
        found: list[Any] = []
        try:
            with unbroken.Run(directory, background=False) as run:
                for epoch in run.epochs(2):
                    for batch in run.batches(train):
                        found.append((epoch, batch.numpy().tolist()))
                        if run.step_count + 1 == stop_at:
                            signal.raise_signal(signal.SIGTERM)
                        run.step()
                    found.append((epoch, [int(number) for number in run.batches(check)]))
        except SystemExit:
            pass
        return found

    whole = attempt(tmp_path / "whole", -1)
    parts = [attempt(tmp_path / "parts", stop_at) for stop_at in (2, 6, -1)]
    assert [line for part in parts for line in part] == whole


def test_a_bad_batch_is_left_out_and_the_rest_comes_as_it_would_have(tmp_path: Path) -> None:
    weight = tf.Variable(0.0)
    found: list[list[int]] = []
    with unbroken.Run(
        tmp_path, weight=weight, health=unbroken.Health(), save=[unbroken.EverySteps(2)], background=False
    ) as run:
        for _ in run.epochs(1):
            for batch in run.batches(numbers(16).shuffle(16, seed=1).batch(2)):
                values = batch.numpy().tolist()
                found.append(values)
                weight.assign_add(sum(values))
                run.step(loss=math.nan if len(found) == 5 else 1.0)
    (bad,) = [batch for number, batch in enumerate(found) if number == 4]
    whole = [batch for _, batch in iterated(numbers(16).shuffle(16, seed=1).batch(2), epochs=1)]
    events = list(read_events(tmp_path / "attempts" / "0001" / events_file()))
    (back,) = [event for event in events if event["kind"] == "rolled-back"]

    assert back["in_process"]
    assert found == [*whole[:5], *whole[back["step"] : 4], *whole[5:]]
    assert float(weight.numpy()) == sum(range(16)) - sum(bad)


def test_batches_are_split_into_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_HALVINGS", "1")
    rows = Dataset.from_tensor_slices({"x": np.arange(8.0).reshape(4, 2), "y": [0, 1, 2, 3]}).batch(4)
    with unbroken.Run(tmp_path) as run:
        for _ in run.epochs(1):
            for batch in run.batches(rows):
                parts = [(part["y"].numpy().tolist(), share) for part, share in run.micro_batches(batch)]
    assert parts == [([0, 1], 0.5), ([2, 3], 0.5)]
    with unbroken.Run(tmp_path / "ragged") as run, pytest.raises(UsageError, match="micro_batches"):
        [*run.micro_batches(tf.sparse.from_dense([[1, 0]]))]
