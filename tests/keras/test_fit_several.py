"""Several fits in one run: which one a script goes on in, and what an exception leaves behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from .fitting import DiedError, DiesAt, X, Y, build, is_same, run_of, state_of

import keras  # isort: skip

from keras.src.trainers.epoch_iterator import EpochIterator  # isort: skip

import unbroken  # isort: skip
from unbroken.errors import StateMismatchError, UnsupportedStateError  # isort: skip
from unbroken.integrations.keras.data import fit_data  # isort: skip
from unbroken.integrations.keras.fit import asked, check_done  # isort: skip
from unbroken.integrations.keras.frames import RunningFit  # isort: skip


def fit(model: Any, run: Any, *others: Any, y: Any = Y, **options: Any) -> Any:
    use = [*others, unbroken.keras.Checkpoint(run)]
    return model.fit(X, y, **{"batch_size": 10, "verbose": 0, "epochs": 1, **options, "callbacks": use})


def test_a_fit_that_is_not_the_one_that_was_done_before_the_checkpoint_is_not_passed_over(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def running(rows: Any, **options: Any) -> Any:
        found = {"initial_epoch": 0, "epochs": 2, "callbacks": None, "validation_data": None, **options}
        return RunningFit(epoch_iterator=EpochIterator(rows, Y, batch_size=5), **found)

    done = running(X)
    record = asked(done, fit_data(done.epoch_iterator.data_adapter, None))
    check_done(record, running(X, initial_epoch=1, epochs=3), 0, 1)
    assert "call 1 of fit was done before the checkpoint" in capfd.readouterr().err
    with pytest.raises(StateMismatchError, match="epochs: 3, the checkpoint has 2"):
        check_done(record, running(X, epochs=3), 0, 1)
    with pytest.raises(StateMismatchError, match="another one: looks"):
        check_done(record, running(-X), 0, 1)


@pytest.mark.chaos
def test_a_script_that_leaves_out_a_fit_that_was_done_is_refused_and_one_that_calls_it_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def phases(*wanted: int, dies: bool = False) -> int:
        model = build()
        with run_of(tmp_path, model, allow=["fit.DiesAt"]) as run:
            for phase in wanted:
                fits_died = [DiesAt("train_batch_end", 2)] if dies and phase == 2 else []
                fit(model, run, *fits_died, y=Y * phase)
            return run.step_count

    with pytest.raises(DiedError):
        phases(1, 2, dies=True)
    with pytest.raises(StateMismatchError, match=r"expected call 1 of fit in the run, .* another one"):
        phases(2)
    capfd.readouterr()
    assert phases(1, 2) == 4
    assert "call 1 of fit was done before the checkpoint and is passed over" in capfd.readouterr().err


def test_a_fit_behind_one_that_an_exception_has_ended_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model, caught = build(), list[BaseException]()
    with run_of(tmp_path, model) as run:
        try:
            fit(model, run, DiesAt("test_batch_end", 1), validation_data=(X, Y))
        except DiedError as error:
            # With its frames, in which the passes of that fit are still open.
            caught.append(error)
        with pytest.raises(DiedError):
            fit(model, run, DiesAt("train_batch_end", 2), epochs=2)
        run.save()
    # The one that was asked for, which is written beside training, and that of the end.
    names = {found.name for found in (tmp_path / "checkpoints").iterdir()}
    assert {"step-00000003", "step-00000003.1"} <= names
    assert model._initial_epoch is None
    assert "_get_metrics_result_or_logs" not in vars(model)


@pytest.mark.chaos
def test_plain_fit_trains_all_its_epochs_behind_a_resumed_one_that_was_interrupted(tmp_path: Path) -> None:
    for at in (6, 2):
        model = build()
        with pytest.raises(DiedError), run_of(tmp_path, model) as run:
            fit(model, run, DiesAt("train_batch_end", at), epochs=6)
    history = model.fit(X, Y, batch_size=10, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def frozen() -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    base = keras.layers.Dense(3, name="base")
    model = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)])
    base.trainable = False
    model.compile("adam", "mse", jit_compile=False)
    return model, base


def test_a_fit_that_trains_other_variables_than_as_the_run_was_entered_is_refused(tmp_path: Path) -> None:
    model, base = frozen()
    with run_of(tmp_path, model) as run:
        base.trainable = True
        model.compile("adam", "mse", jit_compile=False)
        with pytest.raises(UnsupportedStateError, match=r"other trained variables: .*base.bias") as refused:
            fit(model, run)
        assert "allow=['model.(optimizer)*']" in (refused.value.hint or "")
        base.trainable = False
        model.compile("sgd", "mse", jit_compile=False)
        with pytest.raises(UnsupportedStateError, match="other an optimizer SGD"):
            fit(model, run)


@pytest.mark.chaos
def test_unfreezing_is_exact_where_it_is_allowed(tmp_path: Path) -> None:
    def both(directory: Path, dies: DiesAt) -> list[Any]:
        model, base = frozen()
        with run_of(directory, model, allow=["model.(optimizer)*"]) as run:
            fit(model, run)
            base.trainable = True
            model.compile("adam", "mse", jit_compile=False)
            fit(model, run, dies, epochs=2)
        return state_of(model)

    expected = both(tmp_path / "whole", DiesAt())
    with pytest.raises(DiedError):
        both(tmp_path / "broken", DiesAt("train_batch_end", 3))
    gc.collect()
    assert is_same(both(tmp_path / "broken", DiesAt()), expected)
