"""`unbroken export`: the weights of the right checkpoint, all or none, in a file that anybody reads."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import unbroken
from unbroken.checkpoint.manifest import Validation
from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.errors import StorageError
from unbroken.inspection.formats.ours import OurCheckpoint
from unbroken.rundir.rollbacks import Rollback, add_rollback

from ..serving.stamped import Stamped, save, stamp
from ..training.runs import flip, tree_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, accuracy in enumerate([0.5, 0.9, 0.8], start=1):
        save(tmp_path / "run", step, metrics={"accuracy": accuracy})
    return tmp_path / "run"


def export(run: Path, *options: str) -> int:
    return main(["export", str(run), str(run.parent / "out.safetensors"), *options])


def exported(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run.parent / "out.safetensors")
    return found


def is_of(run: Path, step: int) -> bool:
    return all(bool((item == step).all()) for item in exported(run).values())


class TestTheChoice:
    @pytest.mark.parametrize(
        ("options", "step"),
        [
            ((), 3),
            (("--latest",), 3),
            (("--best", "accuracy"), 2),
            (("--best", "accuracy", "--mode", "min"), 1),
            (("--checkpoint", "step-00000001"), 1),
        ],
    )
    def test_it_is_the_newest_the_best_or_the_one_that_is_named(
        self, run: Path, options: tuple[str, ...], step: int
    ) -> None:
        before = tree_of(run)
        assert export(run, *options) == 0
        model = Stamped()
        model.load_state_dict(exported(run))
        assert model() == {float(step)}
        assert tree_of(run) == before

    def test_what_nobody_should_use_is_passed_over_and_told_unless_it_is_named(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(run, 4, validation=Validation(passed=False, reason="accuracy 0.1"))
        save(run, 30)
        add_rollback(
            run, Rollback(decided_by="health", reason="a spike", attempt=1, found_step=31, trusted_step=9)
        )
        save(run, 40, rollbacks=1)
        flip(next((run / "checkpoints/step-00000040").glob("*.safetensors")))
        assert export(run, "--json") == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert (found["checkpoint"], found["step"], found["against"]) == ("step-00000003", 3, None)
        assert [*found["passed_over"]] == ["step-00000040", "step-00000030", "step-00000004"]
        assert "step-00000030 is passed over: tainted: the run went back to step 9, a spike" in err
        assert export(run, "--checkpoint", "step-00000004", "--replace") == 0
        assert "exported as asked, but not validated: accuracy 0.1" in capsys.readouterr().err
        assert is_of(run, 4)

    def test_nan_is_passed_over_as_in_a_resume(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = nn.Linear(2, 2)
        with unbroken.Run(tmp_path / "run", save=[unbroken.EverySteps(1)], model=model) as run:
            run.step(loss=1.0)
            model.bias.data.fill_(math.nan)
            run.step(loss=math.nan)
        assert export(tmp_path / "run") == 0
        assert "step-00000002 is passed over: not finite" in capsys.readouterr().err
        assert torch.isfinite(exported(tmp_path / "run")["bias"]).all()

    def test_what_is_pruned_while_it_is_read_gives_way_to_what_is_newer(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        read, store = OurCheckpoint.read, CheckpointStore(run)

        def pruned_first(self: OurCheckpoint, path: str) -> memoryview:
            if self.path.name == "step-00000003":
                save(run, 4)
                store.prune([unbroken.KeepLast(1)])
            return read(self, path)

        monkeypatch.setattr(OurCheckpoint, "read", pruned_first)
        assert export(run) == 0
        assert is_of(run, 4)
        assert capsys.readouterr().err == ""

    def test_a_link_to_nowhere_is_damaged_and_not_something_that_was_pruned(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(tmp_path / "run", 1, validation=Validation(passed=False, reason="accuracy 0.1"))
        (tmp_path / "run/checkpoints/step-00000009").symlink_to("/nonexistent")
        assert export(tmp_path / "run") == 3
        assert "step-00000009/manifest.json: expected a file" in capsys.readouterr().err
        save(tmp_path / "run", 2)
        assert export(tmp_path / "run") == 0
        assert "step-00000009 is passed over" in capsys.readouterr().err

    def test_where_all_that_is_read_is_pruned_at_once_it_gives_up(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pruned(self: OurCheckpoint, path: str) -> memoryview:
            save(run, int(self.path.name.removeprefix("step-")) + 1)
            CheckpointStore(run).prune([unbroken.KeepLast(1)])
            raise StorageError(f"{path}: no such file", hint="")

        monkeypatch.setattr(OurCheckpoint, "read", pruned)
        assert export(run) == 4

    def test_of_the_bad_ones_those_are_told_that_would_have_been_better(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for step, accuracy in ((4, 0.1), (5, 0.95)):
            failed = Validation(passed=False, reason="broken")
            save(run, step, validation=failed, metrics={"accuracy": accuracy})
        assert export(run, "--best", "accuracy", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["passed_over"]) == (2, {"step-00000005": "not validated: broken"})

    def test_a_run_with_nothing_that_is_fit_for_use_is_an_error_that_says_why(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(tmp_path / "run", 1, validation=Validation(passed=False, reason="accuracy 0.1"))
        assert export(tmp_path / "run") == 4
        assert "found none; step-00000001 is not validated: accuracy 0.1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--best", "loss"), "expected a checkpoint with the metric 'loss', found accuracy"),
            (("--latest", "--best", "accuracy"), "found several"),
            (("--mode", "min"), "expected --best METRIC"),
            (("--part", "ema"), "expected one of the modules model, found 'ema'"),
            (("--checkpoint", "step-00000009"), "expected checkpoint 'step-00000009'"),
        ],
    )
    def test_what_cannot_be_meant_is_an_error(
        self, run: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert export(run, *options) == 2
        assert words in capsys.readouterr().err
        assert not (run.parent / "out.safetensors").exists()

    def test_of_several_modules_one_is_to_be_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        averaged = torch.optim.swa_utils.AveragedModel(stamp(nn.Linear(2, 2), 7))
        save(tmp_path / "run", 1, parts={"model": nn.Linear(2, 2), "ema": averaged})
        assert export(tmp_path / "run") == 2
        assert "one of the modules model, ema" in capsys.readouterr().err
        assert export(tmp_path / "run", "--part", "ema") == 0
        assert exported(tmp_path / "run").keys() == averaged.state_dict().keys()


class TestTheFile:
    def test_it_says_of_what_it_is(self, run: Path) -> None:
        assert export(run, "--best", "accuracy") == 0
        with safe_open(run.parent / "out.safetensors", "pt") as file:
            told = file.metadata()
        manifest = CheckpointStore(run).get("step-00000002").manifest
        seal = (run / "checkpoints/step-00000002/manifest.digest").read_text().split()[0]
        assert (told["format"], told["unbroken.step"], told["unbroken.part"]) == ("pt", "2", "model")
        assert (told["unbroken.run"], told["unbroken.run_id"]) == ("run", manifest.run_id)
        assert json.loads(told["unbroken.metrics"]) == {"accuracy": 0.9}
        assert told["unbroken.manifest_digest"] == seal
        digests = json.loads(told["unbroken.digests"])
        assert digests["counter"] == f"xxh3-128:{manifest.tensors['model/counter'].digest}"
        assert digests.keys() == exported(run).keys()

    def test_tied_weights_are_stored_once_and_loaded_under_both_names(self, tmp_path: Path) -> None:
        trained = Tied()
        save(tmp_path / "run", 1, module=trained)
        assert export(tmp_path / "run") == 0
        assert "head.weight" not in exported(tmp_path / "run")
        with safe_open(tmp_path / "out.safetensors", "pt") as file:
            assert file.metadata()["head.weight"] == "embed.weight"
        by_library, by_us = Tied(), Tied()
        load_model(by_library, tmp_path / "out.safetensors")
        unbroken.warm_start(by_us, tmp_path / "out.safetensors")
        for model in (by_library, by_us):
            assert torch.equal(model.head.weight, trained.embed.weight)

    def test_every_name_that_torch_allows_is_exported_or_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = nn.Linear(2, 2, bias=False)
        model.register_parameter("(odd)", nn.Parameter(torch.ones(1)))
        model.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
        model.register_parameter("format", model.weight)
        save(tmp_path / "run", 1, module=model)
        assert export(tmp_path / "run") == 0
        assert exported(tmp_path / "run").keys() == {"weight", "(odd)"}
        told = capsys.readouterr().err
        assert "not exported: tensor __metadata__" in told
        assert "not exported: format, a further name of weight" in told

    def test_damage_leaves_what_was_there(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert export(run, "--checkpoint", "step-00000001") == 0
        flip(next((run / "checkpoints/step-00000002").glob("*.safetensors")))
        before = os.listdir(run.parent)
        assert export(run, "--checkpoint", "step-00000002", "--replace") == 3
        assert is_of(run, 1)
        assert os.listdir(run.parent) == before
        assert export(run) == 2
        assert "exists already" in capsys.readouterr().err
        assert export(run, "--replace") == 0
        assert is_of(run, 3)
