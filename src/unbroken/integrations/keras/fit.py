"""One call of model.fit as part of a run: its epochs and batches are the run's, and its state is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unbroken.errors import StateMismatchError, UnsupportedStateError
from unbroken.frameworks.keras.fit_data import Ticks
from unbroken.frameworks.keras.fit_state import FIT_PART, FitState, compiled
from unbroken.frameworks.keras.tensors import put_values_back
from unbroken.integrations.keras.callback_state import (
    KeptCallback,
    bar_state,
    callback_differences,
    progress_bar,
    restore_bar,
)
from unbroken.integrations.keras.data import (
    build_metrics,
    check_data,
    delivery,
    fit_data,
    looks_of,
    tell_of_validation,
)
from unbroken.integrations.keras.frames import RunningFit, begin_with, bind_logs, feed
from unbroken.rundir.tell import tell
from unbroken.state.handlers import Difference
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
        self._pass: Any = None
        self._uncut: dict[str, Any] = {}
        adapter = running.epoch_iterator.data_adapter
        self._data = fit_data(adapter, running.epoch_iterator.steps_per_epoch)
        self._ticks_data = Ticks()
        self._ticks: Any = None

    @classmethod
    def following(
        cls, known: FitState, run: Run, model: Any, running: RunningFit, kept: Sequence[KeptCallback]
    ) -> Fit:
        """Return the fit that begins now, of the checkpoint or a new one, as the live one of the run."""
        live = known.live
        if isinstance(live, Fit):
            # It has not come to its end if it was left by an exception that the script has caught.
            live.leave()
            finished = [*live._before.finished, live.record()]
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
        self._uncut = state["callbacks"]
        restore_bar(self._bar, state["bar"])

    def record(self) -> dict[str, Any]:
        """Return what checkpoints say of it when it is over, for a process that passes over it."""
        return {"callbacks": self.callbacks(), **asked(self._running, self._data)}

    def callbacks(self) -> dict[str, Any]:
        """Return the states of the callbacks."""
        return {found.name: found.state() for found in self._kept}

    def begin(self) -> None:
        """Begin to train, or go on, or do nothing if all epochs are done."""
        running, model = self._running, self._model
        check_data(running.epoch_iterator.data_adapter, self._run.parts)
        tell_of_validation(running.validation_data)
        for found in self._kept:
            found.tell_of_unkept()
        self._begin_delivery = delivery(running.epoch_iterator)
        if self._batch:
            # Before all is put to the checkpoint once more: metrics that a batch makes would be left out.
            build_metrics(model, running.epoch_iterator)
        feed(running.epoch_iterator, self._epoch)
        count = self._before.first + running.asked_epochs
        self._epochs = self._run.epochs(count, until=lambda: model.stop_training)
        epoch = next(self._epochs, None)
        if epoch is not None and epoch != self.done:
            raise UnsupportedStateError(
                f"fit: expected epoch {self.done} of the run, which fit has trained that far, found {epoch}",
                hint="train in one run by fit alone, or by a loop over run.epochs alone",
            )
        self._unsaved.enter_context(self._run.without_saves())
        left_out = running.epochs if epoch is None else running.initial_epoch + epoch - self._before.first
        begin_with(model, left_out)
        if self._batch:
            self._give_logs_once()

    def _give_logs_once(self) -> None:
        """Have the epoch that is gone on with use the logs it had: behind its last batch it has no others."""
        original = getattr(self._model, _RESULT)

        def result(logs: Any) -> Any:
            vars(self._model).pop(_RESULT, None)
            return original(logs or self._logs)

        object.__setattr__(self._model, _RESULT, result)

    def _epoch(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the batches of an epoch, or the rest of it, as fit takes them."""
        together = self._running.epoch_iterator.steps_per_execution
        give = self._begin_delivery()
        batches = iter(self._run.batches(self._data, name=f"fit {self._before.number}"))
        self._pass = batches
        self._cut_files()
        # Behind everybody's on_epoch_begin, and in a resume all is put to the checkpoint once more by now.
        self._unsaved.close()
        self._is_read = has_given = False
        while not self._is_read:
            taken = list[Any]()
            while len(taken) < together and not self._is_read:
                try:
                    taken.append(next(batches))
                except StopIteration:
                    self._is_read = True
            if taken:
                yield self._batch, self._batch + together - 1, give(taken)
                has_given = True
        if not has_given:
            bind_logs(self._model)
        self._unsaved.enter_context(self._run.without_saves())
        self._say_if_short()

    def _cut_files(self) -> None:
        # Behind all that may refuse to go on: rows that were written are the user's until then.
        states, self._uncut = self._uncut, {}
        for found in self._kept:
            if found.name in states:
                found.cut_file(states[found.name])

    def _say_if_short(self) -> None:
        iterator = self._running.epoch_iterator
        if iterator.steps_per_epoch and self._batch < iterator.steps_per_epoch:
            iterator._interrupted_warning()

    def end_batch(self, batch: int, logs: dict[str, Any]) -> None:
        """A step is complete, behind everybody's on_train_batch_end."""
        put_values_back(self._model)
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
            put_values_back(self._model)
            next(self._ticks, None)

    def end_evaluation(self) -> None:
        """A validation is over."""
        self._ticks_data.is_over = True
        self.tick()
        self._ticks = None

    def leave(self) -> None:
        """Let go of all that an exception has left open, or nothing."""
        for found in (self._ticks, self._pass):
            if found is not None:
                found.leave()
        self._ticks = self._pass = None
        self.end()

    def end(self) -> None:
        """The fit is over: let go of what it was driven by."""
        vars(self._model).pop(_RESULT, None)
        self._pass = None
        self._unsaved.close()


def asked(running: RunningFit, data: Any) -> dict[str, Any]:
    """Return what tells a call of fit from others."""
    return {"epochs": running.asked_epochs, "looks": looks_of(data)}


def check_done(record: dict[str, Any], running: RunningFit, number: int, going_on: int) -> None:
    """Say that a fit was done before the checkpoint; raise StateMismatchError if it was another one."""
    data = fit_data(running.epoch_iterator.data_adapter, running.epoch_iterator.steps_per_epoch)
    found = asked(running, data)
    changed = [
        f"{name}: {found[name]!r}, the checkpoint has {record[name]!r}"
        for name in found
        if record[name] != found[name]
    ]
    if changed:
        raise StateMismatchError(
            f"fit: expected call {number + 1} of fit in the run, which was done before the checkpoint, found "
            f"another one: {'; '.join(changed)}",
            hint="call all fits of the script again, in their order and as they were: those that were done "
            "are passed over; or start a new run directory",
        )
    tell(
        f"fit: call {number + 1} of fit was done before the checkpoint and is passed over; the run goes on "
        f"in call {going_on + 1}"
    )


def check_compiled(known: FitState, model: Any) -> None:
    """Raise UnsupportedStateError if no process could go on inside this fit.

    Another process enters the run with the model as the script has compiled it by then, and the optimizer in
    a checkpoint has to fit that.
    """
    if id(model) not in known.entered:
        return
    name, before = known.entered[id(model)]
    now = compiled(model)
    apart = [*(before.trained.keys() ^ now.trained.keys())]
    paths = sorted({**before.trained, **now.trained}[key] for key in apart)
    items = [Difference("missing", f"(optimizer).{path}", "") for path in paths]
    refused = [item.name for item in items if not is_allowed(name, item, known.choices)]
    if before.optimizer == now.optimizer and not refused:
        return
    what = f"trained variables: {', '.join(paths)}" if paths else f"an optimizer {now.optimizer}"
    raise UnsupportedStateError(
        f"fit: expected the model {name!r} with the optimizer class and the trained variables that it had as "
        f"the run was entered ({before.optimizer}), found other {what}: a checkpoint of this fit would not "
        "fit the model as another process enters the run",
        hint="give each phase a run of its own, and compile the model for it before the run is entered; if "
        f"only what is trained has changed: allow=['{name}.(optimizer)*'] of Run",
    )


def goes_on(known: FitState) -> bool:
    """Tell whether the checkpoint that a process goes on from knows of the fit that begins."""
    return known.live is None and bool(known.kept) and known.begun <= known.kept["number"]


def saved_callbacks(known: FitState) -> dict[str, Any]:
    """Return what the checkpoint that a process goes on from says of the callbacks of the fit that begins."""
    kept, number = known.kept, known.begun
    if not goes_on(known):
        return {}
    found: dict[str, Any] = (kept if number == kept["number"] else kept["finished"][number])["callbacks"]
    return found


def restore_callbacks(kept: Sequence[KeptCallback], states: dict[str, Any]) -> None:
    """Put states into the callbacks; one that the user has allowed to be missing stays as it is."""
    for found in kept:
        if found.name in states:
            found.restore(states[found.name])


def check_callbacks(kept: Sequence[KeptCallback], states: dict[str, Any], known: FitState) -> None:
    """Raise StateMismatchError with all that differs and is not allowed."""
    differences = callback_differences(kept, states)
    refused = [item for item in differences if not is_allowed(FIT_PART, item, known.choices)]
    if refused:
        lines = "\n  ".join(f"{FIT_PART}.{item}" for item in refused)
        allowable = [item.name for item in refused if item.kind != "other"]
        raise StateMismatchError(
            f"the callbacks of fit are others than in the checkpoint; none of them was changed\n  {lines}",
            hint="give fit the callbacks that the run began with, in their order"
            + "".join(
                f", or name in allow= of Run what may differ: allow=['{FIT_PART}.{name}']"
                for name in allowable[:1]
            ),
        )


def tell_of_settings(kept: Sequence[KeptCallback], states: dict[str, Any]) -> None:
    """Say what settings of callbacks are others than in the checkpoint."""
    changed = [line for one in kept if one.name in states for line in one.changed_settings(states[one.name])]
    if changed:
        tell("settings of callbacks have changed", *changed)


def numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the logs that are numbers: what metrics a step has is up to the model."""
    return {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}
