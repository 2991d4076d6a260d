"""LBFGS: the optimizer calls the forward and backward passes itself, several times per step.

The data stay on the device for the whole run. Innermost label wins: the passes are not `optimizer`.
LBFGS compares numbers on the GPU itself; those short waits stay `optimizer`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}


class Field(nn.Module):
    """A coordinate network with sine activations."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, points):
        hidden = torch.sin(9 * self.first(points))
        for layer in self.layers:
            hidden = torch.sin(layer(hidden))
        return self.last(hidden)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Field(run.pick(128, 16), run.pick(8, 2)).to(run.device)
    points = torch.rand(run.pick(1024, 64), 2, device=run.device)
    heights = (points * 7).sin().prod(1, keepdim=True)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, history_size=10)
    run.begin()
    count = 0

    def evaluate():
        optimizer.zero_grad()
        with stamps.forward:
            loss = nn.functional.mse_loss(model(points), heights)
        stamps.backward(loss)
        with stamps.gpu if run.device.type == "cuda" else stamps.host:
            loss.item()
        return loss

    while run.running():
        with stamps.step:
            with stamps.optimizer:
                optimizer.step(evaluate)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
