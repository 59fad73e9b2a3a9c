"""What a script sees of `unbroken.Run`, in one process: beginning, going on, stopping."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unbroken
from unbroken.checkpoint.highlights import plain_metrics
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.errors import UsageError
from unbroken.rundir import control
from unbroken.rundir.heartbeat import read_heartbeat

from .processes import step_events
from .runs import names, steps, words_of


class TestBeginAndGoOn:
    def test_a_new_run_begins_and_ends_with_a_final_checkpoint(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path / "r", counters={"n": 0}) as run:
            assert run.restored is None
            steps(run, 3)
        assert names(tmp_path / "r") == ["step-00000003"]
        assert words_of(tmp_path / "r").ending == "completed"
        assert (tmp_path / "r" / "latest").resolve().name == "step-00000003"

    def test_the_next_attempt_goes_on_with_the_state_and_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        counters: dict[str, Any] = {"n": 0, "history": [1, 2]}
        with unbroken.Run(tmp_path, counters=counters) as run:
            steps(run, 3)
            counters["n"] = 5
        again: dict[str, Any] = {"n": 0, "history": []}
        with unbroken.Run(tmp_path, counters=again) as run:
            assert run.step_count == 3
            assert run.restored is not None
            assert run.restored.checkpoint == "step-00000003"
        assert again == counters
        said = capsys.readouterr().err
        assert "attempt 2: resumed from step-00000003 (step 3, before epoch 0)" in said
        assert "read back and equal bit for bit" in said

    def test_plain_steps_and_losses_are_in_the_journal_bit_for_bit(self, tmp_path: Path) -> None:
        values = [0.1 + 0.2, math.pi, 5e-324]
        with unbroken.Run(tmp_path) as run:
            for value in values:
                run.step(loss=torch.tensor(value, dtype=torch.float64, requires_grad=True), lr=0.5)
        found = [float(event["metrics"]["loss"]).hex() for event in step_events(tmp_path)]
        assert found == [value.hex() for value in values]

    def test_a_counter_of_any_size_is_a_metric_that_saves_prunes_and_reports_as_any(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        directory, keep = tmp_path / "r", [unbroken.KeepLast(1), unbroken.KeepBest(1, "flops")]
        for _ in range(2):
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)], keep=keep) as run:
                for number in range(run.step_count + 1, run.step_count + 4):
                    run.step(loss=-(10**400), flops=number * 10**21, tokens=2**53 + number, epoch=3)
        assert (names(directory), run.step_count) == (["step-00000006"], 6)
        last = {"loss": -math.inf, "flops": 6e21, "tokens": float(2**53 + 6), "epoch": 3}
        assert step_events(directory)[-1]["metrics"] == {**last, "loss": "-inf"}
        assert plain_metrics(CheckpointStore(directory).latest().manifest.metrics) == last
        assert main(["report", str(directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["metrics"]["flops"]["last"] == [6, 6e21]

    @pytest.mark.parametrize("value", ["x", None, True, [1.0]])
    def test_a_metric_that_is_no_number_is_refused_by_name(self, tmp_path: Path, value: object) -> None:
        with (
            pytest.raises(UsageError, match="metric 'loss': expected a number"),
            unbroken.Run(tmp_path) as run,
        ):
            run.step(loss=value)

    def test_a_changed_config_is_reported(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, config={"width": 8, "lr": 0.1}) as run:
            steps(run, 1)
        with unbroken.Run(tmp_path, config={"width": 8, "lr": 0.2}) as run:
            assert run.restored is not None
            assert "config.lr: 0.1 -> 0.2" in run.restored.changed

    def test_the_heartbeat_shows_the_step_and_the_last_checkpoint(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(2)]) as run:
            steps(run, 3)
            run._saver.wait()
            run.step()
            beat = read_heartbeat(tmp_path / "attempts/0001/heartbeat")
            assert beat is not None
            assert (beat.step, beat.checkpoint_step, beat.phase) == (4, 2, "training")

    def test_outside_the_with_block_every_method_says_what_to_do(self, tmp_path: Path) -> None:
        run = unbroken.Run(tmp_path)
        calls: list[Callable[[], object]] = [
            run.step,
            run.save,
            run.record,
            lambda: next(run.epochs(1)),
            lambda: run.batches([]),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="expected to be inside the `with` block"):
                call()


class TestStopping:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_stops_at_the_next_step_with_the_state_saved(self, tmp_path: Path, number: int) -> None:
        before = signal.getsignal(number)
        with pytest.raises(SystemExit) as caught, unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 2)
            signal.raise_signal(number)
            assert names(tmp_path) == []
            steps(run, 5)
        assert caught.value.code == 75
        assert names(tmp_path) == ["step-00000003"]
        assert words_of(tmp_path).ending == "stopped"
        assert signal.getsignal(number) is before

    def test_the_second_interrupt_interrupts_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), unbroken.Run(tmp_path):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def test_a_stop_file_stops_without_any_signal(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit) as caught, unbroken.Run(tmp_path) as run:
            steps(run, 1)
            control.request_stop(tmp_path, reason="maintenance")
            steps(run, 1)
        assert caught.value.code == 75
        assert words_of(tmp_path).reason == "maintenance"
