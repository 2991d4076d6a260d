"""Loaders fetch objects from a slow store: each takes tens of milliseconds, and a batch has 64. The GPU is the bottleneck.

Twelve loader processes fetch with 32 threads each, so batches arrive several times faster than the GPU uses them. The
store is imitated by a sleep. The model fills in words that are masked.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random
import time
from concurrent.futures import ThreadPoolExecutor

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, RandomSampler

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
WORDS, MASK = 8000, 0
FETCHERS = 32


class Store(Dataset):
    """Objects of a remote store, fetched many at a time."""

    def __init__(self, length, latency):
        self.length, self.latency, self.pool = length, latency, None

    def __len__(self):
        return 1 << 16

    def fetch(self, key):
        time.sleep(self.latency * random.uniform(0.5, 1.5))
        return torch.arange(key, key + self.length * 7, 7) % (WORDS - 1) + 1

    def __getitem__(self, keys):
        if self.pool is None:
            torch.set_num_threads(1)
            self.pool = ThreadPoolExecutor(FETCHERS)
        return torch.stack(list(self.pool.map(self.fetch, keys)))


class Filler(nn.Module):
    def __init__(self, width, depth, heads, length):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.place = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        return self.head(self.body(self.embed(words) + self.place))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length, rows = run.pick((512, 64), (8, 8))
    model = Filler(run.pick(1024, 16), run.pick(6, 1), run.pick(16, 2), length).to(run.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    store = Store(length, run.pick(0.04, 0.004))
    run.begin()
    sampler = BatchSampler(RandomSampler(store), rows, drop_last=True)
    source = feeding.loader(store, sampler=sampler, batch_size=None, num_workers=run.pick(12, 2),
                            pin_memory=run.pick(True, False))
    count = 0
    for words in feeding.steps(source, run.running):
        (words,) = stamps.to_device([words], run.device)
        masked = torch.rand(words.shape, device=run.device) < 0.15
        with stamps.forward, job.autocast(run.device):
            guess = model(words.masked_fill(masked, MASK))
            losses = nn.functional.cross_entropy(guess.transpose(1, 2), words, reduction="none")
            loss = (losses * masked).sum() / masked.sum()
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        with stamps.host:
            schedule.step()
        stamps.synchronize(run.device)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
