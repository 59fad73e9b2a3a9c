"""The parts of a run: each named object with the handler that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.checkpoint.ranks import RANKS
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import UsageError
from unbroken.frameworks.generators import is_generator
from unbroken.frameworks.rng import seed_anew
from unbroken.state.choices import Choices, matches
from unbroken.state.handlers import FindsUnkept, StateHandler, choose_handler
from unbroken.state.paths import name_of, part_of
from unbroken.state.table import TensorTable
from unbroken.state.tensors import FLOATING, bytes_of
from unbroken.training import families
from unbroken.training.part import Part, encode_parts, unequal
from unbroken.training.randomness import RNG_PART, GlobalRandomness
from unbroken.training.restoration import Restoration
from unbroken.training.restored import Restored, noted_name

_TAKEN = {RNG_PART: "the generators of the process", RANKS: "what further ranks have"}


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
        for name, what in _TAKEN.items():
            if name in values:
                raise UsageError(
                    f"Run: the part name {name!r} stands for {what}",
                    hint=f"call it otherwise, such as my_{name}=...",
                )
        self._choices = choices or Choices()
        own = families.own_parts(values, self._choices)
        for name in own.keys() & values.keys():
            raise UsageError(
                f"Run: the part name {name!r} stands for what the run keeps of model.{name}",
                hint=f"call it otherwise, such as my_{name}=...",
            )
        known = [*extra_handlers, *families.handlers({**values, **own}, self._choices)]
        everything = {**values, **own, RNG_PART: GlobalRandomness(values)}
        self._parts = [
            Part(name, value, choose_handler(name, value, known)) for name, value in everything.items()
        ]
        self._restoration: Restoration | None = None
        self._new_rank: int | None = None
        self._sound: frozenset[str] = frozenset()
        # Now rather than at the first save, which may be hours away. Nothing is copied.
        table = TensorTable()
        self.encode(table)
        self._sound = self._sound_buffers(table)
        self._check_non_finite(table)
        # Of the script: what a restore puts in their place is another matter.
        self._script_settings = {
            noted_name(part.name, setting): repr(setting.script)
            for part in self._parts
            for setting in part.script_settings()
            if self._choices.overrides(f"{part.name}.{setting.key}")
        }
        self._choices_made = self._noted({})

    def __iter__(self) -> Iterator[Part]:
        """Yield each part with the handler that knows it."""
        return iter(self._parts)

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    @property
    def choices_made(self) -> dict[str, Any]:
        """What checkpoints note of the user's choices, so that those are made once, not at each restart."""
        return self._choices_made

    def generators(self) -> list[object]:
        """Return the random generators that are parts of their own, or are held by one."""
        held = [
            part.value.held().values() for part in self._parts if isinstance(part.value, GlobalRandomness)
        ]
        return [part.value for part in self._parts if is_generator(part.value)] + [*chain(*held)]

    def mark_gradients(self) -> Callable[[], bool]:
        """Return a function that tells whether gradients have changed since now."""
        return families.mark_gradients({part.name: part.value for part in self._parts})

    def drop_gradients(self) -> None:
        """Let go of all gradients: a restored state that is not inside a step has none."""
        families.drop_gradients([part.value for part in self._parts])

    def unkept_changes(self) -> list[str]:
        """Return a line for each thing that changes on a part and is in no checkpoint."""
        return [
            line
            for part in self._parts
            if isinstance(part.handler, FindsUnkept)
            for line in part.handler.unkept_changes(part.value)
        ]

    def bad_tensors(self) -> list[str]:
        """Return the names of the tensors in models, and of gradients, that are not finite and should be."""
        found = families.bad_tensors({part.name: part.value for part in self._parts})
        return [name for name in found if not matches(name, self._choices.non_finite)]

    def encode(self, table: TensorTable, *, inside_step: bool = False) -> dict[str, PartEntry]:
        """Return the state of every part; see `encode_parts`."""
        table.sound = self._sound
        entries = encode_parts(self._parts, table, inside_step=inside_step)
        if patterns := self._choices.non_finite:
            table.exempt |= {
                path
                for path in table.sources
                if any(matches(name_of(place), patterns) for place in (path, *table.aliases.get(path, ())))
            }
        return entries

    def _sound_buffers(self, table: TensorTable) -> frozenset[str]:
        """Return the paths of the buffers of modules that are finite now: statistics, not masks of -inf."""
        modules = {part.name for part in self._parts if part.tensors.are_tied}
        buffers = {
            path: source
            for path, source in table.sources.items()
            if source.dtype in FLOATING
            and part_of(path) in modules
            and not (source.is_trained or source.is_frozen)
        }
        if not buffers:
            return frozenset()
        # Loaded here: what looks at numbers needs NumPy, and without any there is nothing to look at.
        from unbroken.frameworks.finite import count_non_finite

        return frozenset(
            path for path, source in buffers.items() if not count_non_finite(bytes_of(source), source.dtype)
        )

    def _check_non_finite(self, table: TensorTable) -> None:
        names = [name_of(path) for path in (*table.sources, *chain(*table.aliases.values()))]
        # Those of optimizers come with the first step.
        later = [f"{part}." for part in table.trained_parts]
        for pattern in self._choices.non_finite:
            if pattern.startswith(tuple(later)) or any(matches(name, [pattern]) for name in names):
                continue
            raise UsageError(
                f"Run: expected non_finite= to name tensors, found {pattern!r}",
                hint=f"there are {', '.join(names[:5])}; patterns may have * and ?",
            )

    def restore(self, checkpoint: Checkpoint, *, new_rank: int | None = None) -> Restored:
        """Put the state of a checkpoint into the live objects, in the order of their handlers.

        A `new_rank`, whose state it does not have, draws other random numbers than the first one.

        Raises StateMismatchError that lists *every* difference the user did not allow; then nothing was
        changed. Raises DamagedError if the bytes are not what was saved; then the state is neither the
        old one nor a whole new one.
        """
        restoration = Restoration(self._parts, checkpoint, self._choices)
        restored = restoration.run()
        self._restoration, self._new_rank = restoration, new_rank
        self._part_from_the_first_rank()
        earlier = checkpoint.manifest.choices.get("override", {})
        self._choices_made = self._noted({**earlier, **restored.overridden})
        return restored

    def restore_again(self) -> None:
        """Put all state to the checkpoint once more; does nothing before a restore or after `forget`.

        What the script did since it entered the run (building, drawing, counting) was done before the
        checkpoint already.
        """
        if self._restoration is not None:
            self._restoration.again()
            self._part_from_the_first_rank()

    def _part_from_the_first_rank(self) -> None:
        if self._new_rank is not None:
            seed_anew(f"rank {self._new_rank}")

    def _noted(self, overridden: Mapping[str, str]) -> dict[str, Any]:
        """Return what checkpoints note of the choices, and of `overridden` what is still asked for."""
        noted = self._choices.noted({part.name: part.class_name for part in self._parts})
        still = {name: value for name, value in overridden.items() if self._choices.overrides(_plain(name))}
        settings = {**self._script_settings, **still}
        return {**noted, **({"override": settings} if settings else {})}

    def forget(self) -> None:
        """Let go of the restored bytes: training moves on from here."""
        self._restoration = None

    def is_as_in(self, manifest: Manifest, *, inside_step: bool = False) -> bool:
        """Tell whether the live state is, byte for byte, what a checkpoint holds."""
        if list(manifest.parts) != self.names:
            return False
        table = TensorTable()
        entries = self.encode(table, inside_step=inside_step)
        return not unequal(entries, table.sources, manifest)


def _plain(name: str) -> str:
    """Return the name by which a setting is overridden, of the one under which that is noted."""
    part, _, rest = name.partition(".")
    return f"{part}.{rest.rpartition('.')[2]}"
