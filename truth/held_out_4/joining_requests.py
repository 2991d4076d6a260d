"""Inference server that batches continuously: requests join and leave a running batch between two tokens. No training.

The batch has 16 slots, each with its part of a preallocated cache. A step admits waiting requests, each with a pass over its
prompt, then writes one token for every slot and reads them back. With no request at all the server waits: that is `sleep`.
"""

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
WORDS, END = 8000, 0
SLOTS = 16


class Layer(nn.Module):
    def __init__(self, width, heads, longest):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        shape = (SLOTS, longest, heads, width // heads)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def attend(self, hidden, slots, places, visible):
        """Store keys and values of the new words, then look at all that are visible."""
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        self.keys[slots, places] = key
        self.values[slots, places] = value
        keys, values = self.keys[slots[:, 0]], self.values[slots[:, 0]]
        mixed = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible)
        return hidden + self.join(mixed.transpose(1, 2).flatten(2))

    def forward(self, hidden, slots, places, visible):
        hidden = self.attend(hidden, slots, places, visible)
        return hidden + self.down(nn.functional.silu(self.up(self.norm_2(hidden))))


class Writer(nn.Module):
    def __init__(self, width, depth, heads, longest):
        super().__init__()
        self.longest = longest
        self.embed, self.position = nn.Embedding(WORDS, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads, longest) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, words, slots, places):
        """A sampled word for each row. All arguments are [row, word]."""
        visible = (torch.arange(self.longest, device=words.device) <= places[:, :, None])[:, None]
        hidden = self.embed(words) + self.position(places)
        for layer in self.layers:
            hidden = layer(hidden, slots, places, visible)
        chances = (self.norm(hidden[:, -1]) @ self.embed.weight.t()).float().softmax(-1)
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


class Request:
    def __init__(self, prompt, limit):
        self.prompt, self.limit = prompt, limit
        self.words, self.answered = [], threading.Event()


class Server:
    def __init__(self, model, requests, device):
        self.model, self.requests, self.device = model, requests, device
        self.running = [None] * SLOTS
        self.answers = 0

    def write(self, words, slots, places):
        words, slots, places = stamps.to_device([torch.tensor(words), torch.tensor(slots), torch.tensor(places)], self.device)
        with stamps.forward:
            written = self.model(words, slots, places)
        with stamps.gpu if written.is_cuda else stamps.host:
            return written.tolist()

    def admit(self):
        """Give free slots to waiting requests."""
        for slot in range(SLOTS):
            if self.running[slot] is not None:
                continue
            try:
                request = self.requests.get_nowait()
            except queue.Empty:
                return
            length = len(request.prompt)
            (word,) = self.write([request.prompt], [[slot] * length], [list(range(length))])
            self.running[slot] = request
            self.take(slot, word)

    def take(self, slot, word):
        """Append a word to the answer of a slot, and free the slot if it was the last one."""
        request = self.running[slot]
        request.words.append(word)
        if word == END or len(request.words) == request.limit:
            request.answered.set()
            self.running[slot] = None
            self.answers += 1

    def decode(self):
        """Write one word for every slot in use."""
        used = [slot for slot in range(SLOTS) if self.running[slot] is not None]
        last = [[self.running[slot].words[-1]] for slot in used]
        places = [[len(self.running[slot].prompt) + len(self.running[slot].words) - 1] for slot in used]
        for slot, word in zip(used, self.write(last, [[slot] for slot in used], places)):
            self.take(slot, word)

    def idle(self):
        """Whether there is nothing to do. Waits a moment if so."""
        if any(self.running) or not self.requests.empty():
            return False
        with stamps.sleep:
            time.sleep(0.001)
        return True


def client(requests, ended, pause, longest):
    """Sends requests of all lengths, whether earlier ones are answered or not."""
    draw = random.Random(7)
    while not ended.is_set():
        prompt = [draw.randrange(1, WORDS) for _ in range(draw.randint(2, longest // 2))]
        if requests.qsize() < 100:
            requests.put(Request(prompt, draw.randint(2, longest // 2)))
        time.sleep(draw.expovariate(1 / pause))


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    longest = run.pick(256, 24)
    kind = run.pick(torch.bfloat16, torch.float32)
    model = Writer(run.pick(1024, 16), run.pick(10, 1), run.pick(16, 2), longest).to(run.device, dtype=kind).eval()
    requests, ended = queue.Queue(), threading.Event()
    server = Server(model, requests, run.device)
    thread = threading.Thread(target=client, args=(requests, ended, 0.03, longest), daemon=True)
    run.begin()
    thread.start()
    count = 0
    with torch.inference_mode():
        while run.running():
            if server.idle():
                continue
            with stamps.step:
                server.admit()
                if any(server.running):
                    server.decode()
            count += 1
    ended.set()
    run.done(count)
    print(f"{server.answers} requests answered")


if __name__ == "__main__":
    main()
