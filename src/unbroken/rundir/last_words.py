"""What an attempt says about its own end, for whoever asks why it ended.

An exit code can lie (pipes, shells, launchers); this record is written by the run itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.files import read_json, write_json

# running: the library took over, and nothing has been said since.
# completed: the training loop came to its own end, and its final state is committed.
# stopped: the state was saved on request; run it again to go on.
# failed: an exception left the `with` block or prevented entering it.
Ending: TypeAlias = Literal["running", "completed", "stopped", "failed"]
# The kind of a stop whose next start goes back to an earlier checkpoint.
ROLL_BACK = "roll-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """The record. `checkpoint` is the newest committed one; `kind` and `exit_code` are of the error."""

    ending: Ending
    step: int
    checkpoint: str | None = None
    reason: str = ""
    kind: str = ""
    exit_code: int = 0
    message: str = ""
    hint: str = ""
    frame: str = ""


def write_last_words(attempt_directory: Path, words: LastWords, rank: int = 0) -> None:
    """Write the record, durably, in place of an earlier one."""
    write_json(attempt_directory / layout.of_rank(layout.LAST_WORDS, rank), asdict(words))


def read_last_words(attempt_directory: Path, rank: int = 0) -> LastWords | None:
    """Return the record of an attempt, or None if it has none that can be read."""
    try:
        value = read_json(attempt_directory / layout.of_rank(layout.LAST_WORDS, rank))
    except StorageError:
        # What cannot be read is no evidence; the verdict then rests on the exit status alone.
        return None
    if value is None or value.get("ending") not in get_args(Ending):
        return None
    try:
        return LastWords(**value)
    except TypeError:
        return None
