"""Progressive resizing: one second of small pictures that loaders decode, one second of large ones that are on the device.

The first stage waits for its loaders, the second for the GPU, in turns. So no bottleneck is certain. One model and one
optimizer serve both.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import itertools
import time
import zlib

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": None, "absent": ["NcclCollective"]}
CLASSES = 50
STAGE = 1.0


class Small(Dataset):
    """Small pictures, cut out of large compressed ones."""

    def __init__(self, size, repeats):
        self.size, self.repeats = size, repeats
        self.packed = zlib.compress(bytes(torch.randint(48, (1 << 18,), dtype=torch.uint8).tolist()), 6)

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        for _ in range(self.repeats):
            plain = zlib.decompress(self.packed)
        count = 3 * self.size * self.size
        picture = torch.frombuffer(bytearray(plain[index % 1000:index % 1000 + count]), dtype=torch.uint8)
        return picture.view(3, self.size, self.size).float().div_(48), index % CLASSES


class Large:
    """Large pictures on the device."""

    def __init__(self, size, rows, device):
        self.pictures = torch.rand(2 * rows, 3, size, size, device=device)
        self.rows = rows

    def batch(self):
        start = int(torch.randint(self.rows, ()))
        classes = torch.arange(start, start + self.rows, device=self.pictures.device) % CLASSES
        return self.pictures[start:start + self.rows], classes


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures):
        hidden = self.first(pictures)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden.mean((2, 3)))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Network(run.pick(192, 8), run.pick(8, 1)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    large = Large(run.pick(192, 24), run.pick(128, 4), run.device)
    run.begin()
    source = feeding.loader(Small(run.pick(48, 8), run.pick(4, 1)), batch_size=run.pick(64, 8), shuffle=True, num_workers=4,
                            pin_memory=run.pick(True, False), drop_last=True)
    supply = feeding.endless(source, lambda: True)

    def train(pictures, classes):
        with stamps.forward:
            with job.autocast(run.device):
                guess = model(pictures)
            loss = nn.functional.cross_entropy(guess.float(), classes)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        stamps.item(loss.detach())

    count = 0
    for stage in itertools.cycle(("small", "large")):
        if not run.running():
            break
        until = time.monotonic() + STAGE
        while time.monotonic() < until and run.running():
            with stamps.step:
                if stage == "small":
                    train(*stamps.to_device(next(supply), run.device))
                else:
                    train(*large.batch())
            count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
