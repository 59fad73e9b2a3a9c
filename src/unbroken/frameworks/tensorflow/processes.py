"""Whether this process is one of several that train together, and which one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorflow.python.eager import context

from unbroken.errors import UsageError

# The jobs of a cluster whose tasks train in step with each other, in the order of their ranks.
_TRAINING = ("chief", "master", "worker")
_STRATEGY_FIRST = (
    "make the tf.distribute.MultiWorkerMirroredStrategy before the Run, so that the workers can speak to "
    "each other; where each process trains by itself, unset TF_CONFIG and give each a directory of its own"
)
_IN_COORDINATOR = "make the run in the coordinator, the task 'chief', which holds the loop"


@dataclass(frozen=True, slots=True)
class Worker:
    """One of `count` workers that train in step."""

    rank: int
    count: int


def check_processes() -> None:
    """Raise UsageError in one of several processes that train together, if they cannot speak to each other.

    Each would save and restore by itself, at another step than the others, and nothing would say so.
    """
    found = None if this_worker() is not None else _problem(_configuration())
    if found is not None:
        problem, hint = found
        raise UsageError(f"Run: expected one process that trains, found {problem}", hint=hint)


def this_worker() -> Worker | None:
    """Return which worker of a MultiWorkerMirroredStrategy this is, None without one or if it is alone."""
    # Kept privately; where it is called otherwise one day, TF_CONFIG still tells nearly all of them.
    server = getattr(context.context(), "_collective_ops_server_def", None)
    if server is None:
        return None
    jobs = {job.name: sorted(job.tasks) for job in server.cluster.job}
    workers = [(job, task) for job in _TRAINING for task in jobs.get(job, ())]
    me = (server.job_name, server.task_index)
    return Worker(workers.index(me), len(workers)) if len(workers) > 1 and me in workers else None


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
    if count < 2:
        return None
    return f"TF_CONFIG with {count} workers, of which this is {name}, and no strategy", _STRATEGY_FIRST
