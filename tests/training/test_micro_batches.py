"""A batch in parts: the same samples, the same gradient, and a supervisor that makes the parts smaller."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unbroken
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import read_events
from unbroken.supervisor.judging.outcome import judge
from unbroken.supervisor.judging.verdict import ExitStatus, Facts
from unbroken.training.micro_batches import count_samples, split

from .processes import step_events, train
from .runs import words_of
from .test_supervised import unbroken as cli
from .test_supervised import verdicts

SCRIPT = Path(__file__).with_name("splitting_script.py")
Pair = namedtuple("Pair", "left right")


def parts(batch: Any, count: int) -> list[tuple[Any, float]]:
    return list(split(batch, count_samples(batch), count))


@given(st.integers(1, 40), st.integers(0, 7))
def test_parts_hold_each_sample_once_in_order_and_differ_by_one_at_most(samples: int, halvings: int) -> None:
    found = parts({"x": torch.arange(samples), "names": [str(n) for n in range(samples)]}, 2**halvings)
    assert torch.equal(torch.cat([part["x"] for part, _ in found]), torch.arange(samples))
    assert [name for part, _ in found for name in part["names"]] == [str(n) for n in range(samples)]
    sizes = [len(part["x"]) for part, _ in found]
    assert max(sizes) - min(sizes) <= 1
    assert len(found) == min(2**halvings, samples)
    assert [share for _, share in found] == [size / samples for size in sizes]


def test_every_container_is_split_in_its_own_kind_and_what_has_no_samples_goes_to_every_part() -> None:
    batch = {
        "pair": Pair(torch.zeros(4, 2), [torch.ones(4), (1, 2, 3, 4)]),
        "array": np.arange(4),
        "user": UserDict(mask=torch.zeros(4)),
        "frozen": MappingProxyType({"mask": torch.zeros(4)}),
        "images": (torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)),
        "temperature": torch.tensor(0.5),
        "task": "digits",
        "weight": None,
    }
    first, second = (part for part, _ in parts(batch, 2))
    assert type(first["pair"]) is Pair
    assert type(first["user"]) is UserDict
    assert first["frozen"]["mask"].shape == (2,)
    assert first["images"][1].shape == (2, 8, 8)
    assert first["pair"].left.shape == (2, 2)
    assert (first["pair"].right[1], second["pair"].right[1]) == ((1, 2), (3, 4))
    assert second["array"].tolist() == [2, 3]
    assert (second["temperature"], second["task"], second["weight"]) == (0.5, "digits", None)
    assert batch["user"]["mask"].shape == (4,)


def test_a_batch_in_one_part_is_that_batch_itself() -> None:
    batch = [torch.zeros(4), torch.zeros(4)]
    ((part, share),) = parts(batch, 1)
    assert part is batch
    assert share == 1.0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([torch.zeros(4, 2), torch.zeros(3)], r"the batch\[0\] has 4, the batch\[1\] has 3"),
        (([torch.zeros(3, 8, 8)] * 5, [0, 1, 2, 3, 4]), "found a list of 5 tensors"),
        ([[1, 2], [3, 4]], "a list of lists"),
        ([torch.zeros(3, 8, 8)] * 16, "a list of 16 tensors that all have 3 dim"),
        ({"x": [torch.zeros(224, 224)] * 2}, r"batch\['x'\], found a list of 2 tensors"),
        ({"x": object()}, r"object in the batch\['x'\]"),
        (torch.tensor(1.0), "nothing that has one"),
    ],
)
def test_what_cannot_be_split_for_certain_is_refused_while_it_still_is_in_one_part(
    tmp_path: Path, batch: Any, words: str
) -> None:
    with unbroken.Run(tmp_path / "run") as run, pytest.raises(UsageError, match=words) as caught:
        list(run.micro_batches(batch))
    assert "by their numbers" in caught.value.hint


@pytest.mark.parametrize("halvings", [0, 1, 2, 3])
def test_the_gradient_is_that_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, halvings: int
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    inputs, labels = torch.randn(11, 6), torch.arange(11) % 3
    nn.functional.cross_entropy(model(inputs), labels).backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    monkeypatch.setenv(layout.HALVINGS_VARIABLE, str(halvings))
    count = 0
    with unbroken.Run(tmp_path / "run", model=model) as run:
        for (x, y), share in run.micro_batches((inputs, labels)):
            (nn.functional.cross_entropy(model(x), y) * share).backward()
            count += 1
    assert count == 2**halvings
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_torchs_own_error_is_told_as_memory_of_the_device(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), unbroken.Run(tmp_path / "run"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    verdict = judge(ExitStatus(code=1), words_of(tmp_path / "run"), Facts())
    assert (verdict.outcome, verdict.cause) == ("failed", "device-memory")


@pytest.mark.chaos
def test_after_out_of_memory_a_run_restarts_with_smaller_parts_until_they_fit(tmp_path: Path) -> None:
    """Parts of at most 3 samples fit; the batches have 8, and memory runs out in the first step already."""
    run_dir, expected = tmp_path / "run", tmp_path / "expected" / "run"
    expected.parent.mkdir()
    assert train(expected, "--fits", "8", script=SCRIPT).returncode == 0
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--fits", "3", "--later", "5"]
    done = cli(
        *("run", "--run-dir", str(run_dir), "--backoff", "0.01", "--", *command),
        state_home=tmp_path / "state",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [verdict["cause"] for verdict in verdicts(run_dir)] == ["device-memory", "device-memory", ""]
    # 4 samples fit until step 5, so that the second attempt gets that far.
    assert [event["step"] for event in step_events(run_dir)] == [*range(1, 5), *range(4, 13)]
    assert "memory ran out; now each batch is computed in 4 parts" in reasons(run_dir)
    began = next(read_events(run_dir / "attempts/0003/events-rank0.jsonl"))
    changed = {change["name"]: (change["then"], change["now"]) for change in began["restored"]["environment"]}
    assert changed["micro_batches"] == ("2", "4")
    assert "the bits of what follows may differ: micro_batches changed" in began["report"]
    found, wanted = (unbroken.CheckpointStore(place).latest().load_tensors() for place in (run_dir, expected))
    for name in ("model/0.weight", "model/2.bias"):
        arrays = [np.frombuffer(tensors[name].data, np.float32) for tensors in (found, wanted)]
        np.testing.assert_allclose(*arrays, rtol=1e-4, atol=1e-6)


def reasons(run_dir: Path) -> list[str]:
    return [event["reason"] for event in read_events(run_dir / layout.JOURNAL_FILE) if "reason" in event]
