"""The optimizer runs inside the backward pass: a hook updates each weight as soon as its gradient is there. GPU-bound.

So no gradient outlives the pass. The hooks run in the autograd thread: `optimizer` of that thread, while the training thread
waits in `backward`. An autoencoder in pure bf16: a matrix product takes milliseconds. Its input stays on the device.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

import job
import stamps
import torch
from torch import nn

KNOWN = {"verdict": "gpu", "absent": ["DataLoading", "NcclCollective"]}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden)), approximate="tanh"))


def optimize_in_backward(model, fused):
    """Give each weight an optimizer of its own, which steps when the weight's gradient is complete."""
    optimizers = {weight: torch.optim.AdamW([weight], lr=1e-5, fused=fused) for weight in model.parameters()}

    def update(weight):
        with stamps.optimizer:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)


def main():
    run = job.Job(job.arguments(__doc__).parse_args(), KNOWN)
    width, rows = run.pick((4096, 65_536), (16, 32))
    model = nn.Sequential(*[Block(width) for _ in range(run.pick(4, 2))]).to(run.device, dtype=torch.bfloat16)
    optimize_in_backward(model, fused=run.device.type == "cuda")
    clean = torch.randn(rows, width, device=run.device, dtype=torch.bfloat16)
    run.begin()
    count = 0
    while run.running():
        with stamps.step:
            noisy = clean + 0.1 * torch.randn_like(clean)
            with stamps.forward:
                loss = nn.functional.mse_loss(model(noisy), clean)
            stamps.backward(loss)
            stamps.item(loss.detach())
        count += 1
    run.done(count)


if __name__ == "__main__":
    main()
