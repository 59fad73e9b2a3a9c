"""`unbroken top`: a live view in a real terminal, one frame anywhere else."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from rich.console import Console

from unbroken.cli.frames import course, many

from .conftest import TRAINING, Bench, made_records
from .in_process import look, status

COLUMNS = ("RUN", "STATE", "STEP", "STEPS/S", "TOGO", "LOST", "CPU", "MEMORY", "WAIT")
ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A process in a terminal of 80 columns, and what it has shown."""

    def __init__(self, bench: Bench, *arguments: str) -> None:
        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.inner = inner
        bench.environment |= {"TERM": "xterm", "LANG": "C.UTF-8"}
        self.process = bench.popen(
            bench.command(*arguments), stdin=inner, stdout=inner, stderr=inner, start_new_session=True
        )
        self.shown = b""

    def until(self, is_so: Callable[[bytes], object], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not is_so(self.shown):
            assert time.monotonic() < end, self.shown
            if select.select([self.end], [], [], 0.05)[0]:
                self.shown += os.read(self.end, 65536)

    def close(self) -> None:
        os.close(self.end)
        os.close(self.inner)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One run for all that look at it."""
    bench = Bench(tmp_path_factory.mktemp("top"))
    try:
        assert bench.python(bench.script("train.py", TRAINING), "--detach").returncode == 0
        bench.until(lambda: bench.read("resources.json") and "training" in bench.output())
        yield bench
        assert look(bench, "stop", "it").returncode == 0
        bench.until(lambda: not bench.strays(), seconds=10)
    finally:
        bench.sweep()


@pytest.mark.parametrize("leave", ["q", "interrupt", "terminate"])
def test_it_draws_frame_after_frame_until_it_is_left_and_the_run_goes_on(run: Bench, leave: str) -> None:
    terminal = Terminal(run, "top", "it", "--interval", "0.2")
    terminal.until(lambda shown: ALTERNATE in shown and shown.count(b"unbroken top, ") >= 3)
    assert b"running" in terminal.shown
    if leave == "q":
        os.write(terminal.end, b"q")
    else:
        os.kill(terminal.process.pid, signal.SIGINT if leave == "interrupt" else signal.SIGTERM)
    terminal.until(lambda shown: NORMAL in shown)
    assert terminal.process.wait(10) == (143 if leave == "terminate" else 0)
    assert b"Traceback" not in terminal.shown
    # The terminal is as it was: lines, echo, and no other screen.
    assert termios.tcgetattr(terminal.inner) == terminal.before
    assert terminal.shown.rindex(NORMAL) > terminal.shown.rindex(ALTERNATE)
    terminal.close()
    assert run.state()["state"] == "running"


def test_a_closed_terminal_ends_it(run: Bench) -> None:
    terminal = Terminal(run, "top", "--interval", "0.2")
    terminal.until(lambda shown: b"unbroken top, " in shown)
    terminal.close()
    terminal.process.wait(10)
    assert run.state()["state"] == "running"


def test_it_fits_a_tmux_window_of_80_columns(run: Bench) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux here")
    tmux = ["tmux", "-f", os.devnull, "-S", str(run.place / "tmux")]
    command = " ".join(run.command("top", "--interval", "0.2"))
    try:
        subprocess.run(
            [*tmux, "new-session", "-d", "-x", "80", "-y", "24", command], env=run.environment, check=True
        )

        def screen() -> str:
            done = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=False)
            return done.stdout

        # One capture may come in the middle of a frame.
        lines: list[str] = []

        def is_drawn() -> bool:
            lines[:] = screen().splitlines()
            return len(lines) > 2 and "MB" in lines[2]

        run.until(is_drawn)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    header, row = lines[1:3]
    assert header.split() == ["RUN", "STATE", "STEP", "STEPS/S", "TO", "GO", "LOST", "CPU", "MEMORY", "WAIT"]
    assert row.split()[:2] == ["it", "running"]


def test_without_a_terminal_it_prints_one_frame(run: Bench) -> None:
    table = look(run, "top")
    assert table.returncode == 0
    assert "\x1b" not in table.stdout
    assert [line.split()[0] for line in table.stdout.splitlines()[1:3]] == ["RUN", "it"]
    assert all(len(line) <= 80 for line in table.stdout.splitlines())
    one = look(run, "top", "it", "--once")
    assert "attempt" in one.stdout
    assert "memory" in one.stdout


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_narrow_table_has_fewer_columns_and_all_of_each(run: Bench, width: int) -> None:
    (seen,) = json.loads(look(run, "top", "--json").stdout)["runs"]
    long = seen | {"name": "a-name-that-is-long-and-longer", "step": 123_456, "goal_step": 250_000}
    long["totals"] = seen["totals"] | {"lost_seconds": 8000.0, "to_go_seconds": 90_000.0}
    screen = Console(width=width, file=io.StringIO())
    screen.print(many([seen, long], width))
    _, header, first, second = screen.file.getvalue().splitlines()
    assert max(map(len, (header, first, second))) <= width
    names = header.replace("TO GO", "TOGO").split()
    assert names == [name for name in COLUMNS if name in names]
    assert {"RUN", "STATE", "STEP"} <= set(names)
    assert (len(names) == len(COLUMNS)) is (width == 80)
    assert first.split()[:2] == ["it", "running"]
    assert second.split()[1:3] == ["running", "123456/250000"]


def test_a_run_whose_journal_cannot_be_read_is_shown_with_what_is_known_without_it(run: Bench) -> None:
    journal, aside = run.directory / "journal.jsonl", run.place / "journal.jsonl"
    journal.rename(aside)
    journal.mkdir()
    try:
        (seen,) = json.loads(look(run, "top", "--json").stdout)["runs"]
    finally:
        journal.rmdir()
        aside.rename(journal)
    assert (seen["name"], seen["state"], seen["totals"]) == ("it", "running", None)
    assert "journal.jsonl" in seen["hint"]


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([5.0], ""), ([0, 0], "__"), ([0, 1, 2, 4, 7], "_.:=#"), ([7, -1], "#_"), (range(49), None)],
)
def test_a_course_is_drawn_by_bars_as_high_as_its_values(values: Sequence[float], bars: str | None) -> None:
    assert course(values) == bars or (bars is None and len(course(values)) == 48)


def test_as_json_it_is_one_object(run: Bench) -> None:
    seen = json.loads(look(run, "top", "--json").stdout)
    assert [found["name"] for found in seen["runs"]] == ["it"]
    single = json.loads(look(run, "top", "it", "--json").stdout)
    assert set(single) == {"time", "runs"}
    assert set(single["runs"][0]) == set(status(run))


def test_runs_that_are_over_are_in_no_table_and_can_be_looked_at(bench: Bench) -> None:
    records = made_records(bench.made())
    records.show(state="done", exit_code=0)
    records.close()
    assert "no run is kept going now" in look(bench, "top").stdout
    assert "done" in look(bench, "top", "it").stdout
