"""Masked words: loaders split documents into word pieces in their collate function, slowly; loading is the bottleneck.

A prefetcher asks for the next batch as soon as it has handed out the current one, and copies it on a stream of its own. So
the training thread waits for loaders before the passes of a step. Batches differ in length. Two loader processes.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import random

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "input", "absent": ["NcclCollective"]}
PAD, MASK, UNKNOWN, FIRST = 0, 1, 2, 3
LETTERS = "etaoinshrdlu"
LONGEST_PIECE = 8


class Documents(Dataset):
    """Documents of random words, as bytes."""

    def __init__(self, words):
        draw = random.Random(0)
        lengths = [draw.randint(words // 2, words) for _ in range(64)]
        self.texts = [" ".join("".join(draw.choices(LETTERS, k=draw.randint(2, 12))) for _ in range(length)).encode()
                      for length in lengths]

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        return self.texts[index % 64]


def make_pieces(count):
    """All letters, and random pieces of several letters."""
    draw = random.Random(1)
    pieces = list(LETTERS) + ["".join(draw.choices(LETTERS, k=draw.randint(2, LONGEST_PIECE))) for _ in range(count)]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces), FIRST)}


class PadAndMask:
    """Collate function: pieces of all documents, padded to the longest one, with some of them masked."""

    def __init__(self, pieces, longest):
        self.pieces, self.longest = pieces, longest

    def split(self, word):
        """The longest pieces that a word consists of, from left to right."""
        found, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + LONGEST_PIECE), start, -1):
                number = self.pieces.get(word[start:end])
                if number is not None:
                    break
            found.append(UNKNOWN if number is None else number)
            start = end
        return found

    def __call__(self, texts):
        documents = [[piece for word in text.decode().split() for piece in self.split(word)] for text in texts]
        starts = [random.randint(0, max(0, len(document) - self.longest)) for document in documents]
        documents = [document[start:start + self.longest] for start, document in zip(starts, documents)]
        rows = [torch.tensor(document) for document in documents]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        chosen = (torch.rand(tokens.shape) < 0.15) & (tokens != PAD)
        return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, -100)


class DataPrefetcher:
    """Has the next batch on its way to the device while the current one trains."""

    def __init__(self, supply, device):
        self.supply, self.device = supply, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.preload()

    def preload(self):
        self.batch = next(self.supply, None)
        if self.batch is not None and self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.batch = stamps.to_device(self.batch, self.device)

    def next(self):
        batch = self.batch
        if batch is not None and self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            for tensor in batch:
                tensor.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


class MaskedModel(nn.Module):
    def __init__(self, vocabulary, width, depth, heads, longest):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(longest, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places[:tokens.shape[1]]
        padded = tokens == PAD
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padded)
        return self.head(hidden)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    rows, words, longest = run.pick((64, 1600, 192), (8, 400, 32))
    pieces = make_pieces(2000)
    vocabulary = FIRST + len(pieces)
    model = MaskedModel(vocabulary, run.pick(256, 16), run.pick(3, 1), run.pick(4, 2), longest).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    run.begin()
    source = feeding.loader(Documents(words), batch_size=rows, shuffle=True, num_workers=2, drop_last=True,
                            collate_fn=PadAndMask(pieces, longest), pin_memory=run.pick(True, False))
    supply = feeding.endless(source, run.running)
    prefetcher = DataPrefetcher(supply, run.device)
    count = 0
    while run.running():
        with stamps.step:
            batch = prefetcher.next()
            if batch is None:
                break
            tokens, wanted = batch
            with stamps.forward:
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(), ignore_index=-100)
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if count % 10 == 0:
                stamps.item(loss.detach())
        count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
