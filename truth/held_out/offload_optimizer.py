"""Recommender with its optimizer on the CPU: gradients come to the host, AdamW runs there, weights go back.

The update of the master weights on the CPU is the bottleneck.
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


class Clicks(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return 16_384

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.items, (20,), generator=generator), float(index % 2)


class Recommender(nn.Module):
    def __init__(self, items, width):
        super().__init__()
        self.items = nn.EmbeddingBag(items, width, mode="mean")
        self.tower = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.score = nn.Linear(width, 1)

    def forward(self, history):
        pooled = self.items(history)
        return self.score(pooled + self.tower(pooled)).squeeze(-1)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    torch.set_num_threads(4)
    items, width = run.pick((20_000, 512), (500, 32))
    model = Recommender(items, width).to(run.device)
    weights = list(model.parameters())
    masters = [weight.detach().cpu().clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    run.begin()
    source = feeding.loader(Clicks(items), batch_size=128, num_workers=3, drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        history, clicked = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = nn.functional.binary_cross_entropy_with_logits(model(history), clicked.float())
        stamps.backward(loss)
        with stamps.optimizer:
            with stamps.gpu:
                gradients = [weight.grad.to("cpu") for weight in weights]
            for master, gradient in zip(masters, gradients):
                master.grad = gradient
            optimizer.step()
            with torch.no_grad(), stamps.gpu:
                for weight, master in zip(weights, masters):
                    weight.copy_(master)
            model.zero_grad(set_to_none=True)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
