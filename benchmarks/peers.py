"""Who is compared: each peer by name, and how it is opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from observe import sync_tree

if TYPE_CHECKING:
    from states import State, StateSpec

IsDurable = Callable[[], bool]
OURS = "unbroken"
POLL_SECONDS = 0.0005


def nothing() -> None:
    """What most peers have to prepare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a measurement does with a peer whose state is live.

    `save` writes into an empty directory, returns when training may go on, and returns what tells
    whether every byte and name is durable by now. `load` reads from such a directory into the live
    state. `prepare` is called once before the first save, and is not timed.
    """

    save: Callable[[Path], IsDurable]
    load: Callable[[Path], None] | None = None
    prepare: Callable[[], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a peer is found: `module` has the context manager `opener` and the type of its state."""

    module: str
    opener: str
    package: str | None = None
    can_load: bool = True

    def version(self) -> str | None:
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None


ENTRIES = {
    OURS: Entry(module="peers_unbroken", opener="run", package="unbroken"),
    "torch.save": Entry(module="peers_torch", opener="torch_save", package="torch"),
    "safetensors": Entry(module="peers_torch", opener="safetensors", package="safetensors"),
    "DCP": Entry(module="peers_torch", opener="dcp_sync", package="torch"),
    "DCP async thread": Entry(
        module="peers_torch", opener="dcp_async_thread", package="torch", can_load=False
    ),
    "DCP async process": Entry(
        module="peers_torch", opener="dcp_async_process", package="torch", can_load=False
    ),
    "torchsnapshot": Entry(module="peers_torch", opener="torchsnapshot_take", package="torchsnapshot"),
    "torchsnapshot async": Entry(
        module="peers_torch", opener="torchsnapshot_async", package="torchsnapshot", can_load=False
    ),
    "Orbax": Entry(module="peers_orbax", opener="orbax", package="orbax-checkpoint"),
    "Orbax async": Entry(
        module="peers_orbax", opener="orbax_async", package="orbax-checkpoint", can_load=False
    ),
    "TensorFlow": Entry(module="peers_tensorflow", opener="checkpoint", package="tensorflow-cpu"),
    "raw direct": Entry(module="peers_raw", opener="raw_direct"),
    "raw buffered": Entry(module="peers_raw", opener="raw_buffered"),
    "memory copy": Entry(module="peers_raw", opener="memory_copy", can_load=False),
}
LIMITS = ("raw direct", "raw buffered")
SAVERS = tuple(name for name in ENTRIES if name != "memory copy")
LOADERS = tuple(name for name, entry in ENTRIES.items() if entry.can_load)
STALLERS = (OURS, "torch.save", "DCP async thread", "DCP async process", "memory copy")


def build_state(name: str, spec: StateSpec) -> State:
    """Return the live state of `spec` in the form that the peer `name` saves."""
    build: Callable[[StateSpec], State] = import_module(ENTRIES[name].module).build
    return build(spec)


def open_peer(name: str, state: Any, directory: Path) -> AbstractContextManager[Peer]:
    """Return the peer `name` for a live state, as a context; `directory` is its own to use."""
    entry = ENTRIES[name]
    opener: Callable[[Any, Path], AbstractContextManager[Peer]]
    opener = getattr(import_module(entry.module), entry.opener)
    return opener(state, directory)


def durable(directory: Path) -> IsDurable:
    """Make durable what was just saved into `directory`: for peers that leave this to their caller."""
    sync_tree(directory)
    return lambda: True


def wait_until(is_durable: IsDurable, *, timeout_seconds: float = 600) -> None:
    """Return when a save is durable. Raises TimeoutError."""
    until = time.monotonic() + timeout_seconds
    while not is_durable():
        if time.monotonic() > until:
            raise TimeoutError(f"not durable after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)
