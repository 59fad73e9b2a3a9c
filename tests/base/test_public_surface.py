from __future__ import annotations

import subprocess
import sys

import unbroken
from unbroken.errors import UnbrokenError


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(unbroken.__all__) == [
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
    for name in unbroken.__all__:
        assert getattr(unbroken, name) is not None


def test_importing_the_package_loads_no_framework_and_hardly_anything_else() -> None:
    code = "import sys, unbroken; print(*sorted(name for name in sys.modules if 'unbroken' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if "editable" not in name] == ["unbroken"]


def test_a_missing_name_is_an_attribute_error() -> None:
    assert not hasattr(unbroken, "Manager")


def test_every_error_has_a_kind_an_exit_code_and_a_hint_and_survives_a_process_border() -> None:
    import pickle

    kinds = {}
    todo = [UnbrokenError]
    while todo:
        error = todo.pop()
        todo += error.__subclasses__()
        assert error.__doc__
        assert error.exit_code in (1, 2, 3, 4, 78)
        kinds[error.kind] = error
        again = pickle.loads(pickle.dumps(error("what", hint="how")))
        assert (type(again), str(again), again.hint) == (error, "what", "how")
    assert len(kinds) >= 18, "two errors share a kind"
