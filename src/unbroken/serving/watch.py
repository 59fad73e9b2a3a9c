"""The weights of a run that is still training, in a model that serves meanwhile."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from unbroken.checkpoint.retention import KeepBest
from unbroken.checkpoint.store import Checkpoint
from unbroken.errors import UnbrokenError, UnsupportedStateError, UsageError
from unbroken.serving.choice import Choice

if TYPE_CHECKING:
    from unbroken.serving.refresh import LiveWeights, Refresh


def watch(
    directory: str | os.PathLike[str],
    module: Any,
    *,
    best: str | KeepBest | None = None,
    part: str | None = None,
    every_seconds: float = 1.0,
    wait_seconds: float | None = None,
    on_new: Callable[[LiveWeights], object] | None = None,
    non_finite: Sequence[str] = (),
) -> LiveModule:
    """Serve `module` with the newest good weights of the run in `directory`, and go on so while it trains.

        with unbroken.watch("runs/digits", model) as live:
            answer = live(images)

    Returns when the first weights are there: it waits `wait_seconds` at most, without them for ever, also
    for a directory that is not there yet. From then on a thread looks `every_seconds` for better ones, reads
    them into a second copy of the module, and gives that to the requests that come later. `best` asks for
    the best by a metric, the largest or as a KeepBest says, in the place of the newest. `part` names the
    module of the run, if it has several. `module` is taken over: it is put into evaluation mode, without
    gradients, and becomes one of the two copies, so that nobody may call it by itself.

    `on_new` is called with weights before any request gets them, to warm them up or to try them: if it
    raises, they are passed over. What is damaged, holds NaN or infinity, did not pass the check of the
    script or was rolled back from is never served. Both parameters and buffers are looked at: `non_finite`
    are those that may hold NaN or infinity, as for Run, and buffers that do as `module` was built may, too.

    Raises UnsupportedStateError, UsageError and StateMismatchError for a module that does not fit the run,
    CheckpointNotFoundError if there are no good weights in time, and StorageError.
    """
    if "torch" not in sys.modules:
        raise UnsupportedStateError(
            f"watch: expected a torch.nn.Module, found {type(module)}", hint="pass the model itself"
        )
    from unbroken.serving.refresh import Refresh

    ranking = KeepBest(1, best) if isinstance(best, str) else best
    choice = Choice(Path(directory).expanduser().absolute(), ranking, non_finite)
    refresh = Refresh(choice, module, part=part, on_new=on_new, non_finite=non_finite)
    return LiveModule(refresh, every_seconds=every_seconds, wait_seconds=wait_seconds)


class LiveModule:
    """What serves: called like the module, each call with one set of weights from its beginning to its end.

    Where a request takes several calls, `current` gives it one set for all of them:

        with live.current() as now:
            answer = now.module.generate(prompt)
            step = now.checkpoint.step
    """

    def __init__(self, refresh: Refresh, *, every_seconds: float, wait_seconds: float | None) -> None:
        self._refresh = refresh
        self._every_seconds = every_seconds
        self._turns = refresh.begin(every_seconds=every_seconds, wait_seconds=wait_seconds)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._follow, name="unbroken-watch", daemon=True)
        self._thread.start()
        # A thread that still computes when the interpreter goes down can abort the process.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with self.current() as now:
            return now.module(*arguments, **keywords)

    @contextmanager
    def current(self) -> Iterator[LiveWeights]:
        """Use the weights of now in this block: `module` with them in it, and `checkpoint`, their origin."""
        if os.getpid() != self._process_id:
            raise UsageError(
                f"watch: expected a call in process {self._process_id}, found one in {os.getpid()}, forked "
                f"from it, where nothing looks for new weights",
                hint="call unbroken.watch in each process that serves, after it was forked",
            )
        with self._turns.using() as now:
            yield now

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint whose weights a request that comes now would get."""
        return self._turns.current.checkpoint

    @property
    def problem(self) -> str | None:
        """Why the first choice is not served, or nothing new can be: None while all is well."""
        return f"nothing new is looked for: {self._error}" if self._error else self._refresh.choice.problem

    def close(self) -> None:
        """Look for no more weights; what is there goes on serving. Raises an error that ended the looking."""
        atexit.unregister(self.close)
        self._ended.set()
        self._turns.close()
        if os.getpid() == self._process_id and self._thread is not threading.current_thread():
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _follow(self) -> None:
        try:
            while not self._ended.wait(self._every_seconds):
                self._look()
        except BaseException as error:
            self._error = error
            raise

    def _look(self) -> None:
        try:
            while self._refresh.look(self._turns) and not self._ended.is_set():
                pass
        except UnbrokenError as error:
            # A directory that cannot be read may be there again later.
            self._refresh.choice.say(error.message)
