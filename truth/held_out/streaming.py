"""Speech-like GRU fed by an IterableDataset that reads records from a pipe; the stream is the bottleneck.

A child process writes the records at a fixed rate. No sampler, no length, no shuffling.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import subprocess

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import IterableDataset

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
FRAMES, BANDS = 100, 40
WRITER = """
import os, time
record = os.urandom(%d)
while True:
    os.write(1, record)
    time.sleep(0.002)
""" % (FRAMES * BANDS)


class Stream(IterableDataset):
    def __iter__(self):
        writer = subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            while True:
                record = writer.stdout.read(FRAMES * BANDS)
                if len(record) < FRAMES * BANDS:
                    return
                frames = torch.frombuffer(bytearray(record), dtype=torch.uint8).view(FRAMES, BANDS)
                yield torch.log1p(frames.float()), int(record[0]) % 30
        finally:
            writer.kill()
            writer.wait()


class Listener(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.recurrent = nn.GRU(BANDS, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 30)

    def forward(self, frames):
        return self.head(self.recurrent(frames)[0][:, -1])


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Listener(run.pick(256, 32)).to(run.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
    run.begin()
    source = feeding.loader(Stream(), batch_size=run.pick(32, 8), num_workers=1)
    count = 0
    supply = feeding.endless(source, run.running)
    while run.running():
        with stamps.step:
            batch = next(supply, None)
            if batch is None:
                break
            frames, words = stamps.to_device(batch, run.device)
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(frames), words)
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
            count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
