"""Two of a module: the one that serves, and the one that is filled meanwhile."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch.closures import place_held


def two_copies(module: object) -> tuple[nn.Module, nn.Module]:
    """Return `module` and a copy of it, both in evaluation mode and without gradients.

    Raises UnsupportedStateError, with `module` as it was, for anything but a module, and for one whose copy
    is none: it cannot be made, or computes with the weights of `module`.
    """
    if not isinstance(module, nn.Module):
        raise UnsupportedStateError(
            f"watch: expected a torch.nn.Module, found {type(module)}", hint="pass the model itself"
        )
    copied = _copied(module)
    place = "the module itself" if copied is module else place_held(copied, module)
    if place is not None:
        raise UnsupportedStateError(
            f"watch: expected a module of which a copy can be made, found that {place} in the copy still "
            f"computes with the weights of the module it was copied from",
            hint="code that closes over a module stays with it when that is copied: have hooks use the "
            "module that they are given, and pass torch.compile(model) rather than replace model.forward",
        )
    for each in (module, copied):
        # Without gradients no graph holds weights that are replaced later.
        without_gradients(each.eval())
    return module, copied


def _copied(module: nn.Module) -> nn.Module:
    try:
        # Of TorchScript a copy with gradients would be computed from the weights, not hold its own.
        with torch.no_grad():
            return copy.deepcopy(module)
    except Exception as error:
        raise UnsupportedStateError(
            f"watch: expected a module of which a copy can be made, found {type(error).__name__}: {error}",
            hint="pass a module as it was built; with torch.nn.utils.weight_norm use that of "
            "torch.nn.utils.parametrizations",
        ) from error


def without_gradients(module: nn.Module) -> None:
    """Let no parameter ask for gradients."""
    # One by one, for modules of TorchScript do not let themselves be asked as a whole.
    for parameter in module.parameters():
        parameter.requires_grad_(False)
