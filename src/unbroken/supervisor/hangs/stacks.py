"""Where an attempt stands that makes no progress: its threads' stacks, and what its processes wait for."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unbroken.rundir import layout
from unbroken.rundir.processes import ProcessStat, everyone, read_stat
from unbroken.rundir.stack_files import STACK_SIGNAL, catches
from unbroken.supervisor.records import say

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PY_SPY_SECONDS = 5.0
_SECTION = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_OWN_SOURCE = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What the kernel tells of a process: what it has used and moved so far, and what it waits in.

    `moved_bytes` counts what it has read and written; `waits_in` and `call` are a place in the kernel and
    the number of a system call, empty where they may not be read.
    """

    process: ProcessStat
    cpu_seconds: float
    moved_bytes: int
    waits_in: str = ""
    call: str = ""

    def __str__(self) -> str:
        waits = f", waits in {self.waits_in}" if self.waits_in else ""
        call = f", system call {self.call}" if self.call else ""
        return f"{self.process}{waits}{call}, {self.cpu_seconds:.2f} s of processor time"


def read_signs(roots: Iterable[int]) -> list[Signs]:
    """Return the signs of the processes `roots` and of all below them that still run."""
    there = list(everyone())
    wanted = set(roots)
    while below := {one.process_id for one in there if one.parent_id in wanted} - wanted:
        wanted |= below
    members = [one for one in there if one.process_id in wanted and one.state not in "ZX"]
    return [_signs(member) for member in members if member.process_id != os.getpid()]


def innermost(dump: str) -> str:
    """Return the innermost frame of the user's own code in a dump of faulthandler: "file:line in function".

    Of the thread that took the signal, the main one as a rule; empty if the dump names none.
    """
    starts = list(_SECTION.finditer(dump))
    if not starts:
        return ""
    at = next((number for number, start in enumerate(starts) if start[1] == "Current thread"), -1)
    ends = [*(start.start() for start in starts[1:]), len(dump)]
    frames = list(_FRAME.finditer(dump, starts[at].start(), ends[at]))
    own = [one for one in frames if not _LIBRARIES.search(one["file"]) and _OWN_SOURCE not in one["file"]]
    if not frames:
        return ""
    found = (own or frames)[0]
    return f"{found['file']}:{found['line']} in {found['function']}"


class StackDump:
    """The stacks of an attempt's processes at one moment, in its folder `stacks`; nothing waits for them.

    Each process that offers its stacks is asked by a signal: those that train at once, then, one at each
    look, the data workers that they have forked, which write to the file of the first. If py-spy is installed
    it looks at `process_id`, and is ended after a few seconds.
    """

    def __init__(self, attempt_directory: Path, process_id: int, signs: Sequence[Signs], now: float) -> None:
        self._place = attempt_directory / layout.STACKS
        self._py_spy: tuple[int, int] | None = None
        self._until = now + _PY_SPY_SECONDS
        files = sorted(self._place.glob(f"rank*-{process_id}.txt")) if self._place.is_dir() else []
        self._file = files[0] if files else None
        self._from = self._file.stat().st_size if self._file is not None else 0
        try:
            self._place.mkdir(exist_ok=True)
            text = "".join(f"{sign}\n" for sign in signs)
            (self._place / "processes.txt").write_text(text)
        except OSError as error:
            # The verdict only says less.
            say(f"{self._place}: what the processes wait for could not be written: {error}")
        trainers = {int(path.stem.rpartition("-")[2]) for path in self._place.glob("rank*-*.txt")}
        for trainer in trainers:
            _ask(trainer)
        self._workers = [sign.process for sign in signs if sign.process.process_id not in trainers]
        self._start_py_spy(process_id)

    def look(self, now: float) -> None:
        """Ask the next worker, and end py-spy if it takes too long."""
        self._ask_worker()
        if self._py_spy is None:
            return
        # Nobody else collects it where the attempt's processes are not children of ours.
        with suppress(ChildProcessError):
            os.waitpid(self._py_spy[0], os.WNOHANG)
        if now >= self._until:
            process_id, start_ticks = self._py_spy
            found = read_stat(process_id)
            if found is not None and found.start_ticks == start_ticks:
                with suppress(OSError):
                    os.kill(process_id, signal.SIGKILL)
            self._py_spy = None

    def where(self) -> str:
        """Return where the user's code stands, as `innermost` does, as soon as that has been written."""
        if self._file is None:
            return ""
        try:
            with self._file.open("rb") as file:
                file.seek(self._from)
                return innermost(file.read().decode(errors="replace"))
        except OSError:
            return ""

    def _ask_worker(self) -> None:
        while self._workers and self._file is not None and STACK_SIGNAL is not None:
            worker = self._workers.pop(0)
            now = read_stat(worker.process_id)
            if now is None or now.start_ticks != worker.start_ticks:
                continue
            if not catches(worker.process_id, STACK_SIGNAL):
                continue
            # Dumps do not say of which process they are, and two at once would mix.
            with suppress(OSError), self._file.open("a") as file:
                file.write(f"\n{worker}:\n")
            _ask(worker.process_id)
            return

    def _start_py_spy(self, process_id: int) -> None:
        program = shutil.which("py-spy")
        if program is None:
            return
        output = str(self._place / f"py-spy-{process_id}.txt")
        try:
            # A child among the attempt's, collected and if need be ended with them.
            child = os.posix_spawn(
                program,
                [program, "dump", "--nonblocking", "--pid", str(process_id)],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsigmask=[],
            )
        except OSError as error:
            say(f"py-spy could not be started: {error}")
            return
        found = read_stat(child)
        self._py_spy = (child, found.start_ticks) if found is not None else None


def _ask(process_id: int) -> None:
    # Without a handler the signal would end the process, a stranger with its number perhaps.
    if STACK_SIGNAL is not None and catches(process_id, STACK_SIGNAL):
        with suppress(OSError):
            os.kill(process_id, STACK_SIGNAL)


def _signs(process: ProcessStat) -> Signs:
    place = _PROC / str(process.process_id)
    fields = _read(place / "stat").rpartition(")")[2].split()
    moved = [line.split()[1] for line in _read(place / "io").splitlines() if line[1:5] == "char"]
    waits_in, call = _read(place / "wchan").strip(), _read(place / "syscall").split()
    return Signs(
        process=process,
        cpu_seconds=sum(int(ticks) for ticks in fields[11:13]) / _TICKS,
        moved_bytes=sum(int(number) for number in moved),
        waits_in="" if waits_in == "0" else waits_in,
        call=call[0] if call and call[0] != "running" else "",
    )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
