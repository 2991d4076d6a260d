"""A table in a memory-mapped text file, without a DataLoader: the training thread picks rows and parses them; input-bound.

Parsing 4,096 rows of 40 fields takes tens of milliseconds of Python. A step of the small network takes a few. Picking and
parsing are `data`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import mmap
import random
import tempfile

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
FIELDS, SHOPS = 40, 300


def write_table(path, rows):
    """A shop, a price and numbers, separated by commas."""
    numbers = torch.randn(rows, FIELDS).tolist()
    with open(path, "w") as file:
        for row, fields in enumerate(numbers):
            file.write(f"shop-{row % SHOPS}," + ",".join(f"{field:.4f}" for field in fields) + "\n")


class Table:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = [0]
        while (end := self.text.find(b"\n", self.starts[-1])) >= 0:
            self.starts.append(end + 1)

    def parse(self, row):
        shop, *fields = self.text[self.starts[row]:self.starts[row + 1]].split(b",")
        return int(shop.removeprefix(b"shop-")), [float(field) for field in fields]

    def batch(self, size):
        """Random rows: shops, numbers and what to predict."""
        rows = [self.parse(row) for row in random.choices(range(len(self.starts) - 1), k=size)]
        numbers = torch.tensor([fields for _, fields in rows])
        return torch.tensor([shop for shop, _ in rows]), numbers[:, 1:].clamp(-3, 3), numbers[:, 0].clone()


class Forecast(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.shops = nn.Embedding(SHOPS, 16)
        self.first = nn.Linear(FIELDS - 1 + 16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, shops, numbers):
        hidden = self.first(torch.cat([self.shops(shops), numbers], 1))
        for layer in self.layers:
            hidden = hidden + nn.functional.leaky_relu(layer(hidden))
        return self.last(hidden).squeeze(1)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size = run.pick(4096, 256)
    model = Forecast(run.pick(256, 8), run.pick(4, 1)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        write_table(folder + "/table.csv", run.pick(40_000, 2000))
        table = Table(folder + "/table.csv")
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                batch = table.batch(size)
            shops, numbers, prices = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = nn.functional.smooth_l1_loss(model(shops, numbers), prices)
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
