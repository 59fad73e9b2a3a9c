"""Better weights into the copy of a module that nobody uses, and then into use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import CheckpointError, CheckpointNotFoundError, InputError, StorageError
from unbroken.frameworks.torch.copies import two_copies
from unbroken.frameworks.torch.served import fill, not_finite_as_built
from unbroken.serving.choice import Candidate, Choice
from unbroken.serving.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """A module with the weights of one checkpoint in it."""

    module: Any
    checkpoint: Checkpoint


class Refresh:
    """Two copies of a module: `turns` says which is in use, the other is filled with what is better."""

    def __init__(
        self,
        choice: Choice,
        module: object,
        *,
        part: str | None,
        on_new: Callable[[LiveWeights], object] | None,
        non_finite: Sequence[str],
    ) -> None:
        self.choice = choice
        self._copies = two_copies(module)
        self._masks = not_finite_as_built(self._copies[0])
        self._part = part
        self._on_new = on_new
        self._non_finite = tuple(non_finite)
        self._served: Candidate | None = None

    def begin(self, *, every_seconds: float, wait_seconds: float | None) -> Turns[LiveWeights]:
        """Wait for the first weights, and return them as what is in use.

        Raises what is wrong with the module or the run, and CheckpointNotFoundError when time is up.
        """
        until = math.inf if wait_seconds is None else time.monotonic() + wait_seconds
        while True:
            candidate = self.choice.next(None)
            if candidate is not None:
                # The copy first: as long as nothing fits, the module of the script is as it was.
                weights = self._filled(candidate, self._copies[1])
                if weights is not None:
                    return Turns(weights)
                continue
            left = until - time.monotonic()
            if left <= 0:
                why = f" ({self.choice.problem})" if self.choice.problem else ""
                raise CheckpointNotFoundError(
                    f"{self.choice.directory}: expected weights within {wait_seconds:g} s, found none{why}",
                    hint="let the run save once, or wait longer",
                )
            self.choice.say_waiting()
            time.sleep(min(every_seconds, left))

    def look(self, turns: Turns[LiveWeights]) -> bool:
        """Bring what is better into use, if there is something; True if it is worth looking again at once."""
        candidate = self.choice.next(self._served)
        if candidate is None or not turns.wait_until_left():
            return False
        spare = next(copy for copy in self._copies if copy is not turns.current.module)
        try:
            weights = self._filled(candidate, spare)
        except InputError as error:
            # The run was begun anew, with another model: what is served stays what it is.
            self.choice.refuse(candidate, error.message)
            return True
        if weights is not None:
            turns.switch(weights)
        return True

    def _filled(self, candidate: Candidate, module: Any) -> LiveWeights | None:
        """Return `module` with the weights of `candidate`, or None if they are not to be served."""
        try:
            fill(module, candidate.checkpoint, self._part, non_finite=self._non_finite, masks=self._masks)
        except (CheckpointError, StorageError) as error:
            # Pruned while it was read, it is not damaged: another one is newer.
            if not self.choice.is_there(candidate):
                return None
            if isinstance(error, StorageError):
                raise
            self.choice.refuse(candidate, error.message)
            return None
        weights = LiveWeights(module=module, checkpoint=candidate.checkpoint)
        # It takes a while to read them: meanwhile the run may have gone back.
        if not (self._is_wanted(weights, candidate) and self.choice.is_good(candidate)):
            return None
        self._served, self.choice.problem = candidate, None
        return weights

    def _is_wanted(self, weights: LiveWeights, candidate: Candidate) -> bool:
        if self._on_new is None:
            return True
        try:
            self._on_new(weights)
        except Exception as error:  # noqa: BLE001 - it is the answer of the user's own check
            self.choice.refuse(candidate, f"on_new says {type(error).__name__}: {error}")
            return False
        return True
