from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.rundir.control_groups import control_groups, find_groups
from unbroken.rundir.process_tree import leave_orphans_to_init
from unbroken.supervisor.cells import Cell
from unbroken.supervisor.cgroups import (
    group_oom_kills,
    new_oom_kills,
    read_oom_kills,
)
from unbroken.supervisor.judging import gpu_processes
from unbroken.supervisor.judging.device_users import DeviceUsers
from unbroken.supervisor.judging.evidence import last_exception, rank_failure, read_error_file, read_tail
from unbroken.supervisor.judging.facts import Seen, gather
from unbroken.supervisor.judging.gpu_processes import wait_for_memory
from unbroken.supervisor.judging.kernel_log import device_errors, victims
from unbroken.supervisor.judging.other_killers import find_killer
from unbroken.supervisor.judging.verdict import ExitStatus, OomKills, RankFailure, SeenException, Victim
from unbroken.supervisor.watcher import Look, Started

_CHAINED = """
epoch 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
    main()
  File "/lib/b.py", line 9, in main
    raise torch.OutOfMemoryError("CUDA out of memory.")
    ^^^^^^^^^^^^^^^^^^^^
torch.OutOfMemoryError: CUDA out of memory.
It tried to allocate 2 GiB
wandb: synced
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", None),
        ("loss: 0.3\nValueError: not a traceback\n", None),
        (
            _CHAINED,
            SeenException(
                kind="torch.OutOfMemoryError", message="CUDA out of memory.", frame="/lib/b.py:9 in main"
            ),
        ),
        (
            '  File "t.py", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n',
            SeenException(kind="SyntaxError", message="invalid syntax", frame="t.py:1"),
        ),
        (
            'Traceback (most recent call last):\n  File "t.py", line 2, in f\nKeyboardInterrupt\n',
            SeenException(kind="KeyboardInterrupt", message="", frame="t.py:2 in f"),
        ),
        (
            '  File "t.py", line 2, in f\nunbroken.errors.UsageError: no\nhint: give --run-dir\nbye\n',
            SeenException(
                kind="unbroken.errors.UsageError", message="no", frame="t.py:2 in f", hint="give --run-dir"
            ),
        ),
        (
            '  File "t.py", line 2, in f\nKeyError: 1\nbye\nhint: of somebody else\n',
            SeenException(kind="KeyError", message="1", frame="t.py:2 in f"),
        ),
    ],
)
def test_the_last_traceback_in_the_output_names_the_exception(
    output: str, expected: SeenException | None
) -> None:
    found = last_exception(output)
    assert (found and replace(found, is_last=False)) == expected


def test_only_the_end_of_a_long_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"x" * 1_000_000 + b"\xff the end")
    assert read_tail(path).endswith("\N{REPLACEMENT CHARACTER} the end")
    assert len(read_tail(path)) < 100_000
    assert read_tail(tmp_path / "none") == ""


def test_counters_that_cannot_be_read_tell_nothing() -> None:
    known, unknown = OomKills(machine=2, own_group=1), OomKills(machine=None, own_group=1)
    assert new_oom_kills(known, OomKills(machine=3, own_group=1)) == OomKills(machine=1, own_group=0)
    assert new_oom_kills(unknown, known) == OomKills(machine=None, own_group=0)
    # Of another boot, or of a group that was made anew.
    assert new_oom_kills(known, OomKills(machine=0, own_group=0)) == OomKills()


def test_the_counter_of_a_machine_that_was_started_again_tells_nothing(tmp_path: Path) -> None:
    seen = Seen(
        run_directory=tmp_path,
        directory=tmp_path,
        started_seconds=0.0,
        status=None,
        words=None,
        leader=None,
        processes=frozenset(),
        groups=(),
        device_users=frozenset(),
        kernel_lines=(),
        oom_kills=OomKills(machine=2, own_group=1),
        is_stop_asked=False,
        machine_restarted=True,
        ended_because=None,
        ended_kind="",
        made_step=False,
        leftovers=(),
        survivors=("none is asked about devices",),
    )
    assert gather(seen).oom_kills == OomKills(machine=None, own_group=1)


def test_the_kernel_counter_of_this_machine_can_be_read() -> None:
    assert (read_oom_kills().machine is not None) == ("oom_kill " in Path("/proc/vmstat").read_text())


_LAUNCHER = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 4, in step
[rank1]:     raise ValueError("bad shape")
[rank1]: ValueError: bad shape
Traceback (most recent call last):
  File "/venv/bin/launch", line 8, in <module>
    sys.exit(main())
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 20822)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_13:46:26
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 20823)  (WHATEVER)
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("-9", ExitStatus(signal_number=9)),
        ("1", ExitStatus(code=1)),
        ("137", ExitStatus(signal_number=9, is_from_shell=True)),
    ],
)
def test_a_launcher_says_which_rank_failed_first_and_the_rank_says_why(code: str, status: ExitStatus) -> None:
    output = _LAUNCHER.format(code=code)
    assert rank_failure(output) == RankFailure(rank=1, process_id=20823, status=status)
    # As a launcher prints it that also writes the output of each rank to a file of its own.
    for printed in (output, output.replace("[rank1]:", "[default1]:[rank1]:")):
        seen = last_exception(printed)
        assert seen is not None
        assert (seen.kind, seen.frame) == ("ValueError", "/job/train.py:4 in step")
    assert rank_failure("exitcode  : -9 (pid: 7)") is None


def test_the_frame_is_the_innermost_of_the_users_own_code() -> None:
    output = """
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    model(x)
  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in linear
    return F.linear(x)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""
    seen = last_exception(output)
    assert seen is not None
    assert seen.frame == "/job/train.py:3 in <module>"


def test_what_python_prints_while_it_collects_garbage_ended_nothing() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nAssertionError: x\n'
    assert last_exception(f"Exception ignored in: <function f>\n{trace}") is None
    in_thread = last_exception(f"Exception in thread Thread-1:\n{trace}")
    alone = last_exception(trace)
    assert in_thread is not None
    assert alone is not None
    assert (in_thread.is_last, alone.is_last) == (False, True)
    followed = last_exception(trace + "epoch 2\n" * 20)
    assert followed is not None
    assert not followed.is_last


def test_the_error_file_of_a_launcher_holds_the_exception_of_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    trace = 'Traceback (most recent call last):\n  File "train.py", line 4, in f\nValueError: bad\n'
    path.write_text(
        json.dumps({"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": trace}}})
    )
    seen = read_error_file(path)
    assert seen is not None
    assert (seen.kind, seen.frame) == ("ValueError", "train.py:4 in f")
    path.write_text('{"message": 7}')
    assert read_error_file(path) is None
    assert read_error_file(tmp_path / "none") is None


_KERNEL = [
    "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/a,task_memcg=/a/unbroken-12-7,task=python,pid=71,uid=0",
    "Memory cgroup out of memory: Killed process 71 (python) total-vm:9kB, anon-rss:60000kB, "
    "file-rss:5000kB, shmem-rss:0kB, UID:0",
    "oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/other,task=java,pid=72,uid=0",
    "Out of memory: Killed process 72 (java (x)) total-vm:9kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=71, name=python, GPU has fallen off the bus.",
]


def test_the_kernels_log_tells_whom_it_ended_in_our_group() -> None:
    ours = Victim(process_id=71, name="python", size_bytes=65000 * 1024)
    assert victims(_KERNEL, group="unbroken-12-7", processes={72}) == (ours,)
    assert victims(_KERNEL, group=None, processes={71}) == (ours,)
    assert [victim.name for victim in victims(_KERNEL, group=None, processes={72})] == ["java (x)"]
    assert victims(_KERNEL, group="unbroken-99-7", processes={71}) == ()


def test_the_kernels_log_tells_of_failed_devices() -> None:
    (error,) = device_errors(_KERNEL)
    assert (error.code, error.is_of_hardware, error.process_id) == (79, True, 71)
    (nameless,) = device_errors(["NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE"])
    assert (nameless.code, nameless.process_id) == (48, None)


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        (
            "4:memory:/a/b\n6:freezer:/\n0::/\n",
            "35 31 0:32 / /c/memory rw shared:3 - cgroup cgroup rw,memory\n"
            "37 31 0:34 / /c/freezer rw - cgroup cgroup rw,freezer\n"
            "41 31 0:38 / /c/unified rw - cgroup2 cgroup2 rw\n",
            {"unified": "/c/unified", "memory": "/c/memory/a/b", "freezer": "/c/freezer"},
        ),
        ("0::/user.slice\n", "9 1 0:5 / /c rw - cgroup2 none rw\n", {"unified": "/c/user.slice"}),
        # In a container the path may be the host's, and the mount shows the container's group alone.
        ("0::/docker/71\n", "9 1 0:5 /docker/71 /c rw - cgroup2 none rw\n", {"unified": "/c"}),
        ("0::/docker/71/in\n", "9 1 0:5 /docker/71 /c rw - cgroup2 x rw\n", {"unified": "/c/in"}),
        ("4:cpu,memory:/a\n", "9 1 0:5 /b /c rw - cgroup none rw,memory\n", {"memory": "/c"}),
        ("0::/../other\n", "9 1 0:5 / /c rw - cgroup2 x rw\n", {"unified": "/c"}),
        ("0::/a b\n", "9 1 0:5 / /my\\040disk rw - cgroup2 x rw\n", {"unified": "/my disk/a b"}),
        ("", "", {}),
    ],
)
def test_our_own_groups_are_found_also_in_containers(
    groups: str, mounts: str, expected: dict[str, str]
) -> None:
    found = {name: str(group.directory) for name, group in find_groups(groups, mounts).items()}
    assert found == expected


def test_mounts_with_names_that_are_no_text_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_bytes(b"0::/a\n")
    mounts = b"7 1 0:4 / /disk\xff\xe2\x80\xa8x rw - ext4 /dev/sdb rw\n9 1 0:5 / /c\xff rw - cgroup2 x rw\n"
    (tmp_path / "self/mountinfo").write_bytes(mounts)
    (group,) = control_groups(proc=tmp_path).values()
    assert os.fsencode(group.directory) == b"/c\xff/a"
    assert list(group.upwards()) == [group.directory, group.mount]
    assert control_groups(proc=tmp_path / "none") == {}


def test_version_1_counts_kills_in_each_group_for_itself(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "inner/memory.oom_control").write_text("oom_kill_disable 0\noom_kill 2\n")
    assert group_oom_kills(tmp_path) == 3


def test_version_2_counts_kills_in_the_groups_above_too(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "inner/memory.events").write_text("oom_kill 2\n")
    assert group_oom_kills(tmp_path) == 2
    assert group_oom_kills(tmp_path / "nowhere") is None


def test_what_another_killer_says_is_found_in_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journalctl"
    journal.write_text(
        "#!/bin/sh\necho 'sending SIGTERM to process 9 uid 0'\necho 'sending SIGKILL to process 71 uid 0'\n"
    )
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_killer([], {71}, started_seconds=0.0) == "sending SIGKILL to process 71 uid 0"
    assert find_killer([], {7}, started_seconds=0.0) == ""
    journal.write_text("#!/bin/sh\necho 'Killed /user.slice/job.service due to memory pressure'\n")
    cell = tmp_path / "job.service/unbroken-12-7"
    assert "memory pressure" in find_killer([cell], {7}, started_seconds=0.0)
    monkeypatch.setenv("PATH", "")
    assert find_killer([], {71}, started_seconds=0.0) == ""


_NVML = """
class NVMLError(Exception):
    pass
class Process:
    pid, usedGpuMemory = {process_id}, 40 << 30
def nvmlInit():
    pass
def nvmlDeviceGetCount():
    return 1
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [Process] if __import__("os").path.exists({mark!r}) else []
"""


@pytest.fixture
def as_before() -> Iterator[None]:
    """Asking makes this process, as it makes a supervisor, one that orphans are handed to."""
    yield
    leave_orphans_to_init()


def test_a_driver_that_never_answers_is_given_up_and_leaves_no_child_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_before: None, capfd: pytest.CaptureFixture[str]
) -> None:
    # The process that waits for it ends when the test does.
    mark = tmp_path / "asked"
    waiting = f"import time; open({str(mark)!r}, 'w').write('x'); time.sleep(3)"
    (tmp_path / "pynvml.py").write_text(waiting)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("UNBROKEN_NVML", "1")
    monkeypatch.setattr(gpu_processes, "_ANSWER_SECONDS", 1.0)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text() if children.exists() else ""
    assert wait_for_memory({7}, timeout_seconds=60.0) == []
    assert mark.exists()
    assert (children.read_text() if children.exists() else "") == before
    assert "has not told within 1 s" in capfd.readouterr().err


def test_the_memory_of_a_gpu_is_waited_for_and_who_holds_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_before: None
) -> None:
    mark = tmp_path / "held"
    mark.touch()
    (tmp_path / "pynvml.py").write_text(_NVML.format(process_id=os.getpid(), mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("UNBROKEN_NVML", "1")
    (holder,) = wait_for_memory({7}, timeout_seconds=60.0)
    assert str(holder).startswith(f"process {os.getpid()} (")
    assert str(holder).endswith("42950 MB of GPU 0")
    # Ours: the time is waited for, and no longer.
    assert wait_for_memory({os.getpid()}, timeout_seconds=0.1) == [holder]
    mark.unlink()
    assert wait_for_memory({os.getpid()}, timeout_seconds=60.0) == []


@pytest.mark.parametrize("has_cell", [True, False])
def test_of_processes_that_are_gone_those_that_used_the_gpu_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cell: bool
) -> None:
    monkeypatch.setenv("UNBROKEN_NVML", "1")
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    ranks = {process.pid for process in processes}
    (tmp_path / "cgroup.procs").write_text("".join(f"{rank}\n" for rank in ranks))
    users = DeviceUsers(Cell([tmp_path]) if has_cell else None)
    users.watch(Started(attempt=1, directory=tmp_path, run_directory=tmp_path, leader=processes[0].pid))
    for process in processes:
        users.look(Look(now_seconds=time.monotonic(), beat=None, is_stop_asked=False, has_leader=True))
        process.kill()
        process.wait()
        (tmp_path / "cgroup.procs").write_text("")
    users.look(Look(now_seconds=time.monotonic(), beat=None, is_stop_asked=False, has_leader=False))
    assert ranks <= users.process_ids
    # Where there is no GPU nothing is looked at.
    monkeypatch.setenv("UNBROKEN_NVML", "0")
    idle = DeviceUsers(None)
    idle.look(Look(now_seconds=time.monotonic(), beat=None, is_stop_asked=False, has_leader=True))
    assert idle.process_ids == frozenset()


def test_the_mark_that_systemd_oomd_leaves_on_a_group_is_read(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "user.oomd_kill", b"3")
    except OSError:
        pytest.skip("needs a file system with extended attributes")
    assert find_killer([tmp_path], {7}, started_seconds=0.0).startswith("systemd-oomd has ended 3 processes")
