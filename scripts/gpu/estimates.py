#!/usr/bin/env python3
"""Counts how often the stated interval of sampled launches holds the truth, on a real GPU.

    scripts/gpu/estimates.py --zernel target/release/zernel [--runs 100] [--at-once 5] [--seconds 8] [--ddp]

The job is train.py, which launches the same kernels in every step. Two runs in which every call is counted
(--budget none) give its launches per step and beside steps; the steps are counted by the job itself. Then the job runs
under `zernel run` with the default budget, --at-once jobs at a time. Needs root, a CUDA GPU and PyTorch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))


def run(zernel, folder, number, seconds, *options, job=()):
    """The steps of the job, and its rank in the report."""
    log, report = f"{folder}/{number}.log", f"{folder}/{number}.json"
    train = [sys.executable, os.path.join(HERE, "train.py"), "--log", log, "--seconds", str(seconds), *job]
    environment = {**os.environ, "MASTER_PORT": str(29600 + number)}
    subprocess.run([zernel, "run", *options, "--json", report, "--", *train],
                   check=True, env=environment, stderr=subprocess.DEVNULL)
    with open(log) as lines:
        steps = max((json.loads(line).get("step", 0) for line in lines), default=0)
    with open(report) as file:
        ranks = json.load(file)["ranks"]
    return steps, max(ranks, key=lambda rank: rank["launches"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zernel", required=True)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    job = ["--ddp"] if options.ddp else []
    with tempfile.TemporaryDirectory() as folder:
        exact = [run(options.zernel, folder, number, 2 + 3 * number, "--budget", "none", job=job) for number in range(2)]
        (few, short), (many, long) = [(steps, process["launches"]) for steps, process in exact]
        per_step = (long - short) / (many - few)
        beside = short - per_step * few
        print(f"counted: {short} launches in {few} steps, {long} in {many}: {per_step:.3f} per step and {beside:.1f}")
        held = without = 0
        one = lambda number: run(options.zernel, folder, number, options.seconds, job=job)
        with ThreadPoolExecutor(options.at_once) as pool:
            for steps, rank in pool.map(one, range(2, 2 + options.runs)):
                truth = per_step * steps + beside
                estimate, error = rank["launches"], rank["launches_error"]
                off = estimate - truth
                without += error is None
                held += error is not None and abs(off) <= error
                print(f"{estimate} ± {error} of {truth:.0f}: off by {off:+.0f}, {off / per_step:+.2f} steps; "
                      f"steps {rank['steps']['count']} of {steps}", flush=True)
    print(f"the interval held the truth in {held} of {options.runs} runs; {without} runs stated none")


if __name__ == "__main__":
    main()
