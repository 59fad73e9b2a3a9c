from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.supervisor.evidence import last_exception, new_oom_kills, read_oom_kills, read_tail
from unbroken.supervisor.verdict import OomKills, SeenException

_CHAINED = """
epoch 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
    main()
  File "/lib/b.py", line 9, in main
    raise torch.OutOfMemoryError("CUDA out of memory.")
    ^^^^^^^^^^^^^^^^^^^^
torch.OutOfMemoryError: CUDA out of memory.
It tried to allocate 2 GiB
wandb: synced
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", None),
        ("loss: 0.3\nValueError: not a traceback\n", None),
        (
            _CHAINED,
            SeenException(
                kind="torch.OutOfMemoryError", message="CUDA out of memory.", frame="/lib/b.py:9 in main"
            ),
        ),
        (
            '  File "t.py", line 1\n    x =\n       ^\nSyntaxError: invalid syntax\n',
            SeenException(kind="SyntaxError", message="invalid syntax", frame="t.py:1"),
        ),
        (
            'Traceback (most recent call last):\n  File "t.py", line 2, in f\nKeyboardInterrupt\n',
            SeenException(kind="KeyboardInterrupt", message="", frame="t.py:2 in f"),
        ),
        (
            '  File "t.py", line 2, in f\nunbroken.errors.UsageError: no\nhint: give --run-dir\nbye\n',
            SeenException(
                kind="unbroken.errors.UsageError", message="no", frame="t.py:2 in f", hint="give --run-dir"
            ),
        ),
        (
            '  File "t.py", line 2, in f\nKeyError: 1\nbye\nhint: of somebody else\n',
            SeenException(kind="KeyError", message="1", frame="t.py:2 in f"),
        ),
    ],
)
def test_the_last_traceback_in_the_output_names_the_exception(
    output: str, expected: SeenException | None
) -> None:
    assert last_exception(output) == expected


def test_only_the_end_of_a_long_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"x" * 1_000_000 + b"\xff the end")
    assert read_tail(path).endswith("\N{REPLACEMENT CHARACTER} the end")
    assert len(read_tail(path)) < 100_000
    assert read_tail(tmp_path / "none") == ""


def test_counters_that_cannot_be_read_tell_nothing() -> None:
    known, unknown = OomKills(machine=2, own_group=1), OomKills(machine=None, own_group=1)
    assert new_oom_kills(known, OomKills(machine=3, own_group=1)) == OomKills(machine=1, own_group=0)
    assert new_oom_kills(unknown, known) == OomKills(machine=None, own_group=0)


def test_the_kernel_counter_of_this_machine_can_be_read() -> None:
    assert (read_oom_kills().machine is not None) == ("oom_kill " in Path("/proc/vmstat").read_text())
