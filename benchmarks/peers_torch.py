"""The peers that save states of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from peers import IsDurable, Peer, durable
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch_state import TorchState, build

__all__ = ["build"]

# Two files written side by side were no slower than the one of the default, and mostly faster.
DCP_THREADS = 2


@contextmanager
def torch_save(state: TorchState, directory: Path) -> Iterator[Peer]:
    def save(path: Path) -> IsDurable:
        torch.save(state.nested(), path / "state.pt")
        return durable(path)

    def load(path: Path) -> None:
        state.load(torch.load(path / "state.pt", weights_only=True))

    yield Peer(save=save, load=load)


@contextmanager
def safetensors(state: TorchState, directory: Path) -> Iterator[Peer]:
    from safetensors.torch import load_file, save_file

    def save(path: Path) -> IsDurable:
        parts = state.nested().items()
        groups = {name: part["param_groups"] for name, part in parts if "param_groups" in part}
        # It keeps tensors and text only.
        save_file(state.flat(), path / "state.safetensors", metadata={"param_groups": json.dumps(groups)})
        return durable(path)

    def load(path: Path) -> None:
        state.load_flat(load_file(path / "state.safetensors"))

    yield Peer(save=save, load=load)


@contextmanager
def dcp_sync(state: TorchState, directory: Path) -> Iterator[Peer]:
    def save(path: Path) -> IsDurable:
        state_dict_saver.save(state.nested(), storage_writer=_writer(path), no_dist=True)
        # It syncs its files, but not their names.
        return durable(path)

    def load(path: Path) -> None:
        nested = state.nested()
        state_dict_loader.load(
            nested, storage_reader=filesystem.FileSystemReader(path / "state"), no_dist=True
        )
        # The tensors are the live ones and have their bytes already; this restores the settings.
        state.load(nested)

    yield Peer(save=save, load=load)


@contextmanager
def dcp_async_thread(state: TorchState, directory: Path) -> Iterator[Peer]:
    """At its best on a CPU: the buffers of the stager are used again by each save."""
    with closing(_stager(in_shared_memory=False)) as stager:

        def save(path: Path) -> IsDurable:
            writer = _writer(path)
            saving = state_dict_saver.async_save(
                state.nested(), storage_writer=writer, no_dist=True, async_stager=stager
            )
            return _when_uploaded(saving, path)

        yield Peer(save=save)


@contextmanager
def dcp_async_process(state: TorchState, directory: Path) -> Iterator[Peer]:
    """A process of its own that gets the tensors in shared memory."""
    rendezvous = (directory / "rendezvous").as_uri()
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    with closing(_stager(in_shared_memory=True)) as stager:

        def save(path: Path) -> IsDurable:
            saving = state_dict_saver.async_save(
                state.nested(),
                storage_writer=_writer(path),
                async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
                async_stager=stager,
            )
            return _when_uploaded(saving, path)

        yield Peer(save=save)
    torch.distributed.destroy_process_group()


@contextmanager
def torchsnapshot_take(state: TorchState, directory: Path) -> Iterator[Peer]:
    from torchsnapshot import Snapshot

    def save(path: Path) -> IsDurable:
        Snapshot.take(str(path / "state"), state.parts)
        return durable(path)

    def load(path: Path) -> None:
        Snapshot(str(path / "state")).restore(state.parts)

    yield Peer(save=save, load=load)


@contextmanager
def torchsnapshot_async(state: TorchState, directory: Path) -> Iterator[Peer]:
    from torchsnapshot import Snapshot

    def save(path: Path) -> IsDurable:
        pending = Snapshot.async_take(str(path / "state"), state.parts)

        def is_durable() -> bool:
            if not pending.done():
                return False
            pending.wait()
            return durable(path)()

        return is_durable

    yield Peer(save=save)


def _writer(path: Path) -> filesystem.FileSystemWriter:
    return filesystem.FileSystemWriter(path / "state", thread_count=DCP_THREADS)


def _stager(*, in_shared_memory: bool) -> DefaultStager:
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=in_shared_memory,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return DefaultStager(options)


def _when_uploaded(saving: Any, path: Path) -> IsDurable:
    upload = getattr(saving, "upload_completion", saving)

    def is_durable() -> bool:
        if not upload.done():
            return False
        upload.result()
        return durable(path)()

    return is_durable
