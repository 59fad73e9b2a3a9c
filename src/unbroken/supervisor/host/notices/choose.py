"""Whose machine this is, by what its firmware says: nobody is asked over the network to find out."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from unbroken.supervisor.host.notices.base import Provider

DMI_DIRECTORY = Path("/sys/class/dmi/id")
# name -> (module, class): that of another cloud is never loaded.
PROVIDERS: Mapping[str, tuple[str, str]] = {
    "aws": ("amazon", "Amazon"),
    "gcp": ("google", "Google"),
    "azure": ("azure", "Azure"),
    "alibaba": ("alibaba", "Alibaba"),
    "tencent": ("tencent", "Tencent"),
}
# (file, what it says, provider). Azure by the tag alone: the maker is that of any Hyper-V.
_MARKS = (
    ("sys_vendor", "Amazon EC2", "aws"),
    ("bios_vendor", "Amazon EC2", "aws"),
    # The older instances, which run on Xen.
    ("bios_version", "amazon", "aws"),
    ("product_name", "Google Compute Engine", "gcp"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
    ("sys_vendor", "Alibaba Cloud", "alibaba"),
    ("product_name", "Alibaba Cloud", "alibaba"),
    ("sys_vendor", "Tencent Cloud", "tencent"),
)


def make_provider(name: str) -> Provider:
    """Return the provider with one of the names in `PROVIDERS`."""
    module, kind = PROVIDERS[name]
    made: Provider = getattr(importlib.import_module(f"unbroken.supervisor.host.notices.{module}"), kind)()
    return made


def provider_by_firmware(directory: Path = DMI_DIRECTORY) -> str | None:
    """Return the name of the cloud that this machine belongs to, or None."""
    found = (provider for name, words, provider in _MARKS if words in _text(directory / name))
    return next(found, None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        # No such firmware, as in many containers and on other machines than PCs.
        return ""
