#!/usr/bin/env python3
"""Runs zernel observe beside PyTorch on a real GPU, and prints the results as a table.

    scripts/gpu/check.py --zernel target/release/zernel [--windows 20] [--seconds 2] [--only cost] [--job ddp]
        [--budget 0.01%]

Needs root, a CUDA GPU and PyTorch. What it measures:

- memory: bytes whose caller is libcudart (or libc10_cuda, with expandable segments) against
  torch.cuda.memory_reserved(), and NVML's number for the process less what was seen, against the same of a job
  on small data;
- cost: the time of a step with the probes on and off, switched beside one running process; with a tiny budget, of
  those that are never sampled.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

# Time for probes to be attached or detached, with a margin.
SETTLE = 1.0
HERE = os.path.dirname(os.path.abspath(__file__))


def fetch(path):
    with urllib.request.urlopen("http://127.0.0.1:9091" + path, timeout=10) as answer:
        return answer.read().decode()


class Zernel:
    """The daemon, running."""

    def __init__(self, binary, *arguments):
        self.process = subprocess.Popen(
            [binary, "observe", "--expose", "all", "--socket", "/tmp/zernel-check.sock", *arguments],
            stderr=subprocess.PIPE, text=True)
        for _ in range(200):
            try:
                fetch("/healthz")
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("zernel observe does not answer")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def start_training(log, seconds, *arguments):
    command = [sys.executable, os.path.join(HERE, "train.py"), "--log", log, "--seconds", str(seconds)]
    return subprocess.Popen(command + list(arguments))


def read_log(path):
    with open(path) as log:
        return [json.loads(line) for line in log if line.endswith("\n")]


def wait_for_steps(log, count):
    while not os.path.exists(log) or sum("step" in line for line in read_log(log)) < count:
        time.sleep(0.2)


def series(text, name):
    """The samples of a metric: labels as written, and the value."""
    return [(line[len(name):line.rindex(" ")], float(line.rsplit(" ", 1)[1]))
            for line in text.splitlines() if line.startswith(name + "{")]


def observed_memory(options, *arguments):
    """The memory of one training job at its end, by zernel and by PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        zernel = Zernel(options.zernel, "--budget", "none")
        try:
            training = start_training(log, 8, *arguments)
            wait_for_steps(log, 20)
            while not any("reserved" in line for line in read_log(log)):
                time.sleep(0.1)
            time.sleep(0.7)
            found = {"text": fetch("/metrics"), "ledger": json.loads(fetch("/api/v1/ledger")),
                     "snapshot": json.loads(fetch("/api/v1/snapshot"))}
            training.wait()
        finally:
            zernel.stop()
        lines = read_log(log)
    found["own"] = f'pid="{lines[0]["pid"]}"'
    found["pid"] = lines[0]["pid"]
    found["final"] = lines[-1]
    return found


def total(found, name, *labels):
    return sum(value for written, value in series(found["text"], name)
               if found["own"] in written and all(label in written for label in labels))


def check_memory(options, ddp):
    kind = "DDP+NCCL" if ddp else "eager"
    arguments = ["--ddp"] if ddp else []
    full = observed_memory(options, *arguments)
    # The same program on small data: the memory of its context and code.
    tiny = observed_memory(options, *arguments, "--batch", "32", "--width", "256")
    final = full["final"]
    # PyTorch asks the runtime for its memory, and the driver itself for segments that can grow.
    own = sum(total(full, "zernel_gpu_memory_caller_bytes", f'caller="{caller}"') for caller in ("libcudart", "libc10_cuda"))
    print(f"| {kind}: memory that PyTorch asked for against torch reserved | {own:.0f} | {final['reserved']} | "
          f"{'equal' if own == final['reserved'] else 'DIFFERENT'} |")
    mine = total(full, "zernel_gpu_memory_unexplained_bytes")
    base = total(tiny, "zernel_gpu_memory_unexplained_bytes")
    seen = total(full, "zernel_gpu_memory_used_bytes")
    print(f"| {kind}: NVML minus seen, against the same on small data | {mine:.0f} | {base:.0f} | "
          f"{(mine - base) / 2**20:+.1f} MiB left of {(mine + seen) / 2**20:.0f} MiB |")
    for process in full["snapshot"]["observed"]:
        if process["pid"] != full["pid"]:
            continue
        calls = {name: round(count["calls"] / final["steps"], 2) for name, count in process["calls"].items()
                 if count["calls"] > final["steps"] / 20}
        print(f"  {kind}: complete={process['complete']}, {final['steps']} steps, calls per step: {calls}")
        print(f"  by caller: {process['memory_by_caller']}")
    refused = [(function["symbol"], function["reason"]) for file in full["ledger"]["files"]
               for function in file["functions"] if function["state"] == "not attached"]
    print(f"  not attached: {refused}")


def trimmed_mean(values):
    """The mean without the tenth at either end, where other programs on the machine show."""
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut:len(values) - cut])


def check_cost(options, ddp):
    """Switches the probes off and on beside one process, in the order off on on off."""
    arguments = ["--ddp"] if ddp else []
    seconds = options.windows * (2 * options.seconds + SETTLE + 0.4) + 40
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        zernel = Zernel(options.zernel, *(["--budget", options.budget] if options.budget else []))
        training = start_training(log, seconds, *arguments)
        wait_for_steps(log, 100)
        # In this time the governor decides which functions to sample.
        time.sleep(6)
        intervals, ratios, was_on = [], [], True
        for index in range(2 * options.windows):
            on = index % 4 in (1, 2)
            if on != was_on:
                zernel.process.send_signal(signal.SIGUSR2 if on else signal.SIGUSR1)
                time.sleep(SETTLE)
            was_on = on
            begin = time.monotonic_ns()
            time.sleep(options.seconds)
            intervals.append((on, begin, time.monotonic_ns()))
            if on:
                ratios += [value for labels, value in series(fetch("/metrics"), "zernel_observe_cost_ratio")
                           if f'pid="{training.pid}"' in labels]
        sampled = [labels for labels, _ in series(fetch("/metrics"), "zernel_observe_sampled")]
        training.kill()
        training.wait()
        zernel.stop()
        stamps = [line["at"] for line in read_log(log) if "at" in line]
    means = {True: [], False: []}
    for on, begin, end in intervals:
        inside = [stamp for stamp in stamps if begin <= stamp <= end]
        steps = [later - earlier for earlier, later in zip(inside, inside[1:])]
        means[on].append(statistics.mean(steps) / 1e6)
    # Each pair of neighbouring windows is compared, so that slow drift cancels.
    pairs = [on / off for on, off in zip(means[True], means[False])]
    resampled = sorted(trimmed_mean(random.choices(pairs, k=len(pairs))) for _ in range(4000))
    kind = "DDP+NCCL" if ddp else "eager"
    print(f"| {kind}: step with and without | {statistics.median(means[True]):.3f} ms | "
          f"{statistics.median(means[False]):.3f} ms | {trimmed_mean(pairs):.4f} "
          f"(95 %: {resampled[100]:.4f} to {resampled[3899]:.4f}), {len(pairs)} windows each |")
    print(f"  {kind}: own estimate {statistics.mean(ratios):.4f}; sampled: {sampled}")
    print(f"  {kind}: ratios {[round(pair, 3) for pair in pairs]}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--zernel", default="target/release/zernel")
    arguments.add_argument("--windows", type=int, default=20)
    arguments.add_argument("--seconds", type=float, default=2)
    arguments.add_argument("--only", choices=["memory", "cost"])
    arguments.add_argument("--job", choices=["eager", "ddp"])
    arguments.add_argument("--budget", help="of the daemon whose cost is measured")
    options = arguments.parse_args()
    random.seed(1)
    print("| what | zernel / with | truth / without | result |")
    print("|---|---|---|---|")
    for ddp in {"eager": [False], "ddp": [True], None: [False, True]}[options.job]:
        if options.only != "cost":
            check_memory(options, ddp)
        if options.only != "memory":
            check_cost(options, ddp)


if __name__ == "__main__":
    main()
