"""Inference with two models: a small one drafts five tokens, a large one checks them all in one pass. No training.

A step is one draft and its check. The number of accepted tokens is read back: that wait is `gpu`. Both models' passes are
`forward`.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "inference", "absent": ["DataLoading", "NcclCollective", "OptimizerStep"]}
WORDS, DRAFTED = 6000, 5


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden):
        parts = self.split(self.before(hidden)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        normal = self.between(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


class Decoder(nn.Module):
    def __init__(self, width, depth, heads):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, words, last):
        """Probabilities of the words that follow the `last` ones."""
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.norm(hidden[:, -last:]) @ self.embed.weight.t()).float().mul(0.05).softmax(-1)


def sample(chances):
    """One word per row. Does not wait for the GPU, as multinomial() may."""
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1, keepdim=True)


def draft(model, words):
    """Words with some more that the model samples, and the probability of each of those."""
    chances = []
    for _ in range(DRAFTED):
        following = model(words, 1)[:, 0]
        word = sample(following)
        chances.append(following.gather(1, word))
        words = torch.cat([words, word], 1)
    return words, torch.cat(chances, 1)


def check(model, words, chances):
    """How many drafted words the large model accepts, and its own word for each place."""
    wanted = model(words, DRAFTED + 1)
    drafted = words[:, -DRAFTED:]
    ratio = wanted[:, :-1].gather(2, drafted[:, :, None]).squeeze(2) / chances
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum()
    return accepted, sample(wanted).squeeze(2)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    longest = run.pick(512, 32)
    kind = run.pick(torch.bfloat16, torch.float32)
    small = Decoder(run.pick(512, 16), run.pick(3, 1), run.pick(8, 2)).to(run.device, dtype=kind).eval()
    large = Decoder(run.pick(2048, 32), run.pick(16, 2), run.pick(16, 2)).to(run.device, dtype=kind).eval()
    run.begin()
    count = written = 0
    with torch.inference_mode():
        while run.running():
            words = torch.randint(WORDS, (1, 8), device=run.device)
            while words.shape[1] < longest and run.running():
                with stamps.step:
                    with stamps.forward:
                        longer, chances = draft(small, words)
                    with stamps.forward:
                        accepted, own = check(large, longer, chances)
                    accepted = stamps.item(accepted)
                    end = words.shape[1] + accepted
                    words = torch.cat([longer[:, :end], own[:, accepted:accepted + 1]], 1)
                    written += accepted + 1
                count += 1
    run.done(count)
    print(f"{written} words written")


if __name__ == "__main__":
    main()
