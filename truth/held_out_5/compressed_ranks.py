"""Three ranks that halve their gradients' size on the way: DistributedDataParallel with the hook that sends 16 bits a number.

Over gloo, on one device, with a sampler that gives each rank its own rows. Gloo adds 16-bit numbers on the CPU. Large layers and
few rows: communication is the bottleneck. The hook's conversions are part of `backward`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import itertools

import feeding
import job
import stamps
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DistributedSampler, TensorDataset

KNOWN = {"verdict": "communication", "absent": []}


class Repair(nn.Module):
    """Finds out what a row was before some of its numbers were lost."""

    def __init__(self, inputs, width):
        super().__init__()
        self.read = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Mish())
        self.think = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Mish())
        self.write = nn.Linear(width, inputs)

    def forward(self, rows):
        hidden = self.read(rows)
        return self.write(hidden + self.think(hidden))


def batches(source, sampler):
    """Epoch after epoch, each in an order of its own."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from feeding.batches(source)


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(3)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    inputs, width, rows = run.pick((1024, 3072, 32), (32, 192, 8))
    model = Repair(inputs, width).to(run.device)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=10)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # All ranks need the same rows, as each takes its share of them.
    table = TensorDataset(torch.randn(20_000, inputs, generator=torch.Generator().manual_seed(1)))
    run.begin()
    sampler = DistributedSampler(table, run.world, run.rank, drop_last=True)
    source = feeding.loader(table, batch_size=rows, sampler=sampler, num_workers=1, drop_last=True,
                            pin_memory=run.pick(True, False))
    supply = batches(source, sampler)
    count = 0
    going = True
    while going:
        with stamps.step:
            (whole,) = stamps.to_device(next(supply), run.device)
            damaged = whole * (torch.rand_like(whole) < 0.8)
            with stamps.forward:
                loss = nn.functional.smooth_l1_loss(model(damaged), whole)
            stamps.backward(loss, peers=True)
            with stamps.optimizer:
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if count % 10 == 0:
                stamps.item(loss.detach())
            count += 1
            going = run.agree_to_run(count, every=4)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
