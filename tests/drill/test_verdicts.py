"""What a drill says of what it has seen, and how it shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from unbroken.drill.causes import Proof, Suspect, suspects
from unbroken.drill.comparison import first_divergence, noise
from unbroken.drill.page import page
from unbroken.drill.process import Ended, UnplannedEndError, judged
from unbroken.drill.report import as_json
from unbroken.drill.verdict import Findings, Verdict, verdict
from unbroken.rundir.rehearsal import Kill, Line

from .records import began, process, step, undisturbed

REFERENCE = tuple(undisturbed(10))
KILL = Kill(step=6, moment="in-step")
NAMES = ("found/__main__.rng",)


def seen(*resumed: Line, **more: Any) -> Findings:
    """A run that was killed at step 6, and resumed with these lines."""
    resumed = resumed or (began(4), *(step(number) for number in range(5, 11)))
    processes = (process(*undisturbed(6), kill=KILL, code=-9), process(*resumed))
    divergence = first_divergence(REFERENCE, [one.lines for one in processes])
    found = suspects(divergence.at_began) if divergence is not None else ()
    return Findings(
        command=("python", "train.py"),
        seed=0,
        reference=REFERENCE,
        processes=processes,
        distances={},
        divergence=divergence,
        suspects=found,
        **more,
    )


def proved(found: Findings, *names: str) -> Verdict:
    guilty = tuple(one for one in found.suspects if one.name in names)
    assert len(guilty) == len(names)
    return verdict(replace(found, proof=Proof(suspects=guilty, trials=2), is_repeatable=True))


def text(told: Verdict) -> str:
    return "\n".join((told.headline, *told.details))


def test_a_run_without_a_difference_is_proven_and_says_over_how_much() -> None:
    told = verdict(seen())
    assert told.headline == "PROVEN: bit-identical over 1 kill (10 steps, 4 components)"
    assert told.exit_code == 0
    assert told.details == ()


def test_a_difference_is_not_exact_and_its_cause_is_named_as_proved() -> None:
    told = proved(seen(began(4, {"found/__main__.rng": "x"}), step(5, batch="x")), "found/__main__.rng")
    assert told.headline == (
        "NOT EXACT: step 5: batch content differs; cause, proved by putting it back: "
        "`found/__main__.rng` is in no part of the run"
    )
    assert told.exit_code == 1
    assert told.details[0] == "seen after resume 1, which began from step 4 after SIGKILL in-step at step 6"
    assert told.details[1] == "pass `__main__.rng` to unbroken.Run, by a keyword, to keep it"


def test_moments_that_were_rounded_and_moments_that_are_gone_are_told_apart() -> None:
    rounded = proved(seen(began(4, {"optimizer/weight.exp_avg": "x"}), step(5, batch="x")), "optimizer")
    assert "`optimizer` had another value than when it was saved" in rounded.headline
    assert "rounds it to another dtype" in text(rounded)
    gone = began(4, {"optimizer/weight.exp_avg": None})
    dropped = proved(seen(gone, step(5, batch="x")), "optimizer")
    assert "1 of the values of `optimizer` were gone: `optimizer/weight.exp_avg`" in dropped.headline
    assert "do not build it again" in text(dropped)


def test_a_generator_that_was_moved_after_the_restore_is_named_in_words() -> None:
    told = proved(seen(began(4, {"rng/numpy": "x"}), step(5, batch="x")), "rng/numpy")
    assert "NumPy's global generator (`rng/numpy`)" in told.headline
    assert "seed before the run is entered" in text(told)


def test_a_wrong_learning_rate_is_shown_with_both_values() -> None:
    rates = ((0.79).hex(),)
    told = verdict(seen(began(4, rates=rates), step(5, rates=rates)))
    assert "learning rate 0.1 became 0.79" in told.headline
    assert "scheduler is in no part" in told.headline


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("b2", "it is the batch of step 2, read again"),
        ("b8", "it is the batch of step 8; 3 before it were skipped"),
        ("x", "the batch is none of the reference"),
    ],
)
def test_where_all_was_restored_and_the_batch_is_wrong_it_is_the_data(batch: str, words: str) -> None:
    told = verdict(seen(began(4), step(5, batch=batch)))
    assert "cause: the data" in told.headline
    assert words in told.headline


def test_state_that_nobody_sees_is_said_to_be_so() -> None:
    told = verdict(seen(began(4), step(5), step(6, components={"model/weight": "x"})))
    assert "step 6: `model/weight` differs; cause: state that cannot be seen" in told.headline


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (step(5, components={"model/weight": "x"}), "the optimizer or its moments were changed"),
        (step(5, metrics={"loss": "0x1p+9"}, components={"rng/numpy": "x"}), "`rng/numpy` is seeded again"),
        (step(5, rates=((0.2).hex(),)), "the learning rate 0.1 became 0.2 in that step"),
    ],
)
def test_a_first_step_that_does_something_else_is_told_by_what_it_changed(first: Line, words: str) -> None:
    told = verdict(seen(began(4), first))
    assert "all was restored, and the first step does something else after a resume" in told.headline
    assert words in told.headline


def test_what_the_run_says_itself_that_it_does_not_keep_is_the_cause_if_none_is_proved() -> None:
    found = seen(began(4), step(5, components={"model/weight": "x"}))
    processes = tuple(replace(one, not_kept=("model.mean: a buffer",)) for one in found.processes)
    told = verdict(replace(found, processes=processes))
    assert "cause: not kept, as the run said itself: model.mean: a buffer" in told.headline


def test_a_generator_is_named_by_its_kind_and_a_number_is_to_be_kept_in_a_dictionary() -> None:
    found = seen(began(4, {"found/__main__.rng": "x"}), step(5, batch="x"))
    generator = replace(found, suspects=tuple(replace(one, kind="numpy.Generator") for one in found.suspects))
    assert "the NumPy generator `found/__main__.rng` is in no part" in text(proved(generator, *NAMES))
    number = replace(found, suspects=tuple(replace(one, kind="int") for one in found.suspects))
    assert "to unbroken.Run, in a dictionary, by a keyword" in text(proved(number, *NAMES))


def test_a_part_whose_own_state_dict_leaves_something_out_is_named() -> None:
    hidden = "found/__main__.model.values"
    lines = began(4, {hidden: "x"}), step(5, components={"model/weight": "x"})
    reference = [
        msgspec.structs.replace(line, components={**line.components, hidden: "y"}) for line in undisturbed(10)
    ]
    divergence = first_divergence(reference, [undisturbed(6), lines])
    assert divergence is not None
    found = replace(seen(*lines), divergence=divergence, suspects=suspects(divergence.at_began))
    assert "is not what the state_dict of the part `model` had kept" in proved(found, hidden).headline


def test_suspects_that_prove_nothing_are_named_but_not_blamed() -> None:
    told = verdict(
        seen(began(4, {"rng/numpy": "x"}), step(5, components={"model/weight": "x"}), is_repeatable=True)
    )
    assert "cause: not proved" in told.headline
    assert "`rng/numpy`; with all of it put back the rest differs still" in text(told)


def test_a_difference_that_does_not_come_again_is_not_blamed_on_anything() -> None:
    told = verdict(seen(began(4, {"rng/numpy": "x"}), step(5, batch="x"), is_repeatable=False))
    assert "did not come again" in told.headline


def test_a_difference_before_any_kill_is_not_blamed_on_a_resume() -> None:
    processes = (process(began(0), step(1, batch="x"), kill=KILL, code=-9),)
    divergence = first_divergence(REFERENCE, [one.lines for one in processes])
    told = verdict(replace(seen(), processes=processes, divergence=divergence))
    assert told.outcome == "undecided"
    assert told.headline == "UNDECIDED: step 1: batch content differs, before any kill"


def test_a_script_that_is_not_deterministic_is_undecided_and_its_noise_is_the_measure() -> None:
    second = [began(0), step(1), step(2, metrics={"loss": (2.5).hex()}), *undisturbed(10)[3:]]
    found = replace(seen(), noise=noise(REFERENCE, second), distances={"loss": 0.4}, is_hash_order=False)
    told = verdict(found)
    assert told.headline == (
        "UNDECIDED: the script itself is not deterministic: two undisturbed runs differ from step 2 on"
    )
    assert told.exit_code == 1
    assert "loss differs by up to 0.5" in told.details
    assert "loss of the killed run is within that, 0.4 at most from the reference" in told.details
    further = verdict(replace(found, distances={"loss": 7.0}))
    assert "loss of the killed run is further off: by up to 7" in further.details


def test_the_order_of_sets_is_named_where_fixing_it_helps() -> None:
    second = [began(0), step(1, batch="x"), *undisturbed(10)[2:]]
    told = verdict(replace(seen(), noise=noise(REFERENCE, second), is_hash_order=True))
    assert "proved by setting PYTHONHASHSEED" in told.headline


def test_an_object_in_no_part_that_had_no_effect_is_named_beside_the_proof() -> None:
    told = verdict(replace(seen(), unkept={"found/__main__.rng": 5}))
    assert told.headline == (
        "PROVEN: bit-identical over 1 kill (10 steps, 3 components); "
        "in no part and not restored, without effect so far: `found/__main__.rng`"
    )
    assert told.exit_code == 0


def test_what_was_not_looked_at_is_named_beside_the_proof() -> None:
    notes = (
        "not looked at: ema: it cannot be encoded",
        "not looked at: an optimizer that was made after the first step, and what it trains",
        "not looked into: __main__.table, which has 4000 items",
        "cannot put back rng/numpy: there is no such object now",
        *(f"not looked at: more{number}: too large" for number in range(3)),
    )
    told = verdict(replace(seen(), notes=notes))
    assert told.headline == (
        "PROVEN: bit-identical over 1 kill (10 steps, 4 components); not looked at: ema, "
        "an optimizer that was made after the first step, and what it trains, __main__.table, more0 "
        "and 2 more"
    )
    assert set(notes) <= set(told.details)


def test_what_differs_as_an_epoch_begins_is_said_to_be_so() -> None:
    found = seen(began(4), step(5, batch="x"))
    assert found.divergence is not None
    told = verdict(replace(found, divergence=replace(found.divergence, is_between_epochs=True)))
    assert told.headline.startswith("NOT EXACT: the epoch after step 5: ")


def test_noise_without_consequence_is_left_out_and_said() -> None:
    second = [began(0), step(1, components={"found/__main__.rng": "x"}), *undisturbed(10)[2:]]
    told = verdict(replace(seen(), noise=noise(REFERENCE, second)))
    assert told.outcome == "proven"
    assert "left out" in told.details[0]


def test_without_a_checkpoint_that_was_restored_nothing_is_proven() -> None:
    told = verdict(seen(*undisturbed(10)))
    assert told.outcome == "undecided"
    assert told.exit_code == 1


def test_a_failure_shows_the_end_of_the_output() -> None:
    told = verdict(replace(seen(), failure="resume 1 ended with exit code 1", output="one\ntwo"))
    assert told.headline == "FAILED: resume 1 ended with exit code 1"
    assert told.details == ("the end of its output:", "  one", "  two")
    assert told.exit_code == 1


def ended(kill: Kill | None, code: int | None, *, lines: Sequence[Line], is_killed: bool) -> Ended:
    found = process(*lines, kill=kill if is_killed else None, code=code)
    return replace(found, plan=process(kill=kill).plan)


TEN, SIX = undisturbed(10), undisturbed(6)


@pytest.mark.parametrize(
    ("signal", "code", "end"),
    [
        ("SIGKILL", -9, "killed"),
        ("SIGTERM", 75, "killed"),
        ("SIGTERM", -15, "killed"),
        ("SIGINT", 130, "killed"),
    ],
)
def test_a_process_that_was_killed_ends_as_its_signal_says(signal: Any, code: int, end: str) -> None:
    kill = Kill(step=6, moment="in-step", signal=signal)
    assert judged(ended(kill, code, lines=SIX, is_killed=True), steps=10) == end


def test_a_process_whose_moment_never_came_is_complete() -> None:
    assert judged(ended(KILL, 0, lines=TEN, is_killed=False), steps=10) == "not-reached"
    assert judged(ended(None, 0, lines=TEN, is_killed=False), steps=10) == "complete"


@pytest.mark.parametrize(
    ("kill", "code", "is_killed", "words"),
    [
        (None, 1, False, "ended at step 6 with exit code 1"),
        (None, -11, False, "ended at step 6 with signal 11"),
        (KILL, 1, False, "ended at step 6 with exit code 1"),
        (None, 0, False, "ended at step 6 of 10 as if it were complete"),
        (None, None, False, "hung at step 6: no new step for 5 seconds"),
        (Kill(step=6, moment="in-step", signal="SIGTERM"), 1, True, "with exit code 1 after SIGTERM"),
    ],
)
def test_any_other_end_is_unplanned(kill: Kill | None, code: int | None, is_killed: bool, words: str) -> None:
    with pytest.raises(UnplannedEndError, match=re.escape(words)) as caught:
        judged(ended(kill, code, lines=SIX, is_killed=is_killed), steps=10)
    assert caught.value.output == "last words"


class Checked(HTMLParser):
    """Fails on what loads anything, and gathers the text and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_shows_curves_kills_and_verdict() -> None:
    found = seen()
    shown = page(found, verdict(found))
    checked = Checked()
    checked.feed(shown)
    assert not checked.open
    assert checked.tags.count("line") == 1
    assert checked.tags.count("tr") == 3
    assert checked.tags.count("path") == 4
    assert "PROVEN: bit-identical over 1 kill" in shown
    assert "http" not in shown
    assert "<title>SIGKILL in-step</title>" in shown


def test_the_page_escapes_what_comes_from_the_script() -> None:
    evil = '<script>alert(1)</script>&"'
    lines = tuple(step(number, metrics={evil: float(number).hex()}) for number in range(1, 4))
    found = replace(seen(), reference=lines, command=("python", evil), failure=evil, output=evil)
    shown = page(found, verdict(found))
    Checked().feed(shown)
    assert evil not in shown
    assert "&lt;script&gt;" in shown


def test_the_page_draws_a_loss_that_is_not_finite_or_never_changes_or_is_absent() -> None:
    broken = [step(1), step(2, metrics={"loss": "nan"}), step(3, metrics={"loss": "inf"}), step(4), step(5)]
    for lines in (
        broken,
        [step(1)],
        [step(1, metrics={})],
        [step(1), step(2, metrics={"loss": (1.0).hex()})],
    ):
        found = replace(seen(), reference=tuple(lines))
        shown = page(found, verdict(found))
        Checked().feed(shown)
        assert "nan" not in shown
        assert "inf" not in shown


def test_json_has_the_verdict_the_divergence_and_the_cause() -> None:
    found = seen(began(4, {"found/__main__.rng": "x"}), step(5, batch="b9", metrics={"loss": "nan"}))
    found = replace(found, proof=Proof(suspects=found.suspects, trials=3), is_repeatable=True)
    fields = as_json(found, verdict(found), None)
    assert json.loads(json.dumps(fields))["verdict"] == "not-exact"
    assert fields["divergence"]["step"] == 5
    assert fields["divergence"]["batch_of"] == 9
    assert fields["divergence"]["not_restored"] == ["found/__main__.rng"]
    assert fields["causes"] == ["found/__main__.rng"]
    assert fields["processes"][0] == {
        "began_at": 0,
        "reached": 6,
        "kill": {"step": 6, "moment": "in-step", "signal": "SIGKILL"},
        "killed": True,
        "exit_code": -9,
        "seconds": 1,
    }


def test_a_suspect_says_whether_it_is_in_a_part() -> None:
    assert Suspect(name="found/x", components={}).is_in_no_part
    assert not Suspect(name="model", components={}).is_in_no_part
