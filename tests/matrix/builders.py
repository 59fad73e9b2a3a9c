"""Builds what a row of the matrix names, all of it from torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from .covering import Row

WORDS = 11
# The second is beyond what gradients in float16 can hold, so that the first steps are skipped.
FIRST_SCALES = {"bfloat16": 2.0**10, "float16": 2.0**20}

# The rate at which each learns something in a few steps.
_RATES = {"Adadelta": 1.0, "LBFGS": 0.2, "SGD": 0.05, "ASGD": 0.05, "Muon": 0.02}
_ALWAYS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    # The average is taken from the second step on.
    "ASGD": {"t0": 1},
    "LBFGS": {"max_iter": 3, "history_size": 4},
}
_OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adamax": {"weight_decay": 0.01},
    "NAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "Adadelta": {"rho": 0.5, "weight_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {"etas": (0.4, 1.3), "maximize": True},
    "ASGD": {"weight_decay": 0.01, "t0": 3},
    "Adafactor": {"weight_decay": 0.01, "d": 1.5},
    "Muon": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "LBFGS": {"max_iter": 2, "max_eval": 3, "history_size": 1},
    "SparseAdam": {"betas": (0.8, 0.9)},
}


class Net(nn.Module):
    """Words and numbers in; dropout and batch norm, so that randomness and buffers count."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=sparse)
        self.first = nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(6, 3)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        hidden = self.first(torch.cat([numbers, self.words(words)], dim=1))
        result: torch.Tensor = self.last(self.drop(torch.relu(self.norm(hidden))))
        return result


def build_model(row: Row) -> Net:
    return Net(sparse=row["optimizer"] == "SparseAdam")


def build_optimizers(row: Row, model: Net) -> list[torch.optim.Optimizer]:
    """Return the optimizer of `row`, and a second one for the parameters that it cannot train."""
    name = row["optimizer"]
    parameters = list(model.parameters())
    if name == "LBFGS":
        return [build_optimizer(name, row["flavour"], parameters)]
    if name == "Muon":
        mine = [parameter for parameter in parameters if parameter.ndim == 2]
    elif name == "SparseAdam":
        mine = [model.words.weight]
    else:
        mine = parameters
    chosen = {id(parameter) for parameter in mine}
    rest = [parameter for parameter in parameters if id(parameter) not in chosen]
    groups: list[dict[str, Any]] = [{"params": mine[:1]}]
    if mine[1:]:
        groups.append({"params": mine[1:], "weight_decay": 0.02} if _decays(name) else {"params": mine[1:]})
    optimizers = [build_optimizer(name, row["flavour"], groups)]
    return [*optimizers, torch.optim.SGD(rest, lr=0.05, momentum=0.5)] if rest else optimizers


def build_optimizer(name: str, flavour: str, parameters: Any) -> torch.optim.Optimizer:
    rate = _RATES.get(name, 0.01)
    options = dict(_ALWAYS.get(name, {}))
    if flavour in ("foreach", "fused"):
        options[flavour] = True
    if flavour == "other options":
        options |= _OTHER_OPTIONS[name]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(
        parameters, lr=torch.tensor(rate) if flavour == "tensor lr" else rate, **options
    )
    return made


def _decays(name: str) -> bool:
    return name not in ("Rprop", "SparseAdam")


def build_scheduler(row: Row, optimizer: torch.optim.Optimizer) -> Any:
    name = row["scheduler"]
    highest = 2.0 * float(optimizer.param_groups[0]["lr"])
    moves_momentum = "betas" in optimizer.defaults or "momentum" in optimizer.defaults
    halving = 0.5
    made = {
        "none": lambda: None,
        "StepLR": lambda: lr_scheduler.StepLR(optimizer, 2),
        "MultiStepLR": lambda: lr_scheduler.MultiStepLR(optimizer, [2, 4, 11], gamma=0.3),
        "ConstantLR": lambda: lr_scheduler.ConstantLR(optimizer, total_iters=4),
        "LinearLR": lambda: lr_scheduler.LinearLR(optimizer, total_iters=5),
        "ExponentialLR": lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
        "MultiplicativeLR": lambda: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + step / 100),
        "PolynomialLR": lambda: lr_scheduler.PolynomialLR(optimizer, 20, power=2.0),
        "LambdaLR": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: halving ** (step / 3)),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 7),
        "CosineAnnealingWarmRestarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
        "CyclicLR": lambda: lr_scheduler.CyclicLR(
            optimizer, highest / 8, highest, step_size_up=3, mode="triangular2", cycle_momentum=moves_momentum
        ),
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(
            optimizer, highest, total_steps=30, pct_start=0.2, cycle_momentum=moves_momentum
        ),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, total_iters=3),
                lr_scheduler.CosineAnnealingLR(optimizer, 10),
                lr_scheduler.ExponentialLR(optimizer, 0.8),
            ],
            milestones=[3, 13],
        ),
        "ChainedScheduler": lambda: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        ),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, cooldown=1),
        "SWALR": lambda: SWALR(optimizer, highest / 4, anneal_epochs=5),
    }
    return made[name]()


def build_scaler(row: Row) -> torch.amp.GradScaler | None:
    if row["scaler"] == "none":
        return None
    return torch.amp.GradScaler("cpu", init_scale=FIRST_SCALES[row["scaler"]], growth_interval=2)


def build_average(row: Row, model: Net) -> Any:
    """Return averaged weights: a module, or a plain dictionary that the script fills by hand."""
    kind = row["average"]
    if kind == "none":
        return None
    if kind == "by hand":
        return {"updates": 0, "weights": {name: item.clone() for name, item in model.state_dict().items()}}
    multi_avg_fn = get_ema_multi_avg_fn(0.9) if kind == "EMA" else None
    return AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=kind == "EMA")
