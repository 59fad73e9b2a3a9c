"""The factors of the matrix, what cannot be combined and why, and the rows that are trained."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from .covering import Factors, Row, pairwise_rows

OPTIMIZERS = [
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop"),
    *("ASGD", "Adafactor", "Muon", "LBFGS", "SparseAdam"),
]
SCHEDULERS = [
    *("none", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "MultiplicativeLR"),
    *("PolynomialLR", "LambdaLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR"),
    *("OneCycleLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "SWALR"),
]
# How an optimizer computes: capturable is none of them, since torch refuses it on CPU for every class.
FLAVOURS = ["plain", "foreach", "fused", "tensor lr", "other options"]
SCALERS = ["none", "bfloat16", "float16"]
# An epoch has 9 batches, so windows of 4 leave one unfinished: it is finished in the next epoch, or dropped.
ACCUMULATIONS = ["1", "4 carried over", "4 begun anew"]
AVERAGES = ["none", "EMA", "SWA", "by hand"]
# How the run is stopped, and in which batch, counted over all epochs: twice, and then it trains to its end.
STOPS = ["term:9 kill:17", "kill:8 request:14", "exit:14 term:15"]
# A save is asked for so many batches before a kill. With windows of 4 it waits for the end of a step; the
# 9th batch begins a window that is still open at the end of its epoch, and is saved there.
SAVED_BEFORE = 5
BATCHES_PER_EPOCH, EPOCHS = 9, 3

FACTORS: Factors = {
    "optimizer": OPTIMIZERS,
    "flavour": FLAVOURS,
    "scheduler": SCHEDULERS,
    "scaler": SCALERS,
    "average": AVERAGES,
    "accumulation": ACCUMULATIONS,
    "stops": STOPS,
}
# What all combinations have in common that are trained in one run.
OF_A_RUN = ("accumulation", "stops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """Values that cannot be combined, each with each; `refuses` tells whether torch itself refuses it."""

    reason: str
    where: dict[str, frozenset[str]]
    refuses: bool = True

    def holds(self, row: Row) -> bool:
        return all(row.get(factor) in values for factor, values in self.where.items())


IMPOSSIBLE = (
    Impossible(
        reason="these have one implementation, and no argument to choose another",
        where={
            "optimizer": frozenset({"Muon", "LBFGS", "SparseAdam"}),
            "flavour": frozenset({"foreach", "fused"}),
        },
    ),
    Impossible(
        reason="these have no fused implementation",
        where={
            "optimizer": frozenset(OPTIMIZERS)
            - {"SGD", "Adam", "AdamW", "Adagrad", "Muon", "LBFGS", "SparseAdam"},
            "flavour": frozenset({"fused"}),
        },
    ),
    Impossible(
        reason="it needs a closure, which GradScaler.step does not take",
        where={"optimizer": frozenset({"LBFGS"}), "scaler": frozenset({"bfloat16", "float16"})},
    ),
    Impossible(
        reason="its closure takes the gradients of one batch again and again: those of others have no part",
        where={
            "optimizer": frozenset({"LBFGS"}),
            "accumulation": frozenset({"4 carried over", "4 begun anew"}),
        },
        refuses=False,
    ),
)


def is_possible(row: Row) -> bool:
    """Tell whether nothing in `row`, which need not be complete, is known to be impossible."""
    return not any(rule.holds(row) for rule in IMPOSSIBLE)


def covering_rows() -> list[Row]:
    """Return rows in which every two values that can be combined are."""
    return pairwise_rows(FACTORS, is_possible)


def all_rows() -> list[Row]:
    """Return every optimizer x every scheduler x with and without a scaler, an average, accumulation.

    In which flavour, with which scaler, average and kind of window, and how it is stopped is drawn, the
    same each time.
    """
    dice = random.Random(7)
    rows = []
    with_and_without = list(itertools.product((False, True), repeat=3))
    for optimizer, scheduler, has in itertools.product(OPTIMIZERS, SCHEDULERS, with_and_without):
        flavours = [
            flavour for flavour in FLAVOURS if is_possible({"optimizer": optimizer, "flavour": flavour})
        ]
        row = {"optimizer": optimizer, "flavour": dice.choice(flavours), "scheduler": scheduler}
        for factor, is_there in zip(("scaler", "average", "accumulation"), has, strict=True):
            row[factor] = dice.choice(FACTORS[factor][1:]) if is_there else FACTORS[factor][0]
        if is_possible(row):
            rows.append({**row, "stops": dice.choice(STOPS)})
    return rows


def in_runs(rows: list[Row], most: int) -> list[list[Row]]:
    """Divide `rows` into those that can be trained in one run, at most so many."""

    def shared(row: Row) -> tuple[str, ...]:
        return tuple(row[factor] for factor in OF_A_RUN)

    runs: list[list[Row]] = []
    for _, found in itertools.groupby(sorted(rows, key=shared), shared):
        alike = list(found)
        count = math.ceil(len(alike) / most)
        runs += [alike[start::count] for start in range(count)]
    return runs


def name_of(row: Row) -> str:
    """Return what tells a combination from the others of its run."""
    words = [
        value for factor, value in row.items() if factor not in OF_A_RUN and value not in ("none", "plain")
    ]
    return "-".join(words).replace(" ", "_")
