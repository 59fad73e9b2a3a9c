"""Training runs that survive anything, resume bit for bit, and prove it.

import unbroken

with unbroken.Run("runs/digits", model=model, optimizer=optimizer) as run:
    for epoch in run.epochs(20):
        for batch in run.batches(loader):
            run.step(loss=train_step(batch))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are loaded when they are first used: the command line must start without the library.
_HOMES = {
    "Run": "unbroken.training.run",
    "ElasticSampler": "unbroken.frameworks.torch.elastic_sampler",
    "EverySteps": "unbroken.training.save_policy",
    "EveryEpochs": "unbroken.training.save_policy",
    "EveryMinutes": "unbroken.training.save_policy",
    "Health": "unbroken.training.health.policy",
    "KeepLast": "unbroken.checkpoint.retention",
    "KeepBest": "unbroken.checkpoint.retention",
    "KeepDaily": "unbroken.checkpoint.retention",
    "KeepEverySteps": "unbroken.checkpoint.retention",
    "KeepHourly": "unbroken.checkpoint.retention",
    "CheckpointStore": "unbroken.checkpoint.store",
    "Storage": "unbroken.storage.base",
    "StateHandler": "unbroken.state.handlers",
    "UnbrokenError": "unbroken.errors",
    "warm_start": "unbroken.training.warm_start",
    "watch": "unbroken.serving.watch",
}

__all__ = [  # the public surface; a test pins it
    "CheckpointStore",
    "ElasticSampler",
    "EveryEpochs",
    "EveryMinutes",
    "EverySteps",
    "Health",
    "KeepBest",
    "KeepDaily",
    "KeepEverySteps",
    "KeepHourly",
    "KeepLast",
    "Run",
    "StateHandler",
    "Storage",
    "UnbrokenError",
    "__version__",
    "warm_start",
    "watch",
]

if TYPE_CHECKING:
    from unbroken.checkpoint.retention import KeepBest, KeepDaily, KeepEverySteps, KeepHourly, KeepLast
    from unbroken.checkpoint.store import CheckpointStore
    from unbroken.errors import UnbrokenError
    from unbroken.frameworks.torch.elastic_sampler import ElasticSampler
    from unbroken.serving.watch import watch
    from unbroken.state.handlers import StateHandler
    from unbroken.storage.base import Storage
    from unbroken.training.health.policy import Health
    from unbroken.training.run import Run
    from unbroken.training.save_policy import EveryEpochs, EveryMinutes, EverySteps
    from unbroken.training.warm_start import warm_start


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "keras":
        # It needs Keras, which it loads: whoever names it has that.
        return import_module("unbroken.keras")
    if name not in _HOMES:
        raise AttributeError(f"module 'unbroken' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
