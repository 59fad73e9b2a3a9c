"""Twin runs: killed and resumed in fresh processes, equal bit for bit to the one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.testing.runs import compare_runs

from .processes import final_digests, last_words, step_events, train

LOADERS = {
    "0 workers": [],
    "2 workers": ["--workers", "2"],
    "2 persistent workers": ["--workers", "2", "--persistent"],
}
STEPS = 21


@pytest.fixture(scope="module", params=LOADERS, ids=lambda name: name.replace(" ", "-"))
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    done = train(run_dir, *LOADERS[request.param])
    assert done.returncode == 0, done.stderr
    return run_dir, LOADERS[request.param]


# An epoch has 7 steps; saved every 3. The last batch of an epoch, its end, and the first of the next are
# among the points, and several kills in one epoch.
@pytest.mark.parametrize(
    "kills", [(5, 6, 15), pytest.param((8, 9), marks=pytest.mark.chaos), (12, 14, 21)], ids=str
)
def test_a_run_that_is_killed_again_and_again_is_equal_bit_for_bit(
    reference: tuple[Path, list[str]], tmp_path: Path, kills: tuple[int, ...]
) -> None:
    expected, arguments = reference
    run_dir = tmp_path / "run"
    for kill_at in kills:
        assert train(run_dir, *arguments, "--kill-at", str(kill_at)).returncode == -9
    done = train(run_dir, *arguments)
    assert done.returncode == 0, done.stderr
    found = compare_runs(expected, run_dir)
    assert found.differences == ()
    assert (found.steps, found.tensors > 20) == (STEPS, True)
    assert "samples 150" in done.stderr
    assert len(step_events(run_dir)) > STEPS, "nothing was repeated: the kills came too early to matter"


def test_sigterm_saves_the_very_step_and_exits_with_75(
    reference: tuple[Path, list[str]], tmp_path: Path
) -> None:
    expected, arguments = reference
    run_dir = tmp_path / "run"
    for term_at in (5, 7, 16):
        done = train(run_dir, *arguments, "--term-at", str(term_at))
        assert done.returncode == 75, done.stderr
        words = last_words(run_dir)
        assert (words.ending, words.step, words.reason) == ("stopped", term_at, "signal SIGTERM")
    assert train(run_dir, *arguments).returncode == 0
    assert len(step_events(run_dir)) == STEPS, "a stop that saves repeats nothing"
    assert compare_runs(expected, run_dir).differences == ()


def test_an_exception_leaves_last_words_and_the_run_goes_on_from_the_last_checkpoint(
    reference: tuple[Path, list[str]], tmp_path: Path
) -> None:
    expected, arguments = reference
    run_dir = tmp_path / "run"
    done = train(run_dir, *arguments, "--raise-at", "11")
    assert done.returncode == 1
    words = last_words(run_dir)
    assert (words.ending, words.kind, words.message) == ("failed", "RuntimeError", "a bug of the user")
    assert words.frame.split("/")[-1].startswith("script.py:")
    assert words.frame.endswith(" in act")
    assert train(run_dir, *arguments).returncode == 0
    assert compare_runs(expected, run_dir).differences == ()


def test_a_run_that_is_complete_stays_as_it_is_when_it_is_started_again(
    reference: tuple[Path, list[str]],
) -> None:
    expected, arguments = reference
    before = final_digests(expected), len(step_events(expected))
    assert train(expected, *arguments).returncode == 0
    assert (final_digests(expected), len(step_events(expected))) == before
    assert last_words(expected).ending == "completed"
