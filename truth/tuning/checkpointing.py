"""Activation checkpointing: the backward pass runs each block's forward again; the GPU is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import Tokens, Transformer
from torch.utils.checkpoint import checkpoint

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class Checkpointed(Transformer):
    def forward(self, tokens):
        hidden = self.token(tokens) + self.position[:, :tokens.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, self.mask.to(hidden.dtype), use_reentrant=False)
        return self.head(hidden)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length = run.pick(256, 32)
    model = Checkpointed(run.pick(1024, 64), run.pick(6, 2), run.pick(16, 2), length=length).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    run.begin()
    source = feeding.loader(Tokens(length), batch_size=run.pick(96, 4), num_workers=2, pin_memory=run.pick(True, False),
                            drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        tokens, targets = stamps.to_device(batch, run.device)
        with stamps.forward, job.autocast(run.device):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
