"""An autoencoder that grows: every sixth step it gets one more layer on each side, which is compiled when it first runs.

Layers are compiled one by one, and the optimizer as well, which has more weights after each growth. All layers differ in width,
so none can use what was compiled for another. The compiler's caches are off. Six steps take a small part of the seconds that a
growth takes to compile: the run is mostly compilation.
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
STEPS, DEEPEST = 6, 24


class Down(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.filter, self.gate = nn.Conv1d(inner, outer, 5, padding=2), nn.Conv1d(inner, outer, 1)
        self.norm = nn.GroupNorm(1, outer)

    def forward(self, hidden):
        return nn.functional.silu(self.norm(self.filter(hidden))) * torch.sigmoid(self.gate(hidden))


class Up(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.filter, self.past = nn.Conv1d(inner, outer, 5, padding=2), nn.Conv1d(inner, outer, 1)
        self.norm = nn.GroupNorm(1, outer)

    def forward(self, hidden):
        return self.past(hidden) + nn.functional.gelu(self.norm(self.filter(hidden)))


class Growing(nn.Module):
    def __init__(self, width, more, backend):
        super().__init__()
        self.width, self.more, self.backend = width, more, backend
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        self.enter, self.leave = nn.Conv1d(2, width, 1), nn.Conv1d(width, 2, 1)

    def grow(self, device):
        """One more layer on each side, between those that are there."""
        inner = self.width + self.more * len(self.downs)
        down, up = Down(inner, inner + self.more).to(device), Up(inner + self.more, inner).to(device)
        for layer in (down, up):
            layer.compile(backend=self.backend, dynamic=False)
        self.downs.append(down)
        self.ups.append(up)
        return [*down.parameters(), *up.parameters()]

    def forward(self, waves):
        hidden = self.enter(waves)
        for layer in self.downs:
            hidden = layer(hidden)
        for layer in reversed(self.ups):
            hidden = layer(hidden)
        return self.leave(hidden)


def waves(rows, length, device):
    """Sums of two waves, and the same with noise."""
    time = torch.linspace(0, 1, length, device=device)
    pace = torch.rand(rows, 2, 2, 1, device=device) * 60
    clean = torch.sin(6.2832 * pace * time).sum(1)
    return clean, clean + 0.3 * torch.randn_like(clean)


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--backend", default="inductor", help="the compiler [inductor]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    # Without this, the ninth layer and all after it would run uncompiled.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    torch.compiler.reset()
    model = Growing(run.pick(32, 4), run.pick(8, 2), args.backend).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    update = torch.compile(optimizer.step, backend=args.backend, dynamic=False)
    rows, length = run.pick((32, 512), (2, 64))
    run.begin()
    stamps.label_compilation()
    count = 0
    while run.running():
        with stamps.step:
            if count % STEPS == 0 and len(model.downs) < DEEPEST:
                optimizer.add_param_group({"params": model.grow(run.device)})
            clean, noisy = waves(rows, length, run.device)
            with stamps.forward:
                loss = nn.functional.smooth_l1_loss(model(noisy), clean)
            stamps.backward(loss)
            with stamps.optimizer:
                update()
                optimizer.zero_grad()
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
