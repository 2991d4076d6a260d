#!/usr/bin/env python3
"""Measures what stamps cost a training loop: step time with and without, in one process.

Blocks of steps alternate between stamps on and off. The ratio of the medians of neighbouring blocks is free of the
differences between processes, which are larger than the cost. Prints the median ratio, its 95 % interval, the stamps per
step and the nanoseconds per stamp.

  truth/cost.py                on the GPU
  truth/cost.py --device cpu   on the CPU
"""

import argparse
import os
import random
import statistics
import tempfile
import time

os.environ.setdefault("ZERNEL_TRUTH", tempfile.gettempdir())

import stamps
import torch
from models import Mlp

stamp = stamps.stamp


def switch(on):
    stamps.ON = on
    stamps.stamp = stamp if on else (lambda *_: None)


def train(model, optimizer, inputs, targets):
    """A step with as many stamps as the variants have."""
    begin = time.perf_counter_ns()
    with stamps.step:
        with stamps.data:
            pass
        with stamps.host:
            pass
        with stamps.forward:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad()
        stamps.item(loss.detach())
    return time.perf_counter_ns() - begin


def nanoseconds_per_stamp(count=50_000):
    begin = time.perf_counter_ns()
    for _ in range(count):
        stamp("-")
    return (time.perf_counter_ns() - begin) / count


def interval(ratios):
    """95 % interval of the median, by resampling."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks, on and off [60]")
    parser.add_argument("--block", type=int, default=20, help="steps per block [20]")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    width, layers, rows = (256, 24, 32) if args.device == "cuda" else (128, 8, 32)
    model = Mlp(width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = torch.randn(rows, width, device=device), torch.randint(10, (rows,), device=device)
    for _ in range(30):
        train(model, optimizer, inputs, targets)
    before = stamps.log.next_index()
    train(model, optimizer, inputs, targets)
    per_step = stamps.log.next_index() - before - 1
    ratios, plain = [], []
    for pair in range(args.pairs):
        medians = {}
        for on in ((True, False) if pair % 2 else (False, True)):
            switch(on)
            medians[on] = statistics.median(train(model, optimizer, inputs, targets) for _ in range(args.block))
        ratios.append(medians[True] / medians[False])
        plain.append(medians[False])
    low, high = interval(ratios)
    step, each = statistics.median(plain), nanoseconds_per_stamp()
    print(f"step time with stamps / without: {statistics.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}), "
          f"{args.pairs} pairs of {args.block} steps of {step / 1e6:.2f} ms")
    print(f"{per_step} stamps per step, {each:.0f} ns each: {100 * per_step * each / step:.2f} % of a step")


if __name__ == "__main__":
    main()
