"""Signals and processes: saves on a signal, grace, what is left of an attempt, hangs, crash loops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.last_words import read_last_words
from unbroken.training.position import Position

from ..supervisor.conftest import Bench
from ..zygote import start_script

DEADLINE_SECONDS = 60.0


def script(place: Path, text: str) -> str:
    path = place / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def until_there(path: Path) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


class TestSavesOnSignals:
    """O42: the checkpoint was written inside the handler, and handlers overwrote each other."""

    def test_200_signals_at_random_times_give_exactly_one_save_and_consistent_content(
        self, tmp_path: Path
    ) -> None:
        """Each step sets both counters; a handler that saved between them would show."""
        train = script(
            tmp_path,
            """
            import signal, sys, unbroken
            from pathlib import Path
            counters = {"first": 0, "second": 0, "ballast": bytes(1 << 20)}
            def earlier(number, frame):
                with open(sys.argv[1] + ".calls", "a") as file:
                    file.write("x")
            signal.signal(signal.SIGTERM, earlier)
            with unbroken.Run(sys.argv[1], save=[], counters=counters) as run:
                Path(sys.argv[1] + ".ready").touch()
                for number in run.batches(range(10**9)):
                    counters["first"] += 1
                    sum(range(2000))
                    counters["second"] += 1
                    run.step()
            """,
        )
        run_dir = tmp_path / "run"
        process = subprocess.Popen([sys.executable, train, str(run_dir)], stderr=subprocess.DEVNULL)
        until_there(tmp_path / "run.ready")
        pauses = random.Random(7)
        for _ in range(200):
            words = read_last_words(run_dir / "attempts/0001")
            # Behind these a signal would meet Python, which takes the handlers down as it ends.
            if words is not None and words.ending == "stopped":
                break
            process.send_signal(signal.SIGTERM)
            time.sleep(pauses.random() * 0.002)
        code = process.wait(DEADLINE_SECONDS)
        assert code == 75
        words = read_last_words(run_dir / "attempts/0001")
        assert words is not None
        assert words.ending == "stopped"
        (name,) = CheckpointStore(run_dir).names()
        assert name == words.checkpoint
        counters = {"first": 0, "second": 0, "ballast": b""}
        with unbroken.Run(run_dir, resume="must", counters=counters) as run:
            assert counters["first"] == counters["second"] == run.step_count == words.step
        assert (tmp_path / "run.calls").stat().st_size >= 1

    def test_a_handler_set_before_is_called_and_given_back(self, tmp_path: Path) -> None:
        called: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
        try:
            mine = signal.getsignal(signal.SIGTERM)
            with pytest.raises(SystemExit), unbroken.Run(tmp_path) as run:
                os.kill(os.getpid(), signal.SIGTERM)
                assert called == [signal.SIGTERM]
                run.step()
            assert signal.getsignal(signal.SIGTERM) is mine
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_a_handler_set_inside_the_block_is_told_of_and_stays(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = signal.getsignal(signal.SIGTERM)
        called: list[int] = []
        try:
            with unbroken.Run(tmp_path) as run:
                ours = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
                mine = signal.getsignal(signal.SIGTERM)
                for _ in range(4):
                    run.step()
                os.kill(os.getpid(), signal.SIGTERM)
                run.step()
            assert signal.getsignal(signal.SIGTERM) is mine
            assert called == [signal.SIGTERM]
            assert ours is not mine
        finally:
            signal.signal(signal.SIGTERM, before)
        assert capsys.readouterr().err.count("set a handler of its own for SIGTERM") == 1

    def test_a_signal_that_comes_while_a_stopped_run_closes_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        close = Position.close

        def asked_again(position: Position) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            close(position)

        monkeypatch.setattr(Position, "close", asked_again)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        try:
            with pytest.raises(SystemExit) as left, unbroken.Run(tmp_path) as run:
                os.kill(os.getpid(), signal.SIGTERM)
                run.step()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert left.value.code == 75

    def test_a_handler_that_would_end_the_process_does_not_prevent_the_save(self, tmp_path: Path) -> None:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        try:
            with pytest.raises(SystemExit) as left, unbroken.Run(tmp_path) as run:
                os.kill(os.getpid(), signal.SIGTERM)
                run.step()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert left.value.code == 75
        assert CheckpointStore(tmp_path).latest().step == 1


WORKERS = """
import sys, time, torch, unbroken
from pathlib import Path
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Data(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(index)

class Stream(IterableDataset):
    def __iter__(self): return (torch.tensor(index) for index in range(1000))

kind = sys.argv[2]
loader = DataLoader(Stream() if kind == "stream" else Data(), batch_size=2, num_workers=2,
                    persistent_workers=kind == "persistent")
with unbroken.Run(sys.argv[1], save=[]) as run:
    batches = iter(run.batches(loader, randomness="keyed" if kind == "keyed" else "capture"))
    for _ in batches:
        run.step()
        if run.step_count == 3:
            Path(sys.argv[1] + ".ready").touch()
        time.sleep(0.05)
"""


def members(group: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                found.append(int(entry))
    return found


@pytest.mark.parametrize(
    "kind",
    ["keyed", *(pytest.param(kind, marks=pytest.mark.chaos) for kind in ("persistent", "plain", "stream"))],
)
def test_a_signal_to_the_whole_group_leaves_the_workers_alive_until_the_state_is_saved(
    tmp_path: Path, kind: str
) -> None:
    """The workers died first, torch raised that in the trainer, and the save never came."""
    run_dir = tmp_path / "run"
    (tmp_path / "train.py").write_text(WORKERS)
    running = start_script(tmp_path / "train.py", str(run_dir), kind, output=tmp_path / "output")
    until_there(tmp_path / "run.ready")
    assert len(members(running.process_id)) >= 3
    os.killpg(running.process_id, signal.SIGTERM)
    done = running.wait()
    # Held by a name of its own, the iterator lives on to the very end, and its workers with it.
    assert done.returncode == 75, done.stderr
    words = read_last_words(run_dir / "attempts/0001")
    assert words is not None
    assert (words.ending, words.checkpoint) == ("stopped", CheckpointStore(run_dir).latest().name)
    end = time.monotonic() + 10
    while left := members(running.process_id):
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    try:
        yield found
        found.until(lambda: not found.strays(), seconds=10)
    finally:
        found.sweep()


def test_the_last_words_keep_the_first_and_the_last_line_of_a_long_message(tmp_path: Path) -> None:
    """A data worker's whole traceback is in its message, and what went wrong stands at its end."""
    frames = "".join(f"  File 'data.py', line {number}, in get" for number in range(200))
    message = f"Caught OSError in worker 3.{frames} OSError: no such sample"
    with pytest.raises(RuntimeError), unbroken.Run(tmp_path):
        raise RuntimeError(message)
    words = read_last_words(tmp_path / "attempts/0001")
    assert words is not None
    assert words.message.startswith("Caught OSError in worker 3.")
    assert words.message.endswith("OSError: no such sample")
    assert len(words.message) < 2100


class TestGrace:
    """O43: the scheduler gave ten minutes, and the launcher ended the workers after thirty seconds."""

    SAVES = """
        import os, sys, time, unbroken
        class Slow:
            def state_dict(self):
                if "stop" in sys.argv and os.path.exists(sys.argv[1]):
                    time.sleep(2)
                return {"value": 1}
            def load_state_dict(self, state): pass
        with unbroken.Run(save=[unbroken.EverySteps(3)], background=False, slow=Slow()) as run:
            while run.step_count < 10**6:
                time.sleep(0.02)
                run.step()
                if run.step_count == 4:
                    print("training", flush=True)
                    open(sys.argv[1], "w").close()
                    time.sleep(600 if "late" in sys.argv else 0)
    """

    @pytest.mark.parametrize(
        ("grace", "saved"), [("20", True), pytest.param("0.5", False, marks=pytest.mark.chaos)]
    )
    def test_a_save_has_the_whole_grace_and_when_that_is_over_the_older_checkpoint_stays_good(
        self, bench: Bench, grace: str, saved: bool
    ) -> None:
        train, mark = bench.script("train.py", self.SAVES), str(bench.place / "mark")
        supervisor = bench.start(
            *("run", "--name", "it", "--grace", grace, "--", sys.executable, train, mark, "stop")
        )
        bench.until(lambda: "training" in bench.output())
        supervisor.send_signal(signal.SIGTERM)
        _, said = supervisor.communicate(timeout=60)
        assert f"a stop leaves it {grace} s to save" in said
        assert supervisor.returncode == (75 if saved else 143)
        newest = CheckpointStore(bench.directory).latest()
        assert newest.verify().is_intact
        assert (newest.step >= 4) is saved


class TestHangs:
    """O45: a collective hung, and the watchdog inside the process did not end it."""

    @pytest.mark.chaos
    def test_a_loop_that_sleeps_for_ever_at_step_5_is_ended_and_goes_on_from_its_checkpoint(
        self, bench: Bench
    ) -> None:
        train = bench.script(
            "train.py",
            """
            import os, time, unbroken
            def all_reduce():
                time.sleep(600)
            with unbroken.Run(save=[unbroken.EverySteps(1)]) as run:
                while run.step_count < 8:
                    if run.step_count == 5 and os.environ["UNBROKEN_ATTEMPT"] == "1":
                        all_reduce()
                    run.step()
            """,
        )
        done = bench.run(sys.executable, train, options=("--hang-after", "2"))
        assert done.returncode == 0, done.stderr
        assert "in all_reduce" in bench.verdict(1)["evidence"][0]
        assert "resumed from step-00000005" in bench.output(2)


@pytest.mark.chaos
class TestCrashLoops:
    """O46: each good start reset the count of failures, and a process that ended in order was done."""

    def test_the_same_error_at_the_same_step_ends_with_the_reason(self, bench: Bench) -> None:
        train = bench.script(
            "train.py",
            """
            import unbroken
            with unbroken.Run(save=[unbroken.EverySteps(5)]) as run:
                while True:
                    if run.step_count == 7:
                        raise ValueError("a bad sample")
                    run.step()
            """,
        )
        done = bench.python(train)
        assert done.returncode == 78, done.stderr
        assert bench.attempts() <= 3
        assert "at step 7" in " ".join(bench.state()["evidence"])

    def test_one_that_advances_between_its_crashes_goes_on(self, bench: Bench) -> None:
        train = bench.script(
            "train.py",
            """
            import unbroken
            with unbroken.Run(save=[unbroken.EverySteps(5)]) as run:
                begun = run.step_count
                while run.step_count < 45:
                    if run.step_count == begun + 12:
                        raise ValueError("a bad sample")
                    run.step()
            """,
        )
        done = bench.python(train)
        assert done.returncode == 0, done.stderr
        assert bench.attempts() >= 4

    def test_an_end_in_order_before_the_goal_is_no_completion(self, bench: Bench) -> None:
        train = bench.script(
            "train.py",
            """
            import os, unbroken
            with unbroken.Run(save=[unbroken.EverySteps(1)]) as run:
                while run.step_count < 6:
                    run.step()
                    if run.step_count == 3 and os.environ["UNBROKEN_ATTEMPT"] == "1":
                        os._exit(0)
            """,
        )
        done = bench.python(train)
        assert done.returncode == 0, done.stderr
        assert [bench.verdict(number)["outcome"] for number in (1, 2)] == ["vanished", "completed"]
