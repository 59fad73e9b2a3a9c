"""Why training went wrong: the steps that led there are done once more, from the checkpoint before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import StorageError, UnbrokenError, UsageError
from unbroken.rundir.journal import number
from unbroken.rundir.tell import tell
from unbroken.training import families
from unbroken.training.arguments import numbers
from unbroken.training.attempt import Attempt
from unbroken.training.consumption import place_of
from unbroken.training.full_disk import FullDisk
from unbroken.training.health.findings import Finding
from unbroken.training.health.judging_replays import Comparison, compare, samples_in_words, verdict
from unbroken.training.health.looking import Sight
from unbroken.training.health.policy import Health
from unbroken.training.health.repeated import read_recorded
from unbroken.training.passes import Pass
from unbroken.training.whole_state import WholeState

# Farther back it would take long, and would tell no more.
MOST_STEPS = 200


@dataclass(slots=True)
class _Course:
    """What came of the steps that were done again. `ended_by` says why the last one was not reached.

    `is_left_out`: no optimizer stepped in the bad one, and in all before it some did.
    """

    losses: dict[int, float] = field(default_factory=dict)
    samples: list[Any] | None = None
    bad_samples: list[Any] = field(default_factory=list)
    output: Any = None
    bad_tensors: list[str] = field(default_factory=list)
    is_left_out: bool = False
    ended_by: str = ""


@dataclass(slots=True, kw_only=True)
class Replaying:
    """Does the steps before a finding again, by the step function of `policy`, and reports what that shows.

    `beat` is called before each step, and none is begun once `is_asked_to_stop`. `take_stepped` tells whether
    an optimizer has stepped since it was called last; it is called last of all, for these are no steps of
    training.
    """

    policy: Health
    attempt: Attempt
    state: WholeState
    full_disk: FullDisk
    beat: Callable[[], None]
    is_asked_to_stop: Callable[[], bool]
    take_stepped: Callable[[], bool]

    def wants(self, finding: Finding, checkpoint: Checkpoint, found: Pass) -> bool:
        """Tell whether the steps of the pass `found` since `checkpoint` are to be done again.

        To be asked before the run goes back. Says so if they cannot be.
        """
        begin, bad_step = checkpoint.step, _bad_step(finding)
        if self.policy.replay is None or bad_step <= begin:
            return False
        count = bad_step - begin
        if count > MOST_STEPS:
            tell(f"not replayed: {count} steps since {checkpoint.name}, at most {MOST_STEPS} are done again")
            return False
        odd = next((step for step in range(begin + 1, bad_step + 1) if self._batches(step, found) != 1), None)
        if odd is not None:
            tell(
                f"not replayed: step {odd} took {self._batches(odd, found)} batches of this loop; what "
                "replay= was given does a step with one batch"
            )
        return odd is None

    def _batches(self, step: int, found: Pass) -> int:
        windows = self.state.position.consumption.windows(step, step)
        return sum(one.last - one.first + 1 for one in windows if place_of(one) == found.place)

    def of(
        self,
        finding: Finding,
        checkpoint: Checkpoint,
        batches: Iterator[Any],
        newest_samples: Callable[[], list[Any] | None],
    ) -> None:
        """Replay up to the bad step of `finding`, and leave the state wherever that leads.

        The state is that of `checkpoint`, and `batches` are those that followed it, the same as then.
        `newest_samples` gives the indices in the last one, if they are known.
        """
        course = _Course()
        position = self.state.position
        position.is_replayed = True
        try:
            self._go(course, _bad_step(finding), batches, newest_samples, looks=finding.kind == "non-finite")
        finally:
            position.is_replayed = False
            self.take_stepped()
        self._report(finding, checkpoint, course)

    def _go(
        self,
        course: _Course,
        bad_step: int,
        batches: Iterator[Any],
        newest_samples: Callable[[], list[Any] | None],
        *,
        looks: bool,
    ) -> None:
        sight = Sight(self.state.parts) if looks else None
        has_always_stepped = True
        while (left := bad_step - self.state.step) > 0 and not course.ended_by:
            if self.is_asked_to_stop():
                course.ended_by = "the run was asked to stop"
                return
            self.beat()
            got = self._batch(course, batches)
            if not got:
                return
            batch = got.pop()
            if left == 1:
                course.samples = newest_samples()
                course.bad_samples = _bad_samples(batch, course.samples) if looks else []
            around = sight.of_step(is_bad=left == 1) if sight is not None and left <= 2 else nullcontext()
            self.take_stepped()
            course.ended_by = self._step(course, batch, around)
            has_stepped = self.take_stepped()
            if left == 1:
                course.is_left_out = has_always_stepped and not has_stepped
            has_always_stepped = has_always_stepped and has_stepped
            if sight is not None and left == 1:
                course.output, course.bad_tensors = sight.output, sight.bad_tensors()

    def _batch(self, course: _Course, batches: Iterator[Any]) -> list[Any]:
        """Return the next batch, or nothing and note why."""
        try:
            return [next(batches)]
        except StopIteration:
            course.ended_by = "the data ended"
        except Exception as error:  # noqa: BLE001 - of the user's data; whoever goes on meets it again
            course.ended_by = f"the batch of step {self.state.step + 1} raised {_raised(error)}"
        return []

    def _step(self, course: _Course, batch: Any, around: AbstractContextManager[Any]) -> str:
        """Do one step; return what it raised."""
        assert self.policy.replay is not None
        try:
            with around:
                loss = self.policy.replay(batch)
        except Exception as error:  # noqa: BLE001 - of the user's function: it may well refuse the bad batch
            return f"step {self.state.step + 1} raised {_raised(error)}"
        # Where rates are lowered, say, they are so by the number of the step.
        self.state.step += 1
        try:
            course.losses[self.state.step] = float(numbers({"loss": loss})["loss"])
        except UsageError as error:
            return f"what replay= returned for step {self.state.step} is no loss: {error.message}"
        return ""

    def _recorded(self, begin: int, last: int) -> dict[int, float]:
        """Return the journaled losses of the steps from the one after `begin` to `last`, those that count."""
        try:
            found = read_recorded(self.attempt.run_directory, before=self.attempt.number + 1, step=begin)
        except StorageError as error:
            tell(f"the replay is compared with nothing: {error.message}")
            return {}
        losses = {
            step: number(metrics.get(self.policy.loss)) for step, metrics in found.items() if step <= last
        }
        return {step: loss for step, loss in losses.items() if loss is not None}

    def _compared(self, finding: Finding, checkpoint: Checkpoint, course: _Course) -> Comparison:
        bad_step = _bad_step(finding)
        recorded = self._recorded(checkpoint.step, bad_step)
        is_bad_again = None
        if finding.kind == "non-finite" and math.isfinite(recorded.get(bad_step, 0.0)):
            # A gradient was bad, and the loss was well or is not known. Many a loop leaves such a step out.
            is_loss_bad = not math.isfinite(course.losses.get(bad_step, 0.0))
            is_bad_again = bool(course.bad_tensors) or course.is_left_out or is_loss_bad
        return compare(
            bad_step,
            recorded,
            course.losses,
            metric=self.policy.loss,
            is_bad_again=is_bad_again,
            limit=finding.limit,
            may_vary=families.may_vary(),
        )

    def _report(self, finding: Finding, checkpoint: Checkpoint, course: _Course) -> None:
        output, found = course.output, self._compared(finding, checkpoint, course)
        text, hint = verdict(found, checkpoint.name, may_vary=families.may_vary())
        if course.ended_by:
            text, hint = f"the replay from {checkpoint.name} ended early: {course.ended_by}", ""
        fields = {
            "checkpoint": checkpoint.name,
            "found_step": finding.step,
            **asdict(found),
            "samples": course.samples,
            "bad_samples": course.bad_samples,
            "module": None if output is None else output.module,
            "are_inputs_finite": None if output is None else output.are_inputs_finite,
            "are_weights_finite": None if output is None else output.are_weights_finite,
            "bad_tensors": course.bad_tensors,
            "ended_by": course.ended_by,
            "text": text,
        }
        journal, details = self.attempt.journal, ". ".join([text, *_details(course)])
        self.full_disk.write(
            lambda: journal.append("replayed", step=checkpoint.step, **fields), "the journal"
        )
        self.full_disk.write(lambda: self.attempt.alarm("replay", details, hint), "an alarm")


def _bad_step(finding: Finding) -> int:
    # What diverges does so little by little: its end is as good as any step of it to look at.
    return finding.step if finding.kind == "divergence" else finding.first_step


def _raised(error: Exception) -> str:
    text = error.message if isinstance(error, UnbrokenError) else str(error)
    return f"{type(error).__name__}: {text}"


def _bad_samples(batch: Any, samples: list[Any] | None) -> list[Any]:
    """Return those of the `samples` in a batch whose numbers are not finite."""
    return [samples[row] for row in families.bad_rows(batch, len(samples))] if samples else []


def _details(course: _Course) -> list[str]:
    found = []
    if course.output is not None:
        found.append(f"The first output that is not finite is that of {_in_words(course.output)}")
    elif course.bad_tensors:
        found.append(
            f"The output of every module is well; not finite: {samples_in_words(course.bad_tensors)}"
        )
    elif course.is_left_out:
        found.append("No optimizer stepped")
    if course.bad_samples:
        found.append(f"Not finite in the batch: samples {samples_in_words(course.bad_samples)}")
    elif course.samples:
        found.append(f"The batch: samples {samples_in_words(course.samples)}")
    return found


def _in_words(output: Any) -> str:
    name = f"{output.module} ({output.class_name})"
    if not output.are_inputs_finite:
        return f"{name}, whose input was not finite already"
    return f"{name}, from finite inputs and " + ("weights" if output.are_weights_finite else "bad weights")
