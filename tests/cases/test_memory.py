"""Memory: a resume needs no more than a fresh start, a save no more than the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..zygote import run_script
from . import broken
from .scenes import Brokens, restore, run_of, save, train

SCRIPT = Path(__file__).with_name("memory_script.py")
REPOSITORY = Path(__file__).parents[2]
# Of the script: the size of the moments of Adam in MiB; the model has half of it.
MOMENTS = 64
# A restore has at most four pieces of 8 MiB in flight; the rest is for what Python and torch do beside.
PIECES = 48


def measured(directory: Path, mode: str, *wrong: str) -> dict[str, int]:
    arguments = (str(REPOSITORY), str(directory / "run"), mode, *wrong)
    done = run_script(SCRIPT, *arguments, output=directory / "output")
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stderr.splitlines()]
    return {line[0]: int(line[1]) for line in words if line[0] in ("peak", "held", "grown")}


class TestPeakOfAResume:
    """A fresh start fits, and a resume runs out of memory (karpathy/nanoGPT#158)."""

    def play(self, directory: Path, *wrong: str) -> None:
        measured(directory, "save")
        found = measured(directory, "restore", *wrong)
        # The weights are there already when the run is entered; a fresh start gets its moments later.
        assert found["peak"] < MOMENTS + PIECES
        assert found["held"] < MOMENTS + PIECES

    def test_it_is_that_of_a_fresh_start_and_a_few_pieces(self, tmp_path: Path) -> None:
        self.play(tmp_path)

    @pytest.mark.chaos
    def test_it_is_higher_where_what_was_loaded_is_copied_and_held(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match=r"assert \d+ < "):
            self.play(tmp_path, "HoldingWhatWasLoaded")


class TestManySaves:
    """Memory grows with each asynchronous save (pytorch/pytorch#170163)."""

    def play(self, directory: Path, *wrong: str) -> None:
        # Each save is of 8 MiB, taken while the one before is being written.
        assert measured(directory, "save-often", *wrong)["grown"] < 20

    def test_eight_saves_take_no_more_memory_than_two(self, tmp_path: Path) -> None:
        self.play(tmp_path)

    def test_they_do_where_each_copy_is_held(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match=r"assert \d+ < 20"):
            self.play(tmp_path, "Hoarding")

    def test_saves_that_are_asked_for_faster_than_they_are_written_wait_for_each_other(
        self, tmp_path: Path
    ) -> None:
        # No handler is in this: whether a save may begin is for the run to say.
        writing = set()
        with run_of(tmp_path, (), keep=[], model=nn.Linear(512, 512)) as run:
            for _ in range(8):
                run.step()
                run.save()
                writing.add(len(list((tmp_path / "checkpoints").glob(".staging-*"))))
        assert max(writing) <= 1
        assert len(list((tmp_path / "checkpoints").iterdir())) == 8


class _Devices(TorchDispatchMode):
    """Notes the device of every tensor that torch makes or touches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen |= {item.device.type for item in (*args, result) if isinstance(item, torch.Tensor)}
        return result


class TestDevices:
    """Tensors remember where they were saved, so all processes load to device 0 (rwth-i6/returnn#1345)."""

    def built(self, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    def play(self, directory: Path, wrong: Brokens) -> None:
        parts = self.built(1)
        train(parts["model"], parts["optimizer"], range(2))
        save(directory, wrong, **parts)
        expected = train(parts["model"], parts["optimizer"], range(2, 4))
        again = self.built(2)
        with _Devices() as devices:
            restore(directory, wrong, **again)
        # What is on the meta device has no memory: dtypes and shapes, to be compared.
        assert devices.seen <= {"cpu", "meta"}
        assert train(again["model"], again["optimizer"], range(2, 4)) == expected

    def test_a_restore_asks_for_no_device_but_that_of_the_live_tensors(self, tmp_path: Path) -> None:
        self.play(tmp_path, ())
        manifest = json.loads(next(tmp_path.glob("checkpoints/*/manifest.json")).read_text())
        assert not any("device" in entry for entry in manifest["tensors"].values())

    def test_it_does_where_an_archive_remembers_the_device(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="deserialize object on"):
            self.play(tmp_path, (broken.ArchiveOfDevice,))
