"""Graph-convolution training under cpu.max of a quarter of a CPU: throttling is the bottleneck.

Needs a writable cgroup v2 folder with the cpu controller (ZERNEL_TRUTH_CGROUP, default: a child of the process's own);
skips without it.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import atexit

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "throttled", "absent": ["DataLoading", "NcclCollective"]}


def throttle():
    """Move this process into a new cgroup with 25 ms of CPU time per 100 ms, until it exits."""
    base = os.environ.get("ZERNEL_TRUTH_CGROUP")
    if not base:
        with open("/proc/self/cgroup") as file:
            own = [line.strip().split("::", 1)[1] for line in file if line.startswith("0::")]
        base = "/sys/fs/cgroup" + (own[0] if own else "")
    folder = os.path.join(base, f"truth-{os.getpid()}")
    try:
        os.mkdir(folder)
        write(folder + "/cpu.max", b"25000 100000")
        write(folder + "/cgroup.procs", b"0")
    except OSError as error:
        if os.path.isdir(folder):
            os.rmdir(folder)
        job.skip(f"cpu.max cannot be set: {error}")
    atexit.register(leave, base, folder)


def leave(base, folder):
    write(base + "/cgroup.procs", b"0")
    os.rmdir(folder)


def write(path, text):
    """Write to an existing file only: where no cgroup is mounted, there is none."""
    file = os.open(path, os.O_WRONLY)
    os.write(file, text)
    os.close(file)


class GraphNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, adjacency, features):
        for layer in self.layers:
            features = torch.relu(adjacency @ layer(features))
        return features


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    nodes, width = run.pick((256, 128), (32, 16))
    model = GraphNet(width, run.pick(20, 4)).to(run.device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4)
    adjacency = torch.softmax(torch.randn(nodes, nodes, device=run.device), 1)
    features = torch.randn(nodes, width, device=run.device)
    throttle()
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.forward:
                loss = (model(adjacency, features) - features).square().mean()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
