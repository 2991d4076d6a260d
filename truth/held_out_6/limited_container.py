"""A small job in a container with 60 % of a CPU: loaders, training, evaluation, checkpoints. Throttling is the bottleneck.

The model sorts clouds of points and launches tiny kernels without a pause, so it would fill a CPU on its own. Two loader
processes, which have little to do, are in the same cgroup. Needs a writable cgroup v2 folder with the cpu controller
(ZERNEL_TRUTH_CGROUP, default: the process's own); skips without it.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import atexit
import tempfile

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "throttled", "absent": ["NcclCollective"]}
KINDS, EVALUATE, SAVE = 12, 40, 100


def limit():
    """Move this process into a new cgroup with 60 ms of CPU time per 100 ms, until it exits."""
    base = os.environ.get("ZERNEL_TRUTH_CGROUP")
    if not base:
        with open("/proc/self/cgroup") as file:
            own = [line.strip().split("::", 1)[1] for line in file if line.startswith("0::")]
        base = "/sys/fs/cgroup" + (own[0] if own else "")
    folder = os.path.join(base, f"truth-{os.getpid()}")
    try:
        os.mkdir(folder)
        write(folder + "/cpu.max", b"60000 100000")
        write(folder + "/cgroup.procs", b"0")
    except OSError as error:
        if os.path.isdir(folder):
            os.rmdir(folder)
        job.skip(f"cpu.max cannot be set: {error}")
    atexit.register(leave, base, folder)


def leave(base, folder):
    """Move all processes back and remove the cgroup."""
    with open(folder + "/cgroup.procs") as file:
        for process in file.read().split():
            write(base + "/cgroup.procs", process.encode())
    os.rmdir(folder)


def write(path, text):
    """Write to an existing file only: where no cgroup is mounted, there is none."""
    file = os.open(path, os.O_WRONLY)
    os.write(file, text)
    os.close(file)


class Clouds(Dataset):
    """Clouds of points in memory, turned at random."""

    def __init__(self, points, seed):
        generator = torch.Generator().manual_seed(seed)
        self.clouds = torch.randn(KINDS, points, 3, generator=generator)

    def __len__(self):
        return 1 << 17

    def __getitem__(self, index):
        return self.clouds[index % KINDS] * (0.5 + index % 7 / 7), index % KINDS


class Mix(nn.Module):
    """Each point meets the mean and the maximum of all points."""

    def __init__(self, inner, outer):
        super().__init__()
        self.own, self.mean, self.most = (nn.Linear(inner, outer) for _ in range(3))
        self.norm = nn.LayerNorm(outer)

    def forward(self, points):
        all_points = self.mean(points.mean(1, keepdim=True)) + self.most(points.amax(1, keepdim=True))
        return nn.functional.gelu(self.norm(self.own(points) + all_points))


class Sorter(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.mixes = nn.Sequential(*(Mix(width if index else 3, width) for index in range(depth)))
        self.head = nn.Linear(width, KINDS)

    def forward(self, points):
        return self.head(self.mixes(points).amax(1))


def evaluate(run, model, points):
    """The share of clouds of the other dataset that are sorted right."""
    clouds = Clouds(points, 2)
    right = 0
    with stamps.evaluation, torch.no_grad():
        model.eval()
        for start in range(0, 32, 16):
            rows, kinds = zip(*(clouds[index] for index in range(start, start + 16)))
            rows, kinds = stamps.to_device([torch.stack(rows), torch.tensor(kinds)], run.device)
            with stamps.forward:
                found = model(rows).argmax(1)
            right += stamps.item((found == kinds).sum())
        model.train()
    return right / 32


def save(run, model, optimizer, file):
    with stamps.checkpoint:
        stamps.synchronize(run.device)
        file.seek(0)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    points, rows = run.pick((64, 16), (16, 8))
    model = Sorter(run.pick(64, 24), run.pick(16, 12)).to(run.device)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    limit()
    run.begin()
    source = feeding.loader(Clouds(points, 1), batch_size=rows, shuffle=True, num_workers=2, drop_last=True,
                            prefetch_factor=6, pin_memory=run.pick(True, False))
    count = 0
    with tempfile.TemporaryFile(prefix="truth-clouds-") as file:
        for batch in feeding.steps(source, run.running):
            clouds, kinds = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(clouds), kinds, label_smoothing=0.1)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            if count % EVALUATE == 0:
                evaluate(run, model, points)
            if count % SAVE == 0:
                save(run, model, optimizer, file)
        run.done(count)


if __name__ == "__main__":
    main()
