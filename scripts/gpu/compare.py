#!/usr/bin/env python3
"""Compares what observation tools cost a training step, and prints a Markdown table.

    scripts/gpu/compare.py --zernel target/release/zernel [--py-spy PATH] [--native] [--arms nothing zernel]
        [--pairs 30] [--seconds 1] [--batch 48] [--limit 465]

Needs root, a CUDA GPU and PyTorch. Each tool is switched on and off beside one training process, in the order off on
on off. Neighbouring windows are compared, because two processes differ by more than most tools cost. The job is a
GPT-like transformer in bf16. A large --batch hides overhead on the host; with a small one the host limits the step.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import pathlib
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

LAYERS, WIDTH, HEADS, SEQUENCE, VOCABULARY = 8, 512, 8, 256, 8192
# Seconds after a confirmed switch that are not measured. Some steps pass in them.
SETTLE = 0.3
# Steps before the first window: by then the kernels are loaded and the allocator's cache is full.
WARM_UP_STEPS = 100
# Longest wait in seconds for these steps or for a switch.
TIMEOUT = 60.0


def train(options):
    """The job: trains until stdin is closed, and logs the CLOCK_MONOTONIC ns at which each step ended."""
    import torch
    from torch import nn
    torch.manual_seed(1)
    device, profiler = options.device, None
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if options.arms == ["profiler"] else [kinds.CUDA]
    data = torch.randint(VOCABULARY, (4096, SEQUENCE + 1))
    # The sampler never ends: between epochs the loader would restart its workers.
    batches = iter(torch.utils.data.DataLoader(data, options.batch, sampler=itertools.cycle(range(len(data))),
                                               num_workers=4, pin_memory=device == "cuda"))
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.ModuleDict({
        "token": nn.Embedding(VOCABULARY, WIDTH), "position": nn.Embedding(SEQUENCE, WIDTH),
        "blocks": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        "head": nn.Linear(WIDTH, VOCABULARY)}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=device)
    positions = torch.arange(SEQUENCE, device=device)
    with open(options.job, "w", buffering=1) as log:
        while True:
            if select.select([0], [], [], 0)[0]:
                command = os.read(0, 100).decode().strip()
                if not command:
                    return
                if command == "on":
                    profiler = torch.profiler.profile(activities=activities)
                    profiler.start()
                else:
                    profiler.stop()
                    profiler = None
                    gc.collect()  # Otherwise a measured step pays for freeing the trace.
                log.write(json.dumps({"profiler": command}) + "\n")
            tokens = next(batches).to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                hidden = model["token"](tokens[:, :-1]) + model["position"](positions)
                logits = model["head"](model["blocks"](hidden, mask=mask, is_causal=True))
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            loss.item()
            log.write(json.dumps({"at": time.monotonic_ns()}) + "\n")


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {TIMEOUT:.0f} s")
        time.sleep(0.05)


class Child:
    """A process started here, with its output in a file. It is stopped when the stack is left, or before."""

    def __init__(self, command, folder, stack):
        self.path = os.path.join(folder, os.path.basename(command[0]) + ".output")
        with open(self.path, "w") as output:
            # In a session of its own: its children can then be killed with it.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output,
                                            start_new_session=True)
        stack.callback(self.stop)

    def output(self):
        return pathlib.Path(self.path).read_text(errors="replace")

    def check_running(self):
        if self.process.poll() is not None:
            last_line = (self.output().strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"{self.process.args[0]} exited with {self.process.returncode}: {last_line}")

    def stop(self, number=signal.SIGTERM):
        if self.process.stdin.closed:
            return
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()


class Job(Child):
    def __init__(self, arm, options, folder, stack):
        self.log = os.path.join(folder, "log")
        open(self.log, "w").close()
        super().__init__([sys.executable, os.path.abspath(__file__), "--job", self.log, "--arms", arm,
                          "--batch", str(options.batch), "--device", options.device], folder, stack)

    def logged(self, key):
        """All values of a key that the job has logged, in order."""
        self.check_running()
        with open(self.log) as log:
            lines = [json.loads(line) for line in log if line.endswith("\n")]
        return [line[key] for line in lines if key in line]


class Tool:
    """No tool: the control. The others override what they need."""
    # Seconds to wait before the first window, and whether the tool is on until then.
    warm_up, starts_on = 0.0, False

    def __init__(self, arm, options, folder, stack):
        self.arm, self.options, self.folder, self.stack = arm, options, folder, stack

    def switch(self, job, on):
        """Returns when the tool is confirmed to be on or off."""

    def check_on(self, job):
        """Called after each on-window. Raises RuntimeError if the tool was not on."""


class Profiler(Tool):
    def switch(self, job, on):
        command = "on" if on else "off"
        os.write(job.process.stdin.fileno(), command.encode())
        wait_until(lambda: job.logged("profiler")[-1:] == [command], "switching torch.profiler")

    def check_on(self, job):
        if "Exceeded max GPU buffer" in job.output():
            raise RuntimeError("torch.profiler's buffer was full; use shorter windows")


class PySpy(Tool):
    def switch(self, job, on):
        if on:
            command = [self.options.py_spy, "record", "--rate", "100", "--format", "raw",
                       "--pid", str(job.process.pid), "--output", os.path.join(self.folder, "stacks")]
            command += ["--native"] if self.arm == "py-spy-native" else []
            self.child = Child(command, self.folder, self.stack)
            wait_until(lambda: self.check_on(job) or "Sampling process" in self.child.output(), "starting py-spy")
        else:
            self.child.stop(signal.SIGINT)
            if "Samples: " not in self.child.output() or "Samples: 0 " in self.child.output():
                raise RuntimeError("py-spy took no samples")

    def check_on(self, job):
        self.child.check_running()


class Zernel(Tool):
    # The governor finds the functions to sample in this time.
    warm_up, starts_on = 6.0, True

    def __init__(self, arm, options, folder, stack):
        command = [options.zernel, "observe", "--expose", "all", "--socket", folder + "/zernel.sock"]
        self.child = Child(command, folder, stack)
        wait_until(lambda: self.health() == 200, "starting zernel observe")

    def health(self):
        """The status of /healthz: 200 with probes attached, 503 without, 0 if there is no answer."""
        self.child.check_running()
        try:
            return urllib.request.urlopen("http://127.0.0.1:9091/healthz", timeout=10).status
        except OSError as error:
            return getattr(error, "code", 0)

    def switch(self, job, on):
        self.child.process.send_signal(signal.SIGUSR2 if on else signal.SIGUSR1)
        wait_until(lambda: self.health() == (200 if on else 503), "switching zernel's probes")

    def check_on(self, job):
        if self.health() != 200:
            raise RuntimeError("zernel detached its probes by itself")


ARMS = {"nothing": ("nothing", Tool), "profiler": ("torch.profiler, CPU + CUDA", Profiler),
        "profiler-cuda": ("torch.profiler, CUDA only", Profiler), "py-spy": ("py-spy record, 100 Hz", PySpy),
        "py-spy-native": ("py-spy record --native, 100 Hz", PySpy), "zernel": ("zernel observe", Zernel)}


def measure(arm, options, end):
    """Switches a tool on and off until all pairs are done or time is over. Returns each window's (on, mean step)."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        tool = ARMS[arm][1](arm, options, folder, stack)
        job = Job(arm, options, folder, stack)
        wait_until(lambda: len(job.logged("at")) >= WARM_UP_STEPS, f"{WARM_UP_STEPS} steps")
        time.sleep(tool.warm_up)
        means, was_on = [], tool.starts_on
        while len(means) < 2 * options.pairs and time.monotonic() < end:
            on = len(means) % 4 in (1, 2)
            if on != was_on:
                tool.switch(job, on)
                was_on = on
                time.sleep(SETTLE)
            begin = time.monotonic_ns()
            time.sleep(options.seconds)
            inside = [at for at in job.logged("at") if at >= begin]
            means.append((on, (inside[-1] - inside[0]) / (len(inside) - 1) / 1e6 if len(inside) > 1 else None))
            if on:
                tool.check_on(job)
        return means


def trimmed_mean(values):
    """The mean without the tenth at either end, where other programs on the machine show."""
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut:len(values) - cut])


def summarize(means):
    """The cells of a row, and a note on the step times."""
    dropped = sum(mean is None for _, mean in means)
    # A pair is off on or on off. A window without its neighbour is not compared.
    pairs = [dict(pair) for pair in zip(means[::2], means[1::2])]
    ratios = [pair[True] / pair[False] for pair in pairs if pair[True] and pair[False]]
    if len(ratios) < 5:
        raise RuntimeError(f"only {len(ratios)} pairs of windows in time, {dropped} windows without two steps")
    resampled = sorted(trimmed_mean(random.choices(ratios, k=len(ratios))) for _ in range(4000))
    off = [mean for on, mean in means if mean and not on]
    # Slower later ones show that the tool leaves something behind: then the ratio understates its cost.
    note = f"step off: {off[0]:.3f} ms in the first window, {statistics.median(off[1:]):.3f} ms in the later ones"
    note += "; ratios " + " ".join(f"{ratio:.3f}" for ratio in ratios)
    return (f"{trimmed_mean(ratios):.4f} | {resampled[100]:.4f} to {resampled[3899]:.4f} | "
            f"{len(ratios)} pairs, {dropped} windows dropped"), note


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help="of " + ", ".join(ARMS),
                        default=["nothing", "profiler", "profiler-cuda", "py-spy", "zernel"])
    parser.add_argument("--native", action="store_true", help="add the arm py-spy-native")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of windows per arm")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window")
    parser.add_argument("--limit", type=float, default=465, help="seconds for all arms; each gets an equal share")
    parser.add_argument("--zernel", default="target/release/zernel", help="path of zernel")
    parser.add_argument("--py-spy", default="py-spy", help="path of py-spy")
    parser.add_argument("--batch", type=int, default=48, help="sequences per step")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out")
    parser.add_argument("--job", metavar="LOG", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse_arguments()
    if options.job:
        return train(options)
    random.seed(1)
    # SIGTERM leaves like Ctrl-C, through the code that stops everything.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arms = options.arms + (["py-spy-native"] if options.native else [])
    # A job starts in some 12 s, and a switch takes some 0.5 s.
    expected = len(arms) * (12 + options.pairs * (2 * options.seconds + SETTLE + 0.5))
    print(f"Arms: {len(arms)}. Expected: {min(expected, options.limit):.0f} s. Limit: {options.limit:.0f} s.\n")
    print("| tool | step on / off | 95 % | windows |\n|---|---|---|---|", flush=True)
    end, notes = time.monotonic() + options.limit, []
    for index, arm in enumerate(arms):
        share = (end - time.monotonic()) / (len(arms) - index)
        try:
            cells, note = summarize(measure(arm, options, time.monotonic() + share))
            notes.append(f"- {ARMS[arm][0]}: {note}")
        except (RuntimeError, OSError) as error:
            cells = "not measured: " + str(error).replace("|", "/").replace("\n", " ") + " | |"
        print(f"| {ARMS[arm][0]} | {cells} |", flush=True)
    print("\n" + "\n".join(notes))
    return 0 if notes else 1


if __name__ == "__main__":
    sys.exit(main())
