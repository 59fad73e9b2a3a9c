"""The parts of the demo that need no training: the plan, the table, the picture, the verdict, the end."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import table
from chart import rows_without_overlap, value_axis
from disasters import NAMES, Event, flip_byte, plan_disasters
from leftovers import damaged_checkpoints, stray_files
from picture import Story, page
from run_demo import losses, verdict
from trainer import MARK, Deadline, DemoError, marked_processes, nothing_left_running

from unbroken.checkpoint.manifest import Position
from unbroken.checkpoint.snapshot import Description, HostBuffers, capture
from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.rundir.journal import Journal
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor
from unbroken.testing.runs import compare_runs, read_logged_steps

SVG = "{http://www.w3.org/2000/svg}"
EVENTS = [
    Event(
        name="SIGKILL in mid-step",
        at_step=33,
        resumed_from="step-00000020",
        resumed_step=20,
        seen="restarted <by> the supervisor",
    ),
    Event(name="SIGTERM", at_step=98, resumed_from="step-00000098", resumed_step=98, seen="saved & left"),
]


def test_a_plan_holds_every_disaster_apart_from_the_others_and_follows_from_the_seed() -> None:
    for seed in range(200):
        plan = plan_disasters(seed, 540, save_every=20)
        assert {disaster.kind for disaster in plan} == set(NAMES)
        steps = [disaster.at_step for disaster in plan]
        assert all(later - earlier >= 20 for earlier, later in itertools.pairwise(steps))
        assert steps[0] >= 60
        assert steps[-1] <= 486
        assert plan == plan_disasters(seed, 540, save_every=20)
    assert plan_disasters(1, 540, save_every=20) != plan_disasters(2, 540, save_every=20)


def test_a_run_too_short_for_all_disasters_is_refused() -> None:
    with pytest.raises(DemoError, match="200 steps are too few"):
        plan_disasters(1, 200, save_every=20)


def test_a_flipped_byte_is_one_byte_and_really_another(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    for seed in range(50):
        path.write_bytes(bytes(64))
        place = flip_byte(path, random.Random(seed))
        assert [index for index, byte in enumerate(path.read_bytes()) if byte] == [place]


def test_the_rows_of_the_table_stand_under_its_header() -> None:
    header, first, second = table.header(), table.row(1, EVENTS[0]), table.row(2, EVENTS[1])
    assert first.split("  ")[-1] == "restarted <by> the supervisor"
    for line, step, repeated in ((first, "33", "13"), (second, "98", "0")):
        assert line[: header.index("at step") + len("at step")].endswith(step)
        assert line[: header.index("repeated") + len("repeated")].endswith(repeated)
        assert line.index("step-") == header.index("resumed from")
    assert table.steps_done_again(EVENTS) == 13


def test_the_picture_is_well_formed_and_shows_every_event_attempt_and_loss() -> None:
    root = _parse(page(_story()))
    overview, close_up = root.iter(f"{SVG}svg")
    words = [element.text for element in overview.iter(f"{SVG}text")]
    assert {"SIGKILL in mid-step", "SIGTERM", "undisturbed run", "step", "loss", "attempt"} <= set(words)
    titles = [element.text for element in overview.iter(f"{SVG}title")]
    assert titles == [
        "SIGKILL in mid-step at step 33: restarted <by> the supervisor; from step-00000020, "
        "13 steps done again",
        "SIGTERM at step 98: saved & left; from step-00000098",
    ]
    lengths = [len((line.get("points") or "").split()) for line in overview.iter(f"{SVG}polyline")]
    # The undisturbed run, three attempts, and the repeated stretch in each of them.
    assert lengths == [120, 33, 78, 22, 13, 13, 0]
    assert sum(element.get("fill") == "none" for element in close_up.iter(f"{SVG}circle")) == 2 * 13
    cells = [cell.text for cell in root.iter("td")]
    assert cells[:6] == ["1", "SIGKILL in mid-step", "33", "step-00000020", "13", EVENTS[0].seen]
    assert "bit-identical: so and so" in [element.text for element in root.iter("p")]


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    text = page(_story())
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=|url\(|@import", text)


def test_the_picture_can_show_a_run_without_repeated_steps_and_with_a_loss_of_nan() -> None:
    curve = [(step, 1.0 / step) for step in range(1, 121)]
    curve[50] = (51, float("nan"))
    story = Story(
        title="t", verdict="v", is_identical=False, reference=curve, attempts=[curve], events=EVENTS[1:]
    )
    (overview,) = _parse(page(story)).iter(f"{SVG}svg")
    assert "nan" not in ElementTree.tostring(overview, encoding="unicode")


def test_labels_never_overlap_and_axes_hold_all_values() -> None:
    assert rows_without_overlap([(0, 10), (5, 15), (12, 20), (13, 30), (14, 40)]) == [0, 1, 0, 2, 3]
    for values in ([0.02, 2.3], [4.5, 1.8], [1.0, 1.0], [-1.0, 3.0]):
        axis = value_axis(values, start=300.0, end=0.0)
        assert all(0.0 < axis.at(value) < 300.0 for value in values)
        assert all(axis.low <= tick <= axis.high for tick in axis.ticks(6))
        assert axis.ticks(6)


def test_the_verdict_counts_what_is_equal_and_names_the_first_difference(tmp_path: Path) -> None:
    curve = [2.5, 1.25, 0.1 + 0.2]
    first, same = _run(tmp_path / "a", curve), _run(tmp_path / "b", curve)
    other = _run(tmp_path / "c", [2.5, 1.25, 0.3])
    assert losses(read_logged_steps(first)) == list(enumerate(curve, start=1))
    assert verdict(compare_runs(first, same)) == (
        "bit-identical: 3 losses and 1 tensors equal those of the undisturbed run"
    )
    assert verdict(compare_runs(first, other)) == (
        "NOT identical: step 3: expected loss 0.30000000000000004 (0x1.3333333333334p-2), "
        "found 0.3 (0x1.3333333333333p-2)"
    )


def test_leftovers_of_every_kind_are_found(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", [1.0])
    CheckpointStore(run).quarantine("step-00000001", "a test")
    for name in ("run.json", "journal.jsonl", "attempts/0001/out.log", "supervisor.json"):
        (run / name).touch()
    assert stray_files(run) == []
    strays = [
        ".latest-77",
        "attempts/0001/.last-words.json-12ab",
        "checkpoints/.staging-step-00000002-ab12",
        "checkpoints/.unbroken-tmp-ab12",
        "control/stop.json",
        "core",
        "writer.json",
    ]
    for name in strays:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
    assert stray_files(run) == strays


def test_what_a_supervised_run_leaves_is_no_leftover(tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(
        "import os, signal, unbroken\n"
        "state = {'n': 0}\n"
        "with unbroken.Run(save=[unbroken.EverySteps(1)], state=state) as run:\n"
        "    for state['n'] in range(3):\n"
        "        run.step(loss=1.0)\n"
        "    if os.environ['UNBROKEN_ATTEMPT'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-P", "-m", "unbroken.cli.main", "run", "--backoff", "0.01"]
    command += ["--run-dir", str(run), "--", sys.executable, str(script)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list((run / "attempts").iterdir())) == 2
    assert stray_files(run) == []


def test_a_damaged_checkpoint_is_found_at_the_end(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", [1.0])
    assert damaged_checkpoints(run) == []
    (shard,) = run.glob("checkpoints/*/*.safetensors")
    flip_byte(shard, random.Random(1))
    assert damaged_checkpoints(run) == ["step-00000001"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DemoError("something"), SystemExit(143)])
def test_no_process_is_left_however_the_demo_ends(tmp_path: Path, error: BaseException) -> None:
    # A supervisor in small: it starts another process whenever the last one has ended.
    script = "import subprocess\nwhile True: subprocess.run(['sleep', '60'])"
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(type(error)), nothing_left_running(str(tmp_path)):
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, MARK: str(tmp_path)},
            start_new_session=True,
        )
        Deadline("starting", 20.0).wait(lambda: len(marked_processes(str(tmp_path))) == 2)
        raise error
    assert marked_processes(str(tmp_path)) == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert process.wait(5.0) == -9


def test_a_demo_does_not_disturb_another_one_in_the_same_place(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    environment = {**os.environ, MARK: str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as other:
        Deadline("starting", 20.0).wait(lambda: marked_processes(str(tmp_path)) == [other.pid])
        with pytest.raises(DemoError, match=f"process {other.pid}"), nothing_left_running(str(tmp_path)):
            pass
        assert other.poll() is None
        other.kill()


def test_a_phase_that_takes_too_long_fails_by_name() -> None:
    with pytest.raises(DemoError, match="waiting for Godot: not over after 0 s"):
        Deadline("waiting for Godot", 0.05).wait(lambda: False)


def _story() -> Story:
    curve = [(step, 2.0 / step) for step in range(1, 121)]
    return Story(
        title="Digits & more",
        verdict="bit-identical: so and so",
        is_identical=True,
        reference=curve,
        attempts=[curve[:33], curve[20:98], curve[98:]],
        events=EVENTS,
    )


def _parse(text: str) -> ElementTree.Element:
    start = "<!doctype html>\n"
    assert text.startswith(start)
    return ElementTree.fromstring(text.removeprefix(start))


def _run(directory: Path, curve: Sequence[float]) -> Path:
    with Journal(layout.attempt_directory(directory, 1) / layout.events_file()) as journal:
        for step, loss in enumerate(curve, start=1):
            journal.append("step", step=step, epoch=0, metrics={"loss": loss})
    table_of_tensors = TensorTable()
    table_of_tensors.add("model/weight", HostTensor("F32", (1,), memoryview(struct.pack("<f", 0.5))))
    said = Description(
        run_id=directory.name,
        step=len(curve),
        attempt=1,
        created="2026-01-01T00:00:00+00:00",
        position=Position(epoch=1, inside_epoch=False, loaders=[]),
        parts={},
    )
    CheckpointStore(directory).save(capture(said, table_of_tensors, HostBuffers()))
    return directory
