"""Mixture of experts: each layer sends each token to two of eight small networks. The host sorts the tokens; host-bound.

The host has to know how many tokens each expert gets, so each layer reads eight counts back. That wait is `gpu`, inside
`forward`. All kernels are small.
"""

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
WORDS, CHOICES = 2000, 2


class Passages(Dataset):
    """Whole batches of words, with the word that follows each."""

    def __init__(self, rows, length):
        self.words = torch.randint(WORDS, (64, rows, length + 1))

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        words = self.words[index % 64]
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count))

    def forward(self, hidden):
        normal = self.norm(hidden)
        weights, chosen = self.gate(normal).softmax(1).topk(CHOICES, dim=1)
        chosen = chosen.flatten()
        counts = (chosen[:, None] == torch.arange(len(self.experts), device=hidden.device)).sum(0)
        counts = read(counts)
        order = chosen.argsort(stable=True)
        tokens = order // CHOICES
        parts = normal.index_select(0, tokens).split(counts)
        answers = torch.cat([expert(part) for expert, part in zip(self.experts, parts) if len(part)])
        answers = answers * weights.flatten().index_select(0, order)[:, None]
        return hidden.index_add(0, tokens, answers)


def read(counts):
    """The counts as a list. Waits for the GPU."""
    if counts.device.type == "cpu":
        return counts.tolist()
    with stamps.gpu:
        return counts.tolist()


class Model(nn.Module):
    def __init__(self, width, depth, experts):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        hidden = self.embed(words).flatten(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Model(run.pick(128, 16), run.pick(6, 2), run.pick(8, 4)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.begin()
    source = feeding.loader(Passages(*run.pick((16, 32), (2, 8))), batch_size=None, num_workers=2)
    ahead = stamps.RunAhead(run.device)
    count = 0
    for batch in feeding.steps(source, run.running):
        words, following = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = nn.functional.cross_entropy(model(words), following.flatten())
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        ahead.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
