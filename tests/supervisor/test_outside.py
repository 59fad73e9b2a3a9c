"""What follows from what is known from outside: notices that stand or are withdrawn, the clock of a job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unbroken.cli.outside import words
from unbroken.rundir.journal import read_events
from unbroken.supervisor.host.notices.amazon import Amazon
from unbroken.supervisor.host.outside import Outside
from unbroken.supervisor.plan import Plan

from .cloud import Cloud, in_seconds
from .conftest import made_records
from .scontrol import Scontrol

if TYPE_CHECKING:
    from unbroken.supervisor.watcher import AskToStop

INTERRUPTION = "/latest/meta-data/spot/instance-action"


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud("X-aws-ec2-metadata-token")
    yield cloud
    cloud.close()


def interruption(seconds: float) -> tuple[int, str]:
    return 200, json.dumps({"action": "terminate", "time": in_seconds(seconds)})


class Told:
    """What a run on Amazon's machine is told of `cloud`, which it asks a hundred times a second."""

    def __init__(self, directory: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Amazon, "every_seconds", 0.01)
        self._cloud = cloud
        self._journal = directory / "journal.jsonl"
        plan = Plan(directory=directory, command=("true",), notices="aws")
        self._outside = Outside(plan, made_records(directory), {"UNBROKEN_METADATA_URL": cloud.url})

    def look(self, save_seconds: float | None = None) -> AskToStop | None:
        """What is wanted once the cloud has been asked anew."""
        enough, end = len(self._cloud.asked) + 4, time.monotonic() + 10
        while len(self._cloud.asked) <= enough:
            assert time.monotonic() < end
            time.sleep(0.01)
        return self._outside.look(save_seconds)

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_events(self._journal)]


def test_a_notice_counts_once_as_long_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    told = Told(tmp_path, cloud, monkeypatch)
    assert told.look() is None
    cloud.answers[INTERRUPTION] = interruption(120)
    wanted = told.look()
    assert wanted is not None
    assert wanted.is_preemption
    assert wanted.reason.startswith("preemption: aws: the spot instance is interrupted (terminate) at ")
    assert told.look() is None
    assert told.kinds == ["notices-watched", "notice", "preemption"]


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_notice_that_is_withdrawn_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: Cloud, is_withdrawn: bool
) -> None:
    cloud.answers[INTERRUPTION] = interruption(900)
    told = Told(tmp_path, cloud, monkeypatch)
    assert told.look() is None
    if is_withdrawn:
        del cloud.answers[INTERRUPTION]
    assert told.look() is None
    # When it would be time for it.
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 700)
    assert (told.look() is None) is is_withdrawn
    expected = "notice-withdrawn" if is_withdrawn else "preemption"
    assert told.kinds == ["notices-watched", "notice", expected]


def test_a_notice_whose_time_is_over_leaves_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    cloud.answers[INTERRUPTION] = interruption(-3600)
    wanted = Told(tmp_path, cloud, monkeypatch).look()
    assert wanted is not None
    assert wanted.seconds == 20


def test_it_is_said_when_a_save_cannot_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: Cloud
) -> None:
    cloud.answers[INTERRUPTION] = interruption(35)
    wanted = Told(tmp_path, cloud, monkeypatch).look(40.0)
    assert wanted is not None
    assert 20 <= (wanted.seconds or 0) <= 32
    *_, event = read_events(tmp_path / "journal.jsonl")
    assert (event["kind"], event["can_save"], event["save_seconds"]) == ("preemption", False, 40.0)


def of_job(directory: Path, **variables: str) -> Outside:
    plan = Plan(directory=directory, command=("true",), notices="off")
    return Outside(plan, made_records(directory), {"SLURM_JOB_ID": "77", **variables})


def test_it_is_said_when_nobody_knows_how_long_a_job_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", Scontrol(tmp_path, code=1).path)
    assert of_job(tmp_path).look() is None
    (event,) = read_events(tmp_path / "journal.jsonl")
    assert (event["kind"], event["job"]) == ("job-end-unknown", "77")
    assert "JobState=RUNNING" in event["reason"]
    assert words(event) == f"when job 77 ends is not known: {event['reason']}"


def test_a_job_is_asked_to_stop_by_the_clock_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = of_job(tmp_path, SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    assert outside.look() is None
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3500)
    wanted = outside.look()
    assert wanted is not None
    assert wanted.is_preemption
    assert wanted.reason.startswith("preemption: Slurm: job 77 ends at ")
    assert outside.look() is None
