"""What the disk that a run is on does to its checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from unbroken.inspection.doctor import Advice, worst_first
from unbroken.storage.probe import Probe

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OF_A_CONTAINER = frozenset({"overlay", "aufs"})
_OVER_A_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "smb3", "virtiofs"}
)
_OF_OBJECTS = frozenset({"fuse.gcsfuse", "fuse.s3fs", "fuse.goofys", "fuse.rclone", "fuse.mount-s3"})
_SLOW_SYNC_SECONDS = 0.25
_CLOCK_SECONDS = 5.0
_FEW_FILES = 1000


def advise_on_place(found: Probe, *, save_bytes: int, saves: int = 2) -> list[Advice]:
    """Return what is to be known of a disk on which saves take `save_bytes` each; the worst first.

    `saves` is for how many of them there has to be room.
    """
    return worst_first([*_promises(found), *_room(found, save_bytes, saves), *_kind(found), *_costs(found)])


def in_words(found: Probe) -> str:
    """Return the facts in one line."""
    kind = found.file_system or "a file system of unknown type"
    parts = [
        f"{kind}, {found.free_bytes / 1e9:.1f} of {found.total_bytes / 1e9:.1f} GB free",
        f"fsync {found.sync_seconds * 1000:.1f} ms",
        f"locks {found.locks}",
        "direct I/O" if found.has_direct_io else "no direct I/O",
        "links" if found.has_links else "no links",
    ]
    return ", ".join(parts)


def _promises(found: Probe) -> Iterator[Advice]:
    if found.replaces_full_directories:
        yield Advice(
            severity="error",
            text="a rename there replaces a directory that is not empty: a save can destroy another one",
            evidence=f"tried out in {found.directory}",
            remedy="put the run on another file system",
        )
    if found.locks == "ignored":
        yield Advice(
            severity="error",
            text="locks there keep nobody out: two trainers can write to one run",
            evidence=f"a second process got the lock that a first one had, in {found.directory}",
            remedy="mount it with locks (NFS: without nolock and local_lock), or use another disk",
        )
    if found.locks == "absent":
        yield Advice(
            severity="warning",
            text="there are no locks: that a second trainer is there is seen by its lease alone, later",
            evidence=f"the kernel refused one in {found.directory}",
            remedy="start a run on one machine only, or use a file system with locks",
        )


def _room(found: Probe, save_bytes: int, saves: int) -> Iterator[Advice]:
    needed = save_bytes * saves
    if found.free_bytes < needed:
        yield Advice(
            severity="error" if found.free_bytes < save_bytes else "warning",
            text=f"there is room for {found.free_bytes / max(save_bytes, 1):.1f} more saves",
            evidence=f"{found.free_bytes / 1e9:.2f} GB free, {save_bytes / 1e9:.2f} GB each",
            remedy="free space, or keep fewer: `unbroken prune --dry-run` shows what would go",
        )
    if found.free_files is not None and found.free_files < _FEW_FILES:
        yield Advice(
            severity="warning",
            text=f"there is room for {found.free_files} more files",
            evidence="free inodes, as `df -i` shows them",
            remedy="remove small files there that nobody needs, or use another disk",
        )


def _kind(found: Probe) -> Iterator[Advice]:
    evidence = f"{found.directory} is on {found.file_system}"
    if found.file_system in _IN_MEMORY:
        yield Advice(
            severity="warning",
            text="checkpoints there are in memory: a reboot or a power cut takes them all",
            evidence=evidence,
            remedy="put the run on a disk",
        )
    elif found.file_system in _OF_A_CONTAINER:
        yield Advice(
            severity="warning",
            text="checkpoints there belong to a container, and go with it",
            evidence=evidence,
            remedy="mount a volume into the container, and put the run there",
        )
    elif found.file_system in _OF_OBJECTS:
        yield Advice(
            severity="warning",
            text="an object store that looks like a disk has no durable rename, which a commit needs",
            evidence=evidence,
            remedy="put the run on a disk, and copy checkpoints to the store",
        )
    elif found.file_system in _OVER_A_NETWORK:
        yield Advice(
            severity="note",
            text="checkpoints go over a network: a save waits while the server is away",
            evidence=evidence,
            remedy="on a disk of this machine saves are faster, and gone with the machine",
        )


def _costs(found: Probe) -> Iterator[Advice]:
    if found.sync_seconds > _SLOW_SYNC_SECONDS:
        yield Advice(
            severity="warning",
            text=f"an fsync takes {found.sync_seconds:.2f} s, and a save needs some",
            evidence=f"the median of some of 4 KiB in {found.directory}",
            remedy="look for what else writes there, or use another disk",
        )
    if abs(found.clock_ahead_seconds) > _CLOCK_SECONDS:
        way = "ahead of" if found.clock_ahead_seconds > 0 else "behind"
        yield Advice(
            severity="warning",
            text=f"its clock is {abs(found.clock_ahead_seconds):.0f} s {way} that of this machine",
            evidence="the time of a file that was just written",
            remedy="have both machines keep the time (chrony, ntpd): ages of files and leases mislead",
        )
    if not found.has_direct_io:
        yield Advice(
            severity="note",
            text="it has no direct I/O: a save goes through the page cache, and costs more CPU time",
            evidence=f"O_DIRECT was refused in {found.directory}",
            remedy="nothing needs to be done",
        )
    if not found.has_links:
        yield Advice(
            severity="note",
            text="it has no hard links: what did not change is copied at each save",
            evidence=f"a link was refused in {found.directory}",
            remedy="with much that is frozen, a file system with links saves time and space",
        )
