"""The pieces of an observation that need no training: where a resume is placed, copies, how it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import structs

from unbroken.cli.drill import _observation
from unbroken.drill import copies
from unbroken.drill.comparison import unchanging
from unbroken.drill.copies import first_copy
from unbroken.drill.stages import Observation, ObservedStage
from unbroken.drill.verdict import Findings, verdict
from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import (
    PLAN_VARIABLE,
    Kill,
    Line,
    Observed,
    Plan,
    planned,
    planned_observation,
    read_record,
    write_plan,
)
from unbroken.training import observer
from unbroken.training.observed_alignment import aligned
from unbroken.training.observed_torch import Optimizers
from unbroken.training.observer import Observer

from .records import began, process, step, undisturbed

STEPS = 8


def state(at: int, *, kind: str = "ready", batch: str | None = None, **changes: str) -> Line:
    """What a script has as the step after `at` begins: two weights and two moments."""
    found = {f"model/{name}": f"{name}{at}" for name in "ab"} | {"model/fixed": "f"}
    if at:
        found |= {f"optimizer/{name}": f"{name}{at}" for name in "cde"}
    found |= {f"rng/{name}": f"{name}{at}" for name in ("python", "torch")}
    found |= {name.replace("__", "/"): value for name, value in changes.items()}
    kept = {name: value for name, value in found.items() if value != "gone"}
    return Line(kind=kind, step=at, batch=batch or f"batch{at}", components=kept)  # type: ignore[arg-type]


REFERENCE = [state(0, kind="began"), *(state(at) for at in range(1, STEPS))]


@pytest.mark.parametrize(
    ("began_with", "expected"),
    [
        (state(0), 0),
        (state(5), 5),
        # Moments were dropped; weights were rounded; the model is a new one, with the old moments.
        (state(5, optimizer__c="gone", optimizer__d="gone", optimizer__e="gone"), 5),
        (state(5, model__a="x", model__b="y"), 5),
        (state(5, model__a="a0", model__b="b0"), 5),
        # Only generators and the batch are of another step.
        (state(5, batch="batch2", rng__torch="torch2", rng__python="python2"), 5),
    ],
)
def test_a_resume_is_placed_at_the_step_with_which_it_has_most_in_common(
    began_with: Line, expected: int
) -> None:
    assert aligned(REFERENCE, began_with, expected) == (expected, None)


def test_a_resume_with_nothing_in_common_is_placed_by_what_its_optimizers_count() -> None:
    lost = Line(kind="began", step=0, batch="other", components={"model/a": "x"})
    assert aligned(REFERENCE, lost, 4)[0] == 4
    assert "its optimizers tell this one" in str(aligned(REFERENCE, lost, 4)[1])
    by_batch = Line(kind="began", step=0, batch="batch3", components={})
    assert aligned(REFERENCE, by_batch, 0)[0] == 3
    assert aligned(REFERENCE, lost, 0)[0] == 0


def test_steps_that_look_alike_are_told_apart_by_the_batch_and_then_by_the_count() -> None:
    same = {"model/a": "x", "model/b": "y"}
    alike = [
        state(0, kind="began"),
        *(Line(kind="ready", step=at, batch=f"b{at // 2}", components=same) for at in range(1, 6)),
    ]
    here = Line(kind="began", step=0, batch="b1", components=same)
    assert aligned(alike, here, 3) == (3, None)


def test_what_never_changes_in_a_reference_is_no_state() -> None:
    lines = [began(0, {"found/__main__.start": "s"}), step(1, components={"found/__main__.start": "s"})]
    assert unchanging(lines) == {"found/__main__.start"}


def test_a_run_in_an_observed_script_is_no_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(directory="copy", record="record.jsonl", steps=3)
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    for observed in (None, Observed(original="lab")):
        write_plan(structs.replace(plan, observed=observed), tmp_path / "plan.json")
        assert (planned() is None) == (observed is not None)
        assert (planned_observation() is None) == (observed is None)


def saved(at: int) -> Line:
    return Line(kind="saved", step=at)


def findings(*processes: Any, **fields: Any) -> Findings:
    return Findings(
        command=("train",),
        seed=0,
        is_observed=True,
        reference=tuple(undisturbed(9)),
        processes=processes,
        distances={},
        **fields,
    )


AT_5 = Kill(step=5, moment="after-step")


def test_a_resume_that_begins_anew_after_a_save_is_not_exact() -> None:
    first = process(began(0), step(1), saved(1), step(2), kill=AT_5)
    told = verdict(findings(first, process(began(0), step(1)), resume_arguments=("--resume", "x.pt")))
    assert told.headline == "NOT EXACT: resume 1 began anew, though the script had saved after step 1"
    assert "--resume x.pt" in told.details[0]


def test_a_resume_may_begin_anew_where_nothing_was_saved_or_the_save_was_cut_off() -> None:
    again = process(began(0), step(1))
    assert verdict(findings(process(began(0), step(1), kill=AT_5), again)).outcome == "undecided"
    in_save = Kill(step=1, moment="in-save")
    assert verdict(findings(process(began(0), saved(1), kill=in_save), again)).outcome == "undecided"


def test_a_resume_from_where_its_run_had_not_come_found_another_ones_checkpoint() -> None:
    told = verdict(findings(process(began(0), step(1), kill=AT_5), process(began(7), step(8))))
    assert told.headline == "UNDECIDED: resume 1 began from step 7, to which its run had not come"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A directory of a user's, with what is not to be copied."""
    lab = tmp_path / "lab"
    for name in ("data", "venv", ".git", "drilled", "src"):
        (lab / name).mkdir(parents=True)
        (lab / name / "file").write_text(name)
    (lab / "venv/pyvenv.cfg").touch()
    (tmp_path / "elsewhere").write_text("outside")
    (lab / "outside").symlink_to("../elsewhere")
    (lab / "inside").symlink_to("src/file")
    return lab


def test_the_copy_of_a_directory_links_what_is_shared_and_environments(lab: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    first_copy(lab, copy, shared=[lab / "data"], skipped=lab / "drilled")
    assert sorted(path.name for path in copy.iterdir()) == [
        ".git", "data", "inside", "outside", "src", "venv",
    ]  # fmt: skip
    assert {path.name for path in copy.iterdir() if path.is_symlink()} == {
        ".git", "data", "inside", "outside", "venv",
    }  # fmt: skip
    assert [(copy / name).read_text() for name in ("outside", "inside", "data/file")] == [
        "outside", "src", "data",
    ]  # fmt: skip
    (copy / "inside").write_text("changed")
    assert (lab / "src/file").read_text() == "src"


def test_what_is_shared_may_be_named_by_a_detour(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab)
    observation = _observation(observe=True, resume_args=None, share=(Path("../lab/data"),))
    assert observation is not None
    assert observation.shared == (lab / "data",)


def test_a_directory_that_is_too_large_to_copy_is_refused(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "data/file").write_bytes(bytes(3000))
    monkeypatch.setattr(copies, "MOST_BYTES", 2000)
    with pytest.raises(UsageError) as refused:
        first_copy(lab, tmp_path / "copy", shared=[], skipped=tmp_path / "root")
    assert "--share data" in str(refused.value.hint)


@pytest.fixture
def stage(lab: Path, tmp_path: Path) -> ObservedStage:
    root = tmp_path / "root"
    root.mkdir()
    observation = Observation(directory=lab, resume_arguments=("--resume", f"{lab}/last.pt"))
    command = ["python", str(lab / "train.py"), f"--out={lab}/out", "/data"]
    return ObservedStage(command, observation, root, {"PYTHONPATH": str(tmp_path / "other")})


def test_paths_into_the_directory_lead_into_the_copy(stage: ObservedStage, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert list(stage.command(copy, is_resumed=False))[4:] == [
        str(copy), "python", f"{copy}/train.py", f"--out={copy}/out", "/data",
    ]  # fmt: skip
    assert list(stage.command(copy, is_resumed=True))[-2:] == ["--resume", f"{copy}/last.pt"]


def test_resume_arguments_are_given_once_something_was_saved(stage: ObservedStage) -> None:
    assert not stage.is_resumed([saved(4)], [])
    assert not stage.is_resumed([saved(4)], [[began(0), step(1)]])
    assert stage.is_resumed([saved(4)], [[began(0), saved(1)]])
    # Who does not save by torch cannot be seen to save.
    assert stage.is_resumed([began(0)], [[began(0), step(1)]])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_process_is_armed_without_a_trace_and_an_own_sitecustomize_runs(
    stage: ObservedStage, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/sitecustomize.py").write_text("import sys; sys.of_the_user = True")
    code = "import sys; print(sys.of_the_user, *({'torch', 'numpy', 'blake3'} & {*sys.modules}), sys.path)"
    done = python(code, **stage.environment)
    assert done.stdout.startswith("True ["), done.stderr
    assert str(tmp_path / "root") not in done.stdout


GUARDED = """
import os, shutil, sys
from pathlib import Path
from unbroken.errors import UsageError
from unbroken.training.observed_files import check_save, guard
original, copy = map(Path, sys.argv[1:])
guard(str(original), [str(copy)])
(copy / "mine").write_text("x")
(original / "kept").read_text()
# Only the link goes, which is in the copy.
(copy / "shared").symlink_to(original / "out")
(copy / "shared").unlink()
here = os.open(original, os.O_RDONLY)
inner = os.open(original / "out", os.O_RDONLY)
refused = 0
for change in (
    lambda: (original / "new").write_text("x"),
    lambda: (original / "kept").unlink(),
    lambda: (original / "directory").mkdir(),
    lambda: os.replace(copy / "mine", original / "kept"),
    lambda: check_save(str(original / "last.pt"), str(copy)),
    lambda: shutil.rmtree(original / "out"),
    lambda: shutil.rmtree(original),
    lambda: shutil.rmtree(original.parent),
    lambda: shutil.rmtree("out", dir_fd=here),
    lambda: original.rename(copy / "moved"),
    lambda: original.parent.rename(f"{original.parent}-moved"),
    lambda: (original / "link").unlink(),
    lambda: os.remove("result", dir_fd=inner),
    lambda: os.rmdir("out", dir_fd=here),
    lambda: os.mkdir("new", dir_fd=here),
    lambda: os.rename("kept", copy / "mine", src_dir_fd=here),
    lambda: os.rename(copy / "mine", "kept", dst_dir_fd=here),
    lambda: os.link(copy / "mine", "new", dst_dir_fd=here),
    lambda: os.symlink(copy / "mine", "new", dir_fd=here),
    lambda: os.chmod("kept", 0o600, dir_fd=here),
    lambda: os.chmod(inner, 0o700),
    lambda: os.utime(original / "kept", (0, 0)),
    lambda: os.chown(original / "kept", os.getuid(), os.getgid()),
    lambda: os.truncate(original / "kept", 0),
):
    try:
        change()
    except UsageError:
        refused += 1
check_save(str(copy / "last.pt"), str(copy))
print(refused)
"""


def test_nothing_in_the_directory_of_the_user_can_be_changed(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    copy.mkdir()
    (original / "out").mkdir(parents=True)
    (original / "kept").write_text("mine")
    (original / "out/result").write_text("mine, too")
    (original / "link").symlink_to("../elsewhere")
    before = (original / "kept").stat()
    done = subprocess.run(
        [sys.executable, "-c", GUARDED, original, copy],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "24\n", done.stderr
    assert sorted(path.name for path in original.iterdir()) == ["kept", "link", "out"]
    assert (original / "out/result").read_text() == "mine, too"
    assert (original / "kept").stat().st_mtime == before.st_mtime


class Watched:
    """An iterator, an optimizer and what is found, in one: nothing of it is looked at."""

    param_groups: tuple[Any, ...] = ()
    notes: ClassVar[list[str]] = []

    def __init__(self, *_: Any) -> None:
        self.notes.append("not looked at: found/__main__.held: a lock")

    def take(self, _: Any) -> list[Any]:
        return []


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.setattr(observer, "observed_parts", lambda _: ([], []))
    monkeypatch.setattr(observer, "FoundObjects", Watched)
    monkeypatch.setattr(observer, "take", lambda _: [])
    plan = Plan(directory=str(tmp_path), record=str(tmp_path / "record"), steps=9)
    return Observer(plan, Observed(original=str(tmp_path / "lab")), Optimizers())


def test_a_batch_that_counted_as_evaluated_is_said_not_to_be_looked_at(
    watching: Observer, tmp_path: Path
) -> None:
    batches, optimizer = Watched(), Watched()
    for is_fetched, is_called_without in [(True, False), (False, False), (True, True)] * 2:
        if is_fetched:
            watching.fetched(batches, ["a batch"])
        if is_called_without:
            watching.calling([], is_graded=False)
        watching.calling([], is_graded=True)
        watching.stepped(optimizer)
    lines = list(read_record(tmp_path / "record"))
    # Two optimizers may take one batch in turns: nothing was lost there.
    words = "not looked at: the batch of step 3: a trained module was called without gradients first"
    notes = {note: line.step for line in lines for note in line.notes if "the batch of" in note}
    assert [*notes.values()] == [3]
    assert next(iter(notes)).startswith(words)
    assert "not looked at: found/__main__.held: a lock" in lines[0].notes
