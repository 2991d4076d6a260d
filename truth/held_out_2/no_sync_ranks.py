"""DistributedDataParallel over gloo with gradient accumulation: only the last of four micro-batches averages gradients.

Two ranks on one device. The first three backward passes run in no_sync() and wait for nobody. Large layers and few rows:
the all-reduce through host memory is the bottleneck.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import contextlib

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "communication", "absent": []}
MICRO_BATCHES = 4


class Spectra(Dataset):
    def __init__(self, width):
        self.bank = torch.rand(256, width)

    def __len__(self):
        return 1 << 18

    def __getitem__(self, index):
        return self.bank[index % 256], self.bank[(index + 1) % 256, 0]


class Regressor(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = nn.functional.softplus(layer(hidden))
        return self.head(hidden).squeeze(1)


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    width = run.pick(3072, 256)
    model = Regressor(width, run.pick(4, 2)).to(run.device)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Spectra(width), batch_size=16, num_workers=1, drop_last=True)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            total = torch.zeros((), device=run.device)
            for micro_batch in range(MICRO_BATCHES):
                last = micro_batch == MICRO_BATCHES - 1
                spectrum, target = stamps.to_device(next(supply), run.device)
                with contextlib.nullcontext() if last else model.no_sync():
                    with stamps.forward:
                        loss = nn.functional.huber_loss(model(spectrum), target) / MICRO_BATCHES
                    stamps.backward(loss, peers=last)
                total += loss.detach()
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(total)
            count += 1
            going = run.agree_to_run(count, every=4)
    supply.close()
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
