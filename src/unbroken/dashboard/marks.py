"""What happened to a run, in order and in words: restarts with their verdicts, roll-backs, alarms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unbroken.dashboard import words
from unbroken.dashboard.course import Times
from unbroken.dashboard.report import Ending, Mark
from unbroken.rundir.effective import Placed, step_of
from unbroken.rundir.journal import OVER, number
from unbroken.rundir.last_words import ROLL_BACK
from unbroken.rundir.rollbacks import Rollback, Window

# The kinds of events that marks are made of.
KEPT = ("began", "rolled-back", "skipped", "alarm", "not-finite")
_SHOWN_SAMPLES = 24
_SHOWN_NAMES = 6


def marks_of(
    kept: Sequence[Placed],
    *,
    endings: Sequence[Ending],
    rollbacks: Sequence[Rollback],
    times: Mapping[int, Times],
    alarms: Iterable[Mapping[str, Any]] = (),
) -> list[Mark]:
    """Return the marks of a run, oldest first.

    `kept` are events of the kinds in `KEPT`, each with a step if one is known; `endings` are of all
    attempts, `alarms` those of the supervisor.
    """
    # What happens at one time happens in this order.
    found = [*_others(kept, rollbacks), *_rolled_back(kept, rollbacks), *_restarts(kept, endings, times)]
    # What training told is in the supervisor's journal, too, if it passed it on.
    told = {one.event.get("text") for one in kept if one.event["kind"] == "alarm"}
    found += [_alarm(event, None, None) for event in alarms if event.get("text") not in told]
    if any(mark.kind == "roll-back" for mark in found):
        # It was told as an alarm, too.
        found = [mark for mark in found if mark.title != f"Alarm: {ROLL_BACK}"]
    # What has no time keeps its place behind what is before it.
    latest = 0.0
    order: list[tuple[float, int, Mark]] = []
    for mark in found:
        latest = mark.time if mark.time is not None else latest
        order.append((latest, len(order), mark))
    return [mark for _, _, mark in sorted(order)]


def _restarts(
    kept: Sequence[Placed], endings: Sequence[Ending], times: Mapping[int, Times]
) -> Iterator[Mark]:
    began = {one.attempt: one.event for one in reversed(kept) if one.event["kind"] == "began"}
    step: int | None = None
    for place, ending in enumerate(endings):
        passed = times.get(ending.attempt)
        # An attempt that did not get its state left the run where it stood.
        step = passed.reached if passed is not None else (ending.step if step is None else step)
        if not ending.outcome:
            continue
        later = endings[place + 1] if place + 1 < len(endings) else None
        left_for = passed.left_for if passed is not None else None
        # What is said of a roll-back, and the steps that it undid, stand at its own mark.
        said = [*ending.words] if left_for is None else ["it ended to be rolled back"]
        back_to = None
        if later is not None:
            event = began.get(later.attempt)
            if event is not None and left_for is None:
                back_to = step_of(event.get("step"))
            said += [_went_on(later, event, passed), later.resumed]
        cause = f", {ending.cause}" if ending.cause else ""
        sure = f" ({ending.confidence})" if ending.confidence else ""
        yield Mark(
            kind="restart" if later is not None else "end",
            title=f"Attempt {ending.attempt}: {ending.outcome}{cause}{sure}",
            time=ending.ended if ending.ended is not None else (passed.last if passed else None),
            step=step,
            back_to=back_to,
            attempt=ending.attempt,
            words=tuple(line for line in said if line),
        )
        step = step if left_for is None else left_for


def _went_on(later: Ending, event: Mapping[str, Any] | None, passed: Times | None) -> str:
    if event is None:
        return f"attempt {later.attempt} ended before it had its state"
    step, checkpoint = step_of(event.get("step")) or 0, event.get("checkpoint")
    where = f"from {checkpoint}" if checkpoint else "from the beginning"
    if passed is not None and passed.left_for is not None:
        return f"attempt {later.attempt} went on {where}"
    again = (passed.reached or 0) - step if passed is not None else 0
    lost = f"; {words.several(again, 'step')} had to be done again" if again > 0 else "; no step was lost"
    return f"attempt {later.attempt} went on {where}{lost}"


def _rolled_back(kept: Sequence[Placed], rollbacks: Sequence[Rollback]) -> Iterator[Mark]:
    """Yield a mark for each roll-back: the record of it decides, the journal says how it was done."""
    events = [one for one in kept if one.event["kind"] == "rolled-back"]
    began = [(one.attempt, one.event) for one in kept if one.event["kind"] == "began"]
    for rollback in rollbacks:
        match = next((one for one in events if _is_of(one.event, rollback)), None)
        if match is not None:
            events.remove(match)
            yield _with_record(_of_event(match), rollback, kept)
            continue
        after = next((event for attempt, event in began if attempt > rollback.attempt), {})
        step = step_of(after.get("step"))
        mark = Mark(
            kind="roll-back",
            title=_title(rollback.found_step, step),
            time=number(after.get("time")),
            step=rollback.found_step,
            back_to=step,
            attempt=rollback.attempt,
            words=(rollback.reason, *_windows(rollback.windows)),
        )
        yield _with_record(mark, rollback, kept)
    for one in events:
        yield _of_event(one)


def _is_of(event: Mapping[str, Any], rollback: Rollback) -> bool:
    found = (step_of(event.get("found_step")), step_of(event.get("trusted_step")))
    return found == (rollback.found_step, rollback.trusted_step)


def _of_event(found: Placed) -> Mark:
    event = found.event
    step, found_step = step_of(event.get("step")), step_of(event.get("found_step"))
    tainted = [str(name) for name in _listed(event.get("tainted"))]
    windows = [_window(one) for one in _listed(event.get("windows"))]
    said = [str(event.get("reason") or "")]
    if event.get("checkpoint"):
        how = "without a restart" if event.get("in_process") else "by a restart"
        said.append(f"training went back to {event['checkpoint']}, {how}")
    if tainted:
        more = f" and {len(tainted) - _SHOWN_NAMES} more" if len(tainted) > _SHOWN_NAMES else ""
        said.append(f"set aside as tainted: {', '.join(tainted[:_SHOWN_NAMES])}{more}")
    return Mark(
        kind="roll-back",
        title=_title(found_step, step),
        time=number(event.get("time")),
        step=found_step if found_step is not None else step,
        back_to=step,
        attempt=found.attempt,
        words=tuple(line for line in (*said, *windows) if line),
    )


def _with_record(mark: Mark, rollback: Rollback, kept: Sequence[Placed]) -> Mark:
    lower = rollback.lower_rate
    decider = {"resume": "decided after resumes that went wrong", "supervisor": "decided by the supervisor"}
    left_out = [one.event for one in kept if _is_left_out(one) and _is_within(one.event, [rollback])]
    said = [_samples(left_out), decider.get(rollback.decided_by, "")]
    if lower is not None:
        rates = f"the learning rates are lowered to {lower.factor:g} of theirs"
        said.append(f"{rates} until step {words.count(lower.until_step)}")
    return replace(mark, words=(*mark.words, *(line for line in said if line)))


def _title(found_step: int | None, step: int | None) -> str:
    start = f" from step {words.count(found_step)}" if found_step is not None else ""
    return f"Rolled back{start}" + (f" to step {words.count(step)}" if step is not None else "")


def _windows(windows: Iterable[Window]) -> list[str]:
    return [_batches(one.epoch, one.first, one.last) for one in windows]


def _window(value: object) -> str:
    if not isinstance(value, dict):
        return ""
    numbers = [step_of(value.get(name)) for name in ("epoch", "first", "last")]
    epoch, first, last = (one or 0 for one in numbers)
    return _batches(epoch, first, last) if None not in numbers else ""


def _batches(epoch: int, first: int, last: int) -> str:
    which = f"batch {first:,}" if first == last else f"batches {first:,} to {last:,}"
    return f"{which} of epoch {epoch:,} {'is' if first == last else 'are'} left out from now on"


def _others(kept: Sequence[Placed], rollbacks: Sequence[Rollback]) -> Iterator[Mark]:
    for one in kept:
        if one.event["kind"] == "alarm":
            yield _alarm(one.event, step_of(one.event.get("step")), one.attempt)
        elif one.event["kind"] == "not-finite":
            yield _not_finite(one)
        elif _is_left_out(one) and not _is_within(one.event, rollbacks):
            yield _skipped(one)


def _is_left_out(one: Placed) -> bool:
    return one.counts and one.event["kind"] == "skipped"


def _is_within(event: Mapping[str, Any], rollbacks: Iterable[Rollback]) -> bool:
    """Return whether a roll-back says that what `event` tells of is left out: its mark tells of it, too."""
    names = ("epoch", "pass_index", "first", "last")
    epoch, pass_index, first, last = (step_of(event.get(name)) for name in names)
    return any(
        (one.epoch, one.pass_index) == (epoch, pass_index)
        and first is not None
        and last is not None
        and one.first <= first <= last <= one.last
        for rollback in rollbacks
        for one in rollback.windows
    )


def _samples(events: Iterable[Mapping[str, Any]]) -> str:
    """Return which samples were left out; empty if nobody knows."""
    batches = [batch for event in events for batch in _listed(event.get("samples"))]
    samples = [index for batch in batches for index in _listed(batch)]
    if not samples:
        return ""
    shown = ", ".join(str(index) for index in samples[:_SHOWN_SAMPLES])
    more = f" and {len(samples) - _SHOWN_SAMPLES:,} more" if len(samples) > _SHOWN_SAMPLES else ""
    return f"left out: samples {shown}{more}"


def _alarm(event: Mapping[str, Any], step: int | None, attempt: int | None) -> Mark:
    what = event.get("what") or event.get("alarm")
    return Mark(
        kind="alarm",
        title="Over" if what == OVER else f"Alarm: {what}" if what else "Alarm",
        time=number(event.get("time")),
        step=step,
        attempt=attempt,
        words=tuple(str(line) for line in (event.get("text"), event.get("hint")) if line),
    )


def _not_finite(found: Placed) -> Mark:
    name = str(found.event.get("checkpoint") or "a checkpoint")
    return Mark(
        kind="not-finite",
        title=f"{name} is not finite",
        time=number(found.event.get("time")),
        step=step_of(found.event.get("step")),
        attempt=found.attempt,
        words=(f"it holds {found.event.get('found')}; nothing goes on from it",),
    )


def _skipped(found: Placed) -> Mark:
    event = found.event
    first, last, epoch = (step_of(event.get(name)) or 0 for name in ("first", "last", "epoch"))
    batches = last - first + 1
    said = [f"{'1 batch' if batches == 1 else f'{batches:,} batches'} of epoch {epoch:,}", _samples([event])]
    return Mark(
        kind="skipped",
        title=f"Left out: batches {first:,} to {last:,}" if batches > 1 else f"Left out: batch {first:,}",
        time=number(event.get("time")),
        step=step_of(event.get("step")),
        attempt=found.attempt,
        words=tuple(line for line in said if line),
    )


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []
