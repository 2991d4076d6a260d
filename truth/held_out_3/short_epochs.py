"""Many short epochs over compressed pictures, with loader processes that persist; decoding is the bottleneck.

An epoch has 24 batches. A validation of 3 batches follows it, with a loader process of its own. A batch takes several
times longer to decode than to train on, although three processes share the work.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import bz2

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
SIDE = 192


class Pictures(Dataset):
    """Compressed pictures. Decoding one takes a few milliseconds."""

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.packed = [bz2.compress(bytes(torch.randint(16, (3 * SIDE * SIDE,), dtype=torch.uint8).tolist()), 1)
                       for _ in range(8)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        picture = torch.frombuffer(bytearray(bz2.decompress(self.packed[index % 8])), dtype=torch.uint8)
        picture = picture.view(1, 3, SIDE, SIDE).float().div_(16).roll(index, dims=3)
        return nn.functional.interpolate(picture, self.size, mode="bilinear", antialias=True)[0], index % 8


def network(width, depth):
    layers = [nn.Conv2d(3, width, 3, stride=2, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, groups=width // 4)]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, 8))


def validate(model, source, device):
    model.eval()
    right = torch.zeros((), device=device)
    with torch.inference_mode():
        for batch in feeding.batches(source):
            pictures, kinds = stamps.to_device(batch, device)
            with stamps.forward:
                right += (model(pictures).argmax(1) == kinds).float().mean()
    model.train()
    return stamps.item(right)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, rows = run.pick((64, 32), (16, 4))
    model = network(run.pick(64, 8), run.pick(5, 1)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    training, unseen = Pictures(24 * rows, size), Pictures(3 * rows, size)
    run.begin()
    shared = {"batch_size": rows, "persistent_workers": True, "pin_memory": run.pick(True, False)}
    source = feeding.loader(training, shuffle=True, num_workers=3, prefetch_factor=4, **shared)
    held_back = feeding.loader(unseen, num_workers=1, **shared)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    count = 0
    while run.running():
        for batch in feeding.steps_of_epoch(source):
            pictures, kinds = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(pictures), kinds)
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
            stamps.item(loss.detach())
            count += 1
            if not run.running():
                break
        else:
            with stamps.host:
                schedule.step()
            with stamps.evaluation:
                validate(model, held_back, run.device)
    run.done(count)


if __name__ == "__main__":
    main()
