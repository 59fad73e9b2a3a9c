"""A small training that goes wrong, to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.rundir.journal import read_events

SAMPLES, SIZE, SPOILED = 48, 4, 41
# Of as many as there are in a short training.
FEW = 20
Batch = tuple[torch.Tensor, torch.Tensor]


class Noisy(Dataset[Batch]):
    """Samples with noise from the process's generator; some are spoiled."""

    def __init__(self, spoiled: Sequence[int], samples: int, by: float) -> None:
        self.rows = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
        for index in spoiled:
            self.rows[index, 1] = by

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index] + 0.1 * torch.rand(3), self.rows[index, :1]


class Masking(nn.Module):
    """Gives out -inf in places, as attention with a mask does, and so do its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -float("inf")]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = rows + self.mask
        return masked


class Training:
    """A small training with randomness in its data and in its model."""

    def __init__(
        self,
        directory: Path,
        *,
        spoiled: Sequence[int] = (SPOILED,),
        workers: int = 0,
        samples: int = SAMPLES,
        by: float = float("nan"),
    ) -> None:
        torch.manual_seed(3)
        self.directory = directory
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4)), nn.ReLU(), nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.every_steps = 5
        self.actions: dict[str, Any] = {}
        self.reported: Callable[[torch.Tensor], dict[str, Any]] = lambda loss: {"loss": loss}
        self.loader: Any = DataLoader(Noisy(spoiled, samples, by), SIZE, shuffle=True, num_workers=workers)

    def step(self, batch: Batch) -> torch.Tensor:
        rows, wanted = batch
        loss = nn.functional.mse_loss(self.model(rows), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def run(
        self,
        replay: Callable[[Any], Any] | None,
        *,
        every: int = 1,
        stops_after: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(4)
        self.opened = unbroken.Run(
            self.directory,
            save=[unbroken.EverySteps(self.every_steps)],
            health=unbroken.Health(replay=replay, **self.actions),
            model=self.model,
            optimizer=self.optimizer,
        )
        with self.opened as run:
            self.checks = run.batches([1])
            for _ in run.epochs(1):
                held: list[Batch] = []
                for batch in run.batches(self.loader, **options):
                    held.append(batch)
                    if len(held) == every:
                        rows, wanted = (torch.cat(parts) for parts in zip(*held, strict=True))
                        held.clear()
                        run.step(**self.reported(self.step((rows, wanted))))
                        if run.step_count == stops_after:
                            raise ConnectionAbortedError

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [
            event
            for path in sorted(self.directory.glob("attempts/*/events-rank0.jsonl"))
            for event in read_events(path)
            if event["kind"] in kinds
        ]

    def alarm(self, what: str) -> str:
        return "\n".join(one["text"] for one in self.events("alarm") if one["what"] == what)

    def replayed(self) -> dict[str, Any]:
        (found,) = self.events("replayed")
        return found

    def curve(self) -> list[tuple[int, Any]]:
        return [(event["step"], event["metrics"]["loss"]) for event in self.events("step")]
