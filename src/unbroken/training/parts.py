"""The parts of a run: each named object with the handler that knows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import StateMismatchError, UsageError
from unbroken.frameworks.generators import is_generator
from unbroken.state.choices import Choices
from unbroken.state.handlers import ComparesSettings, StateHandler, choose_handler
from unbroken.state.tensors import LoadedTensor, TensorSource, bytes_of
from unbroken.state.tree import Decoder, Encoder, TensorTable
from unbroken.training import families
from unbroken.training.arrivals import Arrivals
from unbroken.training.randomness import RNG_PART, GlobalRandomness

# Handlers of these names take over tensors that are filled later, their live ones where those fit; the
# tensors of other parts are read at once and kept until training goes on.
_STREAMED = frozenset({"torch.module", "torch.optimizer", "torch.tensor"})
# And these put them in place as they are: what was digested there need not be digested again.
_PLACED = frozenset({"torch.optimizer"})
# Tensors of the same memory are tied weights here; elsewhere they are a coincidence of the moment.
_TYING = frozenset({"torch.module"})


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    value: object
    handler: StateHandler


class Parts:
    """The live objects of a run.

    Raises UnsupportedStateError for one that no handler knows or whose state cannot be kept, and
    UsageError for the name of the part that every run has by itself.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        extra_handlers: Sequence[StateHandler] = (),
        choices: Choices | None = None,
    ) -> None:
        if RNG_PART in values:
            raise UsageError(
                f"Run: the part name {RNG_PART!r} stands for the generators of the process",
                hint=f"call it otherwise, such as my_{RNG_PART}=...",
            )
        known = [*extra_handlers, *families.handlers(values, choices or Choices())]
        everything = {**values, RNG_PART: GlobalRandomness()}
        self._parts = [
            _Part(name, value, choose_handler(name, value, known)) for name, value in everything.items()
        ]
        self._restored: tuple[Manifest, Arrivals] | None = None
        # Now rather than at the first save, which may be hours away. Nothing is copied.
        self.encode(TensorTable())

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    def generators(self) -> list[object]:
        """Return the random generators that are parts of their own."""
        return [part.value for part in self._parts if is_generator(part.value)]

    def encode(self, table: TensorTable) -> dict[str, PartEntry]:
        """Return the state of every part; its live tensors are entered in `table`, not copied."""
        codecs = families.codecs()
        entries = {}
        for part in self._parts:
            encoder = Encoder(table, codecs, keep_aliases=part.handler.name in _TYING)
            entries[part.name] = PartEntry(
                handler=part.handler.name,
                type=f"{type(part.value).__module__}.{type(part.value).__qualname__}",
                state=encoder.encode(part.handler.state(part.value), part.name),
            )
        return entries

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """Put the state of a checkpoint into the live objects, in the order of their handlers.

        Returns a line for each setting of the script that the checkpoint overwrites. Raises
        StateMismatchError that lists *every* difference; then nothing was changed. Raises DamagedError if
        the bytes are not what was saved; then the state is neither the old one nor a whole new one.
        """
        manifest = checkpoint.manifest
        arrivals = Arrivals(checkpoint, {part.name for part in self._parts if part.handler.name in _STREAMED})
        differences = self._differences(manifest, arrivals)
        if differences:
            raise StateMismatchError(
                f"step {manifest.step} does not fit what this program built; nothing was changed\n  "
                + "\n  ".join(differences),
                hint="resume with the objects that were saved, or start in a new run directory",
            )
        changed, landed = self._put(self._parts, manifest, arrivals)
        self._restored = (manifest, arrivals)
        placed = {part.name for part in self._parts if part.handler.name in _PLACED}
        known = {path: address for path, address in landed.items() if path.partition("/")[0] in placed}
        wrong = self._unequal(manifest, known)
        if wrong:
            raise StateMismatchError(
                f"step {manifest.step} was restored, but read back the live state differs at "
                f"{', '.join(wrong[:5])}; do not train on with it",
                hint="the load_state_dict() of that object does not restore what its state_dict() gave",
            )
        return changed

    def restore_again(self) -> None:
        """Put all state to the checkpoint once more; does nothing before a restore or after `forget`.

        What the script did since it entered the run (building, drawing, counting) was done before the
        checkpoint already.
        """
        if self._restored is None:
            return
        manifest, arrivals = self._restored
        touched = {path.partition("/")[0] for path in self._unequal(manifest)}
        # What is streamed is read anew, so only where something has changed; it shows in its bytes.
        parts = [part for part in self._parts if part.handler.name not in _STREAMED or part.name in touched]
        self._put(parts, manifest, arrivals)

    def _put(
        self, parts: Sequence[_Part], manifest: Manifest, arrivals: Arrivals
    ) -> tuple[list[str], dict[str, int]]:
        """Restore `parts`; return the settings that were overwritten, and where bytes went by path."""
        flight = arrivals.flight(self._live_tensors())
        states = {part.name: _decode(part, manifest.parts[part.name], flight.get) for part in parts}
        landed = flight.land()
        changed = []
        for part in parts:
            if isinstance(part.handler, ComparesSettings):
                settings = part.handler.changed_settings(part.value, states[part.name])
                changed += [f"{part.name}: {setting.text(script_wins=False)}" for setting in settings]
        for part in sorted(parts, key=lambda part: part.handler.order):
            part.handler.restore(part.value, states[part.name])
        return changed, landed

    def _live_tensors(self) -> dict[str, TensorSource]:
        table = TensorTable()
        self.encode(table)
        streamed = {part.name for part in self._parts if part.handler.name in _STREAMED}
        found = {path: source for path, source in table.sources.items() if path.partition("/")[0] in streamed}
        # Where two paths lead to one memory that the checkpoint keeps apart, each gets one of its own.
        places = Counter(source.address for source in found.values())
        return {path: source for path, source in found.items() if places[source.address] == 1}

    def forget(self) -> None:
        """Let go of the restored bytes: training moves on from here."""
        self._restored = None

    def is_as_in(self, manifest: Manifest) -> bool:
        """Tell whether the live state is, byte for byte, what a checkpoint holds."""
        return list(manifest.parts) == self.names and not self._unequal(manifest)

    def _differences(self, manifest: Manifest, arrivals: Arrivals) -> list[str]:
        found = self._part_differences(manifest)
        for part in self._parts:
            entry = manifest.parts.get(part.name)
            if entry is None or entry.handler != part.handler.name:
                continue
            flight = arrivals.flight({})
            state = _decode(part, entry, flight.get, describes=part.handler.name in _STREAMED)
            found += [f"{part.name}: {line}" for line in part.handler.differences(part.value, state)]
        return found + (self._alias_differences(manifest) if not found else [])

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

    def _unequal(self, manifest: Manifest, known: Mapping[str, int] | None = None) -> list[str]:
        """Return the parts and tensors whose live state is not what the manifest says, sorted.

        A tensor at the address that is `known` for its path was digested there already.
        """
        verified = known or {}
        table = TensorTable()
        entries = self.encode(table)
        wrong = [
            name
            for name, entry in entries.items()
            if _canonical(_known(name, entry.state, manifest)) != _canonical(manifest.parts[name].state)
        ]
        wrong += [
            path
            for path, source in table.sources.items()
            if path in manifest.tensors
            and (path not in verified or source.address != verified[path])
            and digest(bytes_of(source)) != manifest.tensors[path].digest
        ]
        return sorted(wrong)


def _decode(
    part: _Part, entry: PartEntry, tensors: Callable[[str], LoadedTensor], *, describes: bool = False
) -> Any:
    return Decoder(tensors, families.codecs(describes=describes)).decode(entry.state)


def _known(name: str, state: Any, manifest: Manifest) -> Any:
    # A library that came into use since has a generator of which the checkpoint knows nothing.
    if name != RNG_PART:
        return state
    return {key: item for key, item in state.items() if key in manifest.parts[name].state}


def _canonical(encoded: Any) -> bytes:
    return msgspec.json.encode(encoded, order="sorted")
