"""Vectors for a graph of facts: the training thread draws false facts in Python, one by one. Input-bound.

There is no loader. After each update the thread makes the next batch, then it clears the gradients and copies the batch. All of
it is `data` except the copy. Gradients are sparse. They are sorted before the optimizer, which would have to wait for that.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}


class Facts:
    """Facts (head, relation, tail) and a set of them, to tell false facts from true ones."""

    def __init__(self, things, relations, count):
        self.draw = random.Random(11)
        self.things, self.relations = things, relations
        self.list = [(self.draw.randrange(things), self.draw.randrange(relations), self.draw.randrange(things))
                     for _ in range(count)]
        self.known = set(self.list)

    def false_tails(self, head, relation, count):
        """Things for which the fact is not known to be true."""
        found, pick, known, things = [], self.draw.random, self.known, self.things
        while len(found) < count:
            tail = int(pick() * things)
            if (head, relation, tail) not in known:
                found.append(tail)
        return found

    def batch(self, rows, false):
        facts = self.draw.choices(self.list, k=rows)
        heads, relations, tails = [], [], []
        for head, relation, tail in facts:
            heads.append(head)
            relations.append(relation)
            tails.append([tail, *self.false_tails(head, relation, false)])
        return torch.tensor(heads), torch.tensor(relations), torch.tensor(tails)


class Scores(nn.Module):
    """A fact is likely if the head, turned by the relation, is near the tail."""

    def __init__(self, things, relations, width):
        super().__init__()
        self.things = nn.Embedding(things, width, sparse=True)
        self.relations = nn.Embedding(relations, width // 2, sparse=True)

    def forward(self, heads, relations, tails):
        """Scores [fact, tail]. The first tail of each fact is the true one."""
        things = self.things(torch.cat([heads[:, None], tails], 1))
        real, imaginary = things[:, :1].chunk(2, -1)
        turn = self.relations(relations)[:, None]
        cosine, sine = turn.cos(), turn.sin()
        turned = torch.cat([real * cosine - imaginary * sine, real * sine + imaginary * cosine], -1)
        return 6.0 - (turned - things[:, 1:]).abs().sum(-1)


def loss_of(scores):
    """False facts count the more, the likelier the model takes them for true."""
    true, false = scores[:, 0], scores[:, 1:]
    weights = false.detach().softmax(1)
    return -nn.functional.logsigmoid(true).mean() - (weights * nn.functional.logsigmoid(-false)).sum(1).mean()


def sort_gradients(weights):
    """Add up the rows that occur several times. The number of rows left is read back from the GPU."""
    for weight in weights:
        with stamps.gpu if weight.is_cuda else stamps.host:
            weight.grad = weight.grad.coalesce()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    things, relations, rows, false = run.pick((200_000, 500, 4096, 32), (2000, 10, 256, 8))
    facts = Facts(things, relations, run.pick(400_000, 4000))
    model = Scores(things, relations, run.pick(128, 8)).to(run.device)
    nn.init.uniform_(model.things.weight, -0.05, 0.05)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    run.begin()
    count, losses = 0, []
    while run.running():
        with stamps.step:
            with stamps.data:
                batch = facts.batch(rows, false)
            with stamps.optimizer:
                optimizer.zero_grad()
            batch = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = loss_of(model(*batch))
            stamps.backward(loss)
            sort_gradients(model.parameters())
            with stamps.optimizer:
                optimizer.step()
            if count % 20 == 0:
                losses.append(stamps.item(loss.detach()))
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
