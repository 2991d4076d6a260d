"""Inference server: clients put requests into a queue, one thread collects batches and answers. No training."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import queue
import random
import threading
import time

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}


class Encoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(5000, width)
        self.mix = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.mix:
            hidden = hidden + layer(hidden)[0]
        return hidden.mean(1)


def client(requests, ended, pause):
    while not ended.is_set():
        answered = threading.Event()
        requests.put((torch.randint(5000, (32,)), answered))
        answered.wait(5)
        time.sleep(random.expovariate(1 / pause))


def collect(requests, limit):
    """One to `limit` requests: waits for the first, takes what else is there."""
    with stamps.sleep:
        try:
            batch = [requests.get(timeout=0.1)]
        except queue.Empty:
            return []
    while len(batch) < limit:
        try:
            batch.append(requests.get_nowait())
        except queue.Empty:
            break
    return batch


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Encoder(run.pick(512, 32), run.pick(4, 1)).to(run.device).eval()
    requests, ended = queue.Queue(), threading.Event()
    clients = [threading.Thread(target=client, args=(requests, ended, 0.005), daemon=True) for _ in range(8)]
    run.begin()
    for thread in clients:
        thread.start()
    count = 0
    with torch.inference_mode():
        while run.running():
            with stamps.step:
                batch = collect(requests, 16)
                if not batch:
                    continue
                with stamps.host:
                    words = torch.stack([words for words, _ in batch])
                (words,) = stamps.to_device([words], run.device)
                with stamps.forward, job.autocast(run.device, torch.float16 if run.device.type == "cuda" else None):
                    vectors = model(words)
                with stamps.gpu if run.device.type == "cuda" else stamps.host:
                    vectors.float().cpu()
                with stamps.host:
                    for _, answered in batch:
                        answered.set()
            count += 1
    ended.set()
    run.done(count)


if __name__ == "__main__":
    main()
