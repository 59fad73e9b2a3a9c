"""One pass over a snapshot beside its writing: the digest of each tensor, and what in it is not finite."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from unbroken.checkpoint.container import Placement
from unbroken.checkpoint.digest import digest
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.state.tensors import FLOATING

# Counts the numbers that are NaN or infinite in the bytes of a tensor of a dtype.
CountNonFinite = Callable[[memoryview, str], int]
# Small tensors that lie side by side are looked at together.
_LOOK_BYTES = 1 << 20

_Run = list[tuple[str, Placement]]


class Digests:
    """Computes the digests of all tensors from host memory, beside the writing: one shard after another.

    What the disk returns is held against them. In the same pass it looks for what is not finite.
    """

    def __init__(self, snapshot: Snapshot, count_non_finite: CountNonFinite | None) -> None:
        self.non_finite: dict[str, int] | None = None if count_non_finite is None else {}
        self._snapshot = snapshot
        self._count = count_non_finite
        self._found: dict[str, dict[str, str]] = {}
        self._error: BaseException | None = None
        self._done = {plan.file: threading.Event() for plan in snapshot.plans}
        self._thread: threading.Thread | None = threading.Thread(target=self._compute, name="unbroken-digest")
        try:
            self._thread.start()
        except RuntimeError:
            # No more threads on this machine, or for this user: then one after the other.
            self._thread = None
            self._compute()

    def of(self, file: str) -> dict[str, str]:
        """Return `path -> digest` for the shard `file`, when they are known."""
        self._done[file].wait()
        if self._error is not None:
            raise self._error
        return self._found[file]

    def join(self) -> None:
        """Return when the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _compute(self) -> None:
        try:
            for plan in self._snapshot.plans:
                image, found = self._snapshot.images[plan.file], self._found.setdefault(plan.file, {})
                for run in _runs(plan.placements):
                    found |= {path: digest(bytes_at(image, placed)) for path, placed in run}
                    # While they are hot.
                    self._look_at(image, run)
                self._done[plan.file].set()
        except BaseException as error:  # noqa: BLE001 - raised again for who asks
            self._error = error
        finally:
            for done in self._done.values():
                done.set()

    def _look_at(self, image: memoryview, run: _Run) -> None:
        """Note which tensors of `run` are not finite; they are looked at one by one only if any is not."""
        unwatched = self._snapshot.unwatched
        if self._count is None or self.non_finite is None or all(path in unwatched for path, _ in run):
            return
        first, last = run[0][1], run[-1][1]
        whole = image[first.offset : last.offset + last.size_bytes]
        if first.dtype not in FLOATING or not self._count(whole, first.dtype):
            return
        for path, placed in run:
            count = self._count(bytes_at(image, placed), placed.dtype)
            if count and path not in unwatched:
                self.non_finite[path] = count


def _runs(placements: Mapping[str, Placement]) -> Iterator[_Run]:
    """Cut tensors in the order of a file into runs of neighbours of one dtype, small ones together."""
    run: _Run = []
    for path, placed in placements.items():
        if run:
            first, last = run[0][1], run[-1][1]
            end = last.offset + last.size_bytes
            fits = placed.offset + placed.size_bytes - first.offset <= _LOOK_BYTES
            if not fits or placed.dtype != first.dtype or placed.offset != end:
                yield run
                run = []
        run.append((path, placed))
    if run:
        yield run


def bytes_at(image: memoryview, placed: Placement) -> memoryview:
    """Return the bytes of a tensor in the image of its file."""
    return image[placed.offset : placed.offset + placed.size_bytes]
