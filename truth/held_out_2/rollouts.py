"""Learning from rewards: write answers token by token with a cache, score them in Python, then update twice per half.

One step is a rollout and its four updates. Small layers, one token at a time: host-bound. Writing and the frozen
reference are `forward`; scoring is `host`.
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
from torch.utils.data import Dataset

KNOWN = {"verdict": "host", "absent": ["NcclCollective"]}
VOCABULARY = 256


class Prompts(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        return (torch.arange(self.length) * (index % 11 + 1) + index) % VOCABULARY


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, hidden, cache):
        """With a list as cache, keys and values of earlier calls are seen too, and those of this one are added."""
        query, key, value = self.split(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        first = cache is None or not cache
        if cache:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        if cache is not None:
            cache[:] = [key, value]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=first)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.norms[1](hidden))


class Policy(nn.Module):
    def __init__(self, width, depth, heads, length):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words, caches=None, start=0):
        places = self.place.weight[start:start + words.shape[1]]
        hidden = self.embed(words) + places
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, None if caches is None else caches[index])
        return self.head(hidden)

    def chances(self, words, asked):
        """Log-probability of every answered word."""
        guess = self(words[:, :-1])[:, asked - 1:].log_softmax(-1)
        return guess.gather(-1, words[:, asked:, None]).squeeze(-1)


@torch.no_grad()
def write(policy, prompts, count):
    """Prompts with `count` sampled words after them."""
    caches = [[] for _ in policy.layers]
    words, latest = prompts, prompts
    for _ in range(count):
        logits = policy(latest, caches, words.shape[1] - latest.shape[1])[:, -1]
        # The largest of the noisy logits is a sample. multinomial() would wait for the GPU.
        latest = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1, keepdim=True)
        words = torch.cat([words, latest], 1)
    return words


def score(answer):
    """A rule that no network computes: rising words are good, repeated ones are bad."""
    rising = sum(left < right for left, right in zip(answer, answer[1:]))
    return (rising - (len(answer) - len(set(answer)))) / len(answer)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    asked, answered, rows = run.pick((16, 48, 32), (4, 6, 4))
    policy = Policy(run.pick(256, 16), run.pick(6, 2), run.pick(4, 2), asked + answered).to(run.device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    run.begin()
    source = feeding.loader(Prompts(asked), batch_size=rows, num_workers=1, drop_last=True)
    count = 0
    for prompts in feeding.steps(source, run.running):
        (prompts,) = stamps.to_device([prompts], run.device)
        with stamps.forward:
            words = write(policy, prompts, answered)
        with stamps.gpu if run.device.type == "cuda" else stamps.host:
            answers = words[:, asked:].tolist()
        with stamps.host:
            rewards = torch.tensor([score(answer) for answer in answers])
            rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        (rewards,) = stamps.to_device([rewards], run.device)
        with stamps.forward, torch.no_grad():
            before, fixed = policy.chances(words, asked), reference.chances(words, asked)
            gains = rewards[:, None] - 0.05 * (before - fixed)
        for half in (slice(None, rows // 2), slice(rows // 2, None)) * 2:
            with stamps.forward:
                ratio = (policy.chances(words[half], asked) - before[half]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * gains[half], clipped * gains[half]).mean()
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
