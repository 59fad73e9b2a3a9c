"""`unbroken report`: of a real run in a real browser, and of runs that are in no good state."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.manifest import Validation
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.cli.report import report as command
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.identity import open_run
from unbroken.rundir.journal import Journal
from unbroken.rundir.last_words import LastWords, write_last_words
from unbroken.rundir.rollbacks import Rollback, add_rollback

from ..checkpoint.states import snapshot_at
from .browser import BINARY, Browser
from .training import CrashError, train

HOSTILE = "</script><script>alert(6)</script>"

# What the browser made of the page.
LOOK = """(() => {
  const all = selector => [...document.querySelectorAll(selector)]
  const box = element => element.getBoundingClientRect()
  const pins = all('.plot .pin').filter(pin => box(pin).width > 0)
  return {
    scripts: document.scripts.length + all('img, link, iframe, [src]').length,
    isTooWide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
    marks: all('#curve line.mark').map(line => [line.classList[1], line.querySelector('title').textContent]),
    curve: all('#curve path.curve')[0].getTotalLength(),
    plot: [box(all('#curve svg')[0]).width, box(all('#curve svg')[0]).height],
    notFinite: all('#curve .plot .nan').map(mark => mark.title),
    saved: all('#curve .saved').map(mark => mark.title),
    pins: pins.map(pin => [box(pin).left, box(pin).right, box(pin).height]),
    labels: pins.map(pin => pin.innerText),
    values: all('#curve .plot .y').map(label => label.innerText),
    lefts: all('.plot .y').map(label => box(label).left),
    leads: pins.map(pin => document.querySelector(pin.getAttribute('href')) !== null),
    texts: all('.plot span').map(label => parseFloat(getComputedStyle(label).fontSize)),
    lines: Math.max(...all('.plot span').map(label => box(label).height)) / 14,
    outside: all('.plot span, .pin').filter(one => box(one).width && box(one).right > innerWidth).length,
    said: document.body.innerText,
    spoken: all('svg[role=img]').every(svg => svg.getAttribute('aria-label')),
    background: getComputedStyle(document.body).backgroundColor,
  }
})()"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that crashed, went on, and was rolled back past a poisoned batch."""
    directory = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.raises(CrashError):
        train(directory, crash_at=6)
    train(directory, poison_at=14)
    store = CheckpointStore(directory)
    store.quarantine("step-00000016", "2 bytes differ")
    return directory


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BINARY is None:
        pytest.skip("looks at the page in a real browser: Chromium is not installed")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def written(directory: Path, path: Path) -> Path:
    assert main(["report", str(directory), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (360, True)], ids=["wide", "telephone"])
def test_a_browser_shows_curve_and_marks_and_asks_for_nothing_else(
    browser: Browser, trained: Path, tmp_path: Path, width: int, is_dark: bool
) -> None:
    path = written(trained, tmp_path / "report.html")
    browser.open(path, width=width, dark=is_dark)
    seen = browser.look(LOOK)
    browser.picture(tmp_path / "picture.png")

    assert (browser.asked, browser.said) == ([path.as_uri()], [])
    assert (seen["scripts"], seen["isTooWide"], seen["outside"]) == (0, False, 0)
    assert seen["marks"] == [
        ["restart", "Attempt 1: failed (certain)"],
        ["roll-back", "Rolled back from step 14 to step 12"],
    ]
    assert seen["curve"] > 500
    assert seen["notFinite"] == ["NaN or infinite at step 14, superseded since"]
    assert "step-00000016: 2 bytes differ" in seen["saved"]
    assert len(seen["saved"]) == 7
    assert seen["leads"] == [True] * len(seen["pins"])
    assert len(seen["pins"]) >= 2
    assert all(24 <= height < 30 for _, _, height in seen["pins"])
    ordered = sorted(seen["pins"])
    assert all(one[1] <= other[0] for one, other in pairwise(ordered))
    assert min(seen["texts"]) >= 12
    assert seen["lines"] < 1.5, "a label is broken in two"
    assert seen["plot"][0] > 0.6 * width
    assert seen["spoken"]
    assert HOSTILE in seen["said"]
    for words in ("step-00000004 was restored bit for bit", "samples", "superseded work", "superseded since"):
        assert words in seen["said"]
    assert (seen["background"] == "rgb(255, 255, 255)") != is_dark
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_the_newest_of_many_marks_and_long_labels_stay_in_one_piece(browser: Browser, tmp_path: Path) -> None:
    alarms = [{"kind": "alarm", "what": "spike", "step": number} for number in (20, 60, 97, 98, 99)]
    steps = [step(number, loss=0.99991 + number * 4e-7) for number in range(1, 101)]
    directory = made(tmp_path / "run", [{"kind": "began", "step": 0}, *steps, *alarms])
    for width in (1280, 360):
        browser.open(written(directory, tmp_path / "report.html"), width=width)
        seen = browser.look(LOOK)
        assert seen["labels"][-1] == "3+"
        assert all(24 <= height < 30 for _, _, height in seen["pins"])
        assert (seen["isTooWide"], seen["outside"]) == (False, 0)
        assert len(set(seen["values"])) == len(seen["values"]) >= 3
        assert min(seen["lefts"]) >= 0


def test_json_has_the_documented_fields_and_the_one_curve(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    documented = re.findall(r"\w+", (command.help or "").partition("Fields of --json")[2])
    assert set(found) <= set(documented)
    assert {name for mark in found["marks"] for name in mark} <= set(documented)
    points = found["metrics"]["loss"]["points"]
    assert [step for step, _ in points] == list(range(1, found["step"] + 1))
    assert all(math.isfinite(value) for _, value in points)
    assert (found["restarts"], found["rollbacks"]) == (1, 1)
    assert [mark["kind"] for mark in found["marks"]] == ["restart", "roll-back", "end"]
    assert found["marks"][1]["words"][-1].startswith("left out: samples ")
    assert [one["name"] for one in found["checkpoints"] if one["is_set_aside"]] == ["step-00000016"]


def made(directory: Path, events: list[dict[str, Any]], *, attempt: int = 1) -> Path:
    """A run directory whose only journal has `events`."""
    open_run(directory)
    with Journal(layout.attempt_directory(directory, attempt) / layout.events_file()) as journal:
        for event in events:
            journal.append(event["kind"], **{name: event[name] for name in event if name != "kind"})
    return directory


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "epoch": 0, "metrics": metrics}


def test_a_run_in_any_state_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = {"kind": "began", "step": 0}
    nan, torn = "nan", tmp_path / "torn"
    runs = [
        made(tmp_path / "begun", [began]),
        made(tmp_path / "nothing is finite", [began, step(1, loss=nan), step(2, loss=nan)]),
        made(tmp_path / "constant", [began, step(1, loss=0.0), step(2, loss=0.0)]),
        made(tmp_path / "huge", [began, step(1, loss=1e308), step(2, loss=-1e308)]),
        made(tmp_path / "huge integers", [began, step(1, loss=10**400), step(2, loss=-(10**400))]),
        made(tmp_path / "nearly constant", [began, step(1, loss=1 / 3), step(2, loss=1 / 3 + 1e-16)]),
        made(tmp_path / "no metrics", [began, step(1), step(2)]),
        made(torn, [began, step(1, loss=1.0), {"kind": "alarm", "what": "spike", "text": "high"}]),
    ]
    with (layout.attempt_directory(torn, 1) / layout.events_file()).open("ab") as file:
        file.write(b'{"kind":"step","st')
    (torn / layout.ROLLBACKS_FILE).write_text("[")
    (torn / layout.SUPERVISOR_FILE).write_text("{}")
    (torn / layout.QUARANTINE / "step-00000001").mkdir(parents=True)
    open_run(tmp_path / "empty")
    for directory in (*runs, tmp_path / "empty"):
        text = written(directory, tmp_path / "page.html").read_text()
        assert text.endswith("</html>\n")
        assert "NaN.0" not in text
        assert "nan%" not in text
    capsys.readouterr()
    assert main(["report", str(torn), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) >= 2
    assert [mark["title"] for mark in found["marks"]] == ["Alarm: spike", "Attempt 1: lost (unknown)"]
    assert found["marks"][0]["step"] == 1


def test_an_attempt_that_never_got_its_state_leaves_the_run_where_it_stood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = made(
        tmp_path / "run", [{"kind": "began", "step": 0}, *(step(n, loss=1.0) for n in (1, 2, 3))]
    )
    layout.attempt_directory(directory, 2).mkdir()
    made(directory, [{"kind": "began", "step": 2, "checkpoint": "step-00000002"}], attempt=3)
    assert main(["report", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2
    assert [(mark["step"], mark["back_to"]) for mark in found["marks"]] == [(3, None), (3, 2), (2, None)]
    assert "attempt 2 ended before it had its state" in found["marks"][0]["words"]


@pytest.mark.parametrize(
    ("losses", "values", "steps"),
    [
        ([1.0], ["0.9", "0.95", "1", "1.05", "1.1"], ["0", "1"]),
        ([12345.0, 12349.0], ["12345", "12346", "12347", "12348", "12349"], ["0", "1", "2"]),
    ],
    ids=["one step", "close to each other"],
)
def test_labels_tell_values_apart_and_steps_are_whole(
    tmp_path: Path, losses: list[float], values: list[str], steps: list[str]
) -> None:
    events = [step(number, loss=loss) for number, loss in enumerate(losses, 1)]
    directory = made(tmp_path / "run", [{"kind": "began", "step": 0}, *events])
    text = written(directory, tmp_path / "page.html").read_text().partition('class="legend"')[0]
    assert re.findall(r'class="y"[^>]*>([^<]*)', text) == values
    assert re.findall(r'class="x[^>]*>([^<]*)', text) == steps


@pytest.mark.parametrize("in_process", [True, False], ids=["in the process", "by a restart"])
def test_a_restart_after_a_roll_back_has_cost_no_step_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_process: bool
) -> None:
    back = {"kind": "rolled-back", "step": 2, "found_step": 3, "trusted_step": 2, "in_process": in_process}
    directory = tmp_path / "run"
    steps = [step(number, loss=1.0) for number in (1, 2, 3)]
    made(directory, [{"kind": "began", "step": 0}, *steps, {**back, "reason": "it is NaN"}])
    words = LastWords(ending="stopped", kind="roll-back", step=3, reason="back to 2: it is NaN")
    write_last_words(layout.attempt_directory(directory, 1), words)
    made(directory, [{"kind": "began", "step": 2, "checkpoint": "step-00000002"}], attempt=2)
    assert main(["report", str(directory), "--json"]) == 0
    marks = {mark["kind"]: mark for mark in json.loads(capsys.readouterr().out)["marks"]}
    restart, roll_back = marks["restart"], marks["roll-back"]
    assert (roll_back["step"], roll_back["back_to"]) == (3, 2)
    assert (restart["step"], restart["back_to"]) == ((2, 2) if in_process else (3, None))
    assert restart["words"][-1].startswith("attempt 2 went on from step-00000002")
    assert not any("again" in line for line in restart["words"])
    assert any("it is NaN" in line for line in restart["words"]) == in_process


def test_steps_that_were_undone_twice_are_shaded_once(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"kind": "began", "step": 0}]
    for found, back in ((4, 0), (6, 2), (9, 8)):
        events += [step(number, loss=1.0) for number in range(1, found + 1)]
        events.append({"kind": "rolled-back", "step": back, "found_step": found, "trusted_step": back})
    directory = made(tmp_path / "run", [*events, step(9, loss=1.0), step(10, loss=1.0)])
    text = written(directory, tmp_path / "page.html").read_text().partition('class="legend"')[0]
    bands = re.findall(r'class="band roll-back" x="([^"]*)" y="0" width="([^"]*)"', text)
    assert bands == [("0.0", "600.0"), ("800.0", "100.0")]


def test_metrics_that_there_is_no_room_for_are_named_or_counted(tmp_path: Path) -> None:
    metrics = {f"layer {number:03}": 0.5 for number in range(245)}
    directory = made(tmp_path / "run", [{"kind": "began", "step": 0}, step(1, **metrics)])
    text = written(directory, tmp_path / "page.html").read_text()
    assert [name for name in metrics if name not in text] == [f"layer {number}" for number in range(240, 245)]
    assert "layer 239 and 5 more" in text


def test_names_and_messages_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    open_run(directory, name=f'"{HOSTILE}')
    alarm = {"kind": "alarm", "what": HOSTILE, "text": f"'\"{HOSTILE}", "hint": "<b>\udce9"}
    made(directory, [{"kind": "began", "step": 0}, step(1, **{f"loss{HOSTILE}": 1.0}), alarm])
    write_json(directory / layout.PINS_FILE, {})
    text = written(directory, tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert "<b>" not in text
    assert text.count("alert(6)") >= 4


def test_a_checkpoint_of_no_use_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, store = (
        made(tmp_path / "run", [{"kind": "began", "step": 0}]),
        CheckpointStore(tmp_path / "run"),
    )
    for number in (1, 2, 3, 4):
        snapshot = snapshot_at(number)
        validation = Validation(passed=number != 2, reason="too high")
        described = replace(snapshot.description, validation=validation)
        store.save(replace(snapshot, description=described))
    (directory / "checkpoints/step-00000003/manifest.json").write_bytes(b"{}")
    store.quarantine("step-00000004", "tainted: the run was rolled back")
    # Killed before what is tainted was set aside.
    store.save(snapshot_at(5))
    add_rollback(
        directory,
        Rollback(decided_by="health", reason="it is NaN", attempt=1, found_step=6, trusted_step=4),
    )
    assert main(["report", str(directory), "--json"]) == 0
    notes = [one["note"] for one in json.loads(capsys.readouterr().out)["checkpoints"]]
    assert (notes[0], notes[1], notes[3]) == (
        *("", "not validated: too high"),
        "tainted: the run was rolled back",
    )
    assert "manifest" in notes[2]
    assert notes[4] == "tainted: the run went back to step 4, it is NaN"
    assert "in quarantine: tainted" in written(directory, tmp_path / "page.html").read_text()


def test_the_page_goes_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path / "digits", [{"kind": "began", "step": 0}, step(1, loss=1.0)])
    CheckpointStore(directory).save(snapshot_at(1))
    before = sorted(path.name for path in directory.iterdir())
    monkeypatch.chdir(tmp_path)
    assert main(["report", "digits"]) == 0
    assert capsys.readouterr().out == "digits-report.html\n"
    assert "step-00000001" in (tmp_path / "digits-report.html").read_text()
    assert main(["report", "digits", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["report", "digits", "-o", "no/such/folder.html"]) == 2
    assert "no/such/folder.html" in capsys.readouterr().err
    assert sorted(path.name for path in directory.iterdir()) == before, "it only reads"


def test_of_many_restarts_the_newest_are_told_of(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    open_run(directory)
    for attempt in range(1, 211):
        path = layout.attempt_directory(directory, attempt) / layout.events_file()
        path.parent.mkdir(parents=True)
        first = 3 * attempt
        steps = "".join(
            f'{{"time":{number},"kind":"step","step":{number},"metrics":{{"loss":{1 / number}}}}}\n'
            for number in range(first + 1, first + 5)
        )
        path.write_text(f'{{"time":{first},"kind":"began","step":{first}}}\n{steps}')
    text = written(directory, tmp_path / "page.html").read_text()
    assert len(text) < 400_000
    assert "10 earlier marks are left out" in text
    assert 'id="mark-10"' not in text
    assert 'id="mark-210"' in text


@pytest.mark.chaos
def test_a_million_steps_fit_into_a_page_and_into_little_memory(tmp_path: Path) -> None:
    directory, source = tmp_path / "run", random.Random(0)
    open_run(directory)
    path = layout.attempt_directory(directory, 1) / layout.events_file()
    path.parent.mkdir(parents=True)
    with path.open("w") as file:
        file.write('{"time":0,"kind":"began","step":0}\n')
        for number in range(1, 1_000_001):
            metrics = f'{{"loss":{source.random()},"grad_norm":{source.random()},"rate":0.1}}'
            file.write(f'{{"time":{number / 5},"kind":"step","step":{number},"metrics":{metrics}}}\n')
    page = tmp_path / "page.html"
    run = "import sys; from unbroken.cli.main import main; main(sys.argv[1:])"
    code = f"{run}; print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(directory), "-o", str(page)],
        check=True,
        capture_output=True,
        text=True,
    )
    most = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    assert most is not None
    assert int(most[1]) < 80_000, "kilobytes"
    assert page.stat().st_size < 1_000_000
    assert "1,000,000" in page.read_text()
