"""A narrow network of many layers trained with accelerate: the GPU finishes each kernel before the next is launched."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import hooks
import job
import stamps
import torch

job.require("accelerate")

import accelerate
from models import Mlp, Vectors

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    accelerator = accelerate.Accelerator(cpu=not run.on_gpu)
    width = run.pick(128, 32)
    model = Mlp(width, run.pick(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = feeding.loader(Vectors(width), run.variant, KNOWN, batch_size=32, num_workers=2, drop_last=True)
    model, optimizer, source = accelerator.prepare(model, optimizer, source)
    hooks.label_loaders()
    hooks.label_gpu_waits()
    run.begin()
    supply = iter(source)
    count = 0
    while run.running():
        with stamps.step:
            inputs, targets = next(supply)
            with stamps.forward:
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            with stamps.backward_of(loss):
                accelerator.backward(loss)
            with stamps.optimizer:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
        count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
