"""All that the run needs from TensorFlow, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unbroken.frameworks.family import Family, Watch
from unbroken.frameworks.tensorflow.at_work import RandomOperations
from unbroken.frameworks.tensorflow.collective import Ranks, ranks
from unbroken.frameworks.tensorflow.dataset_iterators import ResumableIterator
from unbroken.frameworks.tensorflow.datasets import ResumableDataset
from unbroken.frameworks.tensorflow.environment import environment
from unbroken.frameworks.tensorflow.loaders import resumable_loader
from unbroken.frameworks.tensorflow.modules import ModuleHandler
from unbroken.frameworks.tensorflow.non_finite import bad_tensors
from unbroken.frameworks.tensorflow.processes import check_processes
from unbroken.frameworks.tensorflow.sessions import SessionHandler
from unbroken.frameworks.tensorflow.tables import TableHandler
from unbroken.frameworks.tensorflow.tensors import EagerTensorCodec, TensorFlowCodec
from unbroken.frameworks.tensorflow.variables import VariableHandler
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.tree import LeafCodec


class TensorFlowFamily(Family):
    """TensorFlow."""

    def codecs(self, *, describes: bool) -> list[LeafCodec]:
        return [TensorFlowCodec(describes=describes), EagerTensorCodec(describes=describes)]

    def handlers(self, parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
        return [VariableHandler(), TableHandler(), SessionHandler(), ModuleHandler(parts)]

    def environment(self) -> dict[str, object]:
        return environment()

    def watch(self, parts: Mapping[str, object]) -> Watch:
        return RandomOperations()

    def bad_tensors(self, parts: Mapping[str, object]) -> list[str]:
        return bad_tensors(parts)

    def resumable_loader(self, loader: object) -> ResumableDataset | ResumableIterator | None:
        return resumable_loader(loader)

    def check_processes(self) -> None:
        check_processes()

    def ranks(self) -> Ranks | None:
        return ranks()

    def weights(self, model: object) -> Any:
        from unbroken.frameworks.tensorflow.content import is_open
        from unbroken.frameworks.tensorflow.weights import TensorFlowWeights

        return TensorFlowWeights(model) if is_open(model) else None

    def begin_from(
        self, source: Path, parts: Mapping[str, object], new_name: Callable[[str], str], choices: Choices
    ) -> Any:
        from unbroken.frameworks.tensorflow.beginning import bundle_start

        return bundle_start(source, parts, new_name, choices)


FAMILY = TensorFlowFamily()
