"""model.fit in a run: all that plain fit does, and nothing of it lost wherever it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .fitting import DiedError, DiesAt, X, Y, build, is_same, run_of, state_of

import keras  # isort: skip

import unbroken  # isort: skip
from unbroken.errors import StateMismatchError, UsageError  # isort: skip

callbacks = keras.callbacks


def fit(directory: Path, *extra: Any, others: Any = None, **options: Any) -> tuple[Any, Any, int]:
    """Train in a run; return the state, the history and the steps of the run."""
    model = build(metrics=options.pop("metrics", ()))
    with run_of(directory, model, allow=["fit.DiesAt"]) as run:
        wanted = {"batch_size": 6, "epochs": 3, "verbose": 0, **options}
        used = [*(others or []), *extra, unbroken.keras.Checkpoint(run)]
        history = model.fit(X, Y, callbacks=used, **wanted)
        return state_of(model), history.history, run.step_count


def knowing() -> list[Any]:
    """Callbacks that come to know something in a fit."""
    return [
        callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
        callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9),
    ]


def test_the_public_module_has_one_name() -> None:
    assert unbroken.keras.__all__ == ["Checkpoint"]


def test_a_fit_without_shuffling_has_the_bits_of_plain_fit(tmp_path: Path) -> None:
    options = {"shuffle": False, "epochs": 2, "sample_weight": Y[:, 0], "validation_data": (X, Y)}
    model = build(metrics=("mae",))
    plain = model.fit(X, Y, batch_size=6, verbose=0, **options)
    state, history, steps = fit(tmp_path, metrics=("mae",), **options)
    assert history == plain.history
    assert is_same(state, state_of(model))
    assert steps == 8


def test_a_fit_that_dies_anywhere_ends_as_one_that_does_not(tmp_path: Path) -> None:
    all_of_it = {"metrics": ("mae",), "validation_data": (X, Y)}
    expected = fit(tmp_path / "whole", others=knowing(), **all_of_it)
    for moment, at in [("train_batch_end", 3), ("test_batch_end", 1), ("train_batch_begin", 7)]:
        with pytest.raises(DiedError):
            fit(tmp_path / "broken", DiesAt(moment, at), others=knowing(), **all_of_it)
    state, history, steps = fit(tmp_path / "broken", others=knowing(), **all_of_it)
    assert history == expected[1]
    assert is_same(state, expected[0])
    assert steps == expected[2]


@pytest.mark.parametrize(
    "moment", [pytest.param("train_batch_end", marks=pytest.mark.chaos), "test_batch_begin"]
)
def test_a_stop_leaves_fit_and_the_next_process_goes_on_behind_the_batches(
    tmp_path: Path, moment: str
) -> None:
    class Stops(callbacks.Callback):
        """Stands for `unbroken stop`, a signal of the scheduler or Ctrl-C."""

    setattr(Stops, f"on_{moment}", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, Stops(), epochs=1, validation_data=(X, Y))
    assert stopped.value.code == 75
    setattr(Stops, f"on_{moment}", lambda *_, **__: None)
    _, history, step = fit(tmp_path, Stops(), epochs=1, validation_data=(X, Y))
    assert step == 4
    assert len(history["val_loss"]) == 1


def test_an_early_stopped_fit_stays_stopped(tmp_path: Path) -> None:
    def stopping() -> list[Any]:
        return [callbacks.EarlyStopping("loss", patience=0, min_delta=100.0)]

    _, history, steps = fit(tmp_path, others=stopping())
    again = fit(tmp_path, others=stopping())
    assert len(history["loss"]) == 2
    assert again[1:] == (history, steps)


@pytest.mark.chaos
def test_a_second_fit_of_a_script_goes_on_where_it_was(tmp_path: Path) -> None:
    def both(directory: Path, dies: DiesAt) -> tuple[Any, list[Any]]:
        model = build()
        with run_of(directory, model) as run:
            first = model.fit(X, Y, 10, epochs=2, verbose=0, callbacks=[unbroken.keras.Checkpoint(run)])
            use = [unbroken.keras.Checkpoint(run), dies]
            second = model.fit(X, -Y, 10, epochs=5, initial_epoch=2, verbose=0, callbacks=use)
            histories = [(found.epoch, found.history) for found in (first, second)]
            return state_of(model), histories

    expected = both(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        both(tmp_path / "broken", DiesAt("train_batch_end", 3))
    state, histories = both(tmp_path / "broken", DiesAt())
    assert histories == expected[1]
    assert histories[1][0] == [2, 3, 4]
    assert is_same(state, expected[0])


@pytest.mark.chaos
def test_the_progress_bar_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiedError):
        fit(tmp_path, DiesAt("train_batch_end", 3), epochs=1, verbose=1)
    capfd.readouterr()
    fit(tmp_path, epochs=1, verbose=1)
    printed = capfd.readouterr().out
    assert "3/4" in printed
    assert "4/4" in printed
    assert "1/4" not in printed


def test_other_callbacks_and_data_are_refused_by_name_and_callbacks_can_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(DiedError):
        fit(tmp_path, DiesAt("train_batch_end", 2), others=[callbacks.EarlyStopping("loss")])
    with pytest.raises(StateMismatchError) as refused:
        fit(tmp_path, others=[callbacks.ReduceLROnPlateau("loss")])
    assert "fit.EarlyStopping: fit has no such callback" in refused.value.message
    assert "fit.ReduceLROnPlateau: no such callback in the checkpoint" in refused.value.message
    with pytest.raises(StateMismatchError, match=r"batch_size: 5, the checkpoint has 6"):
        fit(tmp_path, others=[callbacks.EarlyStopping("loss")], batch_size=5)
    model = build()
    with run_of(tmp_path, model, allow=["fit.*"]) as run:
        model.fit(X, Y, 6, epochs=1, verbose=0, callbacks=[unbroken.keras.Checkpoint(run)])
        assert run.step_count == 4


def test_what_would_spoil_the_run_is_refused(tmp_path: Path) -> None:
    model = build()
    with run_of(tmp_path / "one", model) as run:
        backup = callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(UsageError, match="BackupAndRestore"):
            model.fit(X, Y, verbose=0, callbacks=[backup, unbroken.keras.Checkpoint(run)])
        with pytest.raises(UsageError, match="to be a part of"):
            build().fit(X, Y, verbose=0, callbacks=[unbroken.keras.Checkpoint(run)])
