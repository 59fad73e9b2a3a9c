"""A supervisor that was killed: its attempt runs on, and another supervisor takes the run over."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unbroken.rundir.processes import read_stat
from unbroken.supervisor.cells import find_cell, living_in_cells

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Bench

# Counts into a file, until the file `end` of its attempt tells it how to end.
COUNTING = """
import os, signal, sys, time
from pathlib import Path
run = Path(os.environ["UNBROKEN_RUN_DIR"])
attempt = os.environ["UNBROKEN_ATTEMPT"]
end = run / f"end-{attempt}"
count = open(run / "count", "a")
number = 0
print("training", flush=True)
while not end.exists():
    count.write(f"{attempt} {number}\\n")
    count.flush()
    number += 1
    time.sleep(0.005)
how = int(end.read_text())
if how < 0:
    os.kill(os.getpid(), -how)
sys.exit(how)
"""


@pytest.fixture
def counting(bench: Bench) -> str:
    return bench.script("count.py", COUNTING)


def start(bench: Bench, script: str, *options: str) -> None:
    assert bench.python(script, "--detach", *options).returncode == 0
    bench.until(lambda: "training" in bench.output() and bench.state()["leader"])


def kill_supervisor(bench: Bench) -> None:
    process_id = bench.state()["supervisor"]["process_id"]
    os.kill(process_id, signal.SIGKILL)
    bench.until(lambda: not Path(f"/proc/{process_id}/stat").exists() or is_zombie(process_id))


def is_zombie(process_id: int) -> bool:
    found = read_stat(process_id)
    return found is None or found.state == "Z"


def end(bench: Bench, attempt: int, how: int) -> None:
    temporary = bench.directory / "end"
    temporary.write_text(str(how))
    temporary.rename(bench.directory / f"end-{attempt}")


def counted(bench: Bench, attempt: int = 1) -> list[int]:
    lines = [line.split() for line in (bench.directory / "count").read_text().splitlines()]
    return [int(number) for of, number in lines if of == str(attempt)]


def events(bench: Bench, kind: str) -> list[dict[str, Any]]:
    lines = (bench.directory / "journal.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("how", "code", "name"),
    [
        (42, 42, ""),
        pytest.param(-signal.SIGKILL, None, "SIGKILL", marks=pytest.mark.chaos),
        pytest.param(-signal.SIGSEGV, None, "SIGSEGV", marks=pytest.mark.chaos),
    ],
)
def test_a_running_attempt_is_adopted_and_its_exit_is_learned(
    bench: Bench, counting: str, how: int, code: int | None, name: str
) -> None:
    start(bench, counting)
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    end(bench, 2, 0)
    revived = bench.cli("revive", "it")
    assert revived.returncode == 0, revived.stderr
    assert "is kept going again: attempt 1 runs" in revived.stderr
    bench.until(lambda: bench.state()["state"] == "running")
    assert (bench.state()["leader"]["process_id"], bench.attempts()) == (leader, 1)
    end(bench, 1, how)
    bench.until(lambda: bench.state()["state"] == "done")
    ended = bench.read("attempts/0001/exit.json")
    assert (ended["code"], ended["signal"]) == (code, name)
    assert counted(bench) == list(range(len(counted(bench))))
    assert bench.attempts() == 2


@pytest.mark.chaos
def test_an_adopted_run_saves_and_stops_when_it_is_asked_to(bench: Bench, training: str) -> None:
    start(bench, training)
    kill_supervisor(bench)
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "running")
    assert bench.cli("stop", "it").returncode == 0
    assert (bench.state()["state"], bench.state()["exit_code"]) == ("stopped", 75)
    assert "saved" in bench.output()


@pytest.mark.chaos
def test_the_last_words_of_an_attempt_that_ended_unseen_decide(bench: Bench, training: str) -> None:
    start(bench, training)
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    os.kill(leader, signal.SIGTERM)
    # Collected by init: nobody can tell its exit status any more.
    bench.until(lambda: not Path(f"/proc/{leader}").exists())
    assert "ended unseen" in bench.cli("revive", "it").stderr
    bench.until(lambda: bench.attempts() == 2)
    assert bench.verdict(1)["outcome"] == "stopped"
    assert bench.verdict(1)["is_saved"]
    assert bench.cli("stop", "it").returncode == 0


@pytest.mark.chaos
def test_an_attempt_that_ended_unseen_and_without_a_word_is_lost_and_counts(
    bench: Bench, counting: str
) -> None:
    start(bench, counting)
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    os.kill(leader, signal.SIGKILL)
    bench.until(lambda: not Path(f"/proc/{leader}").exists())
    end(bench, 2, 0)
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "done")
    assert (bench.verdict(1)["outcome"], bench.verdict(1)["confidence"]) == ("lost", "unknown")
    assert "failure 1 of" in events(bench, "decision")[0]["reason"]


@pytest.mark.chaos
def test_all_of_an_adopted_attempt_is_gone_before_the_next_one_starts(
    bench: Bench, running: Callable[[int], bool]
) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, time
        from pathlib import Path
        run = Path(os.environ["UNBROKEN_RUN_DIR"])
        if os.environ["UNBROKEN_ATTEMPT"] == "2":
            stat = Path("/proc", (run / "escaped").read_text(), "stat")
            # Nobody waits for it any more, so init may not have collected it yet.
            print("there" if stat.exists() and ") Z " not in stat.read_text() else "gone")
            raise SystemExit
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (run / "escaped").write_text(str(os.getpid()))
            time.sleep(600)
        print("training", flush=True)
        time.sleep(600)
        """,
    )
    start(bench, script, "--backoff", "0.01")
    bench.until((bench.directory / "escaped").exists)
    kill_supervisor(bench)
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "running")
    os.kill(bench.state()["leader"]["process_id"], signal.SIGKILL)
    bench.until(lambda: bench.state()["state"] == "done")
    assert bench.output(2) == "gone\n"
    assert not running(int((bench.directory / "escaped").read_text()))


@pytest.mark.chaos
def test_failures_before_the_supervisor_was_killed_go_on_counting(bench: Bench) -> None:
    assert bench.run("sh", "-c", "kill -SEGV $$", options=("--detach", "--backoff", "1")).returncode == 0
    bench.until(lambda: bench.state().get("state") == "backing-off")
    kill_supervisor(bench)
    # The clock was years ahead then; no pause is longer than the longest.
    plan = bench.read("supervisor-plan.json")
    plan["policy"] |= {"cap_seconds": 0.1}
    (bench.directory / "supervisor-plan.json").write_text(json.dumps(plan))
    told = [json.loads(line) for line in (bench.directory / "journal.jsonl").read_text().splitlines()]
    ahead = [{**event, "next_start": time.time() + 1e8} if "next_start" in event else event for event in told]
    (bench.directory / "journal.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in ahead))
    revived = bench.cli("revive", "it")
    assert "no attempt was going on" in revived.stderr
    bench.until(lambda: bench.state()["state"] == "held")
    assert bench.attempts() == 3
    assert "3 times in a row" in bench.state()["reason"]


@pytest.mark.chaos
def test_what_is_held_is_not_revived_but_released_with_a_fresh_budget(bench: Bench) -> None:
    assert bench.run("sh", "-c", "kill -SEGV $$").returncode == 78
    revived = bench.cli("revive", "it")
    assert revived.returncode == 1
    assert "found one that is held" in revived.stderr
    assert "unbroken release" in revived.stderr
    assert bench.attempts() == 3
    released = bench.cli("release", "it")
    assert released.returncode == 0, released.stderr
    bench.until(lambda: bench.state()["state"] == "held" and bench.attempts() == 6)


@pytest.mark.chaos
@pytest.mark.parametrize("command", ["true", "sh -c 'kill -TERM $PPID; sleep 60'"])
def test_what_is_done_or_stopped_is_neither_revived_nor_released(bench: Bench, command: str) -> None:
    bench.run(*shlex.split(command))
    state = bench.state()["state"]
    assert state in ("done", "stopped")
    for again in ("revive", "release"):
        said = bench.cli(again, "it")
        assert (said.returncode, bench.attempts()) == (1, 1)
        assert f"found one that is {state}" in said.stderr


@pytest.mark.chaos
def test_a_run_whose_supervisor_was_killed_just_before_it_could_show_its_end_is_not_lost(
    bench: Bench,
) -> None:
    assert bench.run("true").returncode == 0
    path = bench.directory / "supervisor.json"
    path.write_text(json.dumps({**bench.state(), "state": "running", "exit_code": None}))
    assert json.loads(bench.cli("status", "it", "--json").stdout)["state"] == "lost"
    revived = bench.cli("revive", "it")
    assert revived.returncode == 1
    assert "found one that is done" in revived.stderr
    assert (bench.state()["state"], bench.state()["exit_code"], bench.attempts()) == ("done", 0, 1)


@pytest.mark.chaos
def test_a_run_that_nobody_kept_going_is_no_run_to_revive(bench: Bench) -> None:
    bench.directory.mkdir(parents=True)
    (bench.directory / "run.json").write_text(
        '{"format": "unbroken-run", "format_version": 1, "run_id": "x", "name": "it", "created": 1}'
    )
    for again in ("revive", "release"):
        said = bench.cli(again, "it")
        assert said.returncode == 1
        assert "hint: " in said.stderr


@pytest.mark.chaos
def test_a_copy_of_a_run_directory_has_no_part_in_what_runs_in_the_original(
    bench: Bench, counting: str, running: Callable[[int], bool]
) -> None:
    start(bench, counting)
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    copy = bench.directory.with_name("copy")
    shutil.copytree(bench.directory, copy, symlinks=True)
    assert living_in_cells(copy) == []
    assert find_cell(copy / "attempts/0001") is None
    stopped = bench.cli("stop", str(copy))
    assert "this is a copy of" in stopped.stderr
    assert str(leader) not in stopped.stderr
    for attempt in (1, 2):
        (copy / f"end-{attempt}").write_text("0")
    revived = bench.cli("revive", str(copy))
    assert "attempt 1 ended unseen" in revived.stderr, revived.stderr
    bench.until(lambda: json.loads((copy / "supervisor.json").read_text())["state"] == "done")
    assert running(leader)
    assert "attempt 1 runs" in bench.cli("revive", "it").stderr
    end(bench, 1, 0)
    bench.until(lambda: bench.state()["state"] == "done")
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_of_two_that_revive_at_once_one_wins_and_the_other_is_told_who(bench: Bench, counting: str) -> None:
    start(bench, counting)
    kill_supervisor(bench)
    both = [bench.start("revive", "it") for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 78]
    assert sum("keeps this run going" in text for text in said) == 1
    end(bench, 1, 0)
    bench.until(lambda: bench.state()["state"] == "done")
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_a_run_that_was_asked_to_stop_is_stopped_by_the_one_who_takes_over(
    bench: Bench, counting: str
) -> None:
    start(bench, counting, "--grace", "60")
    leader = bench.state()["leader"]["process_id"]
    os.kill(leader, signal.SIGSTOP)
    stopping = bench.start("stop", "it")
    bench.until(lambda: bench.state()["state"] == "stopping")
    kill_supervisor(bench)
    stopping.communicate(timeout=30)
    os.kill(leader, signal.SIGKILL)
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "stopped")
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_an_adopted_run_whose_time_to_stop_ran_out_unseen_gets_time_to_save(bench: Bench) -> None:
    # It does not read the request itself: the signal of its supervisor tells it.
    script = bench.script(
        "train.py", "trap 'echo saved; exit 75' TERM; echo training; while :; do sleep 0.1; done"
    )
    assert bench.run("sh", script, options=("--detach",)).returncode == 0
    bench.until(lambda: "training" in bench.output() and bench.state()["leader"])
    kill_supervisor(bench)
    (bench.directory / "control").mkdir(exist_ok=True)
    request = {"reason": "unbroken stop", "deadline": time.time() - 5}
    (bench.directory / "control" / "stop.json").write_text(json.dumps(request))
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "stopped")
    assert bench.output().endswith("saved\n")
    assert bench.state()["exit_code"] == 75


def test_after_a_reboot_the_run_goes_on_and_nothing_is_held_against_it(bench: Bench, counting: str) -> None:
    start(bench, counting, "--backoff", "500")
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    os.kill(leader, signal.SIGKILL)
    bench.until(lambda: not Path(f"/proc/{leader}").exists())
    # The same files, left by a boot before this one.
    now = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for name in ("supervisor.json", "supervisor-holder.json"):
        path = bench.directory / name
        path.write_text(path.read_text().replace(now, "00000000-0000-0000-0000-000000000000"))
    end(bench, 2, 0)
    revived = bench.cli("revive", "--boot")
    assert "ended unseen, before the machine was restarted" in revived.stderr, revived.stderr
    bench.until(lambda: bench.state()["state"] == "done")
    assert bench.verdict(1)["cause"] == "reboot"
    assert bench.attempts() == 2
    # Done: there is nothing left to revive.
    assert bench.cli("revive", "--boot").stderr == ""


@pytest.mark.chaos
def test_a_run_that_stopped_since_its_machine_was_taken_away_goes_on_when_it_is_back(
    bench: Bench, training: str
) -> None:
    start(bench, training)
    (bench.directory / "control").mkdir(exist_ok=True)
    request = {"reason": "preemption: reclaimed", "deadline": time.time() + 60, "is_preemption": True}
    (bench.directory / "control" / "stop.json").write_text(json.dumps(request))
    bench.until(lambda: bench.state()["state"] == "stopped")
    assert bench.cli("revive", "--boot").returncode == 0
    bench.until(lambda: "training" in bench.output(2))
    assert bench.cli("stop", "it").returncode == 0
    assert bench.cli("revive", "--boot").stderr == ""
    assert bench.attempts() == 2


@pytest.mark.chaos
def test_a_revived_run_has_the_directory_and_the_environment_of_its_start(
    bench: Bench, tmp_path: Path
) -> None:
    script = bench.script(
        "train.py",
        """
        import json, os, time
        names = ("MINE", "LATER", "SSH_AUTH_SOCK", "PATH")
        seen = {"directory": os.getcwd(), **{name: os.environ.get(name) for name in names}}
        if os.environ["UNBROKEN_ATTEMPT"] == "1":
            print("training", flush=True)
            time.sleep(600)
        print(json.dumps(seen))
        """,
    )
    before = dict(bench.environment)
    bench.environment |= {"MINE": "a secret", "SSH_AUTH_SOCK": "/tmp/gone", "DISPLAY": ":7"}
    start(bench, script)
    plan = bench.directory / "supervisor-plan.json"
    assert stat.S_IMODE(plan.stat().st_mode) == 0o600
    assert "a secret" in plan.read_text()
    assert not {"SSH_AUTH_SOCK", "DISPLAY", "TERM"} & bench.read(plan.name)["environment"].keys()
    kill_supervisor(bench)
    os.kill(bench.state()["leader"]["process_id"], signal.SIGKILL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        bench.command("revive", "it"),
        cwd=elsewhere,
        env={**before, "MINE": "another", "LATER": "x"},
        check=True,
        capture_output=True,
        timeout=60,
    )
    bench.until(lambda: bench.state()["state"] == "done")
    seen = json.loads(bench.output(2))
    assert seen["directory"] == str(bench.place)
    assert (seen["MINE"], seen["LATER"], seen["SSH_AUTH_SOCK"]) == ("a secret", None, None)


@pytest.mark.chaos
def test_what_the_last_supervisor_was_about_to_end_is_ended_for_the_reason_that_it_had(
    bench: Bench, counting: str, running: Callable[[int], bool]
) -> None:
    start(bench, counting)
    leader = bench.state()["leader"]["process_id"]
    kill_supervisor(bench)
    ending = {"kind": "attempt-ending", "attempt": 1, "because": "no step", "ended_kind": "hang", "time": 1.0}
    with (bench.directory / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(ending) + "\n")
    end(bench, 2, 0)
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "done")
    assert not running(leader)
    assert (bench.verdict(1)["outcome"], bench.verdict(1)["kind"]) == ("hung", "hang")


@pytest.mark.chaos
def test_supervisors_that_are_killed_at_random_moments_never_interrupt_the_job(
    bench: Bench, counting: str
) -> None:
    chosen = random.Random(7)
    start(bench, counting)
    for round_number in range(40):
        time.sleep(chosen.random() * 0.3)
        revived = bench.start("revive", "it")
        # Also one that has only just begun to take over.
        time.sleep(chosen.random() * 0.3)
        supervisor = bench.state()["supervisor"]["process_id"]
        try:
            os.kill(supervisor, signal.SIGKILL)
        except ProcessLookupError:
            assert round_number, "the first one lives"
        revived.communicate(timeout=60)
    bench.cli("revive", "it")
    end(bench, 2, 0)
    end(bench, 1, 42)
    bench.until(lambda: bench.state()["state"] == "done", seconds=60)
    assert bench.read("attempts/0001/exit.json")["code"] == 42
    assert counted(bench) == list(range(len(counted(bench))))
    assert len(counted(bench)) > 1000
    assert bench.attempts() == 2
