"""Autoencoder on records read from a file in many small uncached reads; the disk is the bottleneck.

At the start the script measures a read and sets the reads per record so that a batch takes about 60 ms of disk time.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import mmap
import tempfile
import time

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
BLOCK = 4096
BLOCKS = 16_384


class Records(Dataset):
    def __init__(self, path, batch):
        self.path, self.file = path, None
        self.reads = 1
        with open(path, "wb") as file:
            file.write(os.urandom(BLOCK * BLOCKS))
            os.fsync(file.fileno())
        begin = time.monotonic()
        for index in range(64):
            self[index]
        per_read = (time.monotonic() - begin) / 64
        self.reads = max(1, int(0.06 / batch / per_read))
        self.file = None

    def open(self):
        """Past the page cache where the file system can, otherwise with the cache dropped before each read."""
        try:
            self.file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self.file = os.open(self.path, os.O_RDONLY)
        self.buffer = mmap.mmap(-1, BLOCK)

    def __len__(self):
        return BLOCKS

    def __getitem__(self, index):
        if self.file is None:
            self.open()
        for read in range(self.reads):
            offset = (index * 7919 + read * 104_729) % BLOCKS * BLOCK
            os.posix_fadvise(self.file, offset, BLOCK, os.POSIX_FADV_DONTNEED)
            os.preadv(self.file, [self.buffer], offset)
        return torch.frombuffer(bytearray(self.buffer[:1024]), dtype=torch.uint8).float() / 255.0


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--folder", default=".", help="folder for the 64 MiB file [.]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    model = nn.Sequential(nn.Linear(1024, 128), nn.SiLU(), nn.Linear(128, 16), nn.SiLU(), nn.Linear(16, 128), nn.SiLU(),
                          nn.Linear(128, 1024)).to(run.device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    with tempfile.NamedTemporaryFile(dir=args.folder, prefix="truth-disk-") as file:
        records = Records(file.name, 32)
        run.begin()
        source = feeding.loader(records, batch_size=32, shuffle=True, num_workers=1, pin_memory=run.pick(True, False))
        count = 0
        for record in feeding.steps(source, run.running):
            (record,) = stamps.to_device([record], run.device)
            with stamps.forward:
                loss = nn.functional.mse_loss(model(record), record)
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
            count += 1
    run.done(count)


if __name__ == "__main__":
    main()
