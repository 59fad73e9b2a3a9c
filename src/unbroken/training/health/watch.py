"""The watch over the numbers that training reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from unbroken.rundir.journal import nearest_float
from unbroken.rundir.tell import tell
from unbroken.state.tree import Json
from unbroken.training.health.divergence import DivergenceDetector
from unbroken.training.health.findings import Finding, badness
from unbroken.training.health.policy import Health, Kind
from unbroken.training.health.reading import Onset, Reading
from unbroken.training.health.spike import SpikeDetector
from unbroken.training.health.streaks import NonFiniteDetector, PlateauDetector, ZeroRateDetector

_VERSION = 1
# A loss tells of the state before its step, so a high one may be the work of the step before.
_CAUTION_STEPS: dict[Kind, int] = {"spike": 1, "divergence": 1}
_FEWEST_LOSSES = 10
_MOST_STEPS_WITHOUT = 100
_HINTS: dict[Kind, str] = {
    "non-finite": "look at the data of this step, the learning rate, and the precision",
    "spike": "look at the data of this step, the learning rate, and gradient clipping",
    "divergence": "look at the learning rate and the data since then",
    "plateau": "if it is not a loss that ends so: does it depend on the parameters, does the optimizer step?",
    "zero-rate": "the schedule is shorter than the training: nothing is learned any more",
}
_OVER: dict[Kind, str] = {
    "non-finite": "the loss and the gradients are finite again",
    "plateau": "the loss moves again",
    "zero-rate": "the learning rate is above zero again",
}


class HealthWatch:
    """Looks at what `run.step` is given, and finds what is not well.

    `rate()` is the highest learning rate of now, None if nobody knows; `goal_step()` the step after which
    training is done, 0 if nobody knows. With `has_scaler` steps that overflow are left out by a gradient
    scaler. `agree` makes one finding, the same on each, of those of all ranks; it is called in each step.
    """

    def __init__(
        self,
        policy: Health,
        *,
        rate: Callable[[], float | None] = lambda: None,
        goal_step: Callable[[], int] = lambda: 0,
        has_scaler: Callable[[], bool] = lambda: False,
        agree: Callable[[int, Finding | None], Finding | None] | None = None,
    ) -> None:
        self.policy = policy
        self._rate, self._goal_step, self._has_scaler, self._agree = rate, goal_step, has_scaler, agree
        self._is_on = policy.is_on
        self._watched = (policy.loss, policy.grad_norm)
        self._steps_without = 0
        # Whoever has asked for nothing need not be told.
        self._is_blindness_told = not policy.acts
        self._begin_anew()

    def take(self) -> Finding | None:
        """Return what is to be acted on first, once; None while all is well."""
        if not self._findings:
            return None
        found = max(self._findings, key=badness)
        self._findings.remove(found)
        return found

    def step(self, step: int, values: Mapping[str, int | float]) -> None:
        """Take the metrics of the step that is complete, the `step`-th of the run."""
        if not self._is_on:
            return
        found = self._look(step, values)
        if self._agree is not None:
            worst = self._agree(step, max(found, key=badness, default=None))
            found = [] if worst is None else [worst]
        if found:
            self._findings += found

    def state(self) -> Json:
        """Return what the watch of a resumed run goes on with, for the manifest; plain JSON, no times."""
        if not self.policy.is_on:
            return None
        state: dict[str, Any] = {
            "version": _VERSION,
            "loss": self.policy.loss,
            "losses": [list(one) for one in self._losses],
            "told": sorted(self._told),
        }
        return {**state, **{name: detector.state() for name, detector in self._detectors.items()}}

    def restore(self, state: Json) -> None:
        """Go on from the state of a checkpoint, after a resume or a roll-back.

        From one that has none, or one of another version or of another metric as the loss, it begins anew,
        with its warm-up.
        """
        self._begin_anew()
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            return
        if state.get("loss") != self.policy.loss:
            return
        known: Any = state
        self._losses.extend((step, loss) for step, loss in known["losses"])
        self._told.update(known["told"])
        for name, detector in self._detectors.items():
            detector.restore(known[name])

    def _begin_anew(self) -> None:
        policy = self.policy
        self._findings: list[Finding] = []
        # What has been found and is not over yet: it is not told again at each step.
        self._told: set[Kind] = set()
        self._losses: deque[tuple[int, float]] = deque(maxlen=max(_FEWEST_LOSSES, policy.resume_steps))
        self._spike = SpikeDetector(policy.spike_factor, policy.warm_up_steps)
        self._divergence = DivergenceDetector(policy.divergence_factor, policy.warm_up_steps)
        self._plateau, self._zero_rate = PlateauDetector(), ZeroRateDetector()
        self._non_finite = NonFiniteDetector()
        self._detectors: dict[Kind, Any] = {
            "non-finite": self._non_finite,
            "spike": self._spike,
            "divergence": self._divergence,
            "plateau": self._plateau,
            "zero-rate": self._zero_rate,
        }

    def _look(self, step: int, values: Mapping[str, int | float]) -> list[Finding]:
        rate = self._rate()
        onsets: dict[Kind, Onset] = {}
        watched = {name: nearest_float(values[name]) for name in self._watched if name in values}
        self._note_given(bool(watched))
        if watched and (onset := self._non_finite.step(step, watched, self._may_overflow)):
            onsets["non-finite"] = onset
        loss = watched.get(self._watched[0])
        if loss is not None and isfinite(loss):
            self._look_at_loss(step, loss, rate, onsets)
        if rate is not None and (onset := self._zero_rate.step(step, rate, self._goal_step)):
            onsets["zero-rate"] = onset
        found = [self._finding(kind, step, onset) for kind, onset in onsets.items()] if onsets else []
        if self._told:
            found += self._over(step)
        return [one for one in found if one.action != "off"] if found else found

    def _may_overflow(self, name: str) -> bool:
        # A loss does not depend on the scale.
        return name == self.policy.grad_norm and self._has_scaler()

    def _note_given(self, is_given: bool) -> None:
        """Say once that there is nothing to watch, to whom something is to be done about it."""
        self._steps_without = 0 if is_given else self._steps_without + 1
        if self._steps_without == _MOST_STEPS_WITHOUT and not self._is_blindness_told:
            self._is_blindness_told = True
            names = " nor ".join(map(repr, self._watched))
            tell(
                f"health: run.step was given neither {names} in {self._steps_without} steps: nothing to watch"
            )

    def _look_at_loss(self, step: int, loss: float, rate: float | None, onsets: dict[Kind, Onset]) -> None:
        reading = Reading(step, self._losses[-1][0] + 1 if self._losses else step, loss, rate)
        self._losses.append((step, loss))
        if onset := self._spike.step(reading):
            onsets["spike"] = onset
        if onset := self._divergence.step(reading):
            onsets["divergence"] = onset
        if onset := self._plateau.step(step, loss):
            onsets["plateau"] = onset

    def _finding(self, kind: Kind, step: int, onset: Onset) -> Finding:
        if kind in _OVER:
            self._told.add(kind)
        return Finding(
            kind=kind,
            step=step,
            first_step=onset.first_step,
            trusted_step=max(0, onset.first_step - 1 - _CAUTION_STEPS.get(kind, 0)),
            text=onset.text,
            action=self.policy.action_for(kind),
            hint=_HINTS[kind],
            limit=onset.limit,
        )

    def _over(self, step: int) -> list[Finding]:
        """Return findings that say what of the bad is over, to those who were told of it."""
        over = sorted(kind for kind in self._told if self._detectors[kind].is_over)
        self._told.difference_update(over)
        return [
            Finding(
                kind=kind,
                step=step,
                first_step=step,
                trusted_step=step,
                text=_OVER[kind],
                action="off" if self.policy.action_for(kind) == "off" else "warn",
                is_over=True,
            )
            for kind in over
        ]
