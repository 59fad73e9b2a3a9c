"""Writes the golden checkpoints of Orbax. Needs jax and orbax-checkpoint: see `benchmarks/requirements.txt`.

python tests/golden/orbax/make.py
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

# Two devices, for what is sharded.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

HERE = Path(__file__).resolve().parent


def state() -> dict[str, Any]:
    draw = np.random.default_rng(7)
    return {
        "params": {
            "dense": {
                "kernel": jnp.asarray(draw.normal(size=(3, 4)).astype(np.float32)),
                "bias": jnp.asarray(draw.normal(size=4), jnp.bfloat16),
            },
            "a.b/c": jnp.ones(1),
            # Too large to stand in the index of the store.
            "table": jnp.asarray(draw.integers(0, 9, size=(100, 40)), jnp.float32),
        },
        "opt": [jnp.zeros(3), {"count": jnp.int32(5)}],
        "numpy": np.arange(3),
        "flags": jnp.array([True, False]),
        "small": jnp.ones(3, jnp.float8_e4m3fn),
        "four": jnp.array([1, -2], jnp.int4),
        "step": 7,
        "lr": 0.5,
        "none": None,
        "empty": {},
    }


def sharded() -> dict[str, Any]:
    """Each device writes a part of the rows: what `_METADATA` calls its shape is that of such a part."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def table(first: int) -> jax.Array:
        return jax.device_put(jnp.arange(first, first + 24, dtype=jnp.float32).reshape(4, 6), by_rows)

    moments = {"count": jnp.int32(3), "mu": {"kernel": table(100)}, "nu": {"kernel": table(200)}}
    return {"params": {"kernel": table(0)}, "opt_state": [moments, {}]}


def main() -> None:
    for name in ("steps", "plain", "zarr3", "sharded"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    made = state()
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(HERE / "steps", options=options) as manager:
        for step in (3, 7):
            parts = {
                "state": ocp.args.PyTreeSave({**made, "name": "run"}),
                "extra": ocp.args.JsonSave({"epoch": 2}),
            }
            manager.save(step, args=ocp.args.Composite(**parts), metrics={"loss": 0.5})
        manager.wait_until_finished()
    for name, handler in (
        ("plain", ocp.PyTreeCheckpointHandler(use_ocdbt=False)),
        ("zarr3", ocp.PyTreeCheckpointHandler(use_zarr3=True)),
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(HERE / name, made)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(HERE / "sharded", sharded())
    for path in HERE.rglob("commit_success.txt"):
        # It names the directory of whoever made it.
        path.write_text(path.read_text().replace(str(HERE), "."))
    leaves, _ = jax.tree_util.tree_flatten_with_path(made)
    arrays = {
        "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path): np.asarray(leaf)
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
    (HERE / "expected.json").write_text(
        json.dumps(
            {
                path: {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.tobytes().hex()}
                for path, array in arrays.items()
            },
            indent=1,
        )
        + "\n"
    )
    versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
