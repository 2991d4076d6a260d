"""Recommender whose tables are split between two ranks: vectors are exchanged in the forward and in the backward pass.

Each rank owns half of the tables and trains on half of the batch. So it looks up its tables for all rows and exchanges the
vectors all-to-all over gloo. Their gradients return the same way, inside the backward pass. A wait for a copy to pinned memory
is `gpu`, an exchange is `peer`. Large vectors and a small network: communication is the bottleneck.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
import torch.distributed as dist
from torch import nn

KNOWN = {"verdict": "communication", "absent": []}
RANKS = 2
DENSE = 16


class Link:
    """Exchanges tensors of one shape. The first dimension is the rank that a part is for, or comes from."""

    def __init__(self, device, shape):
        self.device = device
        self.sent, self.received = [torch.empty(shape, pin_memory=device.type == "cuda") for _ in range(2)]

    def exchange(self, tensor):
        self.sent.copy_(tensor, non_blocking=True)
        stamps.synchronize(self.device)
        with stamps.peer:
            dist.all_to_all_single(self.received, self.sent)
        if self.device.type == "cpu":
            return self.received.clone()
        return self.received.to(self.device, non_blocking=True)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context, vectors, link):
        context.link = link
        return link.exchange(vectors)

    @staticmethod
    def backward(context, gradient):
        return context.link.exchange(gradient), None


class Tables(nn.Module):
    """The tables of this rank, one below the other."""

    def __init__(self, tables, entries, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tables * entries, width) * 0.01)
        self.register_buffer("offsets", torch.arange(tables)[:, None] * entries)

    def forward(self, places):
        """Vectors of places [rank, table, row]."""
        flat = (places + self.offsets).flatten()
        return self.weight.index_select(0, flat).view(*places.shape, -1)


class Clicks(nn.Module):
    """The part that all ranks share."""

    def __init__(self, tables, width):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers, vectors):
        """Vectors are [rank, table, row, width]."""
        vectors = vectors.flatten(0, 1).transpose(0, 1).flatten(1)
        return self.top(torch.cat([self.bottom(numbers), vectors], 1)).squeeze(1)


class Log:
    """Random visits, drawn by the training thread."""

    def __init__(self, tables, entries, rows):
        self.tables, self.entries, self.rows = tables, entries, rows

    def batch(self):
        places = torch.randint(self.entries, (RANKS, self.tables, self.rows))
        return places, torch.rand(self.rows, DENSE), torch.randint(2, (self.rows,)).float()


def average(gradients):
    """Average the gradients of the shared part as one tensor."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with stamps.gpu if flat.is_cuda else stamps.host:
        flat = flat.cpu()
    with stamps.peer:
        dist.all_reduce(flat)
    parts = stamps.to_device([flat], gradients[0].device)[0].div(RANKS).split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts):
        gradient.copy_(part.view_as(gradient))


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(RANKS)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    tables, entries, width, rows = run.pick((8, 50_000, 128, 8192), (4, 200, 32, 1024))
    own = Tables(tables, entries, width).to(run.device)
    torch.manual_seed(0)
    shared = Clicks(RANKS * tables, width).to(run.device)
    torch.manual_seed(run.rank)
    link = Link(run.device, (RANKS, tables, rows, width))
    optimizer = torch.optim.SGD([*own.parameters(), *shared.parameters()], lr=0.05)
    visits = Log(tables, entries, rows)
    run.begin()
    count = 0
    going = True
    while going:
        with stamps.step:
            with stamps.data:
                wanted_places, numbers, clicked = visits.batch()
                places = torch.empty_like(wanted_places)
            with stamps.peer:
                dist.all_to_all_single(places, wanted_places)
            places, numbers, clicked = stamps.to_device([places, numbers, clicked], run.device)
            with stamps.forward:
                vectors = Exchange.apply(own(places), link)
                loss = nn.functional.binary_cross_entropy_with_logits(shared(numbers, vectors), clicked)
            stamps.backward(loss)
            average([weight.grad for weight in shared.parameters()])
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
            count += 1
            going = run.agree_to_run(count, every=4)
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
