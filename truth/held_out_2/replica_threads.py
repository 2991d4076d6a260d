"""Data parallelism in one process: two threads run the forward pass of two replicas, on one device; host-bound.

Meanwhile the training thread waits: it is in `forward` as well. It runs one backward pass through both replicas, adds
their gradients and copies the new weights to them, which is `host`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import copy
from concurrent.futures import ThreadPoolExecutor

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


class Sentences(Dataset):
    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        return torch.arange(40) * (index % 13 + 1) % 997, index % 6


class Reader(nn.Module):
    """Convolutions over words, with gates."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(997, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(depth))
        self.head = nn.Linear(width, 6)

    def forward(self, words):
        hidden = self.embed(words).transpose(1, 2)
        for layer, norm in zip(self.layers, self.norms):
            hidden = hidden + nn.functional.glu(layer(norm(hidden)), 1)
        return self.head(hidden.amax(2))


def part(replica, words, kinds):
    """The loss of one replica. Runs in a thread of the pool."""
    with stamps.forward:
        return nn.functional.cross_entropy(replica(words), kinds)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Reader(run.pick(96, 8), run.pick(10, 2)).to(run.device)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Sentences(), batch_size=32, num_workers=2, drop_last=True)
    ahead = stamps.RunAhead(run.device)
    count = 0
    with ThreadPoolExecutor(2, thread_name_prefix="replica") as pool:
        for batch in feeding.steps(source, run.running):
            words, kinds = stamps.to_device(batch, run.device)
            with stamps.forward:
                halves = zip(replicas, words.chunk(2), kinds.chunk(2))
                losses = [pool.submit(part, *half) for half in halves]
                loss = sum(future.result() for future in losses) / 2
            stamps.backward(loss)
            with stamps.host, torch.no_grad():
                for weights in zip(model.parameters(), *(replica.parameters() for replica in replicas)):
                    weights[0].grad = weights[1].grad + weights[2].grad
            with stamps.optimizer:
                optimizer.step()
                for replica in replicas:
                    replica.zero_grad()
            with stamps.host, torch.no_grad():
                for replica in replicas:
                    torch._foreach_copy_(list(replica.parameters()), list(model.parameters()))
            ahead.step()
            count += 1
    run.done(count)


if __name__ == "__main__":
    main()
