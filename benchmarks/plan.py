"""What is measured: for each measurement the cases that alternate with each other. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from peers import LOADERS, OURS, SAVERS, STALLERS

MEASUREMENTS = ("save", "load", "stall", "growth", "frozen")
FREEZERS = (OURS, "torch.save", "safetensors", "DCP", "Orbax")
FROZEN_SAVES = 3
TENSOR_COUNTS = (10, 100, 1000, 5000, 20000)
SAVES_IN_A_ROW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one peer does in one repetition: processes that follow each other in one directory."""

    label: str
    peer: str
    state: str | None
    commands: tuple[tuple[str, ...], ...]


# Cases that take turns, in a new order in each repetition.
Group = tuple[Case, ...]


def groups(
    measurement: str, *, states: Collection[str], peers: Collection[str], is_quick: bool
) -> list[Group]:
    """Return the groups of cases of a measurement; one that needs a certain state takes only that."""
    scale = ("--quick",) if is_quick else ()
    if measurement == "save":
        return [
            tuple(_save(peer, state, scale, saves=2) for peer in SAVERS if peer in peers) for state in states
        ]
    if measurement == "load":
        return [tuple(_load(peer, state, scale) for peer in LOADERS if peer in peers) for state in states]
    if measurement == "stall":
        return [tuple(_stall(peer, scale) for peer in STALLERS if peer in peers)]
    if measurement == "frozen":
        return [
            tuple(_save(peer, "adapter", scale, saves=FROZEN_SAVES) for peer in FREEZERS if peer in peers)
        ]
    if measurement == "growth":
        counts, saves = (TENSOR_COUNTS[:3], 100) if is_quick else (TENSOR_COUNTS, SAVES_IN_A_ROW)
        return [tuple(_growth("--tensors", count) for count in counts), (_growth("--in-a-row", saves),)]
    raise ValueError(f"measurement: expected one of {', '.join(MEASUREMENTS)}, found {measurement!r}")


def _save(peer: str, state: str, scale: tuple[str, ...], *, saves: int) -> Case:
    command = ("measure_save.py", "--peer", peer, "--state", state, "--saves", str(saves), *scale)
    return Case(label=f"{state} {peer}", peer=peer, state=state, commands=(command,))


def _load(peer: str, state: str, scale: tuple[str, ...]) -> Case:
    command = ("measure_load.py", "--peer", peer, "--state", state, *scale)
    ways = (("--make",), ("--cache", "cold"), ("--cache", "warm"))
    commands = tuple((*command, *way) for way in ways)
    return Case(label=f"{state} {peer}", peer=peer, state=state, commands=commands)


def _stall(peer: str, scale: tuple[str, ...]) -> Case:
    command = ("measure_stall.py", "--peer", peer, "--state", "gpt", *scale)
    return Case(label=peer, peer=peer, state="gpt", commands=(command,))


def _growth(option: str, count: int) -> Case:
    command = ("measure_growth.py", option, str(count))
    return Case(label=f"{option} {count}", peer=OURS, state=None, commands=(command,))
