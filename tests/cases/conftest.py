from __future__ import annotations

from ..quiet_torch import quiet_torch

__all__ = ["quiet_torch"]
