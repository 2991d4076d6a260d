"""A recommender beside somebody else's compression, which has twice as many busy processes as there are CPUs; host-bound.

Nothing is pinned: the trainer gets its share of all CPUs. Its tables hold 8-bit numbers with a scale for each row. The rows of a
batch are unpacked, trained, and rounded back at random, by an update written by hand. Visits come from a mapped file, which takes
little. Small layers, tiny kernels.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import subprocess
import tempfile

import job
import numpy
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "host", "absent": ["NcclCollective"], "note": "the training thread has to wait for a CPU"}
NUMBERS = 8
# Ends with its parent.
COMPRESS = """
import bz2, os, random
text = random.Random(1).randbytes(1 << 16).hex().encode()
while os.getppid() == {parent}:
    bz2.compress(text, 9)
"""


class Visits:
    """Visits in a mapped file: entries of the tables, numbers, and whether something was bought."""

    def __init__(self, path, tables, entries, count):
        draw = numpy.random.default_rng(1)
        rows = draw.integers(0, entries, (count, tables + NUMBERS + 1), dtype=numpy.int32)
        rows[:, :tables] += entries * numpy.arange(tables, dtype=numpy.int32)
        rows.tofile(path)
        self.rows = numpy.memmap(path, numpy.int32, "r", shape=rows.shape)
        self.tables, self.entries = tables, entries

    def batch(self, rows):
        start = int(torch.randint(len(self.rows) - rows, ()))
        picked = torch.from_numpy(numpy.array(self.rows[start:start + rows]))
        places, within = picked[:, :self.tables].unique(return_inverse=True)
        numbers = picked[:, self.tables:-1].float() / self.entries
        return places.long(), within, numbers, (picked[:, -1] % 2).float()


class Tables:
    """All tables in one, in 8 bits. Adagrad with one number per row."""

    def __init__(self, rows, width, device):
        self.packed = torch.randint(-20, 20, (rows, width), dtype=torch.int8, device=device)
        self.scale = torch.full((rows, 1), 0.002, device=device)
        self.moved = torch.full((rows, 1), 1e-4, device=device)

    def unpack(self, places):
        return (self.packed[places] * self.scale[places]).requires_grad_()

    @torch.no_grad()
    def update(self, places, rows, rate):
        self.moved[places] += rows.grad.square().mean(1, keepdim=True)
        rows = rows - rate * rows.grad / self.moved[places].sqrt()
        scale = rows.abs().amax(1, keepdim=True) / 127 + 1e-8
        self.packed[places] = (rows / scale + torch.rand_like(rows)).floor().clamp(-127, 127).to(torch.int8)
        self.scale[places] = scale


class Crosses(nn.Module):
    """Multiplies the input with itself, layer by layer, beside a plain network."""

    def __init__(self, width, depth, hidden):
        super().__init__()
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        layers = [nn.Sequential(nn.Linear(hidden if index else width, hidden), nn.LayerNorm(hidden), nn.ReLU())
                  for index in range(depth)]
        self.plain, self.head = nn.Sequential(*layers), nn.Linear(width + hidden, 1)

    def forward(self, inputs):
        crossed = inputs
        for cross in self.crosses:
            crossed = crossed + inputs * cross(crossed)
        return self.head(torch.cat([crossed, self.plain(inputs)], 1)).squeeze(1)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    tables, entries, width, rows = run.pick((10, 20_000, 16, 256), (4, 500, 8, 32))
    model = Crosses(tables * width + NUMBERS, run.pick(8, 3), run.pick(128, 16)).to(run.device)
    store = Tables(tables * entries, width, run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    command = [sys.executable, "-c", COMPRESS.format(parent=os.getpid())]
    with tempfile.NamedTemporaryFile(prefix="truth-visits-") as file:
        visits = Visits(file.name, tables, entries, run.pick(200_000, 5000))
        others = [subprocess.Popen(command) for _ in range(2 * len(os.sched_getaffinity(0)))]
        run.begin()
        count = 0
        while run.running():
            with stamps.step:
                with stamps.data:
                    batch = visits.batch(rows)
                places, within, numbers, bought = stamps.to_device(batch, run.device)
                with stamps.forward:
                    unpacked = store.unpack(places)
                    inputs = torch.cat([unpacked[within].flatten(1), numbers], 1)
                    loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), bought)
                stamps.backward(loss)
                with stamps.optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
                    store.update(places, unpacked, 0.01)
                if count % 10 == 0:
                    stamps.item(loss.detach())
            count += 1
        run.done(count)
        for other in others:
            other.terminate()
            other.wait()


if __name__ == "__main__":
    main()
