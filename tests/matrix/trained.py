"""One row of the matrix as objects, and what a training script does with them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from .builders import build_average, build_model, build_optimizers, build_scaler, build_scheduler
from .covering import Row
from .factors import name_of


class Trained:
    """The objects of `row`; `window` is the loss of a step that is not complete."""

    def __init__(self, row: Row) -> None:
        self.name = name_of(row)
        self.row = row
        self.model = build_model(row)
        self.optimizers = build_optimizers(row, self.model)
        self.scheduler = build_scheduler(row, self.optimizers[0])
        self.scaler = build_scaler(row)
        self.average = build_average(row, self.model)
        self.window = {"loss": 0.0}
        self.dtype = None if self.scaler is None else getattr(torch, row["scaler"])

    def parts(self) -> dict[str, Any]:
        """Return all that has a state; a row may have one `forgotten`, to see that this is noticed."""
        found = {
            "model": self.model,
            "scheduler": self.scheduler,
            **{f"optimizer{place}": optimizer for place, optimizer in enumerate(self.optimizers)},
            "scaler": self.scaler,
            "average": self.average,
            "window": self.window,
        }
        return {
            f"{self.name}.{kind}": value
            for kind, value in found.items()
            if value is not None and kind != self.row.get("forgotten")
        }

    def begin_anew(self) -> None:
        """Drop what was gathered of a step that is not complete."""
        self.window["loss"] = 0.0
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, batch: list[torch.Tensor], share: float) -> torch.Tensor:
        numbers, words, labels, _ = batch
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            loss = nn.functional.cross_entropy(self.model(numbers, words), labels) * share
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def gather(self, batch: list[torch.Tensor], share: float) -> None:
        if self.row["optimizer"] != "LBFGS":
            self.window["loss"] += float(self.backward(batch, share))

    def step(self, batch: list[torch.Tensor]) -> dict[str, float]:
        if self.row["optimizer"] == "LBFGS":
            self.window["loss"] = float(self.optimizers[0].step(lambda: self._again(batch)))
        else:
            self._step_with_gradients()
        loss, self.window["loss"] = self.window["loss"], 0.0
        if self.row["scheduler"] == "ReduceLROnPlateau":
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        self._update_average()
        metrics = {"loss": loss} | {
            f"lr{place}": group["lr"]
            for place, group in enumerate(
                group for optimizer in self.optimizers for group in optimizer.param_groups
            )
        }
        if self.scaler is not None:
            metrics["scale"] = self.scaler.get_scale()
        return {f"{self.name}.{name}": value for name, value in metrics.items()}

    def _again(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.zero_grad()
        return self.backward(batch, 1.0)

    def _step_with_gradients(self) -> None:
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        dense = [parameter for parameter in self.model.parameters() if not parameter.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def _update_average(self) -> None:
        if isinstance(self.average, dict):
            self.average["updates"] += 1
            for name, item in self.model.state_dict().items():
                kept = self.average["weights"][name]
                if item.is_floating_point():
                    kept.lerp_(item, 0.1)
                else:
                    kept.copy_(item)
        elif self.average is not None:
            self.average.update_parameters(self.model)

    def held(self) -> dict[str, str]:
        """Return a digest of everything that it holds, by what it is."""
        parameters = list(self.model.named_parameters())
        everything = {
            "model": self.model.state_dict(),
            "gradients": {name: parameter.grad for name, parameter in parameters},
            "optimizers": [
                {"groups": optimizer.param_groups, "state": list(optimizer.state.values())}
                for optimizer in self.optimizers
            ],
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "average": self.average.state_dict() if isinstance(self.average, nn.Module) else self.average,
            "window": self.window,
        }
        return {
            f"{self.name}.{kind}": hashlib.sha256(json.dumps(readable(value)).encode()).hexdigest()
            for kind, value in everything.items()
        }


def readable(value: Any) -> Any:
    """Return `value` as JSON that differs whenever a bit does."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().contiguous()
        content = dense.view(torch.uint8) if dense.ndim else dense.view(1).view(torch.uint8)
        return [str(value.dtype), list(value.shape), value.requires_grad, content.numpy().tobytes().hex()]
    if isinstance(value, dict):
        return [[readable(key), readable(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    if isinstance(value, float):
        return value.hex()
    # Functions and objects are no state; their addresses differ.
    return value if isinstance(value, int | str | None) else type(value).__qualname__
