"""Eight loader workers keep up with a large segmentation net in channels-last bf16; the GPU is the bottleneck.

The host runs up to two steps ahead and reads the loss of an earlier step.
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

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}


class Scenes(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, self.size, self.size, generator=generator)
        return image, (image.sum(0) > 1.5).long()


class Segmenter(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if not i else width << (i - 1), width << i, 3, 2, 1) for i in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(width << i, width << max(i - 1, 0), 4, 2, 1)
                                for i in reversed(range(depth)))
        self.last = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, image):
        skips = []
        for layer in self.down:
            image = nn.functional.silu(layer(image))
            skips.append(image)
        for layer in self.up:
            image = nn.functional.silu(layer(image + skips.pop()))
        return self.last(image)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size = run.pick(256, 32)
    model = Segmenter(run.pick(256, 8), run.pick(4, 2)).to(run.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    run.begin()
    source = feeding.loader(Scenes(size), batch_size=run.pick(32, 2), num_workers=8, prefetch_factor=4,
                            pin_memory=run.pick(True, False))
    ahead = stamps.RunAhead(run.device)
    count = 0
    for batch in feeding.steps(source, run.running):
        image, mask = stamps.to_device(batch, run.device)
        with stamps.host:
            image = image.contiguous(memory_format=torch.channels_last)
        with stamps.forward, job.autocast(run.device):
            loss = nn.functional.cross_entropy(model(image).float(), mask)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        ahead.step()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
