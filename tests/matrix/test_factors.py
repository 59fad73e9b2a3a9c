"""The matrix has everything that torch has, and leaves out only what torch refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from .builders import build_model, build_optimizers, build_scaler
from .covering import Row, pairs_in
from .factors import FACTORS, IMPOSSIBLE, OPTIMIZERS, SCHEDULERS, all_rows, covering_rows, in_runs, name_of


def classes_in(module: Any, base: type) -> set[str]:
    named = {name for name, found in vars(module).items() if isinstance(found, type)}
    return {name for name in named if issubclass(vars(module)[name], base)} - {base.__name__}


def test_every_optimizer_and_every_scheduler_of_torch_is_in_the_matrix() -> None:
    assert set(OPTIMIZERS) == classes_in(torch.optim, torch.optim.Optimizer)
    schedulers = classes_in(lr_scheduler, lr_scheduler.LRScheduler) - {"_LRScheduler"}
    assert set(SCHEDULERS) == schedulers | {"none", SWALR.__name__}


def refused_rows() -> list[Row]:
    return [
        dict(zip(rule.where, values, strict=True))
        for rule in IMPOSSIBLE
        if rule.refuses
        for values in itertools.product(*map(sorted, rule.where.values()))
    ]


@pytest.mark.parametrize("row", refused_rows(), ids=lambda row: "-".join(row.values()))
def test_torch_refuses_what_is_called_impossible(row: Row) -> None:
    whole = {"flavour": "plain", "scaler": "none", **row}
    model = build_model(whole)
    with pytest.raises((TypeError, RuntimeError), match=r"unexpected keyword|closure"):
        (optimizer,) = build_optimizers(whole, model)
        scaler = build_scaler(whole)
        assert scaler is not None, "torch took it"
        scaler.scale(model(torch.ones(2, 6), torch.tensor([1, 2])).sum()).backward()
        scaler.step(optimizer)


def test_any_two_values_meet_unless_that_is_impossible() -> None:
    rows = covering_rows()
    met = set().union(*map(pairs_in, rows))
    for (one, ones), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product(ones, others):
            row = dict(zip((one, other), pair, strict=True))
            assert (frozenset(row.items()) in met) != any(rule.holds(row) for rule in IMPOSSIBLE), row
    assert len(rows) < 1.1 * len(OPTIMIZERS) * len(SCHEDULERS)


def test_rows_of_one_run_agree_in_what_a_run_has_once_and_have_names_of_their_own() -> None:
    for rows in (covering_rows(), all_rows()):
        runs = in_runs(rows, 20)
        assert sorted(map(str, itertools.chain(*runs))) == sorted(map(str, rows))
        for run in runs:
            assert len(run) <= 20
            assert len({(row["accumulation"], row["stops"]) for row in run}) == 1
            assert len({name_of(row) for row in run}) == len(run)
