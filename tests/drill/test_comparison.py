"""The first difference between records, in the order of causes, and what has to be put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from unbroken.drill.causes import Proof, Suspect, prove, suspects
from unbroken.drill.comparison import (
    Difference,
    difference,
    distances,
    first_divergence,
    last_steps,
    noise,
    not_restored,
    steps_of,
    unkept,
)
from unbroken.rundir.rehearsal import Line

from .records import began, step, undisturbed

REFERENCE = undisturbed(9)


def test_records_that_agree_have_no_divergence() -> None:
    processes = [undisturbed(5), [began(4), *(step(number) for number in range(5, 10))]]
    assert first_divergence(REFERENCE, processes) is None


def test_the_first_divergence_names_the_process_the_step_and_what_differs() -> None:
    wrong = step(6, batch="x", metrics={"loss": "0x1p+9"}, components={"model/weight": "x"})
    processes = [undisturbed(5), [began(4, {"rng/numpy": "x"}), step(5), wrong]]
    found = first_divergence(REFERENCE, processes)
    assert found is not None
    assert (found.process, found.began_at, found.step, found.is_resumed) == (1, 4, 6, True)
    assert found.found.batch
    assert found.found.metrics == {"loss": (float(6).hex(), "0x1p+9")}
    assert found.found.components == {"model/weight": ("m6", "x")}
    assert not found.found.gradients


def test_a_step_that_was_wrong_counts_even_if_it_was_lost_and_came_right_later() -> None:
    processes = [undisturbed(3), [began(2), step(3), step(4, batch="x")], [began(3), step(4), step(5)]]
    found = first_divergence(REFERENCE, processes)
    assert found is not None
    assert (found.process, found.step) == (1, 4)


def test_what_was_not_restored_is_what_differs_before_the_first_step() -> None:
    lines = [began(4, {"found/__main__.rng": "x", "rng/numpy": "y"}), step(5, batch="x")]
    found = not_restored(REFERENCE, lines)
    assert found.components == {"found/__main__.rng": ("f4", "x"), "rng/numpy": ("r4", "y")}
    assert not found.batch


def test_a_process_that_began_anew_is_compared_with_the_beginning_of_the_reference() -> None:
    assert not_restored(REFERENCE, [began(0, {"model/weight": "x"})]).components == {
        "model/weight": ("m0", "x")
    }


def test_causes_come_in_order_what_is_in_no_part_first_and_generators_last() -> None:
    names = ["rng/numpy", "optimizer/weight.exp_avg", "model/weight", "found/__main__.rng"]
    found = difference(step(3), step(3, components=dict.fromkeys(names, "x")))
    assert list(found.components) == [
        "found/__main__.rng",
        "model/weight",
        "optimizer/weight.exp_avg",
        "rng/numpy",
    ]


def test_a_component_that_is_gone_differs_unless_it_is_only_an_object_not_found_yet() -> None:
    gone = step(3, components={"optimizer/weight.exp_avg": None, "found/__main__.rng": None})
    assert difference(step(3), gone).components == {"optimizer/weight.exp_avg": ("o3", None)}


def test_what_is_masked_and_what_was_not_looked_at_does_not_differ() -> None:
    other = step(3, batch=None, gradients=None, components={"found/__main__.rng": "x"})
    assert difference(step(3), other, masked=["found/__main__.rng"]) == Difference()


def test_a_learning_rate_differs_by_its_bits() -> None:
    found = difference(step(3), step(3, rates=((0.1 + 1e-9).hex(),)))
    assert found.rates == (((0.1).hex(),), ((0.1 + 1e-9).hex(),))


def test_objects_in_no_part_that_changed_nothing_are_no_divergence_but_are_named() -> None:
    lines = [began(4, {"found/__main__.rng": "x"}), step(5, components={"found/__main__.rng": "x"})]
    assert first_divergence(REFERENCE, [undisturbed(4), lines]) is None
    assert unkept(REFERENCE, [undisturbed(4), lines]) == {"found/__main__.rng": 5}
    assert unkept(REFERENCE, [undisturbed(4), lines], masked=["found/__main__.rng"]) == {}


def test_a_resume_from_the_end_of_an_epoch_is_compared_with_the_beginning_of_the_next() -> None:
    later = Line(kind="epoch", step=4, components={"model/weight": "m4", "scheduler/last_epoch": "1"})
    reference = [*undisturbed(4), later, step(5)]
    resumed = Line(
        kind="began",
        step=4,
        components=dict(later.components, **{"model/weight": "x"}),
        is_between_epochs=True,
    )
    assert not_restored(reference, [resumed]).components == {"model/weight": ("m4", "x")}


def test_what_differs_as_an_epoch_begins_is_a_divergence_too() -> None:
    later = Line(kind="epoch", step=4, rates=((0.1).hex(),))
    wrong = Line(kind="epoch", step=4, rates=((0.2).hex(),))
    found = first_divergence([*undisturbed(4), later], [undisturbed(2), [began(2), step(3), step(4), wrong]])
    assert found is not None
    assert (found.step, found.is_between_epochs) == (4, True)


@pytest.mark.parametrize(("got", "of"), [("b2", 2), ("b7", 7), ("x", None)])
def test_a_batch_of_another_step_is_recognised(got: str, of: int | None) -> None:
    found = first_divergence(REFERENCE, [undisturbed(4), [began(4), step(5, batch=got)]])
    assert found is not None
    assert found.batch_of == of


def test_two_references_that_agree_have_no_noise() -> None:
    assert noise(REFERENCE, undisturbed(9)) is None


def test_noise_is_measured_for_each_metric_and_component() -> None:
    second = [
        began(0),
        step(1),
        step(2, metrics={"loss": (2.5).hex()}),
        step(3, metrics={"loss": (3.25).hex()}, components={"model/weight": "x"}),
    ]
    found = noise(undisturbed(3), second)
    assert found is not None
    assert found.is_of_training
    assert (found.first_step, found.metrics, found.components) == (2, {"loss": 0.5}, {"model/weight": 3})
    assert (found.batch, found.gradients, found.rates) == (None, None, None)


def test_noise_of_objects_in_no_part_alone_is_not_of_training() -> None:
    found = noise(undisturbed(1), [began(0), step(1, components={"found/__main__.rng": "x"})])
    assert found is not None
    assert not found.is_of_training


def test_a_generator_that_nobody_seeds_or_uses_is_noise_without_effect() -> None:
    found = noise(undisturbed(1), [began(0), step(1, components={"rng/numpy": "x"})])
    assert found is not None
    assert not found.is_of_training
    assert found.components == {"rng/numpy": 1}


def test_a_metric_that_is_not_a_number_once_is_infinitely_far_off() -> None:
    other = steps_of([step(1, metrics={"loss": "nan"})])
    assert distances(steps_of(REFERENCE), other) == {"loss": float("inf")}
    assert distances(other, other) == {}


def test_of_a_step_that_was_made_twice_the_last_one_counts_for_the_curve() -> None:
    last = last_steps([[step(1), step(2)], [step(2, batch="again"), step(3)]])
    assert [last[number].batch for number in (1, 2, 3)] == ["b1", "again", "b3"]


def named(*names: str) -> tuple[Suspect, ...]:
    return tuple(Suspect(name=name, components={name: ("a", "b")}) for name in names)


def right_with(*needed: str) -> tuple[Callable[[Sequence[Suspect]], bool], list[set[str]]]:
    tried: list[set[str]] = []

    def is_right(found: Sequence[Suspect]) -> bool:
        tried.append({one.name for one in found})
        return set(needed) <= tried[-1]

    return is_right, tried


def test_suspects_are_whole_parts_single_generators_and_single_objects() -> None:
    names = ["found/__main__.a", "found/__main__.b", "model/x", "model/y", "rng/numpy", "rng/python"]
    found = suspects(Difference(components=dict.fromkeys(names, ("a", "b"))))
    assert [one.name for one in found] == [
        "found/__main__.a",
        "found/__main__.b",
        "model",
        "rng/numpy",
        "rng/python",
    ]
    assert list(found[2].components) == ["model/x", "model/y"]
    assert [one.is_in_no_part for one in found] == [True, True, False, False, False]


def test_one_cause_is_found_alone() -> None:
    is_right, tried = right_with("b")
    assert prove(named("a", "b", "c"), is_right) == Proof(suspects=named("b"), trials=2)
    assert tried == [{"a"}, {"b"}]


def test_two_causes_are_found_together_and_nothing_else_is_blamed() -> None:
    is_right, _ = right_with("b", "d")
    proof = prove(named("a", "b", "c", "d"), is_right)
    assert proof is not None
    assert proof.suspects == named("b", "d")


def test_among_many_suspects_the_cause_is_found_without_trying_each_alone() -> None:
    names = [f"n{index}" for index in range(12)]
    is_right, tried = right_with("n7")
    proof = prove(named(*names), is_right)
    assert proof is not None
    assert proof.suspects == named("n7")
    assert tried[0] == set(names)


def test_nothing_is_proved_when_not_even_all_together_make_it_right() -> None:
    is_right, tried = right_with("what nobody sees")
    assert prove(named("a", "b"), is_right) is None
    assert tried == [{"a"}, {"b"}, {"a", "b"}]
