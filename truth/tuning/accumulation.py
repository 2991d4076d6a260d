"""Gradient accumulation: 4 micro-batches per optimizer step, bf16 autocast; the GPU is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Tokens, Transformer

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
MICRO_BATCHES = 4


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length = run.pick(256, 32)
    model = Transformer(run.pick(1024, 64), run.pick(8, 2), run.pick(16, 2), length=length).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Tokens(length), batch_size=run.pick(64, 4), num_workers=2, drop_last=True)
    supply = feeding.endless(source, run.running)
    count = 0
    while run.running():
        with stamps.step:
            losses = []
            for _ in range(MICRO_BATCHES):
                batch = next(supply, None)
                if batch is None:
                    break
                tokens, targets = stamps.to_device(batch, run.device)
                with stamps.forward, job.autocast(run.device):
                    logits = model(tokens)
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
                    loss = loss / MICRO_BATCHES
                stamps.backward(loss)
                losses.append(loss.detach())
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            with stamps.host:
                total = sum(losses, torch.zeros((), device=run.device))
            stamps.item(total)
        count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
