"""Schedulers: the learning rates after a resume are those of the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import unbroken
from unbroken.errors import StateMismatchError, UnsupportedStateError

from ..some import named, some
from .runs import restore, save


class Warmup:
    """A schedule that is an object, with a state of its own."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, step: int) -> float:
        self.asked += 1
        return min(1.0, 0.01 * self.asked)


def rate_of_the_group(optimizer: torch.optim.Optimizer) -> Any:
    base = optimizer.param_groups[0]["lr"]
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + base * step))


def sequence(optimizer: torch.optim.Optimizer, *milestones: int) -> Any:
    schedulers = [
        lr_scheduler.LinearLR(optimizer, total_iters=4),
        lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lr_scheduler.ExponentialLR(optimizer, 0.8),
    ]
    return lr_scheduler.SequentialLR(optimizer, schedulers[: len(milestones) + 1], list(milestones))


def nested(optimizer: torch.optim.Optimizer) -> Any:
    inner = sequence(optimizer, 3)
    return lr_scheduler.SequentialLR(optimizer, [inner, lr_scheduler.ExponentialLR(optimizer, 0.8)], [6])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step),
    "LambdaLR with an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Warmup()),
    "LambdaLR with a partial": lambda optimizer: lr_scheduler.LambdaLR(optimizer, partial(pow, 0.9)),
    "LambdaLR of the group's rate": rate_of_the_group,
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95),
    "MultiplicativeLR with an object": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, Warmup()),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 6, 6, 7]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=6),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=6),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 6, power=2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=0.001),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 3, T_mult=2
    ),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "CyclicLR triangular2": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=2, step_size_down=3, mode="triangular2"
    ),
    "CyclicLR exp_range": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9
    ),
    "CyclicLR with a function": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, scale_fn=lambda cycle: 0.5**cycle
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "OneCycleLR of three phases": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, epochs=5, steps_per_epoch=4, three_phase=True, anneal_strategy="linear"
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: sequence(optimizer, 6),
    "SequentialLR of three": lambda optimizer: sequence(optimizer, 3, 6),
    "SequentialLR nested": nested,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=6), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "SWALR": lambda optimizer: swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=6),
}


def test_every_scheduler_of_this_torch_is_among_these() -> None:
    base = lr_scheduler.LRScheduler
    classes = {
        item
        for module in (lr_scheduler, swa_utils)
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, base)
    }
    tried = set()
    for make in SCHEDULERS.values():
        tried.add(type(make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))))
    assert {cls for cls in classes if not cls.__name__.startswith("_")} == tried | {base}


def trace(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates += [float(group["lr"]).hex() for group in optimizer.param_groups]
    return rates


# The stops are before, at and after the milestones.
STOPS = {5: "scheduler first", 6: "optimizer first", 7: "scheduler first", 13: "optimizer first"}


@pytest.mark.parametrize(("name", "stop"), some(named(SCHEDULERS), named(STOPS), one_in=2))
def test_every_scheduler_gives_the_same_learning_rates(tmp_path: Path, name: str, stop: int) -> None:
    def build() -> tuple[Any, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        parts = {"scheduler": scheduler, "optimizer": optimizer}
        if STOPS[stop] == "optimizer first":
            parts = dict(reversed(parts.items()))
        return optimizer, scheduler, {"model": model, **parts}

    optimizer, scheduler, parts = build()
    trace(scheduler, optimizer, stop)
    save(tmp_path, **parts)
    expected = trace(scheduler, optimizer, 7)
    optimizer, scheduler, parts = build()
    restore(tmp_path, **parts)
    assert trace(scheduler, optimizer, 7) == expected


def parts_with(
    make: Callable[[torch.optim.Optimizer], Any], *, rate: float = 0.1
) -> tuple[torch.optim.Optimizer, Any, dict[str, Any]]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    scheduler = make(optimizer)
    return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def report_of(directory: Path, parts: dict[str, Any], **choices: Any) -> str:
    with unbroken.Run(directory, resume="must", **parts, **choices) as run:
        assert run.restored is not None
        return "\n".join(run.restored.lines())


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("make", "path"),
        [
            (lambda held: lambda optimizer: held(lr_scheduler.StepLR(optimizer, 3)), "scheduler/state/held"),
            (
                lambda held: (
                    lambda optimizer: lr_scheduler.SequentialLR(
                        optimizer,
                        [lr_scheduler.ConstantLR(optimizer), held(lr_scheduler.StepLR(optimizer, 3))],
                        milestones=[2],
                    )
                ),
                "scheduler/state/_schedulers/1/held",
            ),
            (
                lambda held: lambda optimizer: lr_scheduler.LambdaLR(optimizer, held(Warmup())),
                "scheduler/state/lr_lambdas/0/held",
            ),
        ],
    )
    def test_an_object_in_a_state_that_cannot_be_kept_is_named_before_training(
        self, tmp_path: Path, make: Any, path: str
    ) -> None:
        def holding(thing: Any) -> Any:
            thing.held = (lambda: 0.1).__code__
            return thing

        _, _, parts = parts_with(make(holding))
        with pytest.raises(UnsupportedStateError) as caught:
            unbroken.Run(tmp_path, **parts).__enter__()
        assert path in str(caught.value)
        assert "code" in str(caught.value)

    def test_a_callable_without_attributes_is_named_before_training(self, tmp_path: Path) -> None:
        _, _, parts = parts_with(lambda optimizer: lr_scheduler.LambdaLR(optimizer, Slotted()))
        with pytest.raises(UnsupportedStateError, match="lr_lambda 0: cannot keep a callable"):
            unbroken.Run(tmp_path, **parts).__enter__()

    def test_other_schedulers_inside_are_refused(self, tmp_path: Path) -> None:
        _, _, parts = parts_with(lambda optimizer: sequence(optimizer, 4))
        save(tmp_path, **parts)
        _, scheduler, parts = parts_with(
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
                [4],
            )
        )
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, **parts)
        assert (
            "schedulers 0 (ConstantLR): a scheduler with factor, total_iters, "
            "the checkpoint has one with end_factor, start_factor, total_iters" in str(caught.value)
        )
        _, scheduler, parts = parts_with(lambda optimizer: sequence(optimizer, 4, 8))
        with pytest.raises(StateMismatchError, match="3 schedulers inside, the checkpoint has 2"):
            restore(tmp_path, **parts)
        assert scheduler.last_epoch == 0

    def test_a_function_for_an_object_is_refused(self, tmp_path: Path) -> None:
        _, _, parts = parts_with(SCHEDULERS["LambdaLR with an object"])
        save(tmp_path, **parts)
        _, _, parts = parts_with(SCHEDULERS["LambdaLR"])
        with pytest.raises(StateMismatchError, match="a function, the checkpoint has an object with"):
            restore(tmp_path, **parts)


class Slotted:
    __slots__ = ()

    def __call__(self, step: int) -> float:
        return 1.0


class TestWhatIsReported:
    def test_settings_of_schedulers_inside_others_are_compared(self, tmp_path: Path) -> None:
        def chained(gamma: float) -> Callable[[torch.optim.Optimizer], Any]:
            return lambda optimizer: lr_scheduler.ChainedScheduler(
                [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma)]
            )

        _, _, parts = parts_with(chained(0.9))
        save(tmp_path, **parts)
        _, _, parts = parts_with(chained(0.8))
        report = report_of(tmp_path, parts)
        assert "scheduler: schedulers 1 (ExponentialLR) gamma: 0.9 is kept, the script sets 0.8" in report

    def test_a_setting_may_be_overridden(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = parts_with(SCHEDULERS["ExponentialLR"])
        trace(scheduler, optimizer, 2)
        save(tmp_path, **parts)
        optimizer, scheduler, parts = parts_with(lambda each: lr_scheduler.ExponentialLR(each, 0.5))
        report = report_of(tmp_path, parts, override=["scheduler.gamma"])
        assert "scheduler: gamma: 0.5 of the script is used, the checkpoint has 0.9" in report
        rate = optimizer.param_groups[0]["lr"]
        assert trace(scheduler, optimizer, 1) == [float(rate * 0.5).hex()]

    def test_a_function_that_gives_other_rates_is_reported(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = parts_with(SCHEDULERS["LambdaLR of the group's rate"])
        trace(scheduler, optimizer, 4)
        save(tmp_path, **parts)
        _, _, parts = parts_with(SCHEDULERS["LambdaLR of the group's rate"])
        assert "lr: the function" not in report_of(tmp_path, parts)
        # The function reads a rate that is not the first run's: the decay would begin from another one.
        _, _, parts = parts_with(SCHEDULERS["LambdaLR of the group's rate"], rate=0.05)
        report = report_of(tmp_path, parts)
        assert "group 0 lr: the function of the script gives" in report
        assert "at step 4" in report

    def test_rates_that_are_left_behind_with_the_optimizer_are_reported(self, tmp_path: Path) -> None:
        optimizer, scheduler, parts = parts_with(SCHEDULERS["MultiStepLR"])
        del parts["optimizer"]
        trace(scheduler, optimizer, 4)
        save(tmp_path, **parts)
        _, _, parts = parts_with(SCHEDULERS["MultiStepLR"])
        del parts["optimizer"]
        report = report_of(tmp_path, parts)
        assert "group 0 lr: 0.1 of the optimizer, which is no part, is used" in report

    def test_so_is_one_with_arguments_of_its_own(self, tmp_path: Path) -> None:
        def linear(step: int, *, total: int) -> float:
            return max(0.0, 1 - step / total)

        def make(total: int) -> Any:
            return parts_with(lambda each: lr_scheduler.LambdaLR(each, partial(linear, total=total)))

        optimizer, scheduler, parts = make(10)
        trace(scheduler, optimizer, 5)
        save(tmp_path, **parts)
        assert "lr: the function" not in report_of(tmp_path, make(10)[2])
        assert "group 0 lr: the function of the script gives" in report_of(tmp_path, make(100)[2])

    def test_an_attribute_that_the_checkpoint_lacks_stays_as_the_script_built_it(
        self, tmp_path: Path
    ) -> None:
        class Floored(lr_scheduler.StepLR):
            def __init__(self, optimizer: torch.optim.Optimizer, floor: float | None) -> None:
                if floor is not None:
                    self.floor = floor
                super().__init__(optimizer, 2)

        optimizer, scheduler, parts = parts_with(lambda each: Floored(each, None))
        trace(scheduler, optimizer, 3)
        # As a release of torch that did not have it.
        del scheduler._is_initial
        save(tmp_path, **parts)
        _, scheduler, parts = parts_with(lambda each: Floored(each, 0.5))
        report = report_of(tmp_path, parts)
        assert "floor: as the script built it, the checkpoint lacks it" in report
        assert "_is_initial: as the script built it, the checkpoint lacks it" in report
        assert (scheduler.floor, scheduler.last_epoch) == (0.5, 3)

    def test_a_class_that_has_moved_to_another_module_is_the_same(self, tmp_path: Path) -> None:
        def moved(module: str) -> Any:
            return type("Mine", (lr_scheduler.StepLR,), {"__module__": module})

        optimizer, scheduler, parts = parts_with(lambda each: moved("__main__")(each, 2))
        trace(scheduler, optimizer, 3)
        save(tmp_path, **parts)
        _, scheduler, parts = parts_with(lambda each: moved("mine.schedules")(each, 2))
        report = report_of(tmp_path, parts)
        assert "class mine.schedules.Mine: taken for __main__.Mine of the checkpoint" in report
        assert scheduler.last_epoch == 3
