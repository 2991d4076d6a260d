"""Inference: a transformer writes one token at a time and each token is read back. No training."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from models import Transformer

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length = run.pick(256, 32)
    model = Transformer(run.pick(768, 64), run.pick(12, 2), run.pick(12, 2), length=length).to(run.device).eval()
    run.begin()
    count = 0
    with torch.no_grad():
        while run.running():
            tokens = torch.zeros(1, 1, dtype=torch.long, device=run.device)
            while tokens.shape[1] < length and run.running():
                with stamps.step:
                    with stamps.forward, job.autocast(run.device):
                        token = model(tokens)[:, -1:].argmax(-1)
                        tokens = torch.cat([tokens, token], 1)
                    stamps.item(token)
                count += 1
    run.done(count)


if __name__ == "__main__":
    main()
