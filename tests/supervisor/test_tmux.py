"""A tmux window is a view on a run: real tmux, on a socket of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


@pytest.fixture
def _own_tmux(bench: Bench) -> Iterator[None]:
    # Sockets lie in a place of this test, whose path must be short.
    place = f"/tmp/unbroken-tmux-{os.getpid()}"
    os.makedirs(place, exist_ok=True)
    bench.environment["TMUX_TMPDIR"] = place
    bench.environment.pop("TMUX", None)
    yield
    subprocess.run(["tmux", "kill-server"], env=bench.environment, capture_output=True, check=False)
    shutil.rmtree(place)


def ask(bench: Bench, *arguments: str) -> str:
    done = subprocess.run(
        ["tmux", *arguments], env=bench.environment, capture_output=True, text=True, check=False
    )
    return done.stdout


@needs_tmux
@pytest.mark.usefixtures("_own_tmux")
def test_the_window_shows_the_output_and_killing_tmux_does_not_touch_the_run(
    bench: Bench, training: str
) -> None:
    done = bench.python(training, "--tmux")
    assert done.returncode == 0, done.stderr
    assert "tmux attach -t it" in done.stderr
    assert ask(bench, "list-sessions", "-F", "#{session_name}") == "it\n"
    bench.until(lambda: "training" in ask(bench, "capture-pane", "-p", "-t", "=it:"))
    leader = bench.state()["leader"]["process_id"]
    ask(bench, "kill-server")
    bench.until(lambda: ask(bench, "list-sessions") == "")
    assert (bench.state()["state"], bench.state()["leader"]["process_id"]) == ("running", leader)
    assert bench.cli("stop", "it").returncode == 0
    assert bench.state()["exit_code"] == 75


@needs_tmux
@pytest.mark.chaos
@pytest.mark.usefixtures("_own_tmux")
def test_the_window_stays_after_the_run_and_the_next_start_gets_another(bench: Bench) -> None:
    # It lies elsewhere than it is called.
    options = ("--run-dir", str(bench.place / "runs" / "elsewhere"), "--tmux")
    for number in (1, 2):
        assert bench.run("echo", f"start {number}", options=options).returncode == 0
        # Whoever attaches sees the new one.
        shown = ["capture-pane", "-p", "-t", "=it:"]
        bench.until(lambda text=f"start {number}", shown=shown: text in ask(bench, *shown))
        dead = ["list-panes", "-s", "-t", "=it", "-F", "#{pane_dead}"]
        bench.until(lambda number=number, dead=dead: ask(bench, *dead).split() == ["1"] * number)
    assert ask(bench, "list-windows", "-t", "=it", "-F", "#{window_name}") == "log\nlog\n"


def test_without_tmux_nothing_is_started(bench: Bench) -> None:
    empty = bench.place / "bin"
    empty.mkdir()
    (empty / "true").symlink_to("/bin/true")
    bench.environment["PATH"] = str(empty)
    done = bench.run("true", options=("--tmux",))
    assert done.returncode == 2
    assert "expected tmux to be installed" in done.stderr
    assert not bench.directory.exists()
