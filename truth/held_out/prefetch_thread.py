"""Two home-made prefetch threads decode into a queue instead of a DataLoader; loading is the bottleneck.

The threads live in the training process and stamp `feed` and `feed_idle` themselves.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import bz2
import queue
import threading

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}


def prefetch(packed, size, ready, ended, pinned):
    while not ended.is_set():
        with stamps.feed:
            rows = []
            for _ in range(size):
                plain = bz2.decompress(packed)
                rows.append(torch.frombuffer(bytearray(plain[:256]), dtype=torch.uint8).float() / 16)
            batch = torch.stack(rows)
            batch = batch.pin_memory() if pinned else batch
        with stamps.feed_idle:
            while not ended.is_set():
                try:
                    ready.put(batch, timeout=0.2)
                    break
                except queue.Full:
                    continue


class Energy(nn.Module):
    """An energy model: the loss contrasts data with noise."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Bilinear(width, width, 1)
        self.skip = nn.Linear(width, 1)

    def forward(self, inputs):
        return self.gate(inputs, inputs) + self.skip(inputs)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    packed = bz2.compress(bytes(torch.randint(0, 16, (60_000,), dtype=torch.uint8).tolist()))
    model = Energy(256).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, nesterov=True, momentum=0.9)
    ready, ended = queue.Queue(maxsize=4), threading.Event()
    pinned = run.device.type == "cuda"
    threads = [threading.Thread(target=prefetch, args=(packed, 16, ready, ended, pinned)) for _ in range(2)]
    run.begin()
    for thread in threads:
        thread.start()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                rows = ready.get()
            (rows,) = stamps.to_device([rows], run.device)
            with stamps.forward:
                loss = (model(rows) - model(torch.randn_like(rows))).mean()
                loss = loss + 0.01 * model(rows).square().mean()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
        count += 1
    ended.set()
    run.done(count)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
