"""Inference server with one CUDA graph for each size of a batch. Its clients are two processes that write to a queue.

The server waits for a request, then two milliseconds for more, fills the batch up to the next power of two and replays that size's
graph. Waiting for requests is `sleep`, a replay is `host`, and waiting for the answer is `gpu`. No training.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import multiprocessing
import queue
import random
import time

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
WORDS, EMPTY, KINDS = 12_000, 0, 8
SIZES = (1, 2, 4, 8, 16, 32)
CLIENTS, PATIENCE = 2, 0.002


def send(requests, answers, started, ended, client, longest, pause):
    """Main function of a client: sends texts of random length and takes the answers that have come."""
    # Nobody may wait for requests that nobody reads any more.
    requests.cancel_join_thread()
    draw = random.Random(client)
    number = 0
    started.release()
    while not ended.is_set():
        text = [draw.randrange(1, WORDS) for _ in range(draw.randint(4, longest))]
        requests.put((client, number, text))
        number += 1
        try:
            while True:
                answers.get_nowait()
        except queue.Empty:
            pass
        time.sleep(draw.expovariate(1 / pause))


class Sorter(nn.Module):
    """Tells what kind of text a row is."""

    def __init__(self, width, depth, heads, longest):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=EMPTY)
        self.place = nn.Parameter(torch.randn(longest, width) * 0.02)
        self.heads = heads
        self.splits = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.joins = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.wides = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, KINDS)

    def forward(self, words):
        there = words != EMPTY
        hidden = self.embed(words) + self.place
        for norm, split, join, wide in zip(self.norms, self.splits, self.joins, self.wides):
            query, key, value = split(norm(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
            hidden = hidden + join(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + wide(hidden)
        mean = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return self.head(mean).float().softmax(1)


class Graph:
    """The model for batches of one size, with memory of its own for questions and answers."""

    def __init__(self, model, rows, longest, device, pool):
        self.device, self.model, self.graph = device, model, None
        on_gpu = device.type == "cuda"
        self.asked = torch.zeros(rows, longest, dtype=torch.long, pin_memory=on_gpu)
        self.answered = torch.zeros(rows, KINDS, pin_memory=on_gpu)
        if not on_gpu:
            return
        self.words = torch.zeros(rows, longest, dtype=torch.long, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(self.words)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.chances = model(self.words)

    def run(self, texts):
        """The chances of each kind for some texts, as lists."""
        with stamps.host:
            self.asked.fill_(EMPTY)
            for row, text in enumerate(texts):
                self.asked[row, :len(text)] = torch.tensor(text)
            if self.graph is None:
                self.answered.copy_(self.model(self.asked))
            else:
                self.words.copy_(self.asked, non_blocking=True)
                self.graph.replay()
                self.answered.copy_(self.chances, non_blocking=True)
        stamps.synchronize(self.device)
        return self.answered[:len(texts)].tolist()


def collect(requests, limit):
    """Waits for a request, then a moment for more of them."""
    with stamps.sleep:
        try:
            batch = [requests.get(timeout=0.1)]
        except queue.Empty:
            return []
        until = time.monotonic() + PATIENCE
        while len(batch) < limit:
            try:
                batch.append(requests.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                break
    return batch


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    longest = run.pick(64, 8)
    context = multiprocessing.get_context("spawn")
    requests, started, ended = context.Queue(), context.Semaphore(0), context.Event()
    answers = [context.Queue() for _ in range(CLIENTS)]
    clients = [context.Process(target=send, daemon=True, args=(
        requests, answers[client], started, ended, client, longest, run.pick(0.0015, 0.02))) for client in range(CLIENTS)]
    model = Sorter(run.pick(1024, 16), run.pick(12, 1), run.pick(16, 2), longest)
    model = model.to(run.device, dtype=run.pick(torch.bfloat16, torch.float32)).eval().requires_grad_(False)
    count = 0
    with torch.no_grad():
        pool = torch.cuda.graph_pool_handle() if run.device.type == "cuda" else None
        graphs = {size: Graph(model, size, longest, run.device, pool) for size in SIZES}
        for client in clients:
            client.start()
        for _ in clients:
            started.acquire()
        run.begin()
        while run.running():
            batch = collect(requests, SIZES[-1])
            if not batch:
                continue
            with stamps.step:
                graph = graphs[next(size for size in SIZES if size >= len(batch))]
                rows = graph.run([text for _, _, text in batch])
                for (client, number, _), row in zip(batch, rows):
                    answers[client].put((number, row.index(max(row))))
            count += 1
    ended.set()
    run.done(count)
    for queue_ in answers:
        queue_.cancel_join_thread()
    for client in clients:
        client.join(5)


if __name__ == "__main__":
    main()
