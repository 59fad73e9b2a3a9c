from __future__ import annotations

from ..supervisor.conftest import bench

__all__ = ["bench"]
