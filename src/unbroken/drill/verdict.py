"""What a rehearsal proves, in words and in an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from unbroken.drill import observed_words, words
from unbroken.drill.causes import Proof, Suspect
from unbroken.drill.comparison import Difference, Divergence, Noise, steps_of
from unbroken.drill.process import Ended
from unbroken.errors import EXIT_ERROR, EXIT_OK
from unbroken.rundir.rehearsal import Kill, Line

Outcome = Literal["proven", "not-exact", "undecided", "failed"]
# How notes of that begin: what it is, and then why.
_UNSEEN, _MOST_UNSEEN = re.compile(r"not looked (?:at|into): (.+?)(?:: |, which has |$)"), 4
_SURE = "cause, proved by putting it back"
_NO_RESUME = "each began anew: a save takes longer than the steps that lie between it and a kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that a rehearsal has seen.

    `is_hash_order` is true if two references agree once text hashes alike in all processes, `is_repeatable`
    false if the divergence was not there when the same resume was done once more; both are None where
    nobody looked. `unkept` are objects in no part that differed after a resume, by the step that it is first
    seen at. `notes` are of what could not be looked at or put back. `distances` are those of the metrics of
    the killed run from the reference. `resume_arguments` are those of a script that is observed.
    """

    command: tuple[str, ...]
    seed: int
    is_observed: bool = False
    resume_arguments: tuple[str, ...] = ()
    reference: tuple[Line, ...]
    processes: tuple[Ended, ...] = ()
    missed: tuple[Kill, ...] = ()
    noise: Noise | None = None
    unkept: Mapping[str, int] = field(default_factory=dict)
    is_hash_order: bool | None = None
    distances: Mapping[str, float]
    divergence: Divergence | None = None
    notes: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    proof: Proof | None = None
    is_repeatable: bool | None = None
    failure: str | None = None
    output: str = ""

    @property
    def steps(self) -> int:
        return max((line.step for line in self.reference), default=0)

    @property
    def components(self) -> int:
        """How many were compared at the last step, and agreed unless there is a divergence."""
        last = steps_of(self.reference).get(self.steps)
        left_out = {*self.unkept, *(self.noise.components if self.noise is not None else ())}
        return 0 if last is None else len(last.components.keys() - left_out)

    @property
    def kills(self) -> tuple[Ended, ...]:
        """The processes that were killed."""
        return tuple(one for one in self.processes if any(line.kind == "killed" for line in one.lines))

    @property
    def restored(self) -> int:
        """How many processes went on from a checkpoint."""
        return sum(1 for one in self.processes[1:] if one.began_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`headline` is one line that begins with the outcome in capitals, `details` what else is to say."""

    outcome: Outcome
    headline: str
    details: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.outcome == "proven" else EXIT_ERROR


def verdict(found: Findings) -> Verdict:
    """Return what `found` proves."""
    if found.failure is not None:
        output = ["the end of its output:", *(f"  {line}" for line in found.output.splitlines())]
        details = (*_already_seen(found), *_of_half_a_file(found), *(output if found.output else ()))
        return Verdict(outcome="failed", headline=f"FAILED: {found.failure}", details=details)
    if found.noise is not None and found.noise.is_of_training:
        return _of_noise(found, found.noise)
    misplaced = _of_wrong_beginnings(found) if found.is_observed else None
    if misplaced is not None:
        return misplaced
    if found.divergence is not None:
        return _of_divergence(found, found.divergence)
    if not found.restored:
        return Verdict(
            outcome="undecided",
            headline="UNDECIDED: no process went on from a checkpoint, so no resume was seen",
            details=(observed_words.NO_RESUME if found.is_observed else _NO_RESUME,),
        )
    return Verdict(
        outcome="proven",
        headline=f"PROVEN: bit-identical over {_count(len(found.kills), 'kill')} "
        f"({_count(found.steps, 'step')}, {_count(found.components, 'component')}){_but_for(found)}",
        details=tuple(_remarks(found)),
    )


def _of_wrong_beginnings(found: Findings) -> Verdict | None:
    """Return what is to say of a resume that took no checkpoint of its own run, if none went wrong before."""
    last = len(found.processes) if found.divergence is None else found.divergence.process + 1
    processes = found.processes[:last]
    anew = observed_words.began_anew(processes)
    if anew is not None:
        headline, detail = observed_words.of_beginning_anew(*anew, found.resume_arguments)
        return Verdict(outcome="not-exact", headline=f"NOT EXACT: {headline}", details=(detail,))
    ahead = observed_words.began_ahead(processes)
    if ahead is not None:
        headline, detail = observed_words.of_beginning_ahead(*ahead)
        return Verdict(outcome="undecided", headline=f"UNDECIDED: {headline}", details=(detail,))
    return None


def _but_for(found: Findings) -> str:
    """Return what the proof does not cover, to stand beside it."""
    text, unseen = "", _unseen(found)
    if found.unkept:
        what = "not restored" if found.is_observed else "in no part and not restored"
        text = f"; {what}, without effect so far: {words.some(list(found.unkept))}"
    return f"{text}; not looked at: {unseen}" if unseen else text


def _unseen(found: Findings) -> str:
    """Return the names of what was not looked at, as far as it was noted."""
    matches = [match for match in map(_UNSEEN.match, found.notes) if match is not None]
    names = [*dict.fromkeys(match[1] for match in matches)]
    more = f" and {len(names) - _MOST_UNSEEN} more" if len(names) > _MOST_UNSEEN else ""
    return f"{', '.join(names[:_MOST_UNSEEN])}{more}"


def _of_noise(found: Findings, noise: Noise) -> Verdict:
    reason = f"two undisturbed runs differ from step {noise.first_step} on"
    details = list(words.of_the_noise(noise))
    if found.is_hash_order:
        reason += "; cause, proved by setting PYTHONHASHSEED: the order of a set, or of what is hashed"
        details.append("sort what comes out of a set, or set PYTHONHASHSEED=0 wherever the script is started")
    elif found.is_hash_order is not None:
        details.append("seed random, numpy and torch, and try torch.use_deterministic_algorithms(True)")
    details += _judged_by_noise(found, noise)
    return Verdict(
        outcome="undecided",
        headline=f"UNDECIDED: the script itself is not deterministic: {reason}",
        details=tuple(details),
    )


def _judged_by_noise(found: Findings, noise: Noise) -> Iterator[str]:
    for name, distance in found.distances.items():
        usual = noise.metrics.get(name, 0.0)
        if distance <= usual:
            yield f"{name} of the killed run is within that, {distance:.3g} at most from the reference"
        else:
            yield f"{name} of the killed run is further off: by up to {distance:.3g}"


def _of_divergence(found: Findings, divergence: Divergence) -> Verdict:
    when = "the epoch after step" if divergence.is_between_epochs else "step"
    where = f"{when} {divergence.step}: {words.what_differs(divergence.found)}"
    if not divergence.is_resumed:
        # Two undisturbed runs may agree by chance; what differs here is no matter of a resume.
        return Verdict(
            outcome="undecided",
            headline=f"UNDECIDED: {where}, before any kill",
            details=("saving a checkpoint changes the run, or it is not deterministic after all",),
        )
    because, details = _because(found, divergence)
    return Verdict(
        outcome="not-exact",
        headline=f"NOT EXACT: {where}; {because}",
        details=(_how_it_came(found, divergence), *details, *_remarks(found)),
    )


class _Words(Protocol):
    """How to say what a resume has lost: by parts of a run, or of a script that restores by itself."""

    def cause(self, suspect: Suspect, found: Difference) -> str: ...
    def advice(self, suspect: Suspect, divergence: Divergence) -> str: ...
    def of_the_data(self, divergence: Divergence) -> str: ...
    def of_the_rates(self, at_began: Difference) -> str: ...


def _words(found: Findings) -> _Words:
    return observed_words if found.is_observed else words


def _because(found: Findings, divergence: Divergence) -> tuple[str, Sequence[str]]:
    at_began = divergence.at_began
    if found.is_repeatable is False:
        return "it did not come again when the same resume was repeated", (
            "what happened depends on chance: a race of threads or workers, or on the moment of the kill",
        )
    if found.proof is not None:
        named = found.proof.suspects
        told = "; ".join(_words(found).cause(one, divergence.found) for one in named)
        rates = f"; learning rate {words.became_rates(at_began)}" if at_began.rates is not None else ""
        return f"{_SURE}: {told}{rates}", [_words(found).advice(one, divergence) for one in named]
    return f"cause: {_likeliest(found, divergence)}", _not_proved(found)


def _likeliest(found: Findings, divergence: Divergence) -> str:
    """Return what to say where nothing was proved, by what differs and what does not."""
    not_kept = dict.fromkeys(line for one in found.processes for line in one.not_kept)
    if divergence.at_began.rates is not None:
        return _words(found).of_the_rates(divergence.at_began)
    if not_kept:
        return f"not kept, as the run said itself: {'; '.join(not_kept)}"
    if divergence.found.batch:
        return _words(found).of_the_data(divergence)
    if not found.is_observed and not _sees_batches(found):
        return "the data, likely: its loop does not use run.batches, so nobody keeps its position"
    if divergence.at_began.is_of_training:
        return "not proved"
    if divergence.step == divergence.began_at + 1:
        return words.of_the_first_step(divergence)
    return words.UNSEEN


def _sees_batches(found: Findings) -> bool:
    return any(line.batch is not None for line in found.reference)


def _not_proved(found: Findings) -> Sequence[str]:
    if not found.suspects:
        return ()
    names = words.some([one.name for one in found.suspects])
    return (f"not restored as it was: {names}; with all of it put back the rest differs still",)


def _how_it_came(found: Findings, divergence: Divergence) -> str:
    # Each process but the last was killed, and the one before this is why there is a resume.
    killed = found.processes[divergence.process - 1]
    kill = killed.plan.kill
    how = f"{kill.signal} {kill.moment} at step {killed.reached}" if kill is not None else "its end"
    began = f"from step {divergence.began_at}" if divergence.began_at else "anew"
    return f"seen after resume {divergence.process}, which began {began} after {how}"


def _already_seen(found: Findings) -> Iterator[str]:
    if found.divergence is not None:
        seen = found.divergence
        yield f"before that, step {seen.step} differed already: {words.what_differs(seen.found)}"


def _of_half_a_file(found: Findings) -> Iterator[str]:
    kill = found.processes[-1].plan.kill if found.processes else None
    if found.is_observed and kill is not None and (kill.moment, kill.signal) == ("in-save", "SIGKILL"):
        yield "the kill left half of the file that was being saved: write to another name, then os.replace it"


def _remarks(found: Findings) -> Iterator[str]:
    if found.noise is not None:
        names = words.some(list(found.noise.components))
        yield f"left out, for undisturbed runs differ in it too, without effect: {names}"
    for kill in found.missed:
        yield f"the moment of {kill.signal} {kill.moment} from step {kill.step} on never came"
    anew = [index for index, one in enumerate(found.processes) if index and not one.began_at]
    if anew and found.restored:
        yield f"{_count(len(anew), 'resume')} found no checkpoint yet and began anew"
    if found.divergence is None and found.unkept:
        how = "save with the checkpoint" if found.is_observed else "pass to unbroken.Run by a keyword"
        yield f"{how} what of these is more than a temporary value"
    if found.is_observed:
        yield observed_words.NOT_SEEN
    yield from found.notes


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
