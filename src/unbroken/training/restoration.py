"""Putting a checkpoint into live objects: first everything is compared, then everything is put."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.checkpoint.highlights import learning_rates
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import StateMismatchError, UsageError
from unbroken.state.choices import Choices
from unbroken.state.handlers import (
    GRADIENTS,
    ORDER_OPTIMIZER,
    Difference,
    HasHorizon,
    OverridesSettings,
    Setting,
)
from unbroken.state.tensors import TensorSource
from unbroken.state.tree import TensorTable, join
from unbroken.training.adaptation import adapt
from unbroken.training.arrivals import Arrivals
from unbroken.training.comparison import (
    PartReport,
    begins_fresh,
    is_allowed,
    nothing_matches,
    part_report,
)
from unbroken.training.part import Part, decode_part, encode_parts, part_of, unequal

_HINT = (
    "resume with the objects that were saved, or say by rename=, allow=, cast=, fresh= or horizon= of Run "
    "what may differ, or start in a new run directory"
)


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A setting that checkpoint and script disagree about, and which of the two decided it."""

    part: str
    setting: Setting
    script_wins: bool

    def __str__(self) -> str:
        return f"{self.part}: {self.setting.text(script_wins=self.script_wins)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did: a report on each part, the settings in question, the learning rates.

    `learning_rates` are those in force now, `script_learning_rates` those that the script had set.
    With `inside_step` the gradients of a step that was not complete were restored, too.
    """

    parts: dict[str, PartReport]
    settings: tuple[SettingInForce, ...]
    learning_rates: tuple[float, ...]
    script_learning_rates: tuple[float, ...]
    inside_step: bool

    @property
    def overridden(self) -> dict[str, str]:
        """The settings of the script that are in force, as they are noted in checkpoints."""
        return {
            f"{found.part}.{found.setting.key}": repr(found.setting.script)
            for found in self.settings
            if found.script_wins and not found.setting.is_horizon
        }


class Restoration:
    """One checkpoint on its way into `parts`.

    `run` compares and puts; `again` puts once more, for what the script has changed since.
    """

    def __init__(self, parts: Sequence[Part], checkpoint: Checkpoint, choices: Choices) -> None:
        self._all = list(parts)
        self._choices = choices
        rename = choices.still_to_rename(checkpoint.manifest.choices)
        self._checkpoint = adapt(checkpoint, {part.name: part.handler for part in parts}, rename)
        manifest = self._manifest = self._checkpoint.manifest
        self._wanted = [part for part in parts if not begins_fresh(part.name, manifest, choices)]
        self._parts = [part for part in self._wanted if part.name in manifest.parts]
        self._inside_step = any(GRADIENTS in entry.state for entry in _with_keys(manifest))
        streamed = {part.name for part in self._parts if part.is_streamed}
        self._arrivals = Arrivals(self._checkpoint, streamed)
        # What the user wants otherwise than in the checkpoint: parts, and tensors that keep their values.
        self._inexact: set[str] = set()
        self._left_alone: set[str] = set()
        self._finish: list[Callable[[], None]] = []

    def run(self) -> Restored:
        """Restore; see `Parts.restore`."""
        rates = _rates(self._all)
        live = TensorTable()
        encode_parts(self._all, live)
        reports = self._compare(live.sources)
        settings, landed = self._put_first()
        placed = {part.name for part in self._parts if part.is_placed}
        verified = {path: address for path, address in landed.items() if part_of(path) in placed}
        wrong = self._unequal(verified)
        if wrong:
            raise StateMismatchError(
                f"step {self._manifest.step} was restored, but read back the live state differs at "
                f"{', '.join(wrong[:5])}; do not train on with it",
                hint="the load_state_dict() of that object does not restore what its state_dict() gave",
            )
        return Restored(
            parts=reports,
            settings=settings,
            learning_rates=_rates(self._all),
            script_learning_rates=rates,
            inside_step=self._inside_step,
        )

    def again(self) -> None:
        """Put all state to the checkpoint once more."""
        touched = {part_of(path) for path in self._unequal()} | self._inexact
        # What is streamed is read anew, so only where something has changed; it shows in its bytes.
        parts = [part for part in self._parts if not part.is_streamed or part.name in touched]
        states, _ = self._land(parts)
        self._put(parts, states)

    def _compare(self, live: Mapping[str, TensorSource]) -> dict[str, PartReport]:
        """Return the report on every part; raise StateMismatchError with all that is not allowed."""
        manifest, choices = self._manifest, self._choices
        handlers = {name: entry.handler for name, entry in manifest.parts.items()}
        handlers |= {part.name: part.handler.name for part in self._all}
        found = {part.name: self._differences(part) for part in self._wanted}
        found |= {
            name: [Difference("unexpected", "", "the program lacks this part")]
            for name in manifest.parts
            if not any(part.name == name for part in self._all)
        }
        refused, reports = [], dict[str, PartReport]()
        for name, differences in found.items():
            allowed = [item for item in differences if is_allowed(name, item, choices)]
            refused += [f"{name}: {item}" for item in differences if item not in allowed]
            reports[name] = part_report(name, handlers[name], manifest, live, allowed)
            if allowed and nothing_matches(name, reports[name], manifest):
                refused.append(f"{name}: nothing in it fits, so that nothing would be restored")
            self._note_allowed(name, allowed)
        refused = refused or [*self._horizon_differences(), *self._alias_differences()]
        if refused:
            lines = "\n  ".join(refused)
            raise StateMismatchError(
                f"step {manifest.step} does not fit what this program built; nothing was changed\n  {lines}",
                hint=_HINT,
            )
        fresh = {part.name: PartReport(handler=part.handler.name, is_fresh=True) for part in self._all}
        return fresh | reports

    def _differences(self, part: Part) -> list[Difference]:
        entry = self._manifest.parts.get(part.name)
        if entry is None:
            return [Difference("missing", "", "the checkpoint lacks this part")]
        if entry.handler != part.handler.name:
            text = f"a {part.handler.name}, the checkpoint holds a {entry.handler}"
            return [Difference("other", "", text)]
        state = decode_part(entry, self._arrivals.flight({}).get, describes=part.is_streamed)
        return part.handler.differences(part.value, state)

    def _note_allowed(self, name: str, allowed: Sequence[Difference]) -> None:
        if allowed:
            self._inexact.add(name)
        self._left_alone |= {join(name, item.name) for item in allowed if item.kind in ("shape", "dtype")}
        # Optimizers have several tensors for each name.
        self._left_alone |= {join(f"{name}/state", item.name) for item in allowed if item.kind == "shape"}

    def _horizon_differences(self) -> list[str]:
        if self._choices.horizon is not None:
            return []
        return [
            f"{part.name}: {setting.name} is {setting.saved!r} in the checkpoint, {setting.script!r} in the "
            "script; choose horizon='keep' (the old curve), 'stretch' (the new one from here on) or 'hold' "
            "(the present rate)"
            for part in self._parts
            if isinstance(part.handler, HasHorizon)
            for setting in part.settings(self._state(part))
            if setting.is_horizon
        ]

    def _alias_differences(self) -> list[str]:
        """Weights tied on one side only would be restored right and then trained apart, or together."""
        table = TensorTable()
        encode_parts(self._parts, table)
        names = {part.name for part in self._parts} - self._inexact
        live = {frozenset((path, *others)) for path, others in table.aliases.items() if others}
        kept = {
            frozenset((path, *entry.aliases))
            for path, entry in self._manifest.tensors.items()
            if entry.aliases
        }
        return [
            f"{' = '.join(sorted(tied))}: tied {here}"
            for found, here in (
                (live - kept, "here, not in the checkpoint"),
                (kept - live, "in the checkpoint, not here"),
            )
            for tied in found
            if {part_of(path) for path in tied} & names
        ]

    def _put_first(self) -> tuple[tuple[SettingInForce, ...], dict[str, int]]:
        """Restore all; return what the script had set otherwise, and where bytes went by path."""
        states, landed = self._land(self._parts)
        settings = [
            SettingInForce(part.name, setting, self._script_wins(part, setting))
            for part in self._parts
            for setting in part.settings(states[part.name])
        ]
        # What a note says is in force is so on purpose, and not as the checkpoint has it.
        self._inexact |= {item.part for item in settings if item.setting.note}
        for part in self._parts:
            self._prepare_finish(
                part, states[part.name], [item for item in settings if item.part == part.name]
            )
        self._put(self._parts, states)
        return tuple(settings), landed

    def _script_wins(self, part: Part, setting: Setting) -> bool:
        if setting.is_horizon:
            return self._choices.horizon == "stretch"
        if not self._choices.overrides(f"{part.name}.{setting.key}"):
            return False
        # Once: what training made of it since is not undone at each restart.
        noted = self._manifest.choices.get("override", {}).get(f"{part.name}.{setting.key}")
        return bool(noted != repr(setting.script))

    def _prepare_finish(self, part: Part, state: Any, settings: Sequence[SettingInForce]) -> None:
        """Note what has to be done to `part` after everything is restored."""
        handler, how = part.handler, self._choices.horizon
        if how and isinstance(handler, HasHorizon) and any(item.setting.is_horizon for item in settings):
            self._finish.append(handler.with_horizon(part.value, state, how))
            # The rates stand in the groups of optimizers.
            self._inexact |= {other.name for other in self._parts if other.handler.order == ORDER_OPTIMIZER}
            self._inexact.add(part.name)
        chosen = [item.setting for item in settings if item.script_wins and not item.setting.is_horizon]
        if not chosen:
            return
        if not isinstance(handler, OverridesSettings):
            raise UsageError(
                f"{part.name}.{chosen[0].key}: expected a setting that can be overridden, "
                f"found one of a {handler.name}",
                hint="leave it out of override=, or begin that part anew by fresh=",
            )
        overrides, value = handler, part.value
        self._finish.append(lambda: overrides.override(value, chosen))
        self._inexact |= {other.name for other in self._parts if other.handler.order == ORDER_OPTIMIZER}
        self._inexact.add(part.name)

    def _land(self, parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the states of `parts`, every byte read, and the addresses that bytes went to by path."""
        flight = self._arrivals.flight(self._live_tensors())
        states = {part.name: decode_part(self._manifest.parts[part.name], flight.get) for part in parts}
        return states, flight.land()

    def _state(self, part: Part) -> Any:
        return decode_part(self._manifest.parts[part.name], self._arrivals.flight({}).get)

    def _put(self, parts: Sequence[Part], states: Mapping[str, Any]) -> None:
        for part in sorted(parts, key=lambda part: part.handler.order):
            part.handler.restore(part.value, states[part.name])
        for finish in self._finish:
            finish()

    def _live_tensors(self) -> dict[str, TensorSource]:
        table = TensorTable()
        encode_parts(self._parts, table, inside_step=self._inside_step)
        streamed = {part.name for part in self._parts if part.is_streamed}
        found = {
            path: source
            for path, source in table.sources.items()
            # Options of optimizers that are tensors are settings, to be compared before they are set.
            if part_of(path) in streamed and "/options/" not in path
        }
        # Where two paths lead to one memory that the checkpoint keeps apart, each gets one of its own.
        places = Counter(source.address for source in found.values())
        return {path: source for path, source in found.items() if places[source.address] == 1}

    def _unequal(self, verified: Mapping[str, int] | None = None) -> list[str]:
        table = TensorTable()
        entries = encode_parts(self._parts, table, inside_step=self._inside_step)
        sources = {path: found for path, found in table.sources.items() if not self._is_left_alone(path)}
        return unequal(entries, sources, self._manifest, verified, self._inexact)

    def _is_left_alone(self, path: str) -> bool:
        """Tell whether the tensor at `path` has another value than in the checkpoint, on purpose."""
        if path in self._left_alone or path.rpartition("/")[0] in self._left_alone:
            return True
        if not self._finish or part_of(path) not in self._inexact:
            return False
        plans_ahead = {part.name for part in self._parts if isinstance(part.handler, HasHorizon)}
        # Rates that are tensors.
        return "/options/" in path or part_of(path) in plans_ahead


def _rates(parts: Sequence[Part]) -> tuple[float, ...]:
    return learning_rates(entry.state for entry in encode_parts(parts, TensorTable()).values())


def _with_keys(manifest: Manifest) -> list[PartEntry]:
    return [entry for entry in manifest.parts.values() if isinstance(entry.state, dict)]
