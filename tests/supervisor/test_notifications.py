"""Telling people: what, where to, and that nothing ever waits for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import UsageError
from unbroken.rundir.heartbeat import Beat
from unbroken.supervisor.missed_saves import SaveRhythm, is_missing
from unbroken.supervisor.side import notifications
from unbroken.supervisor.side.errands import Errands
from unbroken.supervisor.side.notifications import (
    Notifications,
    parse_target,
    shown,
    wanted_targets,
    worth_telling,
)

from .conftest import Bench, made_records
from .in_process import look
from .receiver import Receiver

FIELDS = {
    *(
        "event",
        "text",
        "hint",
        "run",
        "run_id",
        "directory",
        "host",
        "attempt",
        "outcome",
        "exit_code",
        "time",
    ),
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def side_process(bench: Bench) -> int | None:
    for process_id in bench.strays():
        try:
            with open(f"/proc/{process_id}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"errand_process.py") for word in words) and words[-2].endswith(b".py"):
            return process_id
    return None


def test_a_webhook_and_a_command_are_told_of_the_end(bench: Bench, receiver: Receiver) -> None:
    hook = bench.script(
        "hook.sh",
        '#!/bin/sh\ncat > "$0.json"\necho $UNBROKEN_NOTICE_EVENT $UNBROKEN_NOTICE_RUN > "$0.words"\n',
    )
    os.chmod(hook, 0o755)
    options = ("--notify", receiver.url, "--notify", "./hook.sh", "--notify", "cmd:echo said by cmd")
    assert bench.run("true", options=options).returncode == 0
    (notice,) = receiver.received
    assert set(notice) == FIELDS
    assert (notice["event"], notice["run"], notice["exit_code"]) == ("done", "it", 0)
    assert notice["text"].startswith("it: done: ")
    assert notice["directory"] == str(bench.directory)
    with open(f"{hook}.json") as file:
        assert json.load(file) == notice
    with open(f"{hook}.words") as file:
        assert file.read() == "done it\n"
    assert "said by cmd" in (bench.directory / "supervisor.log").read_text()
    sent = bench.events("notification-sent", "notification-failed")
    assert {event["target"] for event in sent} == {receiver.url.removesuffix("/secret"), hook, "cmd:echo"}
    assert {event["kind"] for event in sent} == {"notification-sent"}
    assert "secret" not in (bench.directory / "journal.jsonl").read_text()


@pytest.mark.chaos
def test_what_an_attempt_leaves_behind_is_still_found_beside_the_process_that_sends(bench: Bench) -> None:
    # Orphans must be handed to the supervisor again once that process is started, and started anew.
    command = "setsid sleep 300 & test $UNBROKEN_ATTEMPT = 2"
    assert bench.run("sh", "-c", command, options=("--notify", "cmd:true")).returncode == 0
    ended = bench.events("leftovers-ended")
    assert len(ended) == 2
    assert all("sleep" in event["processes"][0] for event in ended)


@pytest.mark.chaos
def test_a_server_that_does_not_answer_delays_nothing(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        started = time.monotonic()
        done = bench.run("true", options=("--notify", url, "--notify", url))
        # What the end of a run waits for notifications, and some seconds for this machine.
        assert time.monotonic() - started < 15
    assert done.returncode == 0
    assert bench.state()["state"] == "done"


def test_the_run_goes_on_when_the_process_that_sends_is_killed(
    bench: Bench, training: str, receiver: Receiver
) -> None:
    assert bench.python(training, "--detach", "--notify", receiver.url).returncode == 0
    bench.until(lambda: "training" in bench.output())
    sender = side_process(bench)
    assert sender is not None
    os.kill(sender, signal.SIGKILL)
    bench.until(lambda: bench.events("side-process-lost"))
    assert bench.state()["state"] == "running"
    assert look(bench, "stop", "it").returncode == 0
    # For the last notification there is a new one.
    bench.until(lambda: receiver.received)
    assert [notice["event"] for notice in receiver.received] == ["stopped"]
    assert bench.events("leftovers-ended") == []


@pytest.mark.chaos
def test_the_process_that_sends_does_not_outlive_the_run_or_a_killed_supervisor(
    bench: Bench, training: str, receiver: Receiver
) -> None:
    assert bench.python(training, "--detach", "--notify", receiver.url).returncode == 0
    bench.until(lambda: "training" in bench.output())
    assert side_process(bench) is not None
    os.kill(bench.state()["supervisor"]["process_id"], signal.SIGKILL)
    bench.until(lambda: side_process(bench) is None)
    bench.sweep()


@pytest.mark.chaos
def test_without_anybody_to_tell_there_is_no_such_process(bench: Bench, training: str) -> None:
    assert bench.python(training, "--detach").returncode == 0
    bench.until(lambda: "training" in bench.output())
    assert side_process(bench) is None
    assert bench.cli("stop", "it").returncode == 0


def test_targets_that_cannot_work_are_refused_at_the_start(bench: Bench) -> None:
    done = look(bench, "run", "--name", "it", "--notify", "./nothing-here", "--", "true")
    assert done.returncode == 2
    assert not bench.directory.exists()
    with pytest.raises(UsageError, match="no-such-program"):
        parse_target("/no-such-program")
    with pytest.raises(UsageError, match="expected a URL"):
        parse_target("notify.sh")


def test_a_service_needs_apprise_and_that_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="--notify tgram://: addresses of this kind need apprise") as caught:
        wanted_targets(["tgram://token/chat"])
    assert "pip install 'unbroken[notify]'" in caught.value.hint


@pytest.mark.chaos
def test_apprise_delivers_to_the_services_that_it_knows(bench: Bench, receiver: Receiver) -> None:
    pytest.importorskip("apprise", reason="services are reached by apprise")
    assert bench.run("true", options=("--notify", receiver.url.replace("http://", "json://"))).returncode == 0
    bench.until(lambda: receiver.received)
    (message,) = receiver.received
    assert message["title"] == "it: done"
    assert message["message"].startswith("it: done: ")


def test_targets_of_the_environment_are_one_a_line_and_given_ones_take_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNBROKEN_NOTIFY", "https://example.org/a\n\ncmd:echo two words\n")
    assert wanted_targets(()) == ("https://example.org/a", "cmd:echo two words")
    assert wanted_targets(["http://localhost:9/"]) == ("http://localhost:9/",)
    monkeypatch.delenv("UNBROKEN_NOTIFY")
    assert wanted_targets(()) == ()


def test_what_may_be_a_secret_is_not_shown() -> None:
    assert shown("https://user:pass@hooks.example.org:8443/T0/secret?x=1") == "https://hooks.example.org:8443"
    assert shown("cmd:curl -H 'Authorization: x' https://example.org") == "cmd:curl"
    assert shown("slack://a/b/c") == "slack://"
    assert shown("/usr/bin/notify") == "/usr/bin/notify"


HANG = {"silent_seconds": 840.0, "limit_seconds": 600.0, "phase": "training", "step": 7}


@pytest.mark.parametrize(
    ("kind", "content", "cause", "event"),
    [
        ("run-ended", {"action": "done", "reason": "r", "hint": ""}, "", "done"),
        ("run-ended", {"action": "hold", "reason": "r", "hint": "h"}, "", "held"),
        ("run-ended", {"action": "hand-over", "reason": "r", "hint": ""}, "", "handed-over"),
        ("run-ended", {"action": "stopped", "reason": "r", "hint": ""}, "", "stopped"),
        ("decision", {"action": "restart", "reason": "r", "hint": ""}, "memory", "restart-after-oom"),
        ("decision", {"action": "restart", "reason": "r", "hint": ""}, "device-memory", "restart-after-oom"),
        ("decision", {"action": "restart", "reason": "r", "hint": ""}, "network", None),
        (
            "decision",
            {"action": "roll-back", "reason": "r", "hint": "", "back_to": "step-00000004"},
            "",
            "rollback",
        ),
        # What training has decided by itself is told by its alarm.
        ("decision", {"action": "roll-back", "reason": "r", "hint": "", "back_to": None}, "", None),
        ("saves-missed", {"reason": "r"}, "", "saves-missed"),
        ("hang-suspected", HANG, "", "hang-suspected"),
        ("stop-requested", {"reason": "preemption: Slurm", "is_preemption": True}, "", "preemption"),
        ("stop-requested", {"reason": "unbroken stop", "is_preemption": False}, "", None),
        # What a cloud said is told by the request that follows from it.
        ("preemption", {"who": "aws", "what": "terminate"}, "", None),
        ("alarm", {"alarm": "disk", "text": "t", "hint": "h"}, "", "disk-alarm"),
        ("alarm", {"alarm": "loader", "text": "t", "hint": "h"}, "", None),
        ("alarm", {"alarm": "spike", "source": "training", "text": "t", "hint": "h"}, "", "training-alarm"),
        ("alarm", {"alarm": "roll-back", "source": "training", "text": "t", "hint": ""}, "", "rollback"),
        ("alarm", {"alarm": "over", "source": "training", "text": "t", "hint": ""}, "", None),
        ("attempt-started", {}, "", None),
    ],
)
def test_what_is_worth_telling(kind: str, content: dict[str, Any], cause: str, event: str | None) -> None:
    found = worth_telling(kind, content, cause=cause)
    assert (found[0] if found is not None else None) == event


def test_a_restart_after_memory_ran_out_is_told_with_the_run_it_is_of(tmp_path: Path) -> None:
    told_of: list[tuple[dict[str, Any], str]] = []
    records = made_records(tmp_path)
    # It is never started: what it is handed comes back as not done.
    errands = Errands(tmp_path, on_report=lambda *report: told_of.append(report), on_lost=lambda: None)
    Notifications(["http://127.0.0.1:9/x", "/gone/since/then"], records, errands, tmp_path)
    records.event("attempt-ended", attempt=1, cause="memory")
    records.event("decision", action="restart", reason="in two parts", hint="", next_start=0.0)
    records.event("attempt-ended", attempt=2, cause="network")
    records.event("decision", action="restart", reason="after a pause", hint="", next_start=0.0)
    ((errand, problem),) = told_of
    assert problem == "the process that does this is not there"
    assert errand["notice"]["event"] == "restart-after-oom"
    assert errand["notice"]["text"] == "it: memory ran out; restarting: in two parts"
    assert set(errand["notice"]) == FIELDS


def beat(phase: str, checkpoint_step: int) -> Beat:
    zeros = {field.name: 0 for field in fields(Beat)}
    return Beat(**{**zeros, "phase": phase, "checkpoint_step": checkpoint_step})  # type: ignore[arg-type]


def told(rhythm: SaveRhythm, *looks: tuple[float, str, int]) -> list[str]:
    reasons = [rhythm.see(beat(phase, step), at) for at, phase, step in looks]
    return [reason for reason in reasons if reason is not None]


def test_checkpoints_that_stay_away_twice_as_long_as_usual_are_missed_once() -> None:
    usual = [(float(at), "training", at // 100) for at in range(0, 500, 10)]
    rhythm = SaveRhythm()
    assert told(rhythm, *usual) == []
    late = [(float(at), "training", 4) for at in range(500, 900, 10)]
    (reason,) = told(rhythm, *late)
    assert "usually there is one every 100 s" in reason
    assert (
        told(rhythm, (900.0, "training", 5), *((float(at), "training", 5) for at in range(910, 1050, 10)))
        == []
    )
    assert len(told(rhythm, (1200.0, "training", 5))) == 1


def test_time_that_is_not_training_does_not_count() -> None:
    rhythm = SaveRhythm()
    assert told(rhythm, *((float(at), "training", at // 100) for at in range(0, 500, 10))) == []
    assert told(rhythm, *((float(at), "evaluating", 4) for at in range(500, 9000, 100))) == []


def test_a_full_disk_is_told_at_once_and_once() -> None:
    rhythm = SaveRhythm()
    waiting = [(float(at), "disk-full", -1) for at in range(5)]
    assert told(rhythm, (0.0, "training", -1), *waiting) == ["the disk is full, and training waits for space"]
    assert len(told(rhythm, (9.0, "training", -1), *waiting)) == 1


def test_an_interval_alone_is_no_habit() -> None:
    assert not is_missing([], 1e9)
    assert not is_missing([5.0], 1e9)
    assert not is_missing([5.0, 5.0, 5.0], 59.0)
    assert is_missing([5.0, 5.0, 5.0], 61.0)
