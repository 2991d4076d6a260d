"""CPU only: four ranks in two groups. Gradients are summed in each group, then between the groups, then handed back.

Each group has a leader. Only the leaders talk across groups, as they would across machines. A gradient takes three trips,
and the model has many weights and little work: communication is the bottleneck.
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
PAGES = 16_000


class Visits(Dataset):
    """Pages that a user has seen and the page that came next."""

    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return torch.arange(12) * (index % 101 + 1) % PAGES, index * 7919 % 64


class NextPage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.pages = nn.Embedding(PAGES, width)
        self.score = nn.Bilinear(width, 8, 64)
        self.taste = nn.Linear(width, 8)

    def forward(self, visits):
        seen = self.pages(visits)
        return self.score(seen.mean(1), torch.sigmoid(self.taste(seen[:, -1])))


class TwoLevels:
    """Averages gradients in three trips."""

    def __init__(self, run):
        # All ranks have to create all groups, in the same order.
        groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
        self.leaders = dist.new_group([0, 2], backend="gloo")
        self.leader = run.rank // 2 * 2
        self.group = groups[run.rank // 2]
        self.leads, self.world = run.rank == self.leader, run.world

    def average(self, gradient):
        with stamps.peer:
            dist.reduce(gradient, dst=self.leader, group=self.group)
            if self.leads:
                dist.all_reduce(gradient, group=self.leaders)
            dist.broadcast(gradient, src=self.leader, group=self.group)
        gradient /= self.world


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    job.run_ranks(4)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    model = NextPage(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    levels = TwoLevels(run)
    for weight in model.parameters():
        dist.broadcast(weight.data, src=0)
    run.begin()
    source = feeding.loader(Visits(), batch_size=16, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            visits, following = next(supply)
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(visits), following)
            stamps.backward(loss)
            with stamps.host:
                for weight in model.parameters():
                    levels.average(weight.grad)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count, every=8)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
