"""Online learning in bursts: a hundred steps, then a long pause for new events. No module, no torch.optim.

The weights are bare tensors. torch.autograd.grad returns the gradients and the script subtracts them with a momentum of its
own: that is `optimizer`. The pauses are `sleep`, outside of steps, so there is no certain bottleneck.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import itertools
import time

import job
import stamps
import torch

KNOWN = {"verdict": None, "absent": ["DataLoading", "NcclCollective"]}
PAUSES = (0.3, 1.1, 2.0)


class Gradients:
    """Stands for a loss whose backward pass is torch.autograd.grad()."""

    def __init__(self, loss, weights):
        self.loss, self.weights, self.values = loss, weights, None

    def register_hook(self, hook):
        return self.loss.register_hook(hook)

    def backward(self):
        self.values = torch.autograd.grad(self.loss, self.weights)


def predict(weights, events):
    """A recurrent net over the events of each user."""
    enter, repeat, offset, leave = weights
    hidden = torch.zeros(events.shape[1], repeat.shape[0], device=events.device)
    for event in events:
        hidden = torch.tanh(torch.addmm(offset, hidden, repeat) + event @ enter)
    return (hidden @ leave).squeeze(1)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    inputs, width, users, length = run.pick((32, 192, 64, 24), (4, 8, 4, 5))
    shapes = [(inputs, width), (width, width), (width,), (width, 1)]
    weights = [(torch.randn(shape, device=run.device) * 0.05).requires_grad_() for shape in shapes]
    speeds = [torch.zeros(shape, device=run.device) for shape in shapes]
    ahead = stamps.RunAhead(run.device)
    run.begin()
    count = 0
    for pause in itertools.cycle(PAUSES):
        for _ in range(100):
            if not run.running():
                break
            with stamps.step:
                events = torch.randn(length, users, inputs, device=run.device)
                with stamps.forward:
                    loss = (predict(weights, events) - events[..., 0].sum(0)).square().mean()
                gradients = Gradients(loss, weights)
                stamps.backward(gradients)
                with stamps.optimizer:
                    for weight, speed, gradient in zip(weights, speeds, gradients.values):
                        speed.mul_(0.9).add_(gradient)
                        weight.data.add_(speed, alpha=-1e-3)
                ahead.step()
            count += 1
        stamps.synchronize(run.device)
        if not run.running():
            break
        with stamps.sleep:
            time.sleep(pause)
    run.done(count)


if __name__ == "__main__":
    main()
