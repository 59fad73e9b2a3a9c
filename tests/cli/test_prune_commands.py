"""`prune` and `pin`, as a person and as a program sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.pins import held
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.rundir.identity import open_run
from unbroken.storage.local import LocalStorage

from ..checkpoint.states import snapshot_at

KEEP = ("--keep-last", "1")
HOLD = (
    "import sys; from pathlib import Path; from unbroken.rundir.lock import RunLock\n"
    "d = Path(sys.argv[1]); lock = RunLock(d / sys.argv[2], d / sys.argv[3], doing=sys.argv[4])\n"
    "lock.acquire(); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "digits"
    run_id = open_run(directory).run_id
    for step in (5, 12, 130, 200):
        metrics = {"accuracy": step % 100 / 100, "loss": step / 100}
        snapshot = snapshot_at(
            step, state={"model": {"words": bytes([step]) * 90}}, metrics=metrics, run_id=run_id
        )
        CheckpointStore(directory).save(snapshot)
    return directory


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


def steps(run: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in CheckpointStore(run).names()]


@pytest.fixture
def busy(run: Path) -> Iterator[Path]:
    yield from holding(run, "writer.lock", "writer.json", "writes to this run")


@pytest.fixture
def supervised(run: Path) -> Iterator[Path]:
    yield from holding(run, "supervisor.lock", "supervisor-holder.json", "keeps this run going")


def holding(run: Path, *words: str) -> Iterator[Path]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield run
        holder.communicate()


def test_prune_says_for_each_checkpoint_what_became_of_it_and_why(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--keep-best", 1, "--metric", "accuracy", "--keep-every-steps", 100)
    code, out, err = call(capsys, "prune", run, *arguments)
    assert code == 0
    lines = [line.split(maxsplit=4) for line in out.splitlines()]
    assert lines[0] == ["CHECKPOINT", "SIZE", "ACTION", "REASON"]
    assert [(line[0], line[3]) for line in lines[1:]] == [
        ("step-00000005", "pruned"),
        ("step-00000012", "pruned"),
        ("step-00000130", "kept"),
        ("step-00000200", "kept"),
    ]
    assert "accuracy 0.3 is among the best 1" in out
    assert "wanted by none of KeepBest(count=1, metric='accuracy', mode='max'), KeepEverySteps" in out
    assert "pruned 2 of 4 checkpoints" in err
    assert steps(run) == [130, 200]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--keep-last", 2), [130, 200]),
        (("--keep-best", 1, "--metric", "loss", "--mode", "min"), [5, 200]),
        (("--keep-best", 1, "--metric", "loss"), [200]),
        (("--keep-hourly", 1), [200]),
        (("--keep-daily", 1), [200]),
        (("--keep-every-steps", 100), [130, 200]),
        (("--keep-last", 1, "--keep-best", 1, "--metric", "loss", "--mode", "min"), [5, 200]),
    ],
)
def test_every_policy_has_its_option_and_they_add_up(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], left: list[int]
) -> None:
    assert call(capsys, "prune", run, *options)[0] == 0
    assert steps(run) == left


def test_a_dry_run_says_the_same_and_deletes_nothing_also_while_the_run_goes_on(
    busy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "prune", busy, *KEEP, "--dry-run")
    assert code == 0
    assert out.count("would prune") == 3
    assert "would prune 3 of 4 checkpoints" in err
    assert [row["pruned"] for row in rows(capsys, "prune", busy, *KEEP, "--dry-run")] == [True] * 3 + [False]
    assert len(steps(busy)) == 4


@pytest.mark.parametrize(
    ("who", "doing"), [("busy", "writes to this run"), ("supervised", "keeps this run going")]
)
def test_a_run_that_goes_on_is_not_pruned_from_outside(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], who: str, doing: str
) -> None:
    run = request.getfixturevalue(who)
    code, out, err = call(capsys, "prune", run, *KEEP)
    assert (code, out) == (78, "")
    assert doing in err
    assert len(steps(run)) == 4


def test_a_prune_leaves_the_run_free(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert call(capsys, "prune", run, *KEEP)[0] == 0
    assert not (run / "writer.json").exists()
    assert not (run / "supervisor-holder.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "expected at least one policy"),
        (("--dry-run",), "expected at least one policy"),
        (("--keep-best", 1), "expected --keep-best and --metric together"),
        (("--keep-last", 1, "--metric", "loss"), "expected --keep-best and --metric together"),
        (("--keep-last", 1, "--mode", "min"), "expected --keep-best and --metric together"),
        (("--keep-last", 0), "0 is not in the range"),
    ],
)
def test_options_that_do_not_say_what_to_keep_are_a_usage_error(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], words: str
) -> None:
    code, out, err = call(capsys, "prune", run, *options)
    assert (code, out) == (2, "")
    assert words in err
    assert "\n\nhint: " in err
    assert len(steps(run)) == 4


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_while_the_newest_is_damaged_nothing_is_deleted_and_the_exit_code_is_3(
    run: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    path = run / "checkpoints/step-00000200/state-00.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, out, err = call(capsys, "prune", run, *KEEP, *more)
    assert code == 3
    assert out.count("kept") == 4
    assert "nothing may be pruned: step-00000200, the newest to go on from, is damaged" in err
    assert len(steps(run)) == 4


def test_a_checkpoint_with_a_damaged_manifest_is_listed_and_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints/step-00000005/manifest.json").write_text("{}")
    found = rows(capsys, "prune", run, *KEEP)
    assert [(row["step"], row["pruned"]) for row in found] == [
        (None, False),
        (12, True),
        (130, True),
        (200, False),
    ]
    assert found[0]["reason"].startswith("cannot be read: ")


def test_a_pinned_checkpoint_is_listed_and_never_pruned_until_the_pin_is_removed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "pin", run, "step-00000012", "--note", "the paper's")
    assert (code, out) == (0, "")
    assert "step-00000012 is pinned" in err
    assert "step-00000012" in call(capsys, "pin", run, "--list")[1]
    assert [(row["name"], row["note"], row["is_there"]) for row in rows(capsys, "pin", run)] == [
        ("step-00000012", "the paper's", True)
    ]
    assert "pinned: the paper's" in call(capsys, "prune", run, *KEEP)[1]
    assert steps(run) == [12, 200]
    assert rows(capsys, "pin", run, "step-00000012", "--remove") == []
    assert call(capsys, "prune", run, *KEEP)[0] == 0
    assert steps(run) == [200]


def test_a_pin_of_a_checkpoint_that_was_set_aside_is_listed_as_not_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "pin", run, "step-00000012")
    CheckpointStore(run).quarantine("step-00000012", "a test")
    assert rows(capsys, "pin", run)[0]["is_there"] is False
    assert "(not there)" in call(capsys, "pin", run, "--list")[1]


def test_a_run_that_goes_on_can_be_pinned(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "pin", busy, "step-00000012")[0] == 0


def test_without_pins_the_list_is_empty(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "pin", run, "--list")
    assert (code, out) == (0, "")
    assert "nothing is pinned" in err
    assert rows(capsys, "pin", run) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected the name of a checkpoint to pin"),
        (("--note", "x"), "expected the name of a checkpoint to pin"),
        (("--remove",), "expected the name of a checkpoint to pin"),
        (("step-7",), "expected checkpoint 'step-7', found step-00000005"),
        (("step-00000005", "--remove"), "'step-00000005' is not; pinned: none"),
        (("step-00000005", "--remove", "--note", "x"), "expected --remove or --note, found both"),
    ],
)
def test_a_pin_that_names_nothing_is_a_usage_error(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = call(capsys, "pin", run, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert not (run / "pins.json").exists()


@pytest.mark.parametrize(
    "command", [("pin", "--list"), ("pin", "step-00000005"), ("prune", *KEEP), ("prune", *KEEP, "--dry-run")]
)
def test_damaged_pins_are_an_error_with_code_3_and_left_as_they_are(
    run: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    (run / "pins.json").write_text("{")
    code, out, err = call(capsys, command[0], run, *command[1:])
    assert (code, out) == (3, "")
    assert "pins.json: expected the pins of a run" in err
    assert "hint: restore pins.json from a copy" in err
    assert len(steps(run)) == 4
    assert (run / "pins.json").read_text() == "{"


def test_prune_and_pin_load_no_framework(run: Path) -> None:
    code = (
        "import sys; from unbroken.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich', 'asyncio', 'tensorflow')))"
    )
    for arguments in (("pin", str(run), "step-00000005"), ("prune", str(run), *KEEP)):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    assert steps(run) == [5, 200]


def test_while_pins_are_being_changed_a_prune_deletes_nothing_and_can_be_tried_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(LocalStorage(run), wait=True):
        code, _, err = call(capsys, "prune", run, *KEEP)
    assert code == 1
    assert "nothing may be pruned: pins are being changed at this moment" in err
    assert len(steps(run)) == 4
    assert call(capsys, "prune", run, *KEEP)[0] == 0
