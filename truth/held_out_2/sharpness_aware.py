"""Sharpness-aware minimization: each step climbs, differentiates again there, returns and descends. Small layers, host-bound.

A validation pass every 20 steps; the weights are saved in every fifth of them. Climbing and descending are `optimizer`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


class Table(Dataset):
    """Whole batches of rows at once, from memory."""

    def __init__(self, rows, width):
        self.cells = torch.randn(rows, width)
        self.classes = (self.cells[:, :4].sum(1) > 0).long()

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, indices):
        return self.cells[indices], self.classes[indices]


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden):
        normal = self.norm(hidden)
        return torch.lerp(hidden, torch.relu(self.change(normal)), torch.sigmoid(self.gate(normal)))


class SharpnessAware:
    def __init__(self, weights, base, radius=0.05):
        self.weights, self.base, self.radius, self.shifts = list(weights), base, radius, []

    @torch.no_grad()
    def climb(self):
        length = torch.stack([weight.grad.norm() for weight in self.weights]).norm()
        scale = self.radius / (length + 1e-12)
        for weight in self.weights:
            self.shifts.append(weight.grad * scale)
            weight.add_(self.shifts[-1])
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for weight, shift in zip(self.weights, self.shifts):
            weight.sub_(shift)
        self.shifts.clear()
        self.base.step()
        self.base.zero_grad()


def validate(model, source, device):
    model.eval()
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for batch in feeding.batches(source):
            cells, classes = stamps.to_device(batch, device)
            with stamps.forward:
                right += (model(cells).argmax(1) == classes).sum()
    model.train()
    return stamps.item(right)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width = run.pick(160, 16)
    layers = [Highway(width) for _ in range(run.pick(12, 2))]
    model = nn.Sequential(*layers, nn.Linear(width, 2)).to(run.device)
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    table, unseen = Table(8192, width), Table(512, width)
    run.begin()
    sampler = BatchSampler(RandomSampler(table, replacement=True, num_samples=1 << 22), 64, drop_last=True)
    source = feeding.loader(table, sampler=sampler, batch_size=None)
    held_back = feeding.loader(unseen, sampler=BatchSampler(range(512), 64, drop_last=True), batch_size=None)
    ahead = stamps.RunAhead(run.device)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for batch in feeding.steps(source, run.running):
            cells, classes = stamps.to_device(batch, run.device)
            for move in (optimizer.climb, optimizer.descend):
                with stamps.forward:
                    loss = nn.functional.cross_entropy(model(cells), classes)
                stamps.backward(loss)
                with stamps.optimizer:
                    move()
            ahead.step()
            count += 1
            if count % 20 == 0:
                with stamps.evaluation:
                    validate(model, held_back, run.device)
            if count % 100 == 0:
                with stamps.checkpoint:
                    torch.save(model.state_dict(), folder + "/best.pt")
    run.done(count)


if __name__ == "__main__":
    main()
