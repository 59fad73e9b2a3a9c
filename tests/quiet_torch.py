"""One thread and one seed for torch, and the hooks of the interpreter as they were."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    hook = sys.excepthook
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    sys.excepthook = hook
