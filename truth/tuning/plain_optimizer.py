"""Adam that loops over the parameters one by one (foreach off): the optimizer's launches are the bottleneck."""

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
    width = run.pick(384, 64)
    model = Mlp(width, run.pick(32, 4)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    run.begin()
    source = feeding.loader(Vectors(width), batch_size=64, num_workers=2, drop_last=True)
    ahead = stamps.RunAhead(run.device, depth=1)
    count = 0
    for batch in feeding.steps(source, run.running):
        inputs, targets = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        ahead.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
