"""A whole training step of an MLP-Mixer captured as one CUDA graph and replayed; the GPU is the bottleneck.

Replays contain forward, backward and optimizer: the host cannot tell them apart, so the replay is `host`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective", "OptimizerStep"]}
CHANNELS = 16


class Patches(Dataset):
    def __init__(self, patches):
        self.bank = torch.randn(128, patches, CHANNELS)

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return self.bank[index % 128], index % 16


class Mixer(nn.Module):
    def __init__(self, patches, width, depth):
        super().__init__()
        self.stem = nn.Linear(CHANNELS, width)
        self.tokens = nn.ModuleList(nn.Linear(patches, patches) for _ in range(depth))
        self.channels = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, image):
        image = self.stem(image)
        for tokens, channels in zip(self.tokens, self.channels):
            image = image + torch.tanh(tokens(image.transpose(1, 2))).transpose(1, 2)
            image = image + torch.tanh(channels(image))
        return self.head(image.mean(1))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    patches, width, size = run.pick((196, 768, 256), (16, 32, 4))
    model = Mixer(patches, width, run.pick(12, 2)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    image = torch.zeros(size, patches, CHANNELS, device=run.device)
    target = torch.zeros(size, dtype=torch.long, device=run.device)

    def train():
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        return loss

    replay = capture(train, run.device)
    run.begin()
    source = feeding.loader(Patches(patches), batch_size=size, num_workers=8, pin_memory=run.pick(True, False))
    count = 0
    for inputs, targets in feeding.steps(source, run.running):
        with stamps.host:
            image.copy_(inputs, non_blocking=True)
            target.copy_(targets, non_blocking=True)
            replay()
        stamps.synchronize(run.device)
        count += 1
    run.done(count)


def capture(train, device):
    """A function that replays `train` as a graph; on a CPU, `train` itself."""
    if device.type == "cpu":
        return train
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    return graph.replay


if __name__ == "__main__":
    main()
