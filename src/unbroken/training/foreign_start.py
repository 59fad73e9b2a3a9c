"""A run that begins from a checkpoint of torch.save, Lightning, the Trainer, Accelerate or safetensors.

Which state is of which part is told by what is in it; each is brought into the form that our handlers have
states in, and from there on everything is as in a resume: all is compared, then all is put.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.errors import StateMismatchError, UsageError
from unbroken.state.choices import Choices
from unbroken.state.handlers import Difference
from unbroken.state.tensors import TensorSource, copy_bytes
from unbroken.training.adaptation import Rename, renaming
from unbroken.training.comparison import Origin
from unbroken.training.foreign_checkpoint import foreign_checkpoint
from unbroken.training.foreign_entries import Entry, Kind, assign, entries_of, epoch_in, others, step_in
from unbroken.training.foreign_files import ForeignFile, objects_in
from unbroken.training.part import Part
from unbroken.training.restoration import Restoration
from unbroken.training.start_report import StartReport, start_report

_KINDS: Mapping[str, Kind] = {
    "torch.module": "model",
    "torch.optimizer": "optimizer",
    "torch.scheduler": "scheduler",
}
# Parts whose state may stand at the top of a file under their name.
_BY_NAME = frozenset({"python.state_dict", "python.container", "torch.tensor"})
_NOTES = (
    "random generators are not taken from such a checkpoint: they go on as the script set them",
    "nor is the position in the data: the run begins between epochs, which it counts from 0, and does not "
    "know which samples were seen",
)
_SHOWN = 8
_COUNTS = {"F32": "f", "F64": "d", "I64": "q", "I32": "i"}


class _Names:
    """The user's map of names, and which rules of it have changed a name."""

    def __init__(self, rename: Mapping[Any, str]) -> None:
        self._rename = rename
        self._new_name = renaming(rename)
        self._met: set[str] = set()

    def new(self, name: str) -> str:
        """Return what `name` is called here."""
        self._met.add(name)
        return self._new_name(name)

    def idle(self) -> list[str]:
        """Return the rules that have changed none of the names that were asked for."""
        return [
            str(getattr(old, "pattern", old))
            for old, new in self._rename.items()
            # Longer than any rule makes it, so that one that leaves a name as it is counts, too.
            if all(renaming({old: f"{new}'"})(name) == name for name in self._met)
        ]


def start_from_file(source: Path, parts: Sequence[Part], choices: Choices, hint: str) -> StartReport:
    """Fill `parts` with the states in the checkpoint `source` of another library, once all of it fits.

    Raises StateMismatchError that lists every difference the user did not allow, UsageError for what is no
    such checkpoint or may be meant in several ways, DamagedError if it is not whole. Then nothing changed.
    """
    file, names = ForeignFile(source), _Names(choices.rename)
    if "torch" not in sys.modules:
        raise UsageError(
            f"Run: expected torch, of whose objects {source} holds states, found it is not in use",
            hint="import it before; weights alone go into a model of every framework by warm_start",
        )
    found = _Found(file, parts, choices, names)
    step, how = step_in(file.values, _steps_made(found.of_parts.values()))
    checkpoint = foreign_checkpoint(source, found.states, found.strangers, step=step)
    origin = Origin(called=file.source, beside=found.beside)
    try:
        restored = Restoration(parts, checkpoint, replace(choices, rename={}), origin).run()
    except StateMismatchError as error:
        raise StateMismatchError(error.message, hint=hint) from error
    idle = [f"{rule!r} of rename= changes no name in the checkpoint" for rule in names.idle()]
    notes = [*found.notes, *idle, *found.left(file), how, *_epoch(file.values), *_NOTES]
    return start_report(file.source, restored, notes, step=step)


class _Found:
    """What a file has for the parts of a run: `of_parts` are its states, those that begin anew included.

    `states` are the others in the form of their handlers, with `beside` what differs; `strangers` are the
    kinds of states that no part has, by name.
    """

    def __init__(self, file: ForeignFile, parts: Sequence[Part], choices: Choices, names: _Names) -> None:
        self._entries = entries_of(file.values)
        kinds = {part.name: kind for part in parts if (kind := _kind(part)) is not None}
        self.of_parts = assign(self._entries, kinds, names.new, choices.fresh)
        self._by_name = {
            part.name: file.values[part.name]
            for part in parts
            if part.name not in self.of_parts and part.handler.name in _BY_NAME and part.name in file.values
        }
        self.states: dict[str, tuple[Part, Any]] = {}
        self.beside: dict[str, list[Difference]] = {}
        self.notes: list[str] = []
        for part in parts:
            if part.name not in choices.fresh:
                self._take(part, names)
        self.strangers = self._unused(kind for name, kind in kinds.items() if name in choices.fresh)
        self._check_apart()

    def left(self, file: ForeignFile) -> list[str]:
        """Return a line on what else is in `file`."""
        found = others(file.values, self._entries, self._by_name)
        if not found:
            return []
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return [f"not taken over: {', '.join(name[:40] for name in found[:_SHOWN])}{more}"]

    def _take(self, part: Part, names: _Names) -> None:
        entry = self.of_parts.get(part.name)
        found = self._by_name.get(part.name) if entry is None else entry.value
        if found is None:
            return
        state, differences, said = _translated(part, found, entry, names)
        if state is not None:
            self.states[part.name], self.beside[part.name] = (part, state), differences
            self.notes += [f"{part.name}: {note}" for note in said]

    def _unused(self, fresh: Iterable[Kind]) -> dict[str, str]:
        """Return the states that are of no part; for each of a `fresh` kind one may be what it had."""
        unused = [entry for entry in self._entries if entry not in self.of_parts.values()]
        used = Counter(entry.kind for entry in self.of_parts.values())
        for kind, count in Counter(fresh).items():
            left = [entry for entry in unused if entry.kind == kind]
            if not used[kind] and len(left) <= count:
                unused = [entry for entry in unused if entry not in left]
        return {entry.name: entry.kind for entry in unused}

    def _check_apart(self) -> None:
        for name in self.strangers:
            if name in self.states:
                raise UsageError(
                    f"Run: expected a rename= that keeps parts apart, found several that become {name!r}",
                    hint=f"rename the other as well, rename={{{name!r}: 'other'}}, and allow=['{name}']",
                )


def _kind(part: Part) -> Kind | None:
    if part.handler.name in _KINDS:
        return _KINDS[part.handler.name]
    # Gradient scalers are told by their methods, as there are several classes of them.
    is_scaler = all(hasattr(part.value, name) for name in ("unscale_", "get_growth_factor", "state_dict"))
    return "scaler" if is_scaler else None


def _translated(
    part: Part, found: Any, entry: Entry | None, names: _Names
) -> tuple[Any, list[Difference], list[str]]:
    """Return the state of `part` as its handler has it, None if files have none, what differs, and notes."""
    from unbroken.frameworks.torch.foreign_states import foreign_state

    objects = objects_in(found)
    if objects:
        text = "an object of class {}, which is not loaded"
        unread = [Difference("other", where, text.format(kind)) for where, kind in objects.items()]
        return part.handler.state(part.value), unread, []
    done = foreign_state(part.handler, part.value, found, _below(part.name, entry, names))
    notes = done.notes if entry is None else [f"taken from {entry.name}", *done.notes]
    return done.state, done.differences, notes if entry and entry.name != part.name else done.notes


def _below(part: str, entry: Entry | None, names: _Names) -> Rename:
    """Return the map for names inside a part, which may be given below its name here or that in the file."""
    places = dict.fromkeys([part, *([entry.name] if entry else [])])

    def new_name(name: str) -> str:
        for place in places:
            full = f"{place}.{name}"
            new = names.new(full)
            if new != full and new.startswith(f"{part}."):
                inner = new.removeprefix(f"{part}.")
                if inner != name:
                    return inner
        return name

    return new_name


def _steps_made(entries: Iterable[Entry]) -> int | None:
    """Return how often optimizers have stepped, by the counts in their states; None if none keeps any."""
    counts = [
        _number(state["step"])
        for entry in entries
        if entry.kind == "optimizer"
        for state in entry.value["state"].values()
        if isinstance(state, dict) and "step" in state
    ]
    whole = [int(count) for count in counts if 0 <= count < 1 << 53 and count == math.floor(count)]
    return max(whole, default=None)


def _number(count: Any) -> float:
    if isinstance(count, TensorSource) and count.dtype in _COUNTS and math.prod(count.shape) == 1:
        (number,) = struct.unpack(f"<{_COUNTS[count.dtype]}", copy_bytes(count))
        return float(number) if math.isfinite(number) else -1
    is_number = isinstance(count, int | float) and not isinstance(count, bool) and math.isfinite(count)
    return count if is_number else -1


def _epoch(values: Mapping[str, Any]) -> list[str]:
    epoch = epoch_in(values)
    return [] if epoch is None else [f"its epoch is {epoch:g}: give run.epochs() those that are left"]
