"""A script of the contract without a framework: it reads a plan, writes a record, and dies where it says.

It "trains" one number, keeps its state in a JSON file, and does to itself what its first argument names.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unbroken.rundir.rehearsal import (
    Line,
    StoredValue,
    encode_line,
    planned,
    read_value,
    values_key,
    write_value,
)

LEAK = sys.argv[1] if len(sys.argv) > 1 else "none"
EPOCH = 8
plan = planned()
if LEAK == "no-run":
    print("I know nothing of unbroken")
    sys.exit(0)
assert plan is not None
assert "UNBROKEN_RUN_DIR" not in os.environ
home = Path(plan.directory)
home.mkdir(parents=True, exist_ok=True)
(home / "runs.log").open("a").write("began\n")
order = random.Random(1)
hidden = random.Random(2)
second = random.Random(3)
state: dict[str, Any] = {"model/weight": 1.0, "optimizer/weight.exp_avg": 0.0, "rate": 0.5}
began_at = 0
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))


def values() -> dict[str, Any]:
    found = {
        "model/weight": state["model/weight"],
        "optimizer/weight.exp_avg": state["optimizer/weight.exp_avg"],
        "rng/python": order.getstate(),
        "found/__main__.hidden": hidden.getstate(),
    }
    if LEAK == "two":
        found["found/__main__.second"] = second.getstate()
    if LEAK in ("unused", "clock"):
        found["found/__main__.count"] = state.get("count", 0)
    return found


def put(name: str, value: Any) -> None:
    generators = {"rng/python": order, "found/__main__.hidden": hidden, "found/__main__.second": second}
    if name in generators:
        version, words, gauss = value
        generators[name].setstate((version, tuple(words), gauss))
    elif name == "found/__main__.count":
        state["count"] = value
    else:
        state[name] = value


def digests() -> dict[str, str]:
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in values().items()}


def write(kind: Any, step: int, **fields: Any) -> None:
    line = Line(kind=kind, step=step, rates=(float(state["rate"]).hex(),), components=digests(), **fields)
    with open(plan.record, "ab") as file:
        file.write(encode_line(line))


def dump(step: int) -> None:
    if plan.values is not None and step in plan.dump_at:
        for name, value in values().items():
            write_value(Path(plan.values) / values_key(step, name), StoredValue(value), [])


def save(step: int) -> None:
    kept = {**values(), "rate": state["rate"]}
    if LEAK in ("forget", "two"):
        del kept["found/__main__.hidden"]
    kept.pop("found/__main__.count", None)
    if LEAK == "two":
        del kept["found/__main__.second"]
    if LEAK == "rounded":
        kept["optimizer/weight.exp_avg"] = round(kept["optimizer/weight.exp_avg"], 3)
    (home / "new.json").write_text(json.dumps({"step": step, "values": kept}))
    die_if(step, "in-save")
    (home / "new.json").rename(home / f"state-{step:04}.json")


def restore() -> int:
    saved = sorted(home.glob("state-*.json"))
    if not saved or LEAK == "forgets-all":
        return 0
    found = json.loads(saved[-1].read_text())
    for name, value in found["values"].items():
        put(name, value)
    if LEAK == "rate":
        state["rate"] = 0.25
    if LEAK == "skip":
        order.random()
    if LEAK == "chance" and plan.kill is not None:
        hidden.random()
    if LEAK == "crash":
        raise RuntimeError("cannot read <b>my</b> own checkpoint")
    return int(found["step"])


def die_if(step: int, moment: str) -> None:
    kill = plan.kill
    # Nothing here evaluates: that moment never comes.
    if kill is None or kill.moment != moment or step < kill.step or asked:
        return
    write("killed", step)
    os.kill(os.getpid(), getattr(signal, kill.signal))
    # Time for Python to call a handler.
    time.sleep(0)


began_at = restore()
if plan.put_back_at is not None and began_at == plan.put_back_at:
    for name in plan.put_back:
        put(name, read_value(Path(plan.values) / values_key(began_at, name))[0].state)
if LEAK in ("grandchildren", "sleeps"):
    # One that made a session of its own, and whose parent is dead before long.
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if LEAK == "sleeps":
    time.sleep(600)
if LEAK == "clock":
    state["count"] = time.monotonic_ns()
write("began", began_at)
dump(began_at)
if LEAK == "hash-order":
    # Eight letters in the order of a set: other processes have another one.
    state["model/weight"] += float("0." + "".join(str(ord(one) % 10) for one in set("abcdefgh")))
for step in range(began_at + 1, plan.steps + 1):
    if LEAK == "hang" and began_at and step == began_at + 2:
        time.sleep(600)
    if LEAK == "short" and step == 13:
        break
    batch = order.random()
    noise = hidden.random() if LEAK not in ("unused",) else 0.0
    if LEAK == "two":
        noise += second.random()
    if LEAK == "random":
        noise += int.from_bytes(os.urandom(2), "big") / 1e6
    die_if(step - 1, "in-step")
    gradient = state["model/weight"] - batch + noise
    state["optimizer/weight.exp_avg"] = 0.9 * state["optimizer/weight.exp_avg"] + 0.1 * gradient
    state["model/weight"] -= state["rate"] * state["optimizer/weight.exp_avg"]
    if LEAK == "unused":
        state["count"] = state.get("count", 0) + 1
    if LEAK == "silent":
        print("nothing to see", flush=True)
    write(
        "step", step, batch=repr(batch), metrics={"loss": float(gradient**2).hex()}, gradients=repr(gradient)
    )
    dump(step)
    die_if(step, "after-step")
    if step % EPOCH == 0:
        die_if(step, "end-of-epoch")
    if step in plan.save_at:
        save(step)
    if asked:
        save(step)
        sys.exit(75)
sys.exit(0)
