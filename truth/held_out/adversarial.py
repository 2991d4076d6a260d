"""Two networks with two optimizers take turns in each step; many small kernels, so host-bound."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


class Rings(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        angle = torch.tensor(index * 0.37)
        return torch.stack([angle.cos(), angle.sin()]) * (1 + index % 2)


def tower(inputs, width, outputs, depth):
    layers = [nn.Linear(inputs, width)]
    for _ in range(depth):
        layers += [nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    depth = run.pick(10, 2)
    generator = tower(16, 128, 2, depth).to(run.device)
    critic = tower(2, 128, 1, depth).to(run.device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    run.begin()
    source = feeding.loader(Rings(), batch_size=100, num_workers=4, shuffle=True)
    ahead = stamps.RunAhead(run.device)
    count = 0
    for real in feeding.steps(source, run.running):
        (real,) = stamps.to_device([real], run.device)
        with stamps.forward:
            fake = generator(torch.randn(len(real), 16, device=run.device)).detach()
            loss = critic(fake).mean() - critic(real).mean()
        stamps.backward(loss)
        with stamps.optimizer:
            of_critic.step()
            of_critic.zero_grad()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.05, 0.05)
        with stamps.forward:
            loss = -critic(generator(torch.randn(len(real), 16, device=run.device))).mean()
        stamps.backward(loss)
        with stamps.optimizer:
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()
        ahead.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
