"""What the golden checkpoints hold. What was once written is read for ever: never regenerate one."""

from __future__ import annotations

import math
import pathlib
from collections import Counter, OrderedDict, deque
from typing import Any

from unbroken.state.tensors import HostTensor


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> HostTensor:
    return HostTensor(dtype, shape, memoryview(data))


CONTENTS: dict[str, Any] = {
    "model": {
        "weight": tensor("F32", (2, 3), bytes(range(24))),
        "half": tensor("BF16", (2,), b"\x80\x3f\x00\xc0"),
        "flag": tensor("BOOL", (), b"\x01"),
        "none": tensor("I64", (0, 2), b""),
        "a/b%c": tensor("U8", (1,), b"\x07"),
    },
    "optimizer": {
        "class": "torch.optim.adamw.AdamW",
        "groups": [{"params": ["model.weight"], "options": {"lr": 0.1, "betas": (0.9, 0.999)}}],
        "state": {},
    },
    "values": {
        "numbers": [0, -1, 2**53 + 1, 0.1, -0.0, math.inf, 1 + 2j],
        "none": None,
        "words": {"$not a tag": 1, 3: "int", "3": "text", (1, "x"): True},
        "bytes": [b"short", b"long" * 30, bytearray(b"changeable")],
        "sets": [{1, 2}, frozenset({"x"})],
        "kinds": [
            OrderedDict([("b", 1), ("a", 2)]),
            Counter({"x": 2}),
            deque([1, 2], maxlen=3),
            range(1, 9, 2),
        ],
        "path": pathlib.Path("runs/digits"),
    },
}
