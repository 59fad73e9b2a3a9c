"""What this machine does to a run that is to go on here, as `unbroken doctor` says it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.inspection.doctor import Advice
from unbroken.supervisor.host.machine import PTRACE, SHARED_MEMORY, Machine

# That of Docker is 64 MiB; batches of images need more.
_SMALL_BYTES = 256 << 20


def advise_on_machine(found: Machine, environment: Mapping[str, Any]) -> list[Advice]:
    """Return what is to be known before training goes on here; `environment` is that of the checkpoint."""
    return [*_gpus(found, environment), *_versions_changed(found, environment), *_settings(found)]


def _gpus(found: Machine, environment: Mapping[str, Any]) -> Iterator[Advice]:
    devices = environment.get("devices")
    if devices and environment.get("cuda") and not found.has_gpus:
        yield Advice(
            severity="warning",
            text="it was trained on a GPU, and none is seen here",
            evidence=f"{len(devices)} of them: {devices[0]}",
            remedy="go on on a machine with one; in a container, give it the devices",
        )


def _versions_changed(found: Machine, environment: Mapping[str, Any]) -> Iterator[Advice]:
    for name, here in found.versions.items():
        then = environment.get(name)
        if isinstance(then, str) and then != here:
            yield Advice(
                severity="warning",
                text=f"{name} {then} made it, and {here} is installed here: bits may differ from then on",
                evidence="its environment, and the packages beside this command",
                remedy=f"install {name} {then} to go on bit for bit",
            )


def _settings(found: Machine) -> Iterator[Advice]:
    size = found.shared_memory_bytes
    if size is not None and size < _SMALL_BYTES:
        yield Advice(
            severity="warning",
            text=f"shared memory has {size / 1e6:.0f} MB, and data workers hand over batches by it",
            evidence=f"the size of {SHARED_MEMORY}",
            remedy="make it larger: Docker by --shm-size=8g, Kubernetes by an emptyDir in memory",
        )
    if found.ends_with_login:
        yield Advice(
            severity="note",
            text="what runs in the background here may end with your last login",
            evidence=f"no {found.user} in /var/lib/systemd/linger",
            remedy=f"loginctl enable-linger {found.user}",
        )
    if found.has_py_spy and not found.may_trace:
        yield Advice(
            severity="note",
            text="py-spy is installed, and may not look into a run that hangs",
            evidence=f"{PTRACE} is not 0, and this is not root",
            remedy=f"as root, write 0 to {PTRACE}; without it stacks are of Python alone",
        )
