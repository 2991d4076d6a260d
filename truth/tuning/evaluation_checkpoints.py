"""Training with an evaluation every 40 steps and a checkpoint every 60; host-bound while it trains."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile

import feeding
import job
import stamps
import torch
from models import Mlp, Vectors

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}


def evaluate(model, source, device):
    """Mean loss over ten batches."""
    losses = []
    model.eval()
    with torch.no_grad():
        for batch in feeding.batches(source):
            inputs, targets = stamps.to_device(batch, device)
            with stamps.forward:
                losses.append(torch.nn.functional.cross_entropy(model(inputs), targets))
            if len(losses) == 10:
                break
    model.train()
    return stamps.item(torch.stack(losses).mean())


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width = run.pick(512, 64)
    model = Mlp(width, run.pick(16, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Vectors(width, samples=8192), batch_size=32, num_workers=2, drop_last=True)
    held_back = feeding.loader(Vectors(width, samples=320), batch_size=32)
    count = 0
    with tempfile.TemporaryDirectory() as folder:
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
            if count % 40 == 0:
                with stamps.evaluation:
                    evaluate(model, held_back, run.device)
            if count % 60 == 0:
                with stamps.checkpoint:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder + "/last.pt")
    run.done(count)


if __name__ == "__main__":
    main()
