"""A thread of the trainer computes edit distances in pure Python and so takes the interpreter from the training thread.

Python runs one thread at a time. Again and again the training thread waits until the other thread gives the interpreter
back. Its kernels are small: host-bound. The images stay on the device and are augmented there, which is `host`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random
import threading

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["DataLoading", "NcclCollective"]}
CLASSES = 26
# Seconds until a waiting thread gets the interpreter. Python's default is 0.005.
SWITCH = 0.001


def edit_distance(first, second):
    line = list(range(len(second) + 1))
    for row, left in enumerate(first, 1):
        corner, line[0] = line[0], row
        for column, right in enumerate(second, 1):
            corner, line[column] = line[column], min(line[column] + 1, line[column - 1] + 1, corner + (left != right))
    return line[-1]


class Reporter:
    """Compares the latest answers with random texts, again and again."""

    def __init__(self):
        self.answers, self.best, self.ended = [0] * 64, None, threading.Event()
        self.thread = threading.Thread(target=self.work, name="reporter", daemon=True)
        self.thread.start()

    def work(self):
        chance = random.Random(0)
        while not self.ended.is_set():
            text = [chance.randrange(CLASSES) for _ in range(128)]
            distance = edit_distance(self.answers, text)
            self.best = distance if self.best is None else min(self.best, distance)

    def stop(self):
        self.ended.set()
        self.thread.join()


def augment(images):
    """Flip half of the images, change their brightness and blank one column in each."""
    rows, _, _, size = images.shape
    flip = torch.rand(rows, 1, 1, 1, device=images.device) < 0.5
    images = torch.where(flip, images.flip(-1), images)
    images = images * torch.empty(rows, 1, 1, 1, device=images.device).uniform_(0.8, 1.2)
    column = torch.randint(size, (rows, 1, 1, 1), device=images.device)
    return images.masked_fill(torch.arange(size, device=images.device) == column, 0.0)


def network(width, depth):
    layers = [nn.Conv2d(1, width, 3, stride=2, padding=1)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    sys.setswitchinterval(SWITCH)
    rows, size = run.pick((64, 32), (4, 8))
    model = network(run.pick(32, 4), run.pick(6, 2)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.rand(1024, 1, size, size, device=run.device)
    classes = torch.randint(CLASSES, (1024,), device=run.device)
    run.begin()
    reporter = Reporter()
    count = 0
    while run.running():
        with stamps.step:
            at = count * rows % 1024
            batch = augment(images[at:at + rows])
            wanted = classes[at:at + rows]
            with stamps.forward:
                guess = model(batch)
                loss = nn.functional.cross_entropy(guess, wanted)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            if count % 10 == 0:
                best = guess.detach().argmax(1)
                with stamps.gpu if run.device.type == "cuda" else stamps.host:
                    reporter.answers = best.tolist()
        count += 1
    run.done(count)
    reporter.stop()


if __name__ == "__main__":
    main()
