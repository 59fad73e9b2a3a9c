"""Where a script is rehearsed, and how it is started there: by its run, or observed from outside."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unbroken.drill.copies import copy_run, copy_work, first_copy
from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import Line, Observed

_CHANGE_DIRECTORY = 'cd "$1" && shift && exec "$@"'
_PATH = "PYTHONPATH"
# Python runs a module of that name as it starts. This one begins with underscores wherever it names
# something, for a script's modules are looked through.
_SITECUSTOMIZE = """\
import sys

try:
    import unbroken.training.observing as __observing__
except ImportError as __error__:
    print(f"unbroken: not observed: {__error__}; install unbroken in {sys.prefix}", file=sys.stderr)
else:
    __observing__.arm(__file__.rpartition("/")[0])
"""


class Stage(Protocol):
    """Prepares what the script finds, and starts it."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    def set_up(self, directory: Path) -> None:
        """Make `directory` what the script is to find at first."""
        ...

    def copy(self, source: Path, target: Path) -> None:
        """Make `target` what `source` is."""
        ...

    def command(self, directory: Path, *, is_resumed: bool) -> Sequence[str]:
        """Return what starts the script there."""
        ...

    def observed(self, reference: Path | None) -> Observed | None:
        """Return how the script is observed, if it is, and by which record a resume is placed."""
        ...

    def is_resumed(self, reference: Sequence[Line], before: Sequence[Sequence[Line]]) -> bool:
        """Tell whether a process after those `before` is to be started as a resume."""
        ...

    def without_steps(self) -> UsageError:
        """Return what to say if no step was recorded."""
        ...


class RunStage:
    """The script uses `unbroken.Run`, which follows the plan."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self.environment = environment

    def set_up(self, directory: Path) -> None:
        """The run makes its directory itself."""

    def copy(self, source: Path, target: Path) -> None:
        copy_run(source, target)

    def command(self, directory: Path, *, is_resumed: bool) -> Sequence[str]:
        return self._command

    def observed(self, reference: Path | None) -> Observed | None:
        return None

    def is_resumed(self, reference: Sequence[Line], before: Sequence[Sequence[Line]]) -> bool:
        return bool(before)

    def without_steps(self) -> UsageError:
        return UsageError(
            "no step was recorded: the script does not use unbroken.Run, or ends before its first step",
            hint="train inside `with unbroken.Run(...) as run:` and call run.step() once per step; "
            "a PyTorch script that has its own resume is watched from outside with --observe",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a user says of a script that is to be observed.

    `directory` is where it is started, which is copied without what is `shared`; `resume_arguments` are
    added to its command once it has saved something.
    """

    directory: Path
    resume_arguments: tuple[str, ...] = ()
    shared: tuple[Path, ...] = ()


class ObservedStage:
    """The script knows nothing of a drill: it works in a copy of its directory and is watched."""

    def __init__(
        self, command: Sequence[str], observation: Observation, root: Path, environment: Mapping[str, str]
    ) -> None:
        self._command = command
        self._observation = observation
        self._original = root / "original"
        self._site = root / "site"
        self._environment = environment
        first_copy(observation.directory, self._original, shared=observation.shared, skipped=root)
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(_SITECUSTOMIZE)

    @property
    def environment(self) -> Mapping[str, str]:
        rest = self._environment.get(_PATH)
        path = str(self._site) if not rest else f"{self._site}{os.pathsep}{rest}"
        return {**self._environment, _PATH: path}

    def set_up(self, directory: Path) -> None:
        copy_work(self._original, directory)

    def copy(self, source: Path, target: Path) -> None:
        copy_work(source, target)

    def command(self, directory: Path, *, is_resumed: bool) -> Sequence[str]:
        more = self._observation.resume_arguments if is_resumed else ()
        moved = [_moved(text, self._observation.directory, directory) for text in (*self._command, *more)]
        return ["sh", "-c", _CHANGE_DIRECTORY, "sh", str(directory), *moved]

    def observed(self, reference: Path | None) -> Observed | None:
        record = None if reference is None else str(reference)
        return Observed(original=str(self._observation.directory), reference=record)

    def is_resumed(self, reference: Sequence[Line], before: Sequence[Sequence[Line]]) -> bool:
        # Of a script that does not save by torch nobody knows when there is something to resume from.
        is_seen = any(line.kind == "saved" for line in reference)
        has_saved = any(line.kind == "saved" for lines in before for line in lines)
        return bool(before) and (has_saved or not is_seen)

    def without_steps(self) -> UsageError:
        return UsageError(
            "no step was recorded: no torch optimizer made one in a Python process of this command",
            hint="observed are PyTorch optimizers, in a Python with unbroken installed that heeds PYTHONPATH "
            "(not with -I or -E); --keep DIR keeps what the script printed",
        )


def _moved(text: str, source: Path, target: Path) -> str:
    """Return an argument that leads into `source` as it leads into its copy.

    >>> _moved("--out=/home/me/lab/out", Path("/home/me/lab"), Path("/tmp/copy"))
    '--out=/tmp/copy/out'
    """
    name, equals, value = text.rpartition("=")
    if Path(value).is_absolute() and Path(value).is_relative_to(source):
        return f"{name}{equals}{target / Path(value).relative_to(source)}"
    return text
