"""A training of two workers on loopback: `python multi_worker_script.py RUN OUT [NAME=JSON ...]`.

Each worker writes what it saw, a JSON line for each step, to OUT/rank.jsonl, and what it has in the end to
OUT/rank.txt. `kill` ends worker 1 by SIGKILL at a step, `term` sends it SIGTERM there, each once; `lonely`
has worker 1 end without a run, `own` gives each a directory of its own, `torn` another weight, and `fit`
calls model.fit. Which exit code each has had is in OUT/codes.json. When one dies the launcher ends the other,
unless `left`. `without_sums` keeps no sum, `in_order` does not shuffle. Other numbers of `workers` and
`epochs` than two may be given, and the run is that of a supervisor if one is there. `short` gives worker 1 a
batch less, and has the other one wait for so many seconds; `allow` is that of Run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import unbroken
import unbroken.keras
from unbroken.frameworks.tensorflow import collective
from unbroken.rundir import layout

EPOCHS, SAMPLES, BATCH, WORKERS = 2, 24, 3, 2


def build(options: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(6), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    summed = {
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    }
    return model, optimizer, tf.Variable(0.0, trainable=False, **summed)


def train(rank: int, directory: Path, out: Path, options: dict[str, Any]) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer, total = build(options)
    if options.get("torn") and rank:
        (local,) = model.trainable_variables[0].value.values
        local.assign_add(tf.ones_like(local))
    if options.get("lonely") and rank:
        return
    rows = tf.random.stateless_uniform((SAMPLES, 4), [1, 2])
    numbered = tf.data.Dataset.from_tensor_slices((tf.range(SAMPLES), rows))
    share = numbered.shard(options.get("workers", WORKERS), rank)
    dataset = (share if options.get("in_order") else share.shuffle(8, seed=5 + rank)).batch(BATCH)
    if options.get("short"):
        collective._WAITING_SECONDS = options["short"]
        dataset = dataset.take(len(dataset) - rank)
    tf.random.set_seed(100 + rank)

    def on_replica(batch: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch + noise, training=True) - 0.5) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        total.assign_add(loss)
        return loss

    @tf.function
    def step_of_all(batch: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(on_replica, args=(batch, noise))
        return strategy.experimental_local_results(losses)[0]

    if options.get("own"):
        directory = directory / str(rank)
    parts = {"model": model, "optimizer": optimizer, "total": total}
    if options.get("without_sums"):
        del parts["total"]
    log = (out / f"{rank}.jsonl").open("a")
    supervised = layout.RUN_DIR_VARIABLE in os.environ
    wanted = {"save": [unbroken.EverySteps(2)], "allow": options.get("allow", [])}
    with unbroken.Run(None if supervised else directory, **wanted, **parts) as run:
        if options.get("fit"):
            model.compile(optimizer, "mse")
            model.fit(rows, rows[:, :1], verbose=0, callbacks=[unbroken.keras.Checkpoint(run)])
        for _ in run.epochs(options.get("epochs", EPOCHS)):
            for numbers, batch in run.batches(dataset):
                step = run.step_count + 1
                loss = step_of_all(batch, tf.random.normal(batch.shape) / 8)
                seen = {"step": step, "numbers": numbers.numpy().tolist(), "loss": float(loss).hex()}
                log.write(json.dumps(seen) + "\n")
                log.flush()
                for name, number in (("kill", signal.SIGKILL), ("term", signal.SIGTERM)):
                    if rank == 1 and options.get(name) == step and not (out / name).exists():
                        (out / name).touch()
                        os.kill(os.getpid(), number)
                run.step(loss=float(loss))
    (out / f"{rank}.txt").write_text(json.dumps([local_values(model, optimizer, total), draw()]))


def local_values(model: Any, optimizer: Any, total: Any) -> list[str]:
    variables = [*(one.value for one in (*model.variables, *optimizer.variables)), total]
    return [one.values[0].numpy().tobytes().hex() for one in variables]


def draw() -> str:
    return str(tf.random.uniform([]).numpy().tobytes().hex())


def cluster(count: int) -> dict[str, list[str]]:
    sockets = [socket.socket() for _ in range(count)]
    for taken in sockets:
        taken.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{taken.getsockname()[1]}" for taken in sockets]
    for taken in sockets:
        taken.close()
    return {"worker": addresses}


def main() -> None:
    directory, out = Path(sys.argv[1]), Path(sys.argv[2])
    options = {name: json.loads(text) for name, _, text in (word.partition("=") for word in sys.argv[3:])}
    count = options.get("workers", WORKERS)
    known, workers = cluster(count), dict[int, int]()
    for rank in range(count):
        child = os.fork()
        if not child:
            os.environ["TF_CONFIG"] = json.dumps(
                {"cluster": known, "task": {"type": "worker", "index": rank}}
            )
            return train(rank, directory, out, options)
        workers[child] = rank
    codes: dict[int, int] = {}
    while workers:
        child, status = os.wait()
        codes[workers.pop(child)] = os.waitstatus_to_exitcode(status)
        if os.WIFSIGNALED(status) and not options.get("left"):
            for other in workers:
                os.kill(other, signal.SIGKILL)
    (out / "codes.json").write_text(json.dumps([codes[rank] for rank in sorted(codes)]))
    sys.exit(max(codes.values(), key=abs))


if __name__ == "__main__":
    main()
