"""A plain DataLoader goes on in another process, bit for bit, wherever the first one was killed."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler

from tests.frameworks.loader_scenarios import (
    BATCH,
    BATCHES,
    KINDS,
    MOMENTS,
    SAMPLES,
    Augmented,
    Scenario,
    build_loader,
    finished_run,
    fresh_python,
    in_own_process,
    killed_run,
    noise,
    plain_log,
    seed_all,
)
from tests.some import some
from unbroken.frameworks.rng import capture_global_rng, restore_present_rng
from unbroken.frameworks.torch.loader import ResumableLoader

SETUPS = {"no workers": (0, False), "workers": (2, False), "workers that live on": (2, True)}


@pytest.mark.parametrize(("kind", "workers"), some({kind: kind for kind in KINDS}, SETUPS, one_in=3))
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(kind: str, workers: tuple[int, bool]) -> None:
    scenario = Scenario(kind=kind, workers=workers[0], persistent=workers[1])
    # The moments rotate, so that each meets every kind of sampler or every set-up of workers.
    start = KINDS.index(kind) * len(SETUPS) + list(SETUPS.values()).index(workers)
    moments = tuple(sorted({MOMENTS[(start + step) % len(MOMENTS)] for step in (0, 7)}, key=MOMENTS.index))

    checkpoints = killed_run(scenario, moments)

    assert tuple(checkpoints) == moments
    for moment in moments:
        assert finished_run(scenario, checkpoints[moment]) == plain_log(scenario), moment


@pytest.mark.chaos
@pytest.mark.parametrize(
    "workers", [(0, False), (1, False), (2, False), (2, True), (3, False), (4, True)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_may_be_killed_at_any_moment(kind: str, workers: tuple[int, bool]) -> None:
    scenario = Scenario(kind=kind, workers=workers[0], persistent=workers[1])
    for moment in MOMENTS:
        checkpoint = killed_run(scenario, (moment,))[moment]
        assert finished_run(scenario, checkpoint) == plain_log(scenario), moment


@pytest.mark.parametrize(
    ("kind", "workers", "kills"),
    some(
        {kind: kind for kind in ("shuffle", "replacement with generator")},
        SETUPS,
        {
            "in one epoch": ("0.2", "0.5", "0.8"),
            "in two": ("0.after", "1.3", "1.4"),
            "in the last two": ("1.11", "1.exhausted", "2.1"),
        },
        one_in=3,
    ),
)
def test_a_run_may_be_killed_again_and_again(
    kind: str, workers: tuple[int, bool], kills: tuple[str, ...]
) -> None:
    scenario = Scenario(kind=kind, workers=workers[0], persistent=workers[1])
    checkpoint = None
    for moment in kills:
        checkpoint = killed_run(scenario, (moment,), checkpoint)[moment]

    assert finished_run(scenario, checkpoint) == plain_log(scenario)


@pytest.mark.parametrize(
    ("kind", "workers"),
    some({kind: kind for kind in ("shuffle with generator", "replacement with generator")}, SETUPS, one_in=2),
)
def test_leaving_an_epoch_early_is_part_of_the_run(kind: str, workers: tuple[int, bool]) -> None:
    scenario = Scenario(kind=kind, workers=workers[0], persistent=workers[1], leave_after=6)
    moments = ("0.2", "0.exhausted", "0.after", "1.1")

    checkpoints = killed_run(scenario, moments)

    for moment in moments:
        assert finished_run(scenario, checkpoints[moment]) == plain_log(scenario), moment


def spawn_run(persistent: bool, kill: str) -> str:
    scenario = Scenario(workers=2, persistent=persistent, start_method="spawn")
    return (
        f"checkpoint = killed_run({scenario!r}, ({kill!r},))[{kill!r}]\n"
        f"print(repr(finished_run({scenario!r}, checkpoint)))"
    )


@pytest.mark.chaos
@pytest.mark.parametrize("kill", ["0.1", "1.5", "1.after", "2.11"])
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "workers that live on"])
def test_a_run_with_spawned_workers_may_be_killed_at_any_moment(persistent: bool, kill: str) -> None:
    done = fresh_python(spawn_run(persistent, kill))

    assert ast.literal_eval(done.stdout) == plain_log(Scenario(workers=2, persistent=persistent))


@pytest.mark.chaos
def test_a_fresh_interpreter_with_spawned_workers_goes_on_where_another_was_killed() -> None:
    scenario = Scenario(workers=2, persistent=True, start_method="spawn")

    killed = fresh_python(f"print(repr(killed_run({scenario!r}, ('1.5',))['1.5']))")
    resumed = fresh_python(
        f"print(repr(finished_run({scenario!r}, ast.literal_eval(sys.stdin.read()))))", killed.stdout
    )

    # Torch gives the same batches whichever way its workers are started.
    assert ast.literal_eval(resumed.stdout) == plain_log(Scenario(workers=2, persistent=True))


def test_the_wrapped_loader_gives_what_the_plain_one_gives() -> None:
    for scenario in (Scenario(), Scenario(workers=2, persistent=True)):
        assert finished_run(scenario, None) == plain_log(scenario)


def test_taking_states_changes_nothing() -> None:
    scenario = Scenario(kind="replacement with generator", workers=2, persistent=True)

    checkpoints = killed_run(scenario, MOMENTS)

    log = checkpoints[MOMENTS[-1]]["log"]
    assert log == plain_log(scenario)[: len(log)]


def test_no_consumed_sample_is_read_again() -> None:
    def interrupted() -> tuple[list[int], dict[str, object]]:
        data = Augmented()
        loader = ResumableLoader(build_loader(Scenario(), data))
        for _ in itertools.islice(loader.iterate(), 4):
            state = loader.state()
        return data.reads, state

    def resumed(state: dict[str, object]) -> list[int]:
        data = Augmented()
        loader = ResumableLoader(build_loader(Scenario(), data))
        loader.restore(state)
        assert len(list(loader.iterate(inside_epoch=True))) == BATCHES - 4
        return data.reads

    consumed, state = in_own_process(interrupted)
    left = in_own_process(resumed, state)

    assert len(consumed) == 4 * BATCH
    assert sorted(consumed + left) == list(range(SAMPLES))


def test_two_loaders_side_by_side_both_go_on() -> None:
    def build() -> list[ResumableLoader]:
        # They share a dataset with its generator and, without workers, the global generators too.
        data = Augmented()
        return [ResumableLoader(build_loader(Scenario(), data)) for _ in range(2)]

    def log_of(pairs: Iterator[Any]) -> list[str]:
        return [repr((one[0].tolist(), other[0].tolist(), noise())) for one, other in pairs]

    def reference() -> list[str]:
        seed_all(0)
        one, other = build()
        return log_of(zip(one.iterate(), other.iterate(), strict=True))

    def interrupted() -> tuple[Any, ...]:
        seed_all(0)
        one, other = build()
        pairs = zip(one.iterate(), other.iterate(), strict=True)
        log = log_of(itertools.islice(pairs, 5))
        return log, one.state(), other.state(), capture_global_rng()

    def resumed(one_state: Any, other_state: Any, rng: Any) -> list[str]:
        one, other = build()
        one.restore(one_state)
        other.restore(other_state)
        left = [
            loader.iterate(inside_epoch=True, after_replay=lambda: restore_present_rng(rng))
            for loader in (one, other)
        ]
        return log_of(zip(*left, strict=True))

    log, *states = in_own_process(interrupted)

    assert log + in_own_process(resumed, *states) == in_own_process(reference)


class GrowingSampler(Sampler[list[int]]):
    """One batch in the first epoch, all in later ones: the second worker begins late."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        count = BATCHES if self.epoch else 1
        return iter([[index, index + 1] for index in range(count)])


def test_a_worker_that_lives_on_but_had_nothing_to_read_yet_starts_from_what_it_started_from() -> None:
    def build() -> tuple[Augmented, GrowingSampler, ResumableLoader]:
        data, sampler = Augmented(), GrowingSampler()
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        return data, sampler, ResumableLoader(DataLoader(data, batch_sampler=sampler, **options))

    def rest_of(sampler: GrowingSampler, loader: ResumableLoader) -> list[str]:
        sampler.epoch = 1
        return [repr(batch[0].tolist()) for batch in loader.iterate()]

    def reference(is_to_end: bool) -> Any:
        seed_all(0)
        data, sampler, loader = build()
        list(loader.iterate())
        data.rng.normal()  # in the main process; the workers have copies of their own
        if is_to_end:
            return rest_of(sampler, loader)
        kept.append(loader)
        return loader.state(), capture_global_rng()

    def resumed(state: dict[str, object], rng: dict[str, object]) -> list[str]:
        _, sampler, loader = build()
        loader.restore(state)
        restore_present_rng(rng)
        return rest_of(sampler, loader)

    kept: list[ResumableLoader] = []
    state, rng = in_own_process(reference, False)

    assert in_own_process(resumed, state, rng) == in_own_process(reference, True)
