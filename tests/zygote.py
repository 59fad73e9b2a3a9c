"""Fresh processes that need not import a framework again: forked from one that has done nothing else.

Importing torch takes a second or two, TensorFlow more, and twin runs need dozens of processes. `python
zygote.py torch` (or `tensorflow`) reads one request a line from stdin, forks, and runs the script in the
child as `python script.py` would: same argv, same handling of exceptions and exit codes; the parent answers
with the process id at once and with the wait status at the end.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


@functools.cache
def _zygote(framework: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UNBROKEN_")}
    zygote = subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", __file__, framework],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"},
    )
    atexit.register(zygote.communicate)
    return zygote


class Running:
    """A script that runs in a process of its own."""

    def __init__(
        self, zygote: subprocess.Popen[str], process_id: int, arguments: list[str], output: Path
    ) -> None:
        self.process_id = process_id
        self._zygote = zygote
        self._arguments = arguments
        self._output = output

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return when it has ended. Its exit code is minus the signal's number if one ended it."""
        answer = self._zygote.stdout.readline()  # type: ignore[union-attr]
        code = os.waitstatus_to_exitcode(int(answer))
        return subprocess.CompletedProcess(self._arguments, code, stdout="", stderr=self._output.read_text())


def start_script(script: Path, *arguments: str, output: Path, framework: str = "torch") -> Running:
    """Start `script` in a fresh process; what it prints goes to the file `output`. One at a time."""
    zygote = _zygote(framework)
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    request = {"script": str(script), "arguments": list(arguments), "output": str(output)}
    zygote.stdin.write(json.dumps(request) + "\n")
    zygote.stdin.flush()
    return Running(zygote, int(zygote.stdout.readline()), [str(script), *arguments], output)


def run_script(
    script: Path, *arguments: str, output: Path, framework: str = "torch"
) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh process to its end."""
    return start_script(script, *arguments, output=output, framework=framework).wait()


def _serve() -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, None in the parent when there are no more."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            request: dict[str, Any] = json.loads(line)
            return request
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    os.setsid()
    written = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.argv = [request["script"], *request["arguments"]]


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        # torch.optim imports it on the first optimizer, which costs more than all else.
        import torch._dynamo  # noqa: F401
    else:
        # No operation is done before a fork: the threads that do them would stay behind.
        import keras
        import tensorflow  # noqa: F401

        # Loaded when it is first used.
        keras.Model  # noqa: B018

    import unbroken.training.run  # noqa: F401

    # Children end without a walk over all that torch has made.
    gc.collect()
    gc.freeze()
    wanted = _serve()
    if wanted is not None:
        _become(wanted)
        # At the top level, so that an exception ends this process as it ends any script.
        runpy.run_path(wanted["script"], run_name="__main__")
