#!/usr/bin/env python3
"""Prints how the threads of stamped runs spent their time, label by label, and checks that the stamps nest.

  truth/shares.py FOLDER…    folders with stamps-PID.jsonl or stamps-PID.jsonl.gz, searched recursively
"""

import glob
import gzip
import json
import os
import statistics
import sys


def read(path):
    opened = gzip.open(path, "rt") if path.endswith(".gz") else open(path)
    with opened as file:
        lines = [json.loads(line) for line in file]
    return lines[0], lines[1:-1], lines[-1]


def by_thread(entries):
    threads = {}
    for time, thread, label in entries:
        threads.setdefault(thread, []).append((time, label))
    return threads


def shares(changes, begin, end):
    """Nanoseconds per label (innermost wins) and the durations of the steps. Raises ValueError where labels do not nest."""
    spent, steps, open_labels = {}, [], []
    last = begin
    for time, label in changes:
        if time < last and time >= begin:
            raise ValueError(f"time goes back at {time}")
        innermost = next((name for name, _ in reversed(open_labels) if name != "step"), "other")
        spent[innermost] = spent.get(innermost, 0) + max(0, time - last)
        last = max(last, time)
        if label.startswith("+"):
            open_labels.append((label[1:], time))
        elif not open_labels:
            raise ValueError(f"nothing to leave at {time}")
        else:
            name, since = open_labels.pop()
            if name == "step":
                steps.append(time - since)
    spent["other"] = spent.get("other", 0) + max(0, end - last)
    return spent, steps


def describe(path):
    header, entries, footer = read(path)
    lines = []
    for thread, changes in sorted(by_thread(entries).items()):
        spent, steps = shares(changes, header["begin"], footer["end"])
        total = sum(spent.values()) or 1
        parts = "  ".join(f"{name} {100 * ns / total:.1f}" for name, ns in sorted(spent.items(), key=lambda x: -x[1]))
        text = f"  thread {thread}: {parts}"
        if steps:
            text += f"  | {len(steps)} steps, median {statistics.median(steps) / 1e6:.2f} ms"
        lines.append(text)
    busy = footer["gpu_busy"]
    mean = f", GPU busy {100 * statistics.mean(fraction for _, fraction in busy):.0f} %" if busy else ""
    verdict = header["known"].get("verdict")
    print(f"{header['variant']}, pid {header['pid']}, {len(entries)} stamps, known {verdict}{mean}")
    print("\n".join(lines))


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    wrong = 0
    for folder in sys.argv[1:]:
        for path in sorted(glob.glob(os.path.join(folder, "**", "stamps-*.jsonl*"), recursive=True)):
            try:
                describe(path)
            except (ValueError, KeyError, IndexError) as error:
                wrong += 1
                print(f"{path}: {error}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
