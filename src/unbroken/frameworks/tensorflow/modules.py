"""Modules, checkpoints and other objects of TensorFlow that hold variables, restored in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unbroken.checkpoint.weights import ATTRIBUTES, REPLICAS, SPECIAL
from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.tensorflow.attributes import Attributes
from unbroken.frameworks.tensorflow.content import Content, content_of, is_open
from unbroken.frameworks.tensorflow.distributed import Replicas, fill
from unbroken.frameworks.tensorflow.tables import restore_table, table_differences, table_state
from unbroken.frameworks.tensorflow.tensors import beside_its_copies, variable_differences
from unbroken.state.handlers import ORDER_MODULE, Difference, TensorFacts

_TABLES = "(tables)"
_SPECIAL = SPECIAL | {_TABLES, REPLICAS}


class ModuleHandler:
    """`tf.Module`, `tf.train.Checkpoint` and all that tracks its attributes as they do.

    Every variable below it is known by its place: attributes, keys and numbers of items, as
    `encoder.layers.0.kernel`. `parts` is where the names for messages come from.
    """

    name = "tensorflow.module"
    order = ORDER_MODULE
    tensor_facts = TensorFacts(are_tied=True, are_streamed=True)

    def __init__(self, parts: Mapping[str, object] | None = None) -> None:
        self._parts = {} if parts is None else parts
        self._attributes = Attributes()
        self._replicas = Replicas()
        # The names of the variables of each object when it was first seen.
        self._first: dict[int, tuple[object, frozenset[str]]] = {}

    def accepts(self, value: object) -> bool:
        return is_open(value) and not callable(getattr(value, "state_dict", None))

    def state(self, value: Any) -> object:
        content = self._content(value)
        replicas = self._replicas.state(content.variables)
        tables = {name: table_state(table) for name, table in content.tables.items()}
        attributes = self._attributes.state(content)
        return {
            **{name: beside_its_copies(variable) for name, variable in content.variables.items()},
            **({_TABLES: tables} if tables else {}),
            **({REPLICAS: replicas} if replicas else {}),
            **({ATTRIBUTES: attributes} if attributes else {}),
        }

    def differences(self, value: Any, state: Any) -> list[Difference]:
        content = self._content(value)
        live, saved = content.variables, {name: state[name] for name in state if name not in _SPECIAL}
        tables = state.get(_TABLES, {})
        found = [
            Difference("missing", name, "the checkpoint lacks it")
            for name in (*live, *content.tables)
            if name not in saved and name not in tables
        ]
        found += [
            Difference("unexpected", name, self._lacks(value))
            for name in (*saved, *tables)
            if name not in live and name not in content.tables
        ]
        for name, variable in live.items():
            if name in saved:
                found += variable_differences(name, variable, saved[name])
        for name, table in content.tables.items():
            if name in tables:
                found += table_differences(name, table, tables[name])
        return [
            *found,
            *self._replicas.differences(live, state.get(REPLICAS, {})),
            *self._attributes.differences(content, state.get(ATTRIBUTES, {})),
        ]

    def restore(self, value: Any, state: Any) -> None:
        """Put what fits of `state` into `value`; what is missing or of another shape is left as it is."""
        content = self._content(value)
        for name, variable in content.variables.items():
            if name in state:
                fill(variable, state[name])
        for name, table in content.tables.items():
            if name in state.get(_TABLES, {}):
                restore_table(table, state[_TABLES][name])
        self._replicas.restore(content.variables, state.get(REPLICAS, {}))
        self._attributes.restore(content, state.get(ATTRIBUTES, {}))

    def renamed(self, part: str, state: Any, rename: Callable[[str], str]) -> Any:
        # Loaded only where it is needed: it stands among what is torch's, and uses nothing of that.
        from unbroken.frameworks.torch.module_names import renamed

        return renamed(part, state, rename)

    def unkept_changes(self, value: Any) -> list[str]:
        """Return a line for what is not kept of `value`, and for variables that a resume will not find."""
        part, content = self._part(value), self._content(value)
        late = content.variables.keys() - self._first[id(value)][1]
        return [
            *(
                f"{_dotted(part, name)}: {text} that changes"
                for name, text in self._attributes.unkept(content)
            ),
            *(
                f"{_dotted(part, name)}: a {type(item).__name__}, whose state nobody can read"
                for name, item in content.unknown.items()
            ),
            *(
                f"{_dotted(part, name)}: made after the run was entered; call {part}(batch) before, or a "
                "resume is refused"
                for name in sorted(late)
            ),
        ]

    def _content(self, value: Any) -> Content:
        content = content_of(value)
        part = self._part(value)
        if content.unbuilt:
            layer = _dotted(part, content.unbuilt[0])
            raise UnsupportedStateError(
                f"{layer}: not built yet, so that it has no variables to restore into",
                hint=f"call {part or 'it'}(batch) once before the run starts, or {layer}.build(input_shape)",
            )
        known = self._first.get(id(value))
        if known is None or known[0] is not value:
            self._check_not_empty(part, content)
            self._check_optimizers(part, content)
            self._first[id(value)] = (value, frozenset(content.variables))
        return content

    def _check_not_empty(self, part: str, content: Content) -> None:
        if not content.variables and not content.tables:
            raise UnsupportedStateError(
                f"{part or 'a module'}: it has no variables yet, so that there is nothing to restore into",
                hint=f"call {part or 'it'}(batch) once before the run starts, or leave it out",
            )

    def _check_optimizers(self, part: str, content: Content) -> None:
        kept = {id(other) for other in self._parts.values()}
        for found in content.optimizers:
            if {id(found.model), id(found.optimizer)} & kept or id(found.optimizer) in content.seen:
                continue
            raise UnsupportedStateError(
                f"{_dotted(part, found.path)}: a compiled model of Keras, whose optimizer and metrics are "
                "none of its variables",
                hint="pass the model as a part of its own, too: Run(..., model=model)",
            )

    def _lacks(self, value: Any) -> str:
        part = self._part(value) or "it"
        return f"the program lacks it; if a first call makes it, call {part}(batch) before the run starts"

    def _part(self, value: object) -> str:
        return next((name for name, other in self._parts.items() if other is value), "")


def _dotted(part: str, name: str) -> str:
    return f"{part}.{name}" if part and name else part or name
