"""One call of model.fit as part of a run: its epochs and batches are the run's, and its state is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.keras.fit_data import Ticks
from unbroken.frameworks.keras.fit_state import FIT_PART, FitState
from unbroken.integrations.keras.callback_state import (
    KeptCallback,
    bar_state,
    callback_differences,
    progress_bar,
    restore_bar,
)
from unbroken.integrations.keras.data import build_metrics, delivery, fit_data
from unbroken.integrations.keras.frames import RunningFit, feed
from unbroken.rundir.tell import tell
from unbroken.training.comparison import is_allowed
from unbroken.training.run import Run

_RESULT = "_get_metrics_result_or_logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What was before a fit: `number` others, which are `finished`. It begins with epoch `first`."""

    number: int = 0
    first: int = 0
    finished: Sequence[dict[str, Any]] = ()


class Fit:
    """A call of fit, from the begin of its training to its end.

    Checkpoints are captured between two batches, and where an epoch has ended: behind everybody's
    on_epoch_end and before the next on_epoch_begin, which a resume calls again.
    """

    def __init__(
        self, run: Run, model: Any, running: RunningFit, kept: Sequence[KeptCallback], before: Before
    ) -> None:
        self._run = run
        self._model = model
        self._running = running
        self._kept = kept
        self._bar = progress_bar(running.callbacks.callbacks)
        self._before = before
        self.done = before.first
        self._batch = 0
        self._logs: dict[str, Any] = {}
        self._epochs: Iterator[int] = iter(())
        self._unsaved = ExitStack()
        self._is_read = False
        self._ticks_data = Ticks()
        self._ticks: Iterator[Any] | None = None

    @classmethod
    def following(
        cls, known: FitState, run: Run, model: Any, running: RunningFit, kept: Sequence[KeptCallback]
    ) -> Fit:
        """Return the fit that begins now, of the checkpoint or a new one, as the live one of the run."""
        live = known.live
        if isinstance(live, Fit):
            finished = [*live._before.finished, {"callbacks": live.callbacks()}]
            before = Before(number=len(finished), first=live.done, finished=finished)
        elif known.kept:
            before = Before(**{name: known.kept[name] for name in ("number", "first", "finished")})
        else:
            before = Before()
        fit = cls(run, model, running, kept, before)
        if live is None and known.kept:
            fit.restore(known.kept)
        known.live = fit
        return fit

    def state(self) -> dict[str, Any]:
        """Return the state of now."""
        return {
            "number": self._before.number,
            "first": self._before.first,
            "finished": list(self._before.finished),
            "done": self.done,
            "batch": self._batch,
            "logs": dict(self._logs),
            "is_stopped": bool(self._model.stop_training),
            "callbacks": self.callbacks(),
            "bar": bar_state(self._bar),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state of this fit into it and the callbacks."""
        self.done, self._batch = state["done"], state["batch"]
        self._logs = dict(state["logs"])
        self._model.stop_training = state["is_stopped"]
        restore_callbacks(self._kept, state["callbacks"])
        restore_bar(self._bar, state["bar"])

    def callbacks(self) -> dict[str, Any]:
        """Return the states of the callbacks."""
        return {found.name: found.state() for found in self._kept}

    def begin(self) -> None:
        """Begin to train, or go on, or do nothing if all epochs are done."""
        running, model = self._running, self._model
        adapter = running.epoch_iterator.data_adapter
        self._data = fit_data(adapter, running.epoch_iterator.steps_per_epoch)
        self._begin_delivery = delivery(running.epoch_iterator)
        if self._batch:
            # Before all is put to the checkpoint once more: metrics that a batch makes would be left out.
            build_metrics(model, running.epoch_iterator)
        feed(running.epoch_iterator, self._epoch)
        count = self._before.first + max(running.epochs - running.initial_epoch, 0)
        self._epochs = self._run.epochs(count, until=lambda: model.stop_training)
        epoch = next(self._epochs, None)
        if epoch is not None and epoch != self.done:
            raise UnsupportedStateError(
                f"fit: expected epoch {self.done} of the run, which fit has trained that far, found {epoch}",
                hint="train in one run by fit alone, or by a loop over run.epochs alone",
            )
        self._unsaved.enter_context(self._run.without_saves())
        # Read by fit when all callbacks have begun; with 0 it takes what it was called with, which is 0 then.
        left_out = running.epochs if epoch is None else running.initial_epoch + epoch - self._before.first
        model._initial_epoch = left_out
        original = getattr(model, _RESULT)
        # An epoch that is gone on with behind its last batch has no logs of its own.
        object.__setattr__(model, _RESULT, lambda logs: original(logs or self._logs))

    def _epoch(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the batches of an epoch, or the rest of it, as fit takes them."""
        together = self._running.epoch_iterator.steps_per_execution
        give = self._begin_delivery()
        batches = iter(self._run.batches(self._data, name=f"fit {self._before.number}"))
        # Behind everybody's on_epoch_begin, and in a resume all is put to the checkpoint once more by now.
        self._unsaved.close()
        self._is_read = False
        while not self._is_read:
            taken = list[Any]()
            while len(taken) < together and not self._is_read:
                try:
                    taken.append(next(batches))
                except StopIteration:
                    self._is_read = True
            if taken:
                yield self._batch, self._batch + together - 1, give(taken)
        self._unsaved.enter_context(self._run.without_saves())
        self._say_if_short()

    def _say_if_short(self) -> None:
        iterator = self._running.epoch_iterator
        if iterator.steps_per_epoch and self._batch < iterator.steps_per_epoch:
            iterator._interrupted_warning()

    def end_batch(self, batch: int, logs: dict[str, Any]) -> None:
        """A step is complete, behind everybody's on_train_batch_end."""
        self._batch = batch + 1
        self._logs = numbers(logs)
        self._run.step(**self._logs)

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """An epoch is complete, behind everybody's on_epoch_end: begin the next one, if there is one."""
        if not (self._is_read or self._model.stop_training):
            raise UnsupportedStateError(
                "fit: expected to hand out all batches of the epoch, found that fit has ended it earlier",
                hint="this version of Keras reads its data otherwise than those that are known; tell us",
            )
        self._run.record(**numbers(logs))
        self._batch, self._logs = 0, {}
        self.done += 1
        next(self._epochs, None)
        # After a fit that was told to stop inside an epoch, too.
        self._unsaved.close()
        self._unsaved.enter_context(self._run.without_saves())

    def begin_evaluation(self) -> None:
        """A validation begins: a stop is obeyed in it, as what it computes is computed once more."""
        self._ticks = iter(self._run.batches(self._ticks_data, name=f"validation {self._before.number}"))

    def tick(self) -> None:
        """Another batch of a validation begins."""
        if self._ticks is not None:
            next(self._ticks, None)

    def end_evaluation(self) -> None:
        """A validation is over."""
        self._ticks_data.is_over = True
        self.tick()
        self._ticks = None

    def end(self) -> None:
        """The fit is over: let go of what it was driven by."""
        vars(self._model).pop(_RESULT, None)
        self._unsaved.close()


def saved_callbacks(known: FitState) -> dict[str, Any]:
    """Return what the checkpoint that a process goes on from says of the callbacks of the fit that begins."""
    kept, number = known.kept, known.begun
    if known.live is not None or not kept or number > kept["number"]:
        return {}
    found: dict[str, Any] = (kept if number == kept["number"] else kept["finished"][number])["callbacks"]
    return found


def restore_callbacks(kept: Sequence[KeptCallback], states: dict[str, Any]) -> None:
    """Put states into the callbacks; one that the user has allowed to be missing stays as it is."""
    for found in kept:
        if found.name in states:
            found.restore(states[found.name])


def check_callbacks(kept: Sequence[KeptCallback], states: dict[str, Any], known: FitState) -> None:
    """Raise StateMismatchError with all that differs and is not allowed; say what settings have changed."""
    differences = callback_differences(kept, states)
    refused = [item for item in differences if not is_allowed(FIT_PART, item, known.choices)]
    if refused:
        lines = "\n  ".join(f"{FIT_PART}.{item}" for item in refused)
        raise StateMismatchError(
            f"the callbacks of fit are others than in the checkpoint; none of them was changed\n  {lines}",
            hint="give fit the callbacks that the run began with, in their order, or name in allow= of Run "
            f"what may differ: allow=['{FIT_PART}.{refused[0].name}']",
        )
    changed = [line for one in kept if one.name in states for line in one.changed_settings(states[one.name])]
    if changed:
        tell("settings of callbacks have changed", *changed)


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs that are numbers: what metrics a step has is up to the model."""
    return {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}
