"""Language model on one long mapped array of tokens: windows are cut at random, pinned and copied ahead. GPU-bound.

No DataLoader. The next windows are cut between the forward and the backward pass, while the GPU is busy: that is `data`. A
step accumulates two micro-batches in bf16 without a scaler. The learning rate is computed by hand.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import math
import tempfile

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
VOCABULARY = 32_768
MICRO_BATCHES = 2
WARM_UP, DECAY, HIGHEST, LOWEST = 20, 2000, 6e-4, 6e-5


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.expand, self.contract = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden):
        parts = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for part in self.attend(self.norm_1(hidden)).chunk(3, dim=-1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).flatten(2))
        return hidden + self.contract(nn.functional.gelu(self.expand(self.norm_2(hidden))))


class Gpt(nn.Module):
    def __init__(self, width, depth, heads, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.initialize)

    @staticmethod
    def initialize(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs, targets):
        hidden = self.tokens(inputs) + self.places.weight[:inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def make_optimizer(self, fused):
        """Matrices decay, everything else does not."""
        weights = list(self.parameters())
        groups = [{"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": 0.1},
                  {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=HIGHEST, betas=(0.9, 0.95), fused=fused)


class Text:
    """A file of tokens, mapped into memory."""

    def __init__(self, run, count):
        self.device = run.device
        with tempfile.TemporaryDirectory() as folder:
            path = folder + "/train.bin"
            written = torch.from_file(path, shared=True, size=count, dtype=torch.int32)
            written.random_(VOCABULARY)
            self.tokens = torch.from_file(path, shared=False, size=count, dtype=torch.int32)

    def get_batch(self, rows, length):
        with stamps.data:
            starts = torch.randint(len(self.tokens) - length - 1, (rows,)).tolist()
            batch = [torch.stack([self.tokens[start + shift:start + shift + length].long() for start in starts])
                     for shift in (0, 1)]
            if self.device.type == "cuda":
                batch = [tokens.pin_memory() for tokens in batch]
        return stamps.to_device(batch, self.device)


def learning_rate(step):
    """A linear warm-up, then a cosine."""
    if step < WARM_UP:
        return HIGHEST * (step + 1) / WARM_UP
    done = min(1.0, (step - WARM_UP) / DECAY)
    return LOWEST + 0.5 * (1.0 + math.cos(math.pi * done)) * (HIGHEST - LOWEST)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    torch.backends.cuda.matmul.allow_tf32 = True
    rows, length = run.pick((16, 1024), (2, 16))
    model = Gpt(run.pick(2048, 16), run.pick(4, 1), run.pick(16, 2), length).to(run.device)
    optimizer = model.make_optimizer(fused=run.device.type == "cuda")
    text = Text(run, run.pick(50_000_000, 100_000))
    run.begin()
    inputs, targets = text.get_batch(rows, length)
    count = 0
    while run.running():
        with stamps.step:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(count)
            for _ in range(MICRO_BATCHES):
                with stamps.forward, job.autocast(run.device):
                    loss = model(inputs, targets) / MICRO_BATCHES
                inputs, targets = text.get_batch(rows, length)
                stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
