"""Two towers, for pictures and for captions, fed by the training thread itself from six mapped shards; input-bound.

No DataLoader and no thread. For each pair the thread crops and resizes a picture on the CPU and looks up the words of its
caption. A batch of 256 pairs takes far longer than a step of the two small towers. All of it is `data`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import json
import mmap
import random
import tempfile

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
SHARDS = 6
WORDS = ("a the of on under red green blue small large old new dog cat tree house river street bird boat car man woman "
         "child sits runs waits flies swims near two three many").split()


class Shard:
    """A mapped file of pictures, and one of captions with a line per picture."""

    def __init__(self, folder, number, pictures, size):
        path = f"{folder}/pictures-{number}"
        torch.from_file(path, shared=True, size=pictures * 3 * size * size, dtype=torch.uint8).random_(256)
        self.pictures = torch.from_file(path, shared=False, size=pictures * 3 * size * size, dtype=torch.uint8)
        self.pictures = self.pictures.view(pictures, 3, size, size)
        with open(f"{folder}/captions-{number}", "w") as file:
            for row in range(pictures):
                caption = " ".join(random.choices(WORDS, k=random.randint(8, 20)))
                file.write(json.dumps({"id": row, "caption": caption, "source": f"shard-{number}"}) + "\n")
        with open(f"{folder}/captions-{number}", "rb") as file:
            self.captions = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = [0]
        while (end := self.captions.find(b"\n", self.starts[-1])) >= 0:
            self.starts.append(end + 1)

    def pair(self, row):
        line = self.captions[self.starts[row]:self.starts[row + 1]]
        return self.pictures[row], json.loads(line)["caption"]


class Assembler:
    def __init__(self, shards, size, length):
        self.shards, self.size, self.length = shards, size, length
        self.mean = torch.tensor([0.48, 0.46, 0.41]).view(3, 1, 1)
        self.deviation = torch.tensor([0.27, 0.26, 0.28]).view(3, 1, 1)
        self.numbers = {word: number for number, word in enumerate(WORDS, 1)}

    def crop(self, picture):
        """A random part of a picture, resized to the size that the tower wants, with other contrast and brightness."""
        whole = picture.shape[-1]
        side = random.randint(whole // 2, whole)
        top, left = random.randint(0, whole - side), random.randint(0, whole - side)
        part = picture[None, :, top:top + side, left:left + side].float().div(255)
        part = nn.functional.interpolate(part, (self.size, self.size), mode="bilinear", antialias=True)[0]
        part = torch.lerp(part.mean(), part, random.uniform(0.6, 1.4)).mul(random.uniform(0.6, 1.4)).clamp(0, 1)
        part = (part - self.mean) / self.deviation
        return part.flip(-1) if random.random() < 0.5 else part

    def encode(self, caption):
        numbers = [self.numbers[word] for word in caption.split()][:self.length]
        return numbers + [0] * (self.length - len(numbers))

    def batch(self, rows):
        pictures, captions = [], []
        for _ in range(rows):
            shard = random.choice(self.shards)
            picture, caption = shard.pair(random.randrange(len(shard.pictures)))
            pictures.append(self.crop(picture))
            captions.append(self.encode(caption))
        return torch.stack(pictures), torch.tensor(captions)


class Towers(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.pictures = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4), nn.GELU(), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(2 * width, outputs))
        self.words = nn.Embedding(len(WORDS) + 1, width, padding_idx=0)
        self.captions = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, outputs))
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, pictures, captions):
        pictures = nn.functional.normalize(self.pictures(pictures), dim=1)
        captions = nn.functional.normalize(self.captions(self.words(captions).mean(1)), dim=1)
        return self.scale.exp() * pictures @ captions.t()


def contrast(likeness):
    """Each picture belongs to its caption and each caption to its picture."""
    wanted = torch.arange(len(likeness), device=likeness.device)
    return (nn.functional.cross_entropy(likeness, wanted) + nn.functional.cross_entropy(likeness.t(), wanted)) / 2


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    # A single picture is too little work for several threads.
    torch.set_num_threads(1)
    rows, stored, size = run.pick((256, 288, 96), (16, 128, 32))
    with tempfile.TemporaryDirectory() as folder:
        shards = [Shard(folder, number, run.pick(200, 20), stored) for number in range(SHARDS)]
    assembler = Assembler(shards, size, 16)
    model = Towers(run.pick(64, 4), run.pick(256, 8)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.2)
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                batch = assembler.batch(rows)
            pictures, captions = stamps.to_device(batch, run.device)
            with stamps.optimizer:
                optimizer.zero_grad()
            with stamps.forward:
                loss = contrast(model(pictures, captions))
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                with torch.no_grad():
                    model.scale.clamp_(0, 4.6)
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
