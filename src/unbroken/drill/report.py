"""A drill as plain values, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.drill.comparison import Difference, Divergence, Noise, Pair, number
from unbroken.drill.process import Ended
from unbroken.drill.verdict import Findings, Verdict
from unbroken.rundir.rehearsal import Kill


def as_json(found: Findings, verdict: Verdict, directory: str | None) -> dict[str, Any]:
    """Return all that a drill found; `directory` is where everything was kept, if it was."""
    return {
        "verdict": verdict.outcome,
        "exit_code": verdict.exit_code,
        "headline": verdict.headline,
        "details": list(verdict.details),
        "command": list(found.command),
        "seed": found.seed,
        "observed": found.is_observed,
        "resume_arguments": list(found.resume_arguments),
        "steps": found.steps,
        "components": found.components,
        "processes": [_process(process) for process in found.processes],
        "missed": [_kill(kill) for kill in found.missed],
        "restored": found.restored,
        "divergence": _divergence(found.divergence) if found.divergence is not None else None,
        "unkept": dict(found.unkept),
        "notes": list(found.notes),
        "suspects": [
            {"name": one.name, "in_no_part": one.is_in_no_part, "components": list(one.components)}
            for one in found.suspects
        ],
        "causes": [one.name for one in found.proof.suspects] if found.proof is not None else [],
        "trials": found.proof.trials if found.proof is not None else 0,
        "repeatable": found.is_repeatable,
        "noise": _noise(found.noise) if found.noise is not None else None,
        "hash_order": found.is_hash_order,
        "distances": dict(found.distances),
        "failure": found.failure,
        "output": found.output,
        "directory": directory,
    }


def _process(process: Ended) -> dict[str, Any]:
    kill = process.plan.kill
    return {
        "began_at": process.began_at,
        "reached": process.reached,
        "kill": None if kill is None else _kill(kill),
        "killed": any(line.kind == "killed" for line in process.lines),
        "exit_code": process.code,
        "seconds": round(process.seconds, 3),
    }


def _kill(kill: Kill) -> dict[str, Any]:
    return {"step": kill.step, "moment": kill.moment, "signal": kill.signal}


def _divergence(divergence: Divergence) -> dict[str, Any]:
    return {
        "process": divergence.process,
        "began_at": divergence.began_at,
        "step": divergence.step,
        "between_epochs": divergence.is_between_epochs,
        "batch_of": divergence.batch_of,
        **_difference(divergence.found),
        "not_restored": _difference(divergence.at_began)["components"],
        "rates_not_restored": _difference(divergence.at_began)["rates"],
    }


def _difference(found: Difference) -> dict[str, Any]:
    rates = found.rates
    return {
        "batch": found.batch,
        "metrics": _numbers(found.metrics),
        "gradients": found.gradients,
        "components": list(found.components),
        "rates": None
        if rates is None
        else {"reference": [*map(number, rates[0])], "other": [*map(number, rates[1])]},
    }


def _numbers(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    return {
        name: {
            "reference": None if reference is None else number(reference),
            "other": None if other is None else number(other),
        }
        for name, (reference, other) in pairs.items()
    }


def _noise(found: Noise) -> dict[str, Any]:
    return {
        "of_training": found.is_of_training,
        "first_step": found.first_step,
        "batch": found.batch,
        "gradients": found.gradients,
        "rates": found.rates,
        "metrics": dict(found.metrics),
        "components": dict(found.components),
    }
