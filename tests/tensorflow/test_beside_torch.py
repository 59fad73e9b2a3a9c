"""Several frameworks in one process: each answers for its own."""

from __future__ import annotations

import torch

from unbroken.training import families

from .. import quiet_tensorflow  # noqa: F401


def test_a_step_of_torch_is_told_by_its_optimizer_also_where_tensorflow_is_loaded() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch = families.watch({"weight": weight, "optimizer": optimizer})
    assert watch is not None
    weight.grad = torch.ones(1)
    optimizer.step()
    assert watch.take_stepped()
    assert not watch.take_stepped()
    watch.close()
