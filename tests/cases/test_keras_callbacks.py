"""Cases from public trackers: what callbacks of fit forget, and where its data begin again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..keras.fitting import DiedError, DiesAt, X, Y, build, run_of

import keras  # isort: skip
import numpy as np  # isort: skip

import unbroken  # isort: skip


def test_a_worse_model_does_not_overwrite_the_best_one_after_a_restart(tmp_path: Path) -> None:
    """keras-team/keras#17012."""
    best = tmp_path / "best.weights.h5"

    def fit(epochs: int, *, is_damaged: bool = False) -> None:
        model = build(dropout=0.0)
        with run_of(tmp_path / "run", model) as run:
            keeping = keras.callbacks.ModelCheckpoint(
                best, "loss", save_best_only=True, save_weights_only=True
            )

            def damage(*_: Any, **__: Any) -> None:
                model.set_weights([weights + 100.0 for weights in model.get_weights()])

            harm = keras.callbacks.LambdaCallback(on_train_batch_begin=damage if is_damaged else None)
            use = [keeping, harm, unbroken.keras.Checkpoint(run)]
            model.fit(X, Y, batch_size=10, epochs=epochs, verbose=0, callbacks=use)

    fit(2)
    kept = best.read_bytes()
    fit(3, is_damaged=True)
    assert best.read_bytes() == kept


@pytest.mark.chaos
def test_a_restart_in_an_epoch_trains_on_no_batch_twice(tmp_path: Path) -> None:
    """keras-team/keras#22490."""

    def batches() -> Any:
        for at in range(8):
            yield X[:5] * at + np.random.rand(5, 4).astype("float32"), Y[:5]

    def fit(directory: Path, dies: DiesAt) -> tuple[int, list[Any]]:
        model = build()
        with run_of(directory, model) as run:
            use = [dies, unbroken.keras.Checkpoint(run)]
            model.fit(batches(), epochs=2, steps_per_epoch=4, verbose=0, callbacks=use)
            return run.step_count, [*map(np.array, model.get_weights())]

    expected = fit(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        fit(tmp_path / "broken", DiesAt("train_batch_end", 6))
    steps, weights = fit(tmp_path / "broken", DiesAt())
    assert steps == expected[0] == 8
    assert all(map(np.array_equal, weights, expected[1]))
