"""Search for a good network: every trial builds a new one, compiles it and trains it for a few steps. Mostly compilation.

The compiler's caches are off, so that each trial compiles. Each trial ends with an evaluation, which compiles once more.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import itertools

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "compile", "absent": ["DataLoading", "NcclCollective"]}
STEPS = 20
SHAPES = list(itertools.product([4, 7, 5, 6], [256, 384, 320], ["silu", "tanh", "softplus"]))


class Candidate(nn.Module):
    def __init__(self, depth, width, activation):
        super().__init__()
        self.enter, self.leave = nn.Linear(32, width), nn.Linear(width, 32)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.activation = activation

    def forward(self, signal):
        hidden = self.enter(signal)
        for layer, norm in zip(self.layers, self.norms):
            changed = layer(norm(hidden))
            changed = torch.tanh(changed) if self.activation == "tanh" else getattr(nn.functional, self.activation)(changed)
            hidden = hidden + changed * torch.sigmoid(hidden.mean(1, keepdim=True))
        return self.leave(hidden)


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="the compiler [inductor]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    torch.compiler.reset()
    run.begin()
    scores, count = {}, 0
    for shape in itertools.cycle(SHAPES):
        if not run.running():
            break
        with stamps.host:
            # This forgets the callbacks as well.
            torch.compiler.reset()
            stamps.label_compilation()
            model = Candidate(*shape).to(run.device)
            compiled = torch.compile(model, backend=args.backend, dynamic=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            if not run.running():
                break
            with stamps.step:
                signal = torch.randn(run.pick(512, 8), 32, device=run.device)
                with stamps.forward:
                    loss = nn.functional.mse_loss(compiled(signal), signal.cumsum(1))
                stamps.backward(loss)
                with stamps.optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
                stamps.item(loss.detach())
            count += 1
        if not run.running():
            break
        with stamps.evaluation, torch.no_grad():
            signal = torch.randn(run.pick(2048, 16), 32, device=run.device)
            with stamps.forward:
                error = nn.functional.mse_loss(compiled(signal), signal.cumsum(1))
            scores[shape] = stamps.item(error)
    run.done(count)


if __name__ == "__main__":
    main()
