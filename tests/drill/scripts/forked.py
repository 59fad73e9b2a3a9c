"""Processes that need not import a framework: `forked.py SOCKET SCRIPT...` runs a script as Python would.

A server, `forked.py SOCKET` alone, has imported it and forks for each request, with the environment, the
directory and the output of whoever asks; who asks ends as the script ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def ask(place: str, arguments: list[str]) -> int:
    """Run the script, and return the status of its process."""
    request = {"arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [1, 2])
        return int(server.makefile().readline())


def wait_for_requests(place: str) -> dict[str, object]:
    """Fork for each request; return it in the child."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        message, outputs, _, _ = socket.recv_fds(client, 1 << 20, 2)
        while not message.endswith(b"\n"):
            message += client.recv(1 << 20)
        child = os.fork()
        if child == 0:
            os.dup2(outputs[0], 1)
            os.dup2(outputs[1], 2)
            for descriptor in (client, listener):
                descriptor.close()
            found: dict[str, object] = json.loads(message)
            return found
        for output in outputs:
            os.close(output)
        _, status = os.waitpid(child, 0)
        client.sendall(f"{status}\n".encode())
        client.close()


if len(sys.argv) > 2:
    code = os.waitstatus_to_exitcode(ask(sys.argv[1], sys.argv[2:]))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)

# Whoever asks must not wait for these.
import gc  # noqa: E402
import importlib  # noqa: E402
import runpy  # noqa: E402

# torch.optim imports torch._dynamo on the first optimizer, which costs more than all else.
OURS = ("unbroken.training.run", "unbroken.training.rehearsal_probe", "unbroken.training.observer")
for name in ("torch._dynamo", *OURS):
    importlib.import_module(name)
gc.collect()
gc.freeze()
wanted = wait_for_requests(sys.argv[1])
os.setsid()
os.chdir(str(wanted["directory"]))
os.environ.clear()
os.environ.update(wanted["environment"])  # type: ignore[call-overload]
sys.argv = list(wanted["arguments"])  # type: ignore[call-overload]
del wanted
# What Python does as it starts, where a drill observes.
for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    if os.path.isfile(os.path.join(folder, "sitecustomize.py")):
        runpy.run_path(os.path.join(folder, "sitecustomize.py"))
# At the top level, so that an exception ends this process as it ends any script.
runpy.run_path(sys.argv[0], run_name="__main__")
