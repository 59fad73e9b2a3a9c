"""A run that begins from a checkpoint of another library: all of its state, not only the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import StateMismatchError, UsageError
from unbroken.interchange.tf_place import find_bundle
from unbroken.state.choices import Choices
from unbroken.state.handlers import Difference
from unbroken.training import families
from unbroken.training.adaptation import renaming
from unbroken.training.comparison import Amount, is_allowed

_HINT = (
    "begin with the objects that were saved, or say by rename=, allow=, cast= or fresh= of Run what may "
    "differ; for weights alone there is unbroken.warm_start"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What a run began from: `parts` got so much of `source`, with the differences that were `allowed`.

    `fresh` are the parts that began as the script built them; `notes` say what is not in such a checkpoint.
    """

    source: str
    parts: Mapping[str, Amount]
    fresh: tuple[str, ...]
    allowed: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report for people, a line each."""
        taken = [f"{name} {amount.tensors:,} tensors" for name, amount in self.parts.items()]
        size = sum(amount.size_bytes for amount in self.parts.values())
        lines = [f"begins from {self.source}: {', '.join(taken)}, {size:,} bytes"]
        lines += [f"{name}: begins as the script built it" for name in self.fresh]
        return lines + [f"begins with a difference: {line}" for line in self.allowed] + list(self.notes)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; fields are only ever added."""
        return {
            "source": self.source,
            "parts": {
                name: {"tensors": amount.tensors, "bytes": amount.size_bytes}
                for name, amount in self.parts.items()
            },
            "fresh": list(self.fresh),
            "allowed": list(self.allowed),
            "notes": list(self.notes),
        }


def begin_from(source: Path, parts: Mapping[str, object], choices: Choices) -> StartReport:
    """Fill the `parts` of the script with the state in the checkpoint `source`, once all of it fits.

    Raises StateMismatchError that lists every difference the user did not allow, UsageError if there is
    no such checkpoint, DamagedError if its bytes are not what was saved; then nothing was changed.
    """
    wanted = {name: value for name, value in parts.items() if name not in choices.fresh}
    found = families.begin_from(source, parts, renaming(choices.rename), choices)
    if found is None and find_bundle(source) is not None:
        raise UsageError(
            f"Run: expected TensorFlow, of whose objects {source} is a checkpoint, found it is not in use",
            hint="import it before; weights alone go into a model of every framework by warm_start",
        )
    if found is None:
        raise UsageError(
            f"Run: expected start_from= to be a checkpoint of tf.train.Checkpoint, found {source}"
            f"{'' if source.exists() else ', which does not exist'}",
            hint="give its prefix (DIRECTORY/ckpt-5) or its directory; for weights there is warm_start",
        )
    refused, allowed = list[str](), list[str]()
    differences = {**found.differences()}
    differences |= {
        name: [Difference("unexpected", "", "the program lacks this part")]
        for name in found.others
        if name not in choices.fresh
    }
    for name, items in differences.items():
        for item in items:
            line = f"{name}: {item}"
            (allowed if is_allowed(name, item, choices) else refused).append(line)
    empty = [name for name in wanted if not found.amount(name)[0] and _has_any(differences[name])]
    refused += [f"{name}: nothing in it fits, so that nothing would be taken" for name in empty]
    if refused:
        lines = "\n  ".join(refused)
        raise StateMismatchError(
            f"{found.source} does not fit what this program built; nothing was changed\n  {lines}", hint=_HINT
        )
    found.fill()
    taken = {name: Amount(*found.amount(name)) for name in wanted}
    return StartReport(
        source=found.source,
        parts={name: amount for name, amount in taken.items() if amount.tensors},
        fresh=tuple(name for name in parts if name not in wanted or not taken[name].tensors),
        allowed=tuple(allowed),
        notes=tuple(found.notes),
    )


def _has_any(differences: list[Difference]) -> bool:
    """Tell whether a part differs inside, and is not just absent as a whole."""
    return any(item.name for item in differences)
