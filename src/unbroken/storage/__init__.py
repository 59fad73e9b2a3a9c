"""Where bytes live. A storage knows keys and bytes, nothing about checkpoints."""

from __future__ import annotations

from unbroken.storage.base import Buffer, Storage
from unbroken.storage.local import LocalStorage
from unbroken.storage.memory import MemoryStorage

__all__ = ["Buffer", "LocalStorage", "MemoryStorage", "Storage"]
