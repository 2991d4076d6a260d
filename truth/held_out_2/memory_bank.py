"""Contrastive learning with a slow second tower and a bank of past keys; the GPU is the bottleneck.

The slow tower runs without gradients and follows the fast one after each step: that update is `host`. A thread of its own
reads the losses: it waits for an event, so the training thread never does.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import copy
import math
import queue
import threading

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class Views(Dataset):
    """Two random crops of one image, as bytes."""

    def __init__(self, size):
        self.size = size
        self.images = torch.randint(256, (64, 3, size + 16, size + 16), dtype=torch.uint8)

    def __len__(self):
        return 1 << 16

    def crop(self, image):
        top, left = torch.randint(16, (2,)).tolist()
        return image[:, top:top + self.size, left:left + self.size]

    def __getitem__(self, index):
        image = self.images[index % 64]
        return torch.stack([self.crop(image), self.crop(image)])


class Tower(nn.Module):
    def __init__(self, width, depth, outputs):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.body = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)])
        self.project = nn.Linear(width, outputs)

    def forward(self, images):
        hidden = self.body(self.stem(images)).mean((2, 3))
        return nn.functional.normalize(self.project(hidden), dim=1)


class Meter:
    """Reads losses in a thread of its own."""

    def __init__(self, device):
        self.device, self.values, self.waiting = device, [], queue.Queue()
        self.thread = threading.Thread(target=self.work, name="meter", daemon=True)
        self.thread.start()

    def work(self):
        while True:
            value, event = self.waiting.get()
            if value is None:
                return
            if event is not None:
                with stamps.gpu:
                    event.synchronize()
            self.values.append(float(value))

    def add(self, loss):
        if self.device.type == "cpu":
            self.waiting.put((loss, None))
            return
        copied = torch.empty((), pin_memory=True)
        copied.copy_(loss, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.waiting.put((copied, event))

    def stop(self):
        self.waiting.put((None, None))
        self.thread.join()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, rows = run.pick((112, 256), (16, 4))
    fast = Tower(run.pick(256, 8), run.pick(8, 2), 128).to(run.device, memory_format=torch.channels_last)
    slow = copy.deepcopy(fast).requires_grad_(False)
    bank = nn.functional.normalize(torch.randn(rows * 64, 128, device=run.device), dim=1)
    answers = torch.zeros(rows, dtype=torch.long, device=run.device)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4, nesterov=True)
    run.begin()
    source = feeding.loader(Views(size), batch_size=rows, shuffle=True, num_workers=6, drop_last=True,
                            pin_memory=run.pick(True, False))
    meter = Meter(run.device)
    ahead = stamps.RunAhead(run.device, depth=1)
    count = 0
    for views in feeding.steps(source, run.running):
        (views,) = stamps.to_device([views], run.device)
        with stamps.host:
            optimizer.param_groups[0]["lr"] = 0.015 * (1 + math.cos(math.pi * min(count / 5000, 1)))
            views = views.float().div_(255).sub_(0.5)
            first = views[:, 0].contiguous(memory_format=torch.channels_last)
            second = views[:, 1].contiguous(memory_format=torch.channels_last)
        with stamps.forward, job.autocast(run.device):
            queries = fast(first)
            with torch.no_grad():
                keys = slow(second)
        with stamps.forward:
            queries, keys = queries.float(), keys.float()
            same = (queries * keys).sum(1, keepdim=True)
            loss = nn.functional.cross_entropy(torch.cat([same, queries @ bank.t()], 1) / 0.1, answers)
        with stamps.optimizer:
            optimizer.zero_grad()
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
        with stamps.host, torch.no_grad():
            for behind, weight in zip(slow.parameters(), fast.parameters()):
                behind.lerp_(weight, 0.01)
            at = count % 64 * rows
            # A loss must not see its bank change: the copy is new, the old one lives as long as the graph.
            bank = torch.cat([bank[:at], keys, bank[at + rows:]])
        if count % 4 == 0:
            with stamps.host:
                meter.add(loss.detach())
        ahead.step()
        count += 1
    run.done(count)
    meter.stop()


if __name__ == "__main__":
    main()
