"""Fine-tuning of a language model by pairs of answers, of which one is preferred; a frozen copy is the reference. GPU-bound.

The policy's layers are recomputed in the backward pass. A step has two micro-batches of pairs. After each one the share of pairs
that are ranked right is read back. Weights, gradients and the optimizer's state are bf16. A linear schedule warms up.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import copy

import feeding
import job
import stamps
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

KNOWN = {"verdict": "gpu", "absent": ["NcclCollective"]}
WORDS, PARTS, BETA = 8000, 2, 0.1


class Pairs(Dataset):
    """A question with the preferred answer and with the other one: two rows of words, and where the answers begin."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(4)
        self.words = torch.randint(WORDS, (500, 2, length), generator=generator)
        self.starts = torch.randint(length // 4, length // 2, (500,), generator=generator)

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        words, start = self.words[index % 500].clone(), self.starts[index % 500]
        words[1, :start] = words[0, :start]
        return words, start


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


class Language(nn.Module):
    def __init__(self, width, depth, heads, length):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words, start):
        """The logarithm of the chance of each row's answer."""
        inputs, wanted = words[:, :-1], words[:, 1:]
        hidden = self.embed(inputs) + self.place[:inputs.shape[1]]
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.training else layer(hidden)
        scores = self.head(self.norm(hidden)).flatten(0, 1)
        chances = -nn.functional.cross_entropy(scores, wanted.flatten(), reduction="none").view_as(wanted)
        answers = torch.arange(wanted.shape[1], device=words.device) >= start[:, None]
        return (chances * answers).float().sum(1)


def compare(policy, reference, words, start):
    """The loss of a micro-batch, and how many of its pairs the policy ranks right."""
    rows, start = words.flatten(0, 1), start.repeat_interleave(2)
    with torch.no_grad():
        before = reference(rows, start)
    better, worse = (policy(rows, start) - before).view(-1, 2).unbind(1)
    margin = BETA * (better - worse)
    return -nn.functional.logsigmoid(margin).mean(), (margin.detach() > 0).sum()


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    length, pairs = run.pick((512, 8), (32, 2))
    policy = Language(run.pick(1536, 32), run.pick(8, 2), run.pick(12, 2), length)
    policy = policy.to(run.device, dtype=run.pick(torch.bfloat16, torch.float32))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-6, fused=run.pick(True, None))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=200)
    run.begin()
    source = feeding.loader(Pairs(length), batch_size=pairs, shuffle=True, num_workers=2, drop_last=True,
                            pin_memory=run.pick(True, False))
    supply = feeding.endless(source, lambda: True)
    count, right = 0, 0
    while run.running():
        with stamps.step:
            for _ in range(PARTS):
                words, start = stamps.to_device(next(supply), run.device)
                with stamps.forward:
                    loss, ranked = compare(policy, reference, words, start)
                stamps.backward(loss / PARTS)
                right += stamps.item(ranked)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        count += 1
    supply.close()
    run.done(count)


if __name__ == "__main__":
    main()
