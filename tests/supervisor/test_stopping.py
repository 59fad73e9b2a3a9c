"""Real stops: by command, by Ctrl-C, by signal; in time, too late, at once."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from unbroken.rundir.heartbeat import read_heartbeat

from .in_process import look

if TYPE_CHECKING:
    import subprocess

    from .conftest import Bench

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    time.sleep(1)
"""


class Terminal:
    """A viewer in a terminal of its own, as a person has it."""

    def __init__(self, bench: Bench, *arguments: str) -> None:
        self.read_end, inner = pty.openpty()
        # The new session takes the terminal it opens first as its own, so that Ctrl-C and hang-up reach it.
        take = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", take, *bench.command(*arguments)]
        self.process = bench.popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        os.close(inner)
        os.set_blocking(self.read_end, False)
        self.text = ""

    def said(self, words: str) -> bool:
        # EIO: the last process that had the terminal open is gone.
        with suppress(BlockingIOError, OSError):
            self.text += os.read(self.read_end, 1 << 16).decode()
        return words in self.text

    def press_ctrl_c(self) -> None:
        os.write(self.read_end, b"\x03")


def start_deaf(bench: Bench, *options: str) -> subprocess.Popen[str]:
    script = bench.script("deaf.py", DEAF)
    viewer = bench.start("run", "--name", "it", *options, "--", sys.executable, script)
    bench.until(lambda: "deaf" in bench.output())
    return viewer


def start_training(bench: Bench, script: str, *options: str) -> subprocess.Popen[str]:
    viewer = bench.start("run", "--name", "it", *options, "--", sys.executable, script)
    bench.until(lambda: "training" in bench.output())
    return viewer


def end(viewer: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = viewer.communicate(timeout=30)
    return viewer.returncode, said


def test_stop_waits_until_the_state_is_saved_and_the_run_ends_with_75(bench: Bench, training: str) -> None:
    viewer = start_training(bench, training)
    done = look(bench, "stop", "it", "--json")
    assert done.returncode == 0
    assert "stopped: the run said that its state is saved" in done.stderr
    found = json.loads(done.stdout)
    assert (found["state"], found["exit_code"], found["outcome"]) == ("stopped", 75, "stopped")
    assert end(viewer)[0] == 75
    assert bench.verdict(1)["outcome"] == "stopped"
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_a_stop_that_was_obeyed_does_not_stop_the_next_start(bench: Bench, training: str) -> None:
    viewer = start_training(bench, training)
    assert bench.cli("stop").returncode == 0
    assert end(viewer)[0] == 75
    assert not (bench.directory / "control" / "stop.json").exists()
    assert bench.run("echo", "again").returncode == 0


@pytest.mark.chaos
def test_a_run_that_does_not_stop_in_time_is_killed(bench: Bench) -> None:
    viewer = start_deaf(bench, "--grace", "0.5")
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 143
    assert bench.state()["state"] == "stopped"
    assert bench.verdict(1)["kind"] == "by-supervisor"


@pytest.mark.chaos
def test_stop_can_give_another_time_than_run_did(bench: Bench) -> None:
    viewer = start_deaf(bench, "--grace", "1000")
    assert bench.cli("stop", "it", "--timeout", "0.3").returncode == 0
    assert end(viewer)[0] == 143


def test_stop_now_kills_at_once_even_after_a_patient_stop(bench: Bench) -> None:
    viewer = start_deaf(bench, "--grace", "1000")
    patient = bench.start("stop", "it")
    bench.until(lambda: bench.state()["state"] == "stopping")
    assert look(bench, "stop", "it", "--now").returncode == 0
    assert patient.wait(timeout=30) == 0
    patient.communicate()
    assert end(viewer)[0] == 143
    assert bench.verdict(1)["kind"] == "by-supervisor"


def test_stop_during_back_off_ends_at_once(bench: Bench) -> None:
    viewer = bench.start("run", "--name", "it", "--backoff", "600", "--", "sh", "-c", "kill -SEGV $$")
    bench.until(lambda: bench.state().get("state") == "backing-off")
    assert look(bench, "status", "it").stdout.count("next start") == 1
    done = look(bench, "stop", "it")
    assert done.returncode == 0
    assert "between two attempts" in done.stderr
    assert end(viewer)[0] == 75
    assert bench.attempts() == 1


@pytest.mark.chaos
def test_a_stop_file_alone_is_enough(bench: Bench, training: str) -> None:
    viewer = start_deaf(bench, "--grace", "0.2")
    (bench.directory / "control").mkdir()
    (bench.directory / "control" / "stop.json").write_text("{not json")
    assert end(viewer)[0] == 143


@pytest.mark.chaos
def test_a_run_that_is_not_running_cannot_be_stopped(bench: Bench) -> None:
    assert bench.run("true").returncode == 0
    done = bench.cli("stop", "it")
    assert done.returncode == 1
    assert done.stderr.startswith("error: run it: it is not running (done: ")


@pytest.mark.chaos
def test_a_stop_reaches_the_leader_and_not_its_workers(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import os, signal, sys, time
        told = []
        worker = os.fork()
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        if worker == 0:
            print("worker ready", flush=True)
            while True:
                time.sleep(0.05)
                if told:
                    print("worker was told", flush=True)
                    os._exit(1)
        while not told:
            time.sleep(0.05)
        time.sleep(0.5)
        assert os.waitpid(worker, os.WNOHANG) == (0, 0), "the worker did not live to the save"
        os.kill(worker, signal.SIGKILL)
        print("saved", flush=True)
        sys.exit(75)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", sys.executable, script)
    bench.until(lambda: "worker ready" in bench.output())
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75
    assert "worker was told" not in bench.output()


@pytest.mark.chaos
def test_training_behind_a_shell_is_asked_too_and_saves(bench: Bench, training: str) -> None:
    viewer = bench.start("run", "--name", "it", "--", "sh", "-c", f"{sys.executable} {training}; true")
    bench.until(lambda: "training" in bench.output())
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75
    assert "saved" in bench.output()


@pytest.mark.chaos
def test_a_shell_that_dies_leaves_time_to_what_it_ran(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import signal, sys, time
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        print("training", flush=True)
        while not told:
            time.sleep(0.02)
        time.sleep(2)
        print("saved after two seconds, asked", len(told), flush=True)
        """,
    )
    viewer = bench.start("run", "--name", "it", "--", "sh", "-c", f"{sys.executable} {script}; true")
    bench.until(lambda: "training" in bench.output())
    assert bench.cli("stop", "it").returncode == 0
    assert "saved after two seconds, asked 1\n" in bench.output()
    # Whoever spoke last was no witness of a save.
    assert end(viewer)[0] == 143


@pytest.mark.chaos
def test_a_run_that_is_suspended_can_be_stopped(bench: Bench, training: str) -> None:
    viewer = start_training(bench, training)
    os.kill(bench.state()["leader"]["process_id"], signal.SIGSTOP)
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75


@pytest.mark.chaos
def test_sigterm_to_the_supervisor_stops_and_sighup_does_nothing(bench: Bench, training: str) -> None:
    viewer = start_training(bench, training)
    supervisor = bench.state()["supervisor"]["process_id"]
    os.kill(supervisor, signal.SIGHUP)
    os.kill(supervisor, signal.SIGTERM)
    assert end(viewer)[0] == 75
    journal = (bench.directory / "journal.jsonl").read_text()
    assert f"SIGTERM from process {os.getpid()}" in journal


@pytest.mark.chaos
def test_sigterm_to_the_viewer_stops_the_run_as_an_engine_expects(bench: Bench, training: str) -> None:
    viewer = start_training(bench, training)
    viewer.send_signal(signal.SIGTERM)
    code, said = end(viewer)
    assert code == 75
    assert "saving, up to 2m00s" in said


@pytest.mark.chaos
def test_ctrl_c_saves_and_stops(bench: Bench, training: str) -> None:
    terminal = Terminal(bench, "run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: terminal.said("training"))
    terminal.press_ctrl_c()
    bench.until(lambda: terminal.said("Ctrl-C again to kill"))
    assert terminal.process.wait(timeout=30) == 75
    os.close(terminal.read_end)


def test_ctrl_c_twice_kills(bench: Bench) -> None:
    script = bench.script("deaf.py", DEAF)
    terminal = Terminal(bench, "run", "--name", "it", "--", sys.executable, script)
    bench.until(lambda: terminal.said("deaf"))
    terminal.press_ctrl_c()
    bench.until(lambda: bench.state()["state"] == "stopping")
    assert terminal.process.poll() is None
    terminal.press_ctrl_c()
    assert terminal.process.wait(timeout=30) == 143
    assert bench.state()["state"] == "stopped"
    os.close(terminal.read_end)


@pytest.mark.chaos
def test_closing_the_terminal_ends_the_view_and_not_the_run(bench: Bench, training: str) -> None:
    terminal = Terminal(bench, "run", "--name", "it", "--", sys.executable, training)
    bench.until(lambda: terminal.said("training"))
    os.close(terminal.read_end)
    assert terminal.process.wait(timeout=30) == -signal.SIGHUP
    step = bench_step(bench)
    bench.until(lambda: bench_step(bench) > step)
    assert bench.state()["state"] == "running"
    assert bench.cli("stop", "it").returncode == 0


LAUNCHER = """
import os, signal, subprocess, sys
# Like torchrun, it passes SIGTERM on and kills after a time of its own; here that is none at all.
child = subprocess.Popen([sys.executable, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: child.kill())
child.wait()
sys.exit(1)
"""


@pytest.mark.chaos
def test_a_launcher_gets_the_signal_only_when_the_training_below_it_has_saved(
    bench: Bench, training: str
) -> None:
    launcher = bench.script("launcher.py", LAUNCHER)
    text = (bench.place / "train.py").read_text()
    stopped = 'write_last_words(here, LastWords(ending="stopped"'
    bench.script("train.py", text.replace(stopped, f"time.sleep(1.5)\n{stopped}"))
    viewer = bench.start("run", "--name", "it", "--", sys.executable, launcher, training)
    bench.until(lambda: "training" in bench.output())
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75
    assert "saved" in bench.output()


@pytest.mark.chaos
def test_torchrun_does_not_cut_the_save_of_its_ranks(bench: Bench, training: str) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    text = (bench.place / "train.py").read_text()
    # Both ranks take three seconds to save, and torchrun would wait one; the first rank speaks for both.
    stopped = 'write_last_words(here, LastWords(ending="stopped"'
    text = text.replace(stopped, f"time.sleep(3)\n{stopped}")
    text = text.replace(
        'here / "heartbeat"', 'here / ("heartbeat" + os.environ["RANK"] * int(os.environ["RANK"]))'
    )
    text = text.replace('print("saved"', 'print("saved by rank", os.environ["RANK"]')
    bench.script("train.py", text)
    bench.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    viewer = bench.start("run", "--name", "it", "--", *torchrun, training)
    bench.until(lambda: bench.output().count("training") == 2, seconds=90)
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75
    assert all(f"saved by rank {rank}\n" in bench.output() for rank in (0, 1)), bench.output()


@pytest.mark.chaos
def test_the_leader_is_reminded_near_the_end_of_its_time(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import signal, sys, time
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
        print("training", flush=True)
        while len(told) < 2:
            time.sleep(0.02)
        print(f"told again after {told[1] - told[0]:.1f} s", flush=True)
        sys.exit(75)
        """,
    )
    viewer = start_training(bench, script, "--grace", "2.5")
    assert bench.cli("stop", "it").returncode == 0
    assert end(viewer)[0] == 75
    assert "told again after 1." in bench.output()


@pytest.mark.chaos
def test_a_launcher_is_given_the_grace_as_its_own_time(bench: Bench) -> None:
    shown = ("sh", "-c", "echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert bench.run(*shown, options=("--grace", "99.5")).returncode == 0
    assert bench.output() == "100\n"


def test_a_stop_is_obeyed_at_once_while_a_large_checkpoint_is_verified(bench: Bench) -> None:
    crash = "mkdir -p $UNBROKEN_RUN_DIR/checkpoints/step-00000005; kill -SEGV $$"
    supervisor = bench.script(
        "supervise.py",
        f"""
        import sys, time
        from pathlib import Path
        from unbroken.supervisor.plan import Plan
        from unbroken.supervisor.stopping import block_signals
        from unbroken.supervisor.supervisor import Supervisor

        def read_for_hours(directory):
            (directory / "reading").touch()
            time.sleep(600)

        block_signals()
        plan = Plan(directory=Path({str(bench.directory)!r}), command=("sh", "-c", {crash!r}))
        sys.exit(Supervisor(plan, newest_verified=read_for_hours).run())
        """,
    )
    process = bench.popen([sys.executable, supervisor])
    bench.until((bench.directory / "reading").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    assert bench.state()["reason"] == "asked to stop between two attempts"
    assert bench.attempts() == 1


def bench_step(bench: Bench) -> int:
    beat = read_heartbeat(bench.directory / "attempts" / "0001" / "heartbeat")
    return beat.step if beat is not None else 0
