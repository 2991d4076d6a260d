"""CPU only: three ranks, of which one owns the optimizer. Hooks send it each gradient during the backward pass.

Then it broadcasts the new weights, for which the others wait. Matrix factorization: many weights and little work, so
communication is the bottleneck. Starting a reduction is part of `backward`, waiting for it is `peer`.
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
USERS, ITEMS = 6000, 6000


class Ratings(Dataset):
    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return index * 7919 % USERS, index * 104_729 % ITEMS, float(index % 5)


class Factors(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1) + self.offset


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    job.run_ranks(3)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    model = Factors(512)
    # The gradients are summed, so the rate is divided.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 / run.world)
    pending = []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda weight: pending.append(dist.reduce(weight.grad, dst=0, async_op=True)))
    run.begin()
    source = feeding.loader(Ratings(), batch_size=32, shuffle=True, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            user, item, rating = next(supply)
            with stamps.forward:
                loss = nn.functional.mse_loss(model(user, item), rating.float())
            stamps.backward(loss)
            with stamps.peer:
                while pending:
                    pending.pop(0).wait()
            with stamps.optimizer:
                if run.rank == 0:
                    optimizer.step()
                optimizer.zero_grad()
            with stamps.peer, torch.no_grad():
                for weight in model.parameters():
                    dist.broadcast(weight, src=0)
            count += 1
            going = run.agree_to_run(count, every=8)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
