"""What training wants people to be told reaches the supervisor's journal, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.journal import Journal, read_events
from unbroken.supervisor.alarms import Alarms, alarm_watch
from unbroken.supervisor.watcher import Started

from .conftest import Bench, made_records
from .in_process import look, status


def told(directory: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(directory / layout.JOURNAL_FILE) if event["kind"] == "alarm"]


def test_alarms_are_passed_on_as_they_come_each_once_also_by_another_supervisor(tmp_path: Path) -> None:
    path = layout.attempt_directory(tmp_path, 2) / layout.ALARMS_FILE
    records = made_records(tmp_path)
    first = Alarms(tmp_path, 2, records, goes_on=False)
    first.look()
    assert told(tmp_path) == []
    with Journal(path) as journal:
        journal.append("alarm", what="spike", text="loss 9", hint="look at it")
        first.look()
        first.look()
        assert [
            (event["alarm"], event["attempt"], event["text"], event["hint"]) for event in told(tmp_path)
        ] == [("spike", 2, "loss 9", "look at it")]
        journal.append("alarm", what="plateau", text="always 3", hint="")
        journal.append("alarm", what="resume", text="too high", hint="")
        # Whoever takes over from one that was killed goes on behind what that one has told.
        second = Alarms(tmp_path, 2, records, goes_on=True)
        second.look()
        third = Alarms(tmp_path, 2, records, goes_on=True)
        third.look()
        journal.append("alarm", what="late", text="said at the end", hint="")
        third.end()
    assert [event["alarm"] for event in told(tmp_path)] == ["spike", "plateau", "resume", "late"]
    other = Alarms(tmp_path, 1, records, goes_on=True)
    other.look()
    assert len(told(tmp_path)) == 4
    records.close()


def test_an_alarm_that_is_half_written_is_told_when_it_is_whole(tmp_path: Path) -> None:
    directory = layout.attempt_directory(tmp_path, 1)
    directory.mkdir(parents=True)
    records = made_records(tmp_path)
    started = Started(attempt=1, directory=directory, run_directory=tmp_path, leader=1)
    watcher = alarm_watch(records)(started)
    whole = b'{"time":1.0,"kind":"alarm","what":"spike","text":"loss 9","hint":""}\n'
    with (directory / layout.ALARMS_FILE).open("ab", buffering=0) as file:
        file.write(whole + whole[:20])
        watcher.end()
        assert len(told(tmp_path)) == 1
        file.write(whole[20:])
        watcher.end()
    assert len(told(tmp_path)) == 2
    records.close()


def test_status_shows_the_last_alarm_and_people_are_notified_of_what_is_bad(bench: Bench) -> None:
    notices = bench.place / "notices"
    script = bench.script(
        "train.py",
        """
        import os
        from pathlib import Path
        from unbroken.rundir.journal import Journal

        here = Path(os.environ["UNBROKEN_RUN_DIR"], "attempts", "0001")
        with Journal(here / "alarms.jsonl") as alarms:
            alarms.append("alarm", what="spike", text="loss 9", hint="")
            alarms.append("alarm", what="plateau", text="always 3", hint="look at the data")
            alarms.append("alarm", what="over", text="the loss moves again", hint="")
        """,
    )
    done = bench.python(script, "--notify", f"cmd:echo $UNBROKEN_NOTICE_EVENT >> {notices}")
    assert done.returncode == 0, done.stderr
    texts = ["loss 9", "always 3", "the loss moves again"]
    assert [event["text"] for event in bench.events("alarm")] == texts
    # What sends them waits for nothing, and they may overtake each other.
    assert sorted(notices.read_text().split()) == ["done", "training-alarm", "training-alarm"]
    alarm = status(bench)["alarm"]
    assert (alarm["what"], alarm["text"], alarm["hint"]) == ("plateau", "always 3", "look at the data")
    assert "always 3" in look(bench, "status", "it").stdout
