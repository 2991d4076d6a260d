"""Slow decode with 0, 2 or 8 loader workers, pinned or not: loading is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import CompressedVectors, Mlp

# Decoding a sample takes about 1 ms of CPU time, a training step about 3 ms for 64 of them.
KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="loader processes; 0 decodes in the training thread [2]")
    parser.add_argument("--pin", action="store_true", help="pin the batches' memory")
    parser.add_argument("--repeats", type=int, default=4, help="cost of decoding a sample, about 0.25 ms each [4]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    width = run.pick(512, 64)
    model = Mlp(width, run.pick(8, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(CompressedVectors(width, args.repeats), batch_size=run.pick(64, 8), num_workers=args.workers,
                            pin_memory=args.pin and run.device.type == "cuda", drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        inputs, targets = stamps.to_device(batch, run.device)
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
