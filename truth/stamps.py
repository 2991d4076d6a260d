"""Stamps: what each thread of a training script does, written down by the script itself.

A script enters and leaves labels (`with stamps.forward:`). Each change is one entry (monotonic ns, tid, label)
in preallocated arrays. They are written to `$ZERNEL_TRUTH/stamps-PID.jsonl` when the process exits. Without ZERNEL_TRUTH
nothing is recorded. docs/accuracy.md defines the labels.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import sys
import threading
from array import array
from multiprocessing import util
from time import monotonic_ns

FOLDER = os.environ.get("ZERNEL_TRUTH")
ON = bool(FOLDER)
# 12 s of 1,000 steps per second with 16 stamps each. The list grows if a script needs more.
SLOTS = 200_000


class Log:
    """The stamps of one process."""

    def __init__(self):
        # Three columns: a tuple per stamp would be slower and keep the garbage collector busy.
        self.times = array("q", bytes(8 * SLOTS))
        self.threads = [0] * SLOTS
        self.labels = [None] * SLOTS
        self.next_index = itertools.count().__next__
        self.variant = None
        self.known = None
        self.begin = None
        self.end = None
        self.gpu_busy = None
        self.training_tid = None
        self.autograd_tid = None
        self.written = False

    def grow(self):
        self.times.extend(array("q", bytes(8 * SLOTS)))
        self.threads.extend([0] * SLOTS)
        self.labels.extend([None] * SLOTS)

    def entries(self):
        """The stamps between begin and end."""
        for entry in zip(self.times, self.threads, self.labels):
            if entry[2] is not None and self.begin <= entry[0] <= self.end:
                yield entry


log = Log()
_thread = threading.local()


def tid():
    """The kernel's id of the calling thread."""
    try:
        return _thread.tid
    except AttributeError:
        _thread.tid = threading.get_native_id()
        return _thread.tid


def stamp(label, thread=None):
    """Record that a thread enters `+label` or leaves (`-`) its innermost label now."""
    index = log.next_index()
    if index >= len(log.labels):
        log.grow()
    log.times[index] = monotonic_ns()
    log.threads[index] = thread or tid()
    log.labels[index] = label


class Label:
    """A context manager that stamps one label. One instance serves all threads and may nest."""

    __slots__ = ("entered",)

    def __init__(self, name):
        self.entered = "+" + name

    def __enter__(self):
        stamp(self.entered)

    def __exit__(self, *_):
        stamp("-")


class NoLabel:
    """Stands for a label while nothing is recorded."""

    def __init__(self, _name):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


class Step:
    """A step: a frame, and inside it `host` wherever no other label is entered."""

    def __enter__(self):
        stamp("+step")
        stamp("+host")

    def __exit__(self, *_):
        stamp("-")
        stamp("-")


label = Label if ON else NoLabel
step = Step() if ON else NoLabel("step")
data = label("data")
forward = label("forward")
backward_pass = label("backward")
optimizer = label("optimizer")
gpu = label("gpu")
peer = label("peer")
compiling = label("compile")
evaluation = label("evaluation")
checkpoint = label("checkpoint")
host = label("host")
sleep = label("sleep")
feed = label("feed")
feed_idle = label("feed_idle")


def begin(variant, known, gpu_busy=None):
    """Start the log of a training process. `gpu_busy` samples the GPU and has stop() -> list or None."""
    if not ON:
        return
    log.variant, log.known, log.begin = variant, known, monotonic_ns()
    log.training_tid, log.gpu_busy = tid(), gpu_busy
    atexit.register(write)
    # SIGTERM becomes an exit, so that a job that is cut short leaves its stamps.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def begin_loader(variant, known):
    """Start the log of a loader process. It is written when multiprocessing ends the process."""
    if not ON:
        return
    log.variant, log.known, log.begin = variant, known, monotonic_ns()
    util.Finalize(None, write, exitpriority=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def end():
    """End the stamped part of the run. What follows, such as ending the loaders, is not written."""
    if log.end is None:
        log.end = monotonic_ns()


def write():
    """Write what was stamped between begin and end, once. A reader never sees half a file."""
    if log.begin is None or log.written:
        return
    log.written = True
    end()
    busy = log.gpu_busy.stop() if log.gpu_busy else None
    path = os.path.join(FOLDER, f"stamps-{os.getpid()}.jsonl")
    header = {"version": 1, "pid": os.getpid(), "variant": log.variant, "clock": "monotonic",
              "begin": log.begin, "known": log.known}
    with open(path + ".part", "w") as file:
        file.write(json.dumps(header) + "\n")
        for entry in log.entries():
            file.write('[%d, %d, "%s"]\n' % entry)
        file.write(json.dumps({"end": log.end, "gpu_busy": busy}) + "\n")
    os.rename(path + ".part", path)


def _reset_in_child():
    """Give a forked child an empty log and a tid of its own."""
    global log, _thread
    log = Log()
    _thread = threading.local()


if ON:
    os.register_at_fork(after_in_child=_reset_in_child)


# Around PyTorch


def backward(loss, peers=False, **options):
    """`loss.backward()` labelled in the calling thread and in the autograd thread."""
    with backward_of(loss, peers):
        loss.backward(**options)


@contextlib.contextmanager
def backward_of(loss, peers=False):
    """Label a backward pass, called from anywhere, in the calling thread and in the autograd thread.

    The autograd thread's id comes from a hook in the first pass; later passes stamp both threads at the call and at its
    return, because a hook in every pass would cost more than all other stamps. With `peers`, every pass has the hook, and
    what follows the last gradient is `peer`: DistributedDataParallel then waits for its all-reduce.
    """
    if not ON:
        yield
        return
    pass_ = _Pass(peers)
    if peers or log.autograd_tid is None:
        loss.register_hook(pass_.started)
    elif log.autograd_tid != pass_.caller:
        pass_.worker = log.autograd_tid
        stamp("+backward", pass_.worker)
    with backward_pass:
        yield
        pass_.returned()


@functools.lru_cache
def engine():
    """PyTorch's autograd engine. Loaded late: a script without PyTorch uses stamps as well."""
    from torch.autograd import Variable

    return Variable._execution_engine


class _Pass:
    """One backward pass, seen from the thread that calls it and from the autograd thread."""

    def __init__(self, peers):
        self.peers = peers
        self.caller = tid()
        self.worker = None
        self.waits = False

    def started(self, _gradient):
        """Runs in the autograd thread, before everything else of the pass."""
        log.autograd_tid = tid()
        if log.autograd_tid != self.caller:
            self.worker = log.autograd_tid
            stamp("+backward", self.worker)
        if self.peers:
            engine().queue_callback(self.finished)

    def finished(self):
        """Runs after the last gradient, before DistributedDataParallel's own callback waits for the peers."""
        self.waits = True
        stamp("+peer", self.caller)
        if self.worker:
            stamp("+peer", self.worker)

    def returned(self):
        if self.waits:
            stamp("-", self.caller)
            if self.worker:
                stamp("-", self.worker)
        if self.worker:
            stamp("-", self.worker)


def item(tensor):
    """`tensor.item()`: waits for the GPU."""
    if tensor.device.type == "cpu":
        return tensor.item()
    with gpu:
        return tensor.item()


def synchronize(device):
    """Wait until the GPU has finished everything."""
    import torch

    if device.type == "cuda":
        with gpu:
            torch.cuda.synchronize(device)


def to_device(tensors, device):
    """Copy a batch to the device. Copies of pageable memory wait for the GPU, copies of pinned memory do not."""
    if device.type == "cpu":
        return tensors
    pinned = all(tensor.is_pinned() for tensor in tensors)
    with host if pinned else gpu:
        return [tensor.to(device, non_blocking=pinned) for tensor in tensors]


class RunAhead:
    """Lets the host run at most `depth` steps ahead of the GPU, so that the launch queue is never full."""

    def __init__(self, device, depth=2):
        import torch

        self.events = []
        self.depth = depth
        self.new_event = torch.cuda.Event if device.type == "cuda" else None

    def step(self):
        if self.new_event is None:
            return
        event = self.new_event()
        event.record()
        self.events.append(event)
        if len(self.events) > self.depth:
            with gpu:
                self.events.pop(0).synchronize()


def label_compilation():
    """Label what torch.compile compiles, whichever thread does it. Returns whether this PyTorch reports it."""
    try:
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return False

    def started(*_):
        stamp("+compile")
        if tid() != log.training_tid:
            stamp("+compile", log.training_tid)

    def finished(*_):
        stamp("-")
        if tid() != log.training_tid:
            stamp("-", log.training_tid)

    if ON:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(finished)
    return True
