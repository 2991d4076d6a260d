"""No machine learning: PyTorch as an array library. It prices options by random paths of a share, on the GPU.

There is no model and no gradient. Each option is priced three times, to see how the price changes with the share and with
its volatility. A step is one option. The results are read back.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math

import job
import stamps
import torch

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
RATE, YEARS = 0.03, 1.0


def price(share, strike, volatility, paths, times, device):
    """What the right is worth to sell the share's mean over a year at `strike`, unless it ever falls below a barrier."""
    generator = torch.Generator(device).manual_seed(7)
    interval = YEARS / times
    drift, spread = (RATE - volatility ** 2 / 2) * interval, volatility * math.sqrt(interval)
    values = torch.full((paths,), float(share), device=device)
    total, lowest = torch.zeros_like(values), values.clone()
    moves = torch.empty_like(values)
    for _ in range(times):
        moves.normal_(generator=generator)
        values.mul_(moves.mul_(spread).add_(drift).exp_())
        total.add_(values)
        torch.minimum(lowest, values, out=lowest)
    gains = (strike - total / times).clamp_(min=0).mul_(lowest > 0.6 * share)
    return gains.mean() * math.exp(-RATE * YEARS)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    paths, times = run.pick((4_000_000, 32), (5000, 12))
    run.begin()
    count, worth = 0, []
    while run.running():
        with stamps.step:
            share, strike, volatility = 100.0, 90.0 + count % 20, 0.2
            cases = [(share, volatility), (1.01 * share, volatility), (share, 1.01 * volatility)]
            prices = torch.stack([price(start, strike, swing, paths, times, run.device) for start, swing in cases])
            with stamps.gpu if run.device.type == "cuda" else stamps.host:
                base, moved, swung = prices.tolist()
            worth.append((base, (moved - base) / (0.01 * share), (swung - base) / (0.01 * volatility)))
        count += 1
    run.done(count)
    if not all(base > 0 and delta < 0 for base, delta, _ in worth):
        sys.exit("option_paths: wrong prices")


if __name__ == "__main__":
    main()
