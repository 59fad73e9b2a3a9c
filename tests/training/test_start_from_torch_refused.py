"""What does not fit the program in a checkpoint of torch is named, and nothing is changed then."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from unbroken.errors import DamagedError, UnbrokenError, UsageError

from .runs import flip
from .torch_starts import (
    Build,
    Parts,
    adam,
    begin,
    bits,
    grouped,
    model,
    of_kind,
    one_cycle,
    refused,
    said,
    saved,
    sequence,
    sgd,
    states,
    stepped,
    train,
    trained,
    trainer,
)


def wider() -> Parts:
    net = model(5)
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True)}


def halved() -> Parts:
    net = model().double()
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True)}


def fewer() -> Parts:
    net = model()
    return {"model": net, "optimizer": torch.optim.Adam(net[0].parameters(), lr=0.05, amsgrad=True)}


def two_groups() -> Parts:
    net = model()
    groups = [{"params": net[0].parameters()}, {"params": [*net[1].parameters(), *net[3].parameters()]}]
    return {"model": net, "optimizer": torch.optim.Adam(groups, lr=0.05, amsgrad=True)}


def backwards() -> Parts:
    net = model()
    return {
        "model": net,
        "optimizer": torch.optim.Adam(list(net.parameters())[::-1], lr=0.05, amsgrad=True),
    }


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (wider, "model: 0.weight: shape (5, 4), the checkpoint has shape (3, 4)"),
        (wider, "optimizer: model.0.weight: exp_avg has shape (3, 4) in the checkpoint, here (5, 4)"),
        (halved, "model: 0.weight: dtype torch.float64, the checkpoint has dtype torch.float32"),
        (of_kind(torch.optim.SGD, momentum=0.9), "optimizer: group 0 betas: the checkpoint has this option"),
        (of_kind(torch.optim.RAdam), "optimizer: group 0 amsgrad: the checkpoint has this option"),
        (of_kind(torch.optim.AdamW), "optimizer: group 0 decoupled_weight_decay: True here, False in the"),
        (fewer, "optimizer: group 0: 2 parameters, the checkpoint has 6"),
        (two_groups, "optimizer: 2 parameter groups, the checkpoint has 1"),
        (backwards, "optimizer: model.3.bias: exp_avg has shape (3, 4) in the checkpoint, here (2,)"),
        (stepped, "scheduler: the checkpoint lacks this part"),
        (lambda: {"model": model()}, "optimizer: the program lacks this part"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(build: Build, line: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", adam)
    assert line in refused(tmp_path, source, build())


def test_moments_that_the_optimizer_would_not_keep_are_refused(tmp_path: Path) -> None:
    content = states(trained(adam))
    for entries in content["optimizer"]["state"].values():
        del entries["max_exp_avg_sq"]
    torch.save(content, tmp_path / "old.pt")
    words = refused(tmp_path, tmp_path / "old.pt", adam())
    assert (
        "model.0.weight: a Adam keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step, the checkpoint has" in words
    )
    content["optimizer"]["state"] = {}
    torch.save(content, tmp_path / "old.pt")
    assert "for each parameter, the checkpoint has nothing" in refused(tmp_path, tmp_path / "old.pt", adam())


def test_names_that_a_file_has_for_parameters_are_compared(tmp_path: Path) -> None:
    def named(order: int) -> Parts:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return {"model": net, "optimizer": torch.optim.SGD([*net.named_parameters()][::order], lr=0.1)}

    torch.save(states(named(1)), tmp_path / "old.pt")
    words = refused(tmp_path, tmp_path / "old.pt", {**named(-1)})
    assert "model.1.bias: in its place in group 0 the checkpoint has 0.weight" in words
    with begin(tmp_path, tmp_path / "old.pt", named(1)):
        pass


def twins(names: list[str], prefix: str = "") -> Parts:
    """Two layers of one shape, whose optimizer has a group for each, in the order of `names`."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    found = dict(net.named_parameters())
    groups = [{"params": [(f"{prefix}{name}", found[name])]} for name in names]
    return {"model": net, "optimizer": torch.optim.Adam(groups, lr=0.05)}


@pytest.mark.parametrize("prefix", ["", "net.", "module.of.net."])
def test_names_are_compared_over_all_groups_and_whatever_stands_before_them(
    prefix: str, tmp_path: Path
) -> None:
    names = ["0.weight", "2.weight"]
    source = twins(names, prefix)
    for item in source["model"].parameters():
        item.grad = torch.ones_like(item)
    source["optimizer"].step()
    torch.save(states(source), tmp_path / "old.pt")
    found = refused(tmp_path, tmp_path / "old.pt", twins(names[::-1]))
    assert "model.2.weight: in its place in group 0 the checkpoint has 0.weight" in found
    with begin(tmp_path, tmp_path / "old.pt", twins(names)) as run:
        assert run.step_count == 1


def test_moments_of_another_dtype_are_refused(tmp_path: Path) -> None:
    content = states(trained(adam))
    for entries in content["optimizer"]["state"].values():
        entries["exp_avg"] = entries["exp_avg"].half()
    torch.save(content, tmp_path / "old.pt")
    found = refused(tmp_path, tmp_path / "old.pt", adam())
    assert "exp_avg is of F16 in the checkpoint, here of F32" in found


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        (lambda it: StepLR(it, 3, gamma=0.5), "scheduler: step_size: 2 is kept, the script sets 3"),
        (lambda it: CosineAnnealingLR(it, 9), "scheduler: T_max: the checkpoint lacks it"),
        (lambda it: CosineAnnealingLR(it, 9), "scheduler: step_size: there is no such thing here"),
    ],
)
def test_settings_of_the_file_are_in_force_and_another_scheduler_is_refused(
    schedule: Callable[[Any], Any], line: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "old.pt", stepped)
    parts = grouped(schedule)
    if "is kept" in line:
        with begin(tmp_path, source, parts) as run:
            assert line in said(run)
        assert bits(states(parts)) == bits(states(trained(stepped)))
    else:
        assert line in refused(tmp_path, source, parts)


def test_another_length_of_a_schedule_is_a_choice(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", one_cycle)
    longer = grouped(lambda optimizer: OneCycleLR(optimizer, [0.1, 0.02], total_steps=24))
    assert "total_steps is 12 in the checkpoint, 24 in the script" in refused(tmp_path, source, longer)
    with begin(tmp_path, source, longer, horizon="keep") as run:
        train(longer, 3, run.step)
    assert bits(longer["model"].state_dict()) == bits(trained(one_cycle, 7)["model"].state_dict())


def test_of_two_states_that_may_be_meant_one_is_to_be_named(tmp_path: Path) -> None:
    content = states(trained(sgd))
    averaged = {
        name: item + 1 if item.is_floating_point() else item for name, item in content["model"].items()
    }
    torch.save({"weights": content.pop("model"), "ema": averaged, **content}, tmp_path / "old.pt")
    words = refused(tmp_path, tmp_path / "old.pt", sgd(), UsageError)
    assert "expected one state for 'model', found weights, ema" in words
    named = {"rename": {"ema": "model"}}
    assert "weights: the program lacks this part" in refused(tmp_path, tmp_path / "old.pt", sgd(), **named)
    parts = sgd()
    with begin(tmp_path, tmp_path / "old.pt", parts, **named, allow=["weights"]):
        assert bits(parts["model"].state_dict()) == bits(averaged)


def test_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", adam)
    weight = trained(adam)["model"][3].weight.detach().numpy().tobytes()
    flip(source, source.read_bytes().index(weight))
    assert "expected a whole checkpoint" in refused(tmp_path, source, adam(), DamagedError)
    folder = trainer(tmp_path, stepped)
    (folder / "scheduler.pt").unlink()
    assert "scheduler.pt is missing" in refused(tmp_path, folder, stepped(), DamagedError)


class Sneaky:
    """An object that would run code if it were loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.place,))


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    source = saved(tmp_path / "old.pt", adam, args=Sneaky(tmp_path / "executed"))
    with begin(tmp_path, source, adam()) as run:
        assert "not taken over: args" in said(run)
    content = states(trained(adam))
    content["optimizer"]["param_groups"][0]["eps"] = Sneaky(tmp_path / "executed")
    torch.save(content, tmp_path / "other.pt")
    words = refused(tmp_path / "other", tmp_path / "other.pt", adam())
    assert "optimizer: param_groups.0.eps: an object of class" in words
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda group, state: group.update(betas=[0.9]),
        lambda group, state: group.update(lr="fast"),
        lambda group, state: group.update(params=[0, 0, 1, 2, 3, 4]),
        lambda group, state: group.update(params="all"),
        lambda group, state: group.update(amsgrad=torch.ones(2)),
        lambda group, state: state.update({9: {"step": torch.tensor(1.0)}}),
        lambda group, state: state.update({0: [1.0]}),
        lambda group, state: state[0].update(exp_avg=3.0),
        lambda group, state: state[0].update(exp_avg=torch.ones(2)),
        lambda group, state: state[0].update(step=torch.ones(3)),
    ],
)
def test_a_state_that_no_optimizer_has_is_refused_whole(spoil: Callable[..., None], tmp_path: Path) -> None:
    content = states(trained(adam))
    spoil(content["optimizer"]["param_groups"][0], content["optimizer"]["state"])
    torch.save(content, tmp_path / "old.pt")
    refused(tmp_path, tmp_path / "old.pt", adam())


def test_what_is_no_checkpoint_of_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    refused(tmp_path, tmp_path / "notes.txt", sgd(), UsageError)
    assert "which does not exist" in refused(tmp_path, tmp_path / "absent.pt", sgd(), UsageError)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return the containers in a state, each with one of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in pairs:
        found += [(value, key), *places_in(item)]
    return found


ODD: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "text",
    lambda: -1,
    lambda: 10**5000,
    lambda: float("nan"),
    lambda: float("inf"),
    list,
    lambda: [[1, 2], {}],
    dict,
    lambda: {"state": {}, "param_groups": []},
    lambda: {"$tensor": "model/0.weight"},
    lambda: {"$object": 1, 2: (3,)},
    lambda: torch.ones(3),
    lambda: torch.ones(()),
    lambda: torch.ones(1).expand(1 << 20, 1 << 20),
    lambda: torch.ones(3, dtype=torch.complex64),
    lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    lambda: b"bytes" * 30,
    lambda: {1.5: True, None: (), (1, 2): {3}},
    lambda: torch.float32,
)


@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("seed", range(60))
def test_whatever_stands_in_a_file_it_is_taken_whole_or_refused_whole(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    build = draw.choice([sequence, one_cycle, stepped, adam])
    content: Parts = copy.deepcopy({**states(trained(build)), "epoch": 1})
    for _ in range(draw.choice((1, 1, 2))):
        container, key = draw.choice(places_in(content))
        if draw.random() < 0.2 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = draw.choice(ODD)()
    torch.save(content, tmp_path / "old.pt")
    parts = build()
    before = bits(states(parts))
    try:
        with begin(tmp_path, tmp_path / "old.pt", parts):
            pass
    except UnbrokenError:
        assert bits(states(parts)) == before
    else:
        assert bits(parts["model"].state_dict()) == bits(content["model"])


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(30))
def test_a_file_with_other_bytes_is_taken_as_it_was_or_refused(seed: int, tmp_path: Path) -> None:
    source, draw = saved(tmp_path / "old.pt", stepped), random.Random(seed)
    data = bytearray(source.read_bytes())
    for _ in range(draw.choice((1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    source.write_bytes(data[: len(data) if seed % 3 else draw.randrange(len(data))])
    parts = stepped()
    before = bits(states(parts))
    try:
        with begin(tmp_path, source, parts):
            pass
    except UnbrokenError:
        assert bits(states(parts)) == before
    else:
        assert bits(states(parts)) == bits(states(trained(stepped)))
