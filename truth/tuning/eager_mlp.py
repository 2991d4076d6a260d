"""Eager MLP of many small layers: the GPU finishes each kernel before the host has launched the next."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Mlp, Vectors

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Mlp(run.pick(256, 64), run.pick(24, 4)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Vectors(run.pick(256, 64)), batch_size=32, num_workers=2, drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        inputs, targets = stamps.to_device(batch, run.device)
        with stamps.optimizer:
            optimizer.zero_grad()
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
