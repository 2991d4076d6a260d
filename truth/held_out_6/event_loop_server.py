"""Inference server on an event loop: clients ask over a Unix socket, a task batches what has come, a compiled model answers.

The compiler's work is done before the run begins. Batches are padded to one of two sizes. The loop sleeps while there is nothing
to do: that wait, in its selector, is `sleep`. The protocol is `host`. The clients are two processes with eight conversations
each. No training.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import asyncio
import itertools
import multiprocessing
import random
import selectors
import struct
import tempfile

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
WORDS, SIZES = 10_000, (8, 32)
CLIENTS, TALKS, PATIENCE = 2, 8, 0.002


class StampedSelector(selectors.DefaultSelector):
    def select(self, timeout=None):
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        with stamps.sleep:
            return super().select(timeout)


async def talk(path, longest, pause, ended, seed):
    """A conversation of a client: a text, its vector, a pause."""
    draw = random.Random(seed)
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        while not ended.is_set():
            text = [draw.randrange(1, WORDS) for _ in range(draw.randint(4, longest))]
            writer.write(struct.pack(f"<H{len(text)}H", len(text), *text))
            await writer.drain()
            (size,) = struct.unpack("<H", await reader.readexactly(2))
            await reader.readexactly(4 * size)
            await asyncio.sleep(draw.expovariate(1 / pause))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


def ask(path, longest, pause, started, go, ended, client):
    """Main function of a client."""

    async def talks():
        await asyncio.gather(*(talk(path, longest, pause, ended, 100 * client + number) for number in range(TALKS)))

    started.release()
    go.wait()
    asyncio.run(talks())


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, hidden, there):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        wide = self.norm_2(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(wide)) * self.up(wide))


class Embedder(nn.Module):
    def __init__(self, width, depth, heads, longest):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(longest, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 128)

    def forward(self, words):
        """A vector for each row of words. Word 0 is no word."""
        there = words != 0
        hidden = self.embed(words) + self.place
        for layer in self.layers:
            hidden = layer(hidden, there)
        mean = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return nn.functional.normalize(self.head(mean).float(), dim=1)


class Server:
    def __init__(self, run, model, longest):
        self.run, self.model, self.longest = run, model, longest
        self.requests, self.count = asyncio.Queue(), 0

    async def converse(self, reader, writer):
        """Serve one connection."""
        try:
            while True:
                (size,) = struct.unpack("<H", await reader.readexactly(2))
                text = struct.unpack(f"<{size}H", await reader.readexactly(2 * size))
                answer = asyncio.get_running_loop().create_future()
                self.requests.put_nowait((text, answer))
                vector = await answer
                writer.write(struct.pack(f"<H{len(vector)}f", len(vector), *vector))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return
        finally:
            writer.close()

    def embed(self, texts):
        rows = next(size for size in SIZES if size >= len(texts))
        words = torch.zeros(rows, self.longest, dtype=torch.long)
        for row, text in enumerate(texts):
            words[row, :len(text)] = torch.tensor(text)
        (words,) = stamps.to_device([words], self.run.device)
        with stamps.forward:
            vectors = self.model(words)
        with stamps.gpu if vectors.is_cuda else stamps.host:
            vectors = vectors.cpu()
        return vectors[:len(texts)].tolist()

    async def batch(self):
        """Answer until the run ends. Nothing is awaited inside a step."""
        while self.run.running():
            try:
                first = await asyncio.wait_for(self.requests.get(), 0.1)
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(PATIENCE)
            with stamps.step:
                batch = [first]
                while len(batch) < SIZES[-1] and not self.requests.empty():
                    batch.append(self.requests.get_nowait())
                for (_, answer), vector in zip(batch, self.embed([text for text, _ in batch])):
                    if not answer.cancelled():
                        answer.set_result(vector)
            self.count += 1


async def serve(run, model, longest, path, go):
    server = Server(run, model, longest)
    listening = await asyncio.start_unix_server(server.converse, path)
    run.begin()
    go.set()
    with stamps.host:
        await server.batch()
    listening.close()
    conversations = asyncio.all_tasks() - {asyncio.current_task()}
    for conversation in conversations:
        conversation.cancel()
    await asyncio.gather(*conversations, return_exceptions=True)
    return server.count


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="the compiler [inductor]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    longest = run.pick(64, 8)
    model = Embedder(run.pick(768, 16), run.pick(4, 1), run.pick(12, 2), longest)
    model = model.to(run.device, dtype=run.pick(torch.bfloat16, torch.float32)).eval().requires_grad_(False)
    compiled = torch.compile(model, backend=args.backend, dynamic=False)
    context = multiprocessing.get_context("spawn")
    started, go, ended = context.Semaphore(0), context.Event(), context.Event()
    with tempfile.TemporaryDirectory(prefix="truth-server-") as folder:
        path = os.path.join(folder, "socket")
        settings = (path, longest, run.pick(0.008, 0.1), started, go, ended)
        clients = [context.Process(target=ask, args=(*settings, client), daemon=True) for client in range(CLIENTS)]
        for client in clients:
            client.start()
        with torch.no_grad():
            for size, _ in itertools.product(SIZES, range(3)):
                compiled(torch.ones(size, longest, dtype=torch.long, device=run.device)).cpu()
            for _ in clients:
                started.acquire()
            loop = asyncio.SelectorEventLoop(StampedSelector())
            asyncio.set_event_loop(loop)
            count = loop.run_until_complete(serve(run, compiled, longest, path, go))
            loop.close()
        ended.set()
        run.done(count)
        for client in clients:
            client.join(5)


if __name__ == "__main__":
    main()
