"""One of the workers that CLUSTER names, in a strategy of all: `python multi_worker_script.py RUN_DIR HOW`.

HOW it is told of the others: by TF_CONFIG, or by a resolver that is given to the strategy.
"""

from __future__ import annotations

import json
import os
import sys

if sys.argv[2] == "TF_CONFIG":
    os.environ["TF_CONFIG"] = os.environ["CLUSTER"]

import tensorflow as tf

import unbroken


def main() -> None:
    known = json.loads(os.environ["CLUSTER"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(known["cluster"]),
        task_type=known["task"]["type"],
        task_id=known["task"]["index"],
        rpc_layer="grpc",
    )
    is_told = sys.argv[2] == "TF_CONFIG"
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=None if is_told else resolver)
    with strategy.scope():
        total = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    # To read its value waits for the other worker, which is refused, too.
    with unbroken.Run(sys.argv[1], total=total):
        raise AssertionError("a run was made")


if __name__ == "__main__":
    main()
