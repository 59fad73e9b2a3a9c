"""`unbroken why`: why an attempt ended, what was decided, and what to do next."""

from __future__ import annotations

import shlex
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.target import find_run
from unbroken.errors import StorageError
from unbroken.rundir.identity import read_run
from unbroken.supervisor.judging.certificate import certificate_in_words, read_certificate
from unbroken.supervisor.judging.explanation import Told, choose, tell
from unbroken.supervisor.plan import read_plan
from unbroken.supervisor.states import Snapshot, read_state

_COLOURS = {"completed": "green", "stopped": "yellow"}
_MARGIN = 12
_NEXT = {
    "held": "when that is mended: `unbroken release {0}`",
    "stopped": "to go on: `{1}`",
    "lost": "to go on: `unbroken revive {0}`",
    "done": "nothing: training came to its end",
    "unsupervised": "to keep it going: `unbroken run` with its command, which goes on from here",
}
_LIVE = "nothing: it is kept going; `unbroken logs -f {0}` shows its output"
_BRIEF = 90


@click.command()
@click.argument("target", required=False)
@click.option("--attempt", type=click.IntRange(min=1), help="That attempt instead of the last that ended.")
@click.option("--json", "as_json", is_flag=True, help="JSON: an object.")
def why(target: str | None, attempt: int | None, as_json: bool) -> None:
    """Say why the run TARGET, a name or a directory, ended or was restarted, and what follows.

    \b
    Fields of --json (null where there is nothing to say; times are seconds since 1970):
      name, directory, state, reason      the run, as in `unbroken status`
      attempt          the attempt that is explained, an object (below), or null
      before           those before it, in order: an array of such objects
      next             what to do now, an array of lines

    \b
    Fields of an attempt:
      attempt          its number
      is_running       true while it runs: then there is no verdict yet
      outcome          completed, vanished, stopped, failed, refused, signalled, killed, not-started,
                       hung, lost, unkillable
      cause            memory, device-memory, shared-memory, disk-full, read-only, storage, network,
                       collective, device, not-finite, preemption, reboot, or empty
      confidence       certain, likely, unknown
      evidence         what that rests on, an array of lines
      kind, message, frame                the exception; without one, kind is the signal or exit code
      hint, is_saved, step, started, ended, lived_seconds
      decision         what followed: action (restart, roll-back, hold, done, stopped, hand-over),
                       reason, hint, next_start, exit_code
      resume_certificate                  of the attempt that is explained, if it was resumed:
        checkpoint     where it went on from
        digests_equal  true if all that was restored has the digests that were saved
        not_exact      the parts that are otherwise than in the checkpoint, as the script wants it
        repeated_steps, equal_steps       that an earlier attempt had done, and those with an equal loss, bit
                                          for bit; without a loss, with all metrics equal
        first_difference                  step, metric, here, there (before), or null
        largest_relative_difference       of the losses, or, without one, of all metrics; numbers that are
                                          not finite are the texts "nan", "inf" and "-inf", here as well
        others_that_differ                metrics that were not equal where the loss was compared
    """
    directory = find_run(target)
    identity, state = read_run(directory), read_state(directory)
    told = tell(directory, state)
    chosen = choose(told, attempt, directory)
    name = identity.name if identity is not None else None
    before = [one for one in told if chosen is not None and one.attempt < chosen.attempt]
    steps = _next(directory, name, state, chosen)
    certificate = read_certificate(directory, chosen.attempt) if chosen is not None else None
    if as_json:
        output.data_json(
            {
                "name": name,
                "directory": str(directory),
                "state": state.state if state is not None else "unsupervised",
                "reason": (state.reason or None) if state is not None else None,
                "attempt": {**chosen.to_json(), "resume_certificate": certificate} if chosen else None,
                "before": [one.to_json() for one in before],
                "next": steps,
            }
        )
        return
    _row("run", f"{name or directory.name}, in {directory}")
    _row("state", _state(state, told))
    if chosen is not None:
        _show(chosen)
    if certificate is not None:
        _row("resumed", certificate_in_words(certificate))
    for number, line in enumerate(steps):
        _row("next" if number == 0 else "", line)
    if before:
        output.data("\nattempts before")
        for one in before:
            output.data(f"{one.attempt:>4}  {_line(one)}")


def _state(state: Snapshot | None, told: list[Told]) -> str:
    running = [one for one in told if one.is_running]
    if state is None:
        return "unsupervised" + (f"; attempt {running[-1].attempt} runs" if running else "")
    number = f", attempt {state.attempt}" if state.is_live and state.attempt is not None else ""
    since = f" for {output.duration(time.time() - state.changed_seconds)}"
    return f"{state.state}{number}{since}" + (f": {state.reason}" if state.reason else "")


def _show(told: Told) -> None:
    label = f"attempt {told.attempt}"
    verdict = told.verdict
    if verdict is None:
        _row(label, f"it runs, at step {told.step}" if told.step is not None else "it runs")
        return
    outcome = output.painted(verdict.outcome, _COLOURS.get(verdict.outcome, "red"), sys.stdout)
    cause = f", {verdict.cause}" if verdict.cause else ""
    _row(label, f"{outcome}{cause} ({verdict.confidence}){_where(told)}")
    if verdict.message or verdict.frame:
        what = f"{verdict.kind}: {verdict.message}" if verdict.kind and verdict.message else verdict.kind
        _row("", " in ".join(part for part in (what or verdict.message, verdict.frame) if part))
    for number, line in enumerate(verdict.evidence):
        _row("evidence" if number == 0 else "", line)
    if told.decision is not None:
        _row("decided", _decided(told.decision))


def _next(directory: Path, name: str | None, state: Snapshot | None, told: Told | None) -> list[str]:
    known = name if name is not None and state is not None else str(directory)
    command = _start_again(directory, state) if state is not None else ""
    pattern = _LIVE if state is not None and state.is_live else _NEXT["unsupervised"]
    if state is not None and not state.is_live:
        pattern = _NEXT[state.state]
    hints = [state.hint if state is not None else "", told.verdict.hint if told and told.verdict else ""]
    # The hint of a run that came to its end well is of an attempt that failed on the way.
    is_open = state is None or state.state != "done"
    return [*dict.fromkeys(hint for hint in hints if hint and is_open), pattern.format(known, command)]


def _start_again(directory: Path, state: Snapshot) -> str:
    """Return the line that starts the run again, wherever it is typed."""
    run = shlex.join(["unbroken", "run", "--run-dir", str(directory), "--", *state.command])
    with suppress(StorageError):
        plan = read_plan(directory)
        if plan is not None and plan.working_directory:
            return f"{shlex.join(['cd', plan.working_directory])} && {run}"
    return run


def _line(told: Told) -> str:
    verdict = told.verdict
    if verdict is None:
        return "it runs"
    cause = f", {verdict.cause}" if verdict.cause else ""
    why = verdict.message or (verdict.evidence[0] if verdict.evidence else "")
    kind = f"{verdict.kind}: " if verdict.kind and verdict.message else ""
    followed = f"; then {told.decision['action']}" if told.decision is not None else ""
    said = textwrap.shorten(f"{kind}{why}", _BRIEF, placeholder="...")
    return f"{verdict.outcome}{cause}{_where(told)}: {said}{followed}"


def _where(told: Told) -> str:
    step = f" at step {told.step}" if told.step is not None else ""
    return step + (f" after {output.duration(told.lived_seconds)}" if told.lived_seconds is not None else "")


def _decided(decision: dict[str, object]) -> str:
    code = decision.get("exit_code")
    ended = f" (exit code {code})" if code is not None else ""
    return f"{decision['action']}{ended}: {decision['reason']}"


def _row(label: str, text: str) -> None:
    output.data(f"{label:<{_MARGIN}}" + text.replace("\n", "\n" + " " * _MARGIN))
