"""The checkpoints of a run, a row each. Apart from all that looks deeper, so that it starts fast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.checkpoint.envelope import HINT, check_format, check_name, read_manifest_bytes
from unbroken.checkpoint.highlights import learning_rates, plain_metrics
from unbroken.errors import DamagedError, UnbrokenError
from unbroken.inspection.locate import Located, locate_all


def list_checkpoints(run_directory: Path) -> list[dict[str, Any]]:
    """Return a row for each checkpoint of a run, oldest first.

    The bytes of manifests are verified, tensors are not read. `problem` says what is wrong with a
    manifest; then all fields but `name` are None.
    """
    return [_row(located) for located in locate_all(run_directory)]


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
    }


def _row(located: Located) -> dict[str, Any]:
    name = located.directory.name
    try:
        return {"name": name, **_read(located), "problem": None}
    except UnbrokenError as error:
        fields = ("run_id", "step", "epoch", "inside_epoch", "created", "size_bytes", "learning_rates")
        return {"name": name, **dict.fromkeys(fields), "metrics": {}, "problem": error.message}


def _read(located: Located) -> dict[str, Any]:
    data = read_manifest_bytes(located.storage, located.tree)
    try:
        manifest = json.loads(data)
        check_format(manifest.get("format"), manifest.get("format_version"), str(located.directory))
        check_name(located.tree, manifest["step"], manifest["revision"])
        return facts(manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # The digest holds, so these are the bytes that somebody wrote; a manifest they are not.
        raise DamagedError(
            f"{located.directory}: expected a manifest, found {type(error).__name__}: {error}", hint=HINT
        ) from error
