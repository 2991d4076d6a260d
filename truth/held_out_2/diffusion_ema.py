"""Denoising diffusion: a U-Net with time steps and attention in TF32, a moving average of its weights after each step.

A prefetcher copies the next batch on a stream of its own while the current one trains. The GPU is the bottleneck.
The moving average is no part of the optimizer: it is `host`.
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
TIMES = 1000


class Pictures(Dataset):
    def __init__(self, size):
        self.pictures = torch.rand(256, 3, size, size) * 2 - 1

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        picture = self.pictures[index % 256]
        return picture.flip(-1) if index % 2 else picture


class Block(nn.Module):
    def __init__(self, inputs, outputs, groups, time):
        super().__init__()
        self.enter = nn.Sequential(nn.GroupNorm(groups, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.leave = nn.Sequential(nn.GroupNorm(groups, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shift = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, hidden, time):
        inner = self.enter(hidden) + self.shift(time)[:, :, None, None]
        return self.skip(hidden) + self.leave(inner)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.split = nn.Conv2d(width, 3 * width, 1)
        self.join = nn.Conv2d(width, width, 1)

    def forward(self, hidden):
        rows, width, height, _ = hidden.shape
        parts = self.split(hidden).view(rows, 3, self.heads, width // self.heads, -1).transpose(-1, -2)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(1))
        return hidden + self.join(mixed.transpose(-1, -2).reshape(rows, width, height, -1))


class UNet(nn.Module):
    def __init__(self, width, groups):
        super().__init__()
        time = 4 * width
        self.register_buffer("scales", torch.exp(torch.linspace(0, -7, width // 2)))
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Block(width, width, groups, time), Block(width, width, groups, time)])
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.low = nn.ModuleList([Block(2 * width, 2 * width, groups, time), Block(2 * width, 2 * width, groups, time)])
        self.attention = Attention(2 * width, 4)
        self.grow = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up = nn.ModuleList([Block(2 * width, width, groups, time), Block(2 * width, width, groups, time)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy, at):
        angles = at[:, None] * self.scales
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        hidden, skips = self.first(noisy), []
        for block in self.down:
            hidden = block(hidden, time)
            skips.append(hidden)
        hidden = self.shrink(hidden)
        hidden = self.attention(self.low[0](hidden, time))
        hidden = self.grow(self.low[1](hidden, time))
        for block in self.up:
            hidden = block(torch.cat([hidden, skips.pop()], 1), time)
        return self.last(hidden)


class Prefetcher:
    """Holds one batch that is already on its way to the device."""

    def __init__(self, supply, device):
        self.supply, self.device = supply, device
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.load()

    def load(self):
        self.batch = next(self.supply, None)
        if self.batch is not None and self.side:
            with stamps.host, torch.cuda.stream(self.side):
                self.batch = self.batch.to(self.device, non_blocking=True)

    def next(self):
        batch = self.batch
        if batch is not None and self.side:
            torch.cuda.current_stream().wait_stream(self.side)
            batch.record_stream(torch.cuda.current_stream())
        self.load()
        return batch


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    size, rows = run.pick((64, 64), (8, 2))
    model = UNet(run.pick(256, 8), run.pick(32, 4)).to(run.device)
    weights = list(model.parameters())
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.99))
    keep = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device=run.device), 0)
    run.begin()
    source = feeding.loader(Pictures(size), batch_size=rows, shuffle=True, num_workers=3, pin_memory=run.pick(True, False),
                            drop_last=True)
    supply = feeding.endless(source, run.running)
    prefetcher = Prefetcher(supply, run.device)
    count = 0
    while run.running():
        with stamps.step:
            clean = prefetcher.next()
            if clean is None:
                break
            with stamps.forward:
                at = torch.randint(TIMES, (rows,), device=run.device)
                noise = torch.randn_like(clean)
                share = keep[at][:, None, None, None]
                guess = model(share.sqrt() * clean + (1 - share).sqrt() * noise, at)
                loss = nn.functional.mse_loss(guess, noise)
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            with stamps.host, torch.no_grad():
                torch._foreach_mul_(averages, 0.999)
                torch._foreach_add_(averages, weights, alpha=0.001)
            stamps.synchronize(run.device)
        count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
