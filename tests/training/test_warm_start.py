"""A warm start takes weights and nothing else, from every kind of source, strictly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import DamagedError, StateMismatchError, UnsupportedStateError, UsageError

from .runs import flip, save


def build(classes: int = 3, *, dtype: Any = None) -> nn.Module:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.BatchNorm1d(4, dtype=dtype)))
    model.add_module("head", nn.Linear(4, classes, dtype=dtype))
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def model() -> nn.Module:
    trained = build()
    trained(torch.randn(8, 4))
    return trained


class TestSources:
    def test_the_newest_checkpoint_of_a_run(self, tmp_path: Path, model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        save(tmp_path / "run", model=model, optimizer=optimizer)
        again = build()
        report = unbroken.warm_start(again, tmp_path / "run")
        assert equal(model, again)
        assert report.source == f"{tmp_path / 'run'} (step-00000001)"
        assert report.matched.tensors == len(model.state_dict())

    def test_a_checkpoint_and_a_copy_of_one(self, tmp_path: Path, model: nn.Module) -> None:
        save(tmp_path / "run", model=model)
        checkpoint = CheckpointStore(tmp_path / "run").latest()
        place = tmp_path / "elsewhere" / checkpoint.name
        shutil.copytree(tmp_path / "run/checkpoints" / checkpoint.name, place)
        for source in (checkpoint, place, str(place)):
            again = build()
            unbroken.warm_start(again, source)
            assert equal(model, again)

    def test_a_safetensors_file(self, tmp_path: Path, model: nn.Module) -> None:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        again = build()
        unbroken.warm_start(again, tmp_path / "model.safetensors")
        assert equal(model, again)

    @pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model"])
    @pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
    def test_a_file_of_torch_save(
        self, tmp_path: Path, model: nn.Module, key: str | None, prefix: str
    ) -> None:
        weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        torch.save(weights if key is None else {"epoch": 3, key: weights}, tmp_path / "model.pt")
        again = build()
        unbroken.warm_start(again, tmp_path / "model.pt")
        assert equal(model, again)

    def test_into_a_compiled_model(self, tmp_path: Path, model: nn.Module) -> None:
        save(tmp_path / "run", model=model)
        again = build()
        unbroken.warm_start(torch.compile(again, backend="eager"), tmp_path / "run")
        assert equal(model, again)

    def test_tied_weights_under_all_of_their_names(self, tmp_path: Path) -> None:
        tied = build(4)
        tied.get_submodule("head").weight = tied.get_submodule("body.0").weight
        save(tmp_path / "run", model=tied)
        again = build(4)
        unbroken.warm_start(again, tmp_path / "run")
        assert equal(tied, again)

    def test_tied_weights_of_which_the_file_has_one_name(self, tmp_path: Path) -> None:
        tied, again = build(4), build(4)
        for each in (tied, again):
            each.get_submodule("head").weight = each.get_submodule("body.0").weight
        weights = {name: tensor for name, tensor in tied.state_dict().items() if name != "head.weight"}
        save_file(weights, tmp_path / "model.safetensors")
        unbroken.warm_start(again, tmp_path / "model.safetensors")
        assert equal(tied, again)

    @pytest.mark.parametrize("prefix", [None, "", "module.", "module._orig_mod."])
    def test_a_model_whose_only_child_is_called_as_wrappers_call_theirs(
        self, tmp_path: Path, prefix: str | None
    ) -> None:
        model, again = nn.ModuleDict({"module": build()}), nn.ModuleDict({"module": build()})
        if prefix is None:
            save(tmp_path / "run", model=model)
        else:
            torch.save({prefix + name: item for name, item in model.state_dict().items()}, tmp_path / "w.pt")
        unbroken.warm_start(again, tmp_path / ("run" if prefix is None else "w.pt"))
        assert equal(model, again)

    def test_a_file_of_a_model_with_compiled_layers(self, tmp_path: Path, model: nn.Module) -> None:
        weights = {
            name.replace("body.0", "body.0._orig_mod"): item for name, item in model.state_dict().items()
        }
        torch.save(weights, tmp_path / "model.pt")
        again = build()
        unbroken.warm_start(again, tmp_path / "model.pt")
        assert equal(model, again)

    def test_a_part_is_chosen_by_its_name(self, tmp_path: Path, model: nn.Module) -> None:
        save(tmp_path / "run", teacher=model, student=build())
        again = build()
        with pytest.raises(UsageError, match="one of the modules teacher, student, found None"):
            unbroken.warm_start(again, tmp_path / "run")
        unbroken.warm_start(again, tmp_path / "run", part="teacher")
        assert equal(model, again)


class TestStrictness:
    def test_what_does_not_fit_is_refused_and_nothing_is_changed(
        self, tmp_path: Path, model: nn.Module
    ) -> None:
        save(tmp_path / "run", model=model)
        again = build(7)
        before = build(7)
        before.load_state_dict(again.state_dict())
        with pytest.raises(
            StateMismatchError, match=r"head\.weight: shape \(7, 4\), the checkpoint has shape"
        ):
            unbroken.warm_start(again, tmp_path / "run")
        assert equal(before, again)
        report = unbroken.warm_start(again, tmp_path / "run", allow=["head.*"])
        assert torch.equal(again.get_submodule("head").weight, before.get_submodule("head").weight)
        assert torch.equal(again.get_submodule("body.0").weight, model.get_submodule("body.0").weight)
        assert [item.name for item in report.allowed] == ["head.weight", "head.bias"]
        assert report.lines()[1].startswith("warm start: head.weight: shape")

    def test_names_are_mapped_and_dtypes_converted_on_request(self, tmp_path: Path, model: nn.Module) -> None:
        old = {name.replace("body.", "encoder."): tensor for name, tensor in model.state_dict().items()}
        torch.save(old, tmp_path / "model.pt")
        again = build(dtype=torch.float64)
        rename = {"encoder": "body"}
        with pytest.raises(StateMismatchError, match=r"dtype torch\.float64"):
            unbroken.warm_start(again, tmp_path / "model.pt", rename=rename)
        unbroken.warm_start(again, tmp_path / "model.pt", rename=rename, cast=["*"])
        assert equal(model.double(), again)

    def test_a_map_that_drops_a_tensor_or_is_of_no_name_is_refused(
        self, tmp_path: Path, model: nn.Module
    ) -> None:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        for name in ("model.pt", "model.safetensors"):
            with pytest.raises(UsageError, match=r"several that become 'head\.bias'"):
                unbroken.warm_start(build(), tmp_path / name, rename={"body.0.bias": "head.bias"})
            with pytest.raises(UsageError, match="found 'heads', which is none"):
                unbroken.warm_start(build(), tmp_path / name, rename={"heads": "head"})

    def test_a_source_of_which_nothing_fits_is_refused_whatever_is_allowed(
        self, tmp_path: Path, model: nn.Module
    ) -> None:
        torch.save({"other.weight": torch.zeros(2)}, tmp_path / "model.pt")
        with pytest.raises(StateMismatchError, match="no name of the model is in it"):
            unbroken.warm_start(model, tmp_path / "model.pt", allow=["*"])

    def test_damage_is_found(self, tmp_path: Path, model: nn.Module) -> None:
        save(tmp_path / "run", model=model)
        again = build()
        checkpoint = CheckpointStore(tmp_path / "run").latest()
        entry = checkpoint.manifest.tensors["model/head.weight"]
        flip(tmp_path / "run/checkpoints" / checkpoint.name / entry.file, entry.offset)
        with pytest.raises(DamagedError):
            unbroken.warm_start(again, tmp_path / "run")
        (tmp_path / "model.pt").write_bytes(b"nothing of the kind")
        with pytest.raises(DamagedError, match=r"expected a file of torch\.save"):
            unbroken.warm_start(again, tmp_path / "model.pt")

    def test_code_in_a_file_is_not_run(self, tmp_path: Path, model: nn.Module) -> None:
        torch.save(model, tmp_path / "model.pt")
        # There is nothing wrong with the file itself.
        with pytest.raises(UsageError, match="found other objects, which are not loaded"):
            unbroken.warm_start(build(), tmp_path / "model.pt")

    def test_tied_weights_whose_values_differ_in_the_source_are_refused(self, tmp_path: Path) -> None:
        source = build(4)
        save(tmp_path / "run", model=source)
        tied = build(4)
        tied.get_submodule("head").weight = tied.get_submodule("body.0").weight
        with pytest.raises(StateMismatchError, match=r"head\.weight: has other values than body\.0\.weight"):
            unbroken.warm_start(tied, tmp_path / "run")
        unbroken.warm_start(tied, tmp_path / "run", allow=["head.weight"])
        assert torch.equal(tied.get_submodule("head").weight, source.get_submodule("body.0").weight)

    def test_a_list_of_names_may_be_given_by_a_generator_and_errors_name_the_call(
        self, tmp_path: Path, model: nn.Module
    ) -> None:
        save(tmp_path / "run", model=model)
        unbroken.warm_start(build(7), tmp_path / "run", allow=(name for name in ["head.*"]))  # type: ignore[arg-type]
        for wrong in ("head.*", [1], 3):
            with pytest.raises(UsageError, match=r"^warm_start: expected a list of names for allow="):
                unbroken.warm_start(build(7), tmp_path / "run", allow=wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["nowhere", "file.txt", "nowhere.pt"])
    def test_what_is_no_source_is_refused(self, tmp_path: Path, model: nn.Module, name: str) -> None:
        (tmp_path / "file.txt").touch()
        with pytest.raises(UsageError, match="expected a run, a checkpoint"):
            unbroken.warm_start(model, tmp_path / name)

    def test_what_is_no_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedStateError, match=r"a model of Keras or a tf\.Module, found <class 'dict'>"
        ):
            unbroken.warm_start({}, tmp_path)


def test_a_run_after_it_begins_at_step_0_and_a_resume_overrules_it(tmp_path: Path, model: nn.Module) -> None:
    save(tmp_path / "old", model=model)
    steps, again = [], build()
    for _ in range(2):
        again = build()
        unbroken.warm_start(again, tmp_path / "old")
        with unbroken.Run(tmp_path / "new", model=again) as run:
            steps.append(run.step_count)
            with torch.no_grad():
                again.get_submodule("head").weight.add_(1.0)
            run.step()
    assert steps == [0, 1]
    assert torch.equal(again.get_submodule("head").weight, model.get_submodule("head").weight + 1.0 + 1.0)
