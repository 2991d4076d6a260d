"""Segmentation of volumes with a 3-D U-Net: patches from persistent loaders, a whole volume scored after each epoch. GPU-bound.

The loss is a sum over three resolutions. The evaluation slides over a volume, copies the answer to the CPU and counts there
with NumPy how well each class overlaps. Cutting a patch takes a few milliseconds, a step takes tens of them.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import itertools
import random

import feeding
import job
import numpy
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
CLASSES = 4


def make_volumes(count, size):
    """Volumes of noise, and the class of each voxel."""
    volumes = torch.randint(-1000, 1000, (count, size, size, size), dtype=torch.int16)
    return volumes, (volumes // 16 % CLASSES).to(torch.uint8)


class Patches(Dataset):
    """Random parts of volumes, some of them mirrored."""

    def __init__(self, volumes, labels, side, count):
        self.volumes, self.labels, self.side, self.count = volumes, labels, side, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        number, room = random.randrange(len(self.volumes)), self.volumes.shape[1] - self.side
        z, y, x = (random.randint(0, room) for _ in range(3))
        part = (number, slice(z, z + self.side), slice(y, y + self.side), slice(x, x + self.side))
        values, labels = self.volumes[part].float().div_(577), self.labels[part]
        if random.random() < 0.5:
            values, labels = values.flip(2), labels.flip(2)
        return values[None], labels.contiguous()


class Pair(nn.Sequential):
    """Two convolutions."""

    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.01),
            nn.Conv3d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.LeakyReLU(0.01))


class UNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        widths = [width * 2 ** level for level in range(depth + 1)]
        self.down = nn.ModuleList(Pair(*pair) for pair in itertools.pairwise([1, *widths]))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * width, width, 2, stride=2) for width in widths[:-1])
        self.join = nn.ModuleList(Pair(2 * width, width) for width in widths[:-1])
        self.heads = nn.ModuleList(nn.Conv3d(width, CLASSES, 1) for width in widths[:-1])

    def forward(self, values):
        """What each resolution guesses, the finest one first."""
        kept = []
        for level, pair in enumerate(self.down):
            values = pair(values if level == 0 else nn.functional.max_pool3d(values, 2))
            kept.append(values)
        guesses = []
        for level in reversed(range(len(self.up))):
            values = self.join[level](torch.cat([kept[level], self.up[level](values)], 1))
            guesses.insert(0, self.heads[level](values))
        return guesses


def loss_of(guess, labels):
    """Cross-entropy, and how badly the classes overlap."""
    guess = guess.float()
    chances = guess.softmax(1)
    wanted = torch.stack([labels == kind for kind in range(CLASSES)], 1).float()
    shared, sizes = (chances * wanted).sum((2, 3, 4)), (chances + wanted).sum((2, 3, 4))
    return nn.functional.cross_entropy(guess, labels) - (2 * shared / (sizes + 1)).mean()


def evaluate(run, model, volume, labels, side):
    """How well the classes overlap on a whole volume."""
    with stamps.evaluation, torch.no_grad():
        model.eval()
        (values,) = stamps.to_device([volume.float().div_(577)[None, None]], run.device)
        total = torch.zeros(CLASSES, *volume.shape, device=run.device)
        for z, y, x in itertools.product([0, volume.shape[0] - side], repeat=3):
            part = (..., slice(z, z + side), slice(y, y + side), slice(x, x + side))
            with stamps.forward, job.autocast(run.device):
                total[part] += model(values[part])[0][0].float()
        found = total.argmax(0).to(torch.uint8)
        with stamps.gpu if found.is_cuda else stamps.host:
            found = found.cpu()
        found, labels = found.numpy(), labels.numpy()
        scores = []
        for kind in range(1, CLASSES):
            here, wanted = found == kind, labels == kind
            both = numpy.count_nonzero(here & wanted)
            scores.append(2 * both / max(1, numpy.count_nonzero(here) + numpy.count_nonzero(wanted)))
        model.train()
    return scores


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, side, rows = run.pick((160, 112, 2), (24, 16, 2))
    volumes, labels = make_volumes(run.pick(6, 2), size)
    model = UNet(run.pick(48, 4), run.pick(3, 2)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=1000, power=0.9)
    run.begin()
    source = feeding.loader(Patches(volumes[1:], labels[1:], side, 32 * rows), batch_size=rows, num_workers=4,
                            persistent_workers=True, pin_memory=run.pick(True, False))
    count, history = 0, []
    while run.running():
        for values, wanted in feeding.steps_of_epoch(source):
            values, wanted = stamps.to_device([values, wanted], run.device)
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                wanted = wanted.long()
                with job.autocast(run.device):
                    guesses = model(values)
                loss = sum(loss_of(guess, wanted[:, ::2 ** level, ::2 ** level, ::2 ** level]) / 2 ** level
                           for level, guess in enumerate(guesses))
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 12.0)
                optimizer.step()
            history.append(stamps.item(loss.detach()))
            count += 1
            if not run.running():
                break
        else:
            schedule.step()
            evaluate(run, model, volumes[0], labels[0], side)
    run.done(count)


if __name__ == "__main__":
    main()
