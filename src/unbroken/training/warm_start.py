"""Weights from elsewhere into a model, before a run begins. Not a resume: nothing else is taken over."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.container import header_size, parse_header
from unbroken.checkpoint.manifest import Manifest
from unbroken.checkpoint.reader import read_manifest, read_tensors
from unbroken.checkpoint.store import Checkpoint, CheckpointStore
from unbroken.errors import (
    DamagedError,
    NotFiniteError,
    StateMismatchError,
    UnsupportedStateError,
    UsageError,
)
from unbroken.rundir import layout
from unbroken.rundir.rollbacks import Rollback, read_rollbacks
from unbroken.rundir.tell import tell
from unbroken.state.handlers import Difference
from unbroken.state.tensors import HostTensor
from unbroken.storage.local import LocalStorage
from unbroken.training import families
from unbroken.training.adaptation import Rename, renaming
from unbroken.training.arguments import choices
from unbroken.training.comparison import Amount, is_allowed
from unbroken.training.warm_sources import read_keras_or_tensorflow

_SAFETENSORS = ".safetensors"
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_MODULE = "torch.module"
# What handlers call models.
_MODELS = frozenset({_MODULE, "keras.model", "tensorflow.module"})
_LENGTH_BYTES = 8
# The names in a source have no part before them; patterns are of the names of the model.
_MODEL = ""
# How the names of what is no weight begin in the state of a model.
_BESIDE = "("


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """What was taken from `source`: `matched` so much, with the differences that were `allowed`."""

    source: str
    matched: Amount
    allowed: tuple[Difference, ...] = ()

    def lines(self) -> list[str]:
        """Return the report for people, a line each."""
        amount = f"{self.matched.tensors:,} tensors, {self.matched.size_bytes:,} bytes"
        return [
            f"warm start from {self.source}: {amount}; the run itself is not continued",
            *(f"warm start: {difference}" for difference in self.allowed),
        ]


def warm_start(
    model: object,
    source: str | os.PathLike[str] | Checkpoint,
    *,
    part: str | None = None,
    rename: Mapping[Any, str] | None = None,
    allow: Sequence[str] = (),
    cast: Sequence[str] = (),
) -> WarmStartReport:
    """Fill the weights of `model` from `source`, in place, and say what was taken.

        unbroken.warm_start(model, "runs/pretraining", allow=["head.*"])
        with unbroken.Run("runs/fine-tuning", model=model, optimizer=optimizer) as run: ...

    `source` is a run directory (its newest checkpoint), a checkpoint, a `.safetensors` file, a file of
    `torch.save` with weights by name, a `.weights.h5`, `.keras` or `.h5` of Keras, or a checkpoint of
    TensorFlow (its prefix or directory). Tensors are taken as they lie there: none is transposed. Nothing
    but parameters and buffers is read: no optimizer, no position, no random state. `part` says which module
    of a checkpoint, if it has several. It is strict: every name, shape and dtype fits, but for what is said
    by `rename`, `allow` and `cast` as for Run, with names as the model's own state_dict has them. In
    `rename`, names in files of Keras and TensorFlow may be given as `unbroken inspect` shows them.

    Raises StateMismatchError, and changes nothing, if something else differs or nothing matches;
    DamagedError if bytes are not what was saved; UnsupportedStateError for a model of another library.
    """
    allowed_by = choices(
        {}, caller="warm_start", rename=rename, horizon=None, fresh=(), allow=allow, cast=cast
    )
    weights = families.weights(model)
    if weights is None:
        raise UnsupportedStateError(
            f"warm_start: expected a torch.nn.Module, a model of Keras or a tf.Module, found {type(model)}",
            hint="pass the model itself",
        )
    rename_one, met = renaming(allowed_by.rename), set[str]()

    def new_name(name: str) -> str:
        met.add(name)
        return rename_one(name)

    of_others = (
        None
        if isinstance(source, Checkpoint) or _is_ours(Path(source))
        else read_keras_or_tensorflow(Path(source), weights, part, new_name)
    )
    if of_others is None:
        where, tensors, is_foreign = _read(source, part)
        made = {name: weights.made_of(tensor) for name, tensor in tensors.items()}
        found = _named(made, weights.tensors, new_name, is_foreign=is_foreign)
    else:
        where = of_others.where
        found = {name: weights.made_of(tensor) for name, tensor in of_others.tensors.items()}
    _refuse_unused(allowed_by.rename, met, where)
    lacking = () if of_others is None else of_others.others
    differences = [
        *weights.differences(found),
        *(Difference("unexpected", name, "the model lacks it") for name in lacking),
    ]
    refused = [item for item in differences if not is_allowed(_MODEL, item, allowed_by)]
    apart = {item.name for item in differences if item.kind != "dtype"}
    fitting = {name: tensor for name, tensor in found.items() if name not in apart}
    if refused or not fitting:
        lines = [str(item) for item in refused] or ["no name of the model is in it"]
        raise StateMismatchError(
            f"warm start from {where}: it does not fit the model; nothing was changed\n  "
            + "\n  ".join(lines),
            hint="say by rename=, allow= or cast= what may differ"
            + ("" if fitting else "; `unbroken inspect --tensors` lists the names in it"),
        )
    weights.fill(fitting)
    size = sum(tensor.nbytes for tensor in fitting.values())
    report = WarmStartReport(source=where, matched=Amount(len(fitting), size), allowed=tuple(differences))
    tell(*report.lines())
    return report


def _is_ours(path: Path) -> bool:
    return (path / layout.MANIFEST).is_file() or (path / layout.CHECKPOINTS).is_dir()


def _named(
    found: dict[str, Any], known: Container[str], new_name: Rename, *, is_foreign: bool
) -> dict[str, Any]:
    """Return `found` by new names: those of a foreign file without wrappers, where more are `known` then."""
    candidates = [*families.without_wrappers(found)] if is_foreign else [found]
    best = max(candidates, key=lambda names: sum(new_name(name) in known for name in names))
    named: dict[str, Any] = {}
    for name, tensor in best.items():
        new = new_name(name)
        if new in named:
            raise UsageError(
                f"warm_start: expected a rename= that keeps tensors apart, found several that become {new!r}",
                hint="map each name to one of its own; what the model lacks is left out by allow=",
            )
        named[new] = tensor
    return named


def _refuse_unused(rename: Mapping[Any, str], names: Collection[str], where: str) -> None:
    for old, new in rename.items():
        # Longer than any rule makes it, so that a name that a rule leaves as it is counts, too.
        marked = renaming({old: f"{new}'"})
        if not any(marked(name) != name for name in names):
            raise UsageError(
                f"warm_start: {where}: expected a rename= of names in it, found {old!r}, which is none",
                hint="`unbroken inspect --tensors` lists the names",
            )


def _read(source: str | os.PathLike[str] | Checkpoint, part: str | None) -> tuple[str, dict[str, Any], bool]:
    """Return what `source` is called, the tensors in it by name, and whether others may have made it."""
    if isinstance(source, Checkpoint):
        return source.name, _of_checkpoint(source.manifest, source.load_tensors, part), False
    path = Path(source)
    if path.suffix == _SAFETENSORS and path.is_file():
        return str(path), _read_safetensors(path), True
    if path.suffix in _TORCH_FILES and path.is_file():
        return str(path), families.read_torch_file(path), True
    if (path / layout.MANIFEST).is_file():
        # Wherever it was copied to.
        storage, tree = LocalStorage(path.resolve().parent), path.resolve().name
        manifest = read_manifest(storage, tree)
        load = partial(read_tensors, storage, tree, manifest)
        return str(path), _of_checkpoint(manifest, load, part), False
    if (path / layout.CHECKPOINTS).is_dir():
        newest = _newest_good(CheckpointStore(path), read_rollbacks(path))
        found = _of_checkpoint(newest.manifest, newest.load_tensors, part)
        return f"{path} ({newest.name})", found, False
    raise UsageError(
        f"warm_start: expected a run, a checkpoint, a file of safetensors, torch.save, Keras or TensorFlow, "
        f"found {path}{'' if path.exists() else ', which does not exist'}",
        hint=f"the endings of files of torch.save are {', '.join(_TORCH_FILES)}",
    )


def _newest_good(store: CheckpointStore, rollbacks: Sequence[Rollback]) -> Checkpoint:
    """Return the newest checkpoint that nothing is known against, and say what was passed over for that."""
    newest = store.latest()
    against = reason_against(newest.manifest, rollbacks)
    for name in reversed(store.names()):
        with suppress(DamagedError):
            found = store.get(name)
            if reason_against(found.manifest, rollbacks) is not None:
                continue
            if against is not None:
                tell(f"{newest.name} is {against}; {name} is taken")
            return found
    raise NotFiniteError(
        f"{store.storage}: expected a checkpoint to take weights from, found none that is good; "
        f"{newest.name} is {against}",
        hint=f"name the checkpoint itself, {layout.CHECKPOINTS}/{newest.name}, to take them all the same",
    )


def _of_checkpoint(
    manifest: Manifest, load: Callable[[set[str]], Mapping[str, HostTensor]], part: str | None
) -> dict[str, Any]:
    modules = [name for name, entry in manifest.parts.items() if entry.handler in _MODELS]
    chosen = modules[0] if part is None and len(modules) == 1 else part
    if chosen not in modules:
        raise UsageError(
            f"warm_start: expected part= to be one of the modules {', '.join(modules)}, found {part!r}",
            hint="`unbroken inspect` lists the parts of a checkpoint",
        )
    state = manifest.parts[chosen].state
    places = {
        name: str(item["$tensor"])
        for name, item in state.items()
        if isinstance(item, dict) and "$tensor" in item and not name.startswith(_BESIDE)
    }
    tensors = load(set(places.values()))
    return {name: tensors[place] for name, place in places.items()}


def _read_safetensors(path: Path) -> dict[str, HostTensor]:
    storage, key = LocalStorage(path.resolve().parent), path.resolve().name
    size = path.stat().st_size
    header = storage.read(key, 0, header_size(storage.read(key, 0, _LENGTH_BYTES), size, str(path)))
    return {
        name: HostTensor(
            placed.dtype, placed.shape, memoryview(storage.read(key, placed.offset, placed.size_bytes))
        )
        for name, placed in parse_header(bytes(header), str(path)).items()
    }
