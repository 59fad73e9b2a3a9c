"""Real kills for want of memory, in a control group with a limit, told from those that somebody sent.

The kernel counts them for the whole machine too: they wait for each other.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from unbroken.rundir.journal import read_events

from ..out_of_memory import MEBIBYTE, Group, memory_group, one_at_a_time
from .conftest import is_running

if TYPE_CHECKING:
    from .conftest import Bench

# Each attempt ends in another way; only the fifth was not about memory.
_SCRIPT = """
import os, signal, sys

def take_all():
    bytearray(400 << 20)

def in_worker():
    worker = os.fork()
    if worker == 0:
        take_all()
    os.waitpid(worker, 0)
    return worker

attempt = int(os.environ["UNBROKEN_ATTEMPT"])
if attempt == 1:
    take_all()
elif attempt == 2:
    worker = in_worker()
    raise RuntimeError(f"DataLoader worker (pid {worker}) is killed by signal: Killed.")
elif attempt == 3:
    in_worker()
elif attempt == 4:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def limited() -> Iterator[Group]:
    """A memory group with a limit, in which nobody else runs out of memory meanwhile."""
    with one_at_a_time(), memory_group(96 * MEBIBYTE) as group:
        yield group


def run_in(group: Group, bench: Bench, *arguments: str) -> None:
    command = bench.command("run", "--name", "it", "--backoff", "0.01", *arguments)
    bench.popen(group.command(command)).wait(timeout=60)


def test_kills_for_memory_are_told_from_kills_that_somebody_sent(limited: Group, bench: Bench) -> None:
    script = bench.script("train.py", _SCRIPT)
    # The shell hides how its command ended: the third attempt ends with 0.
    run_in(limited, bench, "--", "sh", "-c", f"{sys.executable} {script}")
    leader, worker, hidden, sent = (bench.verdict(attempt) for attempt in (1, 2, 3, 4))

    assert (leader["outcome"], leader["kind"], leader["cause"]) == ("killed", "out-of-memory", "memory")
    assert "data workers" in leader["hint"]
    if os.access("/dev/kmsg", os.R_OK):
        assert "the kernel ended process " in leader["evidence"][1]
        assert "which held" in leader["evidence"][1]
    assert (worker["outcome"], worker["kind"], worker["cause"]) == ("failed", "out-of-memory", "memory")
    assert worker["confidence"] == "certain"
    assert any("DataLoader worker" in line for line in worker["evidence"])
    assert (hidden["outcome"], hidden["kind"], hidden["confidence"]) == ("failed", "out-of-memory", "likely")
    assert any("exit code 0" in line for line in hidden["evidence"])
    assert (sent["outcome"], sent["kind"], sent["cause"]) == ("killed", "SIGKILL", "")
    assert any("not out of memory" in line for line in sent["evidence"])
    assert bench.attempts() == 5
    assert bench.state()["state"] == "done"


def test_a_run_that_runs_out_of_memory_twice_is_held_and_nothing_is_left(
    limited: Group, bench: Bench
) -> None:
    script = bench.script("train.py", "bytearray(400 << 20)")
    run_in(limited, bench, "--", sys.executable, script)
    verdict = bench.verdict(1)
    leader = next(event for event in read_events(bench.directory / "journal.jsonl") if "process_id" in event)
    # Whom it was is in the kernel's log only, which in a container names others.
    is_named = f"process {leader['process_id']} (" in " ".join(verdict["evidence"])
    assert verdict["confidence"] == ("certain" if is_named else "likely")
    assert bench.attempts() == 2
    assert bench.state()["state"] == "held"
    assert "ended the same way 2 times" in bench.state()["reason"]
    assert "memory" in bench.state()["hint"]
    assert not list(limited.directory.glob("unbroken-*"))


@pytest.mark.chaos
def test_what_ran_out_of_memory_while_no_supervisor_was_there_is_known_all_the_same(
    limited: Group, bench: Bench
) -> None:
    script = bench.script(
        "train.py",
        """
        import os, time
        from pathlib import Path
        run = Path(os.environ["UNBROKEN_RUN_DIR"])
        print("ready", flush=True)
        while os.environ["UNBROKEN_ATTEMPT"] == "1":
            if (run / "go").exists():
                bytearray(400 << 20)
            time.sleep(0.01)
        """,
    )
    run_in(limited, bench, "--detach", "--", sys.executable, script)
    bench.until(lambda: "ready" in bench.output())
    state = bench.state()
    os.kill(state["supervisor"]["process_id"], signal.SIGKILL)
    (bench.directory / "go").touch()
    bench.until(lambda: not is_running(state["leader"]["process_id"]))
    assert bench.cli("revive", "it").returncode == 0
    bench.until(lambda: bench.state()["state"] == "done")
    verdict = bench.verdict(1)
    assert (verdict["kind"], verdict["cause"]) == ("out-of-memory", "memory")
    assert not list(limited.directory.glob("unbroken-*"))


@pytest.mark.chaos
def test_a_data_worker_of_torch_that_the_kernel_ended_is_told_from_its_trainers_error(
    limited: Group, bench: Bench
) -> None:
    pytest.importorskip("torch")
    (limited.directory / "memory.limit_in_bytes").write_text(str(1 << 30))
    script = bench.script(
        "train.py",
        """
        from torch.utils.data import DataLoader, Dataset
        class Hungry(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return len(bytearray(4 << 30))
        for batch in DataLoader(Hungry(), num_workers=1):
            pass
        """,
    )
    run_in(limited, bench, "--max-restarts", "0", "--", sys.executable, script)
    verdict = bench.verdict(1)
    assert (verdict["outcome"], verdict["kind"], verdict["cause"]) == ("failed", "out-of-memory", "memory")
    assert verdict["confidence"] == "certain"
    assert any("DataLoader worker" in line for line in verdict["evidence"])
