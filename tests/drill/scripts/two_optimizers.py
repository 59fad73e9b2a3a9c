"""Two models that are trained in turns, by batches made by hand: no loader, and an optimizer with a closure.

python two_optimizers.py [--resume PATH]
"""

from __future__ import annotations

import os
import random
import sys

import torch
from torch import nn

torch.set_num_threads(1)
random.seed(3)
torch.manual_seed(3)
first, second = nn.Linear(3, 3), nn.Linear(3, 1)
adam = torch.optim.Adam(first.parameters(), lr=0.01)
lbfgs = torch.optim.LBFGS(second.parameters(), lr=0.1, max_iter=2)
begin = 0
if "--resume" in sys.argv:
    saved = torch.load(sys.argv[-1], weights_only=False)
    for name in ("first", "second", "adam", "lbfgs"):
        globals()[name].load_state_dict(saved[name])
    random.setstate(saved["random"])
    begin = saved["round"]
for turn in range(begin, 30):
    inputs = torch.tensor([[random.random() for _ in range(3)] for _ in range(4)])
    adam.zero_grad()
    second(first(inputs)).square().mean().backward()
    adam.step()

    def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
        lbfgs.zero_grad()
        loss = (second(inputs) - 1).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    if turn % 3 == 2:
        states = {name: globals()[name].state_dict() for name in ("first", "second", "adam", "lbfgs")}
        torch.save({**states, "random": random.getstate(), "round": turn + 1}, "last.new")
        os.replace("last.new", "last.pt")
