"""Fully sharded data parallelism with one rank: collectives are launched but wait for nobody. The GPU is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 6 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, hidden):
        left, right = self.up(self.norm(hidden)).chunk(2, -1)
        return hidden + self.down(nn.functional.silu(left) * right)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    run.join_ranks(run.pick("nccl", "gloo"))
    width, rows = run.pick((2048, 64), (32, 2))
    blocks = [Gated(width).to(run.device) for _ in range(run.pick(8, 2))]
    if run.device.type == "cuda":
        torch.cuda.set_device(0)
        blocks = [FullyShardedDataParallel(block, device_id=0) for block in blocks]
    model = nn.Sequential(nn.Embedding(1000, width, device=run.device), *blocks)
    if run.device.type == "cuda":
        model = FullyShardedDataParallel(model, device_id=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    source = DataLoader(TensorDataset(torch.randint(1000, (rows * 4, 256))), batch_size=rows)
    run.begin()
    count = 0
    while run.running():
        stream = iter(source)
        for _ in range(4):
            with stamps.step:
                with stamps.data:
                    (rows_in,) = next(stream)
                (rows_in,) = stamps.to_device([rows_in], run.device)
                with stamps.forward, job.autocast(run.device):
                    loss = model(rows_in).float().square().mean()
                stamps.backward(loss)
                with stamps.optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
                stamps.synchronize(run.device)
            count += 1
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
