"""What to say of a script that is observed from outside: it has no parts and restores by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unbroken.drill import words
from unbroken.drill.causes import Suspect
from unbroken.drill.comparison import FOUND, GENERATORS, Difference, Divergence
from unbroken.drill.process import Ended
from unbroken.rundir.rehearsal import Line

NOT_SEEN = (
    "seen from outside: modules, optimizers, schedulers, generators and variables that a name in the script's"
    " modules or running functions leads to; not seen: what lives in workers, in other processes, in C"
)
NO_RESUME = (
    "each began anew: the first checkpoint comes later than the kills (raise --steps), or the script needs "
    "arguments to resume (--resume-args)"
)


def cause(suspect: Suspect, found: Difference) -> str:
    """Return what became of a suspect that had to be put back."""
    if suspect.is_in_no_part:
        return f"{words.named(suspect)} was not restored"
    if suspect.name.startswith(GENERATORS):
        return f"{words.generator(suspect)} was not restored"
    return words.cause(suspect, found)


def advice(suspect: Suspect, divergence: Divergence) -> str:
    """Return what to do about a suspect."""
    name = suspect.name.removeprefix(FOUND)
    if suspect.name.startswith(GENERATORS):
        return f"save the state of `{name}`, and set it right before the loader begins its pass"
    if suspect.is_in_no_part:
        return f"save `{name}` with the checkpoint, and load it"
    return f"save the state_dict of `{name}` with the checkpoint, and load it into the one that is used"


def of_the_data(divergence: Divergence) -> str:
    """Return what to say where the batch is wrong."""
    step, got = divergence.step, divergence.batch_of
    moved = [name for name in divergence.at_began.components if name.startswith((FOUND, GENERATORS))]
    why = f"; not restored before it: {words.some(moved)}" if moved else ""
    if got is None:
        return f"the data: the batch is none of the reference; its order or content was not kept{why}"
    how = "read again" if got < step else f"{got - step} before it were skipped"
    return f"the data: it is the batch of step {got}, {how}; the order or the position was not kept{why}"


def of_the_rates(at_began: Difference) -> str:
    """Return what to say of learning rates that were wrong before the first step."""
    return f"the learning rate {words.became_rates(at_began)} before the first step: it was not restored"


def began_anew(processes: Sequence[Ended]) -> tuple[int, int] | None:
    """Return the first resume that began anew, and the step that the script had saved after by then."""
    saved = 0
    for index, process in enumerate(processes):
        if index and process.began_at == 0 and saved:
            return index, saved
        saved = max((line.step for line in _saved(process)), default=saved)
    return None


def _saved(process: Ended) -> Iterator[Line]:
    """Yield what tells of saves, but for one of several files in which the process died."""
    kill = process.plan.kill
    died_at = process.reached if kill is not None and kill.moment == "in-save" else None
    return (line for line in process.lines if line.kind == "saved" and line.step != died_at)


def began_ahead(processes: Sequence[Ended]) -> tuple[int, int] | None:
    """Return the first resume that began where its run had not come to, and the step of that."""
    reached = 0
    for index, process in enumerate(processes):
        began_at = process.began_at or 0
        if index and began_at > reached:
            return index, began_at
        reached = max(reached, process.reached)
    return None


def of_beginning_anew(resume: int, saved: int, arguments: Sequence[str]) -> tuple[str, str]:
    """Return what to say of it, and what to do about it."""
    told = f"resume {resume} began anew, though the script had saved after step {saved}"
    if arguments:
        return told, f"started with {' '.join(arguments)}, it restored nothing: see what it makes of that"
    return told, "the same command restored nothing: say how the script resumes with --resume-args"


def of_beginning_ahead(resume: int, began_at: int) -> tuple[str, str]:
    """Return what to say of it, and what to do about it."""
    told = f"resume {resume} began from step {began_at}, to which its run had not come"
    return told, "it found what another run had saved: have it save below the directory that it is started in"
