#!/usr/bin/env python3
"""Compares the run time of the BPF programs of two builds of zernel, in turns beside one running job.

    scripts/bpf_time.py BEFORE AFTER [--turns 20] [--seconds 3] -- JOB…

BEFORE and AFTER are zernel binaries. JOB must run for longer than all turns. Every call is counted (--budget none).
The kernel's own statistics (kernel.bpf_stats_enabled) give the nanoseconds per run of each program. Printed are the
medians over the turns of each build, and the median of the ratios of neighbouring turns with its 95 % interval.
Needs root.
"""

import argparse
import ctypes
import os
import platform
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}[platform.machine()]
GET_NEXT_ID, GET_FD_BY_ID, GET_INFO_BY_FD = 11, 13, 15
INFO_BYTES = 232
STATISTICS = "/proc/sys/kernel/bpf_stats_enabled"
# How long probes take to be attached to a running job.
SETTLE = 1.5
libc = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes, 144)
    result = libc.syscall(BPF_SYSCALL, command, buffer, 144)
    if result < 0:
        raise OSError(ctypes.get_errno(), "bpf")
    return result, buffer.raw


def programs():
    """Name, run time in ns and number of runs of every loaded program, by its id."""
    found, number = {}, 0
    while True:
        try:
            _, answer = bpf(GET_NEXT_ID, struct.pack("I", number))
        except OSError:
            return found
        number = struct.unpack_from("I", answer, 4)[0]
        try:
            descriptor, _ = bpf(GET_FD_BY_ID, struct.pack("I", number))
        except OSError:
            continue
        info = ctypes.create_string_buffer(INFO_BYTES)
        bpf(GET_INFO_BY_FD, struct.pack("IIQ", descriptor, INFO_BYTES, ctypes.addressof(info)))
        os.close(descriptor)
        name = info.raw[64:80].split(b"\0")[0].decode()
        found[number] = (name, *struct.unpack_from("QQ", info.raw, 192))


def turn(binary, seconds):
    """The nanoseconds per run of each program of a build, in one turn."""
    others = set(programs())
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["observe", "--budget", "none", "--http", "127.0.0.1:19191", "--websocket", "127.0.0.1:19192"]
        observer = subprocess.Popen([binary, *arguments, "--socket", folder + "/socket"], stderr=subprocess.DEVNULL)
        try:
            time.sleep(SETTLE)
            before = programs()
            time.sleep(seconds)
            after = programs()
        finally:
            observer.send_signal(signal.SIGTERM)
            observer.wait()
    times = {}
    for number, (name, run_ns, runs) in after.items():
        if number in others or number not in before:
            continue
        run_ns, runs = run_ns - before[number][1], runs - before[number][2]
        if runs >= 100:
            known_ns, known_runs = times.get(name, (0, 0))
            times[name] = (known_ns + run_ns, known_runs + runs)
    return {name: (run_ns / runs, runs) for name, (run_ns, runs) in times.items()}


def interval(ratios):
    """The middle 95 % of medians of resampled ratios."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("job", nargs="+")
    options = parser.parse_args()
    with open(STATISTICS) as file:
        were_enabled = file.read()
    with open(STATISTICS, "w") as file:
        file.write("1")
    job = subprocess.Popen(options.job, stdout=subprocess.DEVNULL)
    pairs = []
    try:
        time.sleep(5)
        for number in range(options.turns):
            order = [options.before, options.after]
            if number % 2:
                order.reverse()
            times = {binary: turn(binary, options.seconds) for binary in order}
            pairs.append((times[options.before], times[options.after]))
            if job.poll() is not None:
                sys.exit("the job ended before the last turn")
    finally:
        job.kill()
        with open(STATISTICS, "w") as file:
            file.write(were_enabled)
    names = sorted(set.union(*(set(times) for pair in pairs for times in pair)))
    print(f"{'program':16} {'runs/s':>9} {'before':>9} {'after':>9}  ratio (95 %), {len(pairs)} pairs")
    for name in names:
        both = [(before[name], after[name]) for before, after in pairs if name in before and name in after]
        if not both:
            print(f"{name:16} only in one of the builds")
            continue
        ratios = [after[0] / before[0] for before, after in both]
        low, high = interval(ratios)
        runs = statistics.median(after[1] for _, after in both) / options.seconds
        before_ns = statistics.median(before[0] for before, _ in both)
        after_ns = statistics.median(after[0] for _, after in both)
        print(f"{name:16} {runs:9.0f} {before_ns:6.0f} ns {after_ns:6.0f} ns  "
              f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})")


if __name__ == "__main__":
    main()
