"""DataLoaders that iterate in their own way and keep their own position, such as torchdata's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.own_state import keeps_position
from unbroken.rundir.tell import tell


def goes_its_own_way(loader: DataLoader[Any]) -> bool:
    """Tell whether `loader` is to be continued by its own `state_dict`; say what that leaves out.

    Raises UnsupportedStateError for one whose order depends on timing.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator:
        return False
    if not keeps_position(loader):
        return False
    if not loader.in_order:
        raise UnsupportedStateError(
            "loader: expected batches in order, found in_order=False",
            hint="leave in_order=True: without it the order depends on timing",
        )
    if loader.num_workers:
        tell(
            f"batches: the state of {kind.__name__} leaves out the random generators of its workers: after a "
            "resume inside an epoch the order is exact, random augmentation in workers is not; a plain "
            "DataLoader is exact in both"
        )
    return True
