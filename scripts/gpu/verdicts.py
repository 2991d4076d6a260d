#!/usr/bin/env python3
"""Runs PyTorch loops whose bottleneck is known under zernel run, on a real GPU, and compares the verdicts.

    scripts/gpu/verdicts.py --zernel target/release/zernel [--seconds 8]

Needs root, a CUDA GPU and PyTorch. Ends with 1 if a verdict is not the expected one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

EXPECTED = {
    "small-kernels": "host",
    "large-kernels": "gpu",
    "large-kernels-never-read": "gpu",
    "large-kernels-pageable-copies": "gpu",
    "slow-loaders": "input",
}


def train(loop, seconds):
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 1 << 30

        def __getitem__(self, index):
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                pass
            return torch.full((width,), float(index % 7))

    large = loop.startswith("large")
    width, batch, layers = (8192, 8192, 12) if large else (256, 32, 48)
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU()]
    model = torch.nn.Sequential(*parts).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    on_host = torch.randn(batch, width)
    on_device = on_host.cuda()
    loaded = iter(DataLoader(Slow(), batch_size=batch, num_workers=2)) if loop == "slow-loaders" else None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if loaded:
            data = next(loaded).cuda()
        elif loop.endswith("pageable-copies"):
            data = on_host.cuda()
        else:
            data = on_device
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        if not loop.endswith("never-read"):
            loss.item()
    torch.cuda.synchronize()


def verdict(zernel, loop, seconds):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        own = [sys.executable, os.path.abspath(__file__), "--train", loop, "--seconds", str(seconds)]
        subprocess.run([zernel, "run", "--json", report, "--", *own], check=True)
        with open(report) as file:
            return json.load(file)["verdict"]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--zernel", default="target/release/zernel")
    arguments.add_argument("--seconds", type=float, default=8)
    arguments.add_argument("--train", choices=EXPECTED, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.train:
        train(options.train, options.seconds)
        return 0
    rows = []
    for loop, bound in EXPECTED.items():
        found = verdict(options.zernel, loop, options.seconds)
        rows.append((loop, bound, found["bound"], found["share"] or 0))
    print(f"{'loop':32}{'expected':16}{'verdict':16}share")
    for loop, bound, found, share in rows:
        print(f"{loop:32}{bound:16}{found:16}{share:.2f}")
    return int(any(bound != found for _, bound, found, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
