"""What the running model.fit holds and gives to nobody: looked up in its frame, and checked."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from unbroken.errors import UnsupportedStateError

_LOGS = "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFit:
    """A call of fit: what it iterates over in each epoch, its callbacks, and the epochs it is to train.

    `validation_data` are what it was given, None without a validation.
    """

    epoch_iterator: Any
    callbacks: Any
    initial_epoch: int
    epochs: int
    validation_data: Any

    @property
    def asked_epochs(self) -> int:
        """The number of epochs that it is to train."""
        return max(self.epochs - self.initial_epoch, 0)


def running_fit(model: object) -> RunningFit:
    """Return what the fit of `model` that is below in the stack holds, once it begins to train.

    Raises UnsupportedStateError if this version of Keras is made otherwise.
    """
    frame = _frame_of_fit(model)
    found = {} if frame is None else frame.f_locals
    expected = {
        "epoch_iterator": EpochIterator,
        "callbacks": keras.callbacks.CallbackList,
        "initial_epoch": int,
        "epochs": int,
        "validation_data": object,
    }
    wrong = [name for name, kind in expected.items() if not isinstance(found.get(name), kind)]
    if wrong or not (hasattr(model, "_initial_epoch") and hasattr(model, "_get_metrics_result_or_logs")):
        raise UnsupportedStateError(
            f"unbroken.keras.Checkpoint: expected to be called by the fit of Keras 3, found Keras "
            f"{keras.__version__} without {', '.join(wrong) or 'its usual attributes'} there",
            hint="pass it to model.fit(callbacks=[...]) itself; if you do, this version of Keras is "
            "not known: train in a loop over run.epochs and run.batches, and tell us",
        )
    return RunningFit(**{name: found[name] for name in expected})


def begin_with(model: Any, epoch: int) -> None:
    """Have the fit of `model` that begins to train begin with `epoch`, and no later one."""

    class ReadOnce(int):
        # Fit asks for its truth when all callbacks have begun, and never clears it up behind an exception.
        def __bool__(self) -> bool:
            model._initial_epoch = None
            return self != 0

    # With 0 it takes what it was called with, which is 0 then.
    model._initial_epoch = ReadOnce(epoch)


def feed(epoch_iterator: Any, epoch: Callable[[], Iterator[tuple[int, int, Any]]]) -> None:
    """Have `epoch_iterator` go through what `epoch` yields in each epoch: first step, last step, batches."""

    class Fed(type(epoch_iterator)):  # type: ignore[misc]
        def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
            self.data_adapter.on_epoch_begin()
            yield from epoch()
            self.data_adapter.on_epoch_end()

    epoch_iterator.__class__ = Fed


def bind_logs(model: object) -> None:
    """Give the fit of `model` logs for an epoch that it goes on with behind its last batch.

    On JAX the name that fit reads behind the batches is bound by the first of them, and here is none; on
    other backends it is bound before.
    """
    frame = _frame_of_fit(model)
    if keras.backend.backend() != "jax" or frame is None or _LOGS not in frame.f_code.co_varnames:
        return
    frame.f_locals[_LOGS] = {}
    if sys.version_info < (3, 13):
        # Before PEP 667 what is written there is a copy, which this call puts back into the frame.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _frame_of_fit(model: object) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return frame
