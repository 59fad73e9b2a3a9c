"""Is the state good? The user's own check is asked before each checkpoint, and must leave no trace."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import PartEntry, Validation
from unbroken.errors import UsageError
from unbroken.frameworks.places import unmoved
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.state.paths import name_of
from unbroken.state.table import TensorTable
from unbroken.state.tensors import TensorSource, bytes_of
from unbroken.training import families
from unbroken.training.randomness import RNG_PART
from unbroken.training.whole_state import WholeState

_FEW = 3
# It stands in the manifest, in an alarm and on terminals.
_LONGEST_REASON = 300
_Marks = tuple[dict[str, PartEntry], dict[str, Hashable]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a check has come to, None if it was not asked; `error` is what went wrong in it."""

    validation: Validation | None = None
    error: Exception | None = None


class Validator:
    """Asks `check` about the state of now; `is_asking` while it does.

    The random generators, and the modes of modules (train, eval), are put back after it.
    """

    def __init__(self, check: Callable[[], object], state: WholeState) -> None:
        self.is_asking = False
        self._check = check
        self._state = state

    def ask(self) -> Answer:
        """Return what the check says: None and True mean good, False or a text, which is the reason, bad.

        Where it says something else, or raises an exception, the state counts as bad, and the answer has the
        error. Raises UsageError if it has changed the state, which then is not what was trained.
        """
        parts = self._state.parts
        before, have_gradients_changed = self._marks(), parts.mark_gradients()
        answer = self._answer()
        changed = _changed(before, self._marks())
        if changed or have_gradients_changed():
            names = ", ".join(changed[:_FEW]) or "gradients"
            more = f" and {len(changed) - _FEW} more" if len(changed) > _FEW else ""
            raise UsageError(
                f"validate=: expected a check that leaves the state as it is, {names}{more} changed in it",
                hint="a check must not train: call model.eval() in it first (or the statistics of BatchNorm "
                "move), and compute under torch.no_grad()",
            ) from answer.error
        return answer

    def _answer(self) -> Answer:
        self.is_asking = True
        try:
            with self._as_it_was():
                found = self._check()
            return Answer(validation=_validation(found))
        except Exception as error:  # noqa: BLE001 - it is raised when the state is kept
            error.add_note(f"in the check of validate=, before the checkpoint of step {self._state.step}")
            reason = _in_a_line(f"the check has failed itself: {type(error).__name__}: {error}")
            return Answer(validation=Validation(passed=False, reason=reason), error=error)
        finally:
            self.is_asking = False

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        parts = self._state.parts
        put_modes_back = families.mark_modes({part.name: part.value for part in parts})
        shared = capture_global_rng()
        try:
            with unmoved([*parts.generators(), *self._state.position.generators()]):
                yield
        finally:
            restore_present_rng(shared)
            put_modes_back()

    def _marks(self) -> _Marks:
        table = TensorTable()
        entries = self._state.parts.encode(table)
        # A generator that a part holds only since the check, or a library that came into use in it, is new.
        entries.pop(RNG_PART)
        return entries, {path: _mark(source) for path, source in table.sources.items()}


def _mark(source: TensorSource) -> Hashable:
    if source.address is None and "torch" in sys.modules:
        from unbroken.frameworks.torch.tensors import TorchTensor

        if isinstance(source, TorchTensor) and not source.detached().is_cpu:
            # Where it lies: to fetch what is on a device takes as long as to save it.
            return source.checksum()
    return digest(bytes_of(source))


def _changed(before: _Marks, after: _Marks) -> list[str]:
    """Return the names of the tensors, or else of the parts, that are no longer as they were."""
    entries, tensors = before
    entries_now, tensors_now = after
    paths = sorted({*tensors, *tensors_now})
    changed = [name_of(path) for path in paths if tensors.get(path) != tensors_now.get(path)]
    return changed or [name for name, entry in entries.items() if entry != entries_now[name]]


def _validation(answer: Any) -> Validation:
    # A comparison of tensors or arrays gives one of a single element.
    is_single = hasattr(answer, "item") and math.prod(getattr(answer, "shape", ())) == 1
    value = answer.item() if is_single else answer
    if value is None or value is True:
        return Validation(passed=True)
    if value is False:
        return Validation(passed=False, reason="the check says no")
    if isinstance(value, str) and value:
        return Validation(passed=False, reason=_in_a_line(value))
    raise UsageError(
        f"validate=: expected None or True from the check, or False or a text that says what is bad, "
        f"found {answer!r}",
        hint="return `loss < 10`, or a reason such as f'the loss of the probe batch is {loss}'",
    )


def _in_a_line(text: str) -> str:
    """Return `text` without what a terminal would obey, cut if it is long."""
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 3]}..."
