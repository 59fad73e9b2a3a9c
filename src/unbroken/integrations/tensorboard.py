"""Curves in TensorBoard that never overlap: what a resume or a roll-back supersedes is purged."""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from unbroken.errors import UsageError
from unbroken.rundir.tell import tell
from unbroken.training.run import Run

_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.")
# No more than that is missing after a kill; two minutes, as usual, would leave holes before checkpoints.
_FLUSH_SECONDS = 1
_STEP = "global_step"
# Methods that write beside the event file of the attempt, and what to do instead.
_OWN_FILES = {
    "add_scalars": "call add_scalar for each value",
    "add_hparams": "add settings by add_text, and results by add_scalar",
}


class Writer:
    """Writes to `log_dir` as a `SummaryWriter` of torch does, for the run `run`, which must be entered.

    with unbroken.Run("runs/first", model=model, optimizer=optimizer) as run, Writer(run, "logs") as board:
        ...
                run.step(loss=loss)
                board.add_scalar("loss", loss)

    It has the `add_` methods of `SummaryWriter` but for two that are named below, `flush` and `close`. What
    is added stands at the step of the run, so that nobody gives a `global_step`. `options` go to the
    `SummaryWriter`.

    Each attempt has an event file of its own, and another one after a roll-back. It begins by telling
    TensorBoard from which step on older files are superseded.

    Raises UsageError for another `global_step`, and for `add_scalars` and `add_hparams`, which make files of
    their own that cannot be purged.
    """

    def __init__(self, run: Run, log_dir: str | os.PathLike[str], **options: Any) -> None:
        self._run = run
        self._log_dir = os.fspath(log_dir)
        self._options = {"flush_secs": _FLUSH_SECONDS, **options}
        self._writer: SummaryWriter | None = None
        # How often the run had gone on from somewhere when the newest file was begun; None before the first.
        self._seen: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("add_") or not hasattr(SummaryWriter, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _OWN_FILES:
            raise UsageError(
                f"{name}: expected values that can be purged, found files of their own", hint=_OWN_FILES[name]
            )
        return lambda *arguments, **named: self._add(name, arguments, named)

    def flush(self) -> None:
        """Write what was added to the disk now; otherwise that takes a second."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write all that was added, and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        method = getattr(self._current(), name)
        signature = inspect.signature(method)
        bound = signature.bind(*arguments, **named)
        if _STEP in signature.parameters:
            given, step = bound.arguments.get(_STEP), self._run.step_count
            if given is not None and given != step:
                raise UsageError(
                    f"{name}: expected no global_step, or that of the run, {step}, found {given}",
                    hint="leave it out: what stands at other numbers cannot be purged after a resume",
                )
            bound.arguments[_STEP] = step
        return method(*bound.args, **bound.kwargs)

    def _current(self) -> SummaryWriter:
        went_on_from = self._run.went_on_from
        if self._writer is not None and len(went_on_from) == self._seen:
            return self._writer
        self.close()
        _wait_for_a_later_name(self._log_dir)
        self._writer = SummaryWriter(
            self._log_dir, purge_step=self._purged_from(went_on_from), **self._options
        )
        self._seen = len(went_on_from)
        return self._writer

    def _purged_from(self, went_on_from: tuple[int, ...]) -> int | None:
        """Return the step from which on older files are superseded, or None if nothing in them is."""
        if self._seen == len(went_on_from):
            return None
        behind = min(went_on_from[self._seen or 0 :], default=0) + 1
        # Who writes before `run.step` writes once more at the step that the run went on from.
        return min(behind, self._run.step_count)


def _wait_for_a_later_name(log_dir: str) -> None:
    """Return when a file that is made now has a later name than all that are there.

    TensorBoard reads files in the order of their names, which begin with the second, and purges what it has
    read before.
    """
    try:
        names = os.listdir(log_dir)
    except OSError:
        # There is none yet, or it is not on a disk.
        return
    newest = max((int(found[1]) for found in map(_FILE.match, names) if found), default=0)
    ahead = newest + 1 - time.time()
    if ahead > 1:
        tell(f"{log_dir}: the clock is {ahead:.0f} s behind the files there: curves may overlap")
    elif ahead > 0:
        time.sleep(ahead)
