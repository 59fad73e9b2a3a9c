"""The process-wide generators: their states are plain, small, and come back exactly."""

from __future__ import annotations

import ast
import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.frameworks.rng import capture_global_rng, restore_present_rng, rng_differences


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = capture_global_rng()
    yield
    restore_present_rng(before)


def draws() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), float(torch.randn(()))]


def in_fresh_python(program: str, state: object = None) -> str:
    """Run a program that finds `state` in a process that has imported neither numpy nor torch."""
    header = (
        "import ast, random, sys\n"
        "from unbroken.frameworks.rng import capture_global_rng, restore_present_rng\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "state = ast.literal_eval(sys.stdin.read())\n"
    )
    command = [sys.executable, "-c", header + program]
    done = subprocess.run(command, input=repr(state), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_generator_draws_the_same_again_after_restoring() -> None:
    state = capture_global_rng()
    first = [draws() for _ in range(5)]

    restore_present_rng(state)

    assert [draws() for _ in range(5)] == first


def test_a_normal_draw_that_a_generator_holds_back_is_part_of_its_state() -> None:
    # Each of the three makes normal numbers in pairs and keeps the second one for later.
    random.gauss(0, 1)
    np.random.normal()
    torch.randn((), dtype=torch.float64)
    state = capture_global_rng()
    first = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)

    restore_present_rng(state)

    assert draws() == first


def test_a_state_is_plain_values_that_survive_being_written_as_text() -> None:
    state = capture_global_rng()
    first = draws()

    text = repr(state)
    restore_present_rng(ast.literal_eval(text))

    assert draws() == first
    assert sum(len(words) for words in _bytes_in(state)) < 12_000


def test_capturing_draws_nothing() -> None:
    state = capture_global_rng()

    for _ in range(3):
        capture_global_rng()

    assert capture_global_rng() == state


def test_capturing_imports_nothing() -> None:
    program = "print(list(capture_global_rng()), 'numpy' in sys.modules, 'torch' in sys.modules)"

    assert in_fresh_python(program) == "['python'] False False"


def test_a_library_that_the_state_names_is_imported_to_restore_it() -> None:
    state = {name: value for name, value in capture_global_rng().items() if name != "torch"}
    expected = np.random.rand()

    found = in_fresh_python(
        "restore_present_rng(state); import numpy; print(numpy.random.rand().hex())", state
    )

    assert found == expected.hex()


def test_the_generator_of_a_library_that_came_into_use_since_is_left_as_it_is() -> None:
    state = capture_global_rng()
    numpy_before = state.pop("numpy")
    random.random()

    restore_present_rng(state)

    assert capture_global_rng() == {**state, "numpy": numpy_before}


def test_a_library_that_is_not_installed_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    state = capture_global_rng()
    find = importlib.util.find_spec

    def find_all_but_numpy(name: str, package: str | None = None) -> object:
        return None if name == "numpy" else find(name, package)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", find_all_but_numpy)
        differences = [str(difference) for difference in rng_differences(state)]
        restore_present_rng(state)

    assert len(differences) == 1
    assert "numpy is not installed here" in differences[0]


class FakeDevices:
    """Stands in for the part of torch.cuda that keeps generators, for machines without a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.tensor([device] * 16, dtype=torch.uint8) for device in range(count)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


def test_each_cuda_device_gets_its_own_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        devices = FakeDevices(patched, 2)
        state = capture_global_rng()
        devices.states = [torch.zeros(16, dtype=torch.uint8)] * 2

        restore_present_rng(state)

    assert [device.tolist() for device in devices.states] == [[0] * 16, [1] * 16]


def test_cuda_devices_that_came_into_use_since_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: value for name, value in capture_global_rng().items() if name != "cuda"}

    with monkeypatch.context() as patched:
        devices = FakeDevices(patched, 1)
        before = [device.tolist() for device in devices.states]
        restore_present_rng(state)

    assert [device.tolist() for device in devices.states] == before


def _bytes_in(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _bytes_in(item)


@pytest.mark.parametrize(("saved", "here", "after"), [(2, 1, [0]), (1, 2, [0, 9])])
def test_another_number_of_devices_is_told_and_those_that_are_on_both_sides_are_restored(
    monkeypatch: pytest.MonkeyPatch, saved: int, here: int, after: list[int]
) -> None:
    with monkeypatch.context() as patched:
        FakeDevices(patched, saved)
        state = capture_global_rng()
    with monkeypatch.context() as patched:
        devices = FakeDevices(patched, here)
        devices.states = [torch.full((16,), 9, dtype=torch.uint8)] * here
        differences = [str(difference) for difference in rng_differences(state)]
        restore_present_rng(state)

    assert [int(device[0]) for device in devices.states] == after
    assert len(differences) == 1
    assert f"the state has {saved} CUDA devices, there are {here} here" in differences[0]
