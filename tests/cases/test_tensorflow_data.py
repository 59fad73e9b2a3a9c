"""Data of TensorFlow over restarts: no step is lost or done twice, and what has no state is said in time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from unbroken.checkpoint.store import CheckpointStore

from .. import quiet_tensorflow  # noqa: F401
from ..tensorflow.pipelines import ELEMENT, Dataset, consumed, counted, iterated


@pytest.mark.parametrize("stop_at", [7, *(pytest.param(at, marks=pytest.mark.chaos) for at in (5, 6, 8, 9))])
@pytest.mark.parametrize("most", [None, 4], ids=["length unknown", "steps per epoch"])
def test_stopped_at_any_batch_of_an_epoch_no_step_of_it_is_lost_and_none_is_done_twice(
    tmp_path: Path, stop_at: int, most: int | None
) -> None:
    def build() -> tf.data.Dataset:
        return Dataset.from_generator(counted, output_signature=ELEMENT).shuffle(4, seed=1).batch(2)

    ledger = consumed(tmp_path, build(), stop_at=stop_at, most=most)
    assert len(ledger) == stop_at
    assert ledger + consumed(tmp_path, build(), most=most) == iterated(build(), most=most)


def test_a_generator_trains_with_a_notice_at_the_start_and_goes_on_at_the_right_element(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> tf.data.Dataset:
        return Dataset.from_generator(counted, output_signature=ELEMENT)

    first = consumed(tmp_path, build(), epochs=1, stop_at=3)
    told = capsys.readouterr().err
    assert told.index("reads its consumed batches again") < told.index("stopped by signal")
    rest = consumed(tmp_path, build(), epochs=1)
    assert [batch for _, batch in first] == [0, 1, 2]
    assert [batch for _, batch in rest] == [*range(3, 10)]


def test_what_a_shuffle_buffer_holds_is_in_the_position_and_shows_in_its_size(tmp_path: Path) -> None:
    def size_with(buffer: int) -> int:
        rows = np.random.default_rng(0).normal(size=(300, 128))
        dataset = Dataset.from_tensor_slices(rows).shuffle(buffer, seed=1).batch(2)
        consumed(tmp_path / str(buffer), dataset, epochs=1, stop_at=2)
        tensors = CheckpointStore(tmp_path / str(buffer)).latest().manifest.tensors
        return sum(
            int(np.prod(entry.shape)) for path, entry in tensors.items() if path.startswith("position/")
        )

    small, large = size_with(10), size_with(200)
    assert large - small > 150 * 1024
