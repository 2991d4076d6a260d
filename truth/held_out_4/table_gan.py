"""A GAN that writes rows of a table: three updates of the critic, with a gradient penalty, then one of the generator.

The penalty differentiates the critic's answer with respect to its input, and the loss is differentiated through that: two
backward passes, one inside the other's graph. The table stays on the device. All layers are small: host-bound.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}
CRITIC_UPDATES = 3
NUMBERS, KINDS = 12, (5, 8, 3, 16, 2)


class InputGradient:
    """Stands for a loss whose backward pass is the gradient of the critic's answer with respect to its input."""

    def __init__(self, answer, rows):
        self.answer, self.rows, self.value = answer.sum(), rows, None

    def register_hook(self, hook):
        return self.answer.register_hook(hook)

    def backward(self):
        (self.value,) = torch.autograd.grad(self.answer, self.rows, create_graph=True)


class Grow(nn.Module):
    """Appends new columns to its input."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer, self.norm = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)

    def forward(self, hidden):
        return torch.cat([torch.relu(self.norm(self.layer(hidden))), hidden], 1)


class Generator(nn.Module):
    def __init__(self, noise, width):
        super().__init__()
        self.first, self.second = Grow(noise, width), Grow(noise + width, width)
        self.last = nn.Linear(noise + 2 * width, NUMBERS + sum(KINDS))

    def forward(self, noise):
        numbers, *kinds = self.last(self.second(self.first(noise))).split([NUMBERS, *KINDS], 1)
        return torch.cat([numbers.tanh(), *[nn.functional.gumbel_softmax(kind, tau=0.2) for kind in kinds]], 1)


def make_critic(width):
    columns = NUMBERS + sum(KINDS)
    return nn.Sequential(
        nn.Linear(columns, width), nn.LeakyReLU(0.2), nn.Dropout(0.5),
        nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(width, 1))


def make_table(rows, device):
    """Numbers between -1 and 1, and columns that are 1 for the kind of a row."""
    columns = [torch.rand(rows, NUMBERS) * 2 - 1]
    columns += [nn.functional.one_hot(torch.randint(kind, (rows,)), kind).float() for kind in KINDS]
    return torch.cat(columns, 1).to(device)


class Gan:
    def __init__(self, run, width, noise, rows):
        self.device, self.noise, self.rows = run.device, noise, rows
        self.table = make_table(run.pick(100_000, 500), run.device)
        self.generator = Generator(noise, width).to(run.device)
        self.critic = make_critic(width).to(run.device)
        options = {"lr": 2e-4, "betas": (0.5, 0.9), "weight_decay": 1e-6}
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), **options)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), **options)

    def invent(self):
        return self.generator(torch.randn(self.rows, self.noise, device=self.device))

    def penalty(self, real, fake):
        """How far the critic's slope between real and invented rows is from 1."""
        with stamps.forward:
            share = torch.rand(self.rows, 1, device=self.device)
            between = torch.lerp(real, fake, share).requires_grad_()
            slope = InputGradient(self.critic(between), between)
        stamps.backward(slope)
        with stamps.forward:
            return (slope.value.norm(2, dim=1) - 1).square().mean() * 10

    def update_critic(self):
        picked = torch.randint(len(self.table), (self.rows,), device=self.device)
        real = self.table[picked]
        with stamps.forward:
            with torch.no_grad():
                fake = self.invent()
            loss = self.critic(fake).mean() - self.critic(real).mean()
        penalty = self.penalty(real, fake)
        with stamps.optimizer:
            self.critic_optimizer.zero_grad(set_to_none=False)
        stamps.backward(loss + penalty)
        with stamps.optimizer:
            self.critic_optimizer.step()
        return loss.detach()

    def update_generator(self):
        with stamps.forward:
            loss = -self.critic(self.invent()).mean()
        with stamps.optimizer:
            self.generator_optimizer.zero_grad(set_to_none=False)
        stamps.backward(loss)
        with stamps.optimizer:
            self.generator_optimizer.step()
        return loss.detach()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    gan = Gan(run, run.pick(256, 8), run.pick(128, 4), run.pick(500, 10))
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            for _ in range(CRITIC_UPDATES):
                critic_loss = gan.update_critic()
            generator_loss = gan.update_generator()
            stamps.item(critic_loss)
            stamps.item(generator_loss)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
