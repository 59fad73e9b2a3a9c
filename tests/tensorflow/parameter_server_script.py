"""A cluster on this machine: a coordinator with a run, and two parameter servers and a worker below it.

    python parameter_server_script.py PLACE SHARDS

In PLACE lie: `servers`, the process ids of the servers, which end with the coordinator; `last-step`, made
by whoever wants training to end at that step. The run directory is that of the supervisor, else PLACE/run.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import unbroken
from unbroken.rundir import layout

_PARENT_DEATH_SIGNAL = 1
ROWS, COLUMNS = 5, 3


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    # Whatever the coordinator dies of, the servers do not stay behind.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc"
    )
    server.join()


def free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def start_servers(place: Path, cluster: dict[str, list[str]]) -> None:
    jobs = [(job, index) for job in ("ps", "worker") for index in range(len(cluster[job]))]
    started = [
        subprocess.Popen([sys.executable, __file__, "--serve", json.dumps([cluster, job, index])])
        for job, index in jobs
    ]
    (place / "servers").write_text(json.dumps([process.pid for process in started]))


def last_step(place: Path) -> int:
    path = place / "last-step"
    return int(path.read_text()) if path.exists() else sys.maxsize


def coordinate(place: Path, shards: int) -> None:
    cluster = {
        "chief": [free_address()],
        "ps": [free_address() for _ in range(2)],
        "worker": [free_address()],
    }
    start_servers(place, cluster)
    tf.keras.utils.set_random_seed(11)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards),
    )
    with strategy.scope():
        table = tf.Variable(tf.random.stateless_normal((ROWS, COLUMNS), [1, 2]))
        moments = tf.Variable(tf.zeros((ROWS, COLUMNS)))
        bias = tf.Variable(0.0)
    assert len(table.variables) == shards
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.concat([tf.convert_to_tensor(shard) for shard in table.variables], axis=0)
            loss = tf.reduce_mean((tf.matmul(batch, rows) + bias) ** 2)
        gradients = tape.gradient(loss, [*table.variables, bias])
        for shard, moment, gradient in zip(table.variables, moments.variables, gradients[:-1], strict=True):
            moment.assign(0.9 * moment + gradient)
            shard.assign_sub(0.01 * moment)
        bias.assign_sub(0.01 * gradients[-1])
        return loss

    weights = {"table": table, "moments": moments, "bias": bias}
    directory = None if layout.RUN_DIR_VARIABLE in os.environ else place / "run"
    with unbroken.Run(directory, save=[unbroken.EverySteps(4)], weights=weights) as run:
        while run.step_count < last_step(place):
            batch = tf.random.stateless_uniform((2, ROWS), [7, run.step_count])
            loss = coordinator.schedule(step, args=(batch,))
            # A step is complete when the worker has done it.
            coordinator.join()
            run.step(loss=float(loss.fetch()))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*json.loads(sys.argv[2]))
    else:
        coordinate(Path(sys.argv[1]), int(sys.argv[2]))
