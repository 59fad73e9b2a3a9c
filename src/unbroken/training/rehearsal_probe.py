"""The probe inside a run that is rehearsed: writes what the run has at each step, and dies as planned.

A "began" line is of the moment the first batch of a pass is asked for, where the state is that of the
checkpoint. A script without `run.batches` begins its first step somewhere after it entered the run or an
epoch: the state of then is kept, and written when its first step is seen.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal

from unbroken.checkpoint.digest import ALGORITHM, hasher
from unbroken.checkpoint.highlights import learning_rates, plain_metrics
from unbroken.rundir import layout
from unbroken.rundir.rehearsal import Line, Moment, Plan, encode_line
from unbroken.state.handlers import GRADIENTS, KeepsGradients
from unbroken.training.rehearsal_components import digests
from unbroken.training.rehearsal_content import content_digest
from unbroken.training.rehearsal_objects import FoundObjects, Taken, take_parts
from unbroken.training.rehearsal_values import PutBack, dump
from unbroken.training.saver import Saver
from unbroken.training.whole_state import WholeState

_LOOK_SECONDS = 0.0002
# Values as they were when an epoch began, which is later than when the step before was complete.
BETWEEN_EPOCHS = "between-epochs"


class Probe:
    """Follows `plan` in the run that `state` and `saver` are of."""

    def __init__(self, plan: Plan, state: WholeState, saver: Saver) -> None:
        self._plan = plan
        self._kill = plan.kill
        self._state = state
        self._parts = list(state.parts)
        self._saver = saver
        self._record = os.open(plan.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Which line the next step begins with, and what it says so far.
        self._awaited: Literal["began", "epoch"] | None = "began"
        self._first_line: Line | None = None
        self._is_between_epochs = False
        self._found: FoundObjects | None = None
        self._told = 0
        self._written = 0
        self._batches: Any = None
        self._gradients: Any = None
        self._training: set[int] = set()
        self._latest: int | None = None
        self._watch = self._watch_gradients()
        state.position.watch = self._watched

    def about_to_begin(self) -> None:
        if self._awaited is None:
            return
        position, state = self._state.position, self._state
        if self._first_line is None:
            self._written = state.step
            # The run was entered there; an epoch that begins has set it already.
            self._is_between_epochs = self._awaited == "epoch" or (
                position.epoch > 0 and not position.inside_epoch
            )
        if self._awaited == "began":
            self._found = FoundObjects(self._parts, position)
            self._told = 0
        notes = self._put_back() if self._awaited == "began" else []
        self._first_line = self._line(self._awaited, notes)

    def counting(self) -> None:
        self._begin()
        if self._state.step > self._written:
            # Two steps in one body: the boundary comes after the second.
            self._write_step()
        self._die_if("in-step")
        if self._gradients is None:
            for part in self._parts:
                if isinstance(part.handler, KeepsGradients):
                    state: Any = part.handler.state_inside_step(part.value)
                    self._note_gradients(state.get(GRADIENTS, {}))
        if self._latest is not None:
            self._training.add(self._latest)

    def evaluating(self) -> None:
        self._die_if("in-evaluation")

    def at_boundary(self) -> None:
        if self._state.step > self._written:
            self._write_step()

    def past_boundary(self) -> None:
        kill = self._kill
        is_saved = self._saver.is_writing or self._saver.newest_step == self._state.step
        if is_saved and kill is not None and kill.moment == "in-save" and self._state.step >= kill.step:
            self._wait_for_writing()
            self._die_if("in-save")
        # The next step finds the disk as this one left it: what is on it at a death is no accident.
        self._saver.wait()
        self._die_if("after-step")
        self._end_if_complete()

    def at_end_of_body(self) -> None:
        self._die_if("end-of-epoch")
        if self._awaited is None:
            self._awaited = "epoch"

    def close(self) -> None:
        # A cycle would keep the workers of loaders alive until a collection.
        self._state.position.watch = None
        if self._watch is not None:
            self._watch.close()
        if self._awaited == "began" and self._first_line is not None:
            self._begin()
        os.close(self._record)

    def _watched(self, batches: Iterator[Any], slot: int, is_inner: bool) -> Iterator[Any]:
        """Yield `batches` of the loader in `slot`."""
        try:
            while True:
                if self._awaited is not None and not is_inner:
                    self.about_to_begin()
                    self._begin()
                    self._end_if_complete()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                self._note_batch(batch)
                if is_inner or (self._training and slot not in self._training):
                    self._die_if("in-evaluation")
                if not is_inner:
                    self._latest = slot
                # While it waits, this frame must not keep the batch alive.
                handed = [batch]
                del batch
                yield handed.pop()
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _begin(self) -> None:
        """Write the line that comes before the first step of the process, or of an epoch."""
        if self._first_line is not None:
            self._write(self._first_line)
            # What was evaluated between two epochs is not of the step that follows.
            self._batches = None
        self._awaited = self._first_line = None

    def _note_batch(self, batch: object) -> None:
        if self._batches is None:
            self._batches = hasher(ALGORITHM)
        self._batches.update(content_digest(batch))

    def _note_gradients(self, gradients: dict[str, Any]) -> None:
        if self._gradients is None:
            self._gradients = hasher(ALGORITHM)
        self._gradients.update(content_digest(gradients))

    def _before_optimizer(self, gradients: dict[str, Any]) -> None:
        self._begin()
        self._die_if("in-step")
        self._note_gradients(gradients)

    def _watch_gradients(self) -> Any:
        if "torch" not in sys.modules:
            return None
        from unbroken.frameworks.torch.gradient_watch import GradientWatch

        return GradientWatch(self._before_optimizer)

    def _write_step(self) -> None:
        self._write(self._line("step", []))
        self._written = self._state.step
        self._batches = self._gradients = None

    def _line(self, kind: Literal["began", "step", "epoch"], notes: list[str]) -> Line:
        taken = self._take()
        step = self._state.step
        if self._plan.values is not None and step in self._plan.dump_at and not self._puts_back():
            dump(self._values(kind), step, taken)
        components = digests(piece for one in taken for piece in one.components)
        if self._found is not None:
            notes = [*notes, *self._found.notes[self._told :]]
            self._told = len(self._found.notes)
        rates = learning_rates(one.state for one in taken[: len(self._parts)])
        return Line(
            kind=kind,
            step=step,
            batch=None if self._batches is None else self._batches.hexdigest(),
            gradients=None if self._gradients is None else self._gradients.hexdigest(),
            metrics={name: value.hex() for name, value in plain_metrics(self._state.metrics).items()},
            rates=tuple(rate.hex() for rate in rates),
            components=components,
            is_between_epochs=kind == "began" and self._is_between_epochs,
            notes=tuple(notes),
        )

    def _take(self) -> list[Taken]:
        position = self._state.position
        taken = take_parts(self._parts, inside_step=position.is_inside_step())
        if self._found is not None:
            taken += self._found.take(taken)
        return taken

    def _values(self, kind: str) -> Path:
        assert self._plan.values is not None, "asked only where values are"
        directory = Path(self._plan.values)
        is_between = kind == "epoch" or (kind == "began" and self._is_between_epochs)
        return directory / BETWEEN_EPOCHS if is_between else directory

    def _puts_back(self) -> bool:
        return bool(self._plan.put_back) and self._awaited == "began"

    def _put_back(self) -> list[str]:
        plan, step = self._plan, self._state.step
        if not plan.put_back or self._found is None:
            return []
        if plan.values is None or plan.put_back_at != step:
            reason = f"the run went on from step {step}, not from {plan.put_back_at}"
            return [f"cannot put back {name}: {reason}" for name in plan.put_back]
        values = PutBack(self._values("began"), step, plan.put_back)
        return values.into(self._parts, self._take(), self._found)

    def _write(self, line: Line) -> None:
        os.write(self._record, encode_line(line))

    def _end_if_complete(self) -> None:
        if self._state.step >= self._plan.steps:
            raise SystemExit(0)

    def _wait_for_writing(self) -> None:
        """Return when the checkpoint is being written; a quick writer may have ended by then."""
        place = Path(self._plan.directory) / layout.CHECKPOINTS
        while self._saver.is_writing and not any(place.glob(f"{layout.STAGING_PREFIX}*")):
            time.sleep(_LOOK_SECONDS)

    def _die_if(self, moment: Moment) -> None:
        kill = self._kill
        if kill is None or kill.moment != moment or self._state.step < kill.step:
            return
        self._kill = None
        self._begin()
        self._write(Line(kind="killed", step=self._state.step))
        os.kill(os.getpid(), getattr(signal, kill.signal))
