"""Forks, threads, closed pipes: what happens around a run must not end it, nor be kept from ending."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import SaveFailedError
from unbroken.rundir import control, layout
from unbroken.rundir.last_words import read_last_words

DEADLINE_SECONDS = 20.0


def ending(directory: Path) -> str:
    found = read_last_words(layout.attempt_directory(directory, layout.attempts(directory)[-1]))
    assert found is not None
    return found.ending


def wait_for_ever(started: int) -> None:
    os.write(started, b"x")
    threading.Event().wait()


def test_sigterm_ends_a_forked_child_of_the_script(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path) as run:
        reading, writing = os.pipe()
        child = multiprocessing.get_context("fork").Process(
            target=wait_for_ever, args=(writing,), daemon=True
        )
        child.start()
        os.read(reading, 1)
        child.terminate()
        child.join(DEADLINE_SECONDS)
        assert child.exitcode == -signal.SIGTERM
        run.step()
    assert ending(tmp_path) == "completed"


def test_a_forked_child_that_leaves_the_block_leaves_the_run_to_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys, unbroken\n"
        "with unbroken.Run(sys.argv[1]) as run:\n"
        "    run.step()\n"
        "    if os.fork() == 0: sys.exit(3)\n"
        "    os.wait()\n"
        "    run.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ending(tmp_path) == "completed"
    assert CheckpointStore(tmp_path).latest().step == 2


def test_a_pipe_that_nobody_reads_any_more_does_not_turn_a_stop_into_a_failure(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, unbroken\n"
        "with unbroken.Run(sys.argv[1]) as run:\n"
        "    os.close(2)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    run.step()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 75
    assert ending(tmp_path) == "stopped"


def test_an_old_request_to_stop_does_not_stop_a_script_that_is_started_by_itself(tmp_path: Path) -> None:
    control.request_stop(tmp_path, reason="yesterday")
    with unbroken.Run(tmp_path) as run:
        run.step()
        run.step()
    assert ending(tmp_path) == "completed"


def test_in_another_thread_a_run_works_and_says_that_signals_do_not_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        with unbroken.Run(tmp_path) as run:
            run.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ending(tmp_path) == "completed"
    assert "not in the main thread" in capsys.readouterr().err


def test_the_first_interrupt_says_what_will_happen(tmp_path: Path) -> None:
    code = (
        "import signal, sys, unbroken\n"
        "with unbroken.Run(sys.argv[1]) as run:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    run.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 75
    assert "Ctrl-C again interrupts at once" in done.stderr


def test_a_checkpoint_is_known_as_saved_even_if_older_ones_cannot_be_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def refuse(source: str, target: str) -> None:
        if ".unbroken-tmp-" in str(target):
            raise PermissionError(13, "Permission denied")
        real(source, target)

    keep = [unbroken.KeepLast(1)]
    with (
        pytest.raises(
            SaveFailedError, match="step-00000002 is saved, but older checkpoints could not be pruned"
        ),
        unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], keep=keep) as run,
    ):
        run.step()
        monkeypatch.setattr(os, "rename", refuse)
        run.step()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while run._saver.is_writing and time.monotonic() < deadline:
            pass
        run.step()
    found = read_last_words(tmp_path / "attempts/0001")
    assert found is not None
    assert (found.ending, found.checkpoint) == ("failed", "step-00000002")


def test_an_error_of_the_journal_does_not_hide_the_error_that_left_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ZeroDivisionError), unbroken.Run(tmp_path) as run:
        run.step()
        run.save()
        monkeypatch.setattr(os, "fdatasync", broken)
        raise ZeroDivisionError
