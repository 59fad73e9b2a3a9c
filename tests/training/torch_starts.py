"""Trainings of plain torch that a run begins from: built, trained, saved as others save, begun from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError

INPUTS = torch.linspace(-1, 1, 24).reshape(6, 4)
TARGETS = torch.linspace(0, 1, 12).reshape(6, 2)
Parts = dict[str, Any]
Build = Callable[[], Parts]


def model(width: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))


def sgd() -> Parts:
    net = model()
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)}


def plain_sgd() -> Parts:
    net = model()
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def adam() -> Parts:
    net = model()
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True)}


def grouped(schedule: Callable[[Any], Any]) -> Parts:
    net = model()
    groups = [
        {"params": [item for item in net.parameters() if item.dim() > 1], "weight_decay": 0.1},
        {"params": [item for item in net.parameters() if item.dim() < 2], "weight_decay": 0.0, "lr": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    return {"model": net, "optimizer": optimizer, "scheduler": schedule(optimizer)}


def stepped() -> Parts:
    return grouped(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))


def one_cycle() -> Parts:
    return grouped(lambda optimizer: OneCycleLR(optimizer, [0.1, 0.02], total_steps=12))


def sequence() -> Parts:
    return grouped(
        lambda optimizer: SequentialLR(
            optimizer, [MultiStepLR(optimizer, [2, 4]), CosineAnnealingLR(optimizer, 9)], milestones=[5]
        )
    )


def chain() -> Parts:
    return grouped(
        lambda optimizer: ChainedScheduler([StepLR(optimizer, 2, gamma=0.5), MultiStepLR(optimizer, [3, 7])])
    )


BUILDS = {build.__name__: build for build in (sgd, plain_sgd, adam, stepped, one_cycle, sequence, chain)}


def train(parts: Parts, count: int, each: Callable[[], object] = lambda: None) -> None:
    for _ in range(count):
        parts["optimizer"].zero_grad()
        ((parts["model"](INPUTS) - TARGETS) ** 2).mean().backward()
        parts["optimizer"].step()
        if "scheduler" in parts:
            parts["scheduler"].step()
        each()


def trained(build: Build, count: int = 4) -> Parts:
    parts = build()
    train(parts, count)
    return parts


def states(parts: Parts) -> Parts:
    return {name: part.state_dict() for name, part in parts.items()}


def saved(path: Path, build: Build, count: int = 4, **more: Any) -> Path:
    """Write what a plain script does, after `count` steps."""
    torch.save({**states(trained(build, count)), **more}, path)
    return path


def bits(value: Any) -> Any:
    """Return a state as values that are equal only if every bit is."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def begin(directory: Path, source: Path, parts: Parts, **choices: Any) -> unbroken.Run:
    return unbroken.Run(directory / "run", start_from=source, **parts, **choices)


def refused(
    directory: Path, source: Path, parts: Parts, kind: type[Exception] = StateMismatchError, **choices: Any
) -> str:
    """Return why `source` is refused, once nothing was changed by that, neither here nor on disk."""
    before = bits(states(parts))
    with pytest.raises(kind) as error, begin(directory, source, parts, **choices):
        pass
    assert bits(states(parts)) == before
    assert CheckpointStore(directory / "run").names() == []
    assert error.value.hint  # type: ignore[attr-defined]
    return str(error.value)


def said(run: unbroken.Run) -> str:
    assert run.started_from is not None
    return "\n".join(run.started_from.lines())


def lightning(directory: Path, build: Build, prefix: str = "model.", **more: Any) -> Path:
    """Write a checkpoint as Lightning lays it out, whose module has the model as its child."""
    found = states(trained(build))
    content = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"{prefix}{name}": item for name, item in found["model"].items()},
        "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [found["optimizer"]],
        "lr_schedulers": [found["scheduler"]] if "scheduler" in found else [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.05},
        **more,
    }
    torch.save(content, directory / "last.ckpt")
    return directory / "last.ckpt"


def trainer(directory: Path, build: Build, *, is_sharded: bool = False, is_pickled: bool = False) -> Path:
    """Write a folder as the Trainer of Hugging Face lays it out."""
    found = states(trained(build))
    folder = directory / "checkpoint-4"
    folder.mkdir()
    weights = found["model"]
    if is_pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    elif is_sharded:
        files = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
        where = {name: files[index % 2] for index, name in enumerate(weights)}
        for file in files:
            save_file({name: weights[name] for name in weights if where[name] == file}, folder / file)
        index = {"metadata": {"total_size": 1}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, folder / "model.safetensors")
    torch.save(found["optimizer"], folder / "optimizer.pt")
    torch.save(found["scheduler"], folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(
        json.dumps({"epoch": 2.0, "global_step": 4, "log_history": []})
    )
    return folder


def of_kind(kind: Any, **options: Any) -> Build:
    def build() -> Parts:
        net = model()
        return {"model": net, "optimizer": kind(net.parameters(), lr=0.05, **options)}

    return build
