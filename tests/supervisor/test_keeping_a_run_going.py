"""Real supervisors and real processes: starting, restarting, holding, refusing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench


def test_output_goes_to_stdout_notices_to_stderr_and_records_to_the_run_directory(bench: Bench) -> None:
    done = bench.run("sh", "-c", "echo one; echo two >&2")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n")
    assert "attempt 1 started" in done.stderr
    assert "completed" in done.stderr
    assert bench.output() == "one\ntwo\n"
    assert bench.read("attempts/0001/exit.json")["code"] == 0
    assert bench.verdict(1)["outcome"] == "completed"
    assert (bench.state()["state"], bench.state()["exit_code"]) == ("done", 0)
    journal = [json.loads(line) for line in (bench.directory / "journal.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in journal]
    assert kinds == ["run-started", "attempt-started", "attempt-ended", "run-ended"]
    assert not (bench.directory / "supervisor-holder.json").exists()


def test_a_second_run_in_the_same_directory_is_a_further_attempt(bench: Bench) -> None:
    assert bench.run("echo", "first").returncode == 0
    again = bench.run("echo", "second")
    assert (again.returncode, again.stdout) == (0, "second\n")
    assert bench.output(2) == "second\n"


def test_the_attempt_gets_a_clean_environment_of_its_own(bench: Bench) -> None:
    script = bench.script(
        "look.py",
        """
        import json, os, signal, sys
        names = ("UNBROKEN_RUN_DIR", "UNBROKEN_ATTEMPT", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "MINE")
        print(json.dumps({
            "environment": {name: os.environ.get(name) for name in names},
            "leads its session": os.getsid(0) == os.getpid(),
            "stdin": sys.stdin.read(),
            "directory": os.getcwd(),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "hang-up": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
            "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
            "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2)[:-1],
        }))
        """,
    )
    bench.environment |= {"MINE": "kept", "PYTHONUNBUFFERED": "0"}
    seen = json.loads(bench.python(script).stdout)
    assert seen == {
        "environment": {
            "UNBROKEN_RUN_DIR": str(bench.directory),
            "UNBROKEN_ATTEMPT": "1",
            "PYTHONUNBUFFERED": "0",
            "PYTHONFAULTHANDLER": "1",
            "MINE": "kept",
        },
        "leads its session": True,
        "stdin": "",
        "directory": str(bench.place),
        "blocked": [],
        "hang-up": True,
        "interrupt": True,
        "descriptors": [],
    }


def test_a_module_of_the_users_does_not_take_the_place_of_one_of_ours(bench: Bench) -> None:
    bench.script("json.py", "raise SystemExit('the wrong json')")
    done = bench.run("echo", "fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")


def test_arguments_of_the_command_stay_its_own(bench: Bench) -> None:
    done = bench.run("echo", "--name", "x", "--", "--grace", "-h")
    assert done.stdout == "--name x -- --grace -h\n"


def test_a_killed_attempt_is_restarted_and_the_verdict_says_what_is_known(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal
        attempt = int(os.environ["UNBROKEN_ATTEMPT"])
        print("attempt", attempt)
        if attempt < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    done = bench.python(script)
    assert (done.returncode, done.stdout) == (0, "attempt 1\nattempt 2\nattempt 3\n")
    verdict = bench.verdict(1)
    assert (verdict["outcome"], verdict["kind"]) == ("killed", "SIGKILL")
    assert any("memory" in line for line in verdict["evidence"])
    assert bench.state()["restarts"] == 2


def test_a_crash_loop_is_held_with_78(bench: Bench) -> None:
    done = bench.run("sh", "-c", "kill -SEGV $$")
    assert done.returncode == 78
    assert bench.attempts() == 3
    assert bench.state()["state"] == "held"
    assert "3 times in a row" in bench.state()["reason"]


def test_progress_keeps_a_run_that_crashes_again_and_again_going(bench: Bench) -> None:
    training = bench.script(
        "train.py",
        """
        import os, signal
        from pathlib import Path
        attempt = int(os.environ["UNBROKEN_ATTEMPT"])
        if attempt < 6:
            (Path(os.environ["UNBROKEN_RUN_DIR"]) / "checkpoints" / f"step-{attempt:08d}").mkdir(parents=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    # Verification has its own tests; here every checkpoint that is listed counts as verified.
    supervisor = bench.script(
        "supervise.py",
        f"""
        import sys
        from pathlib import Path
        from unbroken.supervisor.progress import newest_listed
        from unbroken.supervisor.restart_policy import RestartPolicy
        from unbroken.supervisor.stopping import block_signals
        from unbroken.supervisor.supervisor import Plan, Supervisor
        block_signals()
        plan = Plan(
            directory=Path({str(bench.directory)!r}),
            command=(sys.executable, {training!r}),
            policy=RestartPolicy(base_seconds=0.01),
        )
        sys.exit(Supervisor(plan, newest_verified=newest_listed).run())
        """,
    )
    done = subprocess.run([sys.executable, supervisor], env=bench.environment, timeout=60, check=False)
    assert done.returncode == 0
    assert bench.attempts() == 6


def test_checkpoints_that_do_not_verify_are_no_progress(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal
        from pathlib import Path
        name = f"step-{int(os.environ['UNBROKEN_ATTEMPT']):08d}"
        (Path(os.environ["UNBROKEN_RUN_DIR"]) / "checkpoints" / name).mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    assert bench.python(script).returncode == 78
    assert bench.attempts() == 3


def test_a_typo_is_not_restarted(bench: Bench) -> None:
    done = bench.python(bench.script("train.py", "print('start')\nprint(lerning_rate)\n"))
    assert done.returncode == 78
    assert bench.attempts() == 1
    assert "NameError: name 'lerning_rate' is not defined" in done.stderr
    assert bench.verdict(1)["frame"].endswith("train.py:2 in <module>")


def test_a_missing_script_is_not_restarted(bench: Bench) -> None:
    assert bench.python("nowhere.py").returncode == 78
    assert bench.attempts() == 1


def test_a_command_that_a_shell_does_not_find_is_not_restarted(bench: Bench) -> None:
    assert bench.run("sh", "-c", "pyhton train.py").returncode == 78
    assert bench.verdict(1)["outcome"] == "not-started"
    assert bench.attempts() == 1


def test_a_file_that_is_no_program_is_held_with_the_systems_words(bench: Bench) -> None:
    path = Path(bench.script("train", "\0no program"))
    path.chmod(0o755)
    assert bench.run(str(path)).returncode == 78
    assert "Exec format error" in bench.state()["evidence"][0]


def test_saved_and_run_me_again_restarts_at_once(bench: Bench) -> None:
    done = bench.run("sh", "-c", "test $UNBROKEN_ATTEMPT = 3 || exit 75", options=("--backoff", "500"))
    assert done.returncode == 0
    assert bench.attempts() == 3


def test_run_me_again_that_leads_nowhere_is_handed_over_with_75(bench: Bench) -> None:
    done = bench.run("sh", "-c", "exit 75")
    assert done.returncode == 75
    assert bench.attempts() == 4
    assert bench.state()["state"] == "stopped"


@pytest.mark.parametrize("code", [78, 93])
def test_do_not_restart_is_obeyed(bench: Bench, code: int) -> None:
    assert bench.run("sh", "-c", f"exit {code}").returncode == 78
    assert bench.attempts() == 1


def test_exit_code_zero_is_not_believed_against_the_last_words(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os
        from pathlib import Path
        from unbroken.rundir.last_words import LastWords, write_last_words
        attempt = int(os.environ["UNBROKEN_ATTEMPT"])
        here = Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / f"{attempt:04d}"
        if attempt == 1:
            write_last_words(here, LastWords(ending="running", step=5))
        elif attempt == 2:
            write_last_words(here, LastWords(ending="failed", step=5, kind="KeyError", message="x"))
        else:
            write_last_words(here, LastWords(ending="completed", step=9))
            os.abort()
        """,
    )
    # No step was seen, but the KeyError is not the first that happened: attempt 1 is no proof of work.
    done = bench.run("sh", "-c", f"{sys.executable} {script}; true")
    assert [bench.verdict(attempt)["outcome"] for attempt in (1, 2)] == ["vanished", "failed"]
    assert done.returncode == 78
    assert bench.run("sh", "-c", f"{sys.executable} {script}; true").returncode == 0
    assert bench.verdict(3)["outcome"] == "completed"


_COMPLETES = """
import os, signal, sys
from pathlib import Path
from unbroken.rundir.last_words import LastWords, write_last_words
here = Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / f"{int(os.environ['UNBROKEN_ATTEMPT']):04d}"
write_last_words(here, LastWords(ending="completed", step=9))
"""


@pytest.mark.parametrize(
    ("afterwards", "code"), [("raise SystemExit('export failed')", 1), ("1 / 0", 1), ("sys.exit(3)", 3)]
)
def test_a_script_that_fails_after_training_is_done_is_not_restarted_and_not_hidden(
    bench: Bench, afterwards: str, code: int
) -> None:
    done = bench.python(bench.script("train.py", f"{_COMPLETES}\n{afterwards}\n"))
    said = f"training completed; the script then exited with code {code}"
    assert done.returncode == code
    assert bench.attempts() == 1
    assert done.stderr.splitlines()[-1].startswith(f"unbroken: done: {said}")
    assert (bench.state()["state"], bench.state()["exit_code"]) == ("done", code)
    assert said in bench.state()["reason"]
    assert bench.verdict(1)["evidence"][0] == said
    assert f"exit code   {code}" in bench.cli("status", "it").stdout


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_signal_after_training_is_done_is_named_and_no_failure(
    bench: Bench, number: signal.Signals
) -> None:
    done = bench.python(bench.script("train.py", f"{_COMPLETES}\nos.kill(os.getpid(), {number:d})\n"))
    assert (done.returncode, bench.attempts()) == (0, 1)
    assert f"ended by {number.name}" in bench.state()["reason"]
    assert bench.state()["state"] == "done"


def test_the_last_line_of_a_run_that_is_held_is_the_hint_of_its_last_words(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os
        from pathlib import Path
        from unbroken.rundir.last_words import LastWords, write_last_words
        attempt = int(os.environ["UNBROKEN_ATTEMPT"])
        here = Path(os.environ["UNBROKEN_RUN_DIR"]) / "attempts" / f"{attempt:04d}"
        said = {"kind": "input", "message": "no", "exit_code": 78, "hint": "turn it on"}
        write_last_words(here, LastWords(ending="failed", step=0, **said))
        raise SystemExit(78)
        """,
    )
    done = bench.python(script)
    assert done.returncode == 78
    assert done.stderr.splitlines()[-1] == (
        "unbroken: held: a restart would end the same way (hint: turn it on)"
    )
    assert done.stderr.count("turn it on") == 1
    assert "hint        turn it on" in bench.cli("status", "it").stdout
    assert json.loads(bench.cli("status", "it", "--json").stdout)["hint"] == "turn it on"


def test_a_run_that_is_held_without_a_hint_says_how_to_go_on(bench: Bench) -> None:
    done = bench.run("sh", "-c", "exit 3", options=("--max-restarts", "0"))
    assert done.stderr.splitlines()[-1].endswith("when it is mended, start it again")


def test_a_script_with_a_run_directory_of_its_own_is_held_with_the_way_out(bench: Bench) -> None:
    script = bench.script("train.py", 'import unbroken\nwith unbroken.Run("elsewhere"):\n    pass\n')
    done = bench.python(script)
    assert done.returncode == 78
    assert bench.attempts() == 1
    assert "--run-dir" in done.stderr.splitlines()[-1]
    assert not (bench.place / "elsewhere").exists()


def test_restarts_can_be_limited(bench: Bench) -> None:
    assert bench.run("sh", "-c", "exit 3", options=("--max-restarts", "0")).returncode == 78
    assert bench.attempts() == 1


@pytest.mark.parametrize("command", ["nowhere-to-be-found", "./nowhere", "/etc/passwd", "/etc"])
def test_a_command_that_cannot_be_started_leaves_nothing_behind(bench: Bench, command: str) -> None:
    done = bench.run(command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {command}: ")
    assert "\n\nhint: " in done.stderr
    assert list(bench.place.iterdir()) == []


def test_a_place_that_cannot_be_a_run_directory_is_an_error_and_starts_nothing(bench: Bench) -> None:
    (bench.place / "file").write_text("in the way")
    for place in ("file", "file/below", "/proc/nothing-can-be-made-here"):
        done = bench.cli("run", "--run-dir", place, "--", "touch", str(bench.place / "started"))
        assert done.returncode != 0
        assert done.stderr.startswith("error: ")
        assert place in done.stderr
    assert not (bench.place / "started").exists()


def test_the_directory_of_another_program_is_refused(bench: Bench) -> None:
    bench.directory.mkdir(parents=True)
    (bench.directory / "run.json").write_text('{"format": "something else"}')
    done = bench.run("echo", "no")
    assert done.returncode == 78
    assert "something else" in done.stderr
    assert [path.name for path in bench.directory.iterdir()] == ["run.json"]


def test_a_run_of_another_name_is_refused(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    done = bench.cli("run", "--name", "other", "--run-dir", str(bench.directory), "--", "true")
    assert done.returncode == 2
    assert "expected run other, found run it" in done.stderr


def test_a_second_starter_is_refused_with_who_and_since_when(bench: Bench, training: str) -> None:
    first = bench.start("run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: "training" in bench.output())
    supervisor = bench.state()["supervisor"]["process_id"]
    second = bench.python(training)
    assert second.returncode == 78
    assert f"process {supervisor} on " in second.stderr
    assert " since 2" in second.stderr
    assert bench.attempts() == 1
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)


def test_detached_it_returns_at_once_and_the_run_goes_on(bench: Bench, training: str) -> None:
    done = bench.python(training, "--detach")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"unbroken logs -f {bench.directory}" in done.stderr
    bench.until(lambda: "training" in bench.output())
    assert bench.state()["state"] == "running"
    assert bench.cli("stop", "it").returncode == 0
    assert bench.state()["state"] == "stopped"


def test_the_default_name_is_that_of_the_script(bench: Bench) -> None:
    script = bench.script("fit.py", "")
    assert bench.cli("run", "--", sys.executable, script).returncode == 0
    assert (bench.place / "runs" / "fit" / "run.json").exists()


def test_a_reader_that_goes_away_ends_the_view_and_not_the_run(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        for step in range(100):
            print("step", step)
            time.sleep(0.01)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    assert viewer.stdout is not None
    assert viewer.stderr is not None
    viewer.stdout.readline()
    viewer.stdout.close()
    assert viewer.wait(timeout=30) == 1
    said = viewer.stderr.read()
    assert "the run goes on" in said
    assert "Traceback" not in said
    viewer.stderr.close()
    bench.until(lambda: bench.state().get("state") == "done")
    assert bench.output().count("step") == 100
