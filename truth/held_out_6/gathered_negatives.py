"""Contrastive training of two towers on three ranks: every rank compares its own pairs with those of all others.

The vectors of all ranks are gathered inside the forward pass, and their gradients are added up inside the backward pass. Then the
weights' gradients go round a ring in pieces: each rank sends to the next and receives from the one before, by isend and recv over
gloo. Wide layers and few rows: communication is the bottleneck. A copy to pinned memory that is waited for is `gpu`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math

import job
import stamps
import torch
import torch.distributed as dist
from torch import nn

KNOWN = {"verdict": "communication", "absent": []}
RANKS = 3


def on_host(tensor):
    """A copy in host memory, waited for."""
    if not tensor.is_cuda:
        return tensor.contiguous()
    copy = torch.empty(tensor.shape, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    stamps.synchronize(tensor.device)
    return copy


class Gather(torch.autograd.Function):
    """The rows of all ranks, the first rank's first."""

    @staticmethod
    def forward(context, rows):
        context.rank, context.rows = dist.get_rank(), len(rows)
        own = on_host(rows.detach())
        parts = [torch.empty_like(own) for _ in range(RANKS)]
        with stamps.peer:
            dist.all_gather(parts, own)
        return torch.cat(parts).to(rows.device, non_blocking=True)

    @staticmethod
    def backward(context, gradient):
        total = on_host(gradient)
        with stamps.peer:
            dist.all_reduce(total)
        own = total[context.rank * context.rows:(context.rank + 1) * context.rows]
        return own.to(gradient.device, non_blocking=True)


class Ring:
    """Averages tensors of all ranks in 2 (RANKS - 1) rounds."""

    def __init__(self, weights, run):
        self.weights, self.device, self.rank = weights, run.device, run.rank
        self.sizes = [weight.numel() for weight in weights]
        self.piece = math.ceil(sum(self.sizes) / RANKS)
        self.shared = torch.zeros(RANKS, self.piece, pin_memory=run.device.type == "cuda")
        self.received = torch.empty(self.piece)

    def turn(self, sent):
        """Send a piece to the next rank and receive one from the rank before."""
        with stamps.peer:
            sending = dist.isend(self.shared[sent], (self.rank + 1) % RANKS)
            dist.recv(self.received, (self.rank - 1) % RANKS)
            sending.wait()

    def average(self):
        flat = self.shared.flatten()[:sum(self.sizes)]
        flat.copy_(torch.cat([weight.grad.flatten() for weight in self.weights]), non_blocking=True)
        stamps.synchronize(self.device)
        for turn in range(RANKS - 1):
            self.turn((self.rank - turn) % RANKS)
            self.shared[(self.rank - turn - 1) % RANKS] += self.received
        self.shared[(self.rank + 1) % RANKS] /= RANKS
        for turn in range(RANKS - 1):
            self.turn((self.rank + 1 - turn) % RANKS)
            self.shared[(self.rank - turn) % RANKS] = self.received
        averaged = flat.to(self.device, non_blocking=True).split(self.sizes)
        for weight, gradient in zip(self.weights, averaged):
            weight.grad.copy_(gradient.view_as(weight))


class Towers(nn.Module):
    """A tower for sights and one for words."""

    def __init__(self, sight, words, width):
        super().__init__()
        self.sights = nn.Sequential(nn.Linear(sight, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))
        self.words = nn.EmbeddingBag(words, width, mode="mean")
        self.after = nn.Sequential(nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, sights, words):
        seen = nn.functional.normalize(self.sights(sights), dim=1)
        read = nn.functional.normalize(self.after(self.words(words)), dim=1)
        return seen, read


def loss_of(seen, read, heat, rank):
    """Each own row has to find its partner among the rows of all ranks, in both directions."""
    wanted = rank * len(seen) + torch.arange(len(seen), device=seen.device)
    all_seen, all_read = Gather.apply(torch.cat([seen, read], 1)).chunk(2, 1)
    one = nn.functional.cross_entropy(heat.exp() * seen @ all_read.T, wanted)
    return (one + nn.functional.cross_entropy(heat.exp() * read @ all_seen.T, wanted)) / 2


class Pairs:
    """Sights and their words in memory, each rank's own ones."""

    def __init__(self, sight, words, rank):
        generator = torch.Generator().manual_seed(rank)
        self.sights = torch.randn(2000, sight, generator=generator)
        self.words = torch.randint(words, (2000, 12), generator=generator)

    def batch(self, rows):
        picked = torch.randint(2000, (rows,))
        return self.sights[picked], self.words[picked]


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(RANKS)
    run = job.Job(args, KNOWN)
    torch.set_num_threads(1)
    run.join_ranks("gloo")
    sight, words, width, rows = run.pick((2048, 8000, 1536, 128), (512, 2000, 512, 4))
    torch.manual_seed(0)
    model = Towers(sight, words, width).to(run.device)
    torch.manual_seed(run.rank)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    ring, pairs = Ring(list(model.parameters()), run), Pairs(sight, words, run.rank)
    run.begin()
    count = 0
    going = True
    while going:
        with stamps.step:
            with stamps.data:
                batch = pairs.batch(rows)
            sights, texts = stamps.to_device(batch, run.device)
            with stamps.forward:
                seen, read = model(sights, texts)
                loss = loss_of(seen, read, model.heat, run.rank)
            stamps.backward(loss)
            ring.average()
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            count += 1
            going = run.agree_to_run(count, every=4)
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
