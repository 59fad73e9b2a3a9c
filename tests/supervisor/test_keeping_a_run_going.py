"""Real supervisors and real processes: restarting, holding, ending."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench


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


@pytest.mark.chaos
def test_a_crashed_process_is_replaced_within_half_a_second(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, time
        print(time.time(), flush=True)
        if os.environ["UNBROKEN_ATTEMPT"] != "3":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    done = bench.python(script)
    starts = [float(line) for line in done.stdout.split()]
    assert len(starts) == 3
    assert min(after - before for before, after in itertools.pairwise(starts)) < 0.5


@pytest.mark.chaos
def test_a_crash_loop_is_held_with_78(bench: Bench) -> None:
    done = bench.run("sh", "-c", "kill -SEGV $$")
    assert done.returncode == 78
    assert bench.attempts() == 3
    assert bench.state()["state"] == "held"
    assert "3 times in a row" in bench.state()["reason"]


@pytest.mark.chaos
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
        from unbroken.supervisor.plan import Plan
        from unbroken.supervisor.supervisor import Supervisor
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


def test_a_request_to_stop_is_forgotten_only_once_the_stop_is_written_down(bench: Bench) -> None:
    supervisor = bench.script(
        "supervise.py",
        f"""
        import os, sys
        from pathlib import Path
        from unbroken.supervisor.stopping import block_signals
        from unbroken.supervisor.plan import Plan
        from unbroken.supervisor.supervisor import Supervisor
        block_signals()
        directory = Path({str(bench.directory)!r})
        keeper = Supervisor(Plan(directory=directory, command=("sh", "-c", "kill -TERM $PPID; sleep 60")))
        def look(kind, _):
            if kind == "run-ended":
                print((directory / "control" / "stop.json").exists())
        keeper._records.listen(look)
        code = keeper.run()
        print((directory / "control" / "stop.json").exists())
        """,
    )
    done = bench.popen([sys.executable, supervisor], stdout=subprocess.PIPE)
    assert done.communicate(timeout=60)[0].split() == ["True", "False"]
    assert bench.state()["state"] == "stopped"


@pytest.mark.chaos
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


@pytest.mark.chaos
def test_a_missing_script_is_not_restarted(bench: Bench) -> None:
    assert bench.python("nowhere.py").returncode == 78
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_a_command_that_a_shell_does_not_find_is_not_restarted(bench: Bench) -> None:
    assert bench.run("sh", "-c", "pyhton train.py").returncode == 78
    assert bench.verdict(1)["outcome"] == "not-started"
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_a_file_that_is_no_program_is_held_with_the_systems_words(bench: Bench) -> None:
    path = Path(bench.script("train", "\0no program"))
    path.chmod(0o755)
    assert bench.run(str(path)).returncode == 78
    assert "Exec format error" in bench.state()["evidence"][0]


@pytest.mark.chaos
def test_checkpoints_that_cannot_be_listed_for_a_while_do_not_end_the_supervision(bench: Bench) -> None:
    # Nothing can follow a link to itself, not even root.
    script = bench.script(
        "train.py",
        """
        import os, sys
        from pathlib import Path
        folder = Path(os.environ["UNBROKEN_RUN_DIR"], "checkpoints")
        if os.environ["UNBROKEN_ATTEMPT"] == "1":
            folder.symlink_to(folder)
            sys.exit(1)
        folder.unlink()
        """,
    )
    done = bench.python(script)
    assert (done.returncode, bench.state()["state"], bench.attempts()) == (0, "done", 2), done.stderr
    assert "newer checkpoint is not known" in (bench.directory / "supervisor.log").read_text()


@pytest.mark.chaos
def test_saved_and_run_me_again_restarts_at_once(bench: Bench) -> None:
    done = bench.run("sh", "-c", "test $UNBROKEN_ATTEMPT = 3 || exit 75", options=("--backoff", "500"))
    assert done.returncode == 0
    assert bench.attempts() == 3


@pytest.mark.chaos
def test_run_me_again_that_leads_nowhere_is_handed_over_with_75(bench: Bench) -> None:
    done = bench.run("sh", "-c", "exit 75")
    assert done.returncode == 75
    assert bench.attempts() == 4
    assert bench.state()["state"] == "stopped"


@pytest.mark.chaos
@pytest.mark.parametrize("code", [78, 93])
def test_do_not_restart_is_obeyed(bench: Bench, code: int) -> None:
    assert bench.run("sh", "-c", f"exit {code}").returncode == 78
    assert bench.attempts() == 1


@pytest.mark.chaos
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


@pytest.mark.chaos
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


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_signal_after_training_is_done_is_named_and_no_failure(
    bench: Bench, number: signal.Signals
) -> None:
    done = bench.python(bench.script("train.py", f"{_COMPLETES}\nos.kill(os.getpid(), {number:d})\n"))
    assert (done.returncode, bench.attempts()) == (0, 1)
    assert f"ended by {number.name}" in bench.state()["reason"]
    assert bench.state()["state"] == "done"


@pytest.mark.chaos
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


@pytest.mark.chaos
def test_a_run_that_is_held_without_a_hint_says_how_to_go_on(bench: Bench) -> None:
    done = bench.run("sh", "-c", "exit 3", options=("--max-restarts", "0"))
    assert done.stderr.splitlines()[-1].endswith("when it is mended, start it again")


@pytest.mark.chaos
def test_a_script_with_a_run_directory_of_its_own_is_held_with_the_way_out(bench: Bench) -> None:
    script = bench.script("train.py", 'import unbroken\nwith unbroken.Run("elsewhere"):\n    pass\n')
    done = bench.python(script)
    assert done.returncode == 78
    assert bench.attempts() == 1
    assert "--run-dir" in done.stderr.splitlines()[-1]
    assert not (bench.place / "elsewhere").exists()


@pytest.mark.chaos
def test_restarts_can_be_limited(bench: Bench) -> None:
    assert bench.run("sh", "-c", "exit 3", options=("--max-restarts", "0")).returncode == 78
    assert bench.attempts() == 1
