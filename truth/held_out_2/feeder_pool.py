"""Home-made feeder processes compute spectrograms on the CPU and pass them through a queue; loading is the bottleneck.

No DataLoader: the processes are spawned before the run and stamp `feed` and `feed_idle` themselves. A small student
learns from a fixed teacher: the passes of both are `forward`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import queue
from multiprocessing import queues

import feeding
import job
import stamps
import torch
from torch import multiprocessing, nn

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
SAMPLES, BANDS = 16_384, 64


def spectrogram(number, speeds):
    """The mean spectrogram of a clip at several speeds: about half a millisecond of CPU time for each."""
    window = torch.hann_window(512)
    clip = torch.sin(torch.arange(SAMPLES) * (0.01 + number % 50 / 1000)) + 0.1 * torch.randn(SAMPLES)
    total = torch.zeros(BANDS, 33)
    for speed in range(speeds):
        spectrum = torch.stft(clip.roll(speed), 512, 128, window=window, return_complex=True).abs()
        total += nn.functional.adaptive_avg_pool2d(spectrum[None], (BANDS, 33))[0]
    return torch.log1p(total / speeds)


def feed(ready, started, go, ended, variant, size, speeds):
    """Main function of a feeder process."""
    torch.set_num_threads(1)
    ready.cancel_join_thread()
    started.release()
    go.wait()
    stamps.begin_loader(variant, KNOWN)
    if stamps.ON:
        queues._ForkingPickler = feeding.StampedPickler
    number = os.getpid()
    while not ended.is_set():
        with stamps.feed:
            batch = torch.stack([spectrogram(number + index, speeds) for index in range(size)])
        number += size
        with stamps.feed_idle:
            while not ended.is_set():
                try:
                    ready.put(batch, timeout=0.2)
                    break
                except queue.Full:
                    continue


def network(width, depth):
    layers = [nn.Conv1d(BANDS, width, 3)]
    for _ in range(depth):
        layers += [nn.GELU(), nn.Conv1d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 50))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    teacher = network(run.pick(256, 16), run.pick(8, 2)).to(run.device).eval().requires_grad_(False)
    student = network(run.pick(64, 8), run.pick(4, 1)).to(run.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    context = multiprocessing.get_context("spawn")
    ready, started, go, ended = context.Queue(maxsize=4), context.Semaphore(0), context.Event(), context.Event()
    settings = (ready, started, go, ended, run.variant, run.pick(32, 4), run.pick(4, 2))
    feeders = [context.Process(target=feed, args=settings, daemon=True) for _ in range(2)]
    for feeder in feeders:
        feeder.start()
    for _ in feeders:
        started.acquire()
    run.begin()
    go.set()
    count = 0
    while run.running():
        with stamps.step:
            with stamps.data:
                sounds = ready.get()
            (sounds,) = stamps.to_device([sounds], run.device)
            with stamps.forward:
                with torch.no_grad():
                    wanted = teacher(sounds).div(2).log_softmax(1)
                guess = student(sounds).div(2).log_softmax(1)
                loss = nn.functional.kl_div(guess, wanted, reduction="batchmean", log_target=True)
            with stamps.optimizer:
                optimizer.zero_grad()
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
            stamps.item(loss.detach())
        count += 1
    ended.set()
    run.done(count)
    for feeder in feeders:
        feeder.join(5)


if __name__ == "__main__":
    main()
