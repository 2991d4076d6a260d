"""DistributedDataParallel over NCCL with one rank: its collectives wait for nobody; the GPU is the bottleneck."""

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
    run.join_ranks(run.pick("nccl", "gloo"))
    length = run.pick(256, 32)
    model = Transformer(run.pick(1024, 64), run.pick(6, 2), run.pick(16, 2), length=length).to(run.device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Tokens(length), batch_size=run.pick(160, 4), num_workers=2, pin_memory=run.pick(True, False),
                            drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        tokens, targets = stamps.to_device(batch, run.device)
        with stamps.forward, job.autocast(run.device):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        stamps.backward(loss)
        with stamps.optimizer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.synchronize(run.device)
        count += 1
    run.done(count)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
