"""A masked autoencoder: a wide encoder sees a quarter of each picture's patches, a small decoder draws the rest. GPU-bound.

Three threads unpack and distort whole batches, several ahead of the training thread, which takes finished ones in their order.
They take far less time than the GPU. The learning rate depends on a layer's depth: each layer is a group of the optimizer. All
in bf16. The loss is read back in each step.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import collections
import concurrent.futures
import random
import zlib

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
THREADS, AHEAD = 3, 6


def brighten(pictures, strength):
    return (pictures * (1 + strength)).clamp(0, 1)


def posterize(pictures, strength):
    levels = 4 + int(12 * (1 - strength))
    return (pictures * levels).round() / levels


def solarize(pictures, strength):
    return torch.where(pictures > 1 - strength / 2, 1 - pictures, pictures)


def shift(pictures, strength):
    return pictures.roll(int(strength * pictures.shape[-1] / 4), -1)


def grey(pictures, strength):
    return pictures.lerp(pictures.mean(1, keepdim=True), strength)


class Pictures:
    """Batches of packed pictures, which threads unpack and distort."""

    def __init__(self, rows, size, kind, pinned):
        self.shape, self.kind, self.pinned = (rows, 3, size, size), kind, pinned
        draw = torch.Generator().manual_seed(8)
        self.packed = []
        for _ in range(12):
            coarse = torch.rand(rows, 3, size // 8, size // 8, generator=draw)
            pictures = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
            self.packed.append(zlib.compress((pictures * 63).to(torch.uint8).numpy().tobytes(), 1))
        self.threads = concurrent.futures.ThreadPoolExecutor(THREADS, "pictures", self.begin)
        self.given, self.pending = 0, collections.deque()
        for _ in range(AHEAD):
            self.submit()

    @staticmethod
    def begin():
        """Runs first in each thread."""
        torch.set_num_threads(1)
        stamps.stamp("+feed_idle")

    def submit(self):
        self.pending.append(self.threads.submit(self.work, self.given))
        self.given += 1

    def work(self, number):
        with stamps.feed:
            draw = random.Random(number)
            plain = bytearray(zlib.decompress(self.packed[number % len(self.packed)]))
            pictures = torch.frombuffer(plain, dtype=torch.uint8).view(self.shape).to(self.kind) / 63
            for change in draw.sample((brighten, posterize, solarize, shift, grey), 2):
                pictures = change(pictures, draw.random())
            return pictures.pin_memory() if self.pinned else pictures

    def next(self):
        with stamps.data:
            pictures = self.pending.popleft().result()
            self.submit()
        return pictures

    def end(self):
        self.threads.shutdown(cancel_futures=True)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.norm_2(hidden))


class Masked(nn.Module):
    def __init__(self, size, patch, wide, narrow, depths):
        super().__init__()
        self.patch, patches = patch, (size // patch) ** 2
        self.seen = patches // 4
        self.enter = nn.Linear(3 * patch * patch, wide)
        self.place = nn.Parameter(torch.randn(patches, wide) * 0.02)
        self.encoder = nn.ModuleList(Layer(wide, wide // 64 or 1) for _ in range(depths[0]))
        self.between = nn.Linear(wide, narrow)
        self.missing, self.there = nn.Parameter(torch.zeros(narrow)), nn.Parameter(torch.randn(patches, narrow) * 0.02)
        self.decoder = nn.ModuleList(Layer(narrow, narrow // 64 or 1) for _ in range(depths[1]))
        self.leave = nn.Linear(narrow, 3 * patch * patch)

    def forward(self, pictures):
        """The error of the patches that are not seen."""
        patches = nn.functional.pixel_unshuffle(pictures, self.patch).flatten(2).transpose(1, 2)
        order = torch.rand(patches.shape[:2], device=patches.device).argsort(1)
        seen = order[:, :self.seen, None]
        hidden = self.enter(patches) + self.place
        hidden = hidden.gather(1, seen.expand(-1, -1, hidden.shape[2]))
        for layer in self.encoder:
            hidden = layer(hidden)
        hidden = self.between(hidden)
        full = self.missing.expand(*order.shape, -1).scatter(1, seen.expand_as(hidden), hidden) + self.there
        for layer in self.decoder:
            full = layer(full)
        error = (self.leave(full) - patches).float().square().mean(2)
        return error.gather(1, order[:, self.seen:]).mean()

    def groups(self, rate, decay):
        """The layers of the encoder as groups of weights: the deeper, the higher the rate."""
        depth = len(self.encoder)
        groups = [{"params": list(layer.parameters()), "lr": rate * decay ** (depth - index)}
                  for index, layer in enumerate(self.encoder)]
        inside = {weight for group in groups for weight in group["params"]}
        return groups + [{"params": [weight for weight in self.parameters() if weight not in inside], "lr": rate}]


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    size, patch, rows = run.pick((64, 4, 128), (16, 4, 4))
    kind = run.pick(torch.bfloat16, torch.float32)
    model = Masked(size, patch, run.pick(2048, 128), run.pick(512, 64), run.pick((8, 3), (2, 1))).to(run.device, dtype=kind)
    optimizer = torch.optim.AdamW(model.groups(1e-4, 0.75), betas=(0.9, 0.95), fused=run.pick(True, None))
    run.begin()
    pictures = Pictures(rows, size, kind, run.device.type == "cuda")
    count = 0
    while run.running():
        with stamps.step:
            (batch,) = stamps.to_device([pictures.next()], run.device)
            with stamps.forward:
                loss = model(batch)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
        count += 1
    run.done(count)
    pictures.end()


if __name__ == "__main__":
    main()
