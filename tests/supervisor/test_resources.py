"""What an attempt uses: read from the real kernel, and from the files of kernels that are not here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.rundir.heartbeat import Beat
from unbroken.rundir.journal import Journal, read_events
from unbroken.rundir.processes import read_stat
from unbroken.supervisor.resources.course import COLUMNS, Course, read_column
from unbroken.supervisor.resources.gpu import GpuReader, visible
from unbroken.supervisor.resources.reading import Reading, read_reading
from unbroken.supervisor.resources.timeline import read_timeline
from unbroken.supervisor.resources.totals import lost
from unbroken.supervisor.resources.usage import Headroom, disk_space, headroom, tree_usage
from unbroken.supervisor.resources.watch import AttemptResources, Resources
from unbroken.supervisor.watcher import Look, Started

from .conftest import made_records

MEGABYTE = 1 << 20

# A parent that works and holds memory, and a child in a session of its own that does as well.
WORKERS = """
import os, sys, time
held = b"x" * (40 << 20)
if os.fork() == 0:
    os.setsid()
    more = b"y" * (30 << 20)
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def workers() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WORKERS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == b"ready\nready\n"
        yield process
        os.killpg(children_of(process.pid)[0], signal.SIGKILL)
        process.kill()


def children_of(parent: int) -> list[int]:
    stats = [read_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal()]
    return [stat.process_id for stat in stats if stat is not None and stat.parent_id == parent]


def test_a_tree_uses_what_all_its_processes_do(workers: subprocess.Popen[bytes]) -> None:
    used = tree_usage([workers.pid])
    assert used is not None
    assert used.processes == 2
    assert used.cpu_seconds >= 0.35
    # The 40 MB that both have count for each; what they share of files counts once.
    assert 105 * MEGABYTE < used.memory_bytes < 160 * MEGABYTE


def test_a_tree_that_is_gone_uses_nothing_that_can_be_told(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert tree_usage([process.pid]) is None
    assert tree_usage([1], proc=tmp_path / "no proc") is None
    assert headroom(1, proc=tmp_path / "no proc") is None
    assert disk_space(tmp_path / "nowhere") is None


def test_the_room_on_this_machine_is_within_its_memory() -> None:
    room = headroom(os.getpid())
    assert room is not None
    assert 0 < room.left_bytes <= room.limit_bytes
    space = disk_space(Path("/"))
    assert space is not None
    assert 0 <= space.free_bytes <= space.size_bytes


class Kernel:
    """The files of some kernel: those in `proc`, and groups of both versions where they say."""

    def __init__(self, place: Path) -> None:
        self.proc = place / "proc"
        self.write(
            "proc/self/mountinfo",
            f"9 1 0:5 / {place}/groups rw - cgroup2 none rw\n"
            f"8 1 0:6 / {place}/groups/memory rw - cgroup none rw,memory",
        )
        self.write("proc/meminfo", "MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 4000000 kB\n")

    def write(self, name: str, text: object) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def room(self) -> Headroom | None:
        return headroom(7, proc=self.proc)


def test_without_control_groups_the_limit_is_that_of_the_machine(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    of_machine = Headroom(limit_bytes=8_000_000 * 1024, left_bytes=4_000_000 * 1024, limit="machine")
    assert kernel.room() == of_machine
    kernel.write("proc/7/cgroup", "0::/job")
    kernel.write("groups/job/memory.max", "max")
    kernel.write("groups/job/memory.current", 123)
    assert kernel.room() == of_machine


def test_the_nearest_limit_counts_also_if_it_is_that_of_a_group_above(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.write("proc/7/cgroup", "0::/pod/job")
    kernel.write("groups/pod/memory.max", 1000)
    kernel.write("groups/pod/memory.current", 900)
    kernel.write("groups/pod/memory.stat", "anon 500\ninactive_file 300")
    kernel.write("groups/pod/job/memory.max", 5000)
    kernel.write("groups/pod/job/memory.current", 700)
    assert kernel.room() == Headroom(limit_bytes=1000, left_bytes=400, limit="control group")


def test_version_one_is_read_and_its_word_for_no_limit(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.write("proc/7/cgroup", "4:memory:/docker/abc\n0::/")
    kernel.write("groups/memory/docker/abc/memory.limit_in_bytes", (1 << 63) - 4096)
    kernel.write("groups/memory/docker/abc/memory.usage_in_bytes", 5)
    room = kernel.room()
    assert room is not None
    assert room.limit == "machine"
    kernel.write("groups/memory/docker/abc/memory.limit_in_bytes", 2000)
    kernel.write("groups/memory/docker/abc/memory.stat", "inactive_file 7\ntotal_inactive_file 3")
    assert kernel.room() == Headroom(limit_bytes=2000, left_bytes=1998, limit="control group")


def test_in_a_container_the_limit_stands_at_the_mount_whatever_the_path_says(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.write("proc/7/cgroup", "4:memory:/of/the/host")
    kernel.write("groups/memory/memory.limit_in_bytes", 3000)
    kernel.write("groups/memory/memory.usage_in_bytes", 1000)
    assert kernel.room() == Headroom(limit_bytes=3000, left_bytes=2000, limit="control group")


@pytest.fixture
def real_group() -> Iterator[Path]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    if own is None:
        pytest.skip("no memory controller of version 1 here")
    group = Path(f"/sys/fs/cgroup/memory{own}/unbroken-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_the_room_of_a_real_group_shrinks_with_what_a_process_in_it_takes(real_group: Path) -> None:
    (real_group / "memory.limit_in_bytes").write_text(str(128 * MEGABYTE))
    script = "import sys; input(); x = b'x' * (50 << 20); print(1, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:  # type: ignore[call-overload]
        (real_group / "cgroup.procs").write_text(str(process.pid))
        before = headroom(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = headroom(process.pid)
        process.stdin.close()
    assert before is not None
    assert after is not None
    assert (after.limit, after.limit_bytes) == ("control group", 128 * MEGABYTE)
    assert 45 * MEGABYTE < before.left_bytes - after.left_bytes < 75 * MEGABYTE


def started(directory: Path, attempt: int = 1) -> Started:
    return Started(attempt=attempt, directory=directory, run_directory=directory, leader=os.getpid())


def beat(step: int, waited: float = 0.0, process_id: int = 1) -> Beat:
    return Beat(
        process_id=process_id,
        monotonic_seconds=0,
        wall_seconds=0,
        beats=step,
        step=step,
        checkpoint_step=-1,
        phase="training",
        progress=step,
        goal_step=0,
        waited_seconds=waited,
        save_seconds=0,
    )


def cheap(started: Started, run: Resources) -> AttemptResources:
    """A watcher for which looking costs nothing, so that it does it every five seconds."""
    return AttemptResources(started, run, clock=lambda: 0.0)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at all processes of the machine hundreds of times takes its time."""
    monkeypatch.setattr("unbroken.supervisor.resources.watch.tree_usage", lambda _: None)


def look(seconds: float, beat: Beat | None = None) -> Look:
    return Look(now_seconds=seconds, beat=beat, is_stop_asked=False, has_leader=True)


@pytest.mark.usefixtures("no_processes")
def test_readings_are_taken_every_five_seconds_and_less_often_where_they_cost_much(tmp_path: Path) -> None:
    run = Resources(tmp_path, made_records(tmp_path))
    few, many = iter(range(100)), iter(range(0, 1000, 10))
    for clock, expected in ((lambda: next(few) / 1e6, 12), (lambda: next(many) / 2e3, 6)):
        watcher = AttemptResources(started(tmp_path), run, clock=clock)
        taken = 0
        for second in range(120):
            (tmp_path / "resources.json").unlink(missing_ok=True)
            watcher.look(look(1000 + second / 2))
            taken += (tmp_path / "resources.json").exists()
        assert taken == expected


@pytest.mark.usefixtures("no_processes")
def test_a_reading_tells_the_pace_and_the_share_of_waiting(tmp_path: Path) -> None:
    run = Resources(tmp_path, made_records(tmp_path))
    watcher = cheap(started(tmp_path, attempt=3), run)
    watcher.look(look(0))
    for second in range(5, 300, 5):
        # It starts up for 100 s; then two steps a second, with 0.9 s of 2 spent waiting.
        step = max(0, second - 100) * 2
        watcher.look(look(second, beat(step, waited=step * 0.225)))
    seen = read_reading(tmp_path)
    assert seen is not None
    assert (seen.attempt, seen.step) == (3, 390)
    assert seen.steps_per_second == pytest.approx(2)
    assert seen.data_wait_share == pytest.approx(0.45)
    assert len(seen.alarms) == 1
    assert "the loader is the bottleneck" in seen.alarms[0]
    for second in range(300, 900, 5):
        watcher.look(look(second, beat(390 + second - 300, waited=87.75)))
    watcher.end()
    kinds = [event["kind"] for event in read_events(tmp_path / "journal.jsonl")]
    assert kinds == ["alarm", "alarm-over"]
    after = read_reading(tmp_path)
    assert after is not None
    assert after.alarms == ()


@pytest.mark.usefixtures("no_processes")
def test_a_new_process_in_an_attempt_begins_its_own_pace(tmp_path: Path) -> None:
    watcher = cheap(started(tmp_path), Resources(tmp_path, made_records(tmp_path)))
    for second in range(0, 100, 5):
        watcher.look(look(second, beat(second * 10, waited=second)))
    for second in range(100, 200, 5):
        watcher.look(look(second, beat(second - 50, waited=(second - 100) / 10, process_id=2)))
    seen = read_reading(tmp_path)
    assert seen is not None
    assert seen.steps_per_second == pytest.approx(1)
    assert seen.data_wait_share == pytest.approx(0.1)


@pytest.mark.usefixtures("no_processes")
def test_the_pace_of_a_run_that_was_rolled_back_is_that_since(tmp_path: Path) -> None:
    watcher = cheap(started(tmp_path), Resources(tmp_path, made_records(tmp_path)))
    for second in range(0, 100, 5):
        watcher.look(look(second, beat(second * 10)))
    for second in range(100, 130, 5):
        watcher.look(look(second, beat(second * 2)))
    seen = read_reading(tmp_path)
    assert seen is not None
    assert seen.steps_per_second == pytest.approx(2)


@pytest.mark.usefixtures("no_processes")
def test_memory_that_keeps_growing_is_an_alarm_before_it_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 10e9

    def room(_: int) -> Headroom:
        return Headroom(limit_bytes=20_000_000_000, left_bytes=int(left), limit="control group")

    monkeypatch.setattr("unbroken.supervisor.resources.watch.headroom", room)
    watcher = cheap(started(tmp_path), Resources(tmp_path, made_records(tmp_path)))
    when = None
    for second in range(0, 4000, 30):
        left -= 30 * 2e6
        watcher.look(look(second))
        seen = read_reading(tmp_path)
        assert seen is not None
        if when is None and seen.alarms:
            when = second
            assert seen.memory_full_in_seconds == pytest.approx(left / 2e6, rel=0.02)
    # It lasts 5000 s: an hour before that it is known.
    assert when is not None
    assert 1350 <= when <= 1450
    (event,) = [event for event in read_events(tmp_path / "journal.jsonl") if event["kind"] == "alarm"]
    assert event["alarm"] == "memory"
    assert "60 minutes" in event["text"]


@pytest.mark.usefixtures("no_processes")
def test_a_disk_that_fills_is_an_alarm_hours_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unbroken.supervisor.resources.usage import DiskSpace

    second = 0

    def space(_: Path) -> DiskSpace:
        kept = second // 1200
        return DiskSpace(size_bytes=10**12, free_bytes=10**11 - kept * 5 * 10**9, inodes_free=None)

    monkeypatch.setattr("unbroken.supervisor.resources.watch.disk_space", space)
    run = Resources(tmp_path, made_records(tmp_path))
    for attempt in range(1, 8):
        # Each attempt is short; what the disk does goes on over all of them.
        watcher = cheap(started(tmp_path, attempt), run)
        for _ in range(0, 1500, 60):
            second += 60
            watcher.look(look(second))
    seen = read_reading(tmp_path)
    assert seen is not None
    assert seen.disk_full_in_seconds == pytest.approx((10**11 - 8 * 5e9) / 5e9 * 1200, rel=0.25)
    assert [alarm for alarm in seen.alarms if "disk" in alarm]


@pytest.mark.usefixtures("no_processes")
def test_where_nothing_can_be_written_supervision_goes_on_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Resources(tmp_path, made_records(tmp_path))
    (tmp_path / "resources.json").mkdir()
    watcher = cheap(started(tmp_path), run)
    for second in range(0, 100, 5):
        watcher.look(look(second))
    assert capfd.readouterr().err.count("is not shown") == 1
    assert read_reading(tmp_path) is None


def test_the_course_of_a_run_is_bounded_and_goes_on_under_the_next_supervisor(tmp_path: Path) -> None:
    course = Course(tmp_path)
    for minute in range(300):
        course.add({"time": 60.0 * minute, "memory_bytes": minute})
    assert len(course.rows) <= 240
    assert len(read_column(tmp_path, "memory_bytes")) == len(course.rows)
    later = Course(tmp_path)
    assert (later.every_seconds, later.rows[0]) == (course.every_seconds, course.rows[0])
    assert later.rows[0][0] == 0
    last = later.rows[-1][0]
    assert last > 60 * 290
    assert not later.add({"time": last + later.every_seconds / 2})
    assert later.add({"time": last + later.every_seconds})
    (tmp_path / "resources-history.json").write_text('{"columns": 3}')
    assert Course(tmp_path).rows == []
    assert set(COLUMNS) <= {*Reading.__dataclass_fields__}


def test_the_timeline_of_a_long_run_is_read_without_reading_all_of_it(tmp_path: Path) -> None:
    supervisor = Journal(tmp_path / "journal.jsonl")
    events = tmp_path / "attempts/0001/events-rank0.jsonl"
    later = tmp_path / "attempts/0002/events-rank0.jsonl"

    def write(path: Path, steps: range, start: float) -> None:
        path.parent.mkdir(parents=True)
        lines: list[dict[str, Any]] = [
            {"time": start, "kind": "began", "step": steps.start - 1, "report": []}
        ]
        for index, step in enumerate(steps):
            lines.append({"time": start + index + 1, "kind": "step", "step": step, "metrics": {"loss": 0.5}})
            if step % 100 == 0:
                lines.append({"time": start + index + 1.5, "kind": "saved", "step": step - 50})
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.write_text(text + '{"time":1,"kind":"st')

    write(events, range(1, 6_001), 1000.0)
    write(later, range(4_001, 10_001), 30_000.0)
    for kind, at, fields in (
        ("run-started", 990.0, {}),
        ("attempt-started", 995.0, {"attempt": 1}),
        ("attempt-ended", 7_100.0, {"attempt": 1}),
        ("run-ended", 7_200.0, {}),
        ("run-started", 29_000.0, {}),
        ("attempt-started", 29_990.0, {"attempt": 2}),
    ):
        supervisor.append(kind, time=at, **fields)
    supervisor.close()
    first, second = read_timeline(tmp_path)
    assert (first.began, first.last, first.last_step, first.ended) == (1000.0, 7_000.0, 6_000, 7_100.0)
    assert (second.began_step, second.regained, second.last_step) == (4_000, 32_000.0, 10_000)
    assert second.unkept_seconds == 21_800.0
    found = lost([first, second], now=60_000)
    assert (found.ending, found.starting, found.redoing) == (100, 10, 2000)
    assert found.pauses == 29_990 - 7_100 - 21_800
    assert read_timeline(tmp_path / "nowhere") == []


def test_an_attempt_whose_end_nobody_saw_ended_with_its_last_step(tmp_path: Path) -> None:
    supervisor = Journal(tmp_path / "journal.jsonl")
    for kind, at, fields in (
        ("run-started", 0.0, {}),
        ("attempt-started", 1.0, {"attempt": 1}),
        # The machine was restarted; then attempts of a command that could not even begin.
        ("run-started", 100.0, {}),
        ("attempt-started", 101.0, {"attempt": 2}),
        ("attempt-ended", 103.0, {"attempt": 2}),
        ("attempt-started", 104.0, {"attempt": 3}),
    ):
        supervisor.append(kind, time=at, **fields)
    supervisor.close()
    with Journal(tmp_path / "attempts/0001/events-rank0.jsonl") as journal:
        journal.append("began", time=2.0, step=0)
        journal.append("step", time=50.0, step=7)
    first, second, third = read_timeline(tmp_path)
    assert (first.ended, first.last_step, second.began, third.ended) == (50.0, 7, None, None)
    found = lost([first, second, third], now=110.0)
    assert (found.pauses, found.starting) == (51.0 + 1.0, 2.0 + 6.0)


# What the real module says for a machine with three GPUs, of which one is in trouble.
PYNVML = """
import time
from pathlib import Path
class NVMLError(Exception): pass
class Memory: used, total = 61 * 10**9, 150 * 10**9
class Rates: gpu = 97
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{'abc'[handle]}0"
def nvmlDeviceGetName(handle): return b"Model X"
def nvmlDeviceGetMemoryInfo(handle):
    if Path(__file__).with_name("hangs").exists():
        time.sleep(60)
    if handle == 1:
        raise NVMLError("GPU is lost")
    return Memory
def nvmlDeviceGetUtilizationRates(handle):
    if handle == 2:
        raise NVMLError("Not Supported")
    return Rates
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "modules"
    place.mkdir()
    (place / "pynvml.py").write_text(PYNVML)
    sources = Path(sys.modules["unbroken"].__path__[0]).parent
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{sources}")
    monkeypatch.setenv("UNBROKEN_NVML", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return place


def test_gpus_are_read_by_a_process_that_answers_again_and_again(nvml: Path) -> None:
    reader = GpuReader()
    try:
        first, second = reader.read(), reader.read()
    finally:
        reader.close()
    assert first == second
    assert first is not None
    fine, lost, split = first
    assert (fine["name"], fine["utilization"], fine["memory_bytes"]) == ("Model X", 0.97, 61 * 10**9)
    assert (lost["problem"], lost["memory_bytes"]) == ("GPU is lost", None)
    assert (split["utilization"], split["problem"]) == (None, None)


def test_a_driver_that_hangs_is_given_up_in_time(nvml: Path) -> None:
    (nvml / "hangs").touch()
    reader = GpuReader()
    began = time.monotonic()
    found = reader.read(timeout_seconds=0.7)
    assert time.monotonic() - began < 5
    assert found is not None
    assert "has not answered" in found[0]["problem"]
    # It is not asked again, and what is wrong with it stays to be seen.
    assert reader.read() == found
    reader.close()


def test_without_the_module_or_against_the_wish_there_are_no_gpus(
    nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nvml / "pynvml.py").write_text("raise ImportError('none here')")
    reader = GpuReader()
    assert reader.read() is None
    reader.close()
    monkeypatch.setenv("UNBROKEN_NVML", "0")
    assert GpuReader().read() is None


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [0, 2]),
        ("GPU-b", [1]),
        ("9", []),
        ("MIG-x", [0, 1, 2]),
    ],
)
def test_only_gpus_that_a_program_may_see_are_shown(wanted: str | None, expected: list[int]) -> None:
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    assert visible(3, ["GPU-a0", "GPU-b0", "GPU-c0"], environment) == expected
