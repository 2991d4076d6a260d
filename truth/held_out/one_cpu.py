"""A trainer whose threads and loaders all share one CPU with a busy process, set by the affinity mask it starts with."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import subprocess

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler

# Ends with the trainer.
HOG = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(10_000))
"""
KNOWN = {"verdict": "host", "absent": ["NcclCollective"], "note": "every thread is starved of CPU time"}


class Pairs(Dataset):
    def __init__(self, width):
        self.rows = torch.randn(2000, width)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, indices):
        return self.rows[indices], self.rows[[index - 1 for index in indices]]


class Siamese(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12)])

    def forward(self, left, right):
        return nn.functional.cosine_similarity(self.encoder(left), self.encoder(right)).mean()


def main():
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Siamese(128).to(run.device)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-4)
    hog = subprocess.Popen([sys.executable, "-c", HOG])
    run.begin()
    pairs = Pairs(128)
    sampler = BatchSampler(RandomSampler(pairs, replacement=True, num_samples=1 << 20), 50, drop_last=True)
    source = feeding.loader(pairs, sampler=sampler, batch_size=None, num_workers=1, prefetch_factor=8)
    count = 0
    try:
        for batch in feeding.steps(source, run.running):
            left, right = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = model(left, right)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
            count += 1
    finally:
        hog.kill()
    run.done(count)


if __name__ == "__main__":
    main()
