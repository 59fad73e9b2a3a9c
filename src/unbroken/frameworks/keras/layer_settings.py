"""What layers are set to: their classes and plain settings, compared by name, and which are frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import keras

from unbroken.frameworks.keras.adapted import in_short, vocabulary_of
from unbroken.frameworks.keras.class_names import class_name
from unbroken.frameworks.keras.plain import plain_items
from unbroken.frameworks.keras.structure import places_of
from unbroken.state.handlers import Setting
from unbroken.state.tree import join

CLASS, SETTINGS = "class", "settings"
FROZEN = "frozen"
# What a layer looks up, in short; what `adapt` made of it is in no configuration.
VOCABULARY = "vocabulary_in_short"
_LONGEST = 1000
# Names are no settings, and which layers are frozen is told apart.
_APART = frozenset({"name", "trainable", "dtype"})


def settings_of_layers(model: Any) -> dict[str, dict[str, Any]]:
    """Return the class and the plain settings of each layer in `model`, in their order."""
    return {
        place.name: {CLASS: class_name(place.layer), SETTINGS: _settings(place.layer)}
        for place in places_of(model)
        if place.name
    }


def _settings(layer: Any) -> dict[str, Any]:
    policy = {"dtype": layer.dtype_policy.name}
    vocabulary = vocabulary_of(layer)
    if vocabulary is not None:
        policy[VOCABULARY] = vocabulary
    if isinstance(layer, keras.Model):
        return policy
    try:
        config = layer.get_config()
    except NotImplementedError:
        return policy
    plain = {key: item for key, item in plain_items(config).items() if key not in _APART}
    return policy | {
        key: in_short(item) if isinstance(item, list) and len(item) > _LONGEST else item
        for key, item in plain.items()
    }


def layer_settings(model: Any, saved: Mapping[str, Any], place: str) -> Iterator[Setting]:
    """Yield what the script set otherwise on the layers, which is in force; `saved` stands at `place`."""
    mine = settings_of_layers(model)
    for name, layer in mine.items():
        theirs = saved.get(name)
        if theirs is None or theirs[CLASS] != layer[CLASS]:
            continue
        for key in dict.fromkeys((*layer[SETTINGS], *theirs[SETTINGS])):
            here, there = layer[SETTINGS].get(key), theirs[SETTINGS].get(key)
            if here != there or (key in layer[SETTINGS]) != (key in theirs[SETTINGS]):
                setting = Setting(key, there, here, where=name)
                note = setting.text(script_wins=True)
                where = join(join(join(place, name), SETTINGS), key)
                yield Setting(key, there, here, where=name, note=note, places=(where,))


def frozen_layers(model: Any) -> list[str]:
    """Return the names of the layers that are not to be trained; an empty one for the model itself."""
    return [place.name for place in places_of(model) if not place.layer.trainable]


def frozen_setting(model: Any, saved: Collection[str]) -> list[Setting]:
    """Return a line if the script freezes other layers than the checkpoint has frozen."""
    mine = frozen_layers(model)
    if set(mine) == set(saved):
        return []
    return [Setting(FROZEN, sorted(saved), sorted(mine))]


def freeze_again(model: Any, frozen: Collection[str]) -> None:
    """Freeze the layers called `frozen`, and train all others, where that is not so already."""
    places = places_of(model)
    if {place.name for place in places if not place.layer.trainable} == set(frozen):
        return
    # Outer ones first: each sets all that are inside, too.
    for place in places:
        if place.layer.trainable != (place.name not in frozen):
            place.layer.trainable = place.name not in frozen
