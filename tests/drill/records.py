"""Records made by hand: lines of processes as the contract has them."""

from __future__ import annotations

from typing import Any

from unbroken.drill.process import Ended
from unbroken.rundir.rehearsal import Kill, Line, Plan

PARTS = {"model/weight": "m", "optimizer/weight.exp_avg": "o", "rng/numpy": "r", "found/__main__.rng": "f"}


def step(number: int, **changes: Any) -> Line:
    """The line of a step, as the reference has it but for `changes`; components replace those there are."""
    components = {name: f"{value}{number}" for name, value in PARTS.items()}
    components.update(changes.pop("components", {}))
    fields: dict[str, Any] = {
        "batch": f"b{number}",
        "metrics": {"loss": float(number).hex()},
        "rates": ((0.1).hex(),),
        "gradients": f"g{number}",
    }
    fields.update(changes)
    gone = [name for name, value in components.items() if value is None]
    kept = {name: value for name, value in components.items() if name not in gone}
    return Line(kind="step", step=number, components=kept, **fields)


def began(number: int, components: dict[str, Any] | None = None, **changes: Any) -> Line:
    """The line before the first step of a process that goes on from `number`."""
    rates = changes.pop("rates", ((0.1).hex(),))
    found = step(number, components=components or {}).components
    return Line(kind="began", step=number, rates=rates, components=found)


def undisturbed(steps: int) -> list[Line]:
    return [began(0), *(step(number) for number in range(1, steps + 1))]


def process(*lines: Line, kill: Kill | None = None, code: int | None = 0) -> Ended:
    plan = Plan(directory="run", record="record.jsonl", steps=10, kill=kill)
    died = [Line(kind="killed", step=lines[-1].step)] if kill is not None and lines else []
    return Ended(
        plan=plan, lines=(*lines, *died), code=code, silent_seconds=5, output="last words", seconds=1
    )
