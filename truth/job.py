"""What every truth script shares: arguments, the device, the end of the run, ranks."""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time

import gpu_busy
import stamps

SKIPPED = 77
NO_DEVICE = "no CUDA device (--device cpu runs the same loop on the CPU)"


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="how long to run after the start-up [12]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the same loop, tiny [cuda]")
    return parser


class Run:
    """A run of one script, with or without PyTorch."""

    def __init__(self, args, known, variant=None):
        self.known = known
        self.variant = os.environ.get("ZERNEL_TRUTH_VARIANT") or variant or script_name()
        self.seconds = args.seconds
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.on_gpu = args.device == "cuda"
        self.end = None
        self.started = None

    def pick(self, on_gpu, on_cpu):
        """One of two sizes: for the GPU, or tiny, to check the loop on a CPU."""
        return on_gpu if self.on_gpu else on_cpu

    def begin(self):
        """Start the stamps and the clock of the run."""
        alone = os.environ.get("ZERNEL_TRUTH_ALONE") == "1" and self.rank == 0
        busy = gpu_busy.start() if stamps.ON and alone and self.on_gpu else None
        stamps.begin(self.variant, self.known, busy)
        self.started = time.monotonic()
        self.end = self.started + self.seconds

    def running(self):
        return self.goes_on(time.monotonic() < self.end)

    def goes_on(self, running):
        if not running:
            stamps.end()
        return running

    def done(self, steps):
        """Print how fast the loop was."""
        stamps.end()
        elapsed = time.monotonic() - self.started
        rate = steps / elapsed if elapsed else 0.0
        print(f"{self.variant}: rank {self.rank}, {steps} steps in {elapsed:.1f} s, {rate:.1f} per second", flush=True)


class Job(Run):
    """A run of a script that uses PyTorch."""

    def __init__(self, args, known, variant=None):
        import torch

        super().__init__(args, known, variant)
        if self.on_gpu and not torch.cuda.is_available():
            skip(NO_DEVICE)
        self.device = torch.device(args.device)
        if not self.on_gpu:
            torch.set_num_threads(1)
        torch.manual_seed(self.rank)

    def agree_to_run(self, step, every=16):
        """Whether all ranks go on. They agree every so many steps, as loops do that log a common loss."""
        import torch

        if step % every:
            return True
        left = torch.tensor([self.end - time.monotonic()])
        with stamps.peer:
            torch.distributed.all_reduce(left, op=torch.distributed.ReduceOp.MIN, group=self.cpu_group)
        return self.goes_on(left.item() > 0)

    def join_ranks(self, backend):
        """Join the other ranks; they meet in a file, so no name has to resolve."""
        import torch

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        meeting = os.environ.get("ZERNEL_TRUTH_MEETING") or tempfile.mktemp(prefix="truth-ranks-")
        torch.distributed.init_process_group(
            backend, init_method="file://" + meeting, rank=self.rank, world_size=self.world)
        self.cpu_group = torch.distributed.new_group(backend="gloo")


def script_name():
    return os.path.splitext(os.path.basename(sys.argv[0]))[0]


def skip(reason):
    print(f"{script_name()}: skipped: {reason}", flush=True)
    sys.exit(SKIPPED)


def require(*modules):
    """Skip the script where one of these is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        skip(f"not installed: {' '.join(missing)}")


def run_ranks(count):
    """Start this script `count` times, as ranks, and exit with them. Returns in the ranks."""
    if "RANK" in os.environ:
        return
    meeting = tempfile.mktemp(prefix="truth-ranks-")
    ranks = []
    for rank in range(count):
        variables = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK="0",
                         ZERNEL_TRUTH_MEETING=meeting)
        ranks.append(subprocess.Popen([sys.executable] + sys.argv, env=variables))
    codes = [process.wait() for process in ranks]
    if os.path.exists(meeting):
        os.unlink(meeting)
    sys.exit(max((abs(code) for code in codes), default=0))


def autocast(device, dtype=None):
    import torch

    return torch.autocast(device.type, dtype=dtype or torch.bfloat16)
