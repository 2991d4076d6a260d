"""A compiled language model whose texts grow: every eighth step brings a length that was not seen before, and compiles again.

The compiler is told that shapes are fixed, so each length has kernels of its own. Its caches are off. Eight steps take a small
part of the seconds that a length takes to compile: the run is mostly compilation.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import job
import stamps
import torch
import torch._dynamo
from torch import nn

KNOWN = {"verdict": "compile", "absent": ["DataLoading", "NcclCollective"]}
WORDS = 2000
STEPS = 8
SHORTEST, GROWTH = 48, 16


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        query, key, value = self.split(self.norm_1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).flatten(2))
        wide = self.norm_2(hidden)
        return hidden + self.down(nn.functional.silu(self.gate(wide)) * self.up(wide))


class Language(nn.Module):
    def __init__(self, width, depth, heads, longest):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(longest, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        """The loss of guessing each word from those before it."""
        hidden = self.embed(words[:, :-1]) + self.place[:words.shape[1] - 1]
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words[:, 1:].flatten())


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="the compiler [inductor]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    longest = run.pick(1024, 512)
    # Without this, the ninth length and all after it would run uncompiled.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    torch.compiler.reset()
    text = torch.randint(WORDS, (200_000,), device=run.device)
    model = Language(run.pick(512, 16), run.pick(6, 1), run.pick(8, 2), longest).to(run.device)
    compiled = torch.compile(model, backend=args.backend, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    run.begin()
    stamps.label_compilation()
    count = 0
    while run.running():
        with stamps.step:
            length = min(longest, SHORTEST + GROWTH * (count // STEPS))
            starts = torch.randint(len(text) - length, (run.pick(16, 2), 1), device=run.device)
            words = text[starts + torch.arange(length, device=run.device)]
            with stamps.forward:
                loss = compiled(words)
            stamps.backward(loss)
            with stamps.optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
