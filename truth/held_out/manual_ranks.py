"""Four ranks that average their gradients by hand, parameter by parameter, after the backward pass.

No DistributedDataParallel. Over gloo through host memory; communication is the bottleneck.
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


class Sequences(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.arange(index, index + 24) % 97


class Predictor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.cell = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 97)

    def forward(self, numbers):
        return self.head(self.cell(self.embed(numbers))[0])


def average(model, world):
    for weight in model.parameters():
        with stamps.peer:
            dist.all_reduce(weight.grad)
        weight.grad /= world


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="processes [4]")
    args = parser.parse_args()
    job.run_ranks(args.ranks)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    model = Predictor(run.pick(1024, 128)).to(run.device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    run.begin()
    source = feeding.loader(Sequences(), batch_size=32, num_workers=1)
    supply = feeding.endless(source, lambda: True)
    count = 0
    going = True
    while going:
        with stamps.step:
            (numbers,) = stamps.to_device([next(supply)], run.device)
            with stamps.forward:
                guess = model(numbers[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(guess, numbers[:, 1:].flatten())
            stamps.backward(loss)
            with stamps.host:
                average(model, run.world)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            going = run.agree_to_run(count, every=5)
    supply.close()
    run.done(count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
