"""Streaming datasets of MosaicML, read by the loader that belongs to them, through real SIGKILLs.

No dependency: without it these tests are skipped. Its datasets live in shared memory that a process cannot
open twice, so that each attempt is a process of its own.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import unbroken
from tests.training.test_ledger import append, lines_of, start
from unbroken.errors import UnsupportedStateError

streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")

SAMPLES, BATCH, EPOCHS, STEPS = 23, 4, 3, 18


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # It keeps locks in the directory for temporary files, which the attempts that are forked inherit.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with streaming.MDSWriter(out=str(tmp_path / "data"), columns={"index": "int"}, size_limit=200) as writer:
        for index in range(SAMPLES):
            writer.write({"index": index})
    return tmp_path / "data"


def dataset(data: Path) -> Any:
    return streaming.StreamingDataset(
        local=str(data), shuffle=True, shuffle_seed=3, batch_size=BATCH, num_canonical_nodes=1
    )


def build(data: Path, workers: int) -> Any:
    return streaming.StreamingDataLoader(dataset(data), batch_size=BATCH, num_workers=workers)


def line_of(epoch: int, batch: Any) -> str:
    return f"{epoch} {batch['index'].tolist()} {float(torch.rand(())).hex()}"


def train_plainly(data: Path, workers: int, ledger: Path) -> None:
    torch.manual_seed(0)
    loader = build(data, workers)
    for epoch in range(EPOCHS):
        for batch in loader:
            append(ledger, line_of(epoch, batch))


def train(data: Path, workers: int, ledger: Path, run_dir: Path, kill_at: int) -> None:
    """Be one attempt; die with the batch of step `kill_at` in hand."""
    torch.manual_seed(max(kill_at, 0) if run_dir.exists() else 0)
    loader = build(data, workers)
    with unbroken.Run(run_dir, save=[unbroken.EverySteps(1)]) as run:
        for epoch in run.epochs(EPOCHS):
            for batch in run.batches(loader):
                if run.step_count + 1 == kill_at:
                    run._saver.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                append(ledger, line_of(epoch, batch))
                run.step()


def exit_code(job: Any, *arguments: Any) -> int | None:
    process = start(job, *arguments)
    process.join()
    return process.exitcode


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "kills", [(3, 5), (6,), (7,), (4, 10, 18)], ids=["twice in one epoch", "last", "next epoch", "each epoch"]
)
def test_each_sample_is_trained_once_in_its_order_over_kills(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str], kills: tuple[int, ...], workers: int
) -> None:
    assert exit_code(train_plainly, data, workers, tmp_path / "plain") == 0
    expected = lines_of(tmp_path / "plain")

    for kill_at in kills:
        killed = exit_code(train, data, workers, tmp_path / "ledger", tmp_path / "run", kill_at)
        assert killed == -signal.SIGKILL
    assert exit_code(train, data, workers, tmp_path / "ledger", tmp_path / "run", -1) == 0

    assert lines_of(tmp_path / "ledger") == expected
    assert len(expected) == STEPS
    said = capfd.readouterr().err
    assert ("leaves out the random generators of its workers" in said) == bool(workers)
    assert "no resume from this position is possible" not in said


def test_the_dataset_in_a_plain_loader_is_refused_and_its_own_loader_named(
    data: Path, tmp_path: Path
) -> None:
    def job() -> None:
        with (
            unbroken.Run(tmp_path / "run") as run,
            pytest.raises(UnsupportedStateError, match="without arguments") as caught,
        ):
            list(run.batches(DataLoader(dataset(data), BATCH)))
        assert "loader that was made for it" in caught.value.hint

    assert exit_code(job) == 0
