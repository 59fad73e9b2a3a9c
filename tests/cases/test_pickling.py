"""Pickling: checkpoints hold plain data, or the save is refused; no class has to be found again."""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

import unbroken
from unbroken.cli.main import main
from unbroken.errors import UnsupportedStateError

from ..zygote import run_script
from . import broken
from .scenes import Brokens, fails, restore, save

VALUES: dict[str, Callable[[], Any]] = {
    "a NumPy scalar": lambda: np.float32(0.1),
    "an array": lambda: np.arange(6, dtype=np.int16).reshape(2, 3),
    "the state of np.random": lambda: np.random.RandomState(3).get_state(),
    "the state of random": lambda: random.Random(3).getstate(),
    "the state of a Generator": lambda: np.random.default_rng(3).bit_generator.state,
    "a set": lambda: {3, "x", (1, 2)},
    "nested tuples": lambda: ((1, (2.5, None)), ()),
    "a path": lambda: pathlib.Path("data/train.csv"),
    "a device": lambda: torch.device("cuda:3"),
    "a dtype": lambda: torch.bfloat16,
    "a size": lambda: torch.Size([2, 3]),
    "keys that are no texts": lambda: {1: "a", (2, 3): "b"},
    "numbers that JSON lacks": lambda: [float("inf"), 2**80, 1j],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[key]) for key, item in one.items())
    return bool(one == other)


class TestValues:
    """Saving is green, and no checkpoint can be read back (nerfstudio-project/nerfstudio#3683)."""

    def play(self, directory: Path, value: Any, wrong: Brokens) -> None:
        save(directory, wrong, extra={"value": value})
        for file in (directory / "checkpoints/step-00000001").iterdir():
            assert file.suffix in (".json", ".digest", ".safetensors")
        extra: dict[str, Any] = {}
        restore(directory, wrong, extra=extra)
        assert same(extra["value"], value)

    @pytest.mark.parametrize("name", VALUES, ids=lambda name: name.replace(" ", "-"))
    def test_every_plain_value_comes_back_equal_and_of_its_type(self, tmp_path: Path, name: str) -> None:
        self.play(tmp_path, VALUES[name](), ())

    @pytest.mark.parametrize("name", VALUES, ids=lambda name: name.replace(" ", "-"))
    def test_it_does_not_where_values_become_texts(self, tmp_path: Path, name: str) -> None:
        with fails():
            self.play(tmp_path, VALUES[name](), (broken.AsTexts,))


class TestRefusals:
    def play(self, directory: Path, value: Any, wrong: Brokens) -> None:
        with pytest.raises(UnsupportedStateError, match=r"extra/deep/1"):
            save(directory, wrong, extra={"deep": [0, value]})
        assert not unbroken.CheckpointStore(directory).names()

    @pytest.mark.parametrize(
        "make",
        [lambda: argparse.Namespace(rate=1), lambda: print, lambda: sys, lambda: iter([1]), object],
        ids=["namespace", "function", "module", "iterator", "object"],
    )
    def test_what_cannot_be_kept_exactly_is_refused_before_training_by_its_place(
        self, tmp_path: Path, make: Callable[[], Any]
    ) -> None:
        self.play(tmp_path, make(), ())

    def test_it_is_not_where_whole_objects_are_pickled(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, argparse.Namespace(rate=1), (broken.Pickling,))


class TestPaths:
    """Saved on one system, a path cannot be built on another (fastai/fastai#1482)."""

    def play(self, directory: Path, wrong: Brokens) -> None:
        save(directory, wrong, extra={"data": [pathlib.Path("data/train.csv")] * 4})
        files = [file.read_bytes() for file in directory.glob("checkpoints/*/*")]
        assert any(b"data/train.csv" in data for data in files)
        for name in (b"PosixPath", b"WindowsPath", b"pathlib"):
            assert not any(name in data for data in files)

    def test_a_path_is_kept_as_its_text_and_names_no_class_of_one_platform(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())

    def test_it_does_where_objects_are_pickled(self, tmp_path: Path) -> None:
        with fails():
            self.play(tmp_path, (broken.Pickling,))

    def test_a_path_of_the_other_platform_is_refused_when_it_is_saved(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedStateError, match="extra/data: cannot keep a value of type pathlib"):
            save(tmp_path, extra={"data": PureWindowsPath("c:/data")})

    def test_inspect_lists_paths_on_any_platform(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save(tmp_path, extra={"data": pathlib.Path("data/train.csv")})
        assert main(["inspect", str(tmp_path), "--json"]) == 0
        assert "extra" in json.loads(capsys.readouterr().out)["parts"]


SOURCE = """
from dataclasses import dataclass

class Meter:
    total = 0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]

@dataclass
class Progress:
    best: float = 0.0
"""


class TestClassesThatMove:
    """A class of the script cannot be found when its checkpoint is loaded (pytorch/pytorch#7812)."""

    def home(self, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(SOURCE, module.__dict__)
        return module

    def play(self, monkeypatch: pytest.MonkeyPatch, directory: Path, wrong: Brokens) -> None:
        old = self.home(monkeypatch, "home_of_old")
        meter = old.Meter()
        meter.total = 7
        save(directory, wrong, meter=meter, progress=old.Progress(best=0.5))
        monkeypatch.delitem(sys.modules, "home_of_old")
        new = self.home(monkeypatch, "home_of_new")
        again, progress = new.Meter(), new.Progress()
        restore(directory, wrong, meter=again, progress=progress)
        assert (again.total, progress.best) == (7, 0.5)

    def test_objects_are_restored_though_their_classes_have_moved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.play(monkeypatch, tmp_path, ())

    def test_they_are_not_where_whole_objects_are_pickled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ModuleNotFoundError, match="home_of_old"):
            self.play(monkeypatch, tmp_path, (broken.Pickling,))

    def test_a_class_of_the_main_script_may_move_to_a_module(self, tmp_path: Path) -> None:
        (tmp_path / "the_new_home.py").write_text(SOURCE)
        body = (
            "import sys, unbroken\n"
            "meter, progress = Meter(), Progress()\n"
            "with unbroken.Run(sys.argv[1], meter=meter, progress=progress) as run:\n"
            "    print('total', meter.total, progress.best)\n"
            "    meter.total, progress.best = 7, 0.5\n"
            "    run.step()\n"
        )
        moved = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom the_new_home import *\n"
        scripts = {"one.py": SOURCE + body, "two.py": moved + body}
        printed = []
        for name, text in scripts.items():
            (tmp_path / name).write_text(text)
            done = run_script(tmp_path / name, str(tmp_path / "run"), output=tmp_path / "output")
            assert done.returncode == 0, done.stderr
            printed += [line for line in done.stderr.splitlines() if line.startswith("total")]
        assert printed == ["total 0 0.0", "total 7 0.5"]
