"""Whether this process is one of several that train together, of which no run can be made yet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tensorflow.python.eager import context

from unbroken.errors import UsageError

# The jobs of a cluster whose tasks train in step with each other.
_TRAINING = ("chief", "master", "worker")
_INSTEAD = (
    "a run of several workers is not possible yet: use tf.distribute.MirroredStrategy, or "
    "ParameterServerStrategy with the run in its coordinator; where each process trains by itself, "
    "unset TF_CONFIG and give each a run directory of its own"
)
_IN_COORDINATOR = "make the run in the coordinator, the task 'chief', which holds the loop"


def check_processes() -> None:
    """Raise UsageError in one of several processes that train together.

    Each would save and restore by itself, at another step than the others, and nothing would say so.
    """
    found = _problem(_configuration()) or _in_collective()
    if found is not None:
        problem, hint = found
        raise UsageError(f"Run: expected one process that trains, found {problem}", hint=hint)


def _configuration() -> Mapping[str, Any]:
    """Return TF_CONFIG, by which launchers tell processes of each other. Of bad ones TensorFlow complains."""
    try:
        found = json.loads(os.environ.get("TF_CONFIG") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problem(configuration: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why the process of that TF_CONFIG can have no run, and what to do about it."""
    cluster = configuration.get("cluster") or {}
    task = configuration.get("task") or {}
    name = f"{task.get('type', 'worker')} {task.get('index', 0)}"
    if "ps" in cluster:
        # Its workers and servers wait for what the coordinator sends them.
        if task.get("type") in ("worker", "ps"):
            return f"TF_CONFIG that makes this {name} of a cluster with parameter servers", _IN_COORDINATOR
        return None
    count = sum(len(cluster.get(job, ())) for job in _TRAINING)
    return (f"TF_CONFIG with {count} workers, of which this is {name}", _INSTEAD) if count > 1 else None


def _in_collective() -> tuple[str, str] | None:
    """Look for a MultiWorkerMirroredStrategy that was given its cluster otherwise."""
    # Kept privately; where it is called otherwise one day, TF_CONFIG still tells nearly all of them.
    server = getattr(context.context(), "_collective_ops_server_def", None)
    if server is None:
        return None
    count = sum(len(job.tasks) for job in server.cluster.job if job.name in _TRAINING)
    found = f"a strategy with {count} workers, of which this is {server.job_name} {server.task_index}"
    return (found, _INSTEAD) if count > 1 else None
