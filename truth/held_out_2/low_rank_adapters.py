"""Fine-tuning of low-rank adapters in a frozen bf16 decoder; batches of varying length. The GPU is the bottleneck.

No gradients of the trunk's weights, and few weights for the optimizer.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
VOCABULARY = 4000
PADDING = -100


class Dialogues(Dataset):
    def __init__(self, longest):
        self.longest = longest
        self.words = torch.randint(VOCABULARY, (64, longest + 1))

    def __len__(self):
        return 8192

    def length(self, index):
        return self.longest // 2 + index * 37 % (self.longest // 2)

    def __getitem__(self, index):
        return self.words[index % 64, :self.length(index) + 1]


class OfSimilarLength:
    """Lists of indices of dialogues that are about equally long."""

    def __init__(self, dialogues, size):
        order = sorted(range(len(dialogues)), key=dialogues.length)
        self.groups = [order[at:at + size] for at in range(0, len(order) - size + 1, size)]

    def __len__(self):
        return len(self.groups)

    def __iter__(self):
        for at in torch.randperm(len(self.groups)).tolist():
            yield self.groups[at]


def pad(rows):
    """Words and the words that follow, filled up to the longest row."""
    words = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    following = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)
    return words, following


class Adapted(nn.Module):
    """A frozen linear layer and a product of two thin ones beside it."""

    def __init__(self, width, rank):
        super().__init__()
        self.frozen = nn.Linear(width, width, bias=False)
        self.thin = nn.Parameter(torch.randn(rank, width) / width ** 0.5)
        self.back = nn.Parameter(torch.zeros(width, rank))

    def forward(self, hidden):
        low = nn.functional.linear(hidden, self.thin)
        return self.frozen(hidden) + nn.functional.linear(low, self.back)


class Layer(nn.Module):
    def __init__(self, width, heads, rank):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = Adapted(width, rank), Adapted(width, rank)
        self.key, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden):
        normal = self.before(hidden)
        parts = [part(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.between(hidden))))


class Decoder(nn.Module):
    def __init__(self, width, depth, heads, rank):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, rank) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(self.norm(hidden), self.embed.weight)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    model = Decoder(run.pick(2560, 32), run.pick(8, 2), run.pick(20, 2), run.pick(16, 2))
    model = model.to(run.device, dtype=torch.bfloat16).requires_grad_(False)
    adapters = [weight for name, weight in model.named_parameters() if name.endswith((".thin", ".back"))]
    for weight in adapters:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, weight_decay=0.0, fused=run.device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 100)
    run.begin()
    dialogues = Dialogues(run.pick(512, 16))
    source = feeding.loader(dialogues, batch_sampler=OfSimilarLength(dialogues, run.pick(32, 4)), collate_fn=pad,
                            num_workers=2, pin_memory=run.pick(True, False))
    count = 0
    for batch in feeding.steps(source, run.running):
        words, following = stamps.to_device(batch, run.device)
        with stamps.forward:
            guess = model(words).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(guess, following.flatten(), ignore_index=PADDING)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with stamps.host:
            schedule.step()
        stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
