"""The callback that makes `model.fit` part of a run."""

from __future__ import annotations

import sys
from typing import Any

import keras

from unbroken.errors import UnsupportedStateError, UsageError
from unbroken.frameworks.keras.fit_state import FIT_PART, FitState
from unbroken.integrations.keras.callback_state import KeptCallback, kept_callbacks
from unbroken.integrations.keras.csv_files import has_file
from unbroken.integrations.keras.fit import (
    Fit,
    check_callbacks,
    check_compiled,
    check_done,
    goes_on,
    restore_callbacks,
    saved_callbacks,
    tell_of_settings,
)
from unbroken.integrations.keras.frames import RunningFit, begin_with, running_fit
from unbroken.training import families
from unbroken.training.run import Run


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Makes `model.fit` part of the entered `run`: exact resume from any step, whatever ended the process.

        with unbroken.Run("runs/digits", model=model) as run:
            model.fit(x, y, epochs=20, callbacks=[unbroken.keras.Checkpoint(run)])

    The model, compiled, is a part of the run. A run that goes on has the weights, the optimizer, the seeds
    of dropout, the metrics of the epoch so far, the history and what the other callbacks had come to know,
    such as the best value and the patience used up; the data go on with the next batch, and fit with the
    epoch that it was in. It takes the place of ModelCheckpoint and BackupAndRestore.

    Arrays that are shuffled have an order of the run's own in each epoch. Each step is one of the run, and
    its logs are metrics there; at the end of an epoch the logs with those of the validation are recorded.

    Raises UnsupportedStateError in one of several processes that train together; and, when fit begins:
    UsageError for a model that is no part of the run, a second Checkpoint and a BackupAndRestore;
    UnsupportedStateError for data that cannot be continued exactly; StateMismatchError for other callbacks
    or data than in the checkpoint.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        ranks = families.ranks()
        if ranks is not None:
            # Now: fit itself fails there before it asks any callback.
            raise UnsupportedStateError(
                "unbroken.keras.Checkpoint: expected fit in one process, found "
                f"{ranks.world_size} that train together",
                hint="train in a loop over run.epochs and run.batches, as in the how-to of strategies",
            )
        self._run = run
        self._kept: list[KeptCallback] = []

    def set_params(self, params: Any) -> None:
        """Look at the other callbacks as they were given to fit, before any of them begins."""
        super().set_params(params)
        holder = sys._getframe(1).f_locals.get("self")
        callbacks = holder.callbacks if isinstance(holder, keras.callbacks.CallbackList) else []
        self._kept = kept_callbacks(callbacks, [Checkpoint, _Last, keras.callbacks.ProgbarLogger])
        known = self._run.parts.get(FIT_PART)
        if not isinstance(known, FitState):
            return
        saved = saved_callbacks(known)
        if goes_on(known):
            # Before anything is done to the files of callbacks.
            check_callbacks(self._kept, saved, known)
        for found in self._kept:
            if found.name in saved:
                found.prepare(saved[found.name])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do nothing: that this is here keeps fit from calling callbacks in a thread of their own."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin, once all others have begun."""
        model = self.model
        known = self._known(model)
        running = running_fit(model)
        callbacks = running.callbacks.callbacks
        _check_alone(callbacks)
        if not self._kept:
            _refuse_files(callbacks)
            self._kept = kept_callbacks(callbacks, [Checkpoint, _Last, keras.callbacks.ProgbarLogger])
        last = _Last(self._run, known, running, self._kept)
        last.set_model(model)
        # At the end of the list, which is being gone through right now: it comes last in all that follows.
        callbacks.append(last)

    def _known(self, model: Any) -> FitState:
        parts = self._run.parts
        known = parts.get(FIT_PART)
        if not isinstance(known, FitState) or not any(part is model for part in parts.values()):
            raise UsageError(
                f"unbroken.keras.Checkpoint: expected the model {model.name!r}, compiled, to be a part of "
                f"the entered run, found the parts {', '.join(parts) or 'of none'}",
                hint="write `with unbroken.Run(directory, model=model) as run:` around fit, behind compile",
            )
        return known


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes behind all callbacks, so that what it captures is what they have left."""

    def __init__(self, run: Run, known: FitState, running: RunningFit, kept: list[KeptCallback]) -> None:
        super().__init__()
        self._run, self._known, self._running, self._kept = run, known, running, kept
        self._fit: Fit | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        known, number = self._known, self._known.begun
        saved = saved_callbacks(known)
        for found in self._kept:
            found.has_begun()
        if goes_on(known):
            check_callbacks(self._kept, saved, known)
            tell_of_settings(self._kept, saved)
        if goes_on(known) and number < known.kept["number"]:
            # All of this fit was done before the checkpoint, and others begun after it.
            check_done(known.kept["finished"][number], self._running, number, known.kept["number"])
            known.begun += 1
            restore_callbacks(self._kept, saved)
            begin_with(self.model, self._running.epochs)
            return
        check_compiled(known, self.model)
        known.begun += 1
        self._fit = Fit.following(known, self._run, self.model, self._running, self._kept)
        self._fit.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.end_batch(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.begin_evaluation()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.tick()

    def on_test_end(self, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.end_evaluation()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._fit is not None:
            self._fit.end_epoch(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._running.callbacks.callbacks.remove(self)
        self.model._initial_epoch = None
        if self._fit is not None:
            self._fit.end()


def _refuse_files(callbacks: list[Any]) -> None:
    """Refuse what has lost its rows by now: nobody has said before it began that the fit goes on."""
    if any(has_file(found) for found in callbacks):
        raise UnsupportedStateError(
            "unbroken.keras.Checkpoint: expected to be told of the fit before its callbacks begin, found a "
            "CSVLogger in a CallbackList that tells its callbacks nothing",
            hint="give fit the callbacks as a list, or CallbackList(..., epochs=epochs)",
        )


def _check_alone(callbacks: list[Any]) -> None:
    if sum(isinstance(found, Checkpoint) for found in callbacks) > 1:
        raise UsageError(
            "unbroken.keras.Checkpoint: expected one of them in fit, found several",
            hint="one run at a time has the state of a model",
        )
    if any(isinstance(found, keras.callbacks.BackupAndRestore) for found in callbacks):
        raise UsageError(
            "unbroken.keras.Checkpoint: found a BackupAndRestore beside it, which would put older weights "
            "over those of the run",
            hint="leave it out: the run does what it is for",
        )
