"""Generators that parts hold are found, kept under names that no wrapper changes, and restored."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.errors import StateMismatchError

from .runs import restore, save


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


class Net(nn.Module):
    def __init__(self, *, with_noise: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), Noise() if with_noise else nn.Identity())
        self.augment = {"flip": random.Random(3)}
        self.numpy = np.random.default_rng(5)

    def draw(self) -> list[float]:
        found = [self.augment["flip"].random(), self.numpy.random()]
        return [*found, float(self.body[1](torch.zeros(1)))]


PATHS = ("model.augment['flip']", "model.body.1.generator", "model.numpy")


@pytest.mark.parametrize("saved_compiled", [True, False])
@pytest.mark.parametrize("restored_compiled", [True, False])
def test_they_go_on_whatever_is_wrapped(
    tmp_path: Path, saved_compiled: bool, restored_compiled: bool
) -> None:
    def wrapped(model: nn.Module, compiled: bool) -> Any:
        return torch.compile(model, backend="eager") if compiled else model

    model = Net()
    model.draw()
    save(tmp_path, model=wrapped(model, saved_compiled))
    expected = [model.draw() for _ in range(3)]
    again = Net()
    with unbroken.Run(tmp_path, model=wrapped(again, restored_compiled)) as run:
        assert run.restored is not None
        assert run.restored.generators[-3:] == PATHS
        assert [again.draw() for _ in range(3)] == expected


def test_what_is_drawn_before_the_first_batch_is_undone(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path, model=model)
    expected = model.draw()
    again = Net()
    with unbroken.Run(tmp_path, model=again) as run:
        again.draw()
        for _ in run.epochs(1):
            assert again.draw() == expected


def test_one_that_is_on_one_side_only_is_refused_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path / "with", model=Net())
    with pytest.raises(
        StateMismatchError, match=r"rng: model\.body\.1\.generator: no part holds this generator"
    ):
        restore(tmp_path / "with", model=Net(with_noise=False))
    restore(tmp_path / "with", model=Net(with_noise=False), allow=["*.generator"])
    save(tmp_path / "without", model=Net(with_noise=False))
    with pytest.raises(StateMismatchError, match=r"rng: model\.body\.1\.generator: the checkpoint lacks"):
        restore(tmp_path / "without", model=Net())
    restore(tmp_path / "without", model=Net(), allow=["*.generator"])


@dataclass
class Augment:
    flips: random.Random
    n: int = 0


class Sampler:
    def __init__(self, seed: int) -> None:
        self.rng, self.n = np.random.default_rng(seed), 0


def holders(seed: int) -> dict[str, Any]:
    return {
        "settings": {"rng": random.Random(seed), "inner": [torch.Generator().manual_seed(seed)], "n": 0},
        "augment": Augment(random.Random(seed + 1)),
        "sampler": Sampler(seed),
    }


def draw_all(parts: dict[str, Any]) -> list[float]:
    return [
        parts["settings"]["rng"].random(),
        float(torch.rand((), generator=parts["settings"]["inner"][0])),
        parts["augment"].flips.random(),
        float(parts["sampler"].rng.random()),
    ]


def test_those_in_dictionaries_dataclasses_and_objects_go_on(tmp_path: Path) -> None:
    parts = holders(1)
    draw_all(parts)
    parts["settings"]["n"] = parts["augment"].n = parts["sampler"].n = 3
    save(tmp_path, **parts)
    expected = draw_all(parts)
    again = holders(2)
    places = again["settings"]["rng"], again["augment"].flips, again["sampler"].rng
    restore(tmp_path, **again)
    assert places == (again["settings"]["rng"], again["augment"].flips, again["sampler"].rng)
    assert (again["settings"]["n"], again["augment"].n, again["sampler"].n) == (3, 3, 3)
    assert draw_all(again) == expected


def test_one_that_is_gone_from_a_dictionary_is_refused_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path, settings={"n": 1, "rng": random.Random(1)})
    again = {"n": 0}
    with pytest.raises(StateMismatchError, match=r"rng: settings\['rng'\]: no part holds this generator"):
        restore(tmp_path, settings=again)
    restore(tmp_path, settings=again, allow=["settings*"])
    assert again == {"n": 1}


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.Sequential(nn.DataParallel(model))])
def test_a_data_parallel_wrapper_changes_no_names(tmp_path: Path, wrap: Any) -> None:
    outer = wrap is not nn.DataParallel
    model = Net()
    save(tmp_path, model=wrap(model))
    expected = model.draw()
    again = Net()
    restore(tmp_path, model=nn.Sequential(again) if outer else again)
    assert again.draw() == expected


class LateNoise(nn.Module):
    """Makes its generator with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)
        return inputs + torch.randn(inputs.shape, generator=self.generator)


@pytest.mark.parametrize("late", [LateNoise, dict, SimpleNamespace])
def test_one_that_is_made_in_the_first_step_is_told_once(
    tmp_path: Path, late: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    part = late()
    with unbroken.Run(tmp_path, known=Net(), part=part) as run:
        for _ in range(3):
            if isinstance(part, nn.Module):
                part(torch.zeros(2))
            elif isinstance(part, dict):
                part.setdefault("generator", random.Random(1))
            else:
                part.generator = random.Random(1)
            run.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "a random generator that was" in line]
    place = "part['generator']" if isinstance(part, dict) else "part.generator"
    assert lines == [
        f"unbroken: not kept: {place}: a random generator that was made after the run was entered"
    ]


@pytest.mark.parametrize(("saved", "here"), [(2, 1), (1, 2)])
def test_another_number_of_cuda_devices_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, here: int
) -> None:
    states = [torch.zeros(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a stand-in")
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state))
    states[:] = [torch.full((16,), device + 1, dtype=torch.uint8) for device in range(saved)]
    save(tmp_path, n={})
    states[:] = [torch.zeros(16, dtype=torch.uint8)] * here
    with pytest.raises(
        StateMismatchError, match=f"cuda: the state has {saved} CUDA devices, there are {here}"
    ):
        restore(tmp_path, n={})
    restore(tmp_path, n={}, allow=["rng.cuda"])
    assert [int(state[0]) for state in states] == ([1] if here == 1 else [1, 0])
