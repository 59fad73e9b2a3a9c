"""Modules whose own state_dict() does not give what training needs: refused before anything is lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from unbroken.errors import UnsupportedStateError
from unbroken.frameworks.torch.module_names import dotted
from unbroken.frameworks.torch.wrappers import Place, unwrap


def check_methods(part: str, module: nn.Module, places: Iterable[Place]) -> None:
    """Raise UnsupportedStateError for a state_dict() that cannot be called as torch calls it."""
    own = unwrap(module)
    _check(part, own, own.load_state_dict, ({},), {"strict": True})
    for place in places:
        if getattr(place.module.state_dict, "__func__", None) is not nn.Module.state_dict:
            keywords = {"keep_vars": True} | (
                {} if place.module is own else {"destination": {}, "prefix": ""}
            )
            _check(dotted(part, place.name), place.module, place.module.state_dict, (), keywords)


def check_complete(
    part: str, parameters: Iterable[tuple[str, nn.Parameter]], tensors: Mapping[str, Any]
) -> None:
    """Raise UnsupportedStateError for a parameter that is trained and is not in `tensors`."""
    left_out = [
        (name, parameter)
        for name, parameter in parameters
        if parameter.requires_grad and name not in tensors and not torch.nn.parameter.is_lazy(parameter)
    ]
    if not left_out:
        return
    # Those of a state_dict() of their own may have other names, or be detached.
    places = {item.data_ptr() for item in tensors.values() if isinstance(item, torch.Tensor)}
    names = [dotted(part, name) for name, parameter in left_out if parameter.data_ptr() not in places]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UnsupportedStateError(
            f"{names[0]}{more}: trained, and left out by the state_dict() of its module",
            hint="have state_dict() give it, or freeze it by requires_grad_(False)",
        )


def _check(
    where: str, module: nn.Module, method: Callable[..., Any], arguments: tuple[Any, ...], keywords: Any
) -> None:
    try:
        inspect.signature(method).bind(*arguments, **keywords)
    except TypeError as error:
        name = f"{type(module).__qualname__}.{method.__name__}"
        raise UnsupportedStateError(
            f"{where or 'a module'}: expected {name} to take the arguments of the method of torch.nn.Module "
            f"that it overrides, found that it does not ({error})",
            hint="let it take *args, **kwargs, and pass them on to super()",
        ) from None
