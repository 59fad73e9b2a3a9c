"""The files of a `cache(filename)` that is not complete yet: of these TensorFlow goes on only with its own.

It writes a shard, `filename_0` and so on, between any two looks at its state, and refuses to begin one that
is there already. A killed process leaves those that it began after the state that a resume goes back to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import tensorflow as tf

from unbroken.errors import UsageError
from unbroken.frameworks.tensorflow.pipeline import Pipeline

AlreadyThere = tf.errors.AlreadyExistsError
_SHARD = re.compile(r"_(\d+)\.(?:index|lockfile|data-\d.*)$")
_MADE = ".index"


def shards_written(pipeline: Pipeline) -> dict[str, int]:
    """Return how many shards of each cache are complete, as its stage is called; none of one that is done."""
    return {
        stage: 1 + max((number for number, file in shards if file.endswith(_MADE)), default=-1)
        for stage, shards in _unfinished(pipeline)
    }


def drop_later(pipeline: Pipeline, written: Mapping[str, int]) -> None:
    """Delete the shards of unfinished caches that were begun after the first `written` ones."""
    for stage, shards in _unfinished(pipeline):
        for number, file in shards:
            if number >= written.get(stage, 0):
                tf.io.gfile.remove(file)


def in_the_way(pipeline: Pipeline) -> UsageError:
    """Return what to raise where files of another process keep TensorFlow from writing a cache."""
    files = [file for _, shards in _unfinished(pipeline) for _, file in shards]
    return UsageError(
        f"batches: expected no files of a cache() that is not complete, found {', '.join(files)}",
        hint="if the process that wrote them has ended, delete these files",
    )


def _unfinished(pipeline: Pipeline) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield `(stage, [(number, file)])` for each cache in a file that is not complete."""
    for stage in pipeline.stages:
        name = stage.value("_filename") if stage.name.startswith("cache") else None
        if name and not tf.io.gfile.exists(os.fsdecode(name) + _MADE):
            yield stage.name, list(_shards(os.fsdecode(name)))


def _shards(name: str) -> Iterator[tuple[int, str]]:
    directory, base = os.path.split(name)
    found = tf.io.gfile.listdir(directory or ".") if tf.io.gfile.isdir(directory or ".") else []
    for file in sorted(found):
        match = _SHARD.fullmatch(file.removeprefix(base)) if file.startswith(base) else None
        if match:
            yield int(match[1]), os.path.join(directory, file)
