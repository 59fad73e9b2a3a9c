"""What modules keep beside tensors, through whole runs: counters, buffers asked for, and what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import StateMismatchError, UnsupportedStateError, UsageError


class Warming(nn.Module):
    """Its gain follows from how often it was called, and from a running mean that is no tensor."""

    def __init__(self, size: int = 3, gain: float = 0.5) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.gain, self.calls, self.mean = gain, 0, 0.0
        self.recent: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * float(outputs.detach().mean())
            self.recent = [*self.recent, self.mean][-4:]
        return outputs * (self.gain / (1 + self.calls)) + self.mean + sum(self.recent)


def train(directory: Path, steps: int, *, wrap: Any = None, gain: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Warming(gain=gain), nn.Tanh(), Warming(gain=gain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = wrap(model) if wrap else model
    with unbroken.Run(directory, model=called, optimizer=optimizer) as run:
        while run.step_count < steps:
            optimizer.zero_grad()
            called(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            run.step()
    return model


def counters(model: nn.Module) -> list[Any]:
    return [(module.calls, module.mean, module.recent) for module in model if isinstance(module, Warming)]  # type: ignore[attr-defined]


def test_counters_on_modules_go_on_and_training_with_them(tmp_path: Path) -> None:
    expected = train(tmp_path / "whole", 9)
    for steps in (2, 7):
        train(tmp_path / "stopped", steps)
    found = train(tmp_path / "stopped", 9)
    assert counters(found) == counters(expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    states = [CheckpointStore(tmp_path / each).latest().manifest.parts for each in ("whole", "stopped")]
    assert states[0] == states[1]
    assert states[0]["model"].state["(attributes)"].keys() == {"0", "2"}


def test_a_setting_of_the_script_is_not_kept(tmp_path: Path) -> None:
    train(tmp_path, 2)
    found = train(tmp_path, 3, gain=0.25)
    assert [module.gain for module in (found[0], found[2])] == [0.25, 0.25]  # type: ignore[index]


def test_counters_of_a_wrapped_module_are_restored_to_a_plain_one(tmp_path: Path) -> None:
    train(tmp_path, 2, wrap=nn.DataParallel)
    assert counters(train(tmp_path, 3))[0][0] == 3


def test_a_run_that_counts_nothing_has_no_word_of_it_in_its_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.LayerNorm(2))
    with unbroken.Run(tmp_path, model=model) as run:
        model(torch.ones(1, 2)).sum().backward()
        run.step()
    assert "(attributes)" not in CheckpointStore(tmp_path).latest().manifest.parts["model"].state


class Rope(nn.Module):
    """Positions in a buffer that state_dict leaves out, made longer when they do not suffice."""

    cos: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.register_buffer("cos", torch.zeros(0), persistent=False)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > self.longest:
            self.longest = len(inputs)
            self.cos = torch.arange(float(self.longest)).cos()
        return inputs * self.cos[: len(inputs)] * self.weight


@pytest.mark.parametrize("patterns", [[], ["model.rope.*"]], ids=["left out", "asked for"])
def test_a_cache_with_its_length_works_after_a_resume(tmp_path: Path, patterns: list[str]) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"rope": Rope()})

    model = build()
    with unbroken.Run(tmp_path, model=model, non_persistent=patterns) as run:
        expected = model["rope"](torch.ones(5))  # type: ignore[index]
        run.step()
    kept = "model/rope.cos" in CheckpointStore(tmp_path).latest().manifest.tensors
    assert kept == bool(patterns)
    again = build()
    with unbroken.Run(tmp_path, resume="must", model=again, non_persistent=patterns):
        assert again["rope"].longest == (5 if patterns else 0)  # type: ignore[index]
        assert torch.equal(again["rope"](torch.ones(5)), expected)  # type: ignore[index]


def test_a_buffer_that_is_kept_and_not_asked_for_any_more_is_a_difference(tmp_path: Path) -> None:
    with unbroken.Run(tmp_path, model=Rope(), non_persistent=["model.cos"]) as run:
        run.step()
    with (
        pytest.raises(StateMismatchError, match="cos: the model keeps it only by non_persistent="),
        unbroken.Run(tmp_path, model=Rope()),
    ):
        pass


def test_asking_for_a_buffer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found 'model\.sin'"):
        unbroken.Run(tmp_path / "r", model=Rope(), non_persistent=["model.sin"]).__enter__()
    assert not (tmp_path / "r").exists()


def test_counters_and_frozen_weights_come_along_when_modules_are_renamed(tmp_path: Path) -> None:
    def build(first: str, second: str) -> nn.ModuleDict:
        return nn.ModuleDict({first: Warming(), second: Warming()})

    model = build("old", "other")
    with unbroken.Run(tmp_path, model=model) as run:
        model["old"](torch.ones(1, 3)).sum().backward()
        model["old"].inner.bias.requires_grad_(False)  # type: ignore[union-attr]
        run.step()
    # What was the one is the other, and the other is new.
    again = build("other", "new")
    rename = {"model.old": "model.other", "model.other": "model.new"}
    with unbroken.Run(tmp_path, resume="must", model=again, rename=rename):
        assert [again[name].calls for name in ("other", "new")] == [1, 0]
        assert not again["other"].inner.bias.requires_grad  # type: ignore[union-attr]
        for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert again["other"].inner.weight.grad is not None  # type: ignore[union-attr]


def test_what_changes_and_is_not_kept_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Rope()
    with unbroken.Run(tmp_path, model=model) as run:
        for length in (3, 5, 7):
            model(torch.ones(length))
            run.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "not kept: " in line]
    assert len([line for line in lines if "model.cos: a non-persistent buffer" in line]) == 1
    assert len([line for line in lines if "model.longest: a plain attribute beside cos" in line]) == 1


class Momentum:
    def __init__(self) -> None:
        self.steps = 0


class Recording(nn.Module):
    """Keeps what it counts in containers inside containers, in a list of tensors and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 2)
        self.counts: dict[str, dict[str, int]] = {"train": {"n": 0}}
        self.history: list[list[float]] = [[0.0]]
        self.table = {"sizes": [1, 2, (3, 4)]}
        self.queue = [torch.zeros(2)]
        self.momentum, self.array = Momentum(), {"mean": np.zeros(2)}
        self.config = {"depth": [object(), Momentum()]}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)[0]
        self.counts["train"]["n"] += 1
        self.history[0][0] += 0.5
        return outputs


def test_counters_in_containers_inside_containers_go_on(tmp_path: Path) -> None:
    model = Recording()
    with unbroken.Run(tmp_path, model=model) as run:
        for _ in range(2):
            model(torch.ones(1, 2))
            run.step()
    attributes = CheckpointStore(tmp_path).latest().manifest.parts["model"].state["(attributes)"]
    assert attributes == {"": {"counts": {"train": {"n": 2}}, "history": [[1.0]]}}
    again = Recording()
    held = again.counts["train"], again.history[0]
    with unbroken.Run(tmp_path, resume="must", model=again):
        assert held == ({"n": 2}, [1.0])
        assert held[0] is again.counts["train"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: model.queue[0].add_(1), "model.queue: a list of 1 items"),
        (lambda model: model.queue.__setitem__(0, torch.zeros(2)), "model.queue: a list of 1 items"),
        (lambda model: setattr(model.momentum, "steps", 1), "model.momentum: a Momentum"),
        (lambda model: model.array["mean"].__iadd__(1), "model.array: a dict of 1 items"),
        (lambda model: setattr(model.config["depth"][1], "steps", 1), "model.config: a dict of 1 items"),
        (lambda model: setattr(model, "late", Momentum()), "model.late: a Momentum"),
        (lambda model: model(torch.ones(1, 2)).sum().backward(), None),
    ],
    ids=["in place", "replaced", "object", "array", "deep", "late", "training alone"],
)
def test_other_attributes_that_change_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, expected: str | None
) -> None:
    model = Recording()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unbroken.Run(tmp_path, model=model, optimizer=optimizer) as run:
        change(model)
        optimizer.step()
        run.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "not kept: " in line]
    told = f"unbroken: not kept: {expected} that changes and is not kept"
    assert lines == ([] if expected is None else [told])


class Centred(nn.Module):
    """Has a persistent buffer that it makes of the first batch."""

    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mean", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = inputs.mean(0)
        outputs: torch.Tensor = self.inner(inputs - self.mean)
        return outputs


def test_a_persistent_buffer_that_the_first_batch_makes_is_restored(tmp_path: Path) -> None:
    model = nn.Sequential(Centred())
    with unbroken.Run(tmp_path, model=model) as run:
        model(torch.ones(2, 3))
        run.step()
    again = nn.Sequential(Centred())
    with unbroken.Run(tmp_path, resume="must", model=again) as run:
        assert torch.equal(again[0].mean, torch.ones(3))  # type: ignore[arg-type]
        for _ in run.epochs(1):
            assert torch.equal(again(torch.zeros(2, 3)), model(torch.zeros(2, 3)))


class Adapter(nn.Module):
    """Gives only its head to the state, in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2), nn.Linear(2, 2)


class WithoutArguments(Adapter):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {}


class LoadedWithoutArguments(Adapter):
    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        pass


class HeadOnly(Adapter):
    def state_dict(self, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        return {f"head.{name}": item for name, item in self.head.state_dict(**keywords).items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
        self.head.load_state_dict({name.removeprefix("head."): item for name, item in state.items()})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (WithoutArguments(), r"^model: expected WithoutArguments\.state_dict to take the arguments"),
        (nn.Sequential(WithoutArguments()), r"^model\.0: expected WithoutArguments\.state_dict to take"),
        (LoadedWithoutArguments(), r"^model: expected LoadedWithoutArguments\.load_state_dict to take"),
        (HeadOnly(), r"^model\.base\.weight and 1 more: trained, and left out by the state_dict\(\)"),
    ],
    ids=["no arguments", "inside", "load", "left out"],
)
def test_a_state_dict_of_its_own_that_would_lose_something_is_refused_on_entering(
    tmp_path: Path, model: nn.Module, message: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=message):
        unbroken.Run(tmp_path / "r", model=model).__enter__()
    assert not (tmp_path / "r").exists()


def test_a_state_dict_of_its_own_that_leaves_out_what_is_frozen_is_none_to_refuse(tmp_path: Path) -> None:
    model, again = HeadOnly(), HeadOnly()
    for each in (model, again):
        each.base.requires_grad_(False)
    with unbroken.Run(tmp_path, model=model) as run:
        run.step()
    with unbroken.Run(tmp_path, resume="must", model=again):
        assert torch.equal(model.head.weight, again.head.weight)


def freezing(*frozen: str) -> nn.Module:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("saved", "script", "told"),
    [
        ((), ("body",), ["model: requires_grad: all is kept, the script sets all but body"]),
        (("body",), (), ["model: requires_grad: all but body is kept, the script sets all"]),
        ((), ("",), ["model: requires_grad: all is kept, the script sets none"]),
        (
            ("body.0",),
            ("body",),
            ["model: requires_grad: all but body.0 is kept, the script sets all but body"],
        ),
        (("head",), ("head",), []),
    ],
    ids=["frozen", "trained", "all", "more", "equal"],
)
def test_what_the_script_freezes_otherwise_is_told_by_modules_and_can_be_overridden_once(
    tmp_path: Path, saved: tuple[str, ...], script: tuple[str, ...], told: list[str]
) -> None:
    with unbroken.Run(tmp_path, model=freezing(*saved)) as run:
        run.step()
    model = freezing(*script)
    expected = {name: item.requires_grad for name, item in freezing(*saved).named_parameters()}
    with unbroken.Run(tmp_path, resume="must", model=model) as run:
        assert run.restored is not None
        assert [line for line in run.restored.changed if "requires_grad" in line] == told
        assert {name: item.requires_grad for name, item in model.named_parameters()} == expected
    model = freezing(*script)
    expected = {name: item.requires_grad for name, item in model.named_parameters()}
    with unbroken.Run(tmp_path, resume="must", model=model, override=["model.requires_grad"]) as run:
        assert {name: item.requires_grad for name, item in model.named_parameters()} == expected
        # Unfrozen by training: the next restart does not undo it.
        model.requires_grad_(True)
        run.step()
    model = freezing(*script)
    with unbroken.Run(tmp_path, resume="must", model=model, override=["model.requires_grad"]):
        assert all(item.requires_grad for item in model.parameters()) or not told
