"""Learning to learn: each step adapts copies of the weights to six tasks and differentiates through the adaptation.

A task is a curve. Its copies of the weights are plain tensors that take three gradient steps in Python. The inner gradients
are `backward`, and subtracting them is part of `forward`, as the outer pass goes through it. Tiny kernels: host-bound.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math

import job
import stamps
import torch
from torch import nn
from torch.func import functional_call

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}
TASKS, INNER_STEPS, INNER_RATE = 6, 3, 0.01


class InnerGradients:
    """Stands for a loss whose backward pass yields gradients that can be differentiated again."""

    def __init__(self, loss, weights):
        self.loss, self.weights, self.values = loss, weights, None

    def register_hook(self, hook):
        return self.loss.register_hook(hook)

    def backward(self):
        self.values = torch.autograd.grad(self.loss, self.weights, create_graph=True)


def draw_tasks(points):
    """Curves of random height and phase: points to adapt to and points to judge by."""
    height = torch.rand(TASKS, 1, 1) * 4.9 + 0.1
    phase = torch.rand(TASKS, 1, 1) * math.pi
    places = torch.rand(TASKS, 2 * points, 1) * 10 - 5
    return places, height * torch.sin(places + phase)


def loss_of(model, weights, places, values):
    return nn.functional.mse_loss(functional_call(model, weights, (places,)), values)


def adapt(model, weights, places, values):
    """The weights after a few steps on one task."""
    for _ in range(INNER_STEPS):
        with stamps.forward:
            inner = InnerGradients(loss_of(model, weights, places, values), list(weights.values()))
        stamps.backward(inner)
        with stamps.forward:
            weights = {name: weight - INNER_RATE * gradient
                       for (name, weight), gradient in zip(weights.items(), inner.values)}
    return weights


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width, points = run.pick((64, 16), (8, 4))
    layers = [nn.Linear(1, width), nn.Tanh()]
    for _ in range(run.pick(3, 1)):
        layers += [nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.begin()
    count = 0
    history = []
    while run.running():
        with stamps.step:
            with stamps.data:
                tasks = draw_tasks(points)
            places, values = stamps.to_device(tasks, run.device)
            total = torch.zeros((), device=run.device)
            for task in range(TASKS):
                weights = adapt(model, dict(model.named_parameters()), places[task, :points], values[task, :points])
                with stamps.forward:
                    total = total + loss_of(model, weights, places[task, points:], values[task, points:])
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(total / TASKS)
            with stamps.optimizer:
                optimizer.step()
            history.append(stamps.item(total.detach()))
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
