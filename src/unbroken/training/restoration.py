"""Putting a checkpoint into live objects: first everything is compared, then everything is put."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from unbroken.checkpoint.highlights import learning_rates
from unbroken.checkpoint.manifest import Manifest, PartEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import StateMismatchError, UsageError
from unbroken.rundir.tell import tell
from unbroken.state.choices import Choices
from unbroken.state.handlers import (
    GRADIENTS,
    ORDER_MODULE,
    Difference,
    FollowsCasts,
    HasHorizon,
    MovesOthers,
    OverridesSettings,
    Setting,
)
from unbroken.state.paths import part_of
from unbroken.state.table import TensorTable
from unbroken.state.tensors import TensorSource
from unbroken.training.adaptation import adapt
from unbroken.training.arrivals import Arrivals
from unbroken.training.comparison import (
    Origin,
    PartReport,
    begins_fresh,
    is_allowed,
    nothing_matches,
    part_report,
    place_of,
)
from unbroken.training.idle import idle_patterns, idle_rules, told
from unbroken.training.part import Part, decode_part, encode_parts, is_setting, unequal
from unbroken.training.restored import Restored, SettingInForce, noted_name

_HINT = (
    "resume with the objects that were saved, or say by rename=, allow=, cast=, fresh= or horizon= of Run "
    "what may differ, or start in a new run directory"
)


class Restoration:
    """One checkpoint on its way into `parts`.

    `run` compares and puts; `again` puts once more, for what the script has changed since. `origin` is of one
    that this run did not write.
    """

    def __init__(
        self, parts: Sequence[Part], checkpoint: Checkpoint, choices: Choices, origin: Origin | None = None
    ) -> None:
        self._all = list(parts)
        self._origin = origin or Origin(called=f"step {checkpoint.manifest.step}")
        self._choices = choices
        rename = choices.still_to_rename(checkpoint.manifest.choices)
        handlers = {part.name: part.handler for part in parts}
        self._checkpoint = adapt(checkpoint, handlers, rename)
        self._idle_rules = idle_rules(checkpoint, handlers, rename)
        manifest = self._manifest = self._checkpoint.manifest
        self._wanted = [
            part for part in parts if not begins_fresh(part.name, part.class_name, manifest, choices)
        ]
        self._parts = [part for part in self._wanted if part.name in manifest.parts]
        self._inside_step = any(GRADIENTS in entry.state for entry in _with_keys(manifest))
        streamed = {part.name for part in self._parts if part.tensors.are_streamed}
        others = {part.name for part in self._parts} - streamed
        self._arrivals = Arrivals(self._checkpoint, streamed, others)
        # What is not as in the checkpoint: parts, of which the user allows that; tensors that get other
        # dtypes, by name; and places in states, where a setting is the script's or a tensor stays as it is.
        self._inexact: set[str] = set()
        self._cast: set[str] = set()
        self._excused: set[str] = set()
        # What is put in force once all is restored and was found equal.
        self._settle: list[Callable[[], list[tuple[str, Setting]]]] = []
        self._finish: list[Callable[[], None]] = []
        self._rates_left: tuple[float, ...] | None = None

    def run(self) -> Restored:
        """Restore; see `Parts.restore`."""
        live = TensorTable()
        entries = encode_parts(self._all, live)
        rated = [part for part in self._all if _rates([entries[part.name]])]
        rates = _rates(entries.values())
        reports = self._compare(live)
        # Those that may refuse a state only when they are given it: nothing else is changed yet then.
        first = [
            part
            for part in self._parts
            if part.handler.order < ORDER_MODULE and not part.tensors.are_streamed
        ]
        rest = [part for part in self._parts if part not in first]
        states, _ = self._land(first, {})
        self._put(first, states)
        more, landed = self._land(rest, self._places(self._encoded()[1]))
        states |= more
        settings = self._settings(states)
        changed = [f"{found.part}.{found.setting.key}" for found in settings]
        idle = idle_patterns(self._all, self._choices, self._manifest, changed)
        said = [SettingInForce("choices", line, False) for line in told(self._all, self._idle_rules, idle)]
        self._prepare(states, settings)
        self._put(rest, states)
        self._check_read_back(landed)
        settled = self._put_in_force()
        # Of what was decided in the end, nothing else is to be said.
        decided = {(found.part, found.setting.name) for found in settled}
        kept = [found for found in settings if (found.part, found.setting.name) not in decided]
        in_force = encode_parts(rated, TensorTable())
        restored = {part.name for part in self._parts}
        self._rates_left = _rates(entry for name, entry in in_force.items() if name in restored)
        return Restored(
            parts=reports,
            settings=(*kept, *settled, *said),
            learning_rates=_rates(in_force.values()),
            script_learning_rates=rates,
            inside_step=self._inside_step,
            idle=tuple(idle),
        )

    def again(self) -> None:
        """Put all state to the checkpoint once more; a rate that the script has set meanwhile is told."""
        entries, table = self._encoded()
        self._tell_of_rates(_rates(entries.values()))
        # Once: what the body of an epoch sets is set again when the body is played again.
        self._rates_left = None
        touched = {part_of(path) for path in unequal(entries, table.sources, self._manifest)}
        # What is streamed is read anew, so only where something has changed; it shows in its bytes.
        parts = [part for part in self._parts if not part.tensors.are_streamed or part.name in touched]
        states, _ = self._land(parts, self._places(table))
        self._put(parts, states)
        self._put_in_force()

    def _tell_of_rates(self, found: tuple[float, ...]) -> None:
        left = self._rates_left
        if left is not None and found != left:
            here, there = (", ".join(f"{rate:g}" for rate in rates) for rates in (found, left))
            tell(
                f"the learning rate was set to {here} after the run was entered, and is put back to {there}",
                "set it before, and name it by override=, for example override=['optimizer.lr']",
            )

    def _encoded(self) -> tuple[dict[str, PartEntry], TensorTable]:
        """Return the live state of what is restored, as it is now."""
        table = TensorTable()
        return encode_parts(self._parts, table, inside_step=self._inside_step), table

    def _compare(self, live: TensorTable) -> dict[str, PartReport]:
        """Return the report on every part; raise StateMismatchError with all that is not allowed."""
        manifest = self._manifest
        below = {part.name: part.tensors.below for part in self._all}
        handlers = {name: entry.handler for name, entry in manifest.parts.items()}
        handlers |= {part.name: part.handler.name for part in self._all}
        found = self._all_differences()
        found |= {
            name: [Difference("unexpected", "", "the program lacks this part")]
            for name in manifest.parts
            if not any(part.name == name for part in self._all)
        }
        refused, reports = [], dict[str, PartReport]()
        for name, differences in found.items():
            allowed = [item for item in differences if self._is_allowed(name, item)]
            refused += [f"{name}: {item}" for item in differences if item not in allowed]
            inside = below.get(name, "")
            reports[name] = part_report(name, handlers[name], manifest, live.sources, allowed, below=inside)
            if allowed and nothing_matches(name, reports[name], manifest):
                refused.append(f"{name}: nothing in it fits, so that nothing would be restored")
            self._note_allowed(name, inside, allowed)
        refused = refused or [*self._horizon_differences(), *self._alias_differences(live)]
        if refused:
            lines = "\n  ".join(refused)
            raise StateMismatchError(
                f"{self._origin.called} does not fit what this program built; nothing was changed\n  {lines}",
                hint=_HINT,
            )
        fresh = {part.name: PartReport(handler=part.handler.name, is_fresh=True) for part in self._all}
        return fresh | reports

    def _all_differences(self) -> dict[str, list[Difference]]:
        """Return the differences of each part that is to be restored, and note what gets other dtypes."""
        choices = self._choices
        found = {part.name: self._differences(part) for part in self._wanted}
        # A part that began anew once and does not fit any more does so again: that is asked for still.
        unfit = {
            name
            for name, differences in found.items()
            if name in choices.fresh and not all(is_allowed(name, item, choices) for item in differences)
        }
        self._wanted = [part for part in self._wanted if part.name not in unfit]
        self._parts = [part for part in self._parts if part.name not in unfit]
        self._cast = {
            f"{name}.{item.name}" if item.name else name
            for name, differences in found.items()
            for item in differences
            if item.kind == "dtype" and name not in unfit and is_allowed(name, item, choices)
        }
        for part in self._parts:
            known = all(item.kind != "other" for item in found[part.name])
            if isinstance(part.handler, FollowsCasts) and self._cast and known:
                state = self._described(part)
                found[part.name] += part.handler.cast_differences(part.value, state, self._cast)
        return {name: differences for name, differences in found.items() if name not in unfit}

    def _differences(self, part: Part) -> list[Difference]:
        entry = self._manifest.parts.get(part.name)
        if entry is None:
            return [Difference("missing", "", "the checkpoint lacks this part")]
        if entry.handler != part.handler.name:
            text = f"a {part.handler.name}, the checkpoint holds a {entry.handler}"
            return [Difference("other", "", text)]
        found = part.handler.differences(part.value, self._described(part))
        return [*found, *self._origin.beside.get(part.name, ())]

    def _described(self, part: Part) -> Any:
        """Return the state to be compared with: the tensors in it may have a dtype and a shape only."""
        entry, get = self._manifest.parts[part.name], self._arrivals.flight({}).get
        return decode_part(entry, get, describes=part.tensors.are_streamed)

    def _is_allowed(self, name: str, difference: Difference) -> bool:
        # What follows a tensor to another dtype is allowed with it.
        follows = difference.kind == "dtype" and difference.name in self._cast
        return follows or is_allowed(name, difference, self._choices)

    def _note_allowed(self, name: str, below: str, allowed: Sequence[Difference]) -> None:
        if allowed:
            self._inexact.add(name)
        self._excused |= {place_of(name, below, item) for item in allowed if item.kind in ("shape", "dtype")}

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

    def _alias_differences(self, table: TensorTable) -> list[str]:
        """Weights tied on one side only would be restored right and then trained apart, or together."""
        restored = {part.name for part in self._parts}
        tensors = self._manifest.tensors
        both = _all_paths(tensors, {path: entry.aliases for path, entry in tensors.items()})
        both &= {path for path in _all_paths(table.sources, table.aliases) if part_of(path) in restored}
        live = _ties(((path, *others) for path, others in table.aliases.items()), both)
        kept = _ties(((path, *entry.aliases) for path, entry in tensors.items()), both)
        return [
            f"{' = '.join(sorted(tied))}: tied {where}"
            for found, where in (
                (live - kept, "here, not in the checkpoint"),
                (kept - live, "in the checkpoint, not here"),
            )
            for tied in found
        ]

    def _settings(self, states: Mapping[str, Any]) -> list[SettingInForce]:
        """Return what the script had set otherwise."""
        found = [
            SettingInForce(part.name, setting, self._script_wins(part, setting))
            for part in self._parts
            for setting in part.settings(states[part.name])
        ]
        return [item for item in found if item.script_wins or not item.setting.moves]

    def _prepare(self, states: Mapping[str, Any], settings: Sequence[SettingInForce]) -> None:
        """Note, of parts as the script built them, what has to be done once all is restored."""
        self._excused |= {
            f"{item.part}/{place}".rstrip("/") for item in settings for place in item.setting.places
        }
        restored = {part.name for part in self._parts}
        self._settle = [
            part.handler.settle(part.value, restored)
            for part in self._all
            if isinstance(part.handler, MovesOthers)
        ]
        for part in self._parts:
            of_part = [item for item in settings if item.part == part.name]
            self._prepare_finish(part, states[part.name], of_part)

    def _script_wins(self, part: Part, setting: Setting) -> bool:
        if setting.is_horizon:
            return self._choices.horizon == "stretch"
        if not self._choices.overrides(f"{part.name}.{setting.key}"):
            return False
        # Once: what training made of it since is not undone at each restart.
        noted = self._manifest.choices.get("override", {}).get(noted_name(part.name, setting))
        return bool(noted != repr(setting.script))

    def _prepare_finish(self, part: Part, state: Any, settings: Sequence[SettingInForce]) -> None:
        """Note what has to be done to `part` after everything is restored."""
        handler, how = part.handler, self._choices.horizon
        if how and isinstance(handler, HasHorizon) and any(item.setting.is_horizon for item in settings):
            self._finish.append(handler.with_horizon(part.value, state, how))
        chosen = [item.setting for item in settings if item.script_wins and not item.setting.is_horizon]
        if not chosen:
            return
        if not isinstance(handler, OverridesSettings) and all(setting.note for setting in chosen):
            # The script's value is in force already.
            return
        if not isinstance(handler, OverridesSettings):
            raise UsageError(
                f"{part.name}.{chosen[0].key}: expected a setting that can be overridden, "
                f"found one of a {handler.name}",
                hint="leave it out of override=, or begin that part anew by fresh=",
            )
        overrides, value = handler, part.value
        self._finish.append(lambda: overrides.override(value, chosen))

    def _land(
        self, parts: Sequence[Part], places: Mapping[str, TensorSource]
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the states of `parts`, every byte read, and the addresses that bytes went to by path.

        Bytes go to `places`, by path, at once, where the object that is to hold them has room for them.
        """
        flight = self._arrivals.flight(places)
        states = {part.name: decode_part(self._manifest.parts[part.name], flight.get) for part in parts}
        landed = flight.land()
        return {part.name: self._converted(part, states[part.name]) for part in parts}, landed

    def _converted(self, part: Part, state: Any) -> Any:
        if self._cast and isinstance(part.handler, FollowsCasts):
            return part.handler.cast(part.value, state, self._cast)
        return state

    def _state(self, part: Part) -> Any:
        return decode_part(self._manifest.parts[part.name], self._arrivals.flight({}).get)

    def _put(self, parts: Sequence[Part], states: Mapping[str, Any]) -> None:
        for part in sorted(parts, key=lambda part: part.handler.order):
            try:
                part.handler.restore(part.value, states[part.name])
            except StateMismatchError as error:
                raise StateMismatchError(f"{part.name}: {error.message}", hint=error.hint) from error

    def _put_in_force(self) -> list[SettingInForce]:
        """Do what the user wants otherwise than in the checkpoint; return the settings that this decided."""
        settled = [
            SettingInForce(name, setting, script_wins=True)
            for settle in self._settle
            for name, setting in settle()
        ]
        for finish in self._finish:
            finish()
        return settled

    def _check_read_back(self, landed: Mapping[str, int]) -> None:
        placed = {part.name for part in self._parts if part.tensors.are_placed}
        verified = {path: address for path, address in landed.items() if part_of(path) in placed}
        entries, table = self._encoded()
        sources, manifest = table.sources, self._manifest
        wrong = unequal(entries, sources, manifest, verified, inexact=self._inexact, excused=self._excused)
        if wrong:
            raise StateMismatchError(
                f"{self._origin.called} was restored, but read back the live state differs at "
                f"{', '.join(wrong[:5])}; do not train on with it",
                hint="the load_state_dict() of that object does not restore what its state_dict() gave",
            )

    def _places(self, table: TensorTable) -> dict[str, TensorSource]:
        """Return the live tensors of `table` that bytes may be read into, by path."""
        settings = {part.name: part.tensors.settings for part in self._parts if part.tensors.are_streamed}
        found = {
            path: source
            for path, source in table.sources.items()
            if part_of(path) in settings and not is_setting(path, settings[part_of(path)])
        }
        # Where two paths lead to one memory that the checkpoint keeps apart, each gets one of its own.
        places = Counter(source.address for source in found.values())
        return {path: source for path, source in found.items() if places[source.address] == 1}


def _rates(entries: Iterable[PartEntry]) -> tuple[float, ...]:
    return learning_rates(entry.state for entry in entries)


def _with_keys(manifest: Manifest) -> list[PartEntry]:
    return [entry for entry in manifest.parts.values() if isinstance(entry.state, dict)]


def _all_paths(paths: Iterable[str], aliases: Mapping[str, Iterable[str]]) -> set[str]:
    return {place for path in paths for place in (path, *aliases.get(path, ()))}


def _ties(groups: Iterable[Iterable[str]], known: set[str]) -> set[frozenset[str]]:
    """Return the groups of paths that are tied, as far as they are `known` on both sides."""
    found = (frozenset(known.intersection(paths)) for paths in groups)
    return {tied for tied in found if len(tied) > 1}
