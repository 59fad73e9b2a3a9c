"""What was not restored, and why it may be, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unbroken.drill.causes import Suspect
from unbroken.drill.comparison import FOUND, GENERATORS, Difference, Divergence, Noise, Pair, number

_MOST_NAMES = 4
UNSEEN = "state that cannot be seen: all that was compared was restored"
_KINDS = {
    "numpy.Generator": "the NumPy generator ",
    "numpy.RandomState": "the NumPy generator ",
    "random.Random": "the Python generator ",
    "torch.Generator": "the torch generator ",
    "int": "the number ",
    "float": "the number ",
}
_GENERATOR_WORDS = {
    "python": "the generator of Python's random",
    "numpy": "NumPy's global generator",
    "torch": "torch's global generator",
    "torch-cpu": "torch's global generator",
}


def what_differs(found: Difference) -> str:
    """Return what differs within one step, the first of its causes first.

    >>> what_differs(Difference(batch=True, metrics={"loss": ("0x1p+0", "0x1p+1")}))
    'batch content differs, loss 1 became 2'
    """
    return ", ".join(_what_differs(found)) or "nothing differs"


def _what_differs(found: Difference) -> Iterator[str]:
    if found.batch:
        yield "batch content differs"
    for name, pair in found.metrics.items():
        yield f"{name} {_pair(pair)}"
    if found.rates is not None:
        yield f"learning rate {became_rates(found)}"
    if found.gradients and not found.metrics:
        yield "gradients differ"
    if not (found.batch or found.metrics or found.rates or found.gradients):
        names = [name for name in found.components if not name.startswith(FOUND)]
        yield f"{some(names)} {_verb(len(names), 'differs', 'differ')}"


def cause(suspect: Suspect, found: Difference) -> str:
    """Return what became of a suspect that had to be put back; `found` is what differed then."""
    if suspect.is_in_no_part:
        part = _part_of(suspect, found)
        if part is not None:
            return f"{named(suspect)} is not what the state_dict of the part `{part}` had kept"
        return f"{named(suspect)} is in no part of the run"
    if suspect.name.startswith(GENERATORS):
        return f"{generator(suspect)} was not where it had been"
    absent = [name for name, (_, other) in suspect.components.items() if other is None]
    if absent:
        return f"{len(absent)} of the values of `{suspect.name}` were gone: {some(absent)}"
    new = [name for name, (reference, _) in suspect.components.items() if reference is None]
    if new:
        return f"`{suspect.name}` had values that it should not have yet: {some(new)}"
    count = len(suspect.components)
    what = "another value" if count == 1 else f"{count} other values"
    return f"`{suspect.name}` had {what} than when it was saved: {some(list(suspect.components))}"


def named(suspect: Suspect) -> str:
    """Return an object in no part by its name and kind."""
    return f"{_KINDS.get(suspect.kind or '', '')}`{suspect.name}`"


def generator(suspect: Suspect) -> str:
    """Return a generator that the whole process shares."""
    kind = suspect.name.removeprefix(GENERATORS)
    return f"{_GENERATOR_WORDS.get(kind, 'the generator')} (`{suspect.name}`)"


def advice(suspect: Suspect, divergence: Divergence) -> str:
    """Return what to do about a suspect."""
    if suspect.is_in_no_part:
        part = _part_of(suspect, divergence.found)
        if part is not None:
            return f"look at what the state_dict of `{part}` leaves out, or rounds to another dtype"
        how = "in a dictionary, " if suspect.kind in ("int", "float", "bool", "str") else ""
        return f"pass `{suspect.name.removeprefix(FOUND)}` to unbroken.Run, {how}by a keyword, to keep it"
    if suspect.name.startswith(GENERATORS):
        return "seed before the run is entered; something seeded it again, or drew from it, after the restore"
    if divergence.at_began.rates is not None:
        return "set rates before the run is entered and leave them to its scheduler; override= is for another"
    if any(None in pair for pair in suspect.components.values()):
        return f"build `{suspect.name}` before the run is entered and do not build it again afterwards"
    return (
        f"look for what changes `{suspect.name}` after the restore, and for a state_dict that leaves"
        " something out or rounds it to another dtype"
    )


def _part_of(suspect: Suspect, found: Difference) -> str | None:
    """Return the part by whose variable an object was found: a part that keeps its state by itself."""
    parts = {name.partition("/")[0] for name in found.components if not name.startswith((FOUND, GENERATORS))}
    words = suspect.name.removeprefix(FOUND).split(".")
    return next((word for word in words if word in parts), None)


def of_the_data(divergence: Divergence) -> str:
    """Return what to say where only the batch is wrong."""
    expected, got = divergence.step, divergence.batch_of
    if got is None:
        return (
            "the data: everything that was compared was restored, and the batch is none of the reference;"
            " its order or its augmentation depends on state that is in no part, or in a worker"
        )
    if got < expected:
        return f"the data: it is the batch of step {got}, read again; the order or the position was not kept"
    return f"the data: it is the batch of step {got}; {got - expected} before it were skipped"


def of_the_first_step(divergence: Divergence) -> str:
    """Return what to say where all was restored, and the first step came out otherwise all the same."""
    found = divergence.found
    moved = [name for name in found.components if name.startswith(GENERATORS)]
    if moved:
        what = f"{some(moved)} {_verb(len(moved), 'is', 'are')} seeded again, or drawn from, in that step"
    elif found.rates is not None:
        what = f"the learning rate {became_rates(found)} in that step"
    elif not (found.metrics or found.gradients):
        what = "loss and gradients are the same, so the optimizer or its moments were changed"
    else:
        return UNSEEN
    return f"all was restored, and the first step does something else after a resume: {what}"


def of_the_rates(at_began: Difference) -> str:
    """Return what to say of learning rates that were wrong before the first step."""
    return (
        f"the learning rate {became_rates(at_began)} before the first step: it was set after the restore,"
        " or its scheduler is in no part"
    )


def of_the_noise(noise: Noise) -> Iterator[str]:
    """Yield what differs between two runs that nobody disturbed."""
    for what, step in (("batch content", noise.batch), ("gradients", noise.gradients)):
        if step is not None:
            yield f"{what} differ{'s' if what[0] == 'b' else ''} from step {step} on"
    for name, distance in noise.metrics.items():
        yield f"{name} differs by up to {distance:.3g}"
    if noise.rates is not None:
        yield f"learning rates differ from step {noise.rates} on"
    if noise.components:
        yield f"{some(list(noise.components))} {_verb(len(noise.components), 'differs', 'differ')}"


def some(names: Sequence[str]) -> str:
    """Return the first of `names` and how many more there are.

    >>> some(["a", "b", "c", "d", "e", "f"])
    '`a`, `b`, `c`, `d` and 2 more'
    """
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many


def _pair(pair: Pair) -> str:
    reference, other = pair
    if reference is None or other is None:
        return "is only in the reference" if other is None else "is only in the resumed run"
    return became(number(reference), number(other))


def became(one: float, other: float) -> str:
    """Return two floats in as few digits as tell them apart."""
    for form in (".6g", "#.9g", "#.17g"):
        texts = format(one, form), format(other, form)
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} became {texts[1]}"


def became_rates(found: Difference) -> str:
    assert found.rates is not None, "asked only where they differ"
    pairs = [pair for pair in zip(*found.rates, strict=False) if pair[0] != pair[1]]
    if not pairs:
        return "of another number of groups"
    return became(number(pairs[0][0]), number(pairs[0][1]))
