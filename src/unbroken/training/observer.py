"""Watches a script that has no run, from outside: writes what it has at each step, and dies as planned.

A step begins where a trained module is called first, or else where an optimizer is about to step. What is
fetched and skipped before that belongs to no step, so that a script may skip the batches of an epoch that
it has trained on already.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from unbroken.checkpoint.digest import ALGORITHM, hasher
from unbroken.checkpoint.highlights import learning_rates
from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import (
    Line,
    Moment,
    Observed,
    Plan,
    encode_line,
    planned_observation,
    read_record,
)
from unbroken.training.observed_alignment import aligned
from unbroken.training.observed_files import check_save, guard
from unbroken.training.observed_parts import NoLoaders, observed_parts, take
from unbroken.training.observed_passes import Passes
from unbroken.training.observed_torch import Optimizers, watch
from unbroken.training.part import Part
from unbroken.training.rehearsal_components import digests
from unbroken.training.rehearsal_content import content_digest
from unbroken.training.rehearsal_objects import FoundObjects, Taken
from unbroken.training.rehearsal_values import PutBack, dump

_LOSS = "loss"


def observe() -> None:
    """Observe this process by its plan; do nothing if it has none."""
    wanted = planned_observation()
    if wanted is None:
        return
    plan, observed = wanted
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise UsageError(
            f"WORLD_SIZE: expected one process to observe, found {world_size}",
            hint="start the script without its launcher: drill --observe is for one process",
        )
    guard(observed.original, [plan.directory, str(Path(plan.record).parent), plan.values or plan.directory])
    optimizers = Optimizers()
    watch(Observer(plan, observed, optimizers), optimizers)


class Observer:
    """Follows `plan` in the first process that trains; any other that has the plan is left alone."""

    def __init__(self, plan: Plan, observed: Observed, optimizers: Optimizers) -> None:
        self._plan = plan
        self._observed = observed
        self._optimizers = optimizers
        self._kill = plan.kill
        self._passes = Passes(plan)
        self._step = 0
        self._record: int | None = None
        self._is_elsewhere = False
        self._is_in_step = False
        self._is_complete = False
        self._is_late = False
        self._is_unfed = False
        self._parts: list[Part] = []
        self._found: FoundObjects | None = None
        self._notes: list[str] = []
        self._batches: Any = None
        self._gradients: Any = None
        self._losses: list[float] = []

    def pass_begins(self) -> Any:
        return self._passes.begin(has_begun=self._record is not None, step=self._step)

    def batches_of(self, batches: Any, begun: Any) -> None:
        self._passes.begun(batches, begun)

    def fetching(self) -> None:
        self._between_steps()

    def fetched(self, batches: Any, batch: Any) -> None:
        self._passes.fetched(batches, batch)

    def exhausted(self, batches: Any) -> None:
        if self._passes.is_of_training(batches):
            self._die_if("end-of-epoch")
        self._passes.exhausted(batches)

    def calling(self, inputs: Any, *, is_graded: bool) -> None:
        if is_graded:
            self._begin_step(inputs)
        else:
            self._die_if("in-evaluation")
            self._passes.forget()

    def about_to_step(self) -> None:
        self._begin_step(None)
        self._die_if("in-step")

    def stepped(self, optimizer: Any) -> None:
        if self._is_elsewhere:
            return
        # Not before the step: with a closure, what lies there then is left over, and the step clears it.
        self._note_gradients(optimizer)
        self._note_late(optimizer)
        if self._is_complete:
            # The script has caught what was to end it.
            os._exit(0)
        self._step += 1
        self._note_unfed()
        self._write(self._line("step", self._take()))
        self._batches = self._gradients = None
        self._losses.clear()
        self._is_in_step = False
        if self._step >= self._plan.steps:
            self._is_complete = True
            raise SystemExit(0)

    def lost(self, loss: float) -> None:
        self._losses.append(loss)

    def dies_in_save(self) -> bool:
        kill = self._kill
        return kill is not None and kill.signal == "SIGKILL" and self._is_due("in-save")

    def die_in_save(self) -> None:
        self._die_if("in-save")

    def saving(self, path: str | None) -> None:
        if path is not None:
            check_save(path, self._plan.directory)
        # A script that obeys goes on with the save; one that does not has not begun it.
        if not self.dies_in_save():
            self._die_if("in-save")

    def saved(self) -> None:
        if self._record is not None:
            self._write(Line(kind="saved", step=self._step))

    def _between_steps(self) -> None:
        if not self._is_in_step:
            self._die_if("after-step")

    def _begin_step(self, inputs: Any) -> None:
        """Take note of the batch; at the first call in a step, of the state that it begins with."""
        if self._is_elsewhere:
            return
        is_first = not self._is_in_step
        if is_first:
            self._between_steps()
        self._note_batches(inputs, is_first=is_first)
        if not is_first:
            return
        self._is_in_step = True
        if self._record is None:
            self._begin()
        elif self._observed.reference is None and self._plan.kill is None:
            self._write(self._dumped("ready"))

    def _begin(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._record = os.open(self._plan.record, flags, 0o644)
        except FileExistsError:
            self._is_elsewhere = True
            return
        self._parts, notes = observed_parts(self._optimizers)
        self._found = FoundObjects(self._parts, NoLoaders())
        self._notes = notes
        line = self._dumped("began")
        if self._observed.reference is not None:
            line = self._resumed(line, list(read_record(Path(self._observed.reference))))
        self._write(line)

    def _resumed(self, line: Line, reference: Sequence[Line]) -> Line:
        self._step, note = aligned(reference, line, self._optimizers.steps())
        notes = self._put_back() + ([] if note is None else [f"resumed from step {self._step}: {note}"])
        return msgspec.structs.replace(line, step=self._step, notes=(*line.notes, *notes))

    def _put_back(self) -> list[str]:
        plan = self._plan
        if not plan.put_back or plan.values is None or self._found is None:
            return []
        if plan.put_back_at != self._step:
            reason = f"the script went on from step {self._step}, not from {plan.put_back_at}"
            return [f"cannot put back {name}: {reason}" for name in plan.put_back]
        values = PutBack(Path(plan.values), self._step, plan.put_back)
        return values.into(self._parts, take(self._parts) + self._found.take([]), self._found)

    def _dumped(self, kind: Literal["began", "ready"]) -> Line:
        """Return the line of a beginning step; write the values, where they are wanted."""
        plan, taken = self._plan, self._take()
        if plan.values is not None and self._step in plan.dump_at and not plan.put_back:
            dump(Path(plan.values), self._step, taken)
            self._passes.dump(self._step)
        return self._line(kind, taken)

    def _take(self) -> list[Taken]:
        taken = take(self._parts)
        return taken + self._found.take(taken) if self._found is not None else taken

    def _line(self, kind: Literal["began", "ready", "step"], taken: Sequence[Taken]) -> Line:
        notes, self._notes = self._notes, []
        if self._found is not None:
            # Of what cannot be encoded it is known once it has been tried.
            notes += self._found.notes
            self._found.notes.clear()
        rates = learning_rates(one.state for one in taken[: len(self._parts)])
        return Line(
            kind=kind,
            step=self._step,
            batch=None if self._batches is None else self._batches.hexdigest(),
            gradients=None if self._gradients is None else self._gradients.hexdigest(),
            metrics={_LOSS: math.fsum(self._losses).hex()} if self._losses and kind == "step" else {},
            rates=tuple(rate.hex() for rate in rates),
            components=digests(piece for one in taken for piece in one.components),
            notes=tuple(notes),
        )

    def _note_batches(self, inputs: Any, *, is_first: bool) -> None:
        fetched = self._passes.taken()
        # Where no loader is, what goes into the model is the batch.
        if not fetched and is_first and inputs is not None and not self._passes.has_loaders:
            fetched = [inputs]
        for batch in fetched:
            if self._batches is None:
                self._batches = hasher(ALGORITHM)
            self._batches.update(content_digest(batch))

    def _note_gradients(self, optimizer: Any) -> None:
        if self._gradients is None:
            self._gradients = hasher(ALGORITHM)
        for group in optimizer.param_groups:
            self._gradients.update(content_digest([parameter.grad for parameter in group["params"]]))

    def _note_late(self, optimizer: Any) -> None:
        if not self._is_late and all(part.value is not optimizer for part in self._parts):
            self._is_late = True
            self._notes.append(
                "not looked at: an optimizer that was made after the first step, and what it trains"
            )

    def _note_unfed(self) -> None:
        if self._batches is None and self._passes.is_batch_forgotten() and not self._is_unfed:
            self._is_unfed = True
            self._notes.append(
                f"not looked at: the batch of step {self._step}: "
                "a trained module was called without gradients first, so it counts as evaluated"
            )

    def _write(self, line: Line) -> None:
        assert self._record is not None, "the first line opens it"
        os.write(self._record, encode_line(line))

    def _is_due(self, moment: Moment) -> bool:
        kill = self._kill
        return (
            self._record is not None
            and kill is not None
            and kill.moment == moment
            and self._step >= kill.step
        )

    def _die_if(self, moment: Moment) -> None:
        if self._kill is None or not self._is_due(moment):
            return
        number, self._kill = getattr(signal, self._kill.signal), None
        self._write(Line(kind="killed", step=self._step))
        os.kill(os.getpid(), number)
