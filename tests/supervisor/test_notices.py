"""What clouds say before they take a machine: real questions over loopback, real runs that stop in time."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unbroken.cli.run import run as run_command
from unbroken.supervisor.host.notices.amazon import Amazon
from unbroken.supervisor.host.notices.azure import Azure, parse_events
from unbroken.supervisor.host.notices.choose import PROVIDERS, make_provider, provider_by_firmware
from unbroken.supervisor.host.notices.google import Google
from unbroken.supervisor.host.notices.http import Metadata, parse_answer
from unbroken.supervisor.host.notices.watch import NoticeWatch, pause_seconds
from unbroken.supervisor.host.outside import watch_of

from .cloud import Cloud, in_seconds

if TYPE_CHECKING:
    from .conftest import Bench

AWS_TOKEN = "X-aws-ec2-metadata-token"
ALIBABA_TOKEN = "X-aliyun-ecs-metadata-token"
INTERRUPTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
WAITING = f"{PREEMPTED}?wait_for_change=true&timeout_sec=5"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ALIBABA = "/latest/meta-data/instance/spot/termination-time"
TENCENT = "/latest/meta-data/spot/termination-time"


@pytest.fixture
def make_cloud() -> Iterator[Callable[..., Cloud]]:
    made: list[Cloud] = []

    def make(needs_token: str | None = None) -> Cloud:
        made.append(Cloud(needs_token))
        return made[-1]

    yield make
    for cloud in made:
        cloud.close()


def metadata(cloud: Cloud) -> Metadata:
    return Metadata(cloud.url, timeout_seconds=5)


def azure_event(kind: str, *machines: str, before: str = "") -> dict[str, Any]:
    return {"EventId": "e", "EventType": kind, "Resources": list(machines), "NotBefore": before}


def firmware(directory: Path, **texts: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(f"{text}\n")
    return directory


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p4d.24xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "Alibaba Cloud", "product_name": "Alibaba Cloud ECS"}, "alibaba"),
        ({"sys_vendor": "Tencent Cloud", "product_name": "CVM"}, "tencent"),
        ({"sys_vendor": "LENOVO", "product_name": "20XW"}, None),
        ({}, None),
    ],
)
def test_the_provider_is_known_by_the_firmware(
    tmp_path: Path, texts: dict[str, str], expected: str | None
) -> None:
    assert provider_by_firmware(firmware(tmp_path / "id", **texts)) == expected


def test_a_machine_without_firmware_belongs_to_no_cloud(tmp_path: Path) -> None:
    assert provider_by_firmware(tmp_path / "none") is None


def test_run_takes_the_names_of_all_providers() -> None:
    (option,) = [option for option in run_command.params if option.name == "notices"]
    assert set(option.type.choices) == {"auto", "off", *PROVIDERS}  # type: ignore[attr-defined]
    assert [make_provider(name).name for name in PROVIDERS] == list(PROVIDERS)


def test_amazon_is_asked_with_a_token_that_is_renewed(make_cloud: Callable[..., Cloud]) -> None:
    cloud, amazon = make_cloud(AWS_TOKEN), Amazon()
    assert amazon.ask(metadata(cloud)) == []
    assert [method for method, _, _ in cloud.asked] == ["PUT", "GET", "GET"]
    cloud.tokens = ["of another day"]
    cloud.answers[INTERRUPTION] = 200, '{"action": "terminate", "time": "1970-01-02T00:00:00Z"}'
    (notice,) = amazon.ask(metadata(cloud))
    assert (notice.kind, notice.at_seconds) == ("end", 86400.0)
    assert notice.what == "the spot instance is interrupted (terminate)"
    # It begins at once, and where the instance wakes the notice may still stand.
    cloud.answers[INTERRUPTION] = 200, '{"action": "hibernate", "time": "1970-01-02T00:00:00Z"}'
    assert [notice.kind for notice in amazon.ask(metadata(cloud))] == ["risk"]


def test_a_rebalance_recommendation_is_a_risk_and_no_end(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud(AWS_TOKEN)
    cloud.answers[REBALANCE] = 200, '{"noticeTime": "2026-01-01T00:00:00Z"}'
    assert [notice.kind for notice in Amazon().ask(metadata(cloud))] == ["risk"]


def test_google_holds_the_question_until_something_changes(make_cloud: Callable[..., Cloud]) -> None:
    cloud, google, happens = make_cloud(), Google(), threading.Event()
    cloud.answers[PREEMPTED] = 200, "FALSE"
    cloud.answers[WAITING] = lambda: (200, "TRUE" if happens.wait(5) else "FALSE")
    cloud.answers[MAINTENANCE] = 200, "NONE"
    assert google.ask(metadata(cloud)) == []
    threading.Timer(0.1, happens.set).start()
    begun = time.monotonic()
    (notice,) = google.ask(metadata(cloud))
    assert time.monotonic() - begun < 4
    assert (notice.kind, notice.within_seconds) == ("end", 30.0)
    assert all(headers.get("Metadata-Flavor") == "Google" for _, _, headers in cloud.asked)


def test_maintenance_of_the_host_is_a_risk(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud()
    cloud.answers = {PREEMPTED: (200, "FALSE"), MAINTENANCE: (200, "TERMINATE_ON_HOST_MAINTENANCE")}
    (notice,) = Google().ask(metadata(cloud))
    assert notice.kind == "risk"
    assert "TERMINATE_ON_HOST_MAINTENANCE" in notice.what


def test_azure_names_this_machine_or_it_is_not_meant(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud()
    events = [azure_event("Preempt", "vm_1"), azure_event("Reboot", "vm_0", before="1970-01-02T00:00:00Z")]
    cloud.answers = {NAME: (200, "vm_0"), EVENTS: (200, json.dumps({"Events": events}))}
    (notice,) = Azure().ask(metadata(cloud))
    assert (notice.kind, notice.at_seconds) == ("end", 86400.0)
    assert notice.what == "the machine is rebooted (Reboot)"
    assert all(headers.get("Metadata") == "true" for _, _, headers in cloud.asked)


@pytest.mark.parametrize(
    ("event", "kind", "at", "within"),
    [
        (azure_event("Preempt", "me", before="Fri, 02 Jan 1970 00:00:00 GMT"), "end", 86400.0, None),
        (azure_event("Preempt", "me"), "end", None, 30.0),
        (azure_event("Freeze", "me", before="1970-01-02T00:00:00Z"), "risk", 86400.0, None),
        (azure_event("Terminate", "other", "me"), "end", None, 30.0),
    ],
)
def test_each_kind_of_azure_event_is_understood(
    event: dict[str, Any], kind: str, at: float | None, within: float | None
) -> None:
    (notice,) = parse_events(json.dumps({"Events": [event]}), "me")
    assert (notice.kind, notice.at_seconds, notice.within_seconds) == (kind, at, within)


@pytest.mark.parametrize("text", ["", "[]", '{"Events": 3}', "<html>"])
def test_an_answer_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Expecting"):
        parse_events(text, "me")


def test_alibaba_is_asked_with_a_token(make_cloud: Callable[..., Cloud]) -> None:
    cloud, alibaba = make_cloud(ALIBABA_TOKEN), make_provider("alibaba")
    assert alibaba.ask(metadata(cloud)) == []
    cloud.answers[ALIBABA] = 200, "1970-01-02T00:00:00Z"
    assert [notice.at_seconds for notice in alibaba.ask(metadata(cloud))] == [86400.0]


def test_tencent_tells_the_time_of_china(make_cloud: Callable[..., Cloud]) -> None:
    cloud = make_cloud()
    cloud.answers[TENCENT] = 200, "1970-01-02 08:00:00"
    (notice,) = make_provider("tencent").ask(metadata(cloud))
    assert notice.at_seconds == 86400.0


def test_answers_in_chunks_are_joined_and_cut_ones_refused() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nTRU\r\n1\r\nE\r\n0\r\n\r\n"
    assert parse_answer(chunked).text == "TRUE"
    with pytest.raises(ValueError, match="expected 9 bytes, found 2"):
        parse_answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nTR")
    with pytest.raises(ValueError, match="expected an answer in HTTP"):
        parse_answer(b"SSH-2.0-OpenSSH\r\n")


def until(is_so: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("failures", "has_answered", "expected"), [(0, True, 2), (2, False, 2), (3, True, 10), (9, False, 60)]
)
def test_a_service_that_has_answered_before_is_asked_again_soon(
    failures: int, has_answered: bool, expected: float
) -> None:
    assert pause_seconds(2, failures=failures, has_answered=has_answered) == expected


def test_a_service_that_does_not_answer_is_said_once_and_waited_for_by_nobody() -> None:
    class Hasty(Amazon):
        every_seconds = 0.01

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    watch = NoticeWatch(Hasty(), f"http://127.0.0.1:{port}")
    watch.start()
    found: list[str] = []
    until(lambda: found.extend(watch.troubles()) or found)
    assert len(found) == 1
    assert "does not answer" in found[0]


def start(bench: Bench, cloud: Cloud, provider: str, script: str) -> Any:
    bench.environment["UNBROKEN_METADATA_URL"] = cloud.url
    # A proxy of the environment must not be asked for an address of this machine's own.
    bench.environment["http_proxy"] = "http://127.0.0.1:9"
    return bench.start("run", "--name", "it", "--notices", provider, "--", sys.executable, script)


def ended(bench: Bench, viewer: Any, *words: str) -> None:
    _, said = viewer.communicate(timeout=40)
    assert viewer.returncode == 75, said
    assert bench.attempts() == 1
    assert bench.verdict(1)["outcome"] == "stopped"
    assert bench.state()["state"] == "stopped"
    for word in words:
        assert word in said


def is_training(bench: Bench) -> bool:
    return "training" in bench.output()


def test_a_run_on_a_spot_instance_of_amazon_saves_at_a_hint_and_stops_at_the_notice(
    bench: Bench, training: str, make_cloud: Callable[..., Cloud]
) -> None:
    cloud = make_cloud(AWS_TOKEN)
    cloud.answers[REBALANCE] = 200, '{"noticeTime": "2026-01-01T00:00:00Z"}'
    viewer = start(bench, cloud, "aws", training)
    save_now = bench.directory / "control" / "save-now.json"
    bench.until(lambda: is_training(bench) and save_now.exists())
    assert bench.state()["state"] == "running"
    cloud.answers[INTERRUPTION] = 200, json.dumps({"action": "terminate", "time": in_seconds(120)})
    ended(bench, viewer, "aws: the spot instance is interrupted (terminate)")
    (event,) = bench.events("preemption")
    assert 100 < event["seconds_left"] <= 110
    assert event["can_save"] is True
    (over,) = bench.events("run-ended")
    assert (over["action"], over["exit_code"]) == ("hand-over", 75)


@pytest.mark.chaos
def test_a_preempted_run_of_google_stops_within_its_half_minute(
    bench: Bench, training: str, make_cloud: Callable[..., Cloud]
) -> None:
    cloud, happens = make_cloud(), threading.Event()
    cloud.answers = {
        PREEMPTED: (200, "FALSE"),
        WAITING: lambda: (200, "TRUE" if happens.wait(5) else "FALSE"),
        MAINTENANCE: (200, "NONE"),
    }
    viewer = start(bench, cloud, "gcp", training)
    bench.until(lambda: is_training(bench))
    happens.set()
    ended(bench, viewer, "gcp: the instance is preempted")
    (event,) = bench.events("preemption")
    assert 20 < event["seconds_left"] <= 27


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("provider", "token", "answers"),
    [
        ("alibaba", ALIBABA_TOKEN, lambda: {ALIBABA: (200, in_seconds(290))}),
        ("tencent", None, lambda: {TENCENT: (200, in_seconds(8 * 3600 + 120).replace("T", " ")[:-1])}),
        (
            "azure",
            None,
            lambda: {
                NAME: (200, "me"),
                EVENTS: (200, json.dumps({"Events": [azure_event("Preempt", "me", before=in_seconds(30))]})),
            },
        ),
    ],
)
def test_a_run_stops_at_the_notice_of_the_other_clouds(
    bench: Bench,
    training: str,
    make_cloud: Callable[..., Cloud],
    provider: str,
    token: str | None,
    answers: Callable[[], dict[str, Any]],
) -> None:
    cloud = make_cloud(token)
    cloud.answers = answers()
    ended(bench, start(bench, cloud, provider, training), f"{provider}: ")


@pytest.mark.chaos
def test_a_notice_between_two_attempts_stops_the_run_too(
    bench: Bench, make_cloud: Callable[..., Cloud]
) -> None:
    cloud = make_cloud()
    bench.environment["UNBROKEN_METADATA_URL"] = cloud.url
    options = ("--name", "it", "--notices", "gcp", "--backoff", "600")
    happens = threading.Event()
    cloud.answers = {
        PREEMPTED: (200, "FALSE"),
        WAITING: lambda: (200, "TRUE" if happens.wait(5) else "FALSE"),
        MAINTENANCE: (200, "NONE"),
    }
    viewer = bench.start("run", *options, "--", "sh", "-c", "kill -SEGV $$")
    bench.until(lambda: bench.state().get("state") == "backing-off")
    happens.set()
    viewer.communicate(timeout=40)
    assert viewer.returncode == 75
    assert bench.events("run-ended")[0]["action"] == "hand-over"


def test_without_a_cloud_nobody_is_asked() -> None:
    assert watch_of("off", {}) is None
    if provider_by_firmware() is None:
        assert watch_of("auto", {"UNBROKEN_METADATA_URL": "http://127.0.0.1:9"}) is None
    named = watch_of("aws", {})
    assert named is not None
    assert named.name == "aws"
