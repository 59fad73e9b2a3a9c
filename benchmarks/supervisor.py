"""What it costs to keep a run going: the supervisor's memory and time, a restart, a heartbeat.

python benchmarks/supervisor.py [--quick] [--supervisord PATH] [--circusd PATH] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.processes import read_stat

TARGETS = {
    "memory_megabytes": 25.0,
    "cpu_percent": 0.2,
    "restart_seconds": 0.5,
    "beat_microseconds": 2.0,
}
TICKS = os.sysconf("SC_CLK_TCK")
BEAT_ROUNDS, BEATS = 300, 1000
# It says when its first instruction came, beats as a trainer of ten steps a second does, and never ends.
JOB = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {time.monotonic()}\\n")
beat = None
if "UNBROKEN_RUN_DIR" in os.environ:
    from pathlib import Path
    from unbroken.rundir.heartbeat import Heartbeat
    here = Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / f"{int(os.environ['UNBROKEN_ATTEMPT']):04d}"
    beat = Heartbeat(here / "heartbeat")
step = 0
while True:
    step += 1
    if beat is not None:
        beat.beat(phase="training", step=step, checkpoint_step=-1)
    time.sleep(0.1)
"""
# Waits, starts again, and nothing else: what a supervisor cannot do better than.
SHELL_LOOP = 'while :; do "$0" "$@"; done'


class Place:
    """A directory with the job, and the starts that it has said so far."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.starts_file = directory / "starts"
        self.job = directory / "job.py"
        self.job.write_text(JOB)
        self.command = [sys.executable, str(self.job), str(self.starts_file)]

    def starts(self) -> list[tuple[int, float]]:
        if not self.starts_file.exists():
            return []
        lines = self.starts_file.read_text().split("\n")[:-1]
        return [(int(line.split()[0]), float(line.split()[1])) for line in lines]

    def wait_for(self, count: int) -> tuple[int, float]:
        end = time.monotonic() + 60
        while len(self.starts()) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"the job was not started {count} times within 60 s")
            time.sleep(0.002)
        return self.starts()[count - 1]


@contextmanager
def unbroken(place: Place) -> Iterator[int]:
    """Keep the job going by unbroken, without pauses and whatever happens; yield the supervisor's process."""
    # An own plan: no limit of failures is to end it before the measurement does.
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from unbroken.supervisor.launch import launch\n"
        "from unbroken.supervisor.plan import Plan\n"
        "from unbroken.supervisor.restart_policy import RestartPolicy\n"
        "policy = RestartPolicy(base_seconds=0.0, max_failures=10**6, max_starts_per_hour=10**6,"
        " max_same_signal=10**6)\n"
        "plan = Plan(directory=Path(sys.argv[1]), command=tuple(sys.argv[2:]), policy=policy)\n"
        "print(launch(plan).pid)\n"
    )
    run = place.directory / "run"
    environment = {**os.environ, "XDG_STATE_HOME": str(place.directory / "state")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(run), *place.command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        yield int(done.stdout)
    finally:
        subprocess.run(
            [sys.executable, "-P", "-m", "unbroken.cli.main", "stop", str(run), "--now"],
            env=environment,
            check=True,
            capture_output=True,
        )


@contextmanager
def shell_loop(place: Place) -> Iterator[int]:
    with started(["sh", "-c", SHELL_LOOP, *place.command]) as process:
        yield process


def supervisord(program: str) -> Callable[[Place], Any]:
    @contextmanager
    def keep(place: Place) -> Iterator[int]:
        where = place.directory
        command = " ".join(place.command)
        (where / "supervisord.conf").write_text(
            f"[supervisord]\nnodaemon=true\nlogfile={where}/log\npidfile={where}/pid\nchildlogdir={where}\n"
            f"[program:job]\ncommand={command}\nautorestart=true\nstartsecs=0\n"
        )
        with started([program, "-c", str(where / "supervisord.conf")]) as process:
            yield process

    return keep


def circusd(program: str) -> Callable[[Place], Any]:
    @contextmanager
    def keep(place: Place) -> Iterator[int]:
        where = place.directory
        ends = "".join(
            f"{name} = ipc://{where}/{name}\n" for name in ("endpoint", "pubsub_endpoint", "stats_endpoint")
        )
        (where / "circus.ini").write_text(
            f"[circus]\n{ends}[watcher:job]\ncmd = {' '.join(place.command)}\nwarmup_delay = 0\n"
        )
        with started([program, str(where / "circus.ini")]) as process:
            yield process

    return keep


@contextmanager
def started(command: list[str]) -> Iterator[int]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **quiet) as process:  # type: ignore[call-overload]
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def memory(process_id: int) -> tuple[float, float]:
    """Return the resident memory of a process, and its own part of it (shared pages divided), in MB."""
    fields = {}
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()[1:]:
        name, amount, _ = line.split()
        fields[name] = int(amount) * 1024 / 1e6
    return fields["Rss:"], fields["Pss:"]


def cpu_seconds(process_id: int) -> float:
    """Return the time a process has used: in nanoseconds where the kernel counts them, else in ticks."""
    exact = Path(f"/proc/{process_id}/schedstat")
    if exact.exists():
        return int(exact.read_text().split()[0]) / 1e9
    text = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(text[11]) + int(text[12])) / TICKS


def measure_keeper(keep: Callable[[Place], Any], *, seconds: float, restarts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        with keep(place) as process_id:
            leader, _ = place.wait_for(1)
            # What it does once, at the start, is not what it costs.
            time.sleep(2.0)
            began, used = time.monotonic(), cpu_seconds(process_id)
            time.sleep(seconds)
            share = (cpu_seconds(process_id) - used) / (time.monotonic() - began)
            resident, own = memory(process_id)
            times = []
            for count in range(2, restarts + 2):
                killed = time.monotonic()
                os.kill(leader, signal.SIGKILL)
                leader, first_instruction = place.wait_for(count)
                times.append(first_instruction - killed)
                # Some keepers hold what dies young to be broken.
                time.sleep(1.2)
            after, _ = memory(process_id)
        end_of(leader)
    return {
        "memory_megabytes": round(resident, 2),
        "own_memory_megabytes": round(own, 2),
        "memory_megabytes_after_restarts": round(after, 2),
        "cpu_percent": round(100 * share, 3),
        "restart_seconds": round(statistics.median(times), 4),
        "restart_seconds_all": [round(value, 4) for value in times],
    }


def end_of(leader: int) -> None:
    """End a job that its keeper has left behind."""
    found = read_stat(leader)
    if found is not None and found.state not in "ZX":
        os.kill(leader, signal.SIGKILL)


def measure_start() -> float:
    """Return the seconds that the interpreter alone needs to its first instruction, the median of five."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        out = subprocess.run(
            [sys.executable, "-c", "import time; print(time.monotonic())"], capture_output=True, check=True
        )
        times.append(float(out.stdout) - began)
    return round(statistics.median(times), 4)


def measure_beat() -> float:
    """Return the microseconds of a heartbeat, the median of many short rounds."""
    with tempfile.TemporaryDirectory() as folder:
        heartbeat = Heartbeat(Path(folder) / "heartbeat")
        times = []
        for _ in range(BEAT_ROUNDS):
            began = time.perf_counter()
            for step in range(BEATS):
                heartbeat.beat(phase="training", step=step, checkpoint_step=-1)
            times.append((time.perf_counter() - began) / BEATS * 1e6)
        heartbeat.close()
    return round(statistics.median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 s and 3 restarts; its numbers mean little")
    parser.add_argument("--supervisord", help="the program, to be measured beside it")
    parser.add_argument("--circusd", help="likewise")
    parser.add_argument("--results", type=Path, help="where to keep the results")
    options = parser.parse_args()
    keepers: dict[str, Callable[[Place], Any] | None] = {
        "unbroken": unbroken,
        "supervisord": supervisord(options.supervisord) if options.supervisord else None,
        "circusd": circusd(options.circusd) if options.circusd else None,
        "shell loop": shell_loop,
    }
    seconds, restarts = (10.0, 3) if options.quick else (90.0, 15)
    results: dict[str, Any] = {
        "machine": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "targets": TARGETS,
        "watched_seconds": seconds,
        "restarts": restarts,
        "interpreter_start_seconds": measure_start(),
        "beat_microseconds": measure_beat(),
        "keepers": {},
    }
    print(f"{'':12} {'RSS':>9} {'own (PSS)':>10} {'CPU':>8} {'restart':>9}")
    for name, keep in keepers.items():
        if keep is None:
            print(f"{name:12} not measured: no --{name} given")
            continue
        found = measure_keeper(keep, seconds=seconds, restarts=restarts)
        results["keepers"][name] = found
        print(
            f"{name:12} {found['memory_megabytes']:6.1f} MB {found['own_memory_megabytes']:7.1f} MB "
            f"{found['cpu_percent']:6.2f} % {found['restart_seconds']:7.3f} s"
        )
    print(f"\na heartbeat: {results['beat_microseconds']:.2f} us")
    print(f"bare Python needs {results['interpreter_start_seconds']:.3f} s to its first instruction")
    ours = {**results["keepers"]["unbroken"], "beat_microseconds": results["beat_microseconds"]}
    for name, target in TARGETS.items():
        print(f"{name} {ours[name]:g}: {'met' if ours[name] < target else 'MISSED'}, to be under {target:g}")
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
