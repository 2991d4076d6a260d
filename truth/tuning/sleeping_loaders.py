"""CPU only: loader workers sleep in __getitem__, as on a slow network disk; loading is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import time

import feeding
import job
import stamps
import torch
from models import Mlp, Vectors

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}


class Remote(Vectors):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


def main():
    parser = job.arguments(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--workers", type=int, default=2, help="loader processes [2]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    model = Mlp(256, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Remote(256), batch_size=16, num_workers=args.workers, drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        inputs, targets = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
