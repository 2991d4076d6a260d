"""Residual conv net in fp16 with GradScaler and foreach AdamW; the GPU is the bottleneck."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from models import ConvNet, Images

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class StampedScaler(torch.amp.GradScaler):
    """A GradScaler whose look at the found infinities is labelled as the wait for the GPU that it is."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        found = sum(stamps.item(value) for value in optimizer_state["found_inf_per_device"].values())
        return None if found else optimizer.step(*args, **kwargs)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = ConvNet(run.pick(256, 8), run.pick(12, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    scaler = StampedScaler(run.device.type)
    dtype = run.pick(torch.float16, torch.bfloat16)
    run.begin()
    source = feeding.loader(Images(run.pick(128, 32)), batch_size=run.pick(128, 4), num_workers=4,
                            pin_memory=run.pick(True, False), drop_last=True)
    count = 0
    for batch in feeding.steps(source, run.running):
        images, targets = stamps.to_device(batch, run.device)
        with stamps.forward, job.autocast(run.device, dtype):
            loss = torch.nn.functional.cross_entropy(model(images).float(), targets)
        stamps.backward(scaler.scale(loss))
        with stamps.optimizer:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
