"""Orbax, which saves the arrays of JAX; here NumPy's views of the same memory that torch uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch
from peers import IsDurable, Peer, durable
from torch_state import TorchState, build

__all__ = ["build"]


@contextmanager
def orbax(state: TorchState, directory: Path) -> Iterator[Peer]:
    with closing(ocp.PyTreeCheckpointer()) as checkpointer:

        def save(path: Path) -> IsDurable:
            checkpointer.save(path / "state", _arrays(state))
            return durable(path)

        def load(path: Path) -> None:
            arrays = checkpointer.restore(path / "state")
            tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
            state.load_flat({name: tensors[_key(name)] for name in state.flat()})

        yield Peer(save=save, load=load)


@contextmanager
def orbax_async(state: TorchState, directory: Path) -> Iterator[Peer]:
    with closing(ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())) as checkpointer:

        def save(path: Path) -> IsDurable:
            checkpointer.save(path / "state", args=ocp.args.PyTreeSave(_arrays(state)))

            def is_durable() -> bool:
                # There is no way to ask it without waiting.
                checkpointer.wait_until_finished()
                return durable(path)()

            return is_durable

        yield Peer(save=save)


def _arrays(state: TorchState) -> dict[str, Any]:
    return {_key(name): tensor.detach().numpy() for name, tensor in state.flat().items()}


def _key(name: str) -> str:
    # A slash would become a directory.
    return name.replace("/", ".")
