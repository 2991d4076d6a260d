#!/usr/bin/env python3
"""Runs stamped PyTorch loops under zernel run, and prints the phases and the verdict beside what the loops stamped.

    scripts/gpu/phases.py --zernel target/release/zernel [--seconds 12] truth/tuning/accumulation.py ...

Needs root and PyTorch, and a CUDA GPU for most loops. A loop stamps its labels into $ZERNEL_TRUTH/stamps-PID.jsonl.
Ends with 1 if a share of a phase is off by more than 3 points.
"""

import argparse
import glob
import gzip
import json
import os
import shlex
import subprocess
import sys
import tempfile

PHASES = ["data_loading", "gpu_compute", "nccl_collective", "optimizer_step", "unknown"]
PHASE_OF = {
    "data": "data_loading",
    "forward": "gpu_compute",
    "backward": "gpu_compute",
    "host": "gpu_compute",
    "gpu": "gpu_compute",
    "peer": "nccl_collective",
    "optimizer": "optimizer_step",
}
POINTS = 3.0


def stamped_phases(path):
    """Seconds of the training thread in each phase, from its first step to its last."""
    opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path)
    with opened as file:
        lines = [json.loads(line) for line in file]
    header, entries = lines[0], [line for line in lines[1:] if isinstance(line, list)]
    own = [(at, label) for at, thread, label in entries if thread == header["pid"]]
    steps = [at for at, label in own if label == "+step"]
    spent, labels, last = dict.fromkeys(PHASES, 0.0), [], None
    for at, label in own:
        if last is not None and at > steps[0] and labels:
            innermost = next((name for name in reversed(labels) if name != "step"), "other")
            spent[PHASE_OF.get(innermost, "unknown")] += (at - max(last, steps[0])) / 1e9
        last = at
        if label.startswith("+"):
            labels.append(label[1:])
        elif labels:
            labels.pop()
    return header["pid"], spent


def run(zernel, script, seconds):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        command = [zernel, "run", "--json", report, "--", sys.executable, *shlex.split(script), "--seconds", str(seconds)]
        subprocess.run(command, env=dict(os.environ, ZERNEL_TRUTH=folder), check=False)
        with open(report) as file:
            found = json.load(file)
        truth = dict(stamped_phases(path) for path in glob.glob(folder + "/stamps-*"))
    return found, truth


def shares(seconds):
    total = sum(seconds.values()) or 1.0
    return {name: 100 * seconds[name] / total for name in PHASES}


def compare(script, found, truth):
    worst = 0.0
    print(f"\n=== {script}: {json.dumps(found['verdict'])}")
    for rank in found["ranks"]:
        stamped = truth.get(rank["pid"])
        times = rank.get("training") or rank
        seen = shares(times["phases"])
        if stamped is None:
            print(f"pid {rank['pid']}: no stamps; " + ", ".join(f"{name} {seen[name]:.1f}" for name in PHASES))
            continue
        expected = shares(stamped)
        print(f"pid {rank['pid']}: " + ", ".join(f"{name} {seen[name]:.1f} of {expected[name]:.1f}" for name in PHASES))
        print(f"  wall {times['wall_seconds']:.2f} s, data waits {times['data_waits']}, peers {times['peer_wait_seconds']:.2f} s,"
              f" GPU busy {times['gpu_busy_seconds']}")
        worst = max(worst, max(abs(seen[name] - expected[name]) for name in PHASES))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", help="scripts of loops, with their options")
    parser.add_argument("--zernel", default="zernel")
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    worst = {script: compare(script, *run(options.zernel, script, options.seconds)) for script in options.scripts}
    wrong = {script: points for script, points in worst.items() if points > POINTS}
    for script, points in wrong.items():
        print(f"{script}: a phase is off by {points:.1f} points")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
