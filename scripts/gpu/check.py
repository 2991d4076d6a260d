#!/usr/bin/env python3
"""Runs zernel observe beside PyTorch on a real GPU, and prints what came of it as a table.

    scripts/gpu/check.py --zernel target/release/zernel [--windows 20] [--seconds 3]

Needs root, a CUDA GPU and PyTorch. What it measures:

- memory: bytes whose caller is libcudart against torch.cuda.memory_reserved(), and NVML's number for
  the process against what was seen and what a bare context takes;
- cost: the time of a step with and without zernel, switched on and off beside one running process.
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

HERE = os.path.dirname(os.path.abspath(__file__))


def fetch(path):
    with urllib.request.urlopen("http://127.0.0.1:9091" + path, timeout=10) as answer:
        return answer.read().decode()


class Zernel:
    """The daemon, running."""

    def __init__(self, binary, *arguments):
        self.process = subprocess.Popen(
            [binary, "observe", "--socket", "/tmp/zernel-check.sock", *arguments],
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


def bare_context():
    """What NVML charges a process that only opens the GPU."""
    program = ("import torch,time;torch.cuda.init();torch.cuda.current_stream().synchronize();"
               "torch.zeros(1).pin_memory();print('ready',flush=True);time.sleep(20)")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    time.sleep(1.5)
    return child


def check_memory(options, ddp):
    arguments = ["--ddp"] if ddp else []
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        zernel = Zernel(options.zernel, "--budget", "none")
        context = None
        try:
            training = start_training(log, 12, *arguments)
            wait_for_steps(log, 20)
            context = bare_context()
            while not any("reserved" in line for line in read_log(log)):
                time.sleep(0.1)
            time.sleep(0.7)
            text = fetch("/metrics")
            ledger = json.loads(fetch("/api/v1/ledger"))
            snapshot = json.loads(fetch("/api/v1/snapshot"))
            training.wait()
        finally:
            if context:
                context.kill()
            zernel.stop()
        lines = read_log(log)
    pid = lines[0]["pid"]
    final = lines[-1]
    own = f'pid="{pid}"'
    callers = {labels: value for labels, value in series(text, "zernel_gpu_memory_caller_bytes") if own in labels}
    cudart = sum(value for labels, value in callers.items() if "libcudart" in labels)
    unexplained = {labels: value for labels, value in series(text, "zernel_gpu_memory_unexplained_bytes")}
    mine = sum(value for labels, value in unexplained.items() if own in labels)
    bare = sum(value for labels, value in unexplained.items() if f'pid="{context.pid}"' in labels)
    kind = "DDP+NCCL" if ddp else "eager"
    print(f"| {kind}: memory, caller libcudart vs torch reserved | {cudart:.0f} | {final['reserved']} | "
          f"{'equal' if cudart == final['reserved'] else 'DIFFERENT'} |")
    print(f"| {kind}: NVML minus seen, against a bare context's | {mine:.0f} | {bare:.0f} | "
          f"{(mine - bare) / 2**20:+.1f} MiB left |")
    observed = [process for process in snapshot["observed"] if process["pid"] == pid]
    for process in observed:
        calls = {name: count["calls"] for name, count in process["calls"].items()}
        print(f"  {kind}: complete={process['complete']} steps={final['steps']} calls per step:",
              {name: round(count / final["steps"], 2) for name, count in calls.items() if count > final["steps"] / 20})
        print("  callers:", {labels: value for labels, value in callers.items()})
    refused = [(function["symbol"], function["reason"]) for file in ledger["files"]
               for function in file["functions"] if function["state"] == "not attached"]
    print("  not attached:", refused)


def check_cost(options, ddp, *daemon):
    arguments = ["--ddp"] if ddp else []
    seconds = options.windows * (2 * options.seconds + 2.5) + 15
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        training = start_training(log, seconds, *arguments)
        wait_for_steps(log, 100)
        intervals = []
        ratio = 0
        for _ in range(options.windows):
            begin = time.monotonic_ns()
            time.sleep(options.seconds)
            intervals.append(("off", begin, time.monotonic_ns()))
            zernel = Zernel(options.zernel, *daemon)
            time.sleep(0.5 + random.random() / 4)
            begin = time.monotonic_ns()
            time.sleep(options.seconds)
            intervals.append(("on", begin, time.monotonic_ns()))
            costs = [value for labels, value in series(fetch("/metrics"), "zernel_observe_cost_ratio")
                     if f'pid="{training.pid}"' in labels]
            ratio = max([ratio] + costs)
            zernel.stop()
            time.sleep(0.3)
        training.kill()
        training.wait()
        stamps = [line["at"] for line in read_log(log) if "at" in line]
    medians = {"on": [], "off": []}
    for state, begin, end in intervals:
        inside = [stamp for stamp in stamps if begin <= stamp <= end]
        steps = [later - earlier for earlier, later in zip(inside, inside[1:])]
        if len(steps) > 10:
            medians[state].append(statistics.median(steps) / 1e6)
    # Neighbouring windows are compared, so that slow drift cancels.
    ratios = sorted(on / off for on, off in zip(medians["on"], medians["off"]))
    resampled = sorted(statistics.mean(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    kind = "DDP+NCCL" if ddp else "eager"
    print(f"| {kind}: step with {' '.join(daemon) or 'default budget'} | {statistics.median(medians['on']):.3f} ms | "
          f"{statistics.median(medians['off']):.3f} ms | {statistics.mean(ratios):.4f} "
          f"(95 %: {resampled[50]:.4f} to {resampled[1949]:.4f}), {len(ratios)} windows each, own estimate {ratio:.4f} |")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--zernel", default="target/release/zernel")
    arguments.add_argument("--windows", type=int, default=20)
    arguments.add_argument("--seconds", type=float, default=3)
    arguments.add_argument("--only", choices=["memory", "cost"])
    options = arguments.parse_args()
    random.seed(1)
    print("| what | zernel / with | truth / without | result |")
    print("|---|---|---|---|")
    for ddp in (False, True):
        if options.only != "cost":
            check_memory(options, ddp)
        if options.only != "memory":
            check_cost(options, ddp)


if __name__ == "__main__":
    main()
