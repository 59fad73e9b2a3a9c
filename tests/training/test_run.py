"""What a script sees of `unbroken.Run`, in one process."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import (
    CheckpointNotFoundError,
    DamagedError,
    NotARunError,
    RunBusyError,
    SaveFailedError,
    StaleWriterError,
    StateMismatchError,
    UnsupportedStateError,
    UsageError,
)
from unbroken.rundir import control, layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.identity import new_attempt
from unbroken.rundir.last_words import LastWords, read_last_words

from .processes import step_events


def steps(run: unbroken.Run, count: int) -> None:
    for _ in range(count):
        run.step(loss=1.0 / (run.step_count + 1))


def names(directory: Path) -> list[str]:
    return CheckpointStore(directory).names()


def words_of(directory: Path) -> LastWords:
    found = read_last_words(layout.attempt_directory(directory, layout.attempts(directory)[-1]))
    assert found is not None
    return found


def tree_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


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


class TestResumeModes:
    def test_must_without_a_checkpoint_is_an_error_with_code_4(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFoundError) as caught, unbroken.Run(tmp_path, resume="must"):
            pass
        assert caught.value.exit_code == 4

    def test_never_refuses_a_directory_with_checkpoints_and_leaves_them(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        with (
            pytest.raises(UsageError, match="expected no checkpoints"),
            unbroken.Run(tmp_path, resume="never"),
        ):
            pass
        assert names(tmp_path) == ["step-00000001"]

    def test_a_named_checkpoint_is_taken_and_later_ones_are_set_aside_not_deleted(
        self, tmp_path: Path
    ) -> None:
        counters = {"n": 0}
        with unbroken.Run(tmp_path, counters=counters, save=[unbroken.EverySteps(1)]) as run:
            for _ in range(3):
                counters["n"] += 1
                run.step()
        with unbroken.Run(tmp_path, counters=counters, resume="step-00000002") as run:
            assert (run.step_count, counters["n"]) == (2, 2)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert os.listdir(tmp_path / "quarantine") == ["step-00000003"]

    def test_an_unknown_name_is_an_error_that_lists_what_there_is(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        with (
            pytest.raises(CheckpointNotFoundError, match="expected checkpoint 'step-9', found step-00000001"),
            unbroken.Run(tmp_path, resume="step-9"),
        ):
            pass

    def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_next_older_taken(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)]) as run:
            steps(run, 3)
        flip(tmp_path / "checkpoints/step-00000003/state-00.safetensors")
        with unbroken.Run(tmp_path) as run:
            assert run.step_count == 2
            assert run.restored is not None
            assert list(run.restored.passed_over) == ["step-00000003"]
        assert "step-00000003 was passed over" in capsys.readouterr().err
        assert (tmp_path / "quarantine/step-00000003/reason.json").exists()

    def test_when_all_are_damaged_the_run_never_begins_anew_by_itself(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
        flip(tmp_path / "checkpoints/step-00000001/manifest.json")
        for _ in range(2):
            with (
                pytest.raises(DamagedError, match="expected an intact checkpoint") as caught,
                unbroken.Run(tmp_path),
            ):
                pass
            assert caught.value.exit_code == 3


class TestEpochsAndBatches:
    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True)

    def run_to(self, directory: Path, stop_at: int | None, loops: list[Any]) -> list[list[int]]:
        """Train two epochs over each of `loops`; leave by an exception after `stop_at` steps of this call."""
        seen: list[list[int]] = []
        count = 0
        try:
            with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                for _ in run.epochs(2):
                    for loop in loops:
                        for batch in run.batches(loop):
                            run.step()
                            seen.append([int(value) for value in torch.as_tensor(batch[0]).flatten()])
                            count += 1
                            if count == stop_at:
                                raise InterruptedError
        except InterruptedError:
            pass
        return seen

    @pytest.mark.parametrize("stop_at", range(1, 30, 4))
    def test_two_loaders_in_one_epoch_go_on_where_they_were(self, tmp_path: Path, stop_at: int) -> None:
        torch.manual_seed(1)
        whole = self.run_to(tmp_path / "whole", None, [self.loader(), self.loader(), self.loader()])
        torch.manual_seed(1)
        first = self.run_to(tmp_path / "cut", stop_at, [self.loader(), self.loader(), self.loader()])
        torch.manual_seed(99)
        rest = self.run_to(tmp_path / "cut", None, [self.loader(), self.loader(), self.loader()])
        assert first + rest == whole

    @pytest.mark.parametrize("stop_at", range(1, 20, 3))
    def test_two_passes_over_one_loader_in_an_epoch_are_told_apart(
        self, tmp_path: Path, stop_at: int
    ) -> None:
        torch.manual_seed(1)
        loader = self.loader()
        whole = self.run_to(tmp_path / "whole", None, [loader, loader])
        torch.manual_seed(1)
        loader = self.loader()
        first = self.run_to(tmp_path / "cut", stop_at, [loader, loader])
        torch.manual_seed(99)
        loader = self.loader()
        assert first + self.run_to(tmp_path / "cut", None, [loader, loader]) == whole

    @pytest.mark.parametrize("stop_at", range(1, 10, 2))
    def test_two_loaders_side_by_side_go_on_where_they_were(self, tmp_path: Path, stop_at: int) -> None:
        def run_to(directory: Path, stop_at: int | None) -> list[tuple[list[int], list[int]]]:
            seen = []
            first, second = self.loader(), self.loader()
            try:
                with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                    for _ in run.epochs(2):
                        for (one,), (two,) in zip(run.batches(first), run.batches(second), strict=True):
                            seen.append((one.tolist(), two.tolist()))
                            run.step()
                            if len(seen) == stop_at:
                                raise InterruptedError
            except InterruptedError:
                pass
            return seen

        torch.manual_seed(1)
        loaders = self.loader(), self.loader()
        plain = [
            (one.tolist(), two.tolist()) for _ in range(2) for (one,), (two,) in zip(*loaders, strict=True)
        ]
        torch.manual_seed(1)
        first = run_to(tmp_path, stop_at)
        torch.manual_seed(99)
        assert first + run_to(tmp_path, None) == plain

    @pytest.mark.parametrize("stop_at", range(6, 20, 3))
    def test_a_generator_that_two_loaders_share_is_not_set_back(self, tmp_path: Path, stop_at: int) -> None:
        def loaders() -> list[Any]:
            shared = torch.Generator().manual_seed(3)
            data = TensorDataset(torch.arange(10))
            return [DataLoader(data, batch_size=2, shuffle=True, generator=shared) for _ in range(2)]

        whole = self.run_to(tmp_path / "whole", None, loaders())
        first = self.run_to(tmp_path / "cut", stop_at, loaders())
        assert first + self.run_to(tmp_path / "cut", None, loaders()) == whole

    def test_one_object_of_batches_serves_every_epoch_and_knows_its_length(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path) as run:
            batches = run.batches(self.loader())
            assert len(batches) == 5
            assert [len(list(batches)) for _ in run.epochs(3)] == [5, 5, 5]

    @pytest.mark.parametrize("stop_at", [1, 3, 4, 7])
    def test_a_plain_list_of_batches_is_resumed_by_reading_it_again(
        self, tmp_path: Path, stop_at: int
    ) -> None:
        items = [[value] for value in range(4)]
        whole = self.run_to(tmp_path / "whole", None, [items])
        first = self.run_to(tmp_path / "cut", stop_at, [items])
        assert first + self.run_to(tmp_path / "cut", None, [items]) == whole

    def test_an_iterable_that_draws_from_the_process_generators_is_exact(self, tmp_path: Path) -> None:
        class Drawn:
            def __iter__(self) -> Iterator[list[int]]:
                for _ in range(5):
                    yield [int(torch.randint(1000, ()))]

        torch.manual_seed(1)
        whole = self.run_to(tmp_path / "whole", None, [Drawn()])
        torch.manual_seed(1)
        first = self.run_to(tmp_path / "cut", 3, [Drawn()])
        torch.manual_seed(99)
        assert first + self.run_to(tmp_path / "cut", None, [Drawn()]) == whole

    def test_an_iterator_that_can_be_read_once_is_refused(self, tmp_path: Path) -> None:
        with (
            pytest.raises(UnsupportedStateError, match="which can be read once only"),
            unbroken.Run(tmp_path) as run,
        ):
            iter(run.batches(iter([1])))

    def test_a_list_that_became_shorter_is_refused(self, tmp_path: Path) -> None:
        self.run_to(tmp_path, 3, [[[1], [2], [3], [4]]])
        with pytest.raises(StateMismatchError, match="expected at least 3 items, found 2"):
            self.run_to(tmp_path, None, [[[1], [2]]])

    def test_without_epochs_a_loop_over_batches_goes_on_too(self, tmp_path: Path) -> None:
        def passes(directory: Path, stop_at: int | None) -> list[int]:
            seen: list[int] = []
            loader = self.loader()
            try:
                with unbroken.Run(directory, save=[unbroken.EverySteps(1)]) as run:
                    while run.step_count < 12:
                        for (values,) in run.batches(loader):
                            run.step()
                            seen += values.tolist()
                            if run.step_count == stop_at:
                                raise InterruptedError
            except InterruptedError:
                pass
            return seen

        torch.manual_seed(1)
        whole = passes(tmp_path / "whole", None)
        torch.manual_seed(1)
        first = passes(tmp_path / "cut", 8)
        torch.manual_seed(99)
        assert first + passes(tmp_path / "cut", None) == whole

    def test_work_at_the_end_of_an_epoch_runs_once_in_each_epoch(self, tmp_path: Path) -> None:
        ended: list[int] = []
        for _ in range(3):
            try:
                with unbroken.Run(tmp_path, save=[unbroken.EveryEpochs(1)], counters={}) as run:
                    for epoch in run.epochs(3):
                        for _ in run.batches([1, 2]):
                            run.step()
                            if (
                                epoch == len(ended)
                                and epoch
                                and run.step_count % 2 == 0
                                and epoch not in ended
                            ):
                                run._saver.wait()
                        ended.append(epoch)
                        if epoch < 2 and len(ended) == epoch + 1 and epoch == 1:
                            raise InterruptedError
            except InterruptedError:
                pass
        # Epoch 1 was cut off before its end was saved: it is done again, the others are not.
        assert ended == [0, 1, 1, 2]

    def test_more_epochs_than_before_continue_a_completed_run(self, tmp_path: Path) -> None:
        for count, expected in ((2, [0, 1]), (2, []), (4, [2, 3])):
            with unbroken.Run(tmp_path) as run:
                assert list(run.epochs(count)) == expected


class TestSaving:
    def test_best_is_decided_by_record_and_kept(self, tmp_path: Path) -> None:
        keep = [unbroken.KeepLast(1), unbroken.KeepBest(1, "accuracy")]
        with unbroken.Run(tmp_path, save=[], keep=keep) as run:
            for epoch in run.epochs(4):
                steps(run, 2)
                run.record(accuracy=[0.2, 0.9, 0.5, 0.4][epoch])
        assert names(tmp_path) == ["step-00000004", "step-00000008"]
        metrics = CheckpointStore(tmp_path).get("step-00000004").manifest.metrics
        assert metrics == {"accuracy": 0.9, "loss": 0.25}

    def test_a_metric_of_an_older_state_is_not_kept_with_a_newer_one(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 1)
            run.record(accuracy=0.9)
            steps(run, 1)
        assert CheckpointStore(tmp_path).latest().manifest.metrics == {"loss": 0.5}

    def test_a_requested_checkpoint_is_written_at_the_next_step(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 1)
            control.request_save(tmp_path)
            steps(run, 2)
        assert names(tmp_path) == ["step-00000002", "step-00000003"]

    def test_the_snapshot_is_of_the_moment_of_the_save(self, tmp_path: Path) -> None:
        weight = torch.zeros(1000)
        history: list[int] = []
        with unbroken.Run(tmp_path, weight=weight, history=history) as run:
            run.step()
            run.save()
            weight.fill_(7)
            history.append(1)
        state = CheckpointStore(tmp_path).get("step-00000001").load()
        assert bytes(state["weight"].data) == bytes(4000)
        assert state["history"] == []

    def test_a_failed_save_is_raised_at_the_next_step_and_left_in_the_last_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SaveFailedError, match="No space left"), unbroken.Run(tmp_path, save=[]) as run:
            steps(run, 1)
            monkeypatch.setattr(os, "fsync", no_space_for_the_saver)
            run.save()
            while not run._saver._in_flight.done():  # type: ignore[union-attr]
                pass
            run.step()
        monkeypatch.undo()
        assert (words_of(tmp_path).ending, words_of(tmp_path).kind) == ("failed", "save-failed")
        assert os.listdir(tmp_path / "checkpoints") == []

    def test_a_failure_whose_last_words_cannot_be_written_is_still_the_one_raised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ZeroDivisionError) as caught, unbroken.Run(tmp_path):
            monkeypatch.setattr(os, "fsync", no_space)
            raise ZeroDivisionError
        assert "its last words could not be written" in caught.value.__notes__[0]

    def test_a_writer_that_was_superseded_cannot_commit(self, tmp_path: Path) -> None:
        with pytest.raises(SaveFailedError, match="superseded") as caught, unbroken.Run(tmp_path) as run:
            steps(run, 1)
            new_attempt(tmp_path)
        assert isinstance(caught.value.__cause__, StaleWriterError)
        assert names(tmp_path) == []


def no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def no_space_for_the_saver(descriptor: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        no_space(descriptor)


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


class TestBadInput:
    """Each gives one clear error, and leaves everything as it was."""

    def test_no_directory_at_all(self) -> None:
        with pytest.raises(UsageError, match="expected a run directory"):
            unbroken.Run(counters={})

    def test_a_directory_that_contradicts_the_supervisor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(layout.RUN_DIR_VARIABLE, str(tmp_path / "a"))
        assert unbroken.Run().directory == tmp_path / "a"
        with pytest.raises(UsageError, match=r"expected the run directory .*/a .* found .*/b in the script"):
            unbroken.Run(tmp_path / "b")

    def test_a_file_where_the_directory_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("mine")
        with pytest.raises(unbroken.UnbrokenError, match="/f") as caught, unbroken.Run(tmp_path / "f"):
            pass
        assert caught.value.exit_code == 78
        assert (tmp_path / "f").read_text() == "mine"

    def test_a_directory_of_another_program(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text('{"mine": true}')
        before = tree_of(tmp_path)
        with pytest.raises(NotARunError, match="expected format 'unbroken-run'"), unbroken.Run(tmp_path):
            pass
        assert tree_of(tmp_path) == before

    def test_checkpoints_of_another_run(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            with unbroken.Run(tmp_path / name) as run:
                steps(run, 1 if name == "a" else 2)
        source = tmp_path / "a/checkpoints/step-00000001"
        source.rename(tmp_path / "b/checkpoints/step-00000001")
        (tmp_path / "b/checkpoints/step-00000002").rename(tmp_path / "x")
        with pytest.raises(NotARunError, match="expected checkpoints of run"), unbroken.Run(tmp_path / "b"):
            pass

    @pytest.mark.parametrize(
        ("value", "hint"),
        [(3, "pass part={'value': 3}"), ("x", "pass part="), (object(), "state_dict"), (open, "state_dict")],
        ids=["int", "str", "object", "function"],
    )
    def test_an_object_that_cannot_be_captured_is_named_before_anything_is_made(
        self, tmp_path: Path, value: object, hint: str
    ) -> None:
        with (
            pytest.raises(UnsupportedStateError, match="part 'part': cannot keep") as caught,
            unbroken.Run(tmp_path / "r", part=value),
        ):
            pass
        assert hint in caught.value.hint
        assert caught.value.exit_code == 78
        assert not (tmp_path / "r").exists()

    def test_a_part_that_changed_its_shape(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, model=torch.nn.Linear(3, 4)) as run:
            steps(run, 1)
        model = torch.nn.Linear(3, 5)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        kept = tree_of(tmp_path / "checkpoints")
        with pytest.raises(StateMismatchError) as caught, unbroken.Run(tmp_path, model=model):
            pass
        assert "model: weight: shape (5, 3), the checkpoint has shape (4, 3)" in str(caught.value)
        assert "model: bias: shape (5,), the checkpoint has shape (4,)" in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert tree_of(tmp_path / "checkpoints") == kept
        assert (words_of(tmp_path).ending, words_of(tmp_path).exit_code) == ("failed", 78)

    def test_a_part_that_is_missing_or_new(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, a={"x": 1}, b={}) as run:
            steps(run, 1)
        with pytest.raises(StateMismatchError) as caught, unbroken.Run(tmp_path, a=[], c={}):
            pass
        assert "c: the checkpoint lacks this part" in str(caught.value)
        assert "b: the program lacks this part" in str(caught.value)
        assert "a: expected a list, the checkpoint holds a dict" in str(caught.value)

    def test_a_second_run_in_the_same_directory_is_refused(self, tmp_path: Path) -> None:
        import subprocess
        import sys

        code = f"import unbroken\nwith unbroken.Run({str(tmp_path)!r}): pass"
        with unbroken.Run(tmp_path) as run:
            steps(run, 1)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == RunBusyError.exit_code
        assert f"process {os.getpid()} on " in done.stderr
        assert "hint: " in done.stderr
        assert layout.attempts(tmp_path) == [1]
