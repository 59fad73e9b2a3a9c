"""The parts of a run: each named object with the handler that knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.errors import StateMismatchError
from unbroken.state.handlers import StateHandler, choose_handler
from unbroken.state.tensors import HostTensor, TensorSource, size_bytes
from unbroken.state.tree import Decoder, Encoder, TensorTable
from unbroken.training import families
from unbroken.training.randomness import RNG_PART, GlobalRandomness


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    value: object
    handler: StateHandler


class Parts:
    """The live objects of a run. Raises UnsupportedStateError for one that no handler knows."""

    def __init__(self, values: Mapping[str, object], extra_handlers: Sequence[StateHandler] = ()) -> None:
        self._rng_state: object = None
        known = [*extra_handlers, *families.handlers(values)]
        everything = {**values, RNG_PART: GlobalRandomness()}
        self._parts = [
            _Part(name, value, choose_handler(name, value, known)) for name, value in everything.items()
        ]

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    def encode(self, table: TensorTable) -> dict[str, PartEntry]:
        """Return the state of every part; its live tensors are entered in `table`, not copied."""
        encoder = Encoder(table, families.codecs())
        return {
            part.name: PartEntry(
                handler=part.handler.name,
                type=f"{type(part.value).__module__}.{type(part.value).__qualname__}",
                state=encoder.encode(part.handler.state(part.value), part.name),
            )
            for part in self._parts
        }

    def restore(self, manifest: Manifest, tensors: Mapping[str, HostTensor]) -> None:
        """Put the state of a checkpoint into the live objects, in the order of their handlers.

        Raises StateMismatchError that lists *every* difference; then nothing was changed.
        """
        decoder = Decoder(tensors.__getitem__, families.codecs())
        differences = self._part_differences(manifest)
        states: dict[str, Any] = {}
        for part in self._parts:
            entry = manifest.parts.get(part.name)
            if entry is not None and entry.handler == part.handler.name:
                states[part.name] = decoder.decode(entry.state)
                found = part.handler.differences(part.value, states[part.name])
                differences += [f"{part.name}: {line}" for line in found]
        differences += self._alias_differences(manifest) if not differences else []
        if differences:
            raise StateMismatchError(
                f"step {manifest.step} does not fit what this program built; nothing was changed\n  "
                + "\n  ".join(differences),
                hint="resume with the objects that were saved, or start in a new run directory",
            )
        for part in sorted(self._parts, key=lambda part: part.handler.order):
            part.handler.restore(part.value, states[part.name])
        self._confirm(manifest)
        self._rng_state = states[RNG_PART]

    def restore_rng(self) -> None:
        """Set the generators of the process to the restored state once more.

        What was built or iterated since may have drawn from them. Does nothing before a restore.
        """
        for part in self._parts:
            if part.name == RNG_PART and self._rng_state is not None:
                part.handler.restore(part.value, self._rng_state)

    def _part_differences(self, manifest: Manifest) -> list[str]:
        live = {part.name: part for part in self._parts}
        found = [f"{name}: the checkpoint lacks this part" for name in live if name not in manifest.parts]
        found += [f"{name}: the program lacks this part" for name in manifest.parts if name not in live]
        for name, entry in manifest.parts.items():
            if name in live and live[name].handler.name != entry.handler:
                found.append(f"{name}: a {live[name].handler.name}, the checkpoint holds a {entry.handler}")
        return found

    def _alias_differences(self, manifest: Manifest) -> list[str]:
        """Weights tied on one side only would be restored right and then trained apart, or together."""
        table = TensorTable()
        self.encode(table)
        live = {frozenset((path, *others)) for path, others in table.aliases.items() if others}
        kept = {
            frozenset((path, *entry.aliases)) for path, entry in manifest.tensors.items() if entry.aliases
        }
        return [f"{' = '.join(sorted(tied))}: tied here, not in the checkpoint" for tied in live - kept] + [
            f"{' = '.join(sorted(tied))}: tied in the checkpoint, not here" for tied in kept - live
        ]

    def _confirm(self, manifest: Manifest) -> None:
        """Read the live state back and hold it against the manifest, byte for byte."""
        table = TensorTable()
        entries = self.encode(table)
        wrong = [
            name
            for name, entry in entries.items()
            if _canonical(entry.state) != _canonical(manifest.parts[name].state)
        ]
        wrong += [
            path
            for path, source in table.sources.items()
            if path in manifest.tensors and _digest(source) != manifest.tensors[path].digest
        ]
        if wrong:
            raise StateMismatchError(
                f"step {manifest.step} was restored, but read back the live state differs at "
                f"{', '.join(sorted(wrong)[:5])}; do not train on with it",
                hint="the load_state_dict() of that object does not restore what its state_dict() gave",
            )


def _canonical(encoded: Any) -> bytes:
    return msgspec.json.encode(encoded, order="sorted")


def _digest(source: TensorSource) -> str:
    data = bytearray(size_bytes(source.dtype, source.shape))
    if data:
        source.copy_to(memoryview(data))
    return digest(data)
