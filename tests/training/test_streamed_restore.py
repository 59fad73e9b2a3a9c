"""A restore reads straight into live tensors: no second copy, and the same guarantees."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import DamagedError

WIDTH = 2048


def built(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": tensor.clone() for name, tensor in state.items()}
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    model, optimizer = built()
    states = []
    with unbroken.Run(tmp_path, save=[unbroken.EverySteps(1)], model=model, optimizer=optimizer) as run:
        for _ in range(2):
            train(model, optimizer)
            states.append(values(model, optimizer))
            run.step()
    return tmp_path, states


def peak_memory() -> int:
    """The highest resident memory since it was reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_a_restore_holds_no_second_copy_of_the_state(saved: Any) -> None:
    directory, states = saved
    size = CheckpointStore(directory).latest().manifest.size_bytes
    model, optimizer = built(seed=1)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with unbroken.Run(directory, save=[], model=model, optimizer=optimizer):
        extra = peak_memory() - before
        assert equal(values(model, optimizer), states[-1])
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    # The moments are new, two thirds of the state; beside them there are four pieces of 8 MiB.
    assert size > 48 << 20
    assert extra < 2 / 3 * size + (40 << 20)


def test_damage_that_is_found_in_the_middle_leads_to_the_next_older_checkpoint(saved: Any) -> None:
    directory, states = saved
    path = directory / "checkpoints/step-00000002/optimizer-00.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model, optimizer = built(seed=1)
    with unbroken.Run(directory, save=[], model=model, optimizer=optimizer) as run:
        assert run.restored is not None
        assert (run.restored.checkpoint, list(run.restored.passed_over)) == (
            "step-00000001",
            ["step-00000002"],
        )
        assert equal(values(model, optimizer), states[0])


def test_a_run_without_any_intact_checkpoint_does_not_train_with_what_was_read(saved: Any) -> None:
    directory, _ = saved
    for name in ("step-00000001", "step-00000002"):
        path = directory / f"checkpoints/{name}/model-00.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    model, optimizer = built(seed=1)
    with (
        pytest.raises(DamagedError, match="expected an intact checkpoint, found 2 damaged"),
        unbroken.Run(directory, model=model, optimizer=optimizer),
    ):
        pytest.fail("it was entered")


def test_what_the_script_changes_after_entering_is_read_again_before_the_first_step(saved: Any) -> None:
    directory, states = saved
    model, optimizer = built(seed=1)
    with unbroken.Run(directory, save=[], model=model, optimizer=optimizer) as run:
        train(model, optimizer)
        optimizer.state.clear()
        for _ in run.epochs(1):
            assert equal(values(model, optimizer), states[-1])


def test_tied_weights_stay_tied_and_are_read_once(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"one": nn.Linear(600, 600), "two": nn.Linear(600, 600)})
        model["two"].weight = model["one"].weight
        return model

    first = tied()
    with unbroken.Run(tmp_path, model=first) as run:
        run.step()
    second = tied()
    with unbroken.Run(tmp_path, model=second):
        assert second["two"].weight is second["one"].weight
        assert torch.equal(second["one"].weight, first["one"].weight)


def test_frozen_weights_are_written_once_and_every_directory_stays_whole(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base": nn.Linear(700, 700), "adapter": nn.Linear(700, 8)})
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["adapter"].parameters())
    with unbroken.Run(
        tmp_path, save=[unbroken.EverySteps(1)], keep=[], model=model, optimizer=optimizer
    ) as run:
        for _ in range(3):
            train(model["adapter"], optimizer)
            run.step()
        # Behind the back of every counter of torch: only the bytes tell.
        model["base"].weight.data.numpy()[0, 0] += 1
        run.step()
    places = [
        tmp_path / f"checkpoints/step-0000000{step}/model-frozen-00.safetensors" for step in (1, 2, 3, 4)
    ]
    one, two, three, changed = (place.stat().st_ino for place in places)
    assert one == two == three != changed
    store = CheckpointStore(tmp_path)
    for name in store.names()[:2]:
        store.storage.delete(f"checkpoints/{name}")
    assert all(store.get(name).verify().is_intact for name in store.names())
    saved = store.latest().load_tensors(["model/base.weight"])["model/base.weight"]
    assert bytes(saved.data) == model["base"].weight.detach().numpy().tobytes()


def test_frozen_weights_are_not_written_again_by_the_next_attempt(tmp_path: Path) -> None:
    def trained() -> None:
        model = nn.ModuleDict({"base": nn.Linear(700, 700), "adapter": nn.Linear(700, 8)})
        model["base"].requires_grad_(False)
        with unbroken.Run(tmp_path, keep=[], model=model) as run:
            run.step()

    trained()
    trained()
    names = CheckpointStore(tmp_path).names()
    assert len(names) == 2
    files = [tmp_path / "checkpoints" / name / "model-frozen-00.safetensors" for name in names]
    assert files[0].samefile(files[1])


def test_an_optimizer_that_has_its_state_already_gets_it_where_it_is(saved: Any) -> None:
    directory, states = saved
    model, optimizer = built(seed=1)
    train(model, optimizer)
    before = {key: item.data_ptr() for key, item in moments(optimizer).items()}
    with unbroken.Run(directory, save=[], model=model, optimizer=optimizer):
        assert equal(values(model, optimizer), states[-1])
        after = {key: item.data_ptr() for key, item in moments(optimizer).items()}
        assert {key: after[key] for key in before} == before


def test_live_tensors_that_share_memory_by_mistake_get_their_own_values(saved: Any) -> None:
    directory, states = saved
    model, optimizer = built(seed=1)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg"]
    with unbroken.Run(directory, save=[], model=model, optimizer=optimizer):
        assert equal(values(model, optimizer), states[-1])


def moments(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (index, name): item
        for index, state in enumerate(optimizer.state.values())
        for name, item in state.items()
        if name != "step" and item.is_contiguous()
    }
