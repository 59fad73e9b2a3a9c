"""After a resume: steps that are done again are compared with what was recorded of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.errors import StorageError, StorageFullError
from unbroken.rundir import layout
from unbroken.rundir.journal import Journal, read_events
from unbroken.rundir.newest_events import NewestEvents
from unbroken.rundir.rollbacks import LowerRate, Rollback, Window
from unbroken.supervisor.judging.certificate import certificate_in_words, read_certificate
from unbroken.training.health import repeated
from unbroken.training.health.repeated import Repeated, read_recorded

from .runs import names, words_of

NAN = math.nan


class CrashError(Exception):
    """Ends an attempt as a crash would, with nothing saved."""


def train(
    directory: Path,
    loss: Callable[[int], float],
    *,
    until: int,
    crash: bool = False,
    every: int = 10,
    seconds: float = 1.0,
    **keywords: Any,
) -> unbroken.Run:
    """One attempt, whose part follows from all steps."""
    state = {"sum": 0.0}
    run = unbroken.Run(directory, save=[unbroken.EverySteps(every)], keep=[], state=state, **keywords)
    try:
        with run:
            while run.step_count < until:
                state["sum"] += run.step_count + 1
                run.step(loss=loss(run.step_count + 1), seconds=seconds)
            if crash:
                raise CrashError
    except CrashError:
        pass
    return run


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event
        for attempt in layout.attempts(directory)
        for event in read_events(layout.attempt_directory(directory, attempt) / layout.events_file())
        if event["kind"] == kind
    ]


def flat(_: int) -> float:
    return 1.0


def falling(step: int) -> float:
    return 1.0 / step


def written(directory: Path, attempt: int, *lines: tuple[str, int, float | None]) -> None:
    """The journal of an attempt, of events with their step and loss."""
    place = layout.attempt_directory(directory, attempt)
    with Journal(place / layout.events_file()) as journal:
        for kind, step, loss in lines:
            journal.append(kind, step=step, **({} if loss is None else {"metrics": {"loss": loss}}))


def recorded(directory: Path, before: int, step: int, *rollbacks: Rollback) -> dict[int, float]:
    found = read_recorded(directory, before=before, step=step, rollbacks=rollbacks)
    return {at: metrics["loss"] for at, metrics in found.items()}


def test_of_each_step_what_counts_is_what_was_recorded_last(tmp_path: Path) -> None:
    written(tmp_path, 1, ("began", 0, None), *(("step", n, n + 0.1) for n in range(1, 8)))
    written(tmp_path, 2, ("began", 4, None), *(("step", n, n + 0.2) for n in (5, 6)))
    # It never came as far as a step; what follows from that is that nothing was undone.
    written(tmp_path, 3)
    assert recorded(tmp_path, 4, 3) == {6: 6.2, 5: 5.2, 4: 4.1}
    assert recorded(tmp_path, 4, 4) == {6: 6.2, 5: 5.2}
    assert recorded(tmp_path, 2, 4) == {7: 7.1, 6: 6.1, 5: 5.1}
    assert recorded(tmp_path, 4, 6) == {}
    # An attempt that began later leaves what is before its beginning as it was.
    written(tmp_path, 4, ("began", 6, None), ("step", 7, 7.4))
    assert recorded(tmp_path, 5, 3) == {7: 7.4, 6: 6.2, 5: 5.2, 4: 4.1}


def test_steps_that_were_rolled_back_do_not_count(tmp_path: Path) -> None:
    before = [("step", n, n + 0.1) for n in range(1, 8)]
    after = [("step", n, n + 0.2) for n in (5, 6)]
    written(tmp_path, 1, ("began", 0, None), *before, ("rolled-back", 4, None), *after)
    assert recorded(tmp_path, 2, 3) == {6: 6.2, 5: 5.2, 4: 4.1}
    written(tmp_path, 1, ("rolled-back", 2, None))
    assert recorded(tmp_path, 2, 2) == {}


def test_steps_are_compared_up_to_the_first_batch_that_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, 1, ("began", 0, None), *(("step", n, n + 0.1) for n in range(1, 8)))
    window = Window(epoch=0, pass_index=0, first=5, last=5)
    fields = {"reason": "r", "attempt": 1, "found_step": 6, "trusted_step": 5}
    without = Rollback(decided_by="health", windows=(window,), **fields)  # type: ignore[arg-type]
    assert sorted(recorded(tmp_path, 2, 3, without)) == [4, 5]
    rate = LowerRate(factor=0.1, from_step=4, until_step=9)
    slower = Rollback(decided_by="health", windows=(window,), lower_rate=rate, **fields)  # type: ignore[arg-type]
    assert sorted(recorded(tmp_path, 2, 3, slower)) == [4]
    by_supervisor = Rollback(decided_by="supervisor", **fields)  # type: ignore[arg-type]
    assert sorted(recorded(tmp_path, 2, 3, by_supervisor)) == [4, 5, 6, 7]


def test_of_a_long_journal_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "LIMIT_BYTES", limit := 1 << 17)
    place = layout.attempt_directory(tmp_path, 1)
    place.mkdir(parents=True)
    line = '{{"time":1.0,"kind":"step","step":{},"epoch":0,"metrics":{{"loss":{}.0}}}}\n'
    count = 2 * limit // len(line)
    (place / layout.events_file()).write_text("".join(line.format(n, n) for n in range(1, count + 1)))
    found = recorded(tmp_path, 2, 0)
    assert max(found) == count
    assert count // 4 < len(found) < count
    assert min(found) == count - len(found) + 1
    few = NewestEvents(place / layout.events_file(), 1 << 16)
    assert [next(iter(few))["step"], few.read_bytes] == [count, 1 << 16]


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_events_are_read_newest_first_wherever_a_piece_ends(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.rundir.newest_events._PIECE_BYTES", piece)
    path = tmp_path / "events.jsonl"
    assert list(NewestEvents(path, 1000)) == []
    path.write_bytes(b'{"kind":"a"}\n{"kind":"torn\n\n{"kind":"b"}\n{"kind":"half')
    whole = NewestEvents(path, 1000)
    assert [event["kind"] for event in whole] == ["b", "a"]
    assert not whole.is_cut
    cut = NewestEvents(path, 20)
    # The line of "b" has 13 bytes, what is half written behind it 13 as well.
    assert [event["kind"] for event in cut] == (["b", "a"] if piece > 1000 else [])
    assert cut.is_cut is (piece < 1000)
    enough = NewestEvents(path, 27)
    assert [event["kind"] for event in enough] == (["b", "a"] if piece > 1000 else ["b"])


def test_a_step_is_as_before_bit_for_bit_or_not() -> None:
    found = Repeated({5: {"loss": 0.5}, 6: {"loss": "nan"}, 7: {"loss": 2.0}, 8: {"loss": -0.0}}, "loss")
    for step, loss in ((4, 1.0), (5, 0.5), (6, NAN), (7, 2.0000000000000004), (8, 0.0), (9, 1.0)):
        found.step(step, {"loss": loss})
    assert (found.repeated_steps, found.equal_steps) == (4, 2)
    assert found.first_difference is not None
    first = found.first_difference
    assert (first.step, first.metric, first.here, first.there) == (7, "loss", 2.0000000000000004, 2.0)
    assert found.largest_relative_difference == pytest.approx(2.2e-16, rel=0.01)


def test_what_measures_the_machine_is_no_difference_beside_an_equal_loss() -> None:
    found = Repeated({1: {"loss": 0.5, "seconds": 1.25}}, "loss")
    found.step(1, {"loss": 0.5, "seconds": 1.5})
    assert (found.equal_steps, found.others) == (1, {"seconds"})
    without = Repeated({1: {"score": 1, "gone": 2.0}}, "loss")
    without.step(1, {"score": 2, "new": 3.0})
    assert without.first_difference is not None
    assert without.first_difference.metric == "score"


def test_a_resume_that_is_exact_gets_a_certificate_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, falling, until=25, crash=True)
    train(tmp_path, falling, until=26)
    (found,) = events(tmp_path, "resume-certificate")
    assert (found["checkpoint"], found["attempt"], found["digests_equal"]) == ("step-00000020", 2, True)
    assert (found["repeated_steps"], found["equal_steps"], found["first_difference"]) == (5, 5, None)
    assert found["largest_relative_difference"] == 0.0
    assert "done again" not in capsys.readouterr().err
    train(tmp_path, falling, until=27)
    assert [event["repeated_steps"] for event in events(tmp_path, "resume-certificate")] == [5, 0]


def test_a_resume_whose_steps_differ_says_how_many_where_and_how_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, flat, until=14, crash=True)
    # It ends before all that was recorded is done again.
    train(tmp_path, lambda step: 1.25 if step > 11 else 1.0, until=13, crash=True)
    said = capsys.readouterr().err
    assert "of 3 steps that were done again since step-00000010, 1 are as before" in said
    assert "step 12: loss 1.25, before 1.0 (largest relative difference 0.2)" in said
    certificate = read_certificate(tmp_path, 2)
    assert certificate is not None
    assert certificate["first_difference"] == {"step": 12, "metric": "loss", "here": 1.25, "there": 1.0}
    assert "1 of 3 steps repeated as before" in certificate_in_words(certificate)
    assert read_certificate(tmp_path, 1) is None
    assert read_certificate(tmp_path, None) is None


def test_what_the_script_wants_otherwise_is_named_in_the_certificate(tmp_path: Path) -> None:
    train(tmp_path, flat, until=10)
    train(tmp_path, flat, until=12, fresh=["state"])
    (found,) = events(tmp_path, "resume-certificate")
    assert (found["digests_equal"], found["not_exact"]) == (False, ["state"])


def test_metrics_that_differ_beside_an_equal_loss_are_named(tmp_path: Path) -> None:
    for seconds in (1.0, 2.0):
        train(tmp_path, falling, until=25, crash=True, seconds=seconds)
    certificate = read_certificate(tmp_path, 2)
    assert certificate is not None
    assert (certificate["equal_steps"], certificate["others_that_differ"]) == (5, ["seconds"])
    assert "all as before in their loss, but not in seconds" in certificate_in_words(certificate)


@pytest.mark.parametrize("full_disk", ["pause", "fail"])
@pytest.mark.parametrize("error", [StorageError, StorageFullError])
def test_a_certificate_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[StorageError],
    full_disk: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    append = Journal.append

    def fails(journal: Journal, kind: str, /, **fields: Any) -> None:
        if kind == "resume-certificate":
            raise error("no space", hint="")
        append(journal, kind, **fields)

    monkeypatch.setattr(Journal, "append", fails)
    train(tmp_path, flat, until=28, crash=True)
    # It ends before all that was recorded is done again.
    train(tmp_path, flat, until=25, full_disk=full_disk)
    assert (words_of(tmp_path).ending, names(tmp_path)[-1]) == ("completed", "step-00000025")
    assert "the certificate of the resume is lost: no space" in capsys.readouterr().err


def test_where_no_certificate_is_to_come_no_long_journal_is_read(tmp_path: Path) -> None:
    train(tmp_path, flat, until=2)
    with Journal(layout.attempt_directory(tmp_path, 1) / layout.events_file()) as journal:
        journal.append("resume-certificate", checkpoint="of nobody")
    assert read_certificate(tmp_path, 1) is None
