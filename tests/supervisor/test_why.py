"""`unbroken why`: of runs that go on, that ended, whose supervisor is gone, that never had one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unbroken.cli.main import main
from unbroken.rundir.identity import new_attempt, open_run
from unbroken.rundir.last_words import LastWords, write_last_words
from unbroken.rundir.layout import attempt_directory

from .conftest import is_running

if TYPE_CHECKING:
    from .conftest import Bench


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["why", *arguments]) == 0
    return capsys.readouterr().out


def why_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(why(capsys, *arguments, "--json"))
    return value


def test_why_tells_of_a_run_that_was_held_what_happened_and_what_to_do(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal
        if os.environ["UNBROKEN_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad shape")
        """,
    )
    assert bench.python(script).returncode == 78
    directory = str(bench.directory)

    said = why(capsys, directory)
    assert "state       held" in said
    assert "attempt 2   failed (likely)" in said
    assert "ValueError: bad shape in " in said
    assert "evidence    exit code 1" in said
    assert "decided     hold (exit code 78): it failed before its first step" in said
    assert "`unbroken release " in said
    assert "   1  killed" in said
    assert said.rstrip().endswith("; then restart")

    value = why_json(capsys, directory)
    assert value["state"] == "held"
    assert (value["attempt"]["outcome"], value["attempt"]["kind"]) == ("failed", "ValueError")
    assert value["attempt"]["frame"].endswith("train.py:5 in <module>")
    assert value["attempt"]["decision"]["action"] == "hold"
    (first,) = value["before"]
    assert (first["outcome"], first["decision"]["action"]) == ("killed", "restart")
    assert value["next"]

    first = why_json(capsys, directory, "--attempt", "1")["attempt"]
    assert (first["attempt"], first["kind"], first["confidence"]) == (1, "SIGKILL", "unknown")
    assert main(["why", directory, "--attempt", "7"]) == 2
    assert "found 2 of them" in capsys.readouterr().err


def test_why_tells_what_goes_on_and_what_was_lost(
    bench: Bench, training: str, capsys: pytest.CaptureFixture[str]
) -> None:
    viewer = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    directory = str(bench.directory)
    live = why(capsys, directory)
    assert "state       running, attempt 1" in live
    assert "attempt 1   it runs, at step " in live
    assert "unbroken logs -f " in live
    assert why_json(capsys, directory)["attempt"]["is_running"]

    state = bench.state()
    os.kill(state["supervisor"]["process_id"], signal.SIGKILL)
    viewer.communicate(timeout=30)
    orphaned = why(capsys, directory)
    assert "state       lost" in orphaned
    assert "attempt 1   it runs" in orphaned
    assert "unbroken revive " in orphaned

    leader = state["leader"]["process_id"]
    os.kill(leader, signal.SIGKILL)
    # Not when its environment is gone: a process that exits gives up its memory before it is dead.
    bench.until(lambda: not is_running(leader))
    lost = why_json(capsys, directory)
    assert (lost["attempt"]["outcome"], lost["attempt"]["confidence"]) == ("lost", "unknown")
    assert lost["attempt"]["step"] >= 1


def test_what_why_says_to_start_a_stopped_run_again_does_so_from_anywhere(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    script = bench.script("it is.sh", "test $UNBROKEN_ATTEMPT = 1 && kill -TERM $PPID && sleep 60; pwd")
    bench.run("sh", Path(script).name)
    assert bench.state()["state"] == "stopped"
    (line,) = (line for line in why_json(capsys, str(bench.directory))["next"] if line.startswith("to go on"))
    command = line.split("`")[1].replace(" unbroken ", f" {shlex.join(bench.command())} ")
    elsewhere = bench.place / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(command, shell=True, check=True, cwd=elsewhere, env=bench.environment, timeout=60)
    assert bench.output(2) == f"{bench.place}\n"


@pytest.mark.parametrize(
    ("words", "outcome", "said"),
    [
        (LastWords(ending="completed", step=9), "completed", "it completed, at step 9"),
        (
            LastWords(ending="failed", step=4, kind="KeyError", message="'x'", hint="look"),
            "failed",
            "KeyError: 'x'",
        ),
        (LastWords(ending="running", step=0), "lost", "no supervisor was there"),
        (None, "lost", "no supervisor was there"),
    ],
)
def test_why_tells_of_a_run_that_never_had_a_supervisor_what_it_said_itself(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: LastWords | None,
    outcome: str,
    said: str,
) -> None:
    open_run(tmp_path)
    attempt = new_attempt(tmp_path)
    if words is not None:
        write_last_words(attempt_directory(tmp_path, attempt), words)
    assert said in why(capsys, str(tmp_path))
    value = why_json(capsys, str(tmp_path))
    assert (value["state"], value["attempt"]["outcome"]) == ("unsupervised", outcome)


def test_why_of_a_run_that_was_never_started_has_nothing_to_explain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_run(tmp_path)
    assert "state       unsupervised" in why(capsys, str(tmp_path))
    assert why_json(capsys, str(tmp_path))["attempt"] is None
