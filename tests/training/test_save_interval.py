"""save="auto": the interval follows from what saves cost and how often the run fails."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unbroken
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.rundir.heartbeat import Heartbeat
from unbroken.rundir.journal import Journal, read_events
from unbroken.rundir.last_words import Ending, LastWords, write_last_words
from unbroken.rundir.save_interval import SaveInterval, read_save_interval, write_save_interval
from unbroken.testing.faults import SystemCall, system_calls
from unbroken.training import full_disk, save_policy, saver, saves
from unbroken.training import save_interval as save_interval_module
from unbroken.training.failures import Failures, failures_before
from unbroken.training.save_interval import AutoInterval, SaveCosts, best_interval, save_interval
from unbroken.training.save_policy import Progress

from .runs import is_commit

DAY = 24 * 3600.0
COSTS = st.floats(1e-4, 1e4)
LIVED = st.floats(0, 1e7)
FAILURES = st.integers(0, 500)


def interval(cost: float | None, failures: int, lived: float, durable: float = 0.0) -> SaveInterval:
    return save_interval(cost_seconds=cost, durable_seconds=durable, failures=failures, lived_seconds=lived)


class TestTheFormula:
    @pytest.mark.parametrize(("cost", "between"), [(1.0, DAY), (10.0, 3600.0), (300.0, 6 * 3600.0)])
    def test_it_loses_least_of_all_intervals(self, cost: float, between: float) -> None:
        """By the model of Daly: failures come at random, and each loses what was not saved."""

        def share_lost(seconds: float) -> float:
            return math.expm1((seconds + cost) / between) / seconds

        best = best_interval(cost_seconds=cost, failure_seconds=between)
        least = share_lost(best)
        assert all(share_lost(best * factor) >= least * (1 - 1e-5) for factor in (0.5, 0.8, 1.25, 2.0))

    def test_its_first_term_is_the_one_of_young(self) -> None:
        assert best_interval(cost_seconds=1e-3, failure_seconds=DAY) == pytest.approx(
            math.sqrt(2 * 1e-3 * DAY), rel=1e-3
        )

    @settings(max_examples=50)
    @given(COSTS, COSTS, FAILURES, LIVED)
    def test_dearer_saves_are_rarer(self, one: float, other: float, failures: int, lived: float) -> None:
        low, high = sorted((one, other))
        assert interval(low, failures, lived).seconds <= interval(high, failures, lived).seconds * (1 + 1e-9)

    @settings(max_examples=50)
    @given(COSTS, FAILURES, FAILURES, LIVED)
    def test_a_run_that_fails_more_often_saves_more_often(
        self, cost: float, one: int, other: int, lived: float
    ) -> None:
        low, high = sorted((one, other))
        assert interval(cost, high, lived).seconds <= interval(cost, low, lived).seconds * (1 + 1e-9)

    @settings(max_examples=50)
    @given(COSTS, FAILURES, LIVED, st.floats(0, 1e4))
    def test_it_stays_within_its_limits(
        self, cost: float, failures: int, lived: float, durable: float
    ) -> None:
        found = interval(cost, failures, lived, durable).seconds
        floor = max(30.0, 2 * durable, cost)
        assert found >= floor
        assert found == floor or found + durable <= 30 * 60.0 + 1e-6

    def test_a_young_run_counts_on_one_failure_a_day(self) -> None:
        assert interval(None, 0, 0.0).seconds == pytest.approx(math.sqrt(2 * DAY), rel=0.01)

    def test_what_was_observed_counts_more_and_more(self) -> None:
        found = [interval(1.0, days * 24, days * DAY).seconds for days in (0, 1, 10)]
        # One failure an hour in the end.
        assert found[0] > found[1] > found[2] == pytest.approx(math.sqrt(2 * 3600), rel=0.05)

    @pytest.mark.parametrize(
        ("cost", "failures", "lived", "reason"),
        [
            (None, 0, 0.0, "no save was measured yet, no failure in 0 s so far"),
            (0.21, 1, 9 * 3600.0, "a save stops training for 0.21 s, one failure in 9.0 h so far"),
            (
                1e-4,
                3,
                600.0,
                "a save stops training for 0.0001 s, 3 failures in 10 min so far, as often as is sensible",
            ),
            (
                900.0,
                0,
                600.0,
                "a save stops training for 9e+02 s, no failure in 10 min so far, more must not be lost",
            ),
        ],
    )
    def test_it_is_explained(self, cost: float | None, failures: int, lived: float, reason: str) -> None:
        assert interval(cost, failures, lived).reason() == reason


class TestTheCost:
    def test_it_is_the_median_of_the_last_waits(self) -> None:
        costs = SaveCosts()
        assert costs.seconds() is None
        for seconds in (50.0, 0.2, 0.2, 0.3, 9.0, 0.2):
            costs.saved(seconds)
        assert costs.seconds() == pytest.approx(0.25)

    def test_steps_that_take_longer_beside_a_save_belong_to_it(self) -> None:
        costs = SaveCosts()
        for _ in range(3):
            for _ in range(20):
                costs.stepped(0.1, beside_a_save=False)
            costs.saved(1.0)
            for seconds in (0.15, 0.15, 0.15, 30.0):
                costs.stepped(seconds, beside_a_save=True)
            costs.stepped(0.1, beside_a_save=False)
        # The one of 30 seconds was an evaluation.
        assert costs.seconds() == pytest.approx(1.0 + 4 * 0.05)

    def test_steps_that_happen_to_be_faster_make_it_no_cheaper(self) -> None:
        costs = SaveCosts()
        for beside in (False, True, False):
            for _ in range(5):
                costs.stepped(0.05 if beside else 0.1, beside_a_save=beside)
        costs.saved(1.0)
        assert costs.seconds() == pytest.approx(1.0)


def progress(seconds: float) -> Progress:
    return Progress(step=1, saved_step=0, epochs=0, saved_epochs=0, seconds_since_save=seconds)


class TestThePolicy:
    def auto(self, told: list[SaveInterval], failures: Failures | None = None, **more: Any) -> AutoInterval:
        more = {"kept": lambda _: None, "durable_seconds": lambda: 0.0, **more}
        return AutoInterval(failures or Failures(), told=told.append, **more)

    def test_it_is_due_when_the_interval_is_over(self) -> None:
        policy = self.auto([])
        assert [policy.is_due(progress(seconds)) for seconds in (300.0, 500.0)] == [False, True]

    def test_it_adapts_and_tells_only_of_changes_by_more_than_a_quarter(self) -> None:
        told: list[SaveInterval] = []
        policy = self.auto(told)
        policy.is_due(progress(0.0))
        policy.saved(1.2)
        assert [round(one.seconds) for one in told] == [415]
        for _ in range(3):
            policy.saved(9.0)
        # The median of two, and that of three.
        assert [round(one.seconds, -1) for one in told] == [420, 940, 1240]
        assert [policy.is_due(progress(seconds)) for seconds in (1200.0, 1300.0)] == [False, True]

    def test_it_begins_with_what_saves_took_before_the_restart(self) -> None:
        told: list[SaveInterval] = []
        self.auto(told, before=interval(4.0, 0, 0.0)).is_due(progress(0.0))
        self.auto(told, before=interval(4.0, 0, 0.0, durable=500.0)).is_due(progress(0.0))
        assert [round(one.seconds) for one in told] == [829, 1000]

    def test_it_is_not_due_while_the_save_before_is_being_written(self) -> None:
        told: list[SaveInterval] = []
        policy = self.auto(told, durable_seconds=lambda: 600.0)
        policy.saved(0.1)
        policy.stepped(is_writing=True)
        assert not policy.is_due(progress(10_000.0))
        policy.stepped(is_writing=False)
        # And from then on it is known how long that takes.
        assert [policy.is_due(progress(seconds)) for seconds in (1150.0, 1250.0)] == [False, True]
        assert told[-1].durable_seconds == 600.0

    def test_one_save_that_takes_long_until_it_is_durable_makes_no_difference(self) -> None:
        told: list[SaveInterval] = []
        durable = iter([1.0, 3.0, 9000.0, 2.0])
        took = [0.0]
        policy = self.auto(told, durable_seconds=lambda: took[0])
        for took[0] in durable:
            policy.saved(0.5)
            policy.stepped(is_writing=False)
        assert told[-1].durable_seconds < 10.0

    def test_each_interval_is_kept_as_it_is_now(self) -> None:
        kept: list[SaveInterval] = []
        told: list[SaveInterval] = []
        policy = self.auto(told, kept=kept.append)
        for cost in (1.0, 1.1, 1.2, 1.3):
            policy.saved(cost)
        assert len(told) == 1
        assert kept[-1].cost_seconds == pytest.approx(1.15)


def ended(
    directory: Path, number: int, ending: Ending | None, *, reason: str = "", progress: int = 5
) -> None:
    """Leave what an attempt leaves that trained for about an hour."""
    place = layout.attempt_directory(directory, number)
    with Journal(place / layout.events_file()) as journal:
        journal.append("began", step=0)
    events = place / layout.events_file()
    event = json.loads(events.read_text())
    events.write_text(json.dumps({**event, "time": time.time() - 3600}) + "\n")
    heartbeat = Heartbeat(place / layout.HEARTBEAT)
    heartbeat.progress = progress
    heartbeat.beat(phase="training", step=progress, checkpoint_step=-1)
    heartbeat.close()
    if ending is not None:
        write_last_words(place, LastWords(ending=ending, step=progress, reason=reason))


class TestTheFailures:
    def test_what_died_failed_and_what_ended_by_itself_or_by_a_person_did_not(self, tmp_path: Path) -> None:
        ended(tmp_path, 1, "running")
        ended(tmp_path, 2, "failed")
        ended(tmp_path, 3, None)
        ended(tmp_path, 4, "completed")
        ended(tmp_path, 5, "stopped", reason="unbroken stop")
        ended(tmp_path, 6, "stopped", reason="signal SIGINT")
        found = failures_before(tmp_path, 7)
        assert found.count == 3
        assert found.lived_seconds == pytest.approx(6 * 3600, abs=60)

    def test_a_machine_that_is_taken_away_counts(self, tmp_path: Path) -> None:
        ended(tmp_path, 1, "stopped", reason="signal SIGTERM")
        ended(tmp_path, 2, "stopped", reason="preemption: the instance is reclaimed")
        assert failures_before(tmp_path, 3).count == 2

    def test_an_attempt_that_got_nowhere_counts_for_nothing(self, tmp_path: Path) -> None:
        ended(tmp_path, 1, "failed", progress=0)
        (tmp_path / layout.ATTEMPTS / "0002").mkdir()
        assert failures_before(tmp_path, 3) == Failures()

    def test_only_attempts_before_this_one_count(self, tmp_path: Path) -> None:
        ended(tmp_path, 1, "running")
        ended(tmp_path, 2, "running")
        assert failures_before(tmp_path, 2).count == 1


def intervals(directory: Path, attempt: int) -> list[dict[str, Any]]:
    events = read_events(layout.attempt_directory(directory, attempt) / layout.events_file())
    return [event for event in events if event["kind"] == "save-interval"]


PAUSE_SECONDS = 3 * 3600.0


class Clock:
    """In place of the module `time`: who sleeps on it sleeps for hours, and nobody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept = 0

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, _: float) -> None:
        self.slept += 1
        self.now += PAUSE_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (saver, saves, full_disk, save_interval_module, save_policy):
        monkeypatch.setattr(module, "time", made)
    return made


class TestARun:
    def test_it_is_in_the_journal_and_a_restart_goes_on_from_it(self, tmp_path: Path) -> None:
        for _ in range(2):
            with unbroken.Run(tmp_path, save="auto", counters={"n": 0}) as run:
                for _ in range(2):
                    run.step()
                    run.save()
        first, second = intervals(tmp_path, 1), intervals(tmp_path, 2)
        assert first[0]["cost_seconds"] is None
        assert first[0]["reason"].startswith("no save was measured yet, no failure in")
        before, kept = (read_save_interval(layout.attempt_directory(tmp_path, number)) for number in (1, 2))
        assert before is not None
        assert kept is not None
        assert before.cost_seconds == second[0]["cost_seconds"] > 0
        assert before.durable_seconds == second[0]["durable_seconds"] > 0
        assert kept.cost_seconds != second[0]["cost_seconds"]

    @pytest.mark.parametrize("background", [True, False])
    def test_a_pause_for_a_full_disk_is_no_part_of_what_a_save_takes(
        self, tmp_path: Path, clock: Clock, background: bool
    ) -> None:
        commits: list[SystemCall] = []

        def rule(call: SystemCall) -> Any:
            if is_commit(call):
                commits.append(call)
                if len(commits) == 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call.make()

        with (
            system_calls(rule),
            unbroken.Run(tmp_path, save="auto", keep=[], background=background, counters={"n": 0}) as run,
        ):
            for _ in range(2):
                run.step()
                run.save()
        kept = read_save_interval(layout.attempt_directory(tmp_path, 1))
        assert kept is not None
        assert kept.cost_seconds is not None
        assert clock.slept == 1
        assert max(kept.cost_seconds, kept.durable_seconds) < PAUSE_SECONDS / 10

    def test_training_does_not_stand_still_for_a_save_that_takes_longer_than_the_interval(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        may_end = threading.Event()
        saved: list[int] = []

        def rule(call: SystemCall) -> Any:
            if is_commit(call) and not saved:
                assert may_end.wait(10.0)
            return call.make()

        with (
            system_calls(rule),
            unbroken.Run(tmp_path, save="auto", keep=[], counters={"n": 0}) as run,
        ):
            run.step()
            run.save()
            clock.now += PAUSE_SECONDS
            run.step()
            still_writing = not (tmp_path / "checkpoints/step-00000001").exists()
            may_end.set()
        assert still_writing

    @pytest.mark.parametrize(
        "field",
        [{"seconds": "30"}, {"cost_seconds": "0.2"}, {"failures": None}, {"limit": "roof"}, {"seconds": []}],
    )
    def test_a_record_of_other_types_is_no_record(self, tmp_path: Path, field: dict[str, Any]) -> None:
        write_save_interval(tmp_path, interval(1.0, 0, 0.0))
        place = tmp_path / layout.SAVE_INTERVAL_FILE
        assert read_save_interval(tmp_path) == interval(1.0, 0, 0.0)
        place.write_text(json.dumps({**json.loads(place.read_text()), **field}))
        assert read_save_interval(tmp_path) is None

    def test_it_saves_at_the_end_as_ever(self, tmp_path: Path) -> None:
        with unbroken.Run(tmp_path, save="auto", counters={"n": 0}) as run:
            run.step()
        assert (tmp_path / "checkpoints/step-00000001").is_dir()

    @pytest.mark.parametrize("word", ["Auto", "always", ""])
    def test_another_word_is_refused(self, tmp_path: Path, word: Any) -> None:
        with pytest.raises(UsageError, match="or 'auto'"):
            unbroken.Run(tmp_path, save=word, counters={"n": 0})

    def test_a_text_is_no_list_of_retention_policies(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="expected a list of policies for keep="):
            unbroken.Run(tmp_path, keep="auto", counters={"n": 0})  # type: ignore[arg-type]

    def test_status_explains_it_in_a_line_and_gives_the_numbers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from unbroken.cli.main import main

        with unbroken.Run(tmp_path, save="auto", counters={"n": 0}) as run:
            run.step()
        capsys.readouterr()
        assert main(["status", str(tmp_path)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saves")]
        assert "no failure in" in line.partition(": a save stops training for ")[2]
        main(["status", str(tmp_path), "--json"])
        found = json.loads(capsys.readouterr().out)["save_interval"]
        assert {
            "seconds",
            "reason",
            "cost_seconds",
            "durable_seconds",
            "failures",
            "lived_seconds",
        } <= found.keys()
