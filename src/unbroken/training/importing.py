"""A run that begins from a checkpoint of another library: all of its state, not only the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.errors import StateMismatchError, UsageError
from unbroken.interchange.tf_place import find_bundle
from unbroken.state.choices import Choices
from unbroken.state.handlers import Difference
from unbroken.training import families
from unbroken.training.adaptation import renaming
from unbroken.training.comparison import Amount, is_allowed
from unbroken.training.own_start import is_of_a_run, start_from_run
from unbroken.training.part import Part
from unbroken.training.parts import Parts
from unbroken.training.randomness import RNG_PART
from unbroken.training.start_report import StartReport

_HINT = (
    "begin with the objects that were saved, or say by rename=, allow=, cast= or fresh= of Run what may "
    "differ; for weights alone there is unbroken.warm_start"
)


def begin_from(
    source: Path, parts: Mapping[str, object], choices: Choices, known: Sequence[Part] = ()
) -> StartReport:
    """Fill the `parts` of the script with the state in the checkpoint `source`, once all of it fits.

    `known` are the same parts with the handlers that the run has for them; without it they are looked for.

    Raises StateMismatchError that lists every difference the user did not allow, UsageError if there is
    no such checkpoint, DamagedError if its bytes are not what was saved; then nothing was changed.
    """
    if is_of_a_run(source) or find_bundle(source) is None:
        with_handlers = [part for part in known or Parts(parts, (), choices) if part.name != RNG_PART]
        if is_of_a_run(source):
            return start_from_run(source, with_handlers, choices, _HINT)
        # Loaded here: most runs begin by themselves, and need no readers.
        from unbroken.training import foreign_files, foreign_start

        if foreign_files.is_foreign_file(source):
            return foreign_start.start_from_file(source, with_handlers, choices, _HINT)
    return _begin_from_objects(source, parts, choices)


def _begin_from_objects(source: Path, parts: Mapping[str, object], choices: Choices) -> StartReport:
    """Begin from a checkpoint that a framework of the parts reads by itself."""
    wanted = {name: value for name, value in parts.items() if name not in choices.fresh}
    found = families.begin_from(source, parts, renaming(choices.rename), choices)
    if found is None and find_bundle(source) is not None:
        raise UsageError(
            f"Run: expected TensorFlow, of whose objects {source} is a checkpoint, found it is not in use",
            hint="import it before; weights alone go into a model of every framework by warm_start",
        )
    if found is None:
        raise UsageError(
            "Run: expected start_from= to be a run, a save of torch, Lightning or Hugging Face, or a "
            f"checkpoint of tf.train.Checkpoint, found {source}"
            f"{'' if source.exists() else ', which does not exist'}",
            hint="give the file or the directory of one save; of TensorFlow its prefix, DIRECTORY/ckpt-5",
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
