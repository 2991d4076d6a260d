"""CPU only: two ranks, one of which loads slowly; the other waits for it in the all-reduce.

The slow rank is input-bound. Gradients are averaged by hand as one flat tensor. Works with PyTorch 1.13.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import time

import feeding
import job
import stamps
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

KNOWN = [{"verdict": "communication", "absent": [], "note": "waits for rank 1, which loads slowly"},
         {"verdict": "input", "absent": []}]


class Digits(Dataset):
    def __init__(self, pause):
        self.pause = pause

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((1, 14, 14), index % 10 / 10.0), index % 10


def average(model, world):
    flat = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    with stamps.peer:
        dist.all_reduce(flat)
    flat /= world
    for weight in model.parameters():
        weight.grad.copy_(flat[:weight.numel()].view_as(weight))
        flat = flat[weight.numel():]


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    job.run_ranks(2)
    rank = int(os.environ["RANK"])
    run = job.Job(args, KNOWN[rank])
    run.join_ranks("gloo")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.begin()
    source = feeding.loader(Digits(0.004 if rank else 0.0), batch_size=16, num_workers=1)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            image, digit = next(supply)
            with stamps.forward:
                loss = nn.functional.nll_loss(model(image).log_softmax(1), digit)
            stamps.backward(loss)
            with stamps.host:
                average(model, run.world)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
