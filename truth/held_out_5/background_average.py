"""Two ranks that average their weights in a thread while they train on: every fourth step starts an average.

Before that it waits for the average before and moves the weights by what that one says. Four steps take far less time than an
average of 32 million weights through gloo: communication is the bottleneck. The wait is `peer`, in both threads.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import queue
import threading

import job
import stamps
import torch
import torch.distributed as dist
from torch import nn

KNOWN = {"verdict": "communication", "absent": []}
EVERY = 4
KINDS = 20


class Reader(nn.Module):
    """Tells what kind of text it reads."""

    def __init__(self, words, width):
        super().__init__()
        self.embed, self.state = nn.Embedding(words, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, KINDS)

    def forward(self, words):
        return self.head(self.state(self.embed(words))[0].mean(1))


class Averager:
    """Averages the weights of all ranks. A thread does it, one average at a time."""

    def __init__(self, weights, run):
        self.weights, self.run = list(weights), run
        self.sizes = [weight.numel() for weight in self.weights]
        self.shared = torch.empty(sum(self.sizes), pin_memory=run.device.type == "cuda")
        self.before = None
        self.wanted, self.averaged = queue.SimpleQueue(), threading.Event()
        self.thread = threading.Thread(target=self.work, name="averager", daemon=True)
        self.thread.start()

    def work(self):
        """Main function of the thread."""
        while self.wanted.get():
            with stamps.peer:
                dist.all_reduce(self.shared)
            with stamps.host:
                self.shared /= self.run.world
            self.averaged.set()

    @torch.no_grad()
    def start(self):
        """Copy the weights as they are now and have them averaged."""
        self.before = torch.cat([weight.flatten() for weight in self.weights])
        self.shared.copy_(self.before, non_blocking=True)
        stamps.synchronize(self.run.device)
        self.averaged.clear()
        self.wanted.put(True)

    @torch.no_grad()
    def finish(self):
        """Wait for the average and move the weights by its distance from what they were."""
        if self.before is None:
            return
        with stamps.peer:
            self.averaged.wait()
        change = self.shared.to(self.run.device, non_blocking=True) - self.before
        for weight, part in zip(self.weights, change.split(self.sizes)):
            weight.add_(part.view_as(weight))
        self.before = None

    def end(self):
        self.finish()
        self.wanted.put(False)
        self.thread.join()


class Texts:
    """Texts in memory, each rank's own ones."""

    def __init__(self, words, length, rank):
        generator = torch.Generator().manual_seed(rank)
        self.texts = torch.randint(words, (5000, length), generator=generator)

    def batch(self, rows):
        texts = self.texts[torch.randint(len(self.texts), (rows,))]
        return texts, texts[:, 0] % KINDS


def main():
    args = job.arguments(__doc__).parse_args()
    job.run_ranks(2)
    run = job.Job(args, KNOWN)
    run.join_ranks("gloo")
    words, width, rows, length = run.pick((60_000, 512, 32, 32), (4000, 128, 4, 4))
    # All ranks start from the same weights.
    torch.manual_seed(0)
    model = Reader(words, width).to(run.device)
    torch.manual_seed(run.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = Texts(words, length, run.rank)
    run.begin()
    averager = Averager(model.parameters(), run)
    count = 0
    going = True
    while going:
        with stamps.step:
            with stamps.data:
                batch = texts.batch(rows)
            batch, kinds = stamps.to_device(batch, run.device)
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(batch), kinds)
            stamps.backward(loss)
            with stamps.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            if count % EVERY == 0:
                averager.finish()
                averager.start()
                stamps.item(loss.detach())
            going = run.agree_to_run(count, every=EVERY)
    run.done(count)
    averager.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
