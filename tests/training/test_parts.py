"""What is a part, what of it is kept, and what is refused when a run is entered rather than hours later."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError


def save(directory: Path, **parts: Any) -> None:
    with unbroken.Run(directory, **parts) as run:
        run.step()


def restore(directory: Path, **parts: Any) -> unbroken.Run:
    with unbroken.Run(directory, resume="must", **parts) as run:
        return run


def test_the_name_of_the_part_that_every_run_has_is_not_for_users(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'rng' stands for the generators"):
        save(tmp_path / "r", rng=np.random.default_rng(0))
    assert not (tmp_path / "r").exists()


def test_a_nested_value_that_cannot_be_kept_is_refused_on_entering(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"^counters/hook: cannot keep a value of type builtins:function"
    ):
        save(tmp_path / "r", counters={"hook": lambda: 0})
    assert not (tmp_path / "r").exists()


def test_a_parameter_that_is_trained_and_belongs_to_no_part_is_refused(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(
        UnsupportedStateError, match=r"parameter 0 of group 0, of shape \(2, 3\).* belongs to no part"
    ):
        save(tmp_path / "r", optimizer=torch.optim.Adam([weight]))
    save(tmp_path / "a", optimizer=torch.optim.Adam([weight]), weight=weight)
    save(tmp_path / "b", optimizer=torch.optim.Adam([weight]), weights={"w": weight})


def test_frozen_parameters_and_modules_in_evaluation_stay_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].eval()
    save(tmp_path, model=model)
    again = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2))
    again[2].requires_grad_(False)
    restore(tmp_path, model=again)
    assert [parameter.requires_grad for parameter in again.parameters()] == [False, False, True, True]
    assert [module.training for module in again] == [True, False, True]


def test_settings_of_the_script_that_the_checkpoint_overwrites_are_reported(tmp_path: Path) -> None:
    def build(decay: float, horizon: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    save(tmp_path, **build(0.0, 5))
    found = restore(tmp_path, horizon="keep", **build(0.5, 50)).restored
    assert found is not None
    assert "optimizer: group 0 weight_decay: 0.0 is kept, the script sets 0.5" in found.changed
    assert "scheduler: T_max: 5 is kept, the script sets 50" in found.changed


def test_a_dataclass_that_knows_its_own_state_is_asked_for_it(tmp_path: Path) -> None:
    save(tmp_path, meter=Meter(shown=1, hidden=7))
    again = Meter()
    restore(tmp_path, meter=again)
    assert (again.shown, again.hidden) == (1, 7)


class Meter:
    """Made a dataclass below: `hidden` is no field of it."""

    hidden: int = 0

    def __init__(self, shown: int = 0, hidden: int = 0) -> None:
        self.shown, self.hidden = shown, hidden

    def state_dict(self) -> dict[str, int]:
        return {"shown": self.shown, "hidden": self.hidden}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shown, self.hidden = state["shown"], state["hidden"]


Meter.__annotations__ = {"shown": int}
dataclasses.dataclass(init=False)(Meter)


def test_tensors_that_share_memory_by_chance_can_be_restored(tmp_path: Path) -> None:
    loss = torch.tensor(0.5)
    save(tmp_path, counters={"best": loss, "last": loss.detach(), "other": torch.tensor(1j).conj()})
    counters: dict[str, Any] = {"best": torch.zeros(()), "last": torch.zeros(())}
    restore(tmp_path, counters=counters)
    assert (float(counters["best"]), float(counters["last"])) == (0.5, 0.5)
    assert complex(counters["other"]) == -1j


def test_one_tensor_in_two_places_is_kept_apart_where_the_places_differ(tmp_path: Path) -> None:
    save(tmp_path, values={"sum": torch.tensor(0.5), "best": torch.tensor(0.75), "same": torch.tensor(0.5)})
    zero = torch.zeros(())
    values: dict[str, Any] = {"sum": zero, "best": zero, "same": zero}
    restore(tmp_path, values=values)
    assert [float(values[name]) for name in ("sum", "best", "same")] == [0.5, 0.75, 0.5]
    assert values["same"] is values["sum"] is zero


def test_a_conjugate_view_is_not_taken_for_the_tensor_it_views(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self, value: complex) -> None:
            super().__init__()
            self.register_buffer("one", torch.tensor([value], dtype=torch.cfloat))
            self.register_buffer("two", torch.zeros(1, dtype=torch.cfloat))

    model = Both(1 + 2j)
    model.two = model.one.conj()
    save(tmp_path, model=model)
    again = Both(0)
    restore(tmp_path, model=again)
    assert (again.one.item(), again.two.item()) == (1 + 2j, 1 - 2j)


def test_an_expanded_tensor_in_a_dictionary_gets_memory_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, values={"x": torch.ones(1).expand(4)})
    values: dict[str, Any] = {"x": torch.zeros(1).expand(4)}
    restore(tmp_path, values=values)
    assert values["x"].tolist() == [1.0] * 4


def test_what_is_changed_after_the_loop_is_in_the_final_checkpoint(tmp_path: Path) -> None:
    counters = {"n": 0}
    with unbroken.Run(tmp_path, save=[unbroken.EveryEpochs(1)], counters=counters) as run:
        for _ in run.epochs(2):
            run.step()
        counters["n"] = 99
        run.record(test_accuracy=0.5)
    found = CheckpointStore(tmp_path).latest()
    assert found.load()["counters"] == {"n": 99}
    assert found.manifest.metrics == {"test_accuracy": 0.5}


def test_an_equal_state_is_not_saved_twice(tmp_path: Path) -> None:
    for _ in range(2):
        with unbroken.Run(tmp_path, save=[unbroken.EveryEpochs(1)], counters={}) as run:
            for _ in run.epochs(2):
                run.step()
    assert CheckpointStore(tmp_path).names() == ["step-00000001", "step-00000002"]


def test_the_best_of_a_metric_of_steps_is_kept(tmp_path: Path) -> None:
    keep = [unbroken.KeepBest(1, "loss", mode="min")]
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], keep=keep) as run:
        for loss in (0.5, 0.1, 0.7, 0.6):
            run.step(loss=loss)
    assert CheckpointStore(tmp_path).names() == ["step-00000002", "step-00000004"]


def test_a_best_state_in_the_middle_of_an_epoch_is_written_at_once(tmp_path: Path) -> None:
    keep = [unbroken.KeepBest(1, "accuracy")]
    with unbroken.Run(tmp_path, save=[], keep=keep) as run:
        for _ in run.epochs(1):
            for accuracy in run.batches([0.3, 0.9, 0.2]):
                run.step()
                run.record(accuracy=accuracy)
    store = CheckpointStore(tmp_path)
    assert store.get("step-00000002").manifest.metrics == {"accuracy": 0.9}


def test_a_library_that_came_into_use_since_is_reported_and_no_reason_to_refuse(tmp_path: Path) -> None:
    code = "import sys, unbroken{}\nwith unbroken.Run(sys.argv[1], counters={{}}) as run: run.step()"
    for imports in ("", ", numpy"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(imports), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "the generator of numpy came into use since" in done.stderr


def test_a_name_that_is_given_up_stays_in_its_place_when_the_restore_fails(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], model=nn.Linear(2, 2)) as run:
        for _ in range(3):
            run.step()
    with pytest.raises(StateMismatchError):
        restore_from(tmp_path, "step-00000002", model=nn.Linear(2, 3))
    assert len(CheckpointStore(tmp_path).names()) == 3


def test_a_named_checkpoint_is_refused_where_every_restart_would_go_back_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    (tmp_path / "attempts/0002").mkdir()
    monkeypatch.setenv("UNBROKEN_ATTEMPT", "2")
    with pytest.raises(UsageError, match="under `unbroken run`"):
        restore_from(tmp_path, "step-00000001")
    assert json.loads((tmp_path / "attempts/0002/last-words.json").read_text())["kind"] == "usage"


def restore_from(directory: Path, name: str, **parts: Any) -> None:
    with unbroken.Run(directory, resume=name, **parts):
        pass


@pytest.mark.parametrize("name", ["step", "time", "kind", "epoch"])
def test_metrics_may_have_any_name(tmp_path: Path, name: str) -> None:
    with unbroken.Run(tmp_path) as run:
        run.step(**{name: 0.25})
    assert CheckpointStore(tmp_path).latest().manifest.metrics == {name: 0.25}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("unbroken.Run()", "expected a run directory"),
        ("unbroken.Run('r', save=unbroken.EverySteps(3))", "expected a list of policies for save="),
        ("unbroken.Run('r', config=object())", "config: cannot keep"),
    ],
    ids=["no directory", "no list", "config"],
)
def test_an_error_of_the_constructor_has_its_hint_and_its_exit_code(
    tmp_path: Path, call: str, message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import unbroken\n{call}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert done.returncode == (78 if "config" in call else 2)
    assert os.listdir(tmp_path) == []


def test_attributes_of_a_dataclass_that_are_no_fields_are_kept(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Progress:
        best: float = 0.0

        def __post_init__(self) -> None:
            self.count = 0

    progress = Progress()
    progress.count, progress.best = 7, 0.5
    save(tmp_path, progress=progress)
    again = Progress()
    restore(tmp_path, progress=again)
    assert (again.count, again.best) == (7, 0.5)


@pytest.mark.parametrize("kind", [dict, list, set, deque])
def test_attributes_beside_the_items_of_a_container_are_refused(tmp_path: Path, kind: type) -> None:
    class Counted(kind):  # type: ignore[misc, valid-type]
        pass

    items = Counted()
    save(tmp_path / "without", items=items)
    items.n = 5
    with pytest.raises(UnsupportedStateError, match=r"has attributes beside its items, .*: n"):
        save(tmp_path / "with", items=items)


def test_a_deque_is_filled_in_place(tmp_path: Path) -> None:
    recent = deque([1, 2, 3], maxlen=3)
    save(tmp_path, recent=recent)
    again: deque[int] = deque(maxlen=3)
    restore(tmp_path, recent=again)
    assert again == recent


def test_a_class_is_refused_with_the_hint_to_pass_an_instance(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        save(tmp_path, counter=Counter)
    assert caught.value.hint == "pass an instance: counter=Counter(...)"


def test_an_expanded_tensor_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="an expanded tensor, whose elements share memory"):
        save(tmp_path, tensor=torch.zeros(1).expand(3))


def test_tied_modules_may_change_places_in_the_code(tmp_path: Path) -> None:
    def build(*names: str) -> nn.Module:
        model, shared = nn.Module(), nn.Linear(2, 2)
        for name in names:
            model.add_module(name, shared)
        return model

    model = build("encoder", "decoder")
    save(tmp_path, model=model)
    again = build("decoder", "encoder")
    restore(tmp_path, model=again)
    assert torch.equal(again.get_submodule("encoder").weight, model.get_submodule("encoder").weight)


def test_an_object_that_restores_another_shape_is_caught(tmp_path: Path) -> None:
    class Meter:
        def __init__(self, *shape: int) -> None:
            self.value = torch.ones(shape)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.value.copy_(state["value"].flatten()[0])

    save(tmp_path, meter=Meter(1))
    with pytest.raises(StateMismatchError, match="read back the live state differs at meter/value"):
        restore(tmp_path, meter=Meter())
