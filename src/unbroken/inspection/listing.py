"""The checkpoints of a run, a row each. Apart from all that looks deeper, so that it starts fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.checkpoint.envelope import HINT, check_format, check_name, read_manifest_bytes
from unbroken.checkpoint.highlights import learning_rates, non_finite_in_words, plain_metrics
from unbroken.checkpoint.pins import read_pins
from unbroken.errors import DamagedError, UnbrokenError
from unbroken.inspection.locate import Located, locate_all
from unbroken.rundir import layout
from unbroken.storage.local import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unbroken.rundir.rollbacks import Rollback


def list_checkpoints(run_directory: Path) -> list[dict[str, Any]]:
    """Return a row for each checkpoint of a run, oldest first.

    The bytes of manifests are verified, tensors are not read. `problem` says what is wrong with a
    manifest; then all fields but `name` and `pinned` are None. `pinned` is None if the pins cannot be read.
    `tainted` says by what, "" if it is not; it is None if the roll-backs of the run cannot be read.
    """
    pins: set[str] | None = None
    rollbacks: Sequence[Rollback] | None = None
    # What is there is to be seen all the same.
    with suppress(UnbrokenError):
        pins = set(read_pins(LocalStorage(run_directory)))
    with suppress(UnbrokenError):
        rollbacks = _rollbacks(run_directory)
    return [
        {
            **_row(located, rollbacks),
            "pinned": None if pins is None else located.directory.name in pins,
        }
        for located in locate_all(run_directory)
    ]


def reason_against(row: Mapping[str, Any]) -> str:
    """Return why no run goes on by itself from the checkpoint of a row; "" if nothing is known against it."""
    if row["problem"] or row["non_finite"]:
        return str(row["problem"] or non_finite_in_words(row["non_finite"]))
    validation = row["validation"]
    if validation is not None and not validation["passed"]:
        return f"not validated: {validation['reason']}" if validation["reason"] else "not validated"
    return row["tainted"] or ""


def _rollbacks(run_directory: Path) -> Sequence[Rollback]:
    if not (run_directory / layout.ROLLBACKS_FILE).exists():
        return ()
    # Loaded here: most runs have none.
    from unbroken.rundir.rollbacks import read_rollbacks

    return read_rollbacks(run_directory)


def _tainted(manifest: Mapping[str, Any], rollbacks: Sequence[Rollback] | None) -> str | None:
    if not rollbacks:
        return None if rollbacks is None else ""
    from unbroken.checkpoint.choosing import tainted_by

    return tainted_by(manifest["step"], manifest.get("rollbacks", 0), rollbacks) or ""


def facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row from a manifest as plain JSON."""
    position, parts, shards = manifest["position"], manifest["parts"], manifest["shards"]
    return {
        "run_id": manifest["run_id"],
        "step": manifest["step"],
        "epoch": position["epoch"],
        "inside_epoch": position["inside_epoch"],
        "created": manifest["created"],
        "size_bytes": sum(shard["size_bytes"] for shard in shards.values()),
        "learning_rates": list(learning_rates(part["state"] for part in parts.values())),
        "metrics": plain_metrics(manifest["metrics"]),
        # Those of earlier releases say nothing of it.
        "non_finite": manifest.get("non_finite"),
        "validation": manifest.get("validation"),
    }


def _row(located: Located, rollbacks: Sequence[Rollback] | None) -> dict[str, Any]:
    name = located.directory.name
    try:
        return {"name": name, **_read(located, rollbacks), "problem": None}
    except UnbrokenError as error:
        fields = ("run_id", "step", "epoch", "inside_epoch", "created", "size_bytes", "learning_rates")
        unknown = dict.fromkeys((*fields, "non_finite", "validation", "tainted"))
        return {"name": name, **unknown, "metrics": {}, "problem": error.message}


def _read(located: Located, rollbacks: Sequence[Rollback] | None) -> dict[str, Any]:
    data = read_manifest_bytes(located.storage, located.tree)
    try:
        manifest = json.loads(data)
        check_format(manifest.get("format"), manifest.get("format_version"), str(located.directory))
        check_name(located.tree, manifest["step"], manifest["revision"])
        return {**facts(manifest), "tainted": _tainted(manifest, rollbacks)}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # The digest holds, so these are the bytes that somebody wrote; a manifest they are not.
        raise DamagedError(
            f"{located.directory}: expected a manifest, found {type(error).__name__}: {error}", hint=HINT
        ) from error
