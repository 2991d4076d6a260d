"""Batch inference: a vision transformer in bf16 goes over a dataset with a DataLoader and writes its answers to a file.

No gradients and no optimizer. Each batch's answers are read back before the next one starts.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import tempfile

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "inference", "absent": ["NcclCollective", "OptimizerStep"]}


class Archive(Dataset):
    def __init__(self, size):
        self.images = torch.randint(256, (64, 3, size, size), dtype=torch.uint8)

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        return index, self.images[index % 64]


class Vision(nn.Module):
    def __init__(self, size, patch, width, depth, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.place = nn.Parameter(torch.zeros((size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layers(hidden).mean(1))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size = run.pick(224, 32)
    model = Vision(size, 16, run.pick(768, 32), run.pick(12, 2), run.pick(12, 2))
    model = model.to(run.device, dtype=torch.bfloat16).eval()
    run.begin()
    source = feeding.loader(Archive(size), batch_size=run.pick(128, 4), num_workers=4, pin_memory=run.pick(True, False))
    count = 0
    with tempfile.TemporaryFile("w") as answers, torch.inference_mode():
        for batch in feeding.steps(source, run.running):
            numbers = batch[0].tolist()
            (images,) = stamps.to_device([batch[1]], run.device)
            with stamps.host:
                images = images.to(torch.bfloat16).div_(255)
            with stamps.forward:
                sure, kind = model(images).float().softmax(1).max(1)
            with stamps.gpu if run.device.type == "cuda" else stamps.host:
                sure, kind = sure.tolist(), kind.tolist()
            with stamps.host:
                for row in zip(numbers, kind, sure):
                    answers.write("%d %d %.3f\n" % row)
            count += 1
    run.done(count)


if __name__ == "__main__":
    main()
