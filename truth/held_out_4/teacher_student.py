"""A wide teacher without gradients and a smaller student, on images that stay on the GPU for the whole run. GPU-bound.

The order of an epoch is shuffled on the CPU and copied once; a batch is a slice of it. Both networks are convolutions of
milliseconds each. The student is evaluated after each epoch. No loss is read within an epoch.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "gpu", "absent": ["DataLoading", "NcclCollective"]}
CLASSES = 50
HEAT = 4.0


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, hidden):
        return nn.functional.relu(hidden + self.body(hidden))


def network(width, blocks):
    stem = [nn.Conv2d(3, width, 4, stride=4, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    body = [Residual(width) for _ in range(blocks)]
    model = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return model.to(memory_format=torch.channels_last)


class Resident:
    """All images, on the device, as bytes."""

    def __init__(self, count, size, device):
        self.device = device
        self.images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, device=device)
        self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.classes = torch.randint(CLASSES, (count,), device=device)

    def pick(self, rows):
        """Some images, each as it is or mirrored, and their classes."""
        images = self.images[rows].float().div_(127.5).sub_(1.0)
        mirrored = torch.rand(len(rows), 1, 1, 1, device=self.device) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
        return images.contiguous(memory_format=torch.channels_last), self.classes[rows]

    def epoch(self, size):
        """The rows of each batch, in random order."""
        (order,) = stamps.to_device([torch.randperm(len(self.images))], self.device)
        return order.split(size)


def distill(teacher, student, images, classes):
    """The student's loss: half from the classes, half from the teacher's softened guess."""
    with torch.no_grad():
        wanted = (teacher(images).float() / HEAT).softmax(1)
    guess = student(images).float()
    soft = nn.functional.kl_div((guess / HEAT).log_softmax(1), wanted, reduction="batchmean") * HEAT ** 2
    return 0.5 * soft + 0.5 * nn.functional.cross_entropy(guess, classes, label_smoothing=0.1)


def evaluate(run, student, images, size):
    with stamps.evaluation, torch.no_grad():
        student.eval()
        right = torch.zeros((), device=run.device)
        for rows in images.epoch(size)[:4]:
            batch, classes = images.pick(rows)
            with stamps.forward, job.autocast(run.device):
                right += (student(batch).argmax(1) == classes).sum()
        stamps.item(right)
        student.train()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    stored, size, rows = run.pick((8192, 128, 256), (64, 8, 4))
    teacher = network(run.pick(384, 16), run.pick(4, 1)).to(run.device).eval()
    student = network(run.pick(256, 8), run.pick(2, 1)).to(run.device)
    images = Resident(stored, size, run.device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100_000)
    ahead = stamps.RunAhead(run.device)
    run.begin()
    count = 0
    while run.running():
        for picked in images.epoch(rows):
            if not run.running():
                break
            with stamps.step:
                batch, classes = images.pick(picked)
                with stamps.forward, job.autocast(run.device):
                    loss = distill(teacher, student, batch, classes)
                with stamps.optimizer:
                    optimizer.zero_grad(set_to_none=True)
                stamps.backward(loss)
                with stamps.optimizer:
                    optimizer.step()
                schedule.step()
                ahead.step()
            count += 1
        if run.running():
            evaluate(run, student, images, rows)
    run.done(count)


if __name__ == "__main__":
    main()
