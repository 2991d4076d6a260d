"""Transformer in bf16 autocast with fused AdamW and gradient clipping; the GPU is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Tokens, Transformer

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length = run.pick(256, 32)
    model = Transformer(run.pick(1024, 64), run.pick(8, 2), run.pick(16, 2), length=length).to(run.device)
    options = {"fused": True} if run.device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    run.begin()
    source = feeding.loader(Tokens(length), batch_size=run.pick(64, 4), num_workers=4, pin_memory=run.pick(True, False),
                            drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        tokens, targets = stamps.to_device(batch, run.device)
        with stamps.forward, job.autocast(run.device):
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        stamps.backward(loss)
        with stamps.optimizer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
