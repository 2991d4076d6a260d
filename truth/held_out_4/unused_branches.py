"""One trunk with three large branches, of which each step trains one: DistributedDataParallel has to find the unused weights.

Two ranks over gloo, on one device. All weights are averaged, used or not, through host memory. Large layers and few rows:
communication is the bottleneck.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "communication", "absent": []}
BRANCHES = ("price", "demand", "returns")


class Forecaster(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.branches = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 1)) for name in BRANCHES})

    def forward(self, inputs, branch):
        return self.branches[branch](self.trunk(inputs)).squeeze(1)


class Market:
    """Rows in memory: a random choice of them is a batch."""

    def __init__(self, inputs, device):
        self.rows, self.device = torch.randn(20_000, inputs), device

    def batch(self, size):
        with stamps.data:
            rows = self.rows[torch.randint(len(self.rows), (size,))]
            batch = [rows, rows[:, :8].sum(1)]
            if self.device.type == "cuda":
                batch = [tensor.pin_memory() for tensor in batch]
        return stamps.to_device(batch, self.device)


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    inputs, width, rows = run.pick((512, 2048, 64), (32, 256, 8))
    model = Forecaster(inputs, width).to(run.device)
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)
    market = Market(inputs, run.device)
    run.begin()
    count = 0
    going = True
    while going:
        with stamps.step:
            values, wanted = market.batch(rows)
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                guess = model(values, BRANCHES[count % len(BRANCHES)])
                loss = nn.functional.l1_loss(guess, wanted)
            stamps.backward(loss, peers=True)
            with stamps.optimizer:
                optimizer.step()
            if count % 8 == 0:
                stamps.item(loss.detach())
            count += 1
            going = run.agree_to_run(count, every=4)
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
