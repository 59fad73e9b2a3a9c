"""A checkpoint of tf.train.Checkpoint as the beginning of a run: what fits, and filling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.frameworks.tensorflow.object_graph import ObjectMatch
from unbroken.interchange.files import damaged
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_graph import read_graph
from unbroken.interchange.tf_place import find_bundle
from unbroken.state.choices import Choices
from unbroken.state.handlers import Difference

_NOTES = (
    "random generators and the state of seed generators are not in such a checkpoint: they go on as the "
    "script set them, so that what follows is not, bit for bit, what the old run would have done",
    "nor is the position in the data: epochs and the steps of the run are counted from 0",
)
_OF_OPTIMIZERS = (
    "settings that an optimizer keeps as plain numbers, such as beta_1, epsilon and weight_decay, are not in "
    "such a checkpoint: they are as the script set them"
)


class BundleStart:
    """What a checkpoint holds for the parts of a run; see `Family.begin_from`."""

    def __init__(self, bundle: TfBundle, match: ObjectMatch, notes: Sequence[str]) -> None:
        self.source = str(bundle.prefix)
        of_optimizers = [_OF_OPTIMIZERS] if match.has_optimizer else []
        self.notes = [*match.notes, *match.changed_rates(), *_NOTES, *of_optimizers, *notes]
        self._match = match
        self.others = match.others

    def differences(self) -> dict[str, list[Difference]]:
        """Return by part everything that differs."""
        return {name: matched.differences for name, matched in self._match.parts.items()}

    def amount(self, part: str) -> tuple[int, int]:
        """Return how many tensors a part gets, and their size."""
        pairs = self._match.fitting(part)
        return len(pairs), sum(self._match.size_bytes(pair) for pair in pairs)

    def fill(self) -> None:
        """Give the parts what fits them; everything is read and verified before anything is set."""
        self._match.fill()


def bundle_start(
    source: Path, parts: Mapping[str, object], new_name: Callable[[str], str], choices: Choices
) -> BundleStart | None:
    """Return what the checkpoint that `source` means holds for `parts`, None if it means none.

    `new_name` gives for what the checkpoint was made with the names of parts.
    """
    place = find_bundle(source)
    if place is None:
        return None
    bundle = TfBundle(place.prefix)
    for problem in bundle.problems:
        raise damaged(f"{place.prefix}: {problem.file}", "a whole checkpoint", problem.problem)
    graph = read_graph(bundle)
    if graph is None:
        raise UsageError(
            f"{place.prefix}: expected a checkpoint of tf.train.Checkpoint, found one that has names alone",
            hint="take the weights from it: unbroken.warm_start(model, path, rename={...})",
        )
    roots = _renamed(graph.nodes[0].children, new_name)
    match = ObjectMatch(bundle, graph, parts, roots, fresh=choices.fresh, overrides=choices.overrides)
    return BundleStart(bundle, match, place.notes)


def _renamed(children: Mapping[str, int], new_name: Callable[[str], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, node in children.items():
        new = new_name(name)
        if found.setdefault(new, node) != node:
            raise UsageError(
                f"Run: expected a rename= that keeps parts apart, found several that become {new!r}",
                hint="give the other a name of its own, and name that in allow= to leave it out",
            )
    return found
