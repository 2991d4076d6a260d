"""A network that solves a heat equation: Adam for a third of the run, then LBFGS with a line search. Host-bound.

The loss needs the network's first and second derivatives with respect to place and time. Each is a backward pass of its own
whose graph is kept, and the update goes through all of them. Points are drawn on the device. Small layers, tiny kernels.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math
import time

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}
SPREAD = 0.1


class Derivatives:
    """Stands for a loss whose backward pass is the derivatives of `values` with respect to `places`."""

    def __init__(self, values, places):
        self.total, self.places, self.found = values.sum(), places, None

    def register_hook(self, hook):
        return self.total.register_hook(hook)

    def backward(self):
        self.found = torch.autograd.grad(self.total, self.places, create_graph=True)


def derive(values, *places):
    """Derivatives that can be differentiated again."""
    with stamps.forward:
        derivatives = Derivatives(values, places)
    stamps.backward(derivatives)
    return derivatives.found


class Warmth(nn.Module):
    """How warm it is at a place and a time, from -1 to 1 and from 0 to 1."""

    def __init__(self, width, depth):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, place, time):
        return self.layers(torch.cat([place, time], 1))


class Problem:
    def __init__(self, run, model, inside, edge):
        self.run, self.model, self.inside, self.edge = run, model, inside, edge

    def draw(self):
        """Points inside, on both ends, and at the beginning."""
        device = self.run.device
        self.place = (torch.rand(self.inside, 1, device=device) * 2 - 1).requires_grad_()
        self.time = torch.rand(self.inside, 1, device=device).requires_grad_()
        self.end = torch.randint(2, (self.edge, 1), device=device).float() * 2 - 1
        self.end_time = torch.rand(self.edge, 1, device=device)
        self.first = torch.rand(self.edge, 1, device=device) * 2 - 1

    def loss(self):
        """How far the equation is from true: inside, at the ends, where it is 0, and at the beginning, a sine."""
        with stamps.forward:
            warmth = self.model(self.place, self.time)
        by_place, by_time = derive(warmth, self.place, self.time)
        (bent,) = derive(by_place, self.place)
        with stamps.forward:
            loss = (by_time - SPREAD * bent).square().mean()
            loss = loss + self.model(self.end, self.end_time).square().mean()
            begin = self.model(self.first, torch.zeros_like(self.first))
            return loss + 10 * nn.functional.mse_loss(begin, -torch.sin(math.pi * self.first))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Warmth(run.pick(64, 8), run.pick(5, 1)).to(run.device)
    problem = Problem(run, model, *run.pick((4096, 512), (64, 16)))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    newton = torch.optim.LBFGS(model.parameters(), max_iter=8, history_size=20, line_search_fn="strong_wolfe")
    history = []
    run.begin()

    def closure():
        newton.zero_grad()
        loss = problem.loss()
        stamps.backward(loss)
        # LBFGS would wait for the loss itself.
        history.append(stamps.item(loss.detach()))
        return loss.detach()

    count = 0
    while run.running():
        with stamps.step:
            problem.draw()
            if time.monotonic() < run.started + run.seconds / 3:
                with stamps.optimizer:
                    adam.zero_grad()
                loss = problem.loss()
                stamps.backward(loss)
                with stamps.optimizer:
                    adam.step()
                if count % 50 == 0:
                    history.append(stamps.item(loss.detach()))
            else:
                with stamps.optimizer:
                    newton.step(closure)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
