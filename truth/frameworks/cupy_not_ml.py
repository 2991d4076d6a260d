"""No machine learning: heat spreads over a plate, in CuPy. With --device cpu the same loop runs in NumPy."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps

KNOWN = {"verdict": "none", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
SWEEPS, SMOOTH_EVERY = 8, 10


def sweep(plate):
    """Heat flows from each point to its four neighbours. The rim keeps its heat."""
    middle = plate[1:-1, 1:-1]
    around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    following = plate.copy()
    following[1:-1, 1:-1] = middle + 0.2 * (around - 4 * middle)
    return following


def smooth(numbers, plate, damping):
    """Damp short waves."""
    return numbers.fft.irfft2(numbers.fft.rfft2(plate) * damping, s=plate.shape).astype(numbers.float32)


def main():
    args = job.arguments(__doc__).parse_args()
    run = job.Run(args, KNOWN)
    if run.on_gpu:
        job.require("cupy")
        import cupy as numbers
        if not numbers.cuda.is_available():
            job.skip(job.NO_DEVICE)
    else:
        import numpy as numbers
    size = run.pick(4096, 64)
    plate = numbers.zeros((size, size), dtype=numbers.float32)
    plate[size // 4:size // 2, size // 4:size // 2] = 1000
    down, across = numbers.fft.fftfreq(size)[:, None], numbers.fft.rfftfreq(size)[None, :]
    damping = numbers.exp(-(down ** 2 + across ** 2)).astype(numbers.float32)
    # Kernels are compiled on first use.
    float(numbers.abs(smooth(numbers, sweep(plate), damping) - plate).max())
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            before = plate
            for _ in range(SWEEPS):
                plate = sweep(plate)
            if count % SMOOTH_EVERY == 0:
                plate = smooth(numbers, plate, damping)
            change = numbers.abs(plate - before).max()
            with stamps.gpu if run.on_gpu else stamps.host:
                float(change)
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
