"""Local SGD: two ranks train word vectors on their own and average their weights, not their gradients, every eighth step.

The weights go to pinned memory, through gloo and back. Eight steps take less time than one average: communication is the
bottleneck. Seven of eight steps wait for nobody.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "communication", "absent": []}
EVERY = 8


class Contexts(Dataset):
    """Word, neighbour and strangers, 256 of each at once."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        return torch.randint(self.words, (256, 6))


class Vectors(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, words):
        """How well the word predicts its neighbour, and the strangers not."""
        scores = (self.outer(words[:, 1:]) @ self.inner(words[:, 0])[:, :, None]).squeeze(2)
        return -nn.functional.logsigmoid(scores[:, 0]).mean() - nn.functional.logsigmoid(-scores[:, 1:]).mean()


class Average:
    """Averages weights over all ranks, by way of one flat buffer on the host."""

    def __init__(self, weights, run):
        self.weights, self.run = list(weights), run
        count = sum(weight.numel() for weight in self.weights)
        self.flat = torch.empty(count, pin_memory=run.device.type == "cuda")
        self.parts = self.flat.split([weight.numel() for weight in self.weights])

    @torch.no_grad()
    def __call__(self):
        for weight, part in zip(self.weights, self.parts):
            part.copy_(weight.flatten(), non_blocking=True)
        stamps.synchronize(self.run.device)
        with stamps.peer:
            dist.all_reduce(self.flat)
        self.flat /= self.run.world
        for weight, part in zip(self.weights, self.parts):
            weight.copy_(part.view_as(weight), non_blocking=True)


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    words = run.pick(30_000, 4000)
    model = Vectors(words, run.pick(512, 128)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = Average(model.parameters(), run)
    run.begin()
    source = feeding.loader(Contexts(words), batch_size=None, num_workers=1, pin_memory=run.pick(True, False))
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            (batch,) = stamps.to_device([next(supply)], run.device)
            with stamps.forward:
                loss = model(batch)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            if count % EVERY == 0:
                with stamps.host:
                    average()
            going = run.agree_to_run(count, every=EVERY)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
