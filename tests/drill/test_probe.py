"""The probe inside a run that is rehearsed, in scripts that run in fresh processes."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.rehearsal import (
    Kill,
    Line,
    Moment,
    Plan,
    read_record,
    read_value,
    values_key,
    write_plan,
)

from ..zygote import run_script

TOY = Path(__file__).parent / "scripts" / "toy.py"
STEPS = 14  # Two epochs of six steps, and some of the third.
SAVES = (3, 6, 9, 12)


class Stage:
    """A directory in which processes of one script follow plans."""

    def __init__(self, place: Path, *arguments: str, script: Path = TOY) -> None:
        self._place = place
        self._arguments = arguments
        self._script = script
        self._count = itertools.count()
        self.last: subprocess.CompletedProcess[str] | None = None

    def run(self, name: str, **plan: Any) -> list[Line]:
        """Let a process follow `plan` in the run directory of that name; return what it recorded."""
        number = next(self._count)
        record, file = self._place / f"{number}.record", self._place / f"{number}.plan"
        given = {"steps": STEPS, "save_at": SAVES, **plan}
        write_plan(Plan(directory=str(self.directory(name)), record=str(record), **given), file)
        output = self._place / f"{number}.output"
        self.last = run_script(
            self._script, str(file), "--run-dir", str(self._place / "user"), *self._arguments, output=output
        )
        assert record.exists(), self.last.stderr
        return list(read_record(record))

    def directory(self, name: str) -> Path:
        return self._place / name

    @property
    def code(self) -> int:
        assert self.last is not None
        return self.last.returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """What the script without workers records when nothing happens to it."""
    return Stage(tmp_path_factory.mktemp("undisturbed")).run("reference")


def components(lines: list[Line]) -> set[str]:
    return {name for line in lines for name in line.components}


def tail(lines: list[Line], began: Line) -> list[Line]:
    """Return the lines of a reference that a process writes which began like `began`."""
    kind = "began" if not began.step else "epoch" if began.is_between_epochs else "step"
    at = next(index for index, line in enumerate(lines) if (line.kind, line.step) == (kind, began.step))
    return lines[at:]


def state(line: Line) -> tuple[Any, ...]:
    return line.components, line.rates


def differing(line: Line, other: Line) -> set[str]:
    names = line.components.keys() & other.components.keys()
    return {name for name in names if line.components[name] != other.components[name]}


def assert_goes_on_as(reference: list[Line], resumed: list[Line]) -> None:
    """Assert that a resumed process had what the reference had, from where it began to its end."""
    first, *rest = [line for line in resumed if line.kind != "killed"]
    same, *following = tail(reference, first)
    assert first.kind == "began"
    assert differing(first, same) == set()
    assert first.rates == same.rates
    # What the script had only later in the reference is not there yet: its loop has not begun an epoch.
    assert [line.kind for line in rest] == [line.kind for line in following[: len(rest)]]
    for line, other in zip(rest, following, strict=False):
        assert differing(line, other) == set()
        assert (line.batch, line.gradients, line.metrics) == (other.batch, other.gradients, other.metrics)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_records_of_two_undisturbed_runs_are_equal_line_by_line(tmp_path: Path, workers: str) -> None:
    stage = Stage(tmp_path, "--workers", workers)
    one, two = stage.run("one"), stage.run("two")

    assert one == two
    assert [line.step for line in one if line.kind == "step"] == list(range(1, STEPS + 1))
    assert [line.step for line in one if line.kind == "epoch"] == [6, 12]
    steps = [line for line in one if line.kind == "step"]
    assert len({line.batch for line in steps}) == len({line.gradients for line in steps}) == STEPS


def test_a_rehearsal_ends_with_its_steps_in_the_directory_of_its_plan(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    lines = stage.run("one", steps=8, save_at=(2, 5))

    assert stage.code == 0
    assert stage.last is not None
    assert "the script ended of itself" not in stage.last.stderr
    assert lines[-1].step == 8
    assert not (tmp_path / "user").exists()
    assert CheckpointStore(stage.directory("one")).names() == [f"step-{step:08}" for step in (2, 5, 8)]


def test_components_are_named_by_what_they_are(tmp_path: Path) -> None:
    names = components(Stage(tmp_path).run("one", steps=2))

    assert {
        "model/0.weight",
        "optimizer/state/model.0.weight/exp_avg",
        "scheduler/state/last_epoch",
        "rng/python",
        "rng/numpy",
        "rng/torch",
        "found/__main__.NOISE",
        "found/main.curriculum.seen",
        "found/main.patience",
    } <= names
    # What loaders hold is of the position, and the program itself is no state.
    assert not any("loader.dataset" in name or "torch.ops" in name for name in names)


MOMENTS: dict[Moment, int] = {
    # The steps that are complete when each comes, of a kill planned for step 8.
    "in-step": 8,
    "after-step": 8,
    "in-save": 9,
    "in-evaluation": 12,
    "end-of-epoch": 12,
}


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_each_kind_of_death_comes_where_it_should_and_the_resumed_process_goes_on(
    tmp_path: Path, undisturbed: list[Line], moment: Moment
) -> None:
    has_workers = moment == "in-step"
    stage = Stage(tmp_path, "--workers", "2" if has_workers else "0")
    reference = stage.run("reference") if has_workers else undisturbed

    killed = stage.run("killed", kill=Kill(step=8, moment=moment))
    assert stage.code == -signal.SIGKILL
    assert (killed[-1].kind, killed[-1].step) == ("killed", MOMENTS[moment])
    assert killed[:-1] == reference[: len(killed) - 1]

    resumed = stage.run("killed")
    assert stage.code == 0
    expected = {"in-step": {6}, "after-step": {6}, "in-save": {6, 9}}.get(moment, {12})
    assert resumed[0].step in expected
    assert_goes_on_as(reference, resumed)
    assert resumed[-1].step == STEPS


@pytest.mark.parametrize(
    ("moment", "signal_name", "saved"),
    [
        ("in-step", "SIGTERM", 9),
        ("end-of-epoch", "SIGINT", 12),
        # The others of the moments, among the long tests.
        pytest.param("after-step", "SIGINT", 9, marks=pytest.mark.chaos),
        pytest.param("in-save", "SIGTERM", 10, marks=pytest.mark.chaos),
        pytest.param("in-evaluation", "SIGTERM", 12, marks=pytest.mark.chaos),
    ],
)
def test_a_signal_to_stop_is_obeyed_as_any_with_the_state_saved(
    tmp_path: Path, undisturbed: list[Line], moment: Moment, signal_name: Any, saved: int
) -> None:
    stage = Stage(tmp_path)

    lines = stage.run("stopped", kill=Kill(step=8, moment=moment, signal=signal_name))
    assert stage.code == 75
    assert [line.step for line in lines if line.kind == "killed"] == [MOMENTS[moment]]

    resumed = stage.run("stopped")
    assert resumed[0].step == saved
    assert resumed[0].is_between_epochs == (moment in ("in-evaluation", "end-of-epoch"))
    assert_goes_on_as(undisturbed, resumed)


def test_an_evaluation_outside_of_the_run_is_seen_by_what_is_recorded(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "--plain-evaluation")
    lines = stage.run("killed", kill=Kill(step=2, moment="in-evaluation"))

    assert stage.code == -signal.SIGKILL
    assert lines[-1].step == 6


LEAKS = {
    "generator": "found/__main__.NOISE",
    "counter": "found/main.curriculum.seen",
    "local": "found/main.patience",
    "scheduler": "found/main.scheduler",
}


@pytest.mark.parametrize(
    "leak",
    [
        # The generator is the commonest one; the others are among the long tests.
        pytest.param(leak, marks=[] if leak in ("generator", "scheduler") else [pytest.mark.chaos])
        for leak in LEAKS
    ],
)
def test_a_leak_is_a_component_that_differs_and_put_back_makes_the_rest_equal(
    tmp_path: Path, leak: str
) -> None:
    stage, values = Stage(tmp_path, "--leak", leak), str(tmp_path / "values")
    reference = stage.run("reference", values=values, dump_at=(9,))
    stage.run("leaks", kill=Kill(step=9, moment="in-step"))
    shutil.copytree(stage.directory("leaks"), stage.directory("put-back"), symlinks=True)

    resumed = stage.run("leaks")
    same = tail(reference, resumed[0])
    assert resumed[0].step == 9
    assert LEAKS[leak] in differing(resumed[0], same[0])
    assert [line.metrics for line in resumed[1:]] != [line.metrics for line in same[1:]]

    put_back = stage.run("put-back", values=values, put_back=(LEAKS[leak],), put_back_at=9)
    assert put_back[0].notes == ()
    assert LEAKS[leak] not in differing(put_back[0], same[0])
    assert [line.metrics for line in put_back[1:]] == [line.metrics for line in same[1:]]
    assert [line.gradients for line in put_back[1:]] == [line.gradients for line in same[1:]]


def test_a_part_can_be_put_back(tmp_path: Path) -> None:
    stage, values = Stage(tmp_path, "--leak", "optimizer"), str(tmp_path / "values")
    reference = stage.run("reference", values=values, dump_at=(9,))
    stage.run("fresh", kill=Kill(step=9, moment="in-step"))
    kept = tail(reference, Line(kind="began", step=9))
    names = tuple(name for name in kept[0].components if name.startswith("optimizer/"))

    resumed = stage.run("fresh", steps=10, values=values, put_back=names, put_back_at=9)
    assert resumed[0].notes == ()
    assert_goes_on_as(reference, resumed)


def test_what_cannot_be_put_back_is_said_in_the_record(tmp_path: Path) -> None:
    stage, values = Stage(tmp_path), str(tmp_path / "values")
    stage.run("one", values=values, dump_at=(3,), steps=4)
    absent = "found/__main__.absent"
    stage.run("two", kill=Kill(step=3, moment="in-step"))

    began = stage.run("two", values=values, put_back=(absent, "model/0.weight"), put_back_at=3, steps=4)[0]
    assert began.notes == (f"cannot put back {absent}: there is no such object now",)


def test_dumped_values_are_tensors_as_they_are_and_plain_json(tmp_path: Path) -> None:
    values = tmp_path / "values"
    lines = Stage(tmp_path).run("one", values=str(values), dump_at=(2,), steps=3)

    for name in next(line for line in lines if line.step == 2).components:
        assert (values / values_key(2, name)).exists()
    weight, data = read_value(values / values_key(2, "model/0.weight"))
    assert [(tensor.dtype, tensor.shape) for tensor in weight.tensors] == [("F32", (8, 6))]
    assert data["model/0.weight"].nbytes == 8 * 6 * 4
    assert read_value(values / values_key(2, "scheduler/state/last_epoch"))[0].state == 2


def test_a_script_with_a_loop_of_its_own_begins_where_it_entered_the_run(tmp_path: Path) -> None:
    stage, values = Stage(tmp_path, script=TOY.with_name("bare_loop.py")), str(tmp_path / "values")
    reference = stage.run("reference", values=values, dump_at=(6,))
    stage.run("killed", kill=Kill(step=7, moment="in-step"))
    shutil.copytree(stage.directory("killed"), stage.directory("again"), symlinks=True)
    leaks = {"found/__main__.HELD", "found/__main__.noise().source", "found/__main__.history"}

    resumed = stage.run("killed", steps=7)
    same = tail(reference, resumed[0])
    assert resumed[0].step == 6
    assert differing(resumed[0], same[0]) == leaks

    names = tuple(sorted(leaks))
    assert_goes_on_as(reference, stage.run("again", values=values, put_back=names, put_back_at=6))
