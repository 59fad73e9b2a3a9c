"""The folders that trainers write: of the Trainer of Hugging Face, and of Accelerate, each as one checkpoint.

What they hold is told by the names of their files, and each file is of a format of its own, by which it is
opened. Parts are called after the files. Nothing is loaded: `training_args.bin`, a pickle of an object, is
read like all pickles here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.errors import DamagedError, UsageError
from unbroken.inspection.detect import is_dcp, is_zero, open_checkpoint, single_files
from unbroken.inspection.formats.base import CheckpointReader, RegularFile, damaged
from unbroken.inspection.formats.joined import Parts
from unbroken.inspection.formats.json_files import read_json
from unbroken.inspection.formats.safetensors import inside, read_index
from unbroken.inspection.pointers import NUMBERED, number_of
from unbroken.storage.failures import translated

TRAINER_STATE = "trainer_state.json"
_FILE = re.compile(
    r"(pytorch_model|model|adapter_model|pytorch_model_fsdp|optimizer|scheduler|scaler|sampler|dl_state_dict"
    r"|rng_state|random_states|custom_checkpoint|training_args)(_[0-9]{1,7})?\.(safetensors|bin|pt|pth|pkl)"
)
_INDEX = re.compile(r"((?:pytorch_)?model)(_[0-9]{1,7})?\.(safetensors|bin)\.index\.json")
_SHARD = re.compile(r"(?:pytorch_)?model-[0-9]{5}-of-([0-9]{5})\.(?:safetensors|bin)")
_CALLED = {"pytorch_model": "model", "pytorch_model_fsdp": "model"}
_ACCELERATE = re.compile(r"random_states_[0-9]+\.pkl|(?:optimizer|sampler|scheduler)(?:_[0-9]+)?\.bin")
_OF_A_RANK = re.compile(r"(rng_state|random_states)_([0-9]{1,7})\.(?:pth|pkl)")


class TrainerFolder(CheckpointReader):
    """A folder with the files of one save: what is missing among them is a problem."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._names = _names(directory)
        is_of_accelerate = not _is_of_trainer(self._names) and any(map(_ACCELERATE.fullmatch, self._names))
        self.format = "Accelerate" if is_of_accelerate else "Hugging Face Trainer"
        self.problems = []
        self.notes = []
        self.files = {}
        self._parts = Parts()
        self._expected = dict(self._files_of_parts())
        for file, part in self._expected.items():
            self._add(file, part)
        self.tensors = self._parts.tensors
        self.values = self._parts.values
        if TRAINER_STATE in self._names:
            self.values[TRAINER_STATE.removesuffix(".json")] = self._state()
        self.size_bytes = sum(self.files.values())
        self.facts = {
            "objects": sorted(self._parts.objects),
            "attributes": self._parts.attributes,
            "metadata": {},
            "any_world_size": True,
            "generators_of_ranks": self._count_of_ranks(),
            **self._position(),
        }
        self.problems += [*self._parts.problems, *self._missing(), *self._disagreeing()]
        self.notes += self._parts.notes
        self.checksums = self._checked()

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor. Raises DamagedError if they are not all there."""
        return self._parts.read(path)

    def verify(self) -> Iterator[Finding]:
        """Read every file against the checksums that it carries."""
        return self._parts.verify()

    def _files_of_parts(self) -> Iterator[tuple[str, str]]:
        """Yield the files that hold a state, with the part that each is."""
        for name in self._names:
            file, index = _FILE.fullmatch(name), _INDEX.fullmatch(name)
            if index is not None:
                if index[3] == "safetensors":
                    yield name, f"model{index[2] or ''}"
                else:
                    yield from ((shard, f"model{index[2] or ''}") for shard in self._shards_in(name))
            elif file is not None:
                yield name, f"{_CALLED.get(file[1], file[1])}{file[2] or ''}"
            elif self._is_checkpoint(name):
                yield name, _part_of_directory(name)

    def _is_checkpoint(self, name: str) -> bool:
        path = self.path / name
        if path.is_symlink() or not path.is_dir() or NUMBERED.fullmatch(name):
            return False
        return is_dcp(path) or is_zero(path) or len(single_files(path)) == 1

    def _shards_in(self, index: str) -> list[str]:
        try:
            weight_map, _ = read_index(RegularFile(inside(self.path, index)))
        except DamagedError as error:
            self.problems.append(Finding(file=index, problem=error.message))
            return []
        return sorted(set(weight_map.values()))

    def _add(self, file: str, part: str) -> None:
        try:
            path = inside(self.path, file)
            reader = open_checkpoint(path)
        except DamagedError as error:
            self.problems.append(
                Finding(file=file, problem=error.message.removeprefix(f"{self.path}/{file}: "))
            )
        except UsageError as error:
            self.notes.append(f"{file} is not read: {error.message.removeprefix(f'{self.path}/{file}: ')}")
        else:
            self._parts.add(part, file, reader)
            if path.is_dir():
                self.files |= {f"{file}/{name}": size for name, size in reader.files.items()}
            else:
                self.files[file] = path.stat().st_size
                self.files |= {name: size for name, size in reader.files.items() if name not in self.files}

    def _state(self) -> Any:
        try:
            path = inside(self.path, TRAINER_STATE)
            self.files[TRAINER_STATE] = RegularFile(path).size_bytes
            said = read_json(path)
            if not isinstance(said, dict):
                raise damaged(TRAINER_STATE, "an object", type(said).__name__)
            return said
        except DamagedError as error:
            problem = error.message.removeprefix(f"{TRAINER_STATE}: ")
            self.problems.append(Finding(file=TRAINER_STATE, problem=problem))
        return {}

    def _position(self) -> dict[str, Any]:
        """Return how the trainer finds its place in the data again, if it does."""
        step = _said(self.values, "global_step")
        if step is not None:
            return {"position": {"global_step": step, "how": "the batches before it are skipped"}}
        kept = sorted(part for part in self.values if part.startswith("dl_state_dict"))
        return {"position": {"loaders": kept}} if kept else {}

    def _count_of_ranks(self) -> int | None:
        ranks = self._ranks()
        if ranks:
            return max(ranks) + 1
        return 1 if "rng_state.pth" in self._names else None

    def _ranks(self) -> set[int]:
        return {int(match[2]) for name in self._names if (match := _OF_A_RANK.fullmatch(name))}

    def _missing(self) -> Iterator[Finding]:
        yield from self._missing_of_the_model()
        ranks = self._ranks()
        lost = [rank for rank in range(max(ranks, default=0)) if rank not in ranks]
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            yield self._finding(
                f"the random generators of rank {lost[0]}{more} of {max(ranks) + 1} are missing"
            )
        yield from (
            self._missing_of_accelerate() if self.format == "Accelerate" else self._missing_of_trainer()
        )

    def _missing_of_trainer(self) -> Iterator[Finding]:
        kept = set(self._expected.values())
        has_rng = any(part.startswith("rng_state") for part in kept)
        # An optimizer that is cut by ranks lies in a directory, and with DeepSpeed so does its scheduler.
        has_optimizer = any(part.startswith(("optimizer", "global_step")) for part in kept)
        is_cut = any(part.startswith("global_step") for part in kept)
        if TRAINER_STATE not in self._names:
            yield self._finding(
                f"{TRAINER_STATE} is missing: it is written last, so the save was not finished"
            )
        if not has_optimizer and (has_rng or "scheduler" in kept):
            yield self._finding("optimizer.pt is missing, though other files of the training state are there")
        if has_optimizer and "scheduler" not in kept and not is_cut:
            yield self._finding("scheduler.pt is missing")
        if has_optimizer and not has_rng:
            yield self._finding("rng_state.pth is missing")

    def _missing_of_accelerate(self) -> Iterator[Finding]:
        if not self._ranks():
            yield self._finding("random_states_0.pkl is missing: it is written after all the others")

    def _missing_of_the_model(self) -> Iterator[Finding]:
        shards = [match for name in self._names if (match := _SHARD.fullmatch(name))]
        kept = set(self._expected.values())
        if shards and not any(map(_INDEX.fullmatch, self._names)):
            words = f"the index of {len(shards)} of {int(shards[0][1])} files of the model is missing"
            yield self._finding(f"{words}: it is written after them")
        elif not any(part.startswith(("model", "adapter_model", "global_step")) for part in kept):
            # Scripts that use Accelerate may save models by themselves, and under any name.
            if self.format == "Accelerate":
                self.notes.append("there is no file of a model by the name that Accelerate gives it")
            else:
                yield self._finding("there is no file of the model")

    def _disagreeing(self) -> Iterator[Finding]:
        folder, step = self.path.resolve(), _said(self.values, "global_step")
        if NUMBERED.fullmatch(folder.name) and step is not None and number_of(folder) != step:
            words = f"global_step {step}, though the folder is called {folder.name}"
            yield Finding(file=TRAINER_STATE, problem=words)

    def _finding(self, problem: str) -> Finding:
        return Finding(file=self.path.name, problem=problem)

    def _checked(self) -> str | None:
        without = [file for file, reader in self._parts.readers.items() if reader.checksums is None]
        if len(without) == len(self._parts.readers):
            return None
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        return f"CRC-32 of each entry; none in {without[0]}{more}" if without else "CRC-32 of each entry"


def _is_of_trainer(names: Iterable[str]) -> bool:
    return any(
        name in (TRAINER_STATE, "training_args.bin", "optimizer.pt") or name.startswith("rng_state")
        for name in names
    )


def _part_of_directory(name: str) -> str:
    stem, _, number = name.rpartition("_")
    # Of one model and one optimizer each is called number 0.
    return _CALLED.get(stem, stem) if stem in _DIRECTORIES and number == "0" else _CALLED.get(name, name)


_DIRECTORIES = ("pytorch_model_fsdp", "optimizer")


def _said(values: Any, key: str) -> int | None:
    state = values.get("trainer_state")
    found = state.get(key) if isinstance(state, dict) else None
    return found if type(found) is int else None


def _names(directory: Path) -> list[str]:
    with translated("list", str(directory)):
        return sorted(path.name for path in directory.iterdir())
