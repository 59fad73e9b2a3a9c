"""Wrappers change no names: any of them at a save, any other at the restore, outside or in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.frameworks.torch.wrappers import unwrap

from ..some import named, some

Wrap: TypeAlias = Callable[[nn.Module], nn.Module]


class Sharded(nn.Module):
    """Puts the segment of a sharding wrapper into names, as torch's does in what is not its state_dict."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *inputs: Any) -> Any:
        return self._fsdp_wrapped_module(*inputs)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def parallel(module: nn.Module) -> nn.Module:
    return nn.DataParallel(module)


def plain(module: nn.Module) -> nn.Module:
    return module


OUTSIDE: dict[str, Wrap] = {
    "plain": plain,
    "compiled": compiled,
    "parallel": parallel,
    "compiled in parallel": lambda module: parallel(compiled(module)),
    "parallel in compiled": lambda module: compiled(parallel(module)),
    "sharded": Sharded,
    "checkpointed": checkpoint_wrapper,
    "all": lambda module: compiled(Sharded(parallel(checkpoint_wrapper(module)))),
}


class Block(nn.Module):
    """Has a child called `module`, which no wrapper put there, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.norm(self.module(inputs))
        return outputs / self.calls


def build(wrap: Wrap = plain, inside: Wrap = plain) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = nn.Sequential(inside(Block()), nn.Sequential(inside(nn.Linear(3, 3))), Block())
    inner[1].requires_grad_(False)
    inner[1].eval()
    return inner, wrap(inner), torch.optim.AdamW(inner.parameters(), lr=0.1)


def train(
    directory: Path, steps: int, wrap: Wrap = plain, inside: Wrap = plain
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train up to `steps`; return the weights by the names of an unwrapped model, and the manifest."""
    inner, model, optimizer = build(wrap, inside)
    with unbroken.Run(directory, model=model, optimizer=optimizer) as run:
        while run.step_count < steps:
            optimizer.zero_grad()
            # Not through what compiles, or computes twice: the names are what matters here.
            inner_forward(inner, torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            run.step()
    weights = [tensor.detach().clone() for tensor in [*inner.parameters(), *inner.buffers()]]
    names = [name for name, _ in [*build()[0].named_parameters(), *build()[0].named_buffers()]]
    return dict(zip(names, weights, strict=True)), CheckpointStore(directory).latest().manifest


def inner_forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    for module in (model[0], model[1][0], model[2]):  # type: ignore[index]
        inputs = unwrap(module)(inputs)
    return inputs


def keys_of(state: Any) -> Any:
    return {key: keys_of(item) for key, item in state.items()} if isinstance(state, dict) else None


@pytest.fixture
def reference(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    return train(tmp_path / "whole", 4)


@pytest.mark.parametrize(
    ("first", "other"), some(named(OUTSIDE), named(["plain", "compiled", "parallel"]), one_in=3)
)
def test_any_wrapper_restores_into_any_other(
    tmp_path: Path, reference: tuple[dict[str, torch.Tensor], Any], first: str, other: str
) -> None:
    train(tmp_path / "r", 2, OUTSIDE[first])
    weights, manifest = train(tmp_path / "r", 4, OUTSIDE[other])
    for name, tensor in reference[0].items():
        assert torch.equal(weights[name], tensor), name
    assert manifest.parts["model"].state == reference[1].parts["model"].state
    assert manifest.parts["optimizer"].state == reference[1].parts["optimizer"].state


@pytest.mark.parametrize("first", OUTSIDE)
def test_wrappers_in_the_middle_of_a_name_change_no_names(
    tmp_path: Path, reference: tuple[dict[str, torch.Tensor], Any], first: str
) -> None:
    train(tmp_path / "r", 1, plain, OUTSIDE[first])
    train(tmp_path / "r", 2, compiled, plain)
    train(tmp_path / "r", 3, parallel, OUTSIDE[first])
    weights, manifest = train(tmp_path / "r", 4)
    for name, tensor in reference[0].items():
        assert torch.equal(weights[name], tensor), name
    assert manifest.parts["model"].state == reference[1].parts["model"].state


def test_a_chain_of_resumes_has_the_same_keys_in_every_checkpoint(tmp_path: Path) -> None:
    chain = [("compiled", 1), ("compiled in parallel", 2), ("sharded", 3), ("plain", 4)]
    manifests = [train(tmp_path / "r", steps, OUTSIDE[wrap])[1] for wrap, steps in chain]
    for manifest in manifests[1:]:
        assert manifest.tensors.keys() == manifests[0].tensors.keys()
        for part in ("model", "optimizer"):
            assert keys_of(manifest.parts[part].state) == keys_of(manifests[0].parts[part].state)
    names = manifests[0].parts["model"].state.keys()
    assert "0.module.weight" in names
    assert not any("_orig_mod" in name or name.startswith("module.") for name in names)


@pytest.mark.parametrize("wrap", ["plain", "compiled", "parallel", "compiled in parallel"])
@pytest.mark.parametrize("again", ["plain", "compiled"])
def test_an_average_of_a_wrapped_model_is_the_average_of_the_model(
    tmp_path: Path, wrap: str, again: str
) -> None:
    model = build(OUTSIDE[wrap])[1]
    average = AveragedModel(model)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        average.update_parameters(model)
    with unbroken.Run(tmp_path, model=model, average=average) as run:
        run.step()
    names = CheckpointStore(tmp_path).latest().manifest.parts["average"].state.keys()
    assert {"n_averaged", "module.0.module.weight"} <= names
    other = build(OUTSIDE[again])[1]
    other_average = AveragedModel(other)
    with unbroken.Run(tmp_path, resume="must", model=other, average=other_average):
        assert int(other_average.n_averaged) == 2
        for one, two in ((model, other), (average, other_average)):
            for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
                assert torch.equal(mine, theirs)
        assert not torch.equal(next(other.parameters()), next(other_average.parameters()))


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views of buckets"])
def test_a_distributed_model_goes_on_as_a_plain_one_and_back(
    tmp_path: Path, reference: tuple[dict[str, torch.Tensor], Any], views: bool
) -> None:
    def distributed(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=views)

    def through(steps: int, wrap: Wrap) -> Any:
        inner, model, optimizer = build(wrap)
        with unbroken.Run(tmp_path / "r", model=model, optimizer=optimizer) as run:
            while run.step_count < steps:
                optimizer.zero_grad(set_to_none=run.step_count % 2 == 0)
                model(torch.randn(4, 3)).square().sum().backward()
                optimizer.step()
                run.step()
        return inner

    through(1, distributed)
    through(2, plain)
    through(3, distributed)
    found = dict(through(4, plain).named_parameters())
    for name, tensor in reference[0].items():
        assert name not in found or torch.equal(found[name], tensor), name


def test_the_average_and_its_model_are_three_things_that_go_on(tmp_path: Path) -> None:
    def run_to(directory: Path, steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = AveragedModel(model, use_buffers=True)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=4)
        parts = {"model": model, "optimizer": optimizer, "average": average, "schedule": schedule}
        with unbroken.Run(directory, **parts) as run:
            while run.step_count < steps:
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().sum().backward()
                optimizer.step()
                average.update_parameters(model)
                schedule.step()
                run.step()
        rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
        assert int(average.n_averaged) == steps
        return [*model.state_dict().values(), *average.state_dict().values(), rate]

    expected = run_to(tmp_path / "whole", 6)
    for steps in (2, 3):
        run_to(tmp_path / "stopped", steps)
    found = run_to(tmp_path / "stopped", 6)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[7])


class HandWritten:
    """An average as many write it: a dictionary of shadows, no state_dict."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.backup: dict[str, torch.Tensor] = {}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, tensor in model.named_parameters():
            self.shadow[name] = decay * self.shadow[name] + (1 - decay) * tensor.detach()


def test_an_average_that_is_a_plain_object_goes_on(tmp_path: Path) -> None:
    def run_to(directory: Path, steps: int) -> HandWritten:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        average = HandWritten(model, 0.99)
        with unbroken.Run(directory, model=model, optimizer=optimizer, average=average) as run:
            while run.step_count < steps:
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().sum().backward()
                optimizer.step()
                average.update(model)
                run.step()
        return average

    expected = run_to(tmp_path / "whole", 6)
    for steps in (2, 3):
        run_to(tmp_path / "stopped", steps)
    found = run_to(tmp_path / "stopped", 6)
    assert found.updates == expected.updates == 6
    assert all(torch.equal(found.shadow[name], tensor) for name, tensor in expected.shadow.items())


def test_a_deep_copy_of_a_compiled_model_is_a_wrapper_too(tmp_path: Path) -> None:
    model = compiled(nn.Linear(2, 2))
    with unbroken.Run(tmp_path, model=copy.deepcopy(model)) as run:
        run.step()
    assert {"weight", "bias"} <= CheckpointStore(tmp_path).latest().manifest.parts["model"].state.keys()
