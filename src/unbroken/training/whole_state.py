"""All that a checkpoint of a run holds: parts, position, step, metrics. Out as values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.manifest import Position as SavedPosition
from unbroken.checkpoint.ranks import of_rank
from unbroken.checkpoint.snapshot import Description
from unbroken.checkpoint.store import Checkpoint
from unbroken.state.table import TensorTable
from unbroken.state.tree import Decoder, Encoder, Json
from unbroken.training.health.watch import HealthWatch
from unbroken.training.parts import Parts
from unbroken.training.passes import Pass
from unbroken.training.position import Position
from unbroken.training.ranks.group import Group
from unbroken.training.ranks.shares import Shares
from unbroken.training.restored import Restored


@dataclass(slots=True, kw_only=True)
class WholeState:
    """The live state of a run; `run_id` and `attempt` say whose, `config` and `environment` describe it.

    `went_on_from` are the steps of the checkpoints that were put into it, by a resume and by roll-backs.
    """

    parts: Parts
    position: Position
    health: HealthWatch
    group: Group
    shares: Shares
    run_id: str
    attempt: int
    config: Json
    environment: Mapping[str, Any]
    step: int = 0
    rollbacks: int = 0
    metrics: dict[str, Json] = field(default_factory=dict)
    went_on_from: list[int] = field(default_factory=list)

    def captured(self) -> tuple[Description, TensorTable]:
        """Return the state of now in words, and the live tensors in it; all ranks do so at once."""
        position = self.position
        position.check_whole()
        passes, still_open = position.passes()
        table = TensorTable()
        description = Description(
            run_id=self.run_id,
            step=self.step,
            attempt=self.attempt,
            created=datetime.now(UTC).isoformat(),
            # Randomness first: nothing that follows can move it unseen.
            parts=self.parts.encode(table, inside_step=position.is_inside_step()),
            position=SavedPosition(
                epoch=position.epoch,
                inside_epoch=position.inside_epoch,
                loaders=Encoder(table).encode(position.state(), "position"),
                passes=passes,
                open=still_open,
                steps=tuple(map(tuple, position.consumption.state())),
            ),
            metrics=dict(self.metrics),
            config=self.config,
            environment=dict(self.environment),
            choices=self.parts.choices_made,
            rollbacks=self.rollbacks,
            health=self.health.state(),
        )
        return self.shares.put_together(description, table), table

    def restore(self, checkpoint: Checkpoint) -> Restored:
        """Put all of a checkpoint into the live state; see `Parts.restore`."""
        is_new = self.group.rank > len(checkpoint.manifest.ranks)
        checkpoint = of_rank(checkpoint, self.group.rank)
        # A rank that there was not when it was saved would draw what the first one draws.
        restored = self.parts.restore(checkpoint, new_rank=self.group.rank if is_new else None)
        self.position.restore(checkpoint.manifest.position, _loaders(checkpoint))
        self._take(checkpoint.manifest, restored)
        self.went_on_from.append(checkpoint.step)
        return restored

    def lies_in(self, found: Pass, checkpoint: Checkpoint) -> bool:
        """Tell whether `go_back` can put the pass `found` to a checkpoint."""
        return self.position.lies_in(found, checkpoint.manifest.position, _loaders(checkpoint))

    def go_back(self, found: Pass, checkpoint: Checkpoint) -> Restored:
        """Put the state of now to a checkpoint that lies in the pass `found`, which goes on from there.

        All is as after a `restore` in another process. Raises what that raises.
        """
        loaders = _loaders(checkpoint)
        restored = self.parts.restore(checkpoint)
        if not restored.inside_step:
            self.parts.drop_gradients()
        self.position.go_back(found, checkpoint.manifest.position, loaders)
        self._take(checkpoint.manifest, restored)
        return restored

    def _take(self, manifest: Manifest, restored: Restored) -> None:
        self.position.begins_inside_step = restored.inside_step
        self.step, self.metrics = manifest.step, dict(manifest.metrics)
        self.health.restore(manifest.health)

    def is_as_in(self, manifest: Manifest) -> bool:
        """Tell whether a checkpoint holds exactly this state."""
        position = self.position
        # Metrics are kept as the first rank has them.
        metrics = self.metrics if self.group.is_first else manifest.metrics
        here = (self.step, position.epoch, position.inside_epoch, metrics)
        saved = manifest.position
        return here == (manifest.step, saved.epoch, saved.inside_epoch, manifest.metrics) and (
            self.parts.is_as_in(manifest, inside_step=position.is_inside_step())
        )

    def progress(self) -> tuple[int, int]:
        """Return the steps, and the whole epochs."""
        return self.step, self.position.epoch


def _loaders(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    manifest = checkpoint.manifest
    paths = [path for path in manifest.tensors if path.startswith("position/")]
    found: list[dict[str, Any]] = Decoder(checkpoint.load_tensors(paths).__getitem__).decode(
        manifest.position.loaders
    )
    return found
