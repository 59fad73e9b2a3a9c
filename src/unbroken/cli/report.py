"""`unbroken report`: one HTML page about a run, to look at and to send on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unbroken.cli import output, pages
from unbroken.cli.describe import describe_leniently
from unbroken.cli.target import find_run
from unbroken.errors import UnbrokenError
from unbroken.rundir import layout

if TYPE_CHECKING:
    from unbroken.dashboard.course import Course
    from unbroken.dashboard.report import Ending, Mark, Report, SavedState
    from unbroken.rundir.rollbacks import Rollback
    from unbroken.supervisor.judging.explanation import Told

_MOST_MARKS = 200
_STDOUT = "-"
_CERTIFICATE = "resume-certificate"


@click.command()
@click.argument("target", required=False)
@click.option(
    "-o", "--output", "path", help="Where to write the page; - is stdout. [default: NAME-report.html]"
)
@click.option("--json", "as_json", is_flag=True, help="JSON: an object, and no page.")
def report(target: str | None, path: str | None, as_json: bool) -> None:
    """Write one HTML page about the run TARGET, a name or a directory, and print the page's path.

    It shows what counts of all attempts as one curve, with checkpoints, restarts, roll-backs and alarms, the
    verdicts, and where the time went. It needs no network, and may be sent on as it is. An older page of the
    same name is replaced.

    \b
    Fields of --json (null where there is nothing to say; times are seconds since 1970):
      name, directory, made, state, reason, hint, step, goal_step
      attempts, restarts, rollbacks       how many there were
      save_interval    why it saves as often as it does
      seconds_per_step                    the median
      metrics          by name: last, low, high (step and value; "nan", "inf" or "-inf" may be last),
                       points (thinned out, with all peaks), not_finite (steps),
                       superseded (curves that were done again or undone)
      step_seconds     likewise, of the time that a step took
      other_metrics    names of which no curve was made
      marks            what happened: kind (restart, roll-back, alarm, skipped, not-finite, end), title,
                       time, step, back_to, attempt, words; and how many earlier_marks are left out
      spent            where the time went: what, seconds, is_lost, words
      checkpoints      name, step, size_bytes, created, metrics, note, is_set_aside
      problems         what could not be read
    """
    directory = find_run(target)
    found = read_report(directory)
    if as_json:
        output.data_json(found.to_json())
        return
    from unbroken.dashboard.page import page

    text = page(found)
    if path == _STDOUT:
        output.data(text)
        return
    place = Path(path) if path is not None else Path(f"{directory.name}-report.html")
    pages.write(place, text)
    output.data(str(place))


def read_report(directory: Path) -> Report:
    """Return the report of the run in `directory`. Raises StorageError if its journals cannot be read."""
    from unbroken.dashboard.course import course_of
    from unbroken.dashboard.marks import KEPT
    from unbroken.dashboard.report import Report
    from unbroken.dashboard.spent import spent_on
    from unbroken.rundir.effective import History

    problems: list[str] = []
    run = describe_leniently(directory.name, directory)
    history = History(directory)
    course = course_of(history, saved=history.saved, keep=(*KEPT, _CERTIFICATE))
    supervised = _supervised(directory, problems)
    endings = _endings(directory, problems, _certificates(course))
    rollbacks = _rollbacks(directory, problems)
    marks = _marks(course, endings, rollbacks, supervised)
    undone = [one for one in course.kept if one.event["kind"] == "rolled-back"]
    return Report(
        name=run["name"] or directory.name,
        directory=str(directory),
        made=time.time(),
        state=run["state"],
        reason=run["reason"] or _newest(endings),
        hint=run["hint"] or "",
        # Of an attempt that has not got its state yet, the heartbeat says 0.
        step=course.last_step if course.last_step is not None else run["step"],
        goal_step=run["goal_step"],
        attempts=len(endings),
        restarts=max(0, len(endings) - 1),
        rollbacks=max(len(rollbacks), len(undone)),
        save_interval=_save_interval(directory),
        course=course,
        marks=tuple(marks[-_MOST_MARKS:]),
        earlier_marks=max(0, len(marks) - _MOST_MARKS),
        spent=tuple(
            spent_on(course, endings=endings, supervised=supervised, waited=_waited(directory, endings))
        ),
        checkpoints=tuple(_checkpoints(directory, problems)),
        problems=tuple(problems),
    )


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Note what cannot be read: a report of a run that is not well is asked for all the more."""
    try:
        yield
    except UnbrokenError as error:
        problems.append(error.message)


def _supervised(directory: Path, problems: list[str]) -> list[dict[str, Any]]:
    from unbroken.rundir.journal import read_events

    wanted = ("alarm", "run-started", "run-ended")
    found: list[dict[str, Any]] = []
    with _noting(problems):
        found += [event for event in read_events(directory / layout.JOURNAL_FILE) if event["kind"] in wanted]
    return found


def _rollbacks(directory: Path, problems: list[str]) -> tuple[Rollback, ...]:
    from unbroken.rundir.rollbacks import read_rollbacks

    found: list[Rollback] = []
    with _noting(problems):
        found += read_rollbacks(directory)
    return tuple(found)


def _newest(endings: list[Ending]) -> str:
    if not endings:
        return "no attempt yet"
    newest = endings[-1]
    return (
        f"attempt {newest.attempt} {newest.outcome}" if newest.outcome else f"attempt {newest.attempt} runs"
    )


def _certificates(course: Course) -> dict[int, str]:
    from unbroken.supervisor.judging.certificate import certificate_in_words

    kept = [one for one in course.kept if one.event["kind"] == _CERTIFICATE]
    return {one.attempt: certificate_in_words(one.event) for one in kept}


def _endings(directory: Path, problems: list[str], resumed: dict[int, str]) -> list[Ending]:
    from unbroken.supervisor.judging.explanation import tell
    from unbroken.supervisor.states import read_state

    state = None
    with _noting(problems):
        state = read_state(directory)
    return [_ending(told, resumed.get(told.attempt, "")) for told in tell(directory, state)]


def _ending(told: Told, resumed: str) -> Ending:
    from unbroken.dashboard.report import Ending

    verdict, decision = told.verdict, told.decision
    said = []
    if verdict is not None:
        said = [*verdict.evidence, verdict.hint]
        if not any(verdict.message in line for line in verdict.evidence):
            said.insert(0, f"{verdict.kind}: {verdict.message}" if verdict.kind else verdict.message)
    if decision is not None and decision.get("action"):
        said.append(f"then: {decision['action']}, {decision.get('reason') or 'as planned'}")
    return Ending(
        attempt=told.attempt,
        outcome=verdict.outcome if verdict is not None else "",
        cause=verdict.cause if verdict is not None else "",
        confidence=verdict.confidence if verdict is not None else "",
        words=tuple(line for line in said if line),
        step=told.step,
        started=told.started,
        ended=told.ended,
        resumed=resumed,
    )


def _waited(directory: Path, endings: list[Ending]) -> dict[int, float]:
    from unbroken.rundir.heartbeat import read_heartbeat

    found = {}
    for ending in endings:
        beat = read_heartbeat(layout.attempt_directory(directory, ending.attempt) / layout.HEARTBEAT)
        found[ending.attempt] = beat.waited_seconds if beat is not None else 0.0
    return found


def _checkpoints(directory: Path, problems: list[str]) -> list[SavedState]:
    """Return the checkpoints of a run and those in quarantine, by their steps."""
    from unbroken.dashboard.report import SavedState
    from unbroken.inspection.listing import list_checkpoints, reason_against
    from unbroken.inspection.set_aside import list_set_aside

    found: list[SavedState] = []
    with _noting(problems):
        for row in list_checkpoints(directory):
            order = layout.parse_checkpoint_name(row["name"])
            found.append(
                SavedState(
                    name=row["name"],
                    step=row["step"] if row["step"] is not None else (order[0] if order else None),
                    size_bytes=row["size_bytes"],
                    created=(row["created"] or "")[:19].replace("T", " "),
                    metrics=row["metrics"],
                    note=reason_against(row),
                )
            )
    with _noting(problems):
        for row in list_set_aside(directory):
            said = {"name": row["name"], "step": row["step"], "note": row["reason"]}
            found.append(SavedState(metrics={}, is_set_aside=True, **said))
    return sorted(found, key=lambda one: (one.step or 0, one.is_set_aside, one.name))


def _marks(
    course: Course,
    endings: Sequence[Ending],
    rollbacks: Sequence[Rollback],
    supervised: Iterable[Mapping[str, Any]],
) -> list[Mark]:
    from unbroken.dashboard.marks import KEPT, marks_of

    return marks_of(
        [one for one in course.kept if one.event["kind"] in KEPT],
        endings=endings,
        rollbacks=rollbacks,
        times=course.times,
        alarms=[event for event in supervised if event["kind"] == "alarm"],
    )


def _save_interval(directory: Path) -> str:
    from unbroken.rundir.save_interval import read_save_interval

    attempt = max(layout.attempts(directory), default=0)
    found = read_save_interval(layout.attempt_directory(directory, attempt))
    return f"saves every {output.duration(found.seconds)}: {found.reason()}" if found is not None else ""
