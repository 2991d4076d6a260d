"""torch.compile with mode reduce-overhead: the compiler wraps its kernels in CUDA graphs; the run starts warm.

A shape that was not seen before arrives after a third of the run and compiles again.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import time

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": None, "absent": ["DataLoading", "NcclCollective"]}


class Steps(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, noisy):
        for layer in self.layers:
            noisy = noisy + nn.functional.gelu(layer(noisy))
        return noisy


def main():
    parser = job.arguments(__doc__)
    parser.add_argument("--mode", default="reduce-overhead", help="mode of torch.compile [reduce-overhead]")
    args = parser.parse_args()
    run = job.Job(args, KNOWN)
    width = run.pick(1024, 32)
    model = Steps(width, run.pick(12, 2)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.device.type == "cuda")
    compiled = torch.compile(model, mode=args.mode, dynamic=False)

    def train(rows):
        with stamps.forward:
            clean = torch.randn(rows, width, device=run.device)
            loss = nn.functional.mse_loss(compiled(clean + 0.1), clean)
        stamps.backward(loss)
        with stamps.optimizer:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.item(loss.detach())

    for _ in range(6):
        train(run.pick(2048, 8))
    run.begin()
    stamps.label_compilation()
    count = 0
    while run.running():
        late = time.monotonic() > run.started + run.seconds / 3
        with stamps.step:
            train(run.pick(1024, 4) if late and count % 3 == 0 else run.pick(2048, 8))
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
