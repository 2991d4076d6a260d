"""A trainer that shares one CPU with a busy process: the training thread waits for the CPU."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import multiprocessing

import feeding
import job
import stamps
import torch
from models import Mlp, Vectors

KNOWN = {"verdict": "host", "absent": ["NcclCollective"], "note": "the training thread is starved of CPU time"}


def burn(ended, cpu):
    os.sched_setaffinity(0, {cpu})
    while not ended.is_set():
        sum(range(10_000))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    cpu = max(os.sched_getaffinity(0))
    width = run.pick(256, 64)
    model = Mlp(width, run.pick(16, 4)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    context = multiprocessing.get_context("spawn")
    ended = context.Event()
    hogs = [context.Process(target=burn, args=(ended, cpu), daemon=True) for _ in range(2)]
    for hog in hogs:
        hog.start()
    run.begin()
    source = feeding.loader(Vectors(width), batch_size=32, num_workers=2, drop_last=True)
    count = 0
    steps = feeding.steps(source, run.running)
    for batch in steps:
        if count == 0:
            os.sched_setaffinity(0, {cpu})
        inputs, targets = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        stamps.item(loss.detach())
        count += 1
    ended.set()
    run.done(count)
    for hog in hogs:
        hog.join()


if __name__ == "__main__":
    main()
