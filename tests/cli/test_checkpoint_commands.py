"""`ls`, `inspect` and `verify`, as a person and as a program sees them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from unbroken.checkpoint.digest import seal
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.rundir.identity import open_run
from unbroken.rundir.rollbacks import Rollback, add_rollback

from ..checkpoint.states import snapshot_at


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "digits"
    open_run(directory)
    for step in (5, 12):
        CheckpointStore(directory).save(snapshot_at(step, metrics={"accuracy": step / 100}))
    return directory


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def damage(run: Path, file: str, name: str = "step-00000012") -> None:
    path = run / "checkpoints" / name / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_lists_checkpoints_oldest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", str(run))
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:4] == ["CHECKPOINT", "STEP", "EPOCH", "SIZE"]
    assert [line.split()[0] for line in lines[1:]] == ["step-00000005", "step-00000012"]
    assert "accuracy 0.05" in lines[1]


def test_ls_shows_a_damaged_manifest_and_still_lists_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, "manifest.json")
    code, out, err = call(capsys, "ls", str(run))
    assert code == 0
    assert "manifest damaged" in out
    assert "step-00000012: " in err
    rows = json.loads(call(capsys, "ls", str(run), "--json")[1])
    assert [(row["name"], row["step"], row["problem"] is None) for row in rows] == [
        ("step-00000005", 5, True),
        ("step-00000012", None, False),
    ]


def test_ls_of_a_run_without_checkpoints_says_so_and_is_an_empty_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_run(tmp_path)
    code, out, err = call(capsys, "ls", str(tmp_path))
    assert (code, out) == (0, "")
    assert "no checkpoint yet" in err
    assert json.loads(call(capsys, "ls", str(tmp_path), "--json")[1]) == []


def test_inspect_shows_the_newest_checkpoint_or_the_one_that_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "step 12, inside epoch 0" in call(capsys, "inspect", str(run))[1]
    assert "step 5, inside epoch 0" in call(capsys, "inspect", str(run), "step-00000005")[1]
    out = call(capsys, "inspect", str(run / "checkpoints/step-00000005"), "--tensors")[1]
    assert "step 5" in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith("model/weight")] == [
        ["model/weight", "F32", "600x500"]
    ]


def test_inspect_gives_programs_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capsys, "inspect", str(run), "--json")[1])
    assert (found["step"], found["metrics"]) == (12, {"accuracy": 0.12})
    assert found["parts"]["model"]["tensors"] == 3
    assert {tensor["path"]: tensor["shape"] for tensor in found["tensors"]}["model/weight"] == [600, 500]


@pytest.mark.parametrize("copied", [False, True])
def test_verify_passes_what_is_intact_wherever_it_was_copied(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], copied: bool
) -> None:
    target = run
    if copied:
        target = tmp_path / "my copy"
        (run / "checkpoints/step-00000012").rename(target)
    code, out, _ = call(capsys, "verify", str(target))
    assert code == 0
    assert out.count("intact") == (1 if copied else 2)


@pytest.mark.parametrize(
    "file", ["manifest.json", "manifest.digest", "model-00.safetensors", "state-00.safetensors"]
)
def test_verify_names_what_is_damaged_and_exits_with_3(
    run: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    damage(run, file)
    code, out, _ = call(capsys, "verify", str(run))
    assert code == 3
    assert out.splitlines()[:2] == [out.splitlines()[0], "step-00000012  DAMAGED"]
    assert file.replace("digest", "json") in out
    code, out, _ = call(capsys, "verify", str(run), "--json")
    assert code == 3
    assert [(row["name"], row["intact"]) for row in json.loads(out)] == [
        ("step-00000005", True),
        ("step-00000012", False),
    ]


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_directory_that_is_no_run_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "photos").mkdir()
    code, out, err = call(capsys, command, str(tmp_path / "photos"))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "\n\nhint: " in err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_run_without_checkpoints_has_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    open_run(tmp_path)
    assert call(capsys, command, str(tmp_path))[0] == 4


def test_an_unknown_checkpoint_is_named_with_those_there_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "inspect", str(run), "step-7")
    assert code == 2
    assert "found step-00000005, step-00000012" in err


def test_the_looking_commands_load_no_framework(run: Path) -> None:
    import subprocess

    frameworks = ("torch", "numpy", "rich", "asyncio", "tensorflow")
    # Listing has to start fast: it does without the library that decodes whole manifests, too.
    decoding = ("msgspec", "unbroken.checkpoint.manifest", "unbroken.checkpoint.store")
    for command in ("ls", "inspect", "verify"):
        heavy = (*frameworks, *decoding) if command == "ls" else frameworks
        code = (
            "import sys; from unbroken.cli.main import main; main(sys.argv[1:]); "
            f"sys.exit(any(name in sys.modules for name in {heavy!r}))"
        )
        subprocess.run([sys.executable, "-c", code, command, str(run)], check=True, capture_output=True)


def marked(run: Path) -> None:
    """Three more: one that is pinned, one that is not finite, one that failed its validation."""
    store = CheckpointStore(run)
    for step, changes in (
        (20, {}),
        (21, {"non_finite": {"model/weight": 3}}),
        (22, {"validation": {"passed": False, "reason": "loss 9.5"}}),
        (23, {"validation": {"passed": True, "reason": ""}}),
    ):
        name = store.save(snapshot_at(step)).name
        tree = run / "checkpoints" / name
        manifest = {**json.loads((tree / "manifest.json").read_bytes()), **changes}
        data = json.dumps(manifest).encode()
        (tree / "manifest.json").write_bytes(data)
        (tree / "manifest.digest").write_text(f"{seal(data)}  manifest.json\n")
    assert main(["pin", str(run), "step-00000020"]) == 0


def test_ls_shows_what_is_pinned_and_what_nothing_goes_on_from(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked(run)
    _, out, err = call(capsys, "ls", str(run))
    lines = {line.split()[0]: line for line in out.splitlines()}
    marks = {step: lines[f"step-000000{step}"] for step in (12, 20, 21, 22, 23)}
    found = {
        step: [mark for mark in ("pinned", "not finite", "not validated") if mark in marks[step]]
        for step in marks
    }
    assert found == {12: [], 20: ["pinned"], 21: ["not finite"], 22: ["not validated"], 23: []}
    assert "step-00000022: loss 9.5" in err
    rows = {row["step"]: row for row in json.loads(call(capsys, "ls", str(run), "--json")[1])}
    assert [step for step in rows if rows[step]["pinned"]] == [20]
    assert rows[21]["non_finite"] == {"model/weight": 3}
    assert rows[22]["validation"] == {"passed": False, "reason": "loss 9.5"}
    assert (rows[12]["validation"], rows[23]["validation"]["passed"]) == (None, True)


def test_ls_marks_what_a_roll_back_tainted_before_it_is_set_aside(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollback = Rollback(
        decided_by="health", reason="the loss is NaN", attempt=1, found_step=14, trusted_step=8
    )
    add_rollback(run, rollback)
    _, out, err = call(capsys, "ls", str(run))
    assert ["tainted" in line for line in out.splitlines()[1:]] == [False, True]
    assert "step-00000012: tainted: the run went back to step 8, the loss is NaN" in err
    rows = json.loads(call(capsys, "ls", str(run), "--json")[1])
    assert [bool(row["tainted"]) for row in rows] == [False, True]

    (run / "rollbacks.json").write_text("[")
    _, out, err = call(capsys, "ls", str(run))
    assert len(out.splitlines()) == 3
    assert "what is tainted is not known" in err
    assert [row["tainted"] for row in json.loads(call(capsys, "ls", str(run), "--json")[1])] == [None, None]


def test_ls_reads_integers_of_any_size_among_the_metrics(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As releases before wrote them.
    metrics = {"flops": {"$int": str(10**21)}, "tokens": {"$int": str(-(10**400))}}
    CheckpointStore(run).save(snapshot_at(20, metrics=metrics))
    row = json.loads(call(capsys, "ls", str(run), "--json")[1])[-1]
    assert (row["problem"], row["metrics"]) == (None, {"flops": 1e21, "tokens": "-inf"})


def test_ls_lists_checkpoints_also_when_the_pins_cannot_be_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "pins.json").write_text("{")
    code, out, err = call(capsys, "ls", str(run))
    assert (code, len(out.splitlines())) == (0, 3)
    assert "what is pinned cannot be read" in err
    assert [row["pinned"] for row in json.loads(call(capsys, "ls", str(run), "--json")[1])] == [None, None]


def test_inspect_and_doctor_say_that_nothing_goes_on_from_a_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked(run)
    assert "not validated: loss 9.5: no run goes on" in call(capsys, "inspect", str(run), "step-00000022")[1]
    assert (
        "not finite: NaN or infinity in model.weight" in call(capsys, "inspect", str(run), "step-00000021")[1]
    )
    assert "validation passed" in call(capsys, "inspect", str(run), "step-00000023")[1]
    code, out, _ = call(capsys, "doctor", f"{run}:step-00000022", "--json")
    errors = [advice for advice in json.loads(out)["advice"] if "validation" in advice["text"]]
    assert (code, [advice["evidence"] for advice in errors]) == (1, ["loss 9.5"])
