"""`unbroken logs`: what a run printed."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.collapse import MOST_ROWS
from unbroken.cli.follow import OutputFollower, output_logs, start_of_lines
from unbroken.cli.lines import OutputLine, OutputLines
from unbroken.cli.quantities import duration
from unbroken.cli.target import find_run
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.supervisor.side.output_times import TimesReader
from unbroken.supervisor.states import read_state

_LOOK_SECONDS = 0.1
_USUAL_COLUMNS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is to be shown of the run, and how."""

    directory: Path
    follow: bool
    attempt: int | None
    rank: int | None
    timestamps: bool
    tail: int | None
    since_seconds: float | None
    raw: bool
    as_json: bool

    @property
    def is_verbatim(self) -> bool:
        is_by_line = self.as_json or self.timestamps or self.tail is not None
        return self.raw and not is_by_line and self.since_seconds is None


@click.command()
@click.argument("target", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on, over all attempts, until the run ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="The attempt; otherwise the newest.")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Only what this local rank printed (started by torchrun)."
)
@click.option("--timestamps", is_flag=True, help="Show when each line was written.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--since",
    callback=duration,
    metavar="DURATION",
    help="Only lines of the last 90s, 10m, 2h or 1d, over all attempts.",
)
@click.option("--raw", is_flag=True, help="All bytes as they were written; bars are not collapsed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def logs(target: str | None, since: float | None, **options: object) -> None:
    """Show the output of the run TARGET, a name or a directory.

    A progress bar is shown once, in its last state. The time of a line is that of the supervisor's next
    look at the output, which it takes twice a second.

    With --json each line of output is an object: `attempt` (its number), `line` (without its end), `time`
    (seconds since 1970) and `rank` (null without --rank).
    """
    since_seconds = time.time() - since if since is not None else None
    wanted = _Wanted(directory=find_run(target), since_seconds=since_seconds, **options)  # type: ignore[arg-type]
    numbers = layout.attempts(wanted.directory)
    if wanted.attempt is not None and wanted.attempt not in numbers:
        raise UsageError(
            f"{wanted.directory}: expected attempt {wanted.attempt}, found {len(numbers)} attempts",
            hint="`unbroken status` shows the number of the newest",
        )
    first = wanted.attempt or _first_attempt(wanted, numbers)
    rank = _rank_there(wanted, first)
    only_one = wanted.attempt is not None or not (wanted.follow or since is not None)
    start = _start(wanted, first) if rank is None else 0
    follower = OutputFollower(wanted.directory, first, only_one=only_one, rank=rank, start=start)
    _Log(wanted, follower).show()


class _Log:
    """Shows what is wanted of the output that `follower` hands out."""

    def __init__(self, wanted: _Wanted, follower: OutputFollower) -> None:
        self._wanted = wanted
        self._follower = follower
        is_terminal = sys.stdout.isatty()
        with_colours = is_terminal and not os.environ.get("NO_COLOR") and not wanted.as_json
        self._lines = OutputLines(raw=wanted.raw, with_colours=with_colours)
        self._shows_pending = is_terminal and wanted.follow and not wanted.as_json
        self._pending = ""
        self._is_empty = True

    def show(self) -> None:
        wanted = self._wanted
        if wanted.is_verbatim:
            self._copy()
        elif wanted.tail is not None:
            last = deque(self._new(), maxlen=wanted.tail)
            if not wanted.follow:
                last.extend(self._finished())
            self._print(last)
        else:
            self._print(self._new())
        if wanted.follow:
            self._follow()
        if not wanted.is_verbatim and (wanted.follow or wanted.tail is None):
            self._print(self._finished())
        self._show_pending("")
        if self._is_empty:
            output.note("no output yet")

    def _follow(self) -> None:
        while True:
            # Looked at before reading, so that the last words of a run that ends now are not missed.
            state, is_complete = read_state(self._wanted.directory), self._follower.is_complete
            if self._wanted.is_verbatim:
                self._copy()
            else:
                self._print(self._new())
                self._show_pending(self._lines.pending)
            if is_complete or state is None or not state.may_print:
                return
            time.sleep(_LOOK_SECONDS)

    def _copy(self) -> None:
        for piece in self._follower.new():
            self._say_freed(piece.freed_bytes)
            sys.stdout.buffer.write(piece.data)
            self._is_empty = False
        sys.stdout.flush()

    def _new(self) -> Iterable[OutputLine]:
        for piece in self._follower.new():
            self._say_freed(piece.freed_bytes)
            self._is_empty = False
            yield from self._since(self._lines.add(piece))

    def _finished(self) -> list[OutputLine]:
        return self._since(self._lines.finish())

    def _since(self, lines: list[OutputLine]) -> list[OutputLine]:
        earliest = self._wanted.since_seconds
        return lines if earliest is None else [line for line in lines if line.seconds >= earliest]

    def _print(self, lines: Iterable[OutputLine]) -> None:
        for line in lines:
            self._show_pending("")
            if self._wanted.as_json:
                value = {"attempt": line.attempt, "line": line.text, "time": round(line.seconds, 3)}
                output.data_json({**value, "rank": self._wanted.rank})
            else:
                output.data(self._stamp(line.seconds) + line.text)
        sys.stdout.flush()

    def _stamp(self, seconds: float) -> str:
        if not self._wanted.timestamps:
            return ""
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))}  "

    def _show_pending(self, text: str) -> None:
        """Show, on a terminal, the bar or prompt that may still change, in the place of the one before."""
        if not self._shows_pending or text == self._pending:
            return
        self._pending = text
        # A line that is longer would be broken, and could not be taken back. Some terminals have no size.
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_COLUMNS
        sys.stdout.write(f"\r\x1b[K{text[: columns - 1]}")
        sys.stdout.flush()

    def _say_freed(self, size_bytes: int) -> None:
        if size_bytes:
            output.note(f"... {output.size(size_bytes)} of older output freed")


def _first_attempt(wanted: _Wanted, numbers: list[int]) -> int:
    newest = max(numbers, default=1)
    if wanted.since_seconds is None:
        return newest
    return next((n for n in numbers if _changed(wanted.directory, n) >= wanted.since_seconds), newest)


def _changed(directory: Path, attempt: int) -> float:
    log = layout.attempt_directory(directory, attempt) / layout.OUTPUT_LOG
    found = [path.stat().st_mtime for path in (log, layout.output_archive(log)) if path.exists()]
    return max(found, default=0.0)


def _start(wanted: _Wanted, attempt: int) -> int:
    """Return where to begin in the output of the first attempt: far enough back for all that is wanted."""
    log = layout.attempt_directory(wanted.directory, attempt) / layout.OUTPUT_LOG
    if wanted.since_seconds is not None:
        times = TimesReader(layout.output_times(log))
        times.refresh()
        return start_of_lines(log, MOST_ROWS, end=times.first_after(wanted.since_seconds))
    return start_of_lines(log, wanted.tail + MOST_ROWS) if wanted.tail is not None else 0


def _rank_there(wanted: _Wanted, attempt: int) -> int | None:
    """Return the rank whose output is to be read, or None for all of it. Raises UsageError if it has none."""
    place = layout.attempt_directory(wanted.directory, attempt)
    if wanted.rank is None or (wanted.rank == 0 and not (place / layout.RANKS).is_dir()):
        return None
    state = read_state(wanted.directory)
    is_to_come = wanted.follow and state is not None and state.may_print
    if output_logs(place, wanted.rank):
        return wanted.rank
    names = {path.name for path in (place / layout.RANKS).glob("*/attempt_*/*")}
    found = sorted(int(name) for name in names if name.isdecimal())
    if is_to_come and not found:
        output.note(f"no output of rank {wanted.rank} yet")
        return wanted.rank
    there = f"ranks {', '.join(map(str, found))}" if found else "the output of all ranks together"
    raise UsageError(
        f"{place}: expected the output of rank {wanted.rank}, found {there}",
        hint="the outputs of ranks are kept apart where the command is torchrun, and its own options for "
        "logs are left to unbroken",
    )
